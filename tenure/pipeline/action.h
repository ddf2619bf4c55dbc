// Action: one thing that a rank does in a schedule: run a stage forward or backward for a
// microbatch.
#pragma once

#include <cstdint>
#include <string>

namespace tenure::pipeline {

enum class Kind : uint8_t {
  forward,          // F
  backward,         // B: both of the next two at once
  input_backward,   // I: the gradients of what the stage was given
  weight_backward,  // W: those of its parameters, from what I left for it
};
inline constexpr Kind kKinds[] = {Kind::forward, Kind::backward, Kind::input_backward,
                                  Kind::weight_backward};

constexpr char letter_of(Kind kind) { return "FBIW"[static_cast<uint8_t>(kind)]; }

struct Action {
  uint32_t stage = 0;
  uint32_t microbatch = 0;
  Kind kind = Kind::forward;

  bool operator==(const Action&) const = default;
  // "2F5": stage 2 forward, microbatch 5.
  std::string text() const;
  // "the forward of stage 2 for microbatch 5"
  std::string words() const;
};

// Whether it is the action after which the gradients of the stage's input are there.
constexpr bool gives_input_gradient(Kind kind) {
  return kind == Kind::backward || kind == Kind::input_backward;
}
// Whether nothing of the microbatch is left on the stage after it.
constexpr bool ends_microbatch(Kind kind) {
  return kind == Kind::backward || kind == Kind::weight_backward;
}

}  // namespace tenure::pipeline
