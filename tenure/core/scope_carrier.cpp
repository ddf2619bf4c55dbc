// Brings a scope to the threads that autograd uses. See Note [Which scope is current].
//
// ThreadLocalDebugInfo is the one thing that the engine, and every other pool of torch, takes along
// from thread to thread. It is a stack of kinds that others use too: torch.profiler pops its own
// entry and throws when something lies on top of it. So each thread pushes one holder, once, below
// the profiler's entry, and never pops it; entering and leaving scopes only writes to the holder.
// A thread that works for another one sees that one's holder instead. When it opens scopes of its
// own meanwhile, its holder covers the other, and is taken away with the last of them.
#include <tenure/core/fast_tls.h>
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
  bool covers_another = false;  // for the owning thread alone
};

TENURE_FAST_TLS Holder* mine = nullptr;
// Shared: threads that work for this one may outlive it.
struct KeptHolder {
  std::shared_ptr<Holder> holder;
  ~KeptHolder() { mine = nullptr; }
};
thread_local KeptHolder mine_kept;

// Changes the stack with the profiler's entry, if there is one, taken off meanwhile. Where another
// entry is in the way the stack stays as it is: the next scope tries again.
template <class Change>
void below_profiler(Change change) {
  std::shared_ptr<c10::DebugInfoBase> profiler;
  const auto kind = c10::DebugInfoKind::PROFILER_STATE;
  try {
    if (ThreadLocalDebugInfo::get(kind) != nullptr) {
      profiler = ThreadLocalDebugInfo::_pop(kind);
    }
    change();
    // NOLINTNEXTLINE(bugprone-empty-catch): what was to be popped is not on top, see above
  } catch (const c10::Error&) {
  }
  if (profiler) {
    ThreadLocalDebugInfo::_push(kind, std::move(profiler));
  }
}

void push_mine(const c10::DebugInfoBase* visible) {
  below_profiler([] { ThreadLocalDebugInfo::_push(compat::kScopeInfo, mine_kept.holder); });
  mine->covers_another = visible != nullptr;
}

void uncover_other() {
  below_profiler([] { ThreadLocalDebugInfo::_pop(compat::kScopeInfo); });
}

void carry(const CarriedScope& scope) {
  const bool nothing = scope.own == ScopeId::process && scope.language == ScopeId::process;
  if (mine == nullptr) {
    if (nothing) {
      return;
    }
    mine_kept.holder = std::make_shared<Holder>();
    mine = mine_kept.holder.get();
  }
  mine->own.store(static_cast<uint64_t>(scope.own), std::memory_order_relaxed);
  mine->language.store(static_cast<uint64_t>(scope.language), std::memory_order_relaxed);
  mine->thread.store(scope.thread, std::memory_order_relaxed);
  mine->version.store(scope.version, std::memory_order_relaxed);
  const auto* visible = ThreadLocalDebugInfo::get(compat::kScopeInfo);
  if (!nothing && visible != mine) {
    push_mine(visible);
  } else if (nothing && visible == mine && mine->covers_another) {
    uncover_other();
  }
}

std::optional<CarriedScope> carried(bool& waiting) {
  const auto* holder = static_cast<Holder*>(ThreadLocalDebugInfo::get(compat::kScopeInfo));
  if (holder == nullptr || holder == mine) {
    return std::nullopt;
  }
  waiting = compat::in_backward();
  return CarriedScope{ScopeId{holder->own.load(std::memory_order_relaxed)},
                      ScopeId{holder->language.load(std::memory_order_relaxed)},
                      holder->thread.load(std::memory_order_relaxed),
                      holder->version.load(std::memory_order_relaxed)};
}

constexpr ScopeCarrier kCarrier{carry, carried};
[[maybe_unused]] const bool kInstalled = (install(&kCarrier), true);

}  // namespace
}  // namespace tenure
