// Checkpoints: folders step-000100 with all that a run needs to go on, which Hugging Face loads as
// a model, too.
//
//   checkpoint.json                    the step, and each file's size and hash
//   config.json                        the model
//   model-00001-of-00002.safetensors   weights, a file for each rank of a pipeline
//   model.safetensors.index.json       which of them has which
//   optimizer-00001-of-00002.safetensors
//
// Tensors are whole and under the weights' names, so a run may go on with other ranks.
//
// Note [Whole or not there]
// A checkpoint is written as step-000100.partial. When every file of every rank is on the disk, one
// rank adds checkpoint.json and gives the folder its name. Whatever stops a run meanwhile leaves a
// .partial, which nobody reads and the next checkpoint removes.
#pragma once

#include <tenure/train/config.h>
#include <tenure/train/new_file.h>
#include <tenure/train/saved_weights.h>
#include <tenure/train/weights.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tenure::train {

// One that is whole, to read from.
class Checkpoint {
 public:
  // Throws InputError where it is not one, or lacks a file.
  explicit Checkpoint(std::string path);

  // Reads all of it. Throws InputError, naming the file, if anything is not as it was written.
  void verify() const;

  const std::string& path() const { return path_; }
  int64_t step() const { return step_; }
  const ModelConfig& model() const { return model_; }
  SavedWeights weights() const { return SavedWeights(path_); }
  // A tensor of the optimizer's state; InputError if there is none of that name.
  at::Tensor optimizer_state(const std::string& name) const;

 private:
  std::string path_;
  int64_t step_ = 0;
  ModelConfig model_;
  std::map<std::string, Written> files_;
  std::vector<SafetensorsFile> optimizer_;
};

// The one with the most steps in the folder, if there is any. Throws InputError if the folder
// cannot be read.
std::optional<std::string> newest_checkpoint(const std::string& folder);

// One that is being written, by several ranks. One thread of each.
class NewCheckpoint {
 public:
  // Throws for all ranks if any of them calls it with false: so nobody goes on alone.
  using Together = std::function<void(bool mine_is_well, const std::string& doing)>;

  NewCheckpoint(std::string folder, int64_t step, Together together)
      : folder_(std::move(folder)), step_(step), together_(std::move(together)) {}

  // What one rank adds: nothing, or part `number` of `parts`.
  struct Part {
    int64_t number = 0;  // 0: nothing
    int64_t parts = 1;
    Weights weights;
    Weights optimizer;
  };
  // All ranks call it. The leader makes the folder, gathers the parts and finishes. Returns the
  // checkpoint's path. Throws on every rank if any rank fails; then there is none.
  std::string write(const Part& part, const ModelConfig& model, bool is_leader) const;

 private:
  std::string path() const;
  std::string partial() const { return path() + ".partial"; }
  void write_part(const Part& part) const;
  void finish(int64_t parts, const ModelConfig& model) const;

  std::string folder_;
  int64_t step_;
  Together together_;
};

// Removes all but the `keep` newest checkpoints, and what was left of unfinished ones. keep 0: all
// stay.
void remove_older(const std::string& folder, int64_t keep);

}  // namespace tenure::train
