#include <tenure/pipeline/timeline.h>

#include <algorithm>
#include <limits>

namespace tenure::pipeline {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// What other stages wait for: outputs of forwards and gradients of inputs, when they are there, and
// the rank that waits for each.
class Results {
 public:
  explicit Results(const Schedule& schedule)
      : microbatches_(schedule.microbatches),
        there_(size_t{2} * schedule.stages() * schedule.microbatches, kNever),
        waiting_(there_.size(), kNobody) {}

  double& there(const Action& action) { return there_[index(action)]; }
  uint32_t& waiting(const Action& action) { return waiting_[index(action)]; }

  static constexpr uint32_t kNobody = ~0U;

 private:
  size_t index(const Action& action) const {
    const size_t half = action.kind == Kind::forward ? 0 : 1;
    return (size_t{2} * action.stage + half) * microbatches_ + action.microbatch;
  }

  size_t microbatches_;
  std::vector<double> there_;
  std::vector<uint32_t> waiting_;
};

}  // namespace

double Costs::of(Kind kind) const {
  switch (kind) {
    case Kind::forward:
      return forward;
    case Kind::input_backward:
      return input_backward;
    case Kind::weight_backward:
      return weight_backward;
    case Kind::backward:
      break;
  }
  return input_backward + weight_backward;
}

double Timeline::bubble(uint32_t rank) const {
  double busy = 0;
  for (const auto& span : spans[rank]) {
    busy += span.end - span.begin;
  }
  return length > 0 ? 1 - busy / length : 0;
}

bool needs_another(const Schedule& schedule, const Action& action, Action& needed) {
  if (action.kind == Kind::forward && action.stage > 0) {
    needed = {.stage = action.stage - 1, .microbatch = action.microbatch, .kind = Kind::forward};
    return true;
  }
  if (gives_input_gradient(action.kind) && !schedule.is_last(action.stage)) {
    needed = {.stage = action.stage + 1, .microbatch = action.microbatch, .kind = Kind::backward};
    return true;
  }
  return false;
}

Timeline run_on_paper(const Schedule& schedule, const Costs& costs, std::vector<Stuck>* stuck) {
  Results results(schedule);
  Timeline out;
  out.spans.resize(schedule.ranks());
  std::vector<uint32_t> ready;
  for (auto rank = schedule.ranks(); rank-- > 0;) {
    ready.push_back(rank);
  }
  while (!ready.empty()) {
    const auto rank = ready.back();
    ready.pop_back();
    auto& spans = out.spans[rank];
    const auto& actions = schedule.actions[rank];
    while (spans.size() < actions.size()) {
      const auto& action = actions[spans.size()];
      auto begin = spans.empty() ? 0 : spans.back().end;
      Action needed;
      if (needs_another(schedule, action, needed)) {
        const auto there = results.there(needed);
        if (there == kNever) {
          results.waiting(needed) = rank;
          break;
        }
        const auto far = schedule.rank_of_stage[needed.stage] != rank;
        begin = std::max(begin, there + (far ? costs.message : 0));
      }
      const auto end = begin + costs.of(action.kind);
      spans.push_back({.begin = begin, .end = end});
      out.length = std::max(out.length, end);
      if (action.kind == Kind::weight_backward) {
        continue;
      }
      results.there(action) = end;
      auto& waiting = results.waiting(action);
      if (waiting != Results::kNobody && waiting != rank) {
        ready.push_back(waiting);
      }
      waiting = Results::kNobody;
    }
  }
  for (uint32_t rank = 0; stuck != nullptr && rank < schedule.ranks(); ++rank) {
    const auto position = static_cast<uint32_t>(out.spans[rank].size());
    if (position < schedule.actions[rank].size()) {
      Stuck one{.rank = rank, .position = position, .waits_for = {}};
      needs_another(schedule, schedule.actions[rank][position], one.waits_for);
      stuck->push_back(one);
    }
  }
  return out;
}

Timeline timeline(const Schedule& schedule, const Costs& costs) {
  return run_on_paper(schedule, costs, nullptr);
}

}  // namespace tenure::pipeline
