// What a consumer tells its owners, and hears from them.
#include "served.h"
#include <tenure/store/errors.h>

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <mutex>
#include <stdexcept>
#include <vector>

namespace tenure::store {
namespace {

TEST(Notices, AnUnmapIsTold) {
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

TEST(Notices, DescriptorsOfAGetThatFailedAreGivenBack) {
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

TEST(Notices, AGetThatFailsTakesNothingBackOfWhatWasMappedBefore) {
  Served owner;
  const OwnerProcess silent({1000});
  Client client(client_options());
  const Handle handle = owner.put(1 << 20);
  const auto held = get(client, {want(handle)});
  get(client, {want(silent.handles()[0])});
  silent.stop();
  EXPECT_THROW(get(client, {want(handle), want(silent.handles()[0])}, 200), StoreTimeout);
  silent.go_on();
  owner.objects.free(handle.id, kController);
  // Notices arrive in order: when this one is gone, what the failed one had mapped is told.
  get(client, {want(owner.put(1000, 1, counted(1)))});
  EXPECT_TRUE(eventually([&] { return owner.objects.stats().objects == 0; }));
  EXPECT_EQ(owner.objects.still_mapped().size(), 1U);
}

TEST(Notices, AConsumerKilledInTheMiddleHasNotFetched) {
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

TEST(Notices, ABrokenConnectionForNoticesComesBackAndForgetsAll) {
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

TEST(Notices, WhatIsWithdrawnIsHeardOf) {
  Served owner;
  std::mutex mutex;
  std::vector<ObjectId> heard;
  auto options = client_options();
  options.withdrawn = [&](const Member& member, std::span<const ObjectId> ids) {
    const std::lock_guard lock(mutex);
    EXPECT_EQ(member, kOwner);
    heard.insert(heard.end(), ids.begin(), ids.end());
  };
  Client client(options);
  const Terms how = terms(step(1), 10, {}, "logp");
  const ObjectId replaced = owner.objects.put(how, pattern(10)).id;
  const Handle freed = owner.put(1000);
  const Handle fetched = owner.put(1000, 1, counted(1));
  get(client, {want(freed), want(fetched)});
  EXPECT_TRUE(eventually([&] { return owner.objects.stats().objects == 2; }));
  client.free({&freed, 1}, within(kLong));
  owner.objects.begin_call(step(1), "logp");
  owner.server.tell_withdrawn();
  EXPECT_TRUE(eventually([&] {
    const std::lock_guard lock(mutex);
    return heard.size() == 2;
  }));
  const std::lock_guard lock(mutex);
  EXPECT_EQ(heard, (std::vector{freed.id, replaced}));
}

TEST(Notices, AnOwnerThatDoesNotComeBackHoldsUpNoOther) {
  Served silent(trainer(0, 21));
  Served owner(trainer(1, 22));
  Relay relay(*silent.server.origin());
  Client client(client_options());
  Handle far = silent.put(1000);
  far.origin = relay.origin();
  get(client, {want(far, Over::tcp)});
  get(client, {want(owner.put(1000))});
  relay.freeze();
  relay.end_all();
  ::poll(nullptr, 0, 50);  // by then it tries, and is not answered
  const Handle handle = owner.put(1000, 1, counted(1));
  const auto before = std::chrono::steady_clock::now();
  get(client, {want(handle)});
  EXPECT_TRUE(eventually([&] { return owner.objects.stats().objects == 1; }));
  EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::milliseconds(600));
}

}  // namespace
}  // namespace tenure::store
