// What a wait for several owners does.
#include <tenure/store/exchange.h>

#include "served.h"
#include <tenure/store/frame.h>
#include <tenure/store/requesting.h>

#include <gtest/gtest.h>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace tenure::store {
namespace {

// Everything lies in it already, as what TLS has decrypted does: its socket has no more to say.
class Prefilled final : public Transport {
 public:
  Prefilled(size_t messages, std::vector<std::byte> message)
      : left_(messages), message_(std::move(message)), silent_(::eventfd(0, EFD_CLOEXEC)) {}

  size_t send_some(std::span<const std::byte> bytes) override { return bytes.size(); }
  size_t receive_some(std::span<std::byte> into, int* descriptor) override {
    *descriptor = -1;
    if (left_ == 0 || into.size() < message_.size()) {
      return 0;
    }
    --left_;
    std::ranges::copy(message_, into.begin());
    return message_.size();
  }

  [[nodiscard]] int descriptor() const override { return silent_.get(); }
  [[nodiscard]] short awaited(bool /*sending*/) const override { return POLLIN; }
  [[nodiscard]] Wire wire() const override { return Wire::tls; }

 private:
  size_t left_;
  std::vector<std::byte> message_;
  Socket silent_;
};

TEST(Exchange, WhatCameInThatMuchItHadToLeaveOffIsReadToItsEnd) {
  constexpr size_t kMessages = 3000;  // more than a turn's
  Connections connections({.job = kJob, .secret = kSecret}, trainer(0));
  const auto origin = std::make_shared<const Origin>(Origin{
      .job = kJob, .owner = kOwner, .host = {}, .path = {}, .address = "127.0.0.1", .port = 1});
  Requesting requesting({origin, Wire::tls}, MessageKind::freed);
  for (size_t i = 0; i < kMessages; ++i) {
    requesting.ask(MessageKind::same, {});
  }
  auto line = std::make_unique<Line>();
  line->transport =
      std::make_unique<Prefilled>(kMessages, frame(MessageKind::freed, encode(FreedAnswer{1})));
  requesting.begin(std::move(line));
  Exchange* const exchange = &requesting;
  EXPECT_NO_THROW(Round(connections, within(2000)).run({&exchange, 1}));
  EXPECT_EQ(requesting.answers().size(), kMessages);
}

}  // namespace
}  // namespace tenure::store
