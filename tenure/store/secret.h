// Secret: what the processes of a job know and nobody else does. Torch-free. Values: any thread, as
// usual for values.
#pragma once

#include <string>
#include <string_view>

namespace tenure::store {

// Bytes that are wiped when they go. At least 16 of them, or none.
class Secret {
 public:
  Secret() = default;
  explicit Secret(std::string_view bytes);  // throws InputError if it is too short
  Secret(const Secret&) = default;
  Secret(Secret&&) noexcept = default;
  Secret& operator=(Secret other) noexcept;
  ~Secret();

  [[nodiscard]] bool empty() const { return bytes_.empty(); }
  [[nodiscard]] std::string_view bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// The bytes of a file, at most 4096, without the line's end at its end. Throws InputError if it
// cannot be read, or if others than its owner can read or write it.
Secret secret_from_file(const std::string& path);

}  // namespace tenure::store
