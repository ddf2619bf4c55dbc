#include <tenure/train/safetensors.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/train/json.h>
#include <tenure/train/new_file.h>

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <bit>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

namespace tenure::train {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors are little-endian");

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kLongestHeader = 100'000'000;  // the format's own limit
constexpr std::string_view kMetadata = "__metadata__";
constexpr std::string_view kNoShape = "has a shape that cannot be";

struct TypeName {
  std::string_view name;
  at::ScalarType type;
};
constexpr std::array kTypes{
    TypeName{"F64", at::kDouble},
    TypeName{"F32", at::kFloat},
    TypeName{"F16", at::kHalf},
    TypeName{"BF16", at::kBFloat16},
    TypeName{"I64", at::kLong},
    TypeName{"I32", at::kInt},
    TypeName{"I16", at::kShort},
    TypeName{"I8", at::kChar},
    TypeName{"U64", at::kUInt64},
    TypeName{"U32", at::kUInt32},
    TypeName{"U16", at::kUInt16},
    TypeName{"U8", at::kByte},
    TypeName{"BOOL", at::kBool},
    TypeName{"F8_E4M3", at::kFloat8_e4m3fn},
    TypeName{"F8_E5M2", at::kFloat8_e5m2},
    TypeName{"C64", at::kComplexFloat},
};

std::optional<at::ScalarType> type_named(std::string_view name) {
  const auto* found = std::ranges::find(kTypes, name, &TypeName::name);
  return found == kTypes.end() ? std::nullopt : std::optional(found->type);
}

std::optional<std::string_view> name_of(at::ScalarType type) {
  const auto* found = std::ranges::find(kTypes, type, &TypeName::type);
  return found == kTypes.end() ? std::nullopt : std::optional(found->name);
}

class HeaderReader {
 public:
  explicit HeaderReader(const InputFile& file) : file_(file), json_(read()) {
    if (json_.object() == nullptr) {
      refuse("its header is not a JSON object");
    }
  }

  Metadata metadata() const {
    Metadata out;
    const auto* given = json_.find(kMetadata);
    if (given == nullptr) {
      return out;
    }
    if (given->object() == nullptr) {
      refuse("its metadata is not a JSON object");
    }
    for (const auto& [name, value] : *given->object()) {
      if (value.string() == nullptr) {
        refuse(text("its metadata \"", name, "\" is not a string"));
      }
      out.emplace(name, *value.string());
    }
    return out;
  }

  std::map<std::string, SafetensorsFile::Entry> entries() const {
    std::map<std::string, SafetensorsFile::Entry> out;
    for (const auto& [name, value] : *json_.object()) {
      if (name != kMetadata) {
        out.emplace(name, entry(name, value));
      }
    }
    check_places(out);
    return out;
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw InputError(text(file_.path(), " is no safetensors file, or damaged: ", what, "."));
  }

  Json read() {
    if (file_.size() < kLengthBytes) {
      refuse(text("it has ", file_.size(), " bytes, and the length of its header alone takes 8"));
    }
    uint64_t length = 0;
    file_.read(&length, kLengthBytes, 0);
    if (length > kLongestHeader) {
      refuse(text("it claims a header of ", length, " bytes, and 100,000,000 are allowed"));
    }
    if (length > file_.size() - kLengthBytes) {
      refuse(text("it claims a header of ", length, " bytes, and ends after ",
                  file_.size() - kLengthBytes));
    }
    data_ = kLengthBytes + length;
    std::string header(length, '\0');
    file_.read(header.data(), length, kLengthBytes);
    return Json::parse(header, text(file_.path(), " is no safetensors file, or damaged: header"));
  }

  template <class... Parts>
  [[noreturn]] void refuse_tensor(const std::string& name, const Parts&... what) const {
    refuse(text("tensor \"", name, "\" ", what...));
  }

  SafetensorsFile::Entry entry(const std::string& name, const Json& json) const {
    const auto* type = json.find("dtype");
    const auto* shape = json.find("shape");
    const auto* offsets = json.find("data_offsets");
    if (type == nullptr || type->string() == nullptr || shape == nullptr ||
        shape->array() == nullptr || offsets == nullptr || offsets->array() == nullptr) {
      refuse_tensor(name, "needs a dtype, a shape and data_offsets");
    }
    SafetensorsFile::Entry out;
    out.type = read_type(name, *type->string());
    out.shape = read_shape(name, *shape->array());
    std::tie(out.begin, out.bytes) = read_place(name, *offsets->array());
    const auto needed = bytes_of(name, out);
    if (out.bytes != needed) {
      refuse_tensor(name, "has ", out.bytes, " bytes, and its shape needs ", needed);
    }
    if (out.begin + out.bytes > file_.size() - data_) {
      refuse_tensor(name, "ends at byte ", out.begin + out.bytes,
                    " of the data, and the file has only ", file_.size() - data_,
                    ": it was cut off");
    }
    out.begin += data_;
    return out;
  }

  at::ScalarType read_type(const std::string& name, const std::string& type) const {
    const auto known = type_named(type);
    if (!known) {
      refuse_tensor(name, "has the dtype ", type, ", which is unknown here");
    }
    return *known;
  }

