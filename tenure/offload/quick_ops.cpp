#include <tenure/offload/quick_ops.h>

#include <tenure/offload/watched.h>

#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_log_softmax_ops.h>
#include <ATen/ops/_softmax_backward_data_ops.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/_to_copy_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/cat_ops.h>
#include <ATen/ops/clone_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/exp_ops.h>
#include <ATen/ops/gelu_backward_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/mean_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/native_layer_norm_backward_ops.h>
#include <ATen/ops/native_layer_norm_ops.h>
#include <ATen/ops/neg_ops.h>
#include <ATen/ops/pow_ops.h>
#include <ATen/ops/relu_ops.h>
#include <ATen/ops/rsqrt_ops.h>
#include <ATen/ops/sigmoid_ops.h>
#include <ATen/ops/silu_backward_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/sum_ops.h>
#include <ATen/ops/tanh_ops.h>
#include <ATen/ops/threshold_backward_ops.h>
#include <c10/util/MaybeOwned.h>

#include <memory>
#include <optional>
#include <tuple>
#include <utility>

namespace tenure::offload {
namespace {

using c10::DispatchKeySet;

template <class... Outputs>
void push_outputs(torch::jit::Stack& stack, std::tuple<Outputs...>&& outputs) {
  std::apply([&](auto&&... each) { torch::jit::push(stack, std::move(each)...); },
             std::move(outputs));
}
void push_outputs(torch::jit::Stack& stack, at::Tensor&& output) {
  torch::jit::push(stack, std::move(output));
}

// Note [Borrowed by a box]
// A tensor that Python knows keeps its object alive for as long as C++ refers to it as well: the
// second reference takes the GIL, and so does giving it back. The caller has its tensors until the
// call is over, so boxes of arguments count none, and are emptied, not destroyed.
void add_borrowed(torch::jit::Stack& stack, const at::Tensor& tensor) {
  stack.emplace_back(c10::MaybeOwnedTraits<at::Tensor>::createBorrow(tensor));
}
void add_borrowed(torch::jit::Stack& stack, const std::optional<at::Tensor>& tensor) {
  if (tensor) {
    add_borrowed(stack, *tensor);
  } else {
    stack.emplace_back();
  }
}
template <class Other>
void add_borrowed(torch::jit::Stack& stack, const Other& other) {
  stack.emplace_back(other);
}
void give_back(torch::jit::Stack& stack) {
  for (auto& box : stack) {
    if (box.isTensor()) {
      c10::MaybeOwnedTraits<c10::IValue>::destroyBorrow(box);
    }
  }
  stack.clear();
}

// The memory of this thread's last stack, for the next one.
torch::jit::Stack& spare() {
  thread_local torch::jit::Stack here;
  return here;
}

// Boxes what it is asked for, and calls the operator with what it was called with.
template <class Op, class Result, class... Arguments>
class Unboxed final : public Invocation {
 public:
  explicit Unboxed(DispatchKeySet keys, Arguments&&... arguments)
      : keys_(keys), arguments_(std::forward<Arguments>(arguments)...) {}
  Unboxed(const Unboxed&) = delete;
  Unboxed& operator=(const Unboxed&) = delete;
  ~Unboxed() override {
    if (!ran_) {
      give_back(stack_);
    }
    if (stack_.capacity() > 0) {
      stack_.clear();
      stack_.swap(spare());
    }
  }

  const torch::jit::Stack& arguments() override {
    if (stack_.empty()) {
      stack_.swap(spare());
      stack_.reserve(sizeof...(Arguments));
      std::apply([&](const auto&... each) { (add_borrowed(stack_, each), ...); }, arguments_);
    }
    return stack_;
  }

  void run() override {
    give_back(stack_);
    ran_ = true;
    const c10::impl::ExcludeDispatchKeyGuard unseen(kWatcherKey);
    result_.emplace(std::apply(
        [&](auto&&... each) { return Op::redispatch(keys_, std::forward<Arguments>(each)...); },
        arguments_));
  }

  const torch::jit::Stack& outputs() override {
    if (result_) {
      push_outputs(stack_, *std::move(result_));
      result_.reset();
    }
    return stack_;
  }

  Result result() {
    return result_ ? *std::move(result_) : c10::impl::PopResult<Result>::call(stack_);
  }

 private:
  DispatchKeySet keys_;
  std::tuple<Arguments&&...> arguments_;
  torch::jit::Stack stack_;  // what it is called with, borrowed; once it ran: what it made
  bool ran_ = false;
  std::optional<Result> result_;
};

template <class Op, class Schema = typename Op::schema>
class Quick;

template <class Op, class Result, class... Arguments>
class Quick<Op, Result(Arguments...)> final : public c10::OperatorKernel {
 public:
  explicit Quick(const c10::OperatorHandle& op) : op_(op) {}

  // NOLINTNEXTLINE(performance-unnecessary-value-param): the schema's own types
  Result operator()(DispatchKeySet keys, Arguments... arguments) {
    const auto below = keys & kBelowWatcher;
    auto* watcher = t_watcher;
    if (watcher == nullptr || below.has_any(kBeforeWatcher)) {
      return Op::redispatch(below, std::forward<Arguments>(arguments)...);
    }
    Unboxed<Op, Result, Arguments...> invocation(below, std::forward<Arguments>(arguments)...);
    watcher->call(op_, invocation);
    return invocation.result();
  }

 private:
  Operator op_;
};

template <class Op>
bool make(const c10::OperatorHandle& op, std::optional<c10::KernelFunction>& out) {
  if (op.operator_name().name != Op::name ||
      op.operator_name().overload_name != Op::overload_name) {
    return false;
  }
  out = c10::KernelFunction::makeFromUnboxedFunctor<false, Quick<Op>>(
      std::make_unique<Quick<Op>>(op));
  return true;
}

template <class... Ops>
std::optional<c10::KernelFunction> one_of(const c10::OperatorHandle& op) {
  std::optional<c10::KernelFunction> out;
  (void)(make<Ops>(op, out) || ...);
  return out;
}

}  // namespace

std::optional<c10::KernelFunction> quick_kernel(const c10::OperatorHandle& op) {
  namespace ops = at::_ops;
  return one_of<ops::mul_Tensor, ops::add_Tensor, ops::sub_Tensor, ops::div_Tensor, ops::mul_Scalar,
                ops::add_Scalar, ops::div_Scalar, ops::neg, ops::pow_Tensor_Scalar, ops::rsqrt,
                ops::exp, ops::tanh, ops::sigmoid, ops::relu, ops::silu, ops::gelu, ops::mm,
                ops::addmm, ops::bmm, ops::_to_copy, ops::cat, ops::clone, ops::mean_dim,
                ops::sum_dim_IntList, ops::sum, ops::embedding, ops::native_layer_norm,
                ops::_softmax, ops::_log_softmax, ops::silu_backward, ops::gelu_backward,
                ops::threshold_backward, ops::_softmax_backward_data,
                ops::native_layer_norm_backward>(op);
}

}  // namespace tenure::offload
