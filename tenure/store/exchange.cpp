#include <tenure/store/exchange.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/store/errors.h>
#include <tenure/store/frame.h>
#include <tenure/store/waiting.h>

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

namespace tenure::store {
namespace {

constexpr uint64_t kStraight = 32 << 10;  // a payload from here on is received where it belongs
constexpr uint64_t kAtOnce = 32 << 20;    // then another owner has a turn
constexpr uint64_t kPiece = 4 << 20;      // in one receive

}  // namespace

Exchange::~Exchange() { give_up(); }

// Note [Lent], connection.cpp: a message that is cut short says that the answers were not all read.
void Exchange::give_up() {
  if (!line_ || line_->transport->wire() != Wire::local) {
    return;
  }
  try {
    const std::byte cut_short{0};
    line_->transport->send_some({&cut_short, 1});
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): it has ended, and the owner knows
  }
}

void Exchange::begin(std::unique_ptr<Line> line) {
  line_ = std::move(line);
  heard_ = false;
  outgoing_.clear();
  sent_ = 0;
  payload_left_ = 0;
  descriptors_.clear();
  speak();
}

std::unique_ptr<Line> Exchange::end() { return std::move(line_); }

void Exchange::say(MessageKind kind, std::span<const std::byte> body) {
  if (sent_ == outgoing_.size()) {
    outgoing_.clear();
    sent_ = 0;
  }
  append_frame(outgoing_, kind, body);
}

void Exchange::rest() {
  line_->was_idle = true;
  heard_ = false;
}

Descriptor Exchange::take_descriptor() {
  if (descriptors_.empty()) {
    throw InputError(text(route_text(route_), " sent no descriptor where one belongs"));
  }
  auto descriptor = std::move(descriptors_.front());
  descriptors_.pop_front();
  return descriptor;
}

void Exchange::move_all() {
  send();
  uint64_t turn = 0;
  goes_on_ = false;
  while (!finished()) {
    if (turn >= kAtOnce) {
      goes_on_ = true;
      return;
    }
    const uint64_t before = payload_left_;
    if (!receive()) {
      return;
    }
    turn += before > payload_left_ ? before - payload_left_ : kStraight;
    parse();
    send();
  }
}

void Exchange::send() {
  while (sent_ < outgoing_.size()) {
    const size_t sent = line_->transport->send_some(std::span(outgoing_).subspan(sent_));
    if (sent == 0) {
      return;
    }
    sent_ += sent;
  }
}

bool Exchange::receive() {
  int descriptor = -1;
  size_t got = 0;
  auto& incoming = line_->incoming;
  if (payload_left_ >= kStraight && incoming.empty()) {
    const size_t piece = std::min(payload_left_, kPiece);
    got = line_->transport->receive_some({payload_, piece}, &descriptor);
    payload_ += got;
    payload_left_ -= got;
    if (got > 0 && payload_left_ == 0) {
      payload_came();
    }
  } else {
    got = line_->transport->receive_some(incoming.room(), &descriptor);
    incoming.arrived(got);
  }
  if (descriptor != -1) {
    descriptors_.emplace_back(descriptor);
  }
  heard_ = heard_ || got > 0;
  return got > 0;
}

void Exchange::parse() {
  auto& incoming = line_->incoming;
  while (!incoming.empty()) {
    const auto bytes = incoming.bytes();
    if (payload_left_ > 0) {
      const size_t count = std::min<uint64_t>(payload_left_, bytes.size());
      std::memcpy(payload_, bytes.data(), count);
      incoming.consume(count);
      payload_ += count;
      payload_left_ -= count;
      if (payload_left_ == 0) {
        payload_came();
      }
      continue;
    }
    if (bytes.size() < kHeaderBytes) {
      return;
    }
    const auto header = decode_header(bytes.first<kHeaderBytes>());
    if (!header || header->kind < MessageKind::welcome) {
      throw InputError(text("what ", route_text(route_), " sent is not of the store's protocol"));
    }
    if (bytes.size() < kHeaderBytes + header->body_bytes) {
      return;
    }
    std::byte* const payload = hear(*header, bytes.subspan(kHeaderBytes, header->body_bytes));
    incoming.consume(kHeaderBytes + header->body_bytes);
    payload_ = payload;
    payload_left_ = header->payload_bytes;
  }
}

short Exchange::awaited() const {
  const bool sending = sent_ < outgoing_.size();
  auto events = line_->transport->awaited(false);
  if (sending) {
    events = static_cast<short>(events | line_->transport->awaited(true));
  }
  return events;
}

std::exception_ptr Round::move(Exchange& exchange) {
  try {
    exchange.move_all();
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

std::exception_ptr Round::turn(Exchange& exchange) {
  std::exception_ptr failure = move(exchange);
  if (!failure) {
    return nullptr;
  }
  if (!exchange.may_begin_again()) {
    return named(exchange.route(), failure);
  }
  try {
    exchange.begin(connections_.connect(exchange.route(), Purpose::requests, deadline_));
  } catch (...) {
    return std::current_exception();
  }
  failure = move(exchange);
  return failure ? named(exchange.route(), failure) : nullptr;
}

void Round::run(std::span<Exchange* const> exchanges) {
  std::vector<std::exception_ptr> failures(exchanges.size());
  run(exchanges, failures, OnFailure::stop);
  const auto failed = std::ranges::find_if(failures, [](const auto& failure) { return !!failure; });
  if (failed != failures.end()) {
    std::rethrow_exception(*failed);
  }
}

void Round::run(std::span<Exchange* const> exchanges, std::span<std::exception_ptr> failures) {
  run(exchanges, failures, OnFailure::go_on);
}

void Round::run(std::span<Exchange* const> exchanges, std::span<std::exception_ptr> failures,
                OnFailure on_failure) {
  std::vector<pollfd> awaited(exchanges.size());
  const auto stops = [&](size_t i) { return failures[i] && on_failure == OnFailure::stop; };
  for (size_t i = 0; i < exchanges.size(); ++i) {
    if (!failures[i]) {
      failures[i] = turn(*exchanges[i]);
    }
    if (stops(i)) {
      return;
    }
  }
  for (;;) {
    bool waits = false;
    bool goes_on = false;
    for (size_t i = 0; i < exchanges.size(); ++i) {
      const Exchange& exchange = *exchanges[i];
      const bool under_way = !failures[i] && !exchange.finished();
      awaited[i] = under_way
                       ? pollfd{exchange.line_->transport->descriptor(), exchange.awaited(), 0}
                       : pollfd{-1, 0, 0};
      waits = waits || under_way;
      goes_on = goes_on || (under_way && exchange.goes_on_);
    }
    if (!waits) {
      return;
    }
    poll_or_act(awaited.data(), awaited.size(), goes_on ? 0 : poll_time(deadline_));
    const bool late = std::chrono::steady_clock::now() >= deadline_;
    for (size_t i = 0; i < exchanges.size(); ++i) {
      if (awaited[i].fd < 0) {
        continue;
      }
      if (awaited[i].revents != 0 || exchanges[i]->goes_on_) {
        failures[i] = turn(*exchanges[i]);
      }
      if (late && !failures[i] && !exchanges[i]->finished()) {
        failures[i] = named(
            exchanges[i]->route(),
            std::make_exception_ptr(StoreTimeout("no answer came in the time that was given")));
      }
      if (stops(i)) {
        return;
      }
    }
  }
}

}  // namespace tenure::store
