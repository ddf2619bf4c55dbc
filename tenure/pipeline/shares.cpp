#include <tenure/pipeline/shares.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <numeric>

namespace tenure::pipeline {
namespace {

std::vector<Share> shares_of(const std::vector<int64_t>& rows, uint32_t microbatches) {
  std::vector<Share> out(microbatches);
  const auto all = std::reduce(rows.begin(), rows.end());
  for (size_t i = 0; i < rows.size(); ++i) {
    out.at(i) = {.rows = rows[i], .of = all};
  }
  return out;
}

}  // namespace

Shares::Shares(uint32_t microbatches, const std::vector<int64_t>& batch,
               const std::vector<int64_t>& target)
    : batch_(shares_of(batch, microbatches)), target_(shares_of(target, microbatches)) {}

double Shares::weight_of(uint32_t microbatch) const {
  for (const auto* shares : {&batch_, &target_}) {
    if (const auto& share = (*shares)[microbatch]; share.of > 0) {
      return static_cast<double>(share.rows) / static_cast<double>(share.of);
    }
  }
  return 1.0 / static_cast<double>(batch_.size());
}

void Shares::check_target(uint32_t microbatch) const {
  const auto& own = target_[microbatch];
  const auto& batch = batch_[microbatch];
  if (own.of > 0 && batch.of > 0 && own.rows * batch.of != batch.rows * own.of) {
    throw InputError(text("the target has ", own.of, " rows and the batch ", batch.of,
                          ", so that microbatch ", microbatch, " has ", own.rows,
                          " of the target's and ", batch.rows,
                          " of the batch's: pass a target with the rows of the batch, and let "
                          "the loss know of itself "
                          "what has none"));
  }
}

}  // namespace tenure::pipeline
