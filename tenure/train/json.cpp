#include <tenure/train/json.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <algorithm>
#include <charconv>
#include <unordered_set>

namespace tenure::train {
namespace {

constexpr int kDeepest = 64;
constexpr std::string_view kSpace = " \t\r\n";
constexpr std::string_view kEscapes = "\"\\/bfnrt";
constexpr std::string_view kEscaped = "\"\\/\b\f\n\r\t";  // what they stand for, in the same order
constexpr uint32_t kHighSurrogate = 0xD800;
constexpr uint32_t kLowSurrogate = 0xDC00;
constexpr uint32_t kAfterSurrogates = 0xE000;

void append_utf8(std::string& out, uint32_t code) {
  const auto tail = [&](int shift) {
    out.push_back(static_cast<char>(0x80 | ((code >> shift) & 0x3F)));
  };
  if (code < 0x80) {
    out.push_back(static_cast<char>(code));
  } else if (code < 0x800) {
    out.push_back(static_cast<char>(0xC0 | (code >> 6)));
    tail(0);
  } else if (code < 0x10000) {
    out.push_back(static_cast<char>(0xE0 | (code >> 12)));
    tail(6);
    tail(0);
  } else {
    out.push_back(static_cast<char>(0xF0 | (code >> 18)));
    tail(12);
    tail(6);
    tail(0);
  }
}

// How many bytes the character of UTF-8 at the front takes; 0: it is none.
size_t character_bytes(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const auto first = byte(0);
  if (first < 0x80) {
    return 1;
  }
  const size_t bytes = first < 0xC2   ? 0
                       : first < 0xE0 ? 2
                       : first < 0xF0 ? 3
                       : first < 0xF5 ? 4
                                      : 0;
  if (bytes == 0 || text.size() < bytes) {
    return 0;
  }
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xC0) != 0x80) {
      return 0;
    }
  }
  const bool too_long = (first == 0xE0 && byte(1) < 0xA0) || (first == 0xF0 && byte(1) < 0x90);
  const bool surrogate = first == 0xED && byte(1) >= 0xA0;
  const bool too_large = first == 0xF4 && byte(1) >= 0x90;
  return too_long || surrogate || too_large ? 0 : bytes;
}

class Parser {
 public:
  Parser(std::string_view text, std::string_view where) : text_(text), where_(where) {}

  Json whole() {
    check_characters();
    auto value = this->value(0);
    skip_space();
    if (at_ != text_.size()) {
      fail("there is more after its end");
    }
    return value;
  }

 private:
  [[noreturn]] void fail(std::string_view what) const {
    throw InputError(text(where_, ": this is not JSON: ", what, " at byte ", at_, "."));
  }

  void check_characters() {
    while (at_ < text_.size()) {
      const auto bytes = character_bytes(text_.substr(at_));
      if (bytes == 0) {
        fail("a character that is not UTF-8");
      }
      at_ += bytes;
    }
    at_ = 0;
  }

  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  void skip_space() {
    while (at_ < text_.size() && kSpace.find(text_[at_]) != std::string_view::npos) {
      ++at_;
    }
  }

  bool take(char wanted) {
    skip_space();
    if (peek() != wanted || at_ == text_.size()) {
      return false;
    }
    ++at_;
    return true;
  }

  void expect(char wanted) {
    if (!take(wanted)) {
      fail(text("'", wanted, "' is missing"));
    }
  }

  Json value(int depth) {
    if (depth > kDeepest) {
      fail("it is nested too deep");
    }
    skip_space();
    switch (peek()) {
      case '{':
        return object(depth);
      case '[':
        return array(depth);
      case '"':
        return string();
      case 't':
        return word("true", Json(true));
      case 'f':
        return word("false", Json(false));
      case 'n':
        return word("null", Json());
      default:
        return number();
    }
  }

  Json word(std::string_view word, Json value) {
    if (text_.substr(at_, word.size()) != word) {
      fail("an unknown word");
    }
    at_ += word.size();
    return value;
  }

