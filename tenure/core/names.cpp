#include <tenure/core/names.h>

#include <tenure/core/error.h>
#include <tenure/core/fork.h>
#include <tenure/core/text.h>

#include <deque>
#include <mutex>
#include <string>
#include <unordered_map>

namespace tenure {
namespace {

// How many bytes at the front of `name` are a character that ends a line or controls a terminal:
// ASCII's, those of U+0080 to U+009F, and the separators U+2028 and U+2029. 0 if it is another.
size_t control_at_front(std::string_view name) {
  const auto byte = [&](size_t i) {
    return i < name.size() ? static_cast<unsigned char>(name[i]) : 0U;
  };
  if (byte(0) < 0x20 || byte(0) == 0x7f) {
    return 1;
  }
  if (byte(0) == 0xc2 && byte(1) >= 0x80 && byte(1) < 0xa0) {
    return 2;
  }
  return name.starts_with("\xe2\x80\xa8") || name.starts_with("\xe2\x80\xa9") ? 3 : 0;
}

struct NameTable {
  std::mutex mutex;
  std::deque<std::string> names{std::string()};  // index 0 is NameId::none
  std::unordered_map<std::string_view, uint32_t> ids{{std::string_view(), 0}};

  NameTable() { protect_across_fork(mutex); }
};

// Leaked, like every table of core: objects that outlive static destruction still name things.
NameTable& name_table() {
  static auto* instance = new NameTable;
  return *instance;
}

bool printable(std::string_view name) {
  for (size_t i = 0; i < name.size(); ++i) {
    if (control_at_front(name.substr(i)) != 0) {
      return false;
    }
  }
  return true;
}

}  // namespace

std::string fitting(std::string_view text) {
  std::string out;
  for (auto rest = end_of(text, kLongestName); !rest.empty();) {
    const auto control = control_at_front(rest);
    out += control == 0 ? rest.front() : '?';
    rest.remove_prefix(std::max<size_t>(control, 1));
  }
  return out;
}

void check_name(std::string_view name, std::string_view what) {
  if (name.empty()) {
    throw InputError(text(what, " is empty: give it a name that will mean something in a report"));
  }
  if (!printable(name)) {
    throw InputError(
        text(what, " contains a newline or another control character: use one printable line"));
  }
  if (name.size() > kLongestName) {
    throw InputError(text(what, " '", front_of(name, 32), "…' has ", name.size(),
                          " bytes: use at most ", kLongestName));
  }
}

NameId intern(std::string_view name) {
  auto& names = name_table();
  std::lock_guard lock(names.mutex);
  if (auto found = names.ids.find(name); found != names.ids.end()) {
    return NameId{found->second};
  }
  if (names.names.size() >= kMostNames) {
    throw InputError(text("more than ", kMostNames, " different names, '", front_of(name, 64),
                          "' being the next: names are kept forever, so put what changes every "
                          "step into a scope's counter instead"));
  }
  const auto& kept = names.names.emplace_back(name);
  const auto id = static_cast<uint32_t>(names.names.size() - 1);
  names.ids.emplace(kept, id);
  return NameId{id};
}

std::string_view name_of(NameId id) {
  auto& names = name_table();
  std::lock_guard lock(names.mutex);
  return names.names.at(static_cast<uint32_t>(id));
}

}  // namespace tenure
