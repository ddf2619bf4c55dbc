// Client: fetches what other processes have. The calling thread does the reading and writing
// itself, to several owners at once; a thread of its own keeps a second connection to each owner,
// on which it says what was fetched and unmapped, renews the lease, and hears which scopes closed.
//
// Threading: all methods from any thread; calls to the same owner from several threads take a
// connection each. Torch-free, and never takes the GIL.
#pragma once

#include <tenure/store/handle.h>
#include <tenure/store/heirs.h>
#include <tenure/store/hello.h>
#include <tenure/store/identity.h>
#include <tenure/store/messages.h>
#include <tenure/store/server.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace tenure::store {

struct ClientOptions {
  std::string job;
  Member self;
  Secret secret;
  std::optional<TlsFiles> tls;  // then TCP is with TLS alone
  // Called on the client's own thread when an owner closed a scope. A connection that broke and
  // came back may have missed some: the scope is then empty (is_all()), and all that came from
  // this owner is to be forgotten. Neither may throw, or call the client.
  std::function<void(const Member& owner, const ScopeName& scope)> scope_closed;
  // Called likewise when an owner freed objects before their scope closed.
  // NOLINTNEXTLINE(readability-redundant-member-init): may be left out
  std::function<void(const Member& owner, std::span<const ObjectId> ids)> withdrawn{};
  std::function<void(const Member& owner)> owner_lost;
};

// Whether a scope_closed stands for every scope of the owner.
inline bool is_all(const ScopeName& scope) { return scope.kind.empty(); }

// A part of a memfd of another process, mapped copy-on-write: writes stay this process's own. Its
// end unmaps and tells the owner (by the client's thread, without waiting), once those processes
// have let go of it, too, that were forked meanwhile. May outlive the client.
class Mapping {
 public:
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  Mapping(Mapping&&) = delete;
  Mapping& operator=(Mapping&&) = delete;
  ~Mapping();

  [[nodiscard]] std::byte* data() const { return data_; }  // where the part begins
  [[nodiscard]] uint64_t bytes() const { return bytes_; }
  // Whether a page of it was written to by this process (/proc/self/pagemap). Unknown: true.
  [[nodiscard]] bool dirty() const;

 private:
  friend class MappedFile;
  Mapping() = default;
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
  std::byte* base_ = nullptr;  // of the pages
  uint64_t length_ = 0;
  std::function<void(Heirs)> tell_;
  Inheritable inheritable_;
};

// An owner that could not be asked.
struct Unreached {
  enum class How : uint8_t {
    silent,   // it may answer another time
    unasked,  // others took the time
    gone,     // and all that it had with it
    foreign   // of another job, where nobody of this one is answered
  };
  Member owner;
  std::string why;
  How how = How::silent;
};

enum class Over : uint8_t { best, tcp };  // tcp: also where a Unix socket would do

struct Want {
  const Handle* handle = nullptr;
  Rows rows;
  bool copied = false;  // into memory that `memory` gives, also where it could be mapped
  bool more = false;    // not the expected fetch: the caller fetches more, or says fetched() later
  Over over = Over::best;
};

struct Got {
  Layout layout;
  uint64_t bytes = 0;
  std::unique_ptr<Mapping> mapping;  // or the bytes are where `memory` said
};

class Client {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  explicit Client(ClientOptions options);
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  Client(Client&&) = delete;
  Client& operator=(Client&&) = delete;
  // What is fetched and unmapped is told within half a second, or by the socket's end.
  ~Client();

  // All or nothing: throws for the first want that fails: StaleHandle, OwnerLost, StoreTimeout,
  // AccessRefused, InputError, each naming the object. `memory(i, bytes)` gives where the bytes of
  // want i go, when they come as bytes: `bytes` of room that stays until get() returns. It is
  // called on the calling thread, at most once for each.
  std::vector<Got> get(std::span<const Want> wants, Deadline deadline,
                       const std::function<std::byte*(size_t want, uint64_t bytes)>& memory);

  // Tells the owners that all of these were fetched, as get() does of those without `more`.
  void fetched(std::span<const Want> wants);

  // What an owner is asked to free: these objects, or all of the scope, which it closes.
  struct Withdrawal {
    std::shared_ptr<const Origin> origin;
    ScopeName scope;
    std::vector<ObjectId> ids;  // empty: the scope
  };
  struct Withdrawn {
    uint64_t freed = 0;
    std::optional<ClosedAnswer> closed;
    std::optional<Unreached> unreached;
  };
  // Asks all owners at once. What became of each withdrawal, in their order.
  std::vector<Withdrawn> withdraw(std::span<const Withdrawal> withdrawals, Deadline deadline);

  // Frees objects at their owners. Answers how many were live, and the owners that could not be
  // asked, with the reason.
  struct FreeAnswer {
    uint64_t freed = 0;
    std::vector<Unreached> unreached;
  };
  FreeAnswer free(std::span<const Handle> handles, Deadline deadline);

  // Whether the object's content has this fingerprint, and anyone may fetch it until its scope
  // closes. Gone: false.
  bool same(const Handle& handle, const std::array<std::byte, 16>& fingerprint, Deadline deadline);

  // `tenure store ls` and `stats`: of the server behind a Unix socket.
  TextAnswer ask(const std::string& socket, const Ask& question, Deadline deadline);

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the mappings that it gave
};

// One for each owner of those that are stored. Throws InputError for a handle without an origin.
std::vector<Client::Withdrawal> by_owner(std::span<const Handle> handles);

}  // namespace tenure::store
