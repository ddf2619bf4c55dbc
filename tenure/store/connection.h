// Connection: one accepted connection, from its hello to its end. It reads one request, sends all
// its answers, then reads the next: what it holds in memory is bounded by one request and
// `most_outstanding`. On the server's thread alone. Torch-free; needs Asio.
#pragma once

#include <tenure/store/fingerprint.h>
#include <tenure/store/hello.h>
#include <tenure/store/incoming.h>
#include <tenure/store/messages.h>
#include <tenure/store/objects.h>
#include <tenure/store/pace.h>
#include <tenure/store/sending.h>
#include <tenure/store/serving.h>
#include <tenure/store/stream.h>

#include <asio/posix/stream_descriptor.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace tenure::store {

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Notice = std::shared_ptr<const std::vector<std::byte>>;  // of all that are told
  enum class Place : uint8_t { taken, none, no_descriptors };    // if it has none it is told so

  Connection(Serving& serving, std::unique_ptr<Stream> stream, Place place);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  Connection(Connection&&) = delete;
  Connection& operator=(Connection&&) = delete;
  ~Connection();

  // Of one that has no place.
  static Verdict verdict_of(Place place) {
    return place == Place::none ? Verdict::full : Verdict::no_descriptors;
  }

  // Does what can be done now, and waits for the rest.
  void turn();
  // Sends a notice. One that does not listen for too long, or to too much, is ended.
  void tell(const Notice& notice);
  // What it had is given back, and it leaves the server's table.
  void end();

  [[nodiscard]] bool is_stranger() const { return stage_ != Stage::member; }
  [[nodiscard]] bool said_hello() const { return stage_ != Stage::hello; }
  [[nodiscard]] bool hears_notices() const {
    return stage_ == Stage::member && purpose_ == Purpose::notices;
  }
  [[nodiscard]] bool is_late(Time now) const;
  // Has answered a request and waits for another, of a member that is here with another connection
  // or has fetched nothing: its client loses nothing if it ends.
  [[nodiscard]] bool is_spare() const;
  [[nodiscard]] Time since() const { return since_; }
  [[nodiscard]] Time moved() const { return std::max(heard_, told_); }
  [[nodiscard]] Wire wire() const { return stream_->wire(); }

 private:
  enum class Stage : uint8_t { hello, proof, introduce, member };
  enum class Step : uint8_t { again, wait };

  // A comparison of an object's content with a fingerprint, done in pieces.
  struct Comparison {
    Fingerprint wanted{};
    std::shared_ptr<const Content> content;
    uint64_t offset = 0;
    uint64_t bytes = 0;
    Fingerprinter seen;
  };

  void advance();
  Step send();
  Step receive();
  Step work();  // on the request at hand, or the notices
  void await();
  void run_again();
  void ended_by_peer(int error);
  void drop(std::atomic<uint64_t>& counter);

  // Each takes what it needs from the front of the incoming bytes; false: not all there yet.
  bool take_hello();
  bool take_proof();
  bool take_frame();

  void answer_hello(const Hello& hello);
  void refuse(Verdict verdict, std::atomic<uint64_t>& counter);
  void handle(MessageKind kind, std::span<const std::byte> body);
  void handle_request(MessageKind kind, std::span<const std::byte> body);
  void handle_notice(MessageKind kind, std::span<const std::byte> body);
  void introduce(const Introduce& who);
  void push_notices();
  void answer_wishes();
  void answer_wish(uint32_t index, const Wish& wish);
  void begin_comparison(const Same& same);
  void compare_some();
  void note_passed();
  ConsumerId consumer();

  Serving& serving_;
  std::unique_ptr<Stream> stream_;
  asio::posix::stream_descriptor waiter_;
  bool awaits_read_ = false;
  bool awaits_write_ = false;
  bool ended_ = false;
  bool was_given_up_ = false;  // by the other side, in the middle of something
  bool leaving_ = false;       // ends when all is sent

  const Place place_;
  bool was_asked_ = false;
  Stage stage_ = Stage::hello;
  Purpose purpose_ = Purpose::requests;
  Hello hello_;
  Nonce nonce_{};
  Member member_;
  std::optional<ConsumerId> consumer_;

  Incoming incoming_;
  Sending sending_;
  bool send_blocked_ = false;
  std::deque<Notice> notices_;  // that sending_ has no room for yet
  uint64_t notices_bytes_ = 0;
  std::optional<Fetch> fetch_;
  size_t next_wish_ = 0;
  std::optional<Comparison> comparison_;
  // Descriptors of the fetch whose end the client has not shown to have read. Note [Lent].
  std::vector<ObjectId> lent_;

  Time since_;
  Time heard_;    // bytes came
  Time told_;     // bytes went out, or there were none that should
  Pace hearing_;  // of the message that comes
};

}  // namespace tenure::store
