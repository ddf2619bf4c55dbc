// Part: how the parts of Tenure know of each other without including each other. A part registers
// what it wants known about itself; whoever wants to know asks here. Any thread may call; a part's
// functions are called on the asking thread and must be ready for any.
#pragma once

#include <tenure/core/owner.h>

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace c10 {
struct Device;
struct StorageImpl;
}  // namespace c10

namespace tenure {

class StorageRef;

// Every function may be left empty. The initializers say so to the compiler.
// NOLINTBEGIN(readability-redundant-member-init)
struct Part {
  std::string name;                // "offload"
  std::vector<OwnerKind> kinds{};  // the kinds of owner under which it takes leases
  // Figures by name, in the unit that the name ends in: {"moved_bytes", 4096}.
  std::function<std::vector<std::pair<std::string, int64_t>>()> stats{};
  // Whether the storage's lifetime is this part's business, leased or not.
  std::function<bool(const StorageRef&)> owns{};
  // Writes what it would want to see after a crash, as lines of text.
  std::function<void(std::ostream&)> dump{};
  // Who holds the storage, outermost last, one line each.
  std::function<std::vector<std::string>(const StorageRef&)> holders{};
  // Who made the storage, on one line: "model.layers.3.mlp aten::mm". Empty if it does not know.
  std::function<std::string(const StorageRef&)> origin{};
  // Another part has copied a storage to the host, into memory of its own: `copy` stands for it.
  std::function<void(c10::StorageImpl& copy, const StorageRef& original)> copied{};
  // How many more bytes would be on the device if this part had left there what the calling
  // thread's steps saved; less those that are there only because it did not.
  std::function<int64_t(const c10::Device&)> displaced{};
};
// NOLINTEND(readability-redundant-member-init)

// Keeps a part registered; ends with this object. A call that is in flight may still finish.
class PartRegistration {
 public:
  PartRegistration() = default;
  explicit PartRegistration(std::shared_ptr<const Part> part) : part_(std::move(part)) {}
  PartRegistration(PartRegistration&&) noexcept = default;
  PartRegistration& operator=(PartRegistration&& other) noexcept;
  PartRegistration(const PartRegistration&) = delete;
  PartRegistration& operator=(const PartRegistration&) = delete;
  ~PartRegistration();

 private:
  std::shared_ptr<const Part> part_;  // shared with askers whose call is in flight
};

// Throws InputError if a part of that name is registered.
[[nodiscard]] PartRegistration register_part(Part part);

// In order of registration.
std::vector<std::shared_ptr<const Part>> parts();
// Null if there is none.
std::shared_ptr<const Part> part_named(std::string_view name);

}  // namespace tenure
