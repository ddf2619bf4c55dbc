// Redactor: takes the program's names out of a text and leaves its shape. Paths, variables, classes
// and modules become hashes under a secret key, so that the same name is the same word in every
// file of a run and says nothing to who does not have the key. Numbers, torch's own operators and
// nodes, and words that are known to be nobody's secret stay. Any thread.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

namespace tenure::inspect {

class Redactor {
 public:
  Redactor() = default;  // leaves every text as it is
  Redactor(std::string_view key, const std::vector<std::string>& known);

  std::string operator()(std::string_view text) const;

 private:
  bool is_known(std::string_view word) const;
  std::string hashed(std::string_view word) const;

  bool active_ = false;
  std::array<uint64_t, 2> key_{};
  std::unordered_set<std::string> known_;
};

}  // namespace tenure::inspect
