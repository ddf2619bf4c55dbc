// Sends: messages on their way to other ranks, oldest first, each with the tensors that it reads.
// One thread.
//
// Note [When a send is done]
// Gloo tells that a send is done to who waits for it, and to nobody else. So a thread waits for
// those of one cargo to one peer, which leave in order. What it has seen is looked up between
// actions, and tensors go there: on that thread they would go while the step reads what the
// allocator has given out. A device's backend can be asked.
#pragma once

#include <tenure/core/alias.h>
#include <tenure/pipeline/header.h>
#include <tenure/pipeline/messages.h>

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace c10d {
class Work;
}

namespace tenure::pipeline {

struct Send {
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  struct OnHost;  // works, and the words that one of them reads

  Send();
  ~Send();
  Send(Send&&) noexcept;
  Send& operator=(Send&&) noexcept;

  Header::Words& words();
  void add_on_host(WorkPtr work);

  Message message;
  std::shared_ptr<OnHost> on_host;
  std::vector<WorkPtr> on_device;
  std::vector<Alias> tensors;
};

class Sends {
 public:
  using Which = std::function<bool(const Send&)>;

  explicit Sends(std::chrono::milliseconds timeout);
  ~Sends();
  Sends(const Sends&) = delete;
  Sends& operator=(const Sends&) = delete;

  void add(Send send);
  // Lets go of those that have left.
  void settle();
  size_t count(const Which& which) const;
  // The oldest of those, which is no longer here; nothing if there is none.
  std::optional<Send> take(const Which& which);
  // Until it has left. Throws what the backend throws, and when it takes longer than the timeout.
  void wait(const Send& sent);
  // Of tensors.
  int64_t bytes() const;

 private:
  class Line;

  Line& line_of(const Message& message);
  bool has_left(const Send& sent);

  std::chrono::milliseconds timeout_;
  std::vector<Send> all_;
  std::map<std::pair<uint32_t, Cargo>, std::unique_ptr<Line>> lines_;
};

}  // namespace tenure::pipeline
