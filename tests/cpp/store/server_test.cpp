#include <tenure/store/server.h>

#include "served.h"
#include "stranger.h"
#include <tenure/store/errors.h>
#include <tenure/store/frame.h>

#include <gtest/gtest.h>

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ctime>
#include <filesystem>

namespace tenure::store {
namespace {

class OnWire : public testing::TestWithParam<Wire> {
 protected:
  // A client that belongs here is served, whatever the others do.
  void TearDown() override {
    if (!owner_) {
      return;
    }
    Client client(client_options());
    const Over over = GetParam() == Wire::local ? Over::best : Over::tcp;
    const Handle handle = owner_->put(100'000);
    EXPECT_TRUE(get(client, {want(handle, over)}).bytes(0) == pattern(100'000));
  }
  Served& serve(const std::function<void(ServerOptions&)>& change = {}) {
    owner_ = std::make_unique<Served>(kOwner, change);
    return *owner_;
  }
  [[nodiscard]] Stranger stranger() const { return Stranger(*owner_->server.origin(), GetParam()); }
  [[nodiscard]] ServerStats stats() const { return owner_->server.stats(); }

  std::unique_ptr<Served> owner_;
};
INSTANTIATE_TEST_SUITE_P(Wires, OnWire, testing::Values(Wire::local, Wire::tcp),
                         [](const auto& wire) {
                           return wire.param == Wire::local ? "local" : "tcp";
                         });

TEST_P(OnWire, AnotherJobIsRefused) {
  serve();
  auto other = stranger();
  Hello hello = other.hello();
  hello.job = job_digest("another");
  other.say(encode(hello));
  EXPECT_EQ(other.hear_answer().verdict, Verdict::other_job);
  EXPECT_TRUE(other.is_ended());
  EXPECT_EQ(stats().refused_job, 1U);
}

TEST_P(OnWire, AnotherVersionIsRefused) {
  serve();
  auto other = stranger();
  Hello hello = other.hello();
  hello.version = kProtocolVersion + 1;
  other.say(encode(hello));
  EXPECT_EQ(other.hear_answer().verdict, Verdict::other_version);
  EXPECT_TRUE(other.is_ended());
  EXPECT_EQ(stats().refused_version, 1U);
}

TEST_P(OnWire, WhatIsNoHelloIsDropped) {
  serve();
  auto other = stranger();
  other.say(std::vector<std::byte>(kHelloBytes, std::byte{'x'}));
  EXPECT_TRUE(other.is_ended());
  EXPECT_EQ(stats().dropped_protocol, 1U);
}

TEST_P(OnWire, OneThatSaysNothingIsDropped) {
  serve([](ServerOptions& options) { options.hello_ms = 60; });
  auto silent = stranger();
  EXPECT_TRUE(silent.is_ended());
  EXPECT_EQ(stats().dropped_slow, 1U);
}

TEST_P(OnWire, OneThatSpeaksByteByByteIsDropped) {
  serve([](ServerOptions& options) { options.hello_ms = 200; });
  auto slow = stranger();
  const auto hello = encode(slow.hello());
  for (const std::byte byte : hello) {
    slow.say(std::span(&byte, 1));
    if (slow.is_ended(5)) {
      break;
    }
  }
  EXPECT_TRUE(slow.is_ended());
  EXPECT_EQ(stats().dropped_slow, 1U);
}

TEST_P(OnWire, AHugeLengthIsDroppedBeforeItsBodyComes) {
  serve();
  auto member = stranger();
  member.shake_hands();
  auto bytes = encode(Header{MessageKind::introduce, 10, 0});
  bytes[8] = bytes[9] = bytes[10] = bytes[11] = std::byte{0xFF};
  member.say(bytes);
  EXPECT_TRUE(member.is_ended());
  EXPECT_EQ(stats().dropped_protocol, 1U);
}

TEST_P(OnWire, AMessageThatOnlyServersSendIsDropped) {
  serve();
  auto member = stranger();
  member.shake_hands();
  member.introduce();
  member.say(frame(MessageKind::done));
  EXPECT_TRUE(member.is_ended());
  EXPECT_EQ(stats().dropped_protocol, 1U);
}

TEST_P(OnWire, ARequestBeforeTheIntroductionIsDropped) {
  Served& owner = serve();
  const Handle handle = owner.put(1000);
  auto member = stranger();
  member.shake_hands();
  member.say(frame(MessageKind::free, encode(Ids{{handle.id}})));
  EXPECT_TRUE(member.is_ended());
  EXPECT_EQ(stats().dropped_protocol, 1U);
  EXPECT_EQ(owner.objects.stats().objects, 1U);
}

TEST_P(OnWire, OneThatStopsInTheMiddleOfAMessageIsDropped) {
  serve([](ServerOptions& options) { options.stall_ms = 60; });
  auto member = stranger();
  member.shake_hands();
  member.introduce();
  member.say(encode(Header{MessageKind::ask, 9, 0}));
  EXPECT_TRUE(member.is_ended());
  EXPECT_EQ(stats().dropped_slow, 1U);
}

TEST_P(OnWire, OneThatDoesNotReadItsAnswersIsDropped) {
  Served& owner = serve([](ServerOptions& options) { options.stall_ms = 100; });
  const Handle handle = owner.put(32 << 20);
  auto member = stranger();
  member.shake_hands();
  member.introduce();
  const Wish wish{.id = handle.id, .rows = {}, .copied = true};
  member.say(frame(MessageKind::fetch, encode(Fetch{{wish, wish}})));
  EXPECT_TRUE(eventually([&] { return stats().dropped_slow == 1; }));
}

TEST_P(OnWire, StrangersBeyondTheLimitMakePlace) {
  serve([](ServerOptions& options) { options.most_strangers = 4; });
  std::vector<Stranger> crowd;
  for (int i = 0; i < 12; ++i) {
    crowd.push_back(stranger());
  }
  EXPECT_TRUE(eventually([&] { return stats().refused_full >= 8; }));
  EXPECT_LE(stats().connections, 4U);
}

TEST_P(OnWire, ACrowdOfStrangersDoesNotKeepMembersOut) {
  Served& owner = serve();
  const Handle handle = owner.put(1000);
  const Over over = GetParam() == Wire::local ? Over::best : Over::tcp;
  std::vector<Stranger> crowd;
  for (int i = 0; i < 600; ++i) {
    crowd.push_back(stranger());
  }
  Client client(client_options());
  const auto begun = std::chrono::steady_clock::now();
  EXPECT_NO_THROW(get(client, {want(handle, over)}));
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::milliseconds(1000));
}

TEST_P(OnWire, StrangersMakePlaceForMembers) {
  Served& owner = serve([](ServerOptions& options) { options.most_connections = 8; });
  const Handle handle = owner.put(1000);
  const Over over = GetParam() == Wire::local ? Over::best : Over::tcp;
  std::vector<Stranger> crowd;
  for (int i = 0; i < 16; ++i) {
    crowd.push_back(stranger());
  }
  Client client(client_options());
  EXPECT_NO_THROW(get(client, {want(handle, over)}));
}

TEST_P(OnWire, MoreConnectionsThanAllowedAreToldSo) {
  serve([](ServerOptions& options) { options.most_connections = 3; });
  {
    std::vector<Stranger> members;
    for (int i = 0; i < 3; ++i) {
      members.push_back(stranger());
      members.back().shake_hands();
      members.back().introduce(Purpose::notices);
    }
    Client client(client_options());
    const Handle handle = owner_->put(1000);
    const Over over = GetParam() == Wire::local ? Over::best : Over::tcp;
    EXPECT_TRUE(
        says(what_of<AccessRefused>([&] { get(client, {want(handle, over)}); }), {"connections"}));
    EXPECT_EQ(stats().refused_full, 1U);
  }
  EXPECT_TRUE(eventually([&] { return stats().connections == 0; }));
}

TEST_P(OnWire, AFetchOfManyLargeObjectsIsQueuedInSmallPortions) {
  Served& owner = serve();
  const Handle handle = owner.put(8 << 20);
  auto member = stranger();
  member.shake_hands();
  member.introduce();
  const Wish wish{.id = handle.id, .rows = {}, .copied = true};
  const int64_t before = resident("VmRSS:");
  member.say(frame(MessageKind::fetch, encode(Fetch{std::vector<Wish>(60'000, wish)})));
  EXPECT_TRUE(eventually([&] { return stats().sent_bytes > (100 << 10); }));
  EXPECT_LT(resident("VmRSS:") - before, 40 << 20);
}

TEST(Server, AWrongSecretIsFoundByBothSides) {
  Served owner;
  auto options = client_options();
  options.secret = Secret("another secret, also long");
  {
    Client client(options);
    const Handle handle = owner.put(1000);
    EXPECT_TRUE(
        says(what_of<AccessRefused>([&] { get(client, {want(handle, Over::tcp)}); }), {"secret"}));
  }
  EXPECT_TRUE(eventually([&] { return owner.server.stats().refused_secret == 1; }));
  Stranger other(*owner.server.origin(), Wire::tcp);
  other.say(encode(other.hello()));
  EXPECT_EQ(other.hear_answer().verdict, Verdict::welcome);
  other.say(Digest{});
  EXPECT_TRUE(other.is_ended());
  EXPECT_EQ(owner.server.stats().refused_secret, 2U);
}

TEST(Server, ARecordedSessionIsWorthNothing) {
  Served owner;
  Relay relay(*owner.server.origin());
  Handle handle = owner.put(1000);
  handle.origin = relay.origin();
  {
    Client client(client_options());
    get(client, {want(handle, Over::tcp)});
  }
  for (const auto& session : relay.recorded()) {
    const uint64_t before = owner.server.stats().refused_secret;
    Stranger again(*owner.server.origin(), Wire::tcp);
    again.say(session);
    EXPECT_EQ(again.hear_answer().verdict, Verdict::welcome);
    EXPECT_TRUE(again.is_ended());
    EXPECT_EQ(owner.server.stats().refused_secret, before + 1);
  }
  EXPECT_EQ(relay.recorded().size(), 2U);
}

TEST(Server, AnotherUserIsRefused) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "only root can become another user";
  }
  Served owner;
  const std::string path = owner.server.origin()->path;
  ::chmod(path.c_str(), 0666);
  ::chmod(owner.folder.path().c_str(), 0711);
  const pid_t child = ::fork();
  if (child == 0) {
    const bool other_user = ::setuid(65'534) == 0;
    const Stranger other(*owner.server.origin(), Wire::local);
    ::_exit(other_user && other.is_ended() ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(owner.server.stats().refused_user, 1U);
}

TEST(Server, ItsSocketIsForItsUserAloneAndGoesWithIt) {
  std::string path;
  {
    const Served owner;
    path = owner.server.origin()->path;
    struct stat state{};
    ASSERT_EQ(::stat(path.c_str(), &state), 0);
    EXPECT_EQ(state.st_mode & 0777U, 0600U);
    EXPECT_EQ(sockets_in(owner.folder.path()), std::vector{path});
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(Server, AFolderThatOthersCanEnterIsRefused) {
  const TestFolder folder;
  ::chmod(folder.path().c_str(), 0755);
  Objects objects(kOwner);
  EXPECT_THROW(Server(objects, server_options(folder.path(), kOwner)), Error);
}

TEST(Server, TcpNeedsASecretAndAnAddress) {
  const TestFolder folder;
  Objects objects(kOwner);
  auto options = server_options(folder.path(), kOwner);
  options.secret = {};
  EXPECT_THROW(Server(objects, options), InputError);
  options = server_options(folder.path(), kOwner);
  for (const char* wrong : {"", "here", "1.2.3.4", "::1:80", "127.0.0.1:99999", "0.0.0.0:0"}) {
    options.listen = wrong;
    EXPECT_THROW(Server(objects, options), InputError) << wrong;
  }
}

TEST(Server, APortInUseIsAnError) {
  const Served owner;
  const TestFolder folder;
  Objects objects(kOwner);
  auto options = server_options(folder.path(), kOwner);
  options.listen = "127.0.0.1:" + std::to_string(owner.server.origin()->port);
  EXPECT_THROW(Server(objects, options), Error);
  EXPECT_TRUE(sockets_in(folder.path()).empty());
}

TEST(Server, WithoutDescriptorsLeftItWaitsAndThenServes) {
  Served owner;
  Stranger first(*owner.server.origin(), Wire::local);
  first.shake_hands();
  Stranger second;  // its socket is made while there still are descriptors
  second.prepare(Wire::local);
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  rlimit none = before;
  none.rlim_cur = 3;
  ::setrlimit(RLIMIT_NOFILE, &none);
  second.connect(*owner.server.origin());
  const std::clock_t busy = std::clock();
  EXPECT_FALSE(second.is_ended(250));
  EXPECT_LT(std::clock() - busy, CLOCKS_PER_SEC / 10);
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_NO_THROW(second.shake_hands());
}

TEST(Server, AConsumerIsHereAsLongAsOneOfItsConnections) {
  Served owner;
  {
    Client client(client_options());
    const Handle handle = owner.put(1000);
    get(client, {want(handle), want(handle, Over::tcp)});
    EXPECT_EQ(owner.objects.stats().consumers, 1U);
  }
  EXPECT_TRUE(eventually([&] { return owner.server.stats().connections == 0; }));
}

TEST(Server, AForkedChildKeepsNoConnectionOpen) {
  Served owner;
  int gate[2];
  ASSERT_EQ(::pipe(gate), 0);
  Stranger member(*owner.server.origin(), Wire::local);
  member.shake_hands();
  const pid_t child = ::fork();
  if (child == 0) {
    char byte = 0;
    ::close(gate[1]);
    static_cast<void>(::read(gate[0], &byte, 1));
    ::_exit(0);
  }
  ::close(gate[0]);
  member.say(std::vector<std::byte>(100, std::byte{'x'}));
  EXPECT_TRUE(member.is_ended());
  ::close(gate[1]);
  ::waitpid(child, nullptr, 0);
}

TEST(Server, AForkedChildMayEndItsCopy) {
  Objects objects(kOwner);
  const TestFolder folder;
  auto server = std::make_unique<Server>(objects, server_options(folder.path(), kOwner));
  const pid_t child = ::fork();
  if (child == 0) {
    server.reset();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  Stranger member(*server->origin(), Wire::local);
  EXPECT_NO_THROW(member.shake_hands());
}

TEST(Server, JobFoldersAreOwnAndOfTheJob) {
  const std::string folder = job_folder("one");
  struct stat state{};
  ASSERT_EQ(::stat(folder.c_str(), &state), 0);
  EXPECT_EQ(state.st_mode & 0777U, 0700U);
  EXPECT_EQ(job_folder("one"), folder);
  EXPECT_NE(job_folder("two"), folder);
  EXPECT_LT(folder.size(), 70U);
}

}  // namespace
}  // namespace tenure::store
