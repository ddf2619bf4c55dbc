// What the tests of server and client share: an owner in this process or in another, a client, and
// a relay between them that can freeze and cut.
#pragma once

#include "objects_fixture.h"
#include <tenure/store/client.h>
#include <tenure/store/server.h>

#include <gtest/gtest.h>

#include <poll.h>
#include <stdlib.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tenure::store {

inline const std::string kJob = "tests of the store";
inline const Secret kSecret{"sixteen bytes or more"};

// A folder of its own, gone with it.
class TestFolder {
 public:
  TestFolder() {
    std::string pattern = "/tmp/tenure-test-XXXXXX";
    path_ = ::mkdtemp(pattern.data());
  }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;
  TestFolder(TestFolder&&) = delete;
  TestFolder& operator=(TestFolder&&) = delete;
  ~TestFolder() { std::filesystem::remove_all(path_); }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline ServerOptions server_options(const std::string& folder, const Member& self) {
  ServerOptions options;
  options.job = kJob;
  options.self = self;
  options.folder = folder;
  options.listen = "127.0.0.1:0";
  options.secret = kSecret;
  return options;
}

inline Handle handle_to(std::shared_ptr<const Origin> origin, const Terms& terms,
                        const Placed& placed) {
  return {.origin = std::move(origin),
          .scope = terms.scope,
          .id = placed.id,
          .layout = terms.layout,
          .unstored = placed.unstored};
}

// An owner in this process.
struct Served {
  explicit Served(const Member& self = kOwner,
                  const std::function<void(ServerOptions&)>& change = {}, Limits limits = {})
      : objects(self, limits), server(objects, changed(folder.path(), self, change)) {}

  static ServerOptions changed(const std::string& folder, const Member& self,
                               const std::function<void(ServerOptions&)>& change) {
    ServerOptions options = server_options(folder, self);
    if (change) {
      change(options);
    }
    return options;
  }

  Handle put(uint64_t bytes, uint64_t seed = 1, Collectors collectors = {}, int scope = 1) {
    const Terms how = terms(step(scope), bytes, std::move(collectors));
    return handle_to(server.origin(), how, objects.put(how, pattern(bytes, seed)));
  }

  TestFolder folder;
  Objects objects;
  Server server;
};

inline ClientOptions client_options(const Member& self = trainer(0)) {
  ClientOptions options;
  options.job = kJob;
  options.self = self;
  options.secret = kSecret;
  return options;
}

inline Client::Deadline within(int64_t ms) {
  return std::chrono::steady_clock::now() + std::chrono::milliseconds(ms);
}
inline constexpr int64_t kLong = 20'000;  // more than any of it takes on a busy machine

// A get(), and where its bytes lie.
struct Gotten {
  std::vector<Got> gots;
  std::vector<std::vector<std::byte>> copies;

  [[nodiscard]] std::vector<std::byte> bytes(size_t i) const {
    if (const auto& mapping = gots[i].mapping) {
      return {mapping->data(), mapping->data() + mapping->bytes()};
    }
    return copies[i];
  }
};

inline Gotten get(Client& client, const std::vector<Want>& wants, int64_t ms = kLong) {
  Gotten gotten;
  gotten.copies.resize(wants.size());
  gotten.gots = client.get(wants, within(ms), [&](size_t i, uint64_t bytes) {
    gotten.copies[i].resize(bytes);
    return gotten.copies[i].data();
  });
  return gotten;
}

inline Want want(const Handle& handle, Over over = Over::best) {
  Want made;
  made.handle = &handle;
  made.over = over;
  return made;
}

// Whether all of these are said.
inline testing::AssertionResult says(const std::string& said,
                                     std::initializer_list<std::string> parts) {
  for (const std::string& part : parts) {
    if (said.find(part) == std::string::npos) {
      return testing::AssertionFailure() << '"' << said << "\" does not say \"" << part << '"';
    }
  }
  return testing::AssertionSuccess();
}

// Whether it comes to hold. What it waits for is done by other threads and processes.
inline bool eventually(const std::function<bool()>& holds, int64_t ms = kLong) {
  const auto end = within(ms);
  while (!holds()) {
    if (std::chrono::steady_clock::now() > end) {
      return false;
    }
    ::poll(nullptr, 0, 1);
  }
  return true;
}

// An owner in a process of its own: this program, run again.
class OwnerProcess {
 public:
  // With an object of each of these sizes, of the pattern whose seed is its place in the list.
  explicit OwnerProcess(const std::vector<uint64_t>& sizes);
  OwnerProcess(const OwnerProcess&) = delete;
  OwnerProcess& operator=(const OwnerProcess&) = delete;
  OwnerProcess(OwnerProcess&&) = delete;
  OwnerProcess& operator=(OwnerProcess&&) = delete;
  ~OwnerProcess();

  [[nodiscard]] const std::vector<Handle>& handles() const { return handles_; }
  void stop() const;  // it is when this returns
  void go_on() const;
  void kill();

 private:
  TestFolder folder_;
  int process_ = -1;
  int leash_ = -1;  // it ends when this is closed
  std::vector<Handle> handles_;
};

// A TCP relay to a server, in a thread of its own.
class Relay {
 public:
  explicit Relay(const Origin& to);
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;
  Relay(Relay&&) = delete;
  Relay& operator=(Relay&&) = delete;
  ~Relay();

  // The same owner, through the relay.
  [[nodiscard]] std::shared_ptr<const Origin> origin() const;
  void freeze();  // as a cut link: nothing passes, nothing ends
  void thaw();
  void end_all();  // ends the connections, and takes new ones
  // What clients have sent, one entry for each connection.
  [[nodiscard]] std::vector<std::vector<std::byte>> recorded() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tenure::store
