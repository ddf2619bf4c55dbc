// Messages: what ranks send each other in a schedule, and when each is asked for. Follows from the
// schedule, so every rank knows it of every other. Pure; any thread.
//
// Note [When a receive is posted]
// Data moves while both ranks compute if the receiver has asked for it before the action that needs
// it: a receive is posted one action ahead. A send waits for its receive, so a rank may have only
// `send_slots` of them under way to one peer in one direction, and waits for the oldest before the
// next; the number is one more than the least with which no ranks wait for each other, found on
// paper. So the buffers of both sides are bounded by the schedule and not by who is slow. What one
// rank sends to another is asked for in the order in which it is sent, as NCCL wants it.
#pragma once

#include <tenure/pipeline/schedule.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace tenure::pipeline {

enum class Cargo : uint8_t { activations, gradients };

struct Message {
  Cargo cargo = Cargo::activations;
  uint32_t from_stage = 0;
  uint32_t to_stage = 0;
  uint32_t microbatch = 0;
  uint32_t peer = 0;  // the other rank

  bool operator==(const Message&) const = default;
};

// A number that no other message of a step has.
uint64_t key_of(const Message& message, uint32_t microbatches);

// One rank's part of it, by position in its actions.
struct MessagePlan {
  struct Step {
    std::vector<Message> post;    // receives to ask for before the action begins
    std::optional<Message> need;  // received before it begins
    std::optional<Message> send;  // made by it
  };
  std::vector<Step> steps;
  uint32_t send_slots = 1;
  uint32_t most_posted = 0;  // receives asked for and not needed yet, at most
};

MessagePlan plan_messages(const Schedule& schedule, uint32_t rank);

// See the note. REQUIRES: check(schedule) passes.
uint32_t least_send_slots(const Schedule& schedule);

// What the action needs from another rank, and what it makes for one.
std::optional<Message> needed_by(const Schedule& schedule, const Action& action);
std::optional<Message> made_by(const Schedule& schedule, const Action& action);

}  // namespace tenure::pipeline
