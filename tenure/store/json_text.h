// JSON, written: just what answers to `tenure store ls` and `stats` need. Torch-free.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

namespace tenure::store {

// Writes in the order of the calls, with commas where they belong. The caller opens and closes in
// pairs, and gives each value of an object its key first.
class JsonText {
 public:
  JsonText& open(char bracket);  // '{' or '['
  JsonText& close(char bracket);
  JsonText& key(std::string_view name);
  JsonText& value(std::string_view text);  // bytes that are not UTF-8 become U+FFFD
  JsonText& value(const char* text) { return value(std::string_view(text)); }
  template <std::integral Number>
  JsonText& value(Number number) {
    separate();
    text_ += std::to_string(number);
    return *this;
  }
  template <class Value>
  JsonText& field(std::string_view name, const Value& content) {
    return key(name).value(content);
  }

  [[nodiscard]] size_t size() const { return text_.size(); }
  std::string take() { return std::move(text_); }

 private:
  void separate();
  void quote(std::string_view text);

  std::string text_;
  bool follows_ = false;  // a value stands before this one, on the same level
};

}  // namespace tenure::store
