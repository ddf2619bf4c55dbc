#include <tenure/store/delivery.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/store/staging.h>
#include <tenure/store/tensors.h>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>

namespace tenure::store {

namespace {

// Whether two elements may lie at one place. False for any slice of a tensor.
bool may_overlap(const at::Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> steps;  // stride and size
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) == 0) {
      return false;
    }
    if (tensor.size(i) > 1) {
      steps.emplace_back(tensor.stride(i), tensor.size(i));
    }
  }
  std::ranges::sort(steps);
  int64_t reach = 0;  // of the elements that smaller steps lead to
  for (const auto& [stride, size] : steps) {
    if (stride <= reach) {
      return true;
    }
    reach += stride * (size - 1);
  }
  return false;
}

bool is_read_only(const at::Tensor& target) {
  try {
    static_cast<void>(target.storage().mutable_data());
    return false;
  } catch (const c10::Error&) {
    return true;
  }
}

void check_target(const at::Tensor& target, const Handle& handle, const Layout& layout) {
  const auto given = layout_of(target, "fetched into");
  if (given.dtype != layout.dtype) {
    throw InputError(text("the target is of ", dtype_name(given.dtype), " and ",
                          handle_text(handle), " is not: give a tensor of ",
                          dtype_name(layout.dtype)));
  }
  if (given.shape != layout.shape) {
    throw InputError(text("the target has the shape ", target.sizes(), " and what is fetched of ",
                          handle_text(handle), " has ", at::IntArrayRef(layout.shape),
                          ": give a tensor of that shape"));
  }
  if (may_overlap(target)) {
    throw InputError("elements of the target share memory: give a tensor whose elements do not");
  }
  if (target.requires_grad() && target.is_leaf()) {
    throw InputError("the target requires grad: give target.detach()");
  }
  if (is_read_only(target)) {
    throw InputError("the target is read-only: give another, or a clone of it");
  }
}

// What throws is the storage: for all that have it, and on the CPU alone.
void check_access(const GetOptions& options) {
  if (options.access != Access::read_only) {
    return;
  }
  if (options.keep) {
    throw InputError(
        "a tensor that is kept is shared by those who fetch it: give keep or readonly");
  }
  if (!options.into.empty() || (options.device && !options.device->is_cpu())) {
    throw InputError(
        "writes raise only to a tensor that the fetch makes on the CPU: give readonly, or into and "
        "device");
  }
}

// Before anything is fetched, and in our words.
void check_device(const GetOptions& options) {
  if (!options.device || options.device->is_cpu()) {
    return;
  }
  try {
    static_cast<void>(at::empty({0}, at::TensorOptions(*options.device)));
  } catch (const c10::Error& error) {
    // Without the device's library torch lists all that it has.
    std::string_view why = error.what_without_backtrace();
    why = why.starts_with("Could not run") ? "this torch has no such devices"
                                           : why.substr(0, why.find('\n'));
    throw InputError(text("nothing can be fetched to the device ", options.device->str(), " here (",
                          why, "); leave the device out to fetch to the CPU"));
  }
}

bool takes_bytes(const at::Tensor& target) {
  return target.device().is_cpu() && target.is_contiguous() && !target.is_conj() &&
         !target.is_neg();
}

// One fetch of several objects.
class Delivery {
 public:
  Delivery(std::span<const Handle> handles, const GetOptions& options)
      : handles_(handles), options_(options), out_(handles.size()) {
    check_access(options);
    check_device(options);
    if (!options.into.empty() && options.into.size() != handles.size()) {
      throw InputError(text("there are ", handles.size(), " handles and ", options.into.size(),
                            " targets: give one for each"));
    }
    layouts_.reserve(handles.size());
    for (size_t i = 0; i < handles.size(); ++i) {
      layouts_.push_back(extent_of(handles[i].layout, options.rows).layout);
      if (!options.into.empty()) {
        check_target(options.into[i], handles[i], layouts_[i]);
      }
    }
  }

