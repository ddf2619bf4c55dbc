#include <tenure/train/checkpoint.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/train/input_file.h>
#include <tenure/train/json.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <iomanip>
#include <system_error>
#include <utility>

namespace tenure::train {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kPartial = ".partial";
constexpr const char* kManifest = "checkpoint.json";
constexpr const char* kConfig = "config.json";
constexpr const char* kIndex = "model.safetensors.index.json";

template <class Number>
std::optional<Number> number_in(std::string_view digits, int base = 10) {
  Number out = 0;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), out, base);
  const bool is_number = error == std::errc{} && end == digits.data() + digits.size();
  return is_number ? std::optional(out) : std::nullopt;
}

// The step of a folder's name, if it is a checkpoint's.
std::optional<int64_t> step_of(const std::string& name) {
  return name.starts_with(kPrefix) ? number_in<int64_t>(name.substr(kPrefix.size())) : std::nullopt;
}

std::string file_name(const char* kind, int64_t number, int64_t parts) {
  return text(kind, "-", std::setfill('0'), std::setw(5), number, "-of-", std::setw(5), parts,
              ".safetensors");
}

std::string part_name(int64_t number) { return text("part-", number, ".json"); }

std::string hex(uint64_t value) { return text(std::hex, value); }

Json::Object described(const Written& written) {
  return {{"bytes", static_cast<int64_t>(written.bytes)}, {"hash", hex(written.hash)}};
}

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw InputError(text("the checkpoint ", path, " is damaged: ", why,
                        "; remove it to go on from the one before."));
}

Written written_in(const Json& entry, const std::string& path) {
  const auto* bytes = entry.find("bytes");
  const auto* hash = entry.find("hash");
  const auto* digits = hash != nullptr ? hash->string() : nullptr;
  const auto value = digits != nullptr ? number_in<uint64_t>(*digits, 16) : std::nullopt;
  if (bytes == nullptr || bytes->integer() == nullptr || !value) {
    refuse(path, "checkpoint.json does not say what its files are");
  }
  return {static_cast<uint64_t>(*bytes->integer()), *value};
}

Written read_through(const std::string& path) {
  constexpr size_t at_once = 1 << 20;
  const InputFile file(path);
  std::vector<char> buffer(at_once);
  Written out;
  while (out.bytes < file.size()) {
    const auto count = std::min<uint64_t>(at_once, file.size() - out.bytes);
    file.read(buffer.data(), count, out.bytes);
    out.hash = hash_of(buffer.data(), count, out.hash);
    out.bytes += count;
  }
  return out;
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> out;
  std::error_code refused;
  for (const auto& entry : fs::directory_iterator(folder, refused)) {
    out.push_back(entry.path().filename().string());
  }
  if (refused && refused != std::errc::no_such_file_or_directory) {
    throw InputError(text(folder, " cannot be read: ", refused.message(), "."));
  }
  return out;
}

void make_folder(const std::string& path) {
  std::error_code refused;
  fs::create_directories(path, refused);
  if (refused) {
    throw InputError(text(path, " cannot be made: ", refused.message(), "."));
  }
}

}  // namespace

Checkpoint::Checkpoint(std::string path) : path_(std::move(path)) {
  const auto manifest = text(path_, "/", kManifest);
  if (std::error_code unknown; !fs::is_regular_file(manifest, unknown)) {
    refuse(path_, text("it has no ", kManifest));
  }
  const auto json = [&] {
    try {
      return Json::parse(read_whole(manifest), manifest);
    } catch (const InputError& error) {
      refuse(path_, error.what());
    }
  }();
  const auto* step = json.find("step");
  const auto* files = json.find("files");
  if (step == nullptr || step->integer() == nullptr || files == nullptr ||
      files->object() == nullptr) {
    refuse(path_, text(kManifest, " has no step or no files"));
  }
  step_ = *step->integer();
  const auto folder = fs::path(path_).filename().string();
  if (step_of(folder) != step_) {  // the one figure that no hash is of
    refuse(path_, text(kManifest, " says step ", step_, " in the folder ", folder));
  }
  for (const auto& [name, entry] : *files->object()) {
    files_.emplace(name, written_in(entry, path_));
    std::error_code refused;
    const auto size = fs::file_size(text(path_, "/", name), refused);
    if (refused) {
      refuse(path_, text(name, " is not there"));
    }
    if (size != files_.at(name).bytes) {
      refuse(path_, text(name, " has ", size, " bytes instead of ", files_.at(name).bytes));
    }
  }
  model_ = read_config(text(path_, "/", kConfig));
  for (const auto& [name, written] : files_) {
    if (name.starts_with("optimizer-")) {
      optimizer_.emplace_back(text(path_, "/", name));
    }
  }
}

void Checkpoint::verify() const {
  for (const auto& [name, written] : files_) {
    if (read_through(text(path_, "/", name)) != written) {
      refuse(path_, text(name, " is not what was written"));
    }
  }
}

at::Tensor Checkpoint::optimizer_state(const std::string& name) const {
  for (const auto& file : optimizer_) {
    if (file.entries().contains(name)) {
      return file.read(name);
    }
  }
  throw InputError(text("the checkpoint ", path_, " has no optimizer state \"", name, "\"."));
}

