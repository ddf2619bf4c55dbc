// Delivery: what is fetched becomes tensors. Any thread.
#pragma once

#include <tenure/store/arrivals.h>
#include <tenure/store/client.h>
#include <tenure/store/handle.h>
#include <tenure/store/options.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace tenure::store {

// What a fetch brought. Until it is accepted it does not count as fetched, and nothing is kept of
// it. Refers to the handles that were asked for.
struct Parcel {
  std::vector<at::Tensor> tensors;  // in the order of the handles
  std::vector<Want> fetched;        // to be told
  std::vector<std::pair<const Handle*, at::Tensor>> to_keep;
  uint64_t since = 0;  // of Arrivals, when it began
};

// All or nothing. Throws InputError for a target that does not fit, before anything is fetched; and
// what Client::get throws: targets may then be half written.
Parcel fetch_tensors(Client& client, Arrivals& arrivals, std::span<const Handle> handles,
                     const GetOptions& options, Client::Deadline deadline);
// The caller has them.
void accept(Client& client, Arrivals& arrivals, const Parcel& parcel);

}  // namespace tenure::store