  std::vector<int64_t> read_shape(const std::string& name, const Json::Array& shape) const {
    std::vector<int64_t> out;
    for (const auto& extent : shape) {
      if (extent.integer() == nullptr || *extent.integer() < 0) {
        refuse_tensor(name, kNoShape);
      }
      out.push_back(*extent.integer());
    }
    return out;
  }

  std::pair<uint64_t, uint64_t> read_place(const std::string& name, const Json::Array& ends) const {
    const bool are_two =
        ends.size() == 2 && ends[0].integer() != nullptr && ends[1].integer() != nullptr;
    if (!are_two || *ends[0].integer() < 0 || *ends[0].integer() > *ends[1].integer()) {
      refuse_tensor(name, "has data_offsets that are no range");
    }
    const auto begin = static_cast<uint64_t>(*ends[0].integer());
    return {begin, static_cast<uint64_t>(*ends[1].integer()) - begin};
  }

  uint64_t bytes_of(const std::string& name, const SafetensorsFile::Entry& entry) const {
    auto bytes = static_cast<uint64_t>(c10::elementSize(entry.type));
    for (const auto extent : entry.shape) {
      if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(extent), &bytes)) {
        refuse_tensor(name, kNoShape);
      }
    }
    return bytes;
  }

  // The format wants every byte to belong to one tensor: what overlaps or is left over is damage.
  void check_places(const std::map<std::string, SafetensorsFile::Entry>& entries) const {
    std::vector<std::pair<std::string_view, const SafetensorsFile::Entry*>> in_order;
    in_order.reserve(entries.size());
    for (const auto& [name, entry] : entries) {
      in_order.emplace_back(name, &entry);
    }
    std::ranges::sort(in_order, {}, [](const auto& item) {
      return std::pair(item.second->begin, item.second->bytes);
    });
    uint64_t end = data_;
    std::string_view before;
    for (const auto& [name, entry] : in_order) {
      if (entry->begin < end) {
        refuse(text("tensor \"", name, "\" overlaps \"", before, "\""));
      }
      if (entry->begin > end) {
        refuse(text("there are ", entry->begin - end, " bytes of no tensor before \"", name, "\""));
      }
      end += entry->bytes;
      before = name;
    }
    if (end != file_.size()) {
      refuse(text("there are ", file_.size() - end, " bytes of no tensor at its end"));
    }
  }

  const InputFile& file_;
  uint64_t data_ = 0;  // where the data begins; set by read()
  Json json_;
};

Json::Array shape_of(const at::Tensor& tensor) {
  Json::Array out;
  for (const auto extent : tensor.sizes()) {
    out.emplace_back(extent);
  }
  return out;
}

Json::Object header_of(const Weights& weights, const Metadata& metadata, const std::string& path) {
  Json::Object out;
  if (!metadata.empty()) {
    Json::Object strings;
    for (const auto& [name, value] : metadata) {
      strings.emplace_back(name, value);
    }
    out.emplace_back(kMetadata, std::move(strings));
  }
  std::map<std::string_view, int> seen;
  int64_t at = 0;
  for (const auto& [name, value] : weights) {
    const auto type = name_of(value.scalar_type());
    if (!type) {
      throw InputError(text(path, " cannot be written: \"", name, "\" is of ", value.scalar_type(),
                            ", which safetensors does not have."));
    }
    if (name == kMetadata || seen[name]++ > 0) {
      throw InputError(text(path, " cannot be written: the name \"", name, "\" is taken."));
    }
    const auto end = at + static_cast<int64_t>(value.nbytes());
    out.emplace_back(name, Json::Object{{"dtype", std::string(*type)},
                                        {"shape", shape_of(value)},
                                        {"data_offsets", Json::Array{at, end}}});
    at = end;
  }
  return out;
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(path) {
  const HeaderReader header(file_);
  metadata_ = header.metadata();
  entries_ = header.entries();
}

at::Tensor SafetensorsFile::read(const std::string& name) const {
  const auto& entry = entries_.at(name);
  auto out = at::empty(entry.shape, at::TensorOptions().dtype(entry.type));
  file_.read(out.mutable_data_ptr(), entry.bytes, entry.begin);
  return out;
}

Written write_safetensors(const std::string& path, const Weights& weights,
                          const Metadata& metadata) {
  // The widest first, so that each begins at a multiple of its width.
  auto in_order = weights;
  std::ranges::stable_sort(in_order, std::ranges::greater{},
                           [](const auto& weight) { return weight.second.element_size(); });
  auto header = Json(header_of(in_order, metadata, path)).dump();
  header.append((kLengthBytes - header.size() % kLengthBytes) % kLengthBytes, ' ');
  const uint64_t length = header.size();

  NewFile file(path);
  file.write(&length, kLengthBytes);
  file.write(header.data(), header.size());
  for (const auto& [name, value] : in_order) {
    const auto here = value.detach().to(at::kCPU).contiguous();
    file.write(here.const_data_ptr(), here.nbytes());
  }
  file.commit();
  return file.written();
}

}  // namespace tenure::train
