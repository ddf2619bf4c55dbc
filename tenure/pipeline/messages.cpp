#include <tenure/pipeline/messages.h>

#include <tenure/pipeline/timeline.h>

#include <algorithm>
#include <deque>
#include <map>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace tenure::pipeline {
namespace {

// So many actions before the one that needs it.
constexpr size_t kAhead = 1;

// All ranks doing their actions, as far as messages go: what is taken and what is sent. A send is
// done when it is taken, not when it was asked for: where shapes are new, it is asked for only
// then.
class Paper {
 public:
  Paper(const Schedule& schedule, uint32_t slots)
      : schedule_(schedule),
        slots_(slots),
        at_(schedule.ranks()),
        taken_(size_t{2} * schedule.stages() * schedule.microbatches),
        sent_(taken_.size()) {}

  // Whether every rank comes to its end.
  bool runs() {
    for (uint32_t rank = 0; rank < schedule_.ranks(); ++rank) {
      wake(rank);
    }
    while (!awake_.empty()) {
      const auto rank = awake_.back();
      awake_.pop_back();
      at_[rank].awake = false;
      while (advance(rank)) {
      }
    }
    return std::ranges::all_of(at_, [&](const Rank& rank) {
      return rank.position == schedule_.actions[static_cast<size_t>(&rank - at_.data())].size();
    });
  }

 private:
  using Channel = std::tuple<uint32_t, Cargo>;
  struct Rank {
    size_t position = 0;
    bool awake = false;
    std::map<Channel, std::deque<uint64_t>> sends;
  };

  void wake(uint32_t rank) {
    if (!at_[rank].awake) {
      at_[rank].awake = true;
      awake_.push_back(rank);
    }
  }

  // The action at the rank's position, if what it needs is there and what it makes can be sent.
  bool advance(uint32_t rank) {
    auto& at = at_[rank];
    const auto& actions = schedule_.actions[rank];
    if (at.position == actions.size()) {
      return false;
    }
    const auto& action = actions[at.position];
    const auto need = needed_by(schedule_, action);
    if (need) {
      const auto key = key_of(*need, schedule_.microbatches);
      if (!sent_[key]) {
        return false;
      }
      if (!taken_[key]) {
        taken_[key] = true;
        wake(need->peer);
      }
    }
    if (const auto made = made_by(schedule_, action)) {
      auto& sends = at.sends[{made->peer, made->cargo}];
      while (!sends.empty() && taken_[sends.front()]) {
        sends.pop_front();
      }
      if (sends.size() >= slots_) {
        return false;
      }
      const auto key = key_of(*made, schedule_.microbatches);
      sends.push_back(key);
      sent_[key] = true;
      wake(made->peer);
    }
    ++at.position;
    return true;
  }

  const Schedule& schedule_;
  size_t slots_;
  std::vector<Rank> at_;
  std::vector<uint32_t> awake_;
  std::vector<bool> taken_;  // by key_of
  std::vector<bool> sent_;
};

// What each rank sends to `rank`, in the order in which it is made.
std::map<uint32_t, std::vector<Message>> sent_to(const Schedule& schedule, uint32_t rank) {
  std::map<uint32_t, std::vector<Message>> out;
  for (uint32_t other = 0; other < schedule.ranks(); ++other) {
    for (const auto& action : schedule.actions[other]) {
      if (auto made = made_by(schedule, action); made && made->peer == rank) {
        made->peer = other;
        out[other].push_back(*made);
      }
    }
  }
  return out;
}

}  // namespace

uint64_t key_of(const Message& message, uint32_t microbatches) {
  return (uint64_t{2} * message.to_stage + static_cast<uint64_t>(message.cargo)) * microbatches +
         message.microbatch;
}

std::optional<Message> needed_by(const Schedule& schedule, const Action& action) {
  Action needed;
  if (!needs_another(schedule, action, needed)) {
    return std::nullopt;
  }
  const auto peer = schedule.rank_of_stage[needed.stage];
  if (peer == schedule.rank_of_stage[action.stage]) {
    return std::nullopt;
  }
  return Message{.cargo = action.kind == Kind::forward ? Cargo::activations : Cargo::gradients,
                 .from_stage = needed.stage,
                 .to_stage = action.stage,
                 .microbatch = action.microbatch,
                 .peer = peer};
}

std::optional<Message> made_by(const Schedule& schedule, const Action& action) {
  Message out{.from_stage = action.stage, .microbatch = action.microbatch};
  if (action.kind == Kind::forward && !schedule.is_last(action.stage)) {
    out.cargo = Cargo::activations;
    out.to_stage = action.stage + 1;
  } else if (gives_input_gradient(action.kind) && action.stage > 0) {
    out.cargo = Cargo::gradients;
    out.to_stage = action.stage - 1;
  } else {
    return std::nullopt;
  }
  out.peer = schedule.rank_of_stage[out.to_stage];
  if (out.peer == schedule.rank_of_stage[action.stage]) {
    return std::nullopt;
  }
  return out;
}

uint32_t least_send_slots(const Schedule& schedule) {
  uint32_t slots = 1;
  while (!Paper(schedule, slots).runs()) {
    ++slots;
  }
  return slots;
}

MessagePlan plan_messages(const Schedule& schedule, uint32_t rank) {
  const auto& actions = schedule.actions[rank];
  MessagePlan out;
  out.steps.resize(actions.size());
  // One more than must be, so that a rank can go on while the last one travels.
  out.send_slots = least_send_slots(schedule) + 1;
  // Some backends match sends and receives of two ranks by their order alone.
  auto incoming = sent_to(schedule, rank);
  std::unordered_map<uint64_t, size_t> places;  // of each message among its sender's, by key_of
  for (const auto& [peer, order] : incoming) {
    for (size_t place = 0; place < order.size(); ++place) {
      places.emplace(key_of(order[place], schedule.microbatches), place);
    }
  }
  std::map<uint32_t, size_t> asked;
  for (size_t i = 0; i < actions.size(); ++i) {
    const auto need = needed_by(schedule, actions[i]);
    out.steps[i].need = need;
    out.steps[i].send = made_by(schedule, actions[i]);
    if (!need) {
      continue;
    }
    const auto& order = incoming[need->peer];
    auto& next = asked[need->peer];
    const auto wanted = places.at(key_of(*need, schedule.microbatches));
    auto& post = out.steps[i < kAhead ? 0 : i - kAhead].post;
    for (; next <= wanted; ++next) {
      post.push_back(order[next]);
    }
  }
  uint32_t posted = 0;
  for (const auto& step : out.steps) {
    posted += static_cast<uint32_t>(step.post.size());
    out.most_posted = std::max(out.most_posted, posted);
    posted -= step.need ? 1 : 0;
  }
  return out;
}

}  // namespace tenure::pipeline
