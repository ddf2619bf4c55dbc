// Channel: messages of tensors between the ranks of a pipeline. Any dtype, several tensors or none
// in a message, other shapes at any time. One thread.
//
// Note [A message]
// A header (header.h) and the tensors' bytes travel side by side: both are asked for ahead, the
// tensors as they were the last time, which both sides remember for each kind of message. When they
// are not as before, the header says so, what was asked for is filled with anything, and the true
// ones follow. A small tensor on the host goes as one with the front of its header, copied
// together: on a busy machine a message costs more than the copy. The rest of the header comes
// after it, if it has anything to say. A rank that fails says so in every header that it still
// owes, and takes what it is still owed: so every message of a step is sent and received, whatever
// happened, nobody waits for ever, and the next step begins with an empty channel. A rank that has
// died cannot; that one is named, and the channel is of no more use.
#pragma once

#include <tenure/core/alias.h>
#include <tenure/pipeline/buffers.h>
#include <tenure/pipeline/header.h>
#include <tenure/pipeline/messages.h>
#include <tenure/pipeline/outcome.h>
#include <tenure/pipeline/sends.h>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace c10d {
class ProcessGroup;
class Work;
}  // namespace c10d

namespace tenure::pipeline {

// A tensor of a message and whether its sender wants a gradient for it. Undefined: none was sent.
struct Sent {
  at::Tensor tensor;
  Spec::Gradient gradient = Spec::Gradient::none;
};

struct Received {
  std::vector<Sent> tensors;
  Share share;
};

// Another rank said that it failed.
struct PeerFailed : std::exception {
  explicit PeerFailed(Failure of) : failure(std::move(of)) {}
  Failure failure;
};

// The groups that a channel sends over, all of the same ranks. `side` runs on the host. Where a
// backend goes by order alone (NCCL), messages to higher and to lower ranks need a group each.
struct Groups {
  c10::intrusive_ptr<c10d::ProcessGroup> up;
  c10::intrusive_ptr<c10d::ProcessGroup> down;
  c10::intrusive_ptr<c10d::ProcessGroup> side;
};

struct ChannelStats {
  uint64_t messages = 0;
  uint64_t sent_bytes = 0;
  uint64_t changed = 0;         // messages whose tensors were not as before
  double waited = 0;            // seconds
  int64_t most_held_bytes = 0;  // of receive buffers, in the last step
};

class Channel {
 public:
  Channel(Groups groups, uint32_t microbatches, std::chrono::milliseconds timeout);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  uint32_t rank() const { return rank_; }
  uint32_t ranks() const { return ranks_; }
  c10::Device device() const { return device_; }

  // REQUIRES: nothing is under way. `trains`: whether the step is one of training.
  void begin(uint64_t step, bool trains, uint32_t send_slots);
  void receive_on(c10::Device device) { device_ = device; }

  // Asks for a message.
  void post(const Message& message);
  // Waits for it. Throws PeerFailed, or CollectiveError if its sender is gone or late. What was
  // received is leased in `scope` as long as the caller says by the leases in `leases`.
  Received take(const Message& message, ScopeId scope, std::vector<Alias>& leases);
  // Sends it, as soon as an earlier one has made room. Holds on to the tensors until it is sent and
  // the caller says settle or finish, or needs the room.
  void send(const Message& message, const std::vector<Sent>& tensors, Share share, ScopeId scope);
  // Lets go of the tensors of what is sent.
  void settle() { sends_.settle(); }
  // Waits until it is sent, and lets go of its tensors. It may be sent already.
  void finish(const Message& message);
  // The same for all that read this tensor's storage.
  void finish_readers(const at::Tensor& tensor);
  // The same for all there are. Gives back free buffers.
  void finish();
  // This rank has ended the step. Returns who failed in the one before without this rank's knowing:
  // see Note [A failure after the last message].
  std::optional<Failure> end();
  // This rank goes no further: settles the messages that were still to be made and needed.
  void abandon(const Failure& failure, const std::vector<Message>& unmade,
               const std::vector<Message>& unneeded);

  const ChannelStats& stats() const { return stats_; }
  int64_t held_bytes() const { return buffers_.held(); }
  // Bytes of tensors on their way out.
  int64_t sending_bytes() const { return sends_.bytes(); }
  // Why it cannot be used any more; empty if it can.
  const std::string& broken() const { return broken_; }

 private:
  struct Incoming;
  using Key = uint64_t;

  Key key(const Message& message) const;
  c10d::ProcessGroup& group_to(uint32_t from, uint32_t to) const;
  // Throws CollectiveError, in words and for good, for what the backend throws.
  template <class Transfer>
  auto with_peer(const Message& message, const char* doing, Transfer transfer);
  template <class Wait>
  void timed(const Message& message, const char* doing, Wait wait);
  void wait(c10d::Work& work, const Message& message, const char* doing);
  c10::intrusive_ptr<c10d::Work> receive_into(c10d::ProcessGroup& group, at::Tensor into,
                                              const Message& message);
  c10::intrusive_ptr<c10d::Work> send_off(c10d::ProcessGroup& group, at::Tensor what,
                                          const Message& message);
  void ask_for_header(Incoming& incoming);
  // `front`: bytes of the header that come before each.
  void ask(Incoming& incoming, const std::vector<Spec>& specs, size_t front = 0);
  // REQUIRES: posted. Its header, once all its tensors are there.
  Header receive(Incoming& incoming);
  // `before`: the tensors that the receiver has asked for, first of `tensors`.
  void send_words(const Message& message, const Header::Words& words,
                  const std::vector<at::Tensor>& tensors, const std::vector<Spec>& before,
                  ScopeId scope);
  std::vector<at::Tensor> anything(const std::vector<Spec>& specs) const;
  void make_room(const Message& message);
  void finish(const Send& send);
  void finish_all(const Sends::Which& which);

  Groups groups_;
  uint32_t microbatches_;
  std::chrono::milliseconds timeout_;
  uint32_t rank_ = 0;
  uint32_t ranks_ = 1;
  uint64_t step_ = 0;  // twice its number, and one more if it trains: as headers have it
  size_t send_slots_ = 1;
  c10::Device device_ = c10::kCPU;
  Buffers buffers_;
  std::map<Key, std::vector<Spec>> sent_before_;
  std::map<Key, std::vector<Spec>> received_before_;
  std::map<Key, std::unique_ptr<Incoming>> incoming_;
  Sends sends_;
  Outcome outcome_;
  ChannelStats stats_;
  std::string broken_;
};

}  // namespace tenure::pipeline
