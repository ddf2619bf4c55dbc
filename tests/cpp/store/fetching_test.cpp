// What a fetch gives, over each wire.
#include <tenure/store/fetching.h>

#include "served.h"
#include <tenure/store/connections.h>
#include <tenure/store/errors.h>
#include <tenure/store/fingerprint.h>

#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace tenure::store {
namespace {

// A connection whose owner ends it when its first message is answered.
class OneMessage final : public Transport {
 public:
  OneMessage(std::unique_ptr<Transport> inner, size_t bytes)
      : inner_(std::move(inner)), left_(bytes) {}

  size_t send_some(std::span<const std::byte> bytes) override {
    if (left_ == 0) {
      throw OwnerLost("the connection was ended from there");
    }
    const size_t sent = inner_->send_some(bytes.first(std::min(left_, bytes.size())));
    left_ -= sent;
    return sent;
  }
  size_t receive_some(std::span<std::byte> into, int* descriptor) override {
    return inner_->receive_some(into, descriptor);
  }

  [[nodiscard]] int descriptor() const override { return inner_->descriptor(); }
  [[nodiscard]] short awaited(bool sending) const override { return inner_->awaited(sending); }
  [[nodiscard]] Wire wire() const override { return inner_->wire(); }

 private:
  std::unique_ptr<Transport> inner_;
  size_t left_;
};

TEST(Fetching, ABatchWhoseConnectionEndedAfterTheLastGoesOverAnother) {
  constexpr size_t kMany = kMostWishes + 10;
  Served owner;
  const Handle handle = owner.put(4);
  const std::vector<Want> wants(kMany, want(handle, Over::tcp));
  std::vector<Got> gots(kMany);
  std::vector<std::array<std::byte, 4>> copies(kMany);
  const std::function<std::byte*(size_t, uint64_t)> memory = [&](size_t i, uint64_t) {
    return copies[i].data();
  };
  const Fetching::Call call{.wants = wants, .gots = gots, .memory = memory, .unmapped = {}};
  const Route route{handle.origin, Wire::tcp};
  Fetching fetching(route, call);
  for (size_t i = 0; i < kMany; ++i) {
    fetching.add(i);
  }
  Connections connections({.job = kJob, .secret = kSecret}, trainer(0));
  auto line = connections.connect(route, Purpose::requests, within(kLong));
  line->transport = std::make_unique<OneMessage>(std::move(line->transport),
                                                 kHeaderBytes + 4 + kMostWishes * kWishBytes);
  fetching.begin(std::move(line));
  Exchange* const exchange = &fetching;
  EXPECT_NO_THROW(Round(connections, within(kLong)).run({&exchange, 1}));
  const auto whole = pattern(4);
  EXPECT_TRUE(std::ranges::all_of(
      copies, [&](const auto& copy) { return std::ranges::equal(copy, whole); }));
}

class OverWire : public testing::TestWithParam<Over> {};
INSTANTIATE_TEST_SUITE_P(Wires, OverWire, testing::Values(Over::best, Over::tcp),
                         [](const auto& wire) {
                           return wire.param == Over::best ? "local" : "tcp";
                         });

TEST_P(OverWire, EverySizeComesByteExact) {
  Served owner;
  Client client(client_options());
  for (const uint64_t bytes : {0UL, 1UL, 4UL << 10, 64UL << 10, 1UL << 20, 64UL << 20}) {
    const Handle handle = owner.put(bytes, bytes + 7);
    const auto gotten = get(client, {want(handle, GetParam())});
    EXPECT_EQ(gotten.gots[0].bytes, bytes);
    EXPECT_EQ(gotten.gots[0].layout, handle.layout);
    EXPECT_TRUE(gotten.bytes(0) == pattern(bytes, bytes + 7)) << bytes;
  }
}

TEST_P(OverWire, WhatIsAskedForAsACopyIsNotMapped) {
  Served owner;
  Client client(client_options());
  const Handle handle = owner.put(1 << 20);
  Want copied = want(handle, GetParam());
  copied.copied = true;
  const auto gotten = get(client, {copied});
  EXPECT_EQ(gotten.gots[0].mapping, nullptr);
  EXPECT_TRUE(gotten.copies[0] == pattern(1 << 20));
}

TEST_P(OverWire, RowsAreAPartOfIt) {
  Served owner;
  Client client(client_options());
  Terms how = terms(step(1), 0);
  how.layout = {Dtype::float32, {1000, 300}};
  const auto whole = pattern(bytes_of(how.layout));
  const Handle handle = handle_to(owner.server.origin(), how, owner.objects.put(how, whole));
  for (const Rows rows : {Rows{3, 1}, Rows{7, 900}, Rows{990, kAllRows}, Rows{5, 0}}) {
    Want some = want(handle, GetParam());
    some.rows = rows;
    const Extent extent = extent_of(how.layout, rows);
    const auto gotten = get(client, {some});
    EXPECT_EQ(gotten.gots[0].layout, extent.layout);
    const auto begin = whole.begin() + static_cast<ptrdiff_t>(extent.offset);
    EXPECT_TRUE(gotten.bytes(0) == std::vector(begin, begin + static_cast<ptrdiff_t>(extent.bytes)))
        << rows.first;
  }
}

TEST_P(OverWire, TenThousandComeInOneCall) {
  Served owner;
  Client client(client_options());
  std::vector<Handle> handles;
  for (uint64_t i = 0; i < 10'000; ++i) {
    handles.push_back(owner.put(4096, i));
  }
  std::vector<Want> wants;
  for (const Handle& handle : handles) {
    wants.push_back(want(handle, GetParam()));
  }
  const auto gotten = get(client, wants);
  for (uint64_t i = 0; i < wants.size(); ++i) {
    ASSERT_TRUE(gotten.copies[i] == pattern(4096, i)) << i;
  }
}

TEST_P(OverWire, SeveralOwnersAreAskedAtOnce) {
  Served first(trainer(0, 21));
  Served second(trainer(1, 22));
  Served third(trainer(2, 23));
  Client client(client_options());
  std::vector<Handle> handles;
  for (uint64_t i = 0; i < 30; ++i) {
    Served& owner = i % 3 == 0 ? first : i % 3 == 1 ? second : third;
    handles.push_back(owner.put(i % 2 == 0 ? 100'000 : 1000, i));
  }
  std::vector<Want> wants;
  for (const Handle& handle : handles) {
    wants.push_back(want(handle, GetParam()));
  }
  const auto gotten = get(client, wants);
  for (uint64_t i = 0; i < wants.size(); ++i) {
    EXPECT_TRUE(gotten.bytes(i) == pattern(handles[i].layout.shape[0], i)) << i;
  }
}

TEST_P(OverWire, TheLastExpectedFetchFreesTheObject) {
  Served owner;
  Client client(client_options());
  const Handle handle = owner.put(100'000, 1, counted(1));
  get(client, {want(handle, GetParam())});
  EXPECT_TRUE(eventually([&] { return owner.objects.stats().objects == 0; }));
}

TEST_P(OverWire, AFetchThatHasMoreToComeIsNotCounted) {
  Served owner;
  Client client(client_options());
  const Handle handle = owner.put(100'000, 1, counted(1));
  const Handle other = owner.put(1000, 1, counted(1));
  Want some = want(handle, GetParam());
  some.more = true;
  // Notices arrive in order: when the second is gone, the first would be, too.
  get(client, {some, want(other, GetParam())});
  EXPECT_TRUE(eventually([&] { return owner.objects.stats().objects == 1; }));
  EXPECT_NO_THROW(get(client, {some}));
}

TEST_P(OverWire, AStaleHandleSaysWhoFreedIt) {
  Served owner;
  Client client(client_options());
  const Handle handle = owner.put(1000);
  owner.objects.free(handle.id, kController);
  EXPECT_TRUE(says(what_of<StaleHandle>([&] { get(client, {want(handle, GetParam())}); }),
                   {"controller 0", "step 1"}));
}

TEST_P(OverWire, OneThatFailsFailsAll) {
  Served owner;
  Client client(client_options());
  const Handle good = owner.put(100'000, 1, counted(1));
  const Handle bad = owner.put(100'000);
  owner.objects.free(bad.id, kController);
  EXPECT_THROW(get(client, {want(good, GetParam()), want(bad, GetParam())}), StaleHandle);
  EXPECT_TRUE(get(client, {want(good, GetParam())}).bytes(0) == pattern(100'000));
}

TEST_P(OverWire, WhoIsNotACollectorIsRefused) {
  Served owner;
  Client client(client_options(trainer(3)));
  const Handle handle = owner.put(1000, 1, listed({{"trainer", 0}}));
  EXPECT_TRUE(says(what_of<AccessRefused>([&] { get(client, {want(handle, GetParam())}); }),
                   {"trainer 0"}));
}

// It travelled through an RPC that the store knows nothing of.
TEST_P(OverWire, AHandleWhoseLayoutIsNotTheOwnersIsRefused) {
  Served owner;
  Client client(client_options());
  for (const int64_t bytes : {1000, 1 << 20}) {
    const Handle handle = owner.put(static_cast<uint64_t>(bytes), 1, counted(1));
    for (const Layout& layout : std::vector<Layout>{{Dtype::uint8, {bytes / 2}},
                                                    {Dtype::uint8, {bytes * 2}},
                                                    {Dtype::int8, {bytes}},
                                                    {Dtype::uint8, {2, bytes / 2}}}) {
      Handle changed = handle;
      changed.layout = layout;
      EXPECT_TRUE(says(what_of<InputError>([&] { get(client, {want(changed, GetParam())}); }),
                       {"rollout 0", "was changed"}));
      Want rows = want(changed, GetParam());
      rows.rows = {0, 1};
      if (layout.dtype == Dtype::int8 || layout.shape.size() == 2) {
        EXPECT_THROW(get(client, {rows}), InputError);
      }
    }
    EXPECT_TRUE(get(client, {want(handle, GetParam())}).bytes(0) ==
                pattern(static_cast<uint64_t>(bytes), 1));
  }
  EXPECT_TRUE(eventually([&] { return owner.objects.stats().objects == 0; }));
  EXPECT_TRUE(eventually([&] { return owner.objects.still_mapped().empty(); }));
}

TEST_P(OverWire, RowsBeyondItAreRefused) {
  Served owner;
  Client client(client_options());
  const Handle handle = owner.put(1000);
  Want beyond = want(handle, GetParam());
  beyond.rows = {900, 200};
  EXPECT_THROW(get(client, {beyond}), InputError);
}

TEST_P(OverWire, ACloseReachesTheConsumer) {
  Served owner;
  std::mutex mutex;
  std::vector<std::pair<Member, ScopeName>> closed;
  auto options = client_options();
  options.scope_closed = [&](const Member& member, const ScopeName& scope) {
    const std::lock_guard lock(mutex);
    closed.emplace_back(member, scope);
  };
  Client client(options);
  const Handle handle = owner.put(1000);
  get(client, {want(handle, GetParam())});
  owner.server.close(step(1), kController);
  EXPECT_TRUE(eventually([&] {
    const std::lock_guard lock(mutex);
    return !closed.empty();
  }));
  const std::lock_guard lock(mutex);
  EXPECT_EQ(closed, (std::vector<std::pair<Member, ScopeName>>{{kOwner, step(1)}}));
}

TEST_P(OverWire, AnOwnerThatIsKilledIsNamedAtOnce) {
  OwnerProcess owner({1000, 100'000});
  ASSERT_EQ(owner.handles().size(), 2U);
  std::atomic<bool> lost = false;
  auto options = client_options();
  options.owner_lost = [&](const Member&) { lost = true; };
  Client client(options);
  get(client, {want(owner.handles()[0], GetParam())});
  owner.kill();
  const auto before = std::chrono::steady_clock::now();
  EXPECT_TRUE(says(what_of<OwnerLost>([&] { get(client, {want(owner.handles()[1], GetParam())}); }),
                   {"rollout 0", "is gone"}));
  EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(5));
  EXPECT_TRUE(eventually([&] { return lost.load(); }));
}

TEST_P(OverWire, AnOwnerThatIsStoppedTimesOut) {
  OwnerProcess owner({1000});
  ASSERT_EQ(owner.handles().size(), 1U);
  Client client(client_options());
  get(client, {want(owner.handles()[0], GetParam())});
  owner.stop();
  EXPECT_TRUE(
      says(what_of<StoreTimeout>([&] { get(client, {want(owner.handles()[0], GetParam())}, 100); }),
           {"rollout 0"}));
  Client newcomer(client_options(trainer(1)));
  EXPECT_THROW(get(newcomer, {want(owner.handles()[0], GetParam())}, 100), StoreTimeout);
  owner.go_on();
  EXPECT_NO_THROW(get(client, {want(owner.handles()[0], GetParam())}));
}

TEST_P(OverWire, FreeAndSameAndCloseAreAnswered) {
  Served owner;
  Client client(client_options());
  const Handle one = owner.put(100'000, 1);
  const Handle two = owner.put(1000, 2);
  EXPECT_TRUE(client.same(one, fingerprint(pattern(100'000, 1)), within(kLong)));
  EXPECT_FALSE(client.same(two, fingerprint(pattern(1000, 1)), within(kLong)));
  const auto freed = client.free(std::vector{one, one}, within(kLong));
  EXPECT_EQ(freed.freed, 1U);
  EXPECT_TRUE(freed.unreached.empty());
  EXPECT_FALSE(client.same(one, fingerprint(pattern(100'000, 1)), within(kLong)));
  const Client::Withdrawal all{.origin = owner.server.origin(), .scope = step(1), .ids = {}};
  const auto closed = client.withdraw({&all, 1}, within(kLong));
  ASSERT_TRUE(closed.at(0).closed.has_value());
  EXPECT_EQ(closed[0].closed->difference, "");
  EXPECT_EQ(owner.objects.stats().objects, 0U);
}

// Its file was cut, which stands for a disk that cannot be read.
TEST_P(OverWire, ASpilledObjectThatCannotBeReadIsRefusedAndTheOthersAreNot) {
  Served owner(kOwner, {}, capped(1 << 20, WhenFull::spill));
  Client client(client_options());
  const Handle lost = owner.put(3 << 20, 1);
  const Handle good = owner.put(3 << 20, 2);
  ASSERT_EQ(::ftruncate(owner.objects.content(lost.id)->file(), 1 << 20), 0);
  EXPECT_TRUE(says(what_of<Error>([&] { get(client, {want(lost, GetParam())}); }),
                   {"rollout 0 in step 1 cannot be fetched", "spill"}));
  EXPECT_TRUE(get(client, {want(good, GetParam())}).bytes(0) == pattern(3 << 20, 2));
}

}  // namespace
}  // namespace tenure::store
