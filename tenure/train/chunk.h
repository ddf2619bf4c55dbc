// Chunk: a stage of the model as a pipeline runs it: with its microbatches, in the precision of the
// job, recomputed where the job says so. One thread.
#pragma once

#include <tenure/core/names.h>
#include <tenure/pipeline/stage.h>
#include <tenure/train/job.h>
#include <tenure/train/parameters.h>

#include <memory>
#include <vector>

namespace tenure::train {

// The rows of a batch, in as many parts as there are microbatches.
struct Microbatches {
  std::vector<at::Tensor> tokens;
  std::vector<at::Tensor> targets;
};

class Chunk final : public pipeline::Stage {
 public:
  // All outlive it. `number` is its place among this rank's stages.
  Chunk(const train::Stage& stage, size_t number, Parameters& parameters,
        const Microbatches& microbatches, const Job& job);

  std::vector<at::Tensor> forward(uint32_t microbatch, std::vector<at::Tensor> inputs) override;
  std::vector<at::Tensor> parameters() const override;

 private:
  at::Tensor run(size_t layer, const at::Tensor& x) const;

  const train::Stage& stage_;
  size_t number_;
  Parameters& parameters_;
  const Microbatches& microbatches_;
  const Job& job_;
  std::vector<NameId> places_;  // of its layers, as plans of activations name them
};

}  // namespace tenure::train
