#include <tenure/offload/recipe.h>

#include <tenure/core/hold.h>
#include <tenure/core/text.h>

#include <c10/util/hash.h>

#include <algorithm>
#include <utility>

namespace tenure::offload {
namespace {

bool can_be_told(const at::Tensor& tensor) {
  return is_plain(tensor) && !tensor.is_conj() && !tensor.is_neg();
}

bool has_optional_tensors(const c10::IValue& argument) {
  return argument.isList() && std::ranges::any_of(argument.toListRef(), [](const auto& element) {
           return element.isTensor();
         });
}

}  // namespace

Value::Value(const at::Tensor& tensor, uint32_t place)
    : storage(tensor.storage()),
      version(tensor),
      bytes(tensor.storage().nbytes()),
      index(place),
      geometry(geometry_of(tensor)) {}

void Value::hold_for_good(const c10::Storage& content) {
  kept = hold(content, owner, ScopeId::process);
  memo.release();
  call = nullptr;
  version = Version();
  board = c10::VariableVersion(0);
}

Call::Call(const Operator& called, c10::Stream on, NameId in)
    : op(&called), module(in), stream(on) {}

bool is_number(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

bool each_tensor(const Operator& op, const torch::jit::Stack& stack,
                 c10::function_ref<bool(const Argument&)> each) {
  const auto* arguments = stack.data() + stack.size() - op.arguments;
  for (uint32_t i = 0; i < op.arguments; ++i) {
    const auto& argument = arguments[i];
    if (!argument.isPtrType()) {
      continue;  // nothing, or a number
    }
    if (argument.isTensor()) {
      const auto& tensor = argument.toTensor();
      if (tensor.defined() && !(can_be_told(tensor) && each({.argument = i, .tensor = tensor}))) {
        return false;
      }
    } else if (argument.isTensorList()) {
      const auto list = argument.toTensorVector();
      for (uint32_t k = 0; k < list.size(); ++k) {
        if (!list[k].defined() || is_number(list[k]) || !can_be_told(list[k]) ||
            !each({.argument = i, .element = k, .tensor = list[k]})) {
          return false;
        }
      }
    } else if (argument.isGenerator() || argument.isObject() || argument.isStorage() ||
               has_optional_tensors(argument)) {
      return false;
    }
  }
  return true;
}

std::optional<uint64_t> sizes_of_call(const Operator& op, const torch::jit::Stack& stack) {
  auto hash = c10::get_hash(&op);
  bool any = false;
  each_tensor(op, stack, [&](const Argument& argument) {
    if (!is_number(argument.tensor)) {
      any = true;
      for (const auto size : argument.tensor.sizes()) {
        hash = c10::hash_combine(hash, c10::get_hash(size));
      }
      hash = c10::hash_combine(hash, c10::get_hash(argument.tensor.dim()));
    }
    return true;
  });
  return any ? std::optional<uint64_t>(hash) : std::nullopt;
}

const at::Tensor* output_at(const torch::jit::Stack& stack, const Operator& op, uint32_t place) {
  const auto& value = stack[stack.size() - op.returns + place];
  const auto* tensor = value.isTensor() ? &value.toTensor() : nullptr;
  return tensor != nullptr && tensor->defined() && is_plain(*tensor) ? tensor : nullptr;
}

std::string call_text(NameId op, NameId module) {
  return module == NameId::none ? std::string(name_of(op))
                                : text(name_of(op), " in ", name_of(module));
}

}  // namespace tenure::offload
