// The slot of interpose.h, for its kernels alone.
#pragma once

#include <tenure/core/fast_tls.h>
#include <tenure/offload/interpose.h>

#include <c10/core/DispatchKeySet.h>

namespace tenure::offload {

inline constexpr auto kWatcherKey = c10::DispatchKey::TESTING_ONLY_GenericMode;
inline constexpr c10::DispatchKeySet kBelowWatcher(c10::DispatchKeySet::FULL_AFTER, kWatcherKey);
// What is let through first, and then calls operators of its own.
inline constexpr auto kBeforeWatcher =
    c10::autocast_dispatch_keyset |
    c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                         c10::DispatchKey::FuncTorchDynamicLayerBackMode,
                         c10::DispatchKey::FuncTorchGradWrapper,
                         c10::DispatchKey::FuncTorchBatched});

// Of this thread.
extern TENURE_FAST_TLS Watcher* t_watcher;

}  // namespace tenure::offload
