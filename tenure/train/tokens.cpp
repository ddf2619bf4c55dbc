#include <tenure/train/tokens.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/train/input_file.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <system_error>
#include <vector>

namespace tenure::train {
namespace {

namespace fs = std::filesystem;

constexpr size_t kHeaderInts = 256;
constexpr uint64_t kHeaderBytes = kHeaderInts * sizeof(int32_t);

// What llm.c writes into its first two integers, and how wide a token then is.
struct BinKind {
  int32_t magic;
  int32_t version;
  uint64_t width;
};
constexpr std::array kBinKinds{BinKind{20240520, 1, sizeof(uint16_t)},
                               BinKind{20240801, 7, sizeof(uint32_t)}};

uint64_t token_width(const std::string& path, int32_t magic, int32_t version) {
  const auto* kind = std::ranges::find(kBinKinds, magic, &BinKind::magic);
  if (kind == kBinKinds.end()) {
    throw InputError(text(path, " is no token file of llm.c: it begins with ", magic,
                          " where 20240520 (GPT-2) or 20240801 (Llama 3) is expected."));
  }
  if (kind->version != version) {
    throw InputError(text(path, " is a token file of llm.c of version ", version, ", and only ",
                          kind->version, " can be read."));
  }
  return kind->width;
}

}  // namespace

struct Tokens::Source {
  explicit Source(std::string of) : name(std::move(of)) {}
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;
  virtual ~Source() = default;
  virtual void read(uint64_t first, std::span<int64_t> out) const = 0;

  std::string name;
};

struct Tokens::Bin : Source {
  explicit Bin(const std::string& path) : Source(path), file(path) {
    if (file.size() < kHeaderBytes) {
      throw InputError(text(path, " is no token file of llm.c: it has ", file.size(),
                            " bytes, and the header takes ", kHeaderBytes, "."));
    }
    std::array<int32_t, kHeaderInts> header{};
    file.read(header.data(), kHeaderBytes, 0);
    width = token_width(path, header[0], header[1]);
    count = static_cast<uint64_t>(static_cast<uint32_t>(header[2]));
    const auto there = (file.size() - kHeaderBytes) / width;
    if (there != count) {
      throw InputError(text(path, " is damaged: its header says ", count, " tokens, and ", there,
                            " are there."));
    }
  }

  void read(uint64_t first, std::span<int64_t> out) const override {
    if (width == sizeof(uint16_t)) {
      read_as<uint16_t>(first, out);
    } else {
      read_as<uint32_t>(first, out);
    }
  }

  template <class Token>
  void read_as(uint64_t first, std::span<int64_t> out) const {
    std::vector<Token> narrow(out.size());
    file.read(narrow.data(), narrow.size() * sizeof(Token), kHeaderBytes + first * sizeof(Token));
    std::ranges::copy(narrow, out.begin());
  }

  InputFile file;
  uint64_t width = 0;
  uint64_t count = 0;
};

struct Tokens::Text : Source {
  Text(std::string of, std::string content) : Source(std::move(of)), bytes(std::move(content)) {}

  void read(uint64_t first, std::span<int64_t> out) const override {
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = static_cast<unsigned char>(bytes[first + i]);
    }
  }

  std::string bytes;
};

Tokens Tokens::from_bin(const std::string& path) {
  auto source = std::make_shared<const Bin>(path);
  const auto count = source->count;
  return {std::move(source), 0, count};
}

Tokens Tokens::from_text(const std::string& path) {
  auto source = std::make_shared<const Text>(path, read_whole(path));
  const auto count = source->bytes.size();
  return {std::move(source), 0, count};
}

Tokens Tokens::from_sources(const std::string& folder, uint64_t most_bytes) {
  std::vector<fs::path> files;
  std::error_code refused;
  for (const auto& entry : fs::directory_iterator(folder, refused)) {
    std::error_code unknown;
    if (entry.is_regular_file(unknown) && entry.path().extension() == ".py") {
      files.push_back(entry.path());
    }
  }
  if (refused || files.empty()) {
    throw InputError(text(folder, " has no Python sources in it",
                          refused ? text(": ", refused.message()) : "", "."));
  }
  std::ranges::sort(files);
  std::string bytes;
  for (const auto& file : files) {
    if (bytes.size() >= most_bytes) {
      break;
    }
    bytes += read_whole(file.string());
  }
  bytes.resize(std::min<uint64_t>(bytes.size(), most_bytes));
  const auto count = bytes.size();
  return {std::make_shared<const Text>(folder, std::move(bytes)), 0, count};
}

Tokens Tokens::open(const std::string& path, uint64_t most_bytes) {
  if (is_folder(path)) {
    return from_sources(path, most_bytes);
  }
  return path.ends_with(".bin") ? from_bin(path) : from_text(path);
}

const std::string& Tokens::name() const { return source_->name; }

void Tokens::read(uint64_t first, std::span<int64_t> out) const {
  source_->read(begin_ + first, out);
}

std::pair<Tokens, Tokens> Tokens::split(double fraction) const {
  const bool is_part = fraction > 0 && fraction < 1;
  if (!is_part) {
    throw InputError(text("the part kept for validation is between 0 and 1, not ", fraction, "."));
  }
  const auto kept = static_cast<uint64_t>(std::llround(static_cast<double>(size()) * fraction));
  const auto middle = end_ - kept;
  return {Tokens(source_, begin_, middle), Tokens(source_, middle, end_)};
}

}  // namespace tenure::train
