#include <tenure/store/client.h>

#include "served.h"
#include <tenure/store/errors.h>
#include <tenure/store/fingerprint.h>

#include <gtest/gtest.h>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace tenure::store {
namespace {

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
  const auto closed = client.close(step(1), std::vector{owner.server.origin()}, within(kLong));
  ASSERT_EQ(closed.closed.size(), 1U);
  EXPECT_EQ(closed.closed[0].second.difference, "");
  EXPECT_EQ(owner.objects.stats().objects, 0U);
}

TEST(Client, AnOwnerThatCannotBeAskedIsNamedAndTheOthersAreAsked) {
  Served owner;
  Client client(client_options());
  Origin gone = *owner.server.origin();
  gone.owner = {"rollout", 9, 99};
  gone.path += 'x';
  gone.address.clear();
  gone.port = 0;
  Handle lost = owner.put(10);
  lost.origin = std::make_shared<const Origin>(gone);
  const auto freed = client.free(std::vector{lost, owner.put(1000)}, within(kLong));
  EXPECT_EQ(freed.freed, 1U);
  ASSERT_EQ(freed.unreached.size(), 1U);
  EXPECT_EQ(freed.unreached[0].owner, gone.owner);
}

TEST(Client, AnUnmapIsTold) {
  Served owner;
  Client client(client_options());
  const Handle handle = owner.put(1 << 20);
  auto gotten = get(client, {want(handle)});
  ASSERT_NE(gotten.gots[0].mapping, nullptr);
  owner.objects.free(handle.id, kController);
  ASSERT_EQ(owner.objects.still_mapped().size(), 1U);
  EXPECT_EQ(owner.objects.still_mapped()[0].by, trainer(0));
  gotten.gots.clear();
  EXPECT_TRUE(eventually([&] { return owner.objects.still_mapped().empty(); }));
}

TEST(Client, AMappingOutlivesItsClient) {
  Served owner;
  auto client = std::make_unique<Client>(client_options());
  const Handle handle = owner.put(1 << 20);
  auto gotten = get(*client, {want(handle)});
  client.reset();
  EXPECT_TRUE(gotten.bytes(0) == pattern(1 << 20));
  gotten.gots.clear();
  EXPECT_TRUE(eventually([&] { return owner.server.stats().connections == 0; }));
}

TEST(Client, DescriptorsOfAGetThatFailedAreGivenBack) {
  Served owner;
  Client client(client_options());
  const Handle large = owner.put(1 << 20);
  const Handle small = owner.put(1000);
  const std::vector wants{want(large), want(small)};
  EXPECT_THROW(client.get(wants, within(kLong),
                          [](size_t, uint64_t) -> std::byte* { throw std::domain_error("no"); }),
               std::domain_error);
  owner.objects.free(large.id, kController);
  EXPECT_TRUE(eventually([&] { return owner.objects.still_mapped().empty(); }));
}

TEST(Client, AConsumerKilledInTheMiddleHasNotFetched) {
  Served owner;
  const Handle handle = owner.put(64 << 20, 1, counted(1));
  const pid_t consumer = ::fork();
  if (consumer == 0) {
    Client client(client_options(trainer(5, 55)));
    const std::vector wants{want(handle, Over::tcp)};
    client.get(wants, within(kLong), [](size_t, uint64_t) -> std::byte* {
      ::kill(::getpid(), SIGKILL);
      return nullptr;
    });
    ::_exit(1);
  }
  int status = 0;
  ::waitpid(consumer, &status, 0);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_TRUE(eventually([&] { return owner.server.stats().connections == 0; }));
  EXPECT_EQ(owner.objects.stats().objects, 1U);
}

TEST(Client, WithoutDescriptorsLeftItTakesBytes) {
  Served owner;
  Client client(client_options());
  const Handle handle = owner.put(1 << 20);
  get(client, {want(handle)});
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  rlimit none = before;
  none.rlim_cur = 3;
  ::setrlimit(RLIMIT_NOFILE, &none);
  Gotten gotten;
  EXPECT_NO_THROW(gotten = get(client, {want(handle)}));
  ::setrlimit(RLIMIT_NOFILE, &before);
  ASSERT_EQ(gotten.gots.size(), 1U);
  EXPECT_EQ(gotten.gots[0].mapping, nullptr);
  EXPECT_TRUE(gotten.bytes(0) == pattern(1 << 20));
  owner.objects.free(handle.id, kController);
  EXPECT_TRUE(eventually([&] { return owner.objects.still_mapped().empty(); }));
}

TEST(Client, AConnectionThatEndedWhileIdleIsReplaced) {
  Served owner;
  const Relay relay(*owner.server.origin());
  Client client(client_options());
  Handle handle = owner.put(1000);
  handle.origin = relay.origin();
  get(client, {want(handle, Over::tcp)});
  const_cast<Relay&>(relay).end_all();
  EXPECT_TRUE(get(client, {want(handle, Over::tcp)}).bytes(0) == pattern(1000));
}

