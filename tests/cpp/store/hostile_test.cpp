// A live server against good sessions that were changed on their way.
#include "served.h"
#include "stranger.h"
#include <tenure/store/frame.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <random>

namespace tenure::store {
namespace {

using Bytes = std::vector<std::byte>;

size_t open_descriptors() {
  return static_cast<size_t>(std::ranges::distance(
      std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator()));
}

Bytes introduction(Purpose purpose) {
  return frame(MessageKind::introduce,
               encode(Introduce{.job = kJob, .member = trainer(9, 99), .purpose = purpose}));
}

// What members say after the hello.
std::vector<Bytes> good_sessions(const std::vector<ObjectId>& ids) {
  std::vector<Bytes> sessions(3);
  Fetch fetch;
  for (const ObjectId id : ids) {
    fetch.wishes.push_back({.id = id, .rows = {}, .copied = id.slot % 2 == 0});
  }
  sessions[0] = introduction(Purpose::requests);
  append_frame(sessions[0], MessageKind::fetch, encode(fetch));
  append_frame(sessions[0], MessageKind::same, encode(Same{.id = ids[0], .fingerprint = {}}));
  sessions[1] = introduction(Purpose::requests);
  append_frame(sessions[1], MessageKind::ask, encode(Ask{}));
  append_frame(sessions[1], MessageKind::ask, encode(Ask{.question = Question::list}));
  append_frame(sessions[1], MessageKind::close, encode(Close{step(77)}));
  append_frame(sessions[1], MessageKind::free, encode(Ids{{{1000, 1}}}));
  sessions[2] = introduction(Purpose::notices);
  append_frame(sessions[2], MessageKind::renew, {});
  append_frame(sessions[2], MessageKind::fetched, encode(Ids{ids}));
  append_frame(sessions[2], MessageKind::unmapped, encode(Ids{ids}));
  return sessions;
}

Bytes changed(Bytes bytes, std::mt19937_64& random) {
  const auto at = [&] { return static_cast<ptrdiff_t>(random() % (bytes.size() + 1)); };
  for (uint64_t changes = 1 + random() % 3; changes > 0 && !bytes.empty(); --changes) {
    const auto place = std::min(at(), static_cast<ptrdiff_t>(bytes.size()) - 1);
    switch (random() % 4) {
      case 0:
        bytes[static_cast<size_t>(place)] ^= static_cast<std::byte>(1U << (random() % 8));
        break;
      case 1:
        bytes[static_cast<size_t>(place)] = static_cast<std::byte>(random());
        break;
      case 2:
        bytes.resize(static_cast<size_t>(place));
        break;
      default:
        bytes.insert(bytes.begin() + place, random() % 64, static_cast<std::byte>(random()));
    }
  }
  return bytes;
}

TEST(Hostile, ChangedSessionsLeaveNothingBehind) {
  Served owner;
  std::vector<ObjectId> ids;
  for (const uint64_t bytes : {10UL, 1000UL, 100'000UL, 1UL << 20}) {
    ids.push_back(owner.put(bytes).id);
  }
  const auto sessions = good_sessions(ids);
  std::mt19937_64 random(20'261'117);
  uint64_t all = 0;
  const auto attack = [&](int cases) {
    for (int i = 0; i < cases; ++i) {
      const Bytes& session = sessions[random() % sessions.size()];
      const Wire wire = random() % 4 == 0 ? Wire::tcp : Wire::local;
      const Stranger stranger(*owner.server.origin(), wire);
      if (wire == Wire::tcp) {
        stranger.shake_hands();
        stranger.say(changed(session, random));
        continue;
      }
      const auto hello = encode(stranger.hello());
      Bytes whole(hello.begin(), hello.end());
      whole.insert(whole.end(), session.begin(), session.end());
      stranger.say(changed(std::move(whole), random));
    }
    all += static_cast<uint64_t>(cases);
    return eventually([&] {
      const ServerStats stats = owner.server.stats();
      return stats.accepted == all && stats.connections == 0;
    });
  };
  ASSERT_TRUE(attack(500));  // what is allocated once
  const size_t descriptors = open_descriptors();
  const int64_t memory = resident("RssAnon:");
  ASSERT_TRUE(attack(3000));
  EXPECT_EQ(open_descriptors(), descriptors);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which keep what is freed
  EXPECT_LT(resident("RssAnon:") - memory, 4 << 20);
#endif
  static_cast<void>(memory);
  EXPECT_GT(owner.server.stats().dropped_protocol, 100U);
  Client client(client_options());
  const Handle handle = owner.put(100'000);
  for (const Over over : {Over::best, Over::tcp}) {
    EXPECT_TRUE(get(client, {want(handle, over)}).bytes(0) == pattern(100'000));
  }
}

}  // namespace
}  // namespace tenure::store
