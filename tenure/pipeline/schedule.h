// Schedule: what each rank of a pipeline does, in order. Plain data: it says nothing of when, nor
// of the messages between ranks, which follow from it (messages.h). Pure functions; any thread.
#pragma once

#include <tenure/pipeline/action.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tenure::pipeline {

struct Schedule {
  std::string name;
  uint32_t microbatches = 0;
  std::vector<uint32_t> rank_of_stage;
  std::vector<std::vector<Action>> actions;  // by rank

  uint32_t ranks() const { return static_cast<uint32_t>(actions.size()); }
  uint32_t stages() const { return static_cast<uint32_t>(rank_of_stage.size()); }
  // In the order of the model.
  std::vector<uint32_t> stages_of(uint32_t rank) const;
  bool is_last(uint32_t stage) const { return stage + 1 == stages(); }
};

// The names that make_schedule knows.
const std::vector<std::string>& schedule_names();

// `chunks` is how many stages a rank has; 0 leaves it to the schedule. Throws InputError for a name
// that it does not know, and for sizes that the schedule cannot have.
Schedule make_schedule(std::string_view name, uint32_t ranks, uint32_t microbatches,
                       uint32_t chunks = 0);

// The same without its backwards: what a step that only evaluates runs.
Schedule forward_only(const Schedule& schedule);

}  // namespace tenure::pipeline
