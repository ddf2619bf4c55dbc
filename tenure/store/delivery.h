// Delivery: what is fetched becomes tensors. Any thread.
#pragma once

#include <tenure/store/arrivals.h>
#include <tenure/store/client.h>
#include <tenure/store/handle.h>
#include <tenure/store/options.h>

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

namespace tenure::store {

// In the order of the handles; all or nothing. Throws InputError for a target that does not fit,
// before anything is fetched; and what Client::get throws: targets may then be half written.
std::vector<at::Tensor> fetch_tensors(Client& client, Arrivals& arrivals,
                                      std::span<const Handle> handles, const GetOptions& options,
                                      Client::Deadline deadline);

}  // namespace tenure::store
