#include <tenure/offload/interpose.h>

#include <tenure/core/error.h>
#include <tenure/offload/quick_ops.h>
#include <tenure/offload/watched.h>

#include <ATen/core/boxing/KernelFunction.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <string_view>
#include <vector>

namespace tenure::offload {

TENURE_FAST_TLS Watcher* t_watcher = nullptr;

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// Beside those that torch tags as pointwise. Not here: what takes no tensors (who fills the memory
// of empty() or zeros() may do it unseen), batch norms (they write running figures that their
// schema does not tell of), and whatever draws random numbers or talks to other processes.
constexpr std::array<std::string_view, 66> kPure{
    "aten::_log_softmax",
    "aten::_softmax",
    "aten::_to_copy",
    "aten::_unsafe_index",
    "aten::_weight_norm_interface",
    "aten::addbmm",
    "aten::addmm",
    "aten::addmv",
    "aten::addr",
    "aten::amax",
    "aten::amin",
    "aten::argmax",
    "aten::argmin",
    "aten::avg_pool2d",
    "aten::avg_pool3d",
    "aten::baddbmm",
    "aten::bmm",
    "aten::cat",
    "aten::clone",
    "aten::constant_pad_nd",
    "aten::convolution",
    "aten::cummax",
    "aten::cumprod",
    "aten::cumsum",
    "aten::dot",
    "aten::embedding",
    "aten::flip",
    "aten::gather",
    "aten::glu",
    "aten::index_select",
    "aten::linalg_vector_norm",
    "aten::logsumexp",
    "aten::masked_fill",
    "aten::max",
    "aten::max_pool2d_with_indices",
    "aten::mean",
    "aten::min",
    "aten::mm",
    "aten::mv",
    "aten::native_group_norm",
    "aten::native_layer_norm",
    "aten::_fused_rms_norm",
    "aten::norm",
    "aten::pixel_shuffle",
    "aten::pixel_unshuffle",
    "aten::prod",
    "aten::reflection_pad1d",
    "aten::reflection_pad2d",
    "aten::repeat",
    "aten::replication_pad2d",
    "aten::roll",
    "aten::scatter",
    "aten::scatter_add",
    "aten::sort",
    "aten::stack",
    "aten::std",
    "aten::sum",
    "aten::topk",
    "aten::tril",
    "aten::triu",
    "aten::upsample_bilinear2d",
    "aten::upsample_nearest2d",
    "aten::var",
    "aten::var_mean",
    "aten::std_mean",
    "aten::where",
};

// Those that write running figures without their schema telling.
constexpr std::array<std::string_view, 6> kRunning{
    "aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts",
    "aten::batch_norm_update_stats", "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",       "aten::native_batch_norm",
};

bool is_pure(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto& name = op.operator_name().name;
  const auto takes_tensors = std::ranges::any_of(schema.arguments(), [](const auto& argument) {
    const auto kind = argument.type()->kind();
    return kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType;
  });
  const auto gives_tensors = std::ranges::all_of(schema.returns(), [](const auto& value) {
    return value.type()->kind() == c10::TypeKind::TensorType && value.alias_info() == nullptr;
  });
  if (schema.is_mutable() || !takes_tensors || !gives_tensors || !name.starts_with("aten::") ||
      op.hasTag(at::Tag::nondeterministic_seeded)) {
    return false;
  }
  return op.hasTag(at::Tag::pointwise) || std::ranges::find(kPure, name) != kPure.end();
}

// Whether it makes or writes tensors itself. Not who takes memory and nothing else: buffers of
// messages are, in one step and not in the next, and what is in them is somebody else's work.
bool is_of_interest(const c10::OperatorHandle& op) {
  if (!op.hasSchema() || op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd)) {
    return false;
  }
  const auto& name = op.operator_name().name;
  if (name == "aten::empty" || name == "aten::empty_strided") {
    return false;
  }
  const auto& schema = op.schema();
  if (schema.is_mutable()) {
    return true;
  }
  return std::ranges::any_of(schema.returns(), [](const auto& value) {
    const auto kind = value.type()->kind();
    return value.alias_info() == nullptr &&
           (kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType);
  });
}

std::shared_ptr<Watcher>& owner() {
  thread_local std::shared_ptr<Watcher> here;
  return here;
}

class Boxed final : public Invocation {
 public:
  Boxed(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack& stack)
      : op_(op), keys_(keys), stack_(stack) {}

