// SavedWeights: a model's weights on disk, in one safetensors file or in several with an index, and
// their way into a Stage.
#pragma once

#include <tenure/train/safetensors.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace tenure::train {

class Stage;

class SavedWeights {
 public:
  // A .safetensors file, an index (.json), or a folder with model.safetensors or
  // model.safetensors.index.json in it. Throws InputError where that is not there, not whole, or
  // names what is not in its files.
  explicit SavedWeights(const std::string& path);

  const std::string& path() const { return path_; }
  std::vector<std::string> names() const;
  bool has(const std::string& name) const { return places_.contains(name); }
  const SafetensorsFile::Entry& entry(const std::string& name) const;
  at::Tensor read(const std::string& name) const;

 private:
  void read_index(const std::string& path);
  void add_all(const std::string& path);

  std::string path_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, size_t> places_;  // which file has it
};

// Fills all weights of the stage; those of other stages may be there. Types are converted. Names
// may lack the model's prefix ("h.0.ln_1.bias"), as in OpenAI's files; a tied head may be absent,
// and must equal the embedding where it is not. Buffers that old files have are passed over. Throws
// InputError that names every missing, unexpected and wrongly shaped weight; then the stage is as
// it was.
void load_weights(Stage& stage, const SavedWeights& saved);

}  // namespace tenure::train