  Json object(int depth) {
    Json::Object out;
    std::unordered_set<std::string> names;
    expect('{');
    if (take('}')) {
      return out;
    }
    do {
      skip_space();
      auto name = string();
      if (!names.insert(name).second) {
        fail(text("\"", name, "\" is there twice"));
      }
      expect(':');
      auto member = value(depth + 1);
      out.emplace_back(std::move(name), std::move(member));
    } while (take(','));
    expect('}');
    return out;
  }

  Json array(int depth) {
    Json::Array out;
    expect('[');
    if (take(']')) {
      return out;
    }
    do {
      out.push_back(value(depth + 1));
    } while (take(','));
    expect(']');
    return out;
  }

  std::string string() {
    if (peek() != '"') {
      fail("a string is missing");
    }
    ++at_;
    std::string out;
    while (at_ < text_.size() && text_[at_] != '"') {
      const char next = text_[at_++];
      if (static_cast<unsigned char>(next) < 0x20) {
        fail("a control character in a string");
      }
      if (next == '\\') {
        escape(out);
      } else {
        out.push_back(next);
      }
    }
    if (at_ >= text_.size()) {
      fail("a string without end");
    }
    ++at_;
    return out;
  }

  void escape(std::string& out) {
    const char name = peek();
    ++at_;
    if (name == 'u') {
      append_utf8(out, code_point());
      return;
    }
    const auto which = kEscapes.find(name);
    if (which == std::string_view::npos) {
      fail("an unknown escape in a string");
    }
    out.push_back(kEscaped[which]);
  }

  uint32_t code_point() {
    const auto first = four_digits();
    if (first < kHighSurrogate || first >= kAfterSurrogates) {
      return first;
    }
    if (first >= kLowSurrogate || text_.substr(at_, 2) != "\\u") {
      fail("half a surrogate pair");
    }
    at_ += 2;
    const auto second = four_digits();
    if (second < kLowSurrogate || second >= kAfterSurrogates) {
      fail("half a surrogate pair");
    }
    return 0x10000 + ((first - kHighSurrogate) << 10) + (second - kLowSurrogate);
  }

  uint32_t four_digits() {
    uint32_t code = 0;
    const auto digits = text_.substr(std::min(at_, text_.size()), 4);
    const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
    if (digits.size() != 4 || read.ptr != digits.data() + 4) {
      fail("\\u without four hexadecimal digits");
    }
    at_ += 4;
    return code;
  }

  size_t digits_from(size_t at) const {
    const auto end = text_.find_first_not_of("0123456789", at);
    return (end == std::string_view::npos ? text_.size() : end) - at;
  }

  Json number() {
    size_t end = at_ + (peek() == '-' ? 1 : 0);
    const auto whole = digits_from(end);
    if (whole == 0 || (whole > 1 && text_[end] == '0')) {
      fail("a value is missing");
    }
    end += whole;
    bool integral = true;
    const auto then = [&](size_t skipped) {
      const auto digits = digits_from(end + skipped);
      if (digits == 0) {
        fail("a number without its digits");
      }
      integral = false;
      end += skipped + digits;
    };
    if (end < text_.size() && text_[end] == '.') {
      then(1);
    }
    if (end < text_.size() && (text_[end] == 'e' || text_[end] == 'E')) {
      const bool sign = end + 1 < text_.size() && (text_[end + 1] == '-' || text_[end + 1] == '+');
      then(sign ? 2 : 1);
    }
    const auto* first = text_.data() + at_;
    const auto* last = text_.data() + end;
    int64_t integer = 0;
    if (integral && std::from_chars(first, last, integer).ec == std::errc{}) {
      at_ = end;
      return integer;
    }
    double real = 0;
    if (std::from_chars(first, last, real).ec != std::errc{}) {
      fail("a number out of range");
    }
    at_ = end;
    return real;
  }

  std::string_view text_;
  std::string_view where_;
  size_t at_ = 0;
};

}  // namespace

Json Json::parse(std::string_view text, std::string_view where) {
  return Parser(text, where).whole();
}

const Json* Json::find(std::string_view name) const {
  const auto* members = object();
  if (members == nullptr) {
    return nullptr;
  }
  for (const auto& [key, value] : *members) {
    if (key == name) {
      return value.is_null() ? nullptr : &value;
    }
  }
  return nullptr;
}

}  // namespace tenure::train
