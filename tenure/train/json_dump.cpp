// The half of json.h that writes.
#include <tenure/train/json.h>

#include <array>
#include <charconv>

namespace tenure::train {
namespace {

constexpr std::string_view kHexDigits = "0123456789abcdef";

void write_string(std::string& out, std::string_view value) {
  out.push_back('"');
  for (const char next : value) {
    const auto code = static_cast<unsigned char>(next);
    if (next == '"' || next == '\\') {
      out.push_back('\\');
      out.push_back(next);
    } else if (code < 0x20) {
      out += "\\u00";
      out.push_back(kHexDigits[code >> 4]);
      out.push_back(kHexDigits[code & 0xF]);
    } else {
      out.push_back(next);
    }
  }
  out.push_back('"');
}

template <class Number>
void write_number(std::string& out, Number value) {
  std::array<char, 32> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value).ptr;
  out.append(buffer.data(), end);
}

class Writer {
 public:
  explicit Writer(Json::Layout layout) : indented_(layout == Json::Layout::indented) {}

  void write(const Json& value) {
    if (const auto* boolean = value.boolean()) {
      out_ += *boolean ? "true" : "false";
    } else if (const auto* integer = value.integer()) {
      write_number(out_, *integer);
    } else if (const auto* real = value.real()) {
      write_real(*real);
    } else if (const auto* string = value.string()) {
      write_string(out_, *string);
    } else if (const auto* array = value.array()) {
      list('[', ']', *array, [this](const Json& item) { write(item); });
    } else if (const auto* object = value.object()) {
      list('{', '}', *object, [this](const auto& member) {
        write_string(out_, member.first);
        out_ += indented_ ? ": " : ":";
        write(member.second);
      });
    } else {
      out_ += "null";
    }
  }

  std::string take() { return std::move(out_); }

 private:
  // 1.0 stays a real number for whoever reads it.
  void write_real(double value) {
    const auto before = out_.size();
    write_number(out_, value);
    if (out_.find_first_of(".e", before) == std::string::npos) {
      out_ += ".0";
    }
  }

  template <class Items, class Write>
  void list(char open, char close, const Items& items, const Write& write_item) {
    out_.push_back(open);
    ++depth_;
    const char* comma = "";
    for (const auto& item : items) {
      out_ += comma;
      new_line();
      write_item(item);
      comma = ",";
    }
    --depth_;
    if (!items.empty()) {
      new_line();
    }
    out_.push_back(close);
  }

  void new_line() {
    if (indented_) {
      out_.push_back('\n');
      out_.append(2 * depth_, ' ');
    }
  }

  bool indented_;
  size_t depth_ = 0;
  std::string out_;
};

}  // namespace

std::string Json::dump(Layout layout) const {
  Writer writer(layout);
  writer.write(*this);
  return writer.take();
}

}  // namespace tenure::train
