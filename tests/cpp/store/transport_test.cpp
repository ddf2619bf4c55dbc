#include <tenure/store/transport.h>

#include "served.h"
#include <tenure/store/errors.h>
#include <tenure/store/listening_sockets.h>
#include <tenure/store/resolving.h>
#include <tenure/store/waiting.h>

#include <gtest/gtest.h>

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <thread>

namespace tenure::store {
namespace {

const Credentials kWho{.job = kJob, .secret = kSecret};

// Takes one connection and says this, whatever it hears.
class Babbler {
 public:
  explicit Babbler(std::vector<std::byte> says)
      : listening_(listen_tcp({"127.0.0.1", 0}, &port_)), thread_([this, said = std::move(says)] {
          pollfd awaited{listening_.get(), POLLIN, 0};
          ::poll(&awaited, 1, 20'000);
          connection_ = Socket(::accept(listening_.get(), nullptr, nullptr));
          send_bytes(connection_.get(), said);
        }) {}

  [[nodiscard]] uint16_t port() const { return port_; }

 private:
  uint16_t port_ = 0;
  Socket listening_;
  Socket connection_;
  std::jthread thread_;
};

TEST(Transport, NobodyThereIsOwnerLost) {
  const TestFolder folder;
  EXPECT_THROW(connect_local(folder.path() + "/none.sock", kWho, within(kLong)), OwnerLost);
  uint16_t port = 0;
  listen_tcp({"127.0.0.1", 0}, &port);  // and not any more
  EXPECT_THROW(connect_tcp("127.0.0.1", port, kWho, within(kLong)), OwnerLost);
}

TEST(Transport, WhatAnotherUserServesIsRefused) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "becoming another user needs root";
  }
  int told[2];
  int leash[2];
  ASSERT_EQ(::pipe(told), 0);
  ASSERT_EQ(::pipe(leash), 0);
  const pid_t other = ::fork();
  if (other == 0) {
    ::close(leash[1]);
    if (::setuid(65'534) == 0) {
      const Served owner;
      const auto& path = owner.server.origin()->path;
      static_cast<void>(::write(told[1], path.c_str(), path.size() + 1));
      static_cast<void>(::read(leash[0], told, 1));
    }
    ::_exit(0);
  }
  ::close(told[1]);
  std::array<char, 128> path{};
  ASSERT_GT(::read(told[0], path.data(), path.size() - 1), 0);
  EXPECT_TRUE(says(what_of<AccessRefused>([&] { connect_local(path.data(), kWho, within(kLong)); }),
                   {path.data(), "of another user"}));
  for (const int end : {leash[0], leash[1], told[0]}) {
    ::close(end);
  }
  ::waitpid(other, nullptr, 0);
}

// Asks a name server that answers after a second, if at all.
int slowly(const char* /*name*/, const char* port, const addrinfo* hints, addrinfo** found) {
  ::poll(nullptr, 0, 1000);
  return ::getaddrinfo("127.0.0.1", port, hints, found);
}

TEST(Transport, ANameThatNobodyAnswersForTimesOut) {
  const auto before = std::chrono::steady_clock::now();
  EXPECT_TRUE(says(what_of<StoreTimeout>([] { resolve("far.away", 1, within(50), slowly); }),
                   {"far.away", "in the time"}));
  EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::milliseconds(700));
}

TEST(Transport, ANameIsLookedUp) {
  EXPECT_NE(resolve("far.away", 1, within(kLong), slowly), nullptr);
  EXPECT_NE(resolve("127.0.0.1", 1, within(kLong), nullptr), nullptr) << "an address is none";
}

TEST(Transport, OnlyANameThatIsNoneIsOwnerLost) {
  const auto answers = [](int failed) {
    return [failed](const char*, const char*, const addrinfo*, addrinfo**) { return failed; };
  };
  EXPECT_THROW(resolve("far.away", 1, within(kLong), answers(EAI_NONAME)), OwnerLost);
  EXPECT_THROW(resolve("far.away", 1, within(kLong), answers(EAI_AGAIN)), StoreTimeout);
}

TEST(Transport, ASocketThatItsServerLeftBehindIsOwnerLost) {
  const TestFolder folder;
  const std::string path = folder.path() + "/dead.sock";
  listen_local(path);
  EXPECT_THROW(connect_local(path, kWho, within(kLong)), OwnerLost);
}

TEST(Transport, OneThatSaysNothingTimesOut) {
  const TestFolder folder;
  const std::string path = folder.path() + "/mute.sock";
  const Socket mute = listen_local(path);
  EXPECT_THROW(connect_local(path, kWho, within(50)), StoreTimeout);
  uint16_t port = 0;
  const Socket silent = listen_tcp({"127.0.0.1", 0}, &port);
  EXPECT_THROW(connect_tcp("127.0.0.1", port, kWho, within(50)), StoreTimeout);
}

TEST(Transport, OneThatSpeaksSomethingElseIsNotAsked) {
  const Babbler babbler(std::vector<std::byte>(kAnswerBytes, std::byte{'x'}));
  EXPECT_THROW(connect_tcp("127.0.0.1", babbler.port(), kWho, within(kLong)), AccessRefused);
}

TEST(Transport, AnotherVersionIsNamed) {
  Answer answer;
  answer.verdict = Verdict::other_version;
  answer.version = 9;
  const auto bytes = encode(answer);
  const Babbler babbler({bytes.begin(), bytes.end()});
  EXPECT_TRUE(says(what_of<AccessRefused>(
                       [&] { connect_tcp("127.0.0.1", babbler.port(), kWho, within(kLong)); }),
                   {"version 9"}));
}

TEST(Transport, AServerThatDoesNotKnowTheSecretGetsNoProof) {
  const auto bytes = encode(Answer{});
  const Babbler babbler({bytes.begin(), bytes.end()});
  EXPECT_TRUE(says(what_of<AccessRefused>(
                       [&] { connect_tcp("127.0.0.1", babbler.port(), kWho, within(kLong)); }),
                   {"secret"}));
}

TEST(Transport, TcpIsNotUsedWithoutASecret) {
  EXPECT_THROW(connect_tcp("127.0.0.1", 1, {.job = kJob, .secret = {}}, within(kLong)),
               AccessRefused);
}

TEST(Transport, ItsEndIsOwnerLost) {
  auto owner = std::make_unique<Served>();
  const auto transport = connect_local(owner->server.origin()->path, kWho, within(kLong));
  EXPECT_EQ(transport->wire(), Wire::local);
  owner.reset();
  std::array<std::byte, 1> byte{};
  EXPECT_THROW(receive_all(*transport, byte, within(kLong)), OwnerLost);
}

}  // namespace
}  // namespace tenure::store
