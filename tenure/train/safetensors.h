// SafetensorsFile: tensors under names in one file, in the format that Hugging Face's files have: a
// header of JSON, then the bytes. Everything the header says is checked when the file is opened;
// whatever does not fit is an InputError that names the file.
#pragma once

#include <tenure/train/input_file.h>
#include <tenure/train/new_file.h>
#include <tenure/train/weights.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tenure::train {

using Metadata = std::map<std::string, std::string>;

// read() from any thread.
class SafetensorsFile {
 public:
  struct Entry {
    at::ScalarType type = at::kFloat;
    std::vector<int64_t> shape;
    uint64_t begin = 0;  // in the file
    uint64_t bytes = 0;
  };

  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const Metadata& metadata() const { return metadata_; }
  const std::map<std::string, Entry>& entries() const { return entries_; }

  // A tensor of its own, on the host. REQUIRES that entries() has the name.
  at::Tensor read(const std::string& name) const;

 private:
  InputFile file_;
  Metadata metadata_;
  std::map<std::string, Entry> entries_;
};

// Writes a whole file or none, see NewFile. Tensors may be on any device and need not be
// contiguous; one of them at a time is copied to the host. Throws InputError for a name given twice
// and for a type that the format does not have.
Written write_safetensors(const std::string& path, const Weights& weights,
                          const Metadata& metadata);

}  // namespace tenure::train
