#include <tenure/pipeline/products.h>

#include <tenure/core/torch_compat.h>

#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <typeinfo>

namespace tenure::pipeline {
namespace {

namespace nodes = torch::autograd::generated;
using torch::autograd::Node;
using torch::autograd::SavedVariable;

// Not by their names, which a node makes anew each time it is asked.
template <class... Products>
bool is_one_of(const Node& node) {
  const auto& type = typeid(node);
  return ((type == typeid(Products)) || ...);
}

template <class Product>
bool reads(const Node& node, SavedVariable Product::* a, SavedVariable Product::* b) {
  if (typeid(node) != typeid(Product)) {
    return false;
  }
  const auto& product = static_cast<const Product&>(node);
  return compat::has_hooks(product.*a) || compat::has_hooks(product.*b);
}

}  // namespace

bool is_product(const Node& node) {
  return is_one_of<nodes::AddmmBackward0, nodes::MmBackward0, nodes::LinearBackward0,
                   nodes::BmmBackward0, nodes::BaddbmmBackward0, nodes::ConvolutionBackward0>(node);
}

bool reads_through_hooks(const Node& node) {
  return reads(node, &nodes::AddmmBackward0::mat1_, &nodes::AddmmBackward0::mat2_) ||
         reads(node, &nodes::MmBackward0::self_, &nodes::MmBackward0::mat2_) ||
         reads(node, &nodes::LinearBackward0::input_, &nodes::LinearBackward0::weight_) ||
         reads(node, &nodes::BmmBackward0::self_, &nodes::BmmBackward0::mat2_) ||
         reads(node, &nodes::BaddbmmBackward0::batch1_, &nodes::BaddbmmBackward0::batch2_) ||
         reads(node, &nodes::ConvolutionBackward0::input_, &nodes::ConvolutionBackward0::weight_);
}

}  // namespace tenure::pipeline