  const torch::jit::Stack& arguments() override { return stack_; }
  void run() override {
    const c10::impl::ExcludeDispatchKeyGuard unseen(kWatcherKey);
    op_.redispatchBoxed(keys_, &stack_);
  }
  const torch::jit::Stack& outputs() override { return stack_; }

 private:
  const c10::OperatorHandle& op_;
  DispatchKeySet keys_;
  torch::jit::Stack& stack_;
};

class Kernel final : public c10::OperatorKernel {
 public:
  explicit Kernel(const c10::OperatorHandle& op) : op_(op) {}

  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto below = keys & kBelowWatcher;
    auto* watcher = t_watcher;
    if (watcher == nullptr || below.has_any(kBeforeWatcher)) {
      op.redispatchBoxed(below, stack);
      return;
    }
    Boxed boxed(op, below, *stack);
    watcher->call(op_, boxed);
  }

 private:
  Operator op_;
};

// Remembers operators until there is a moment to give them a kernel: the dispatcher holds its lock
// while it tells of one.
class Registry final : public c10::OpRegistrationListener {
 public:
  void onOperatorRegistered(const c10::OperatorHandle& op) override {
    std::lock_guard lock(mutex_);
    waiting_.push_back(op.operator_name());
  }
  void onOperatorDeregistered(const c10::OperatorHandle& op) override {
    std::lock_guard lock(mutex_);
    std::erase(waiting_, op.operator_name());
  }

  void install() {
    std::vector<c10::OperatorName> names;
    {
      std::lock_guard lock(mutex_);
      names.swap(waiting_);
    }
    for (const auto& name : names) {
      const auto op = c10::Dispatcher::singleton().findOp(name);
      if (op && is_of_interest(*op) && !op->hasKernelForDispatchKey(kWatcherKey)) {
        auto kernel = quick_kernel(*op);
        if (!kernel) {
          kernel = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(*op));
        }
        kernels_.push_back(c10::Dispatcher::singleton().registerImpl(
            name, kWatcherKey, *std::move(kernel), std::nullopt, nullptr,
            "tenure: records what outputs are made of"));
      }
    }
  }

 private:
  std::mutex mutex_;
  std::vector<c10::OperatorName> waiting_;
  std::vector<c10::RegistrationHandleRAII> kernels_;
};

// Lives forever, as the dispatcher does.
Registry& registry() {
  static auto* const registrations = new std::vector<c10::RegistrationHandleRAII>;
  static auto* const here = [] {
    auto& dispatcher = c10::Dispatcher::singleton();
    registrations->push_back(dispatcher.registerFallback(
        kWatcherKey, c10::KernelFunction::makeFallthrough(), "tenure: all others are let through"));
    auto listener = std::make_unique<Registry>();
    auto* made = listener.get();
    registrations->push_back(dispatcher.addRegistrationListener(std::move(listener)));
    return made;
  }();
  return *here;
}

}  // namespace

Operator::Operator(const c10::OperatorHandle& op)
    : handle(op),
      name(intern(fitting(op.operator_name().name))),
      arguments(static_cast<uint32_t>(op.schema().arguments().size())),
      returns(static_cast<uint32_t>(op.schema().returns().size())),
      pure(is_pure(op)) {
  const auto& schema = op.schema();
  for (uint32_t i = 0; i < arguments; ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      writes.push_back(i);
    }
  }
  if (writes.empty() && std::ranges::find(kRunning, op.operator_name().name) != kRunning.end()) {
    for (uint32_t i = 0; i < arguments; ++i) {
      if (schema.arguments()[i].name().starts_with("running_")) {
        writes.push_back(i);
      }
    }
    writes_if = schema.argumentIndexWithName("training");
  }
}

void watch_calls(std::shared_ptr<Watcher> watcher) {
  static std::mutex mutex;
  if (t_watcher != nullptr) {
    throw InputError(
        "a Fit is entered on this thread already: leave it first, or give one Fit all the models");
  }
  {
    std::lock_guard lock(mutex);
    registry().install();
  }
  owner() = std::move(watcher);
  t_watcher = owner().get();
  c10::impl::tls_set_dispatch_key_included(kWatcherKey, true);
}

void unwatch_calls(const Watcher& watcher) {
  if (t_watcher != &watcher) {
    return;
  }
  c10::impl::tls_set_dispatch_key_included(kWatcherKey, false);
  t_watcher = nullptr;
  owner().reset();
}

Plainly::Plainly()
    : keys_(c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
            c10::python_ks | DispatchKeySet(kWatcherKey)) {}

}  // namespace tenure::offload