TEST(Client, ABrokenConnectionForNoticesComesBackAndForgetsAll) {
  Served owner;
  Relay relay(*owner.server.origin());
  std::atomic<bool> forgets = false;
  auto options = client_options();
  options.scope_closed = [&](const Member&, const ScopeName& scope) { forgets = is_all(scope); };
  Client client(options);
  Handle handle = owner.put(1000, 1, counted(1));
  handle.origin = relay.origin();
  Want some = want(handle, Over::tcp);
  some.more = true;
  get(client, {some});
  relay.end_all();
  EXPECT_TRUE(eventually([&] { return forgets.load(); }));
  get(client, {want(handle, Over::tcp)});
  EXPECT_TRUE(eventually([&] { return owner.objects.stats().objects == 0; }));
}

TEST(Client, ACutLinkTimesOutAndRecovers) {
  Served owner;
  Relay relay(*owner.server.origin());
  Client client(client_options());
  Handle handle = owner.put(1 << 20);
  handle.origin = relay.origin();
  get(client, {want(handle, Over::tcp)});
  relay.freeze();
  EXPECT_TRUE(says(what_of<StoreTimeout>([&] { get(client, {want(handle, Over::tcp)}, 100); }),
                   {"rollout 0", "127.0.0.1"}));
  relay.thaw();
  EXPECT_TRUE(get(client, {want(handle, Over::tcp)}).bytes(0) == pattern(1 << 20));
}

TEST(Client, AnOwnerThatWasStartedAgainIsNotTakenForItself) {
  Served owner;
  Client client(client_options());
  Handle handle = owner.put(1000);
  Origin before = *handle.origin;
  before.owner.incarnation = 4711;
  handle.origin = std::make_shared<const Origin>(before);
  for (const Over over : {Over::best, Over::tcp}) {
    EXPECT_TRUE(
        says(what_of<OwnerLost>([&] { get(client, {want(handle, over)}); }), {"started again"}));
  }
}

TEST(Client, AHandleOfAnotherJobIsRefused) {
  Served owner;
  Client client(client_options());
  Handle handle = owner.put(1000);
  Origin other = *handle.origin;
  other.job = "another";
  handle.origin = std::make_shared<const Origin>(other);
  EXPECT_TRUE(says(what_of<AccessRefused>([&] { get(client, {want(handle)}); }), {"another"}));
}

TEST(Client, AHandleWithNothingBehindItSaysWhy) {
  Served owner;
  Client client(client_options());
  const Handle handle = owner.put(1000, 1, listed({}));
  EXPECT_TRUE(says(what_of<StaleHandle>([&] { get(client, {want(handle)}); }), {handle.unstored}));
}

TEST(Client, AServerTellsWhatItHas) {
  Served owner;
  Client client(client_options());
  owner.put(1000);
  const auto& socket = owner.server.origin()->path;
  EXPECT_TRUE(says(client.ask(socket, {}, within(kLong)).json, {"\"objects\":1,"}));
  EXPECT_TRUE(says(client.ask(socket, {.question = Question::list}, within(kLong)).json,
                   {"\"place\":\"slab\""}));
  EXPECT_THROW(client.ask(socket + "x", {}, within(kLong)), OwnerLost);
}

TEST(Client, SeveralThreadsFetchAtOnce) {
  Served owner;
  Client client(client_options());
  const Handle handle = owner.put(100'000);
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int turn = 0; turn < 50; ++turn) {
          const auto over = turn % 2 == 0 ? Over::best : Over::tcp;
          EXPECT_TRUE(get(client, {want(handle, over)}).bytes(0) == pattern(100'000));
        }
      });
    }
  }
  owner.objects.free(handle.id, kController);
  EXPECT_TRUE(eventually([&] { return owner.objects.still_mapped().empty(); }));
}

TEST(Client, AForkedChildLeavesItsParentsConnectionsAlone) {
  Served owner;
  auto client = std::make_unique<Client>(client_options());
  const Handle handle = owner.put(1 << 20);
  auto gotten = get(*client, {want(handle)});
  const pid_t child = ::fork();
  if (child == 0) {
    const bool refused = !what_of<Error>([&] { get(*client, {want(handle)}); }).empty();
    gotten.gots.clear();
    client.reset();
    ::_exit(refused ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  owner.objects.free(handle.id, kController);
  EXPECT_EQ(owner.objects.still_mapped().size(), 1U);
  const Handle other = owner.put(1 << 20);
  EXPECT_NO_THROW(get(*client, {want(other)}));
}

}  // namespace
}  // namespace tenure::store
