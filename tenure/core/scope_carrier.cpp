// Brings a scope to the threads that autograd uses. See Note [Which scope is current].
//
// ThreadLocalDebugInfo is the one thing that the engine, and every other pool of torch, takes along
// from thread to thread. It is a stack of kinds that others use too: torch.profiler pops its own
// entry and throws when something lies on top of it. So each thread pushes one holder, once, below
// the profiler's entry, and never pops it; entering and leaving scopes only writes to the holder.
#include <tenure/core/scope.h>
#include <tenure/core/torch_compat.h>

#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <memory>

namespace tenure {
namespace {

using c10::ThreadLocalDebugInfo;

// Written by the thread that owns it, read by threads that work for it.
struct Holder final : c10::DebugInfoBase {
  std::atomic<uint64_t> own{0};
  std::atomic<uint64_t> language{0};
  std::atomic<void*> thread{nullptr};
  std::atomic<uint64_t> version{0};
};

thread_local std::shared_ptr<Holder> mine;

void push_below_profiler(const std::shared_ptr<Holder>& holder) {
  std::shared_ptr<c10::DebugInfoBase> profiler;
  const auto kind = c10::DebugInfoKind::PROFILER_STATE;
  if (ThreadLocalDebugInfo::get(kind) != nullptr) {
    try {
      profiler = ThreadLocalDebugInfo::_pop(kind);
    } catch (const c10::Error&) {
      return;  // something lies above the profiler: leave the stack alone, try at the next scope
    }
  }
  ThreadLocalDebugInfo::_push(compat::kScopeInfo, holder);
  if (profiler) {
    ThreadLocalDebugInfo::_push(kind, std::move(profiler));
  }
}

void carry(const CarriedScope& scope) {
  const bool nothing = scope.own == ScopeId::process && scope.language == ScopeId::process;
  if (!mine) {
    if (nothing) {
      return;
    }
    mine = std::make_shared<Holder>();
  }
  mine->own.store(static_cast<uint64_t>(scope.own), std::memory_order_relaxed);
  mine->language.store(static_cast<uint64_t>(scope.language), std::memory_order_relaxed);
  mine->thread.store(scope.thread, std::memory_order_relaxed);
  mine->version.store(scope.version, std::memory_order_relaxed);
  if (!nothing && ThreadLocalDebugInfo::get(compat::kScopeInfo) != mine.get()) {
    push_below_profiler(mine);
  }
}

std::optional<CarriedScope> carried(bool& waiting) {
  const auto* holder = static_cast<Holder*>(ThreadLocalDebugInfo::get(compat::kScopeInfo));
  if (holder == nullptr || holder == mine.get()) {
    return std::nullopt;
  }
  waiting = compat::in_backward();
  return CarriedScope{ScopeId{holder->own.load(std::memory_order_relaxed)},
                      ScopeId{holder->language.load(std::memory_order_relaxed)},
                      holder->thread.load(std::memory_order_relaxed),
                      holder->version.load(std::memory_order_relaxed)};
}

constexpr ScopeCarrier kCarrier{carry, carried};
[[maybe_unused]] const bool installed = (install(&kCarrier), true);

}  // namespace
}  // namespace tenure
