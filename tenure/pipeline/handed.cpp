#include <tenure/pipeline/handed.h>

#include <tenure/core/text.h>

#include <unordered_set>

namespace tenure::pipeline {

void Handed::put(Cargo cargo, uint32_t stage, uint32_t microbatch, const std::vector<Sent>& tensors,
                 ScopeId scope) {
  auto& of = waiting_[{cargo, stage, microbatch}];
  const auto owner =
      intern_owner(cargo == Cargo::activations ? OwnerKind::activation : OwnerKind::gradient,
                   text("input of stage ", stage));
  for (const auto& sent : tensors) {
    of.tensors.push_back(sent.tensor.defined() ? Alias(sent.tensor, owner, scope) : Alias());
    of.gradients.push_back(sent.gradient);
  }
}

Handed::Taken Handed::take(Cargo cargo, uint32_t stage, uint32_t microbatch) {
  const auto found = waiting_.extract({cargo, stage, microbatch});
  Taken out;
  if (found.empty()) {
    return out;
  }
  const auto& of = found.mapped();
  for (size_t i = 0; i < of.tensors.size(); ++i) {
    out.tensors.push_back(
        {.tensor = of.tensors[i].defined() ? of.tensors[i].tensor() : at::Tensor(),
         .gradient = of.gradients[i]});
  }
  out.gradient_bytes = gradient_bytes(found.key(), of);
  return out;
}

int64_t Handed::gradient_bytes() const {
  int64_t out = 0;
  for (const auto& [key, of] : waiting_) {
    out += gradient_bytes(key, of);
  }
  return out;
}

int64_t Handed::gradient_bytes(const Key& key, const Waiting& of) {
  if (std::get<Cargo>(key) != Cargo::gradients) {
    return 0;
  }
  int64_t out = 0;
  std::unordered_set<const void*> seen;
  for (const auto& one : of.tensors) {
    if (one.defined() && seen.insert(one.lease().storage().unsafeGetStorageImpl()).second) {
      out += static_cast<int64_t>(one.lease().storage().nbytes());
    }
  }
  return out;
}

}  // namespace tenure::pipeline
