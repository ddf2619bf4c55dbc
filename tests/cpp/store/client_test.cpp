#include <tenure/store/client.h>

#include "served.h"
#include <tenure/store/errors.h>

#include <gtest/gtest.h>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <thread>
#include <vector>

namespace tenure::store {
namespace {

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
