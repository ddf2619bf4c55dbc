// Lessons: what a microbatch takes on each stage, by the shapes of a step. Pure; one thread.
//
// Which shapes a step has is not known when it begins: a rank sees them as they come. So while it
// runs there may be several that it is like.
#pragma once

#include <tenure/pipeline/bound.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tenure::pipeline {

class Lessons {
 public:
  // The least recently used are forgotten.
  static constexpr size_t kMost = 32;

  Lessons(const Schedule& schedule, uint32_t rank) : schedule_(schedule), rank_(rank) {}

  void begin();
  // After each action: a number for all shapes of the step up to there.
  void narrow(uint64_t shapes);
  // Adds what a microbatch of the step took on each stage. Returns whether its shapes were new.
  bool end(const std::vector<MicrobatchBytes>& took);

  // No step with these shapes has ended.
  bool is_new() const { return alike_.empty(); }
  // More than one step has, of each that this one may be like.
  bool is_settled() const;
  // The most that any of them allows, after an action and of a microbatch. REQUIRES: !is_new().
  int64_t level(size_t position) const;
  int64_t whole(size_t stage) const;

  // Of the last step that ended; nothing and 0 before.
  const std::vector<MicrobatchBytes>& bytes() const { return last_.bytes; }
  int64_t highest() const;

 private:
  struct Figures {
    std::vector<MicrobatchBytes> bytes;  // by stage
    std::vector<int64_t> levels;         // by action
  };
  struct Known {
    std::vector<uint64_t> shapes;  // by action
    Figures figures;
    bool is_settled = false;
    uint64_t used = 0;
  };

  Known& room();

  const Schedule& schedule_;
  uint32_t rank_;
  std::vector<Known> known_;
  std::vector<uint64_t> shapes_;  // of this step
  std::vector<Known*> alike_;     // to this step
  uint64_t steps_ = 0;
  Figures last_;
};

}  // namespace tenure::pipeline