  Parcel run(Client& client, Arrivals& arrivals, Client::Deadline deadline) {
    const auto since = arrivals.moment();
    take_kept(arrivals);
    auto got = client.get(wants_, deadline, [this](size_t want, uint64_t /*bytes*/) {
      const auto tensor = memory_for(which_[want]);
      return static_cast<std::byte*>(tensor.mutable_data_ptr());
    });
    for (size_t want = 0; want < got.size(); ++want) {
      arrive(which_[want], std::move(got[want]), arrivals);
    }
    for (size_t i = 0; i < out_.size(); ++i) {
      deliver(i);
    }
    if (options_.more) {
      wants_.clear();
    }
    return {.tensors = std::move(out_),
            .fetched = std::move(wants_),
            .to_keep = std::move(to_keep_),
            .since = since};
  }

 private:
  [[nodiscard]] bool whole() const { return options_.rows.all(); }
  [[nodiscard]] bool straight_into(size_t i) const {
    return !options_.into.empty() && takes_bytes(options_.into[i]);
  }

  void take_kept(Arrivals& arrivals) {
    for (size_t i = 0; i < handles_.size(); ++i) {
      if (options_.keep && whole()) {
        if (auto tensor = arrivals.kept(handles_[i])) {
          out_[i] = std::move(*tensor);
          continue;
        }
      }
      which_.push_back(i);
      wants_.push_back({.handle = &handles_[i],
                        .rows = options_.rows,
                        .copied = straight_into(i),
                        .more = true,
                        .over = options_.over});
    }
  }

  at::Tensor memory_for(size_t i) {
    out_[i] = straight_into(i) ? options_.into[i] : empty_tensor(layouts_[i]);
    return out_[i];
  }

  void arrive(size_t i, Got got, Arrivals& arrivals) {
    const std::shared_ptr<const Mapping> mapping = std::move(got.mapping);
    if (mapping != nullptr) {
      out_[i] = tensor_over(mapping, layouts_[i]);
    } else if (!out_[i].defined()) {  // no bytes at all
      memory_for(i);
    }
    if (straight_into(i)) {
      return;
    }
    if (whole()) {
      arrivals.note(out_[i], handles_[i], mapping);
    }
    if (options_.keep && whole()) {
      to_keep_.emplace_back(&handles_[i], out_[i]);
    }
  }

  void deliver(size_t i) {
    if (!options_.into.empty()) {
      const auto& target = options_.into[i];
      if (target.is_same(out_[i])) {
        if (!target.is_inference()) {
          target.unsafeGetTensorImpl()->bump_version();
        }
        return;
      }
      target.detach().copy_(out_[i]);
      out_[i] = target;
      return;
    }
    if (options_.device && !options_.device->is_cpu()) {
      auto there = at::empty(layouts_[i].shape, out_[i].options().device(*options_.device));
      copy_to_device(bytes_of(out_[i]), there);
      out_[i] = std::move(there);
      return;
    }
    if (options_.access == Access::read_only) {
      out_[i].storage().unsafeGetStorageImpl()->set_throw_on_mutable_data_ptr();
    }
  }

  std::span<const Handle> handles_;
  const GetOptions& options_;
  std::vector<Layout> layouts_;
  std::vector<at::Tensor> out_;
  std::vector<Want> wants_;
  std::vector<size_t> which_;  // of the handles each want is
  std::vector<std::pair<const Handle*, at::Tensor>> to_keep_;
};

}  // namespace

Parcel fetch_tensors(Client& client, Arrivals& arrivals, std::span<const Handle> handles,
                     const GetOptions& options, Client::Deadline deadline) {
  return Delivery(handles, options).run(client, arrivals, deadline);
}

// Only when it is there: what could not be delivered is there for another try.
void accept(Client& client, Arrivals& arrivals, const Parcel& parcel) {
  for (const auto& [handle, tensor] : parcel.to_keep) {
    arrivals.keep(*handle, tensor, parcel.since);
  }
  client.fetched(parcel.fetched);
}

}  // namespace tenure::store
