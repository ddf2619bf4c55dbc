// What a fit plan does, for a person: by module and operator. Plain data.
#pragma once

#include <tenure/core/names.h>
#include <tenure/offload/action.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tenure::offload {

struct Fitted {
  struct Row {
    NameId module = NameId::none;
    NameId op = NameId::none;  // none: nobody saw who made it
    Action action = Action::keep;
    uint64_t count = 0;
    uint64_t bytes = 0;
    double seconds = 0;  // to make them again
  };
  std::vector<Row> rows;       // by action, the most bytes first; empty: there is no plan
  bool saves_nothing = false;  // because autograd saved nothing in the last step that could go
  int64_t promised = 0;
  int64_t least = 0;
  double recompute_seconds = 0;
  double exposed_seconds = 0;
  std::vector<std::string> denied;  // what is kept because it gave something else a second time
};

}  // namespace tenure::offload
