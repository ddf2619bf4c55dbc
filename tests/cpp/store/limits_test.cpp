// What a server lets its members use: places, and bytes and time for what they are told.
#include "served.h"
#include "stranger.h"
#include <tenure/store/errors.h>
#include <tenure/store/frame.h>

#include <gtest/gtest.h>

#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

namespace tenure::store {
namespace {

// Tells those who hear notices more than a socket holds.
void say_much(Served& owner) {
  for (int scope = 0; scope < 20'000; ++scope) {
    owner.server.close(step(scope), kOwner);
  }
}

class LimitsOn : public testing::TestWithParam<Wire> {};
INSTANTIATE_TEST_SUITE_P(Wires, LimitsOn, testing::Values(Wire::local, Wire::tcp),
                         [](const auto& wire) {
                           return wire.param == Wire::local ? "local" : "tcp";
                         });

TEST(Limits, ConnectionsThatLieIdleMakePlaceForMembers) {
  Served owner(kOwner, [](ServerOptions& options) {
    options.most_connections = 8;
    options.stall_ms = 400;  // a quarter is how long one must be idle
  });
  const Handle handle = owner.put(100'000);
  std::vector<std::unique_ptr<Client>> clients;
  for (int32_t rank = 0; rank < 7; ++rank) {
    clients.push_back(std::make_unique<Client>(client_options(trainer(rank))));
    EXPECT_TRUE(get(*clients.back(), {want(handle)}).bytes(0) == pattern(100'000)) << rank;
  }
  EXPECT_TRUE(get(*clients.front(), {want(handle)}).bytes(0) == pattern(100'000));
  EXPECT_EQ(owner.objects.stats().consumers, 7U);
  EXPECT_EQ(owner.server.stats().refused_full, 0U);
}

TEST(Limits, ThoseThatComeAtOnceDoNotWaitForEachOther) {
  constexpr int kClients = 100;
  Served owner(kOwner, [](ServerOptions& options) {
    options.most_connections = kClients + 10;
    options.stall_ms = 400;
  });
  const Handle handle = owner.put(1000);
  std::vector<std::unique_ptr<Client>> clients;
  for (int32_t rank = 0; rank < kClients; ++rank) {
    clients.push_back(std::make_unique<Client>(client_options(trainer(rank))));
  }
  std::atomic<size_t> next{0};
  std::atomic<int> served{0};
  const auto begun = std::chrono::steady_clock::now();
  {
    std::vector<std::jthread> threads(16);
    for (auto& thread : threads) {
      thread = std::jthread([&] {
        for (size_t i = next++; i < clients.size(); i = next++) {
          EXPECT_NO_THROW(get(*clients[i], {want(handle)}));
          ++served;
        }
      });
    }
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(4));
  EXPECT_EQ(served, kClients);
  EXPECT_EQ(owner.objects.stats().consumers, static_cast<uint64_t>(kClients));
}

TEST(Limits, TheOnlyConnectionOfOneThatFetchedMakesNoPlace) {
  Served owner(kOwner, [](ServerOptions& options) { options.most_connections = 1; });
  const Handle handle = owner.put(100'000);
  Stranger member(*owner.server.origin(), Wire::local);
  member.shake_hands();
  member.introduce();
  const Wish wish{.id = handle.id, .rows = {}};
  member.say(frame(MessageKind::fetch, encode(Fetch{{wish}})));
  static_cast<void>(member.hear(kHeaderBytes));
  Client client(client_options());
  EXPECT_THROW(get(client, {want(handle)}), AccessRefused);
  EXPECT_EQ(owner.objects.stats().consumers, 1U);
}

TEST(Limits, OneThatWasNotAskedYetMakesNoPlace) {
  Served owner(kOwner, [](ServerOptions& options) {
    options.most_connections = 1;
    options.stall_ms = 4;
  });
  Stranger member(*owner.server.origin(), Wire::local);
  member.shake_hands();
  member.introduce();
  const Handle handle = owner.put(1000);
  Client client(client_options());
  EXPECT_THROW(get(client, {want(handle)}), AccessRefused);
  member.say(frame(MessageKind::ask, encode(Ask{})));
  EXPECT_EQ(member.hear(kHeaderBytes).size(), kHeaderBytes);
}

TEST(Limits, WhatIsWithdrawnAtOnceIsToldInPortions) {
  constexpr size_t kMany = 20'000;
  Served owner(kOwner, [](ServerOptions& options) { options.most_outstanding = 64 << 10; });
  std::atomic<size_t> told{0};
  auto options = client_options();
  options.withdrawn = [&](const Member&, std::span<const ObjectId> ids) { told += ids.size(); };
  Client client(options);
  get(client, {want(owner.put(10))});
  owner.objects.begin_call(step(2), "logits");
  for (size_t i = 0; i < kMany; ++i) {
    put(owner.objects, step(2), 8, {}, "logits", i);
  }
  owner.objects.fail_call(step(2), "logits");
  owner.server.tell_withdrawn();
  EXPECT_TRUE(eventually([&] { return told == kMany; }));
  EXPECT_EQ(owner.server.stats().dropped_slow, 0U);
}

TEST(Limits, OneThatRenewsAndDoesNotListenIsDropped) {
  Served owner(kOwner, [](ServerOptions& options) { options.stall_ms = 100; });
  Stranger deaf(*owner.server.origin(), Wire::local);
  deaf.shake_hands();
  deaf.introduce(Purpose::notices);
  say_much(owner);
  EXPECT_TRUE(eventually([&] {
    deaf.say(frame(MessageKind::renew));
    return owner.server.stats().dropped_slow == 1;
  }));
}

TEST(Limits, OneThatDoesNotListenLeavesNoMoreThanItsLimit) {
  Served owner(kOwner, [](ServerOptions& options) {
    options.most_outstanding = 10'000;
    options.most_notices = 10'000;
  });
  Stranger deaf(*owner.server.origin(), Wire::local);
  deaf.shake_hands();
  deaf.introduce(Purpose::notices);
  say_much(owner);
  EXPECT_TRUE(eventually([&] { return owner.server.stats().dropped_slow == 1; }));
}

TEST(Limits, ALongAnswerIsNotItsClientsDelay) {
  Served owner(kOwner, [](ServerOptions& options) { options.stall_ms = 5; });
  const Handle handle = owner.put(64 << 20);
  Stranger member(*owner.server.origin(), Wire::local);
  member.shake_hands();
  member.introduce();
  auto said =
      frame(MessageKind::same, encode(Same{.id = handle.id, .fingerprint = {std::byte{1}}}));
  said.resize(said.size() + 1, std::byte{'t'});  // the next message begins
  member.say(said);
  EXPECT_EQ(member.hear(kHeaderBytes + 8).size(), kHeaderBytes + 8);
}

TEST_P(LimitsOn, OneThatSpeaksAByteNowAndThenIsDropped) {
  Served owner(kOwner, [](ServerOptions& options) { options.stall_ms = 300; });
  const Stranger member(*owner.server.origin(), GetParam());
  member.shake_hands();
  member.introduce();
  member.say(encode(Header{MessageKind::fetch, 4000, 0}));
  const std::byte one{};
  EXPECT_TRUE(eventually([&] {
    member.say({&one, 1});
    return member.is_ended(20);
  }));
  EXPECT_EQ(owner.server.stats().dropped_slow, 1U);
}

TEST_P(LimitsOn, WithoutDescriptorsForLongItSaysSo) {
  const Served owner;
  Stranger first;
  Stranger second;
  first.prepare(GetParam());
  second.prepare(GetParam());
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  rlimit few = before;
  few.rlim_cur = 256;
  ::setrlimit(RLIMIT_NOFILE, &few);
  std::vector<Descriptor> all;
  for (int one = ::dup(2); one >= 0; one = ::dup(2)) {
    all.emplace_back(one);
  }
  for (Stranger* one : {&first, &second}) {
    one->connect(*owner.server.origin());
    EXPECT_EQ(one->hear_answer().verdict, Verdict::no_descriptors);
  }
  all.clear();
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(owner.server.stats().refused_full, 2U);
}

}  // namespace
}  // namespace tenure::store
