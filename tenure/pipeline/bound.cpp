#include <tenure/pipeline/bound.h>

#include <algorithm>
#include <unordered_map>

namespace tenure::pipeline {
namespace {

// How an action changes what its stage has in flight.
struct Change {
  int whole = 0;
  int waiting = 0;
};

Change change_by(Kind kind) {
  switch (kind) {
    case Kind::forward:
      return {.whole = 1, .waiting = 0};
    case Kind::backward:
      return {.whole = -1, .waiting = 0};
    case Kind::input_backward:
      return {.whole = -1, .waiting = 1};
    case Kind::weight_backward:
      break;
  }
  return {.whole = 0, .waiting = -1};
}

}  // namespace

std::vector<InFlight> in_flight(const Schedule& schedule, uint32_t rank) {
  std::vector<InFlight> out;
  out.reserve(schedule.actions[rank].size());
  InFlight now;
  for (const auto& action : schedule.actions[rank]) {
    const auto change = change_by(action.kind);
    now.whole += static_cast<uint32_t>(change.whole);
    now.waiting += static_cast<uint32_t>(change.waiting);
    out.push_back(now);
  }
  return out;
}

InFlight most_in_flight(const Schedule& schedule, uint32_t rank) {
  InFlight most;
  for (const auto& now : in_flight(schedule, rank)) {
    if (now.all() > most.all() || (now.all() == most.all() && now.whole > most.whole)) {
      most = now;
    }
  }
  return most;
}

std::vector<int64_t> levels(const Schedule& schedule, uint32_t rank,
                            std::span<const MicrobatchBytes> bytes) {
  std::unordered_map<uint32_t, MicrobatchBytes> of_stage;
  const auto stages = schedule.stages_of(rank);
  for (size_t i = 0; i < stages.size(); ++i) {
    of_stage[stages[i]] = bytes[i];
  }
  std::vector<int64_t> out;
  out.reserve(schedule.actions[rank].size());
  int64_t now = 0;
  for (const auto& action : schedule.actions[rank]) {
    const auto change = change_by(action.kind);
    const auto& one = of_stage[action.stage];
    now += change.whole * one.whole + change.waiting * one.waiting;
    out.push_back(now);
  }
  return out;
}

int64_t peak_bytes(const Schedule& schedule, uint32_t rank,
                   std::span<const MicrobatchBytes> bytes) {
  int64_t most = 0;
  for (const auto level : levels(schedule, rank, bytes)) {
    most = std::max(most, level);
  }
  return most;
}

}  // namespace tenure::pipeline
