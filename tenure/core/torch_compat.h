// The one file that knows that torch has versions. Everything else says what it means by the names
// below, and compiles against any torch that these can be written for.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/headeronly/version.h>

#include <cstdint>
#include <string_view>

#define TENURE_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||         \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

// Declared here because its header, graph_task.h, takes ten seconds to compile.
namespace torch::autograd {
// NOLINTBEGIN(readability-redundant-declaration)
TORCH_API int get_current_graph_task_id();
TORCH_API bool get_current_graph_task_keep_graph();
// NOLINTEND(readability-redundant-declaration)
}  // namespace torch::autograd

namespace tenure::compat {

// Whether the calling thread runs a node of a backward pass.
inline bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

// Whether the backward pass that the calling thread works for was told to retain its graph.
inline bool backward_retains_graph() {
  return in_backward() && torch::autograd::get_current_graph_task_keep_graph();
}

// Whether hooks pack and unpack what a node has saved; torch that does not tell: as if.
template <class SavedVariable>
bool has_hooks(const SavedVariable& saved) {
  if constexpr (requires { saved.has_hooks(); }) {
    return saved.has_hooks();
  } else {
    return true;
  }
}

// A slot of our own in ThreadLocalDebugInfo. It became an open set of kinds in 2.13; before that an
// enum with a fixed underlying type, in which any unused value will do.
#if TENURE_TORCH_AT_LEAST(2, 13)
inline constexpr std::string_view kScopeInfoName = "TENURE_SCOPE";
inline const c10::DebugInfoKind kScopeInfo(&kScopeInfoName);
#else
inline constexpr auto kScopeInfo = static_cast<c10::DebugInfoKind>(0xE7);
#endif

namespace detail {

// Names a private member through an explicit instantiation, which the language exempts from access
// checks. torch before 2.13 can set the flag that makes a storage raise but cannot clear it.
template <class Tag, auto Member>
struct PrivateMember {
  friend constexpr auto member(Tag /*tag*/) { return Member; }
};
struct AccessRaises {
  friend constexpr auto member(AccessRaises);
};
#if !TENURE_TORCH_AT_LEAST(2, 13)
template struct PrivateMember<AccessRaises, &c10::StorageImpl::throw_on_immutable_data_ptr_>;
#endif

}  // namespace detail

// From now on any read of the storage's data raises `text`.
inline void make_access_raise(c10::StorageImpl& storage, std::string text) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(text));
}

// Undoes make_access_raise and gives the storage its new data, without touching any version
// counter.
inline void give_data(c10::StorageImpl& storage, c10::DataPtr&& data) {
#if TENURE_TORCH_AT_LEAST(2, 13)
  storage.clear_data_ptr_access_error_msg_();
#else
  storage.*member(detail::AccessRaises()) = false;
  storage.get_extra_meta().custom_data_ptr_error_msg_.reset();
#endif
  storage.set_data_ptr_noswap(std::move(data));
}

}  // namespace tenure::compat
