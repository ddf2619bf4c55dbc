#include <tenure/train/saved_weights.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/train/input_file.h>
#include <tenure/train/json.h>

#include <filesystem>
#include <system_error>

namespace tenure::train {
namespace {

namespace fs = std::filesystem;

constexpr const char* kOne = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

// What a path given by the user stands for.
std::string file_at(const std::string& path) {
  if (!is_folder(path)) {
    return path;
  }
  for (const auto* name : {kOne, kIndex}) {
    std::error_code refused;
    if (fs::exists(fs::path(path) / name, refused)) {
      return (fs::path(path) / name).string();
    }
  }
  throw InputError(text(path, " has neither ", kOne, " nor ", kIndex, " in it."));
}

}  // namespace

SavedWeights::SavedWeights(const std::string& path) : path_(file_at(path)) {
  if (path_.ends_with(".json")) {
    read_index(path_);
  } else {
    add_all(path_);
  }
}

void SavedWeights::add_all(const std::string& path) {
  for (const auto& [name, entry] : files_.emplace_back(path).entries()) {
    places_.emplace(name, files_.size() - 1);
  }
}

void SavedWeights::read_index(const std::string& path) {
  const auto index = Json::parse(read_whole(path), path);
  const auto* map = index.find("weight_map");
  if (map == nullptr || map->object() == nullptr) {
    throw InputError(text(path, " is no index of weights: it has no \"weight_map\"."));
  }
  std::map<std::string, size_t> opened;
  for (const auto& [name, file] : *map->object()) {
    if (file.string() == nullptr || fs::path(*file.string()).filename() != *file.string()) {
      throw InputError(text(path, ": \"", name, "\" is not in a file beside it."));
    }
    const auto [at, is_new] = opened.try_emplace(*file.string(), files_.size());
    if (is_new) {
      files_.emplace_back((fs::path(path).parent_path() / *file.string()).string());
    }
    if (!files_[at->second].entries().contains(name)) {
      throw InputError(text(path, " says that \"", name, "\" is in ", *file.string(),
                            ", which has no such tensor."));
    }
    places_.emplace(name, at->second);
  }
}

std::vector<std::string> SavedWeights::names() const {
  std::vector<std::string> out;
  for (const auto& [name, file] : places_) {
    out.push_back(name);
  }
  return out;
}

const SafetensorsFile::Entry& SavedWeights::entry(const std::string& name) const {
  return files_[places_.at(name)].entries().at(name);
}

at::Tensor SavedWeights::read(const std::string& name) const {
  return files_[places_.at(name)].read(name);
}

}  // namespace tenure::train
