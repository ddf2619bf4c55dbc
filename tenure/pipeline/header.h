// Header: what goes before the tensors of a message: what they are, or why there are none. Fixed in
// size, so that it can be asked for before anything is known.
#pragma once

#include <tenure/pipeline/action.h>

#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tenure::pipeline {

// One tensor of a message.
struct Spec {
  enum class Gradient : uint8_t { none, wanted };

  c10::ScalarType type = c10::ScalarType::Undefined;  // undefined: there is no tensor
  Gradient gradient = Gradient::none;                 // whether its sender wants one back
  c10::SmallVector<int64_t, 5> sizes;

  bool operator==(const Spec&) const = default;
  uint64_t bytes() const;
};

// What a microbatch is of its batch. Of none: nobody has said.
struct Share {
  int64_t rows = 0;
  int64_t of = 0;

  bool operator==(const Share&) const = default;
};

// Why a rank cannot go on.
struct Failure {
  uint32_t rank = 0;
  bool before_actions = false;
  Action action;
  std::string text;

  // "rank 1 failed in the forward of stage 1 for microbatch 3: ValueError: ..."
  std::string words() const;
};

class Header {
 public:
  using Words = std::array<int64_t, 128>;
  // Bytes of its front, which says step, status and share. What comes after it is aligned as
  // tensors are.
  static constexpr size_t kFront = 64;

  enum class Status : uint8_t {
    as_before,  // tensors as of the last message of this kind
    changed,    // others: they follow by themselves
    failed,
  };

  // Throws InputError if there are more tensors, of more dimensions, or more rows than fit.
  static Words of(uint64_t step, Status status, const std::vector<Spec>& specs, Share share = {});
  static Words of(uint64_t step, const Failure& failure);

  // Throws CollectiveError if it is none of this version.
  explicit Header(const Words& words);
  // Of a front alone: without specs, or failure.
  static Header of_front(const std::byte* front);

  uint64_t step() const { return step_; }
  Status status() const { return status_; }
  Share share() const { return share_; }
  const std::vector<Spec>& specs() const { return specs_; }
  const Failure& failure() const { return failure_; }

 private:
  Header() = default;
  void read_front(const Words& words);

  uint64_t step_ = 0;
  Status status_ = Status::as_before;
  Share share_;
  std::vector<Spec> specs_;
  Failure failure_;
};

}  // namespace tenure::pipeline
