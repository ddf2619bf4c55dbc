// Handed: tensors that stages of one rank hand to each other, each from when it is made until the
// stage takes it. One thread.
#pragma once

#include <tenure/core/alias.h>
#include <tenure/core/scope.h>
#include <tenure/pipeline/channel.h>
#include <tenure/pipeline/messages.h>

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

namespace tenure::pipeline {

class Handed {
 public:
  // Leased in `scope` until they are taken.
  void put(Cargo cargo, uint32_t stage, uint32_t microbatch, const std::vector<Sent>& tensors,
           ScopeId scope);
  struct Taken {
    std::vector<Sent> tensors;  // none where nothing was handed
    int64_t gradient_bytes = 0;
  };
  Taken take(Cargo cargo, uint32_t stage, uint32_t microbatch);
  // Gradients that wait: like messages that nobody sends. What a forward hands on is in what its
  // microbatch takes.
  int64_t gradient_bytes() const;
  void clear() { waiting_.clear(); }

 private:
  using Key = std::tuple<Cargo, uint32_t, uint32_t>;  // with stage and microbatch
  struct Waiting {
    std::vector<Alias> tensors;
    std::vector<Spec::Gradient> gradients;
  };

  static int64_t gradient_bytes(const Key& key, const Waiting& of);

  std::map<Key, Waiting> waiting_;
};

}  // namespace tenure::pipeline
