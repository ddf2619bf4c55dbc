// Json: the little JSON that weights files and model configurations are written in. Strict: what
// RFC 8259 does not allow is refused, and so are a key given twice and nesting beyond reason.
// A plain value; numbers without fraction or exponent that fit are integers.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace tenure::train {

class Json {
 public:
  using Array = std::vector<Json>;
  using Object = std::vector<std::pair<std::string, Json>>;  // in the order of the text

  Json() = default;
  Json(bool value) : value_(value) {}
  Json(int64_t value) : value_(value) {}
  Json(double value) : value_(value) {}
  Json(std::string value) : value_(std::move(value)) {}
  Json(const char* value) : value_(std::string(value)) {}
  Json(Array value) : value_(std::move(value)) {}
  Json(Object value) : value_(std::move(value)) {}

  // Throws InputError, which begins with `where`: the name of the file.
  static Json parse(std::string_view text, std::string_view where);

  // What this is, or nullptr if it is something else.
  const bool* boolean() const { return std::get_if<bool>(&value_); }
  const int64_t* integer() const { return std::get_if<int64_t>(&value_); }
  const double* real() const { return std::get_if<double>(&value_); }
  const std::string* string() const { return std::get_if<std::string>(&value_); }
  const Array* array() const { return std::get_if<Array>(&value_); }
  const Object* object() const { return std::get_if<Object>(&value_); }
  bool is_null() const { return std::holds_alternative<std::monostate>(value_); }

  // The member of an object; nullptr if it has none of that name, or null there, or is no object.
  const Json* find(std::string_view name) const;

  enum class Layout { compact, indented };
  // REQUIRES that every number is finite.
  std::string dump(Layout layout = Layout::compact) const;

 private:
  std::variant<std::monostate, bool, int64_t, double, std::string, Array, Object> value_;
};

}  // namespace tenure::train