std::optional<std::string> newest_checkpoint(const std::string& folder) {
  std::optional<std::pair<int64_t, std::string>> newest;
  for (const auto& name : names_in(folder)) {
    const auto step = step_of(name);
    if (step && (!newest || *step > newest->first)) {
      newest.emplace(*step, text(folder, "/", name));
    }
  }
  return newest ? std::optional(newest->second) : std::nullopt;
}

void remove_older(const std::string& folder, int64_t keep) {
  std::vector<std::pair<int64_t, std::string>> whole;
  for (const auto& name : names_in(folder)) {
    if (const auto step = step_of(name)) {
      whole.emplace_back(*step, name);
    } else if (name.starts_with(kPrefix) && name.ends_with(kPartial)) {
      std::error_code ignored;
      fs::remove_all(text(folder, "/", name), ignored);
    }
  }
  std::ranges::sort(whole, std::ranges::greater{});
  for (auto i = static_cast<size_t>(keep); keep > 0 && i < whole.size(); ++i) {
    // One that is removed by half must not look whole.
    const auto path = text(folder, "/", whole[i].second);
    std::error_code refused;
    fs::rename(path, path + std::string(kPartial), refused);
    fs::remove_all(path + std::string(kPartial), refused);
  }
}

std::string NewCheckpoint::path() const {
  return text(folder_, "/", kPrefix, std::setfill('0'), std::setw(6), step_);
}

std::string NewCheckpoint::write(const Part& part, const ModelConfig& model, bool is_leader) const {
  // Runs what is this rank's of it; no rank goes on if another fails.
  const auto all = [&](const char* doing, bool mine, const auto& work) {
    std::exception_ptr failed;
    try {
      if (mine) {
        work();
      }
    } catch (const fs::filesystem_error& error) {
      failed = std::make_exception_ptr(Error(error.what()));
    } catch (...) {
      failed = std::current_exception();
    }
    try {
      together_(failed == nullptr, doing);
    } catch (...) {
      if (is_leader) {
        std::error_code ignored;
        fs::remove_all(partial(), ignored);
      }
      if (failed) {
        std::rethrow_exception(failed);
      }
      throw;
    }
  };
  all("making the checkpoint's folder", is_leader, [&] {
    make_folder(folder_);
    fs::remove_all(partial());
    make_folder(partial());
  });
  all("writing the checkpoint", part.number > 0, [&] { write_part(part); });
  all("finishing the checkpoint", is_leader, [&] { finish(part.parts, model); });
  return path();
}

void NewCheckpoint::write_part(const Part& part) const {
  const auto weights = file_name("model", part.number, part.parts);
  const auto optimizer = file_name("optimizer", part.number, part.parts);
  const Metadata format{{"format", "pt"}};
  const auto of_weights = write_safetensors(text(partial(), "/", weights), part.weights, format);
  const auto of_optimizer = write_safetensors(text(partial(), "/", optimizer), part.optimizer, {});
  Json::Array names;
  int64_t bytes = 0;
  for (const auto& [name, value] : part.weights) {
    names.emplace_back(name);
    bytes += static_cast<int64_t>(value.nbytes());
  }
  Json::Object out{{"weights", Json::Object{{weights, described(of_weights)}}},
                   {"optimizer", Json::Object{{optimizer, described(of_optimizer)}}},
                   {"names", std::move(names)},
                   {"bytes", bytes}};
  write_whole(text(partial(), "/", part_name(part.number)), Json(std::move(out)).dump());
}

void NewCheckpoint::finish(int64_t parts, const ModelConfig& model) const {
  Json::Object files;
  Json::Object map;
  int64_t bytes = 0;
  for (int64_t number = 1; number <= parts; ++number) {
    const auto path = text(partial(), "/", part_name(number));
    const auto part = Json::parse(read_whole(path), path);
    for (const auto* kind : {"weights", "optimizer"}) {
      const auto& of = *part.find(kind)->object();
      files.insert(files.end(), of.begin(), of.end());
    }
    for (const auto& name : *part.find("names")->array()) {
      map.emplace_back(*name.string(), file_name("model", number, parts));
    }
    bytes += *part.find("bytes")->integer();
    fs::remove(path);
  }
  std::ranges::sort(map, {}, [](const auto& entry) { return entry.first; });
  const Json index(Json::Object{{"metadata", Json::Object{{"total_size", bytes}}},
                                {"weight_map", std::move(map)}});
  files.emplace_back(kIndex, described(write_whole(text(partial(), "/", kIndex),
                                                   index.dump(Json::Layout::indented) + "\n")));
  const auto config = text(partial(), "/", kConfig);
  write_config(config, model);
  files.emplace_back(kConfig, described(read_through(config)));
  const Json manifest(Json::Object{{"step", step_}, {"files", std::move(files)}});
  write_whole(text(partial(), "/", kManifest), manifest.dump(Json::Layout::indented) + "\n");
  fs::remove_all(path());  // of a run that was begun anew in the same folder
  fs::rename(partial(), path());
  sync_folder(folder_);
}

}  // namespace tenure::train
