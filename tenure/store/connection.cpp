#include <tenure/config.h>

#if TENURE_HAVE_ASIO

#include <tenure/core/error.h>
#include <tenure/store/connection.h>
#include <tenure/store/frame.h>

#include <asio/post.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <utility>

// Note [Lent]
// A descriptor that was sent counts as mapped until the consumer says otherwise, and it may never
// have been taken: the consumer gave the connection up in the middle of an answer. It then ends it
// with a message that is cut short, or with bytes unread, which a Unix socket reports as
// ECONNRESET; otherwise it reads to the end of the answer and leaves between two messages. So the
// objects of the last fetch are given back if the connection ends in one of the first two ways, or
// before all was sent, and the client does not say `unmapped` for them.

namespace tenure::store {
namespace {

constexpr size_t kFirstRoom = 16 << 10;
constexpr uint64_t kTurnBytes = 16 << 20;  // then the others have a turn

}  // namespace

Connection::Connection(Serving& serving, std::unique_ptr<Stream> stream, Place place)
    : serving_(serving),
      stream_(std::move(stream)),
      waiter_(serving.io, stream_->descriptor()),
      place_(place),
      incoming_(kFirstRoom),
      since_(std::chrono::steady_clock::now()),
      heard_(since_),
      told_(since_) {}

Connection::~Connection() {
  // The stream owns the descriptor.
  if (waiter_.is_open()) {
    waiter_.release();
  }
}

bool Connection::is_late(Time now) const {
  if (is_stranger()) {
    return now - since_ > std::chrono::milliseconds(serving_.options.hello_ms);
  }
  const auto late = [&](Time last) {
    return now - last > std::chrono::milliseconds(serving_.options.stall_ms);
  };
  // On a connection for notices each direction has its own time.
  if (!sending_.empty() && late(hears_notices() ? told_ : moved())) {
    return true;
  }
  // What lies here while another request is at work waits for this side.
  const bool reads = hears_notices() || (sending_.empty() && !fetch_ && !comparison_);
  const auto begun = hears_notices() ? hearing_.begun() : std::max(hearing_.begun(), told_);
  const std::chrono::milliseconds pace(kPaceStalls * serving_.options.stall_ms);
  return reads && !incoming_.empty() &&
         (late(hears_notices() ? heard_ : moved()) || now - begun > pace);
}

bool Connection::is_spare() const {
  return was_asked_ && incoming_.empty() && sending_.empty() && !fetch_ && !comparison_ &&
         (!consumer_ || serving_.has_more(member_));
}

void Connection::turn() {
  if (ended_) {
    return;
  }
  try {
    advance();
  } catch (const InputError&) {
    drop(serving_.counters.dropped_protocol);
  } catch (const std::exception&) {
    // Out of memory, most likely: this one goes, the rest goes on.
    drop(serving_.counters.dropped_protocol);
  }
}

void Connection::advance() {
  uint64_t turn_end = sending_.sent() + kTurnBytes;
  while (!ended_) {
    if (sending_.sent() >= turn_end) {
      return run_again();
    }
    if (work() == Step::wait) {
      return run_again();
    }
    if (!sending_.empty() && !send_blocked_ && send() == Step::again) {
      continue;
    }
    if (ended_) {
      return;
    }
    const bool answers_first = !sending_.empty() && !hears_notices();
    if (leaving_ || answers_first || receive() == Step::wait) {
      return await();
    }
  }
}

Connection::Step Connection::work() {
  if (comparison_) {
    compare_some();
    return comparison_ ? Step::wait : Step::again;
  }
  if (fetch_) {
    answer_wishes();
  }
  push_notices();
  return Step::again;
}

Connection::Step Connection::send() {
  const uint64_t before = sending_.sent();
  const Moved moved = sending_.flush(*stream_, kTurnBytes);
  serving_.counters.sent_bytes.fetch_add(sending_.sent() - before, std::memory_order_relaxed);
  note_passed();
  if (sending_.sent() != before) {
    told_ = std::chrono::steady_clock::now();
  }
  if (moved.move == Move::ended) {
    ended_by_peer(moved.error == 0 ? -1 : moved.error);
    return Step::wait;
  }
  if (moved.move == Move::blocked) {
    send_blocked_ = true;
    return Step::wait;
  }
  if (leaving_ && sending_.empty()) {
    end();
    return Step::wait;
  }
  return Step::again;
}

void Connection::note_passed() {
  for (const ObjectId id : sending_.take_passed()) {
    serving_.objects.mapped(consumer(), id);
    lent_.push_back(id);
  }
}

Connection::Step Connection::receive() {
  switch (stage_) {
    case Stage::hello:
      if (take_hello()) {
        return Step::again;
      }
      break;
    case Stage::proof:
      if (take_proof()) {
        return Step::again;
      }
      break;
    default:
      if (take_frame()) {
        return Step::again;
      }
  }
  if (ended_) {
    return Step::wait;
  }
  const Moved moved = stream_->receive(incoming_.room());
  if (moved.move == Move::ended) {
    ended_by_peer(moved.error);
    return Step::wait;
  }
  if (moved.move != Move::some) {
    return Step::wait;
  }
  heard_ = std::chrono::steady_clock::now();
  if (incoming_.empty()) {
    hearing_.begin(heard_);
  }
  hearing_.moved(moved.bytes, heard_);
  incoming_.arrived(moved.bytes);
  return Step::again;
}

void Connection::await() {
  if (ended_) {
    return;
  }
  if (!sending_.empty() && !awaits_write_) {
    awaits_write_ = true;
    waiter_.async_wait(asio::posix::stream_descriptor::wait_write,
                       [self = shared_from_this()](const asio::error_code& error) {
                         self->awaits_write_ = false;
                         self->send_blocked_ = false;
                         if (!error) {
                           self->turn();
                         }
                       });
  }
  const bool reads = sending_.empty() || hears_notices();
  if (reads && !leaving_ && !awaits_read_) {
    awaits_read_ = true;
    waiter_.async_wait(asio::posix::stream_descriptor::wait_read,
                       [self = shared_from_this()](const asio::error_code& error) {
                         self->awaits_read_ = false;
                         if (!error) {
                           self->turn();
                         }
                       });
  }
}

void Connection::run_again() {
  if (!ended_) {
    asio::post(serving_.io, [self = shared_from_this()] { self->turn(); });
  }
}

void Connection::tell(const Notice& notice) {
  if (ended_) {
    return;
  }
  if (notices_bytes_ + notice->size() > serving_.options.most_notices) {
    drop(serving_.counters.dropped_slow);
    return;
  }
  if (sending_.empty()) {
    told_ = std::chrono::steady_clock::now();
  }
  notices_bytes_ += notice->size();
  notices_.push_back(notice);
  turn();
}

void Connection::push_notices() {
  while (!notices_.empty() && sending_.outstanding() < serving_.options.most_outstanding) {
    const Notice notice = std::move(notices_.front());
    notices_.pop_front();
    notices_bytes_ -= notice->size();
    sending_.push(*notice);
  }
}

void Connection::ended_by_peer(int error) {
  // Over TCP a client that finds our proof wrong goes without a word.
  if (stage_ == Stage::proof) {
    serving_.counters.refused_secret.fetch_add(1, std::memory_order_relaxed);
  } else if (is_stranger() && (!incoming_.empty() || error == EPROTO)) {
    serving_.counters.dropped_protocol.fetch_add(1, std::memory_order_relaxed);
  }
  was_given_up_ = error != 0 || !incoming_.empty();
  end();
}

void Connection::drop(std::atomic<uint64_t>& counter) {
  if (ended_) {
    return;
  }
  counter.fetch_add(1, std::memory_order_relaxed);
  end();
}

void Connection::end() {
  if (std::exchange(ended_, true)) {
    return;
  }
  if (consumer_) {
    if (was_given_up_ || fetch_ || !sending_.empty()) {
      for (const ObjectId id : lent_) {
        serving_.objects.unmapped(*consumer_, id);
      }
    }
    serving_.leave(member_);
    consumer_.reset();
  }
  const auto self = shared_from_this();
  serving_.connections.erase(this);
  fetch_.reset();
  comparison_.reset();
  waiter_.release();
  stream_.reset();
  serving_.counters.connections.store(serving_.connections.size(), std::memory_order_release);
}

}  // namespace tenure::store

#endif
