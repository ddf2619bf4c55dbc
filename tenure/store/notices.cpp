#include <tenure/store/notices.h>

#include <tenure/core/error.h>
#include <tenure/core/quiet_thread.h>
#include <tenure/core/text.h>
#include <tenure/store/errors.h>
#include <tenure/store/frame.h>
#include <tenure/store/waiting.h>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <iterator>
#include <utility>

namespace tenure::store {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kFirstPause{50};
constexpr milliseconds kLongestPause{5'000};
constexpr milliseconds kConnect{1'000};        // for a connection to come back
constexpr size_t kMostReturning = 16;          // at once
constexpr milliseconds kLeastPatience{5'000};  // with one that does not, beside its lease

void append_ids(std::vector<std::byte>& to, MessageKind kind, std::vector<ObjectId>& ids) {
  for (size_t first = 0; first < ids.size(); first += kMostWishes) {
    const auto begin = ids.begin() + static_cast<ptrdiff_t>(first);
    const auto count = static_cast<ptrdiff_t>(std::min(kMostWishes, ids.size() - first));
    append_frame(to, kind, encode(Ids{.ids = {begin, begin + count}}));
  }
  ids.clear();
}

}  // namespace

Notices::Notices(Connections& connections, Heard heard)
    : connections_(connections),
      heard_(std::move(heard)),
      bell_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!bell_.is_open()) {
    throw Error(text("the store's client cannot be made (", errno_text(errno),
                     "); raise the limit on open files (ulimit -n)"));
  }
}

Notices::~Notices() { stop(milliseconds(0)); }

bool Notices::has(uint64_t owner) const {
  const std::lock_guard lock(mutex_);
  return known_.contains(owner);
}

void Notices::keep(const Route& route, std::unique_ptr<Line> line) {
  const std::lock_guard lock(mutex_);
  if (stopped_ || !known_.insert(route.owner()).second) {
    return;
  }
  auto& mail = mail_[route.owner()];
  mail.route = route;
  mail.line = std::move(line);
  if (!thread_.joinable()) {
    thread_ = quiet_thread("the store client's thread", [this] { run(); });
  }
  wake();
}

void Notices::fetched(uint64_t owner, std::span<const ObjectId> ids) {
  const std::lock_guard lock(mutex_);
  if (stopped_ || ids.empty() || !known_.contains(owner)) {
    return;
  }
  auto& told = mail_[owner].fetched;
  told.insert(told.end(), ids.begin(), ids.end());
  wake();
}

void Notices::unmapped(uint64_t owner, ObjectId id, Heirs heirs) {
  const std::lock_guard lock(mutex_);
  if (stopped_ || !known_.contains(owner)) {
    return;
  }
  if (heirs.empty()) {
    mail_[owner].unmapped.push_back(id);
  } else {
    mail_[owner].inherited.push_back({id, std::move(heirs)});
  }
  wake();
}

void Notices::stop(milliseconds patience) {
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) {
      return;
    }
    stopped_ = true;
    stop_at_ = steady_clock::now() + patience;
    wake();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
  returning_.clear();
  returns_.clear();
  owners_.clear();
}

// REQUIRES: the mutex is held.
void Notices::wake() {
  if (!std::exchange(rung_, true)) {
    const uint64_t one = 1;
    static_cast<void>(::write(bell_.get(), &one, sizeof(one)));
  }
}

void Notices::run() {
  for (;;) {
    sort_mail();
    const auto now = steady_clock::now();
    for (auto& [id, owner] : owners_) {
      ask_heirs(owner);
      serve(owner, now);
      if (!owner.line && !owner.is_returning && now >= owner.retry_at) {
        begin_return(id, owner, now);
      }
    }
    {
      const std::lock_guard lock(mutex_);
      const bool over = stopped_ && (now >= stop_at_ || (mail_.empty() && all_said()));
      if (over) {
        return;
      }
    }
    wait();
  }
}

void Notices::sort_mail() {
  std::unordered_map<uint64_t, Mail> mail;
  std::vector<Return> returns;
  {
    const std::lock_guard lock(mutex_);
    mail.swap(mail_);
    returns.swap(returns_);
    rung_ = false;
    uint64_t rings = 0;
    // NOLINTNEXTLINE(clang-analyzer-unix.BlockInCriticalSection): the bell does not block
    static_cast<void>(::read(bell_.get(), &rings, sizeof(rings)));
  }
  for (auto& result : returns) {
    returning_.erase(result.owner);
    if (!end_return(owners_.at(result.owner), result)) {
      lose(result.owner);
    }
  }
  for (auto& [id, letter] : mail) {
    if (letter.line) {
      Owner& owner = owners_[id];
      owner.route = letter.route;
      owner.line = std::move(letter.line);
      owner.lease = milliseconds(owner.line->lease_ms);
      owner.renew_at = steady_clock::now() + owner.lease / 3;
    }
    const auto found = owners_.find(id);
    if (found == owners_.end()) {
      continue;
    }
    Owner& owner = found->second;
    owner.fetched.insert(owner.fetched.end(), letter.fetched.begin(), letter.fetched.end());
    owner.unmapped.insert(owner.unmapped.end(), letter.unmapped.begin(), letter.unmapped.end());
    std::ranges::move(letter.inherited, std::back_inserter(owner.inherited));
  }
}

void Notices::ask_heirs(Owner& owner) {
  std::erase_if(owner.inherited, [&](Inherited& one) {
    std::erase_if(one.heirs, [](const auto& heir) { return !heir->is_there(); });
    if (one.heirs.empty()) {
      owner.unmapped.push_back(one.id);
    }
    return one.heirs.empty();
  });
}

void Notices::serve(Owner& owner, Time now) {
  if (!owner.line) {
    return;
  }
  try {
    read(owner);
    write(owner, now);
  } catch (const std::exception&) {
    broke(owner, now);
  }
}

void Notices::write(Owner& owner, Time now) {
  send(owner);
  if (owner.sent < owner.outgoing.size()) {
    return;
  }
  owner.outgoing.clear();
  owner.sent = 0;
  if (now >= owner.renew_at) {
    append_frame(owner.outgoing, MessageKind::renew, {});
    owner.renew_at = now + owner.lease / 3;
  }
  append_ids(owner.outgoing, MessageKind::fetched, owner.fetched);
  append_ids(owner.outgoing, MessageKind::unmapped, owner.unmapped);
  send(owner);
}

void Notices::send(Owner& owner) {
  while (owner.sent < owner.outgoing.size()) {
    const size_t sent =
        owner.line->transport->send_some(std::span(owner.outgoing).subspan(owner.sent));
    if (sent == 0) {
      return;
    }
    owner.sent += sent;
  }
}

void Notices::read(Owner& owner) {
  auto& incoming = owner.line->incoming;
  for (;;) {
    int descriptor = -1;
    const size_t got = owner.line->transport->receive_some(incoming.room(), &descriptor);
    if (descriptor >= 0) {
      ::close(descriptor);
    }
    if (got == 0) {
      return;
    }
    incoming.arrived(got);
    while (incoming.bytes().size() >= kHeaderBytes) {
      const auto header = decode_header(incoming.bytes().first<kHeaderBytes>());
      if (!header ||
          (header->kind != MessageKind::scope_closed && header->kind != MessageKind::withdrawn)) {
        throw InputError("a notice that is none");
      }
      const size_t whole = kHeaderBytes + header->body_bytes;
      if (incoming.bytes().size() < whole) {
        break;
      }
      hear(owner, header->kind, incoming.bytes().subspan(kHeaderBytes, header->body_bytes));
      incoming.consume(whole);
    }
    if (incoming.empty()) {
      incoming.rest();
    }
  }
}

void Notices::hear(const Owner& owner, MessageKind kind, std::span<const std::byte> body) {
  if (kind == MessageKind::withdrawn) {
    const Ids gone = decode_ids(body);
    if (heard_.withdrawn) {
      heard_.withdrawn(owner.route.origin->owner, gone.ids);
    }
    return;
  }
  const ScopeClosed closed = decode_scope_closed(body);
  if (heard_.scope_closed) {
    heard_.scope_closed(owner.route.origin->owner, closed.scope);
  }
}

void Notices::broke(Owner& owner, Time now) {
  owner.line.reset();
  // What was on its way may have arrived or not. A fetch that is told of twice is told of once.
  owner.outgoing.clear();
  owner.sent = 0;
  owner.broke_at = now;
  owner.retry_at = now;
  owner.pause = kFirstPause;
}

void Notices::begin_return(uint64_t id, Owner& owner, Time now) {
  bool stopped = false;
  {
    const std::lock_guard lock(mutex_);
    stopped = stopped_;
  }
  if (stopped || returning_.size() >= kMostReturning) {
    owner.retry_at = now + kFirstPause;
    return;
  }
  try {
    returning_[id] = quiet_thread("the thread that connects to an owner again",
                                  [this, id, route = owner.route] { try_return(id, route); });
    owner.is_returning = true;
  } catch (const std::exception&) {
    returning_.erase(id);
    retry_later(owner);
  }
}

void Notices::try_return(uint64_t id, const Route& route) {
  Return result{.owner = id, .line = nullptr, .is_gone = false};
  try {
    result.line = connections_.connect(route, Purpose::notices, steady_clock::now() + kConnect);
  } catch (const OwnerLost&) {
    result.is_gone = true;
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): there is no line
  }
  const std::lock_guard lock(mutex_);
  returns_.push_back(std::move(result));
  wake();
}

void Notices::retry_later(Owner& owner) {
  owner.retry_at = steady_clock::now() + owner.pause;
  owner.pause = std::min(2 * owner.pause, kLongestPause);
}

bool Notices::end_return(Owner& owner, Return& result) {
  owner.is_returning = false;
  if (result.is_gone) {
    return false;
  }
  if (!result.line) {
    retry_later(owner);
    return steady_clock::now() - owner.broke_at <= std::max(owner.lease, kLeastPatience);
  }
  owner.line = std::move(result.line);
  owner.lease = milliseconds(owner.line->lease_ms);
  owner.renew_at = steady_clock::now() + owner.lease / 3;
  if (heard_.scope_closed) {
    heard_.scope_closed(owner.route.origin->owner, ScopeName{});
  }
  return true;
}

void Notices::lose(uint64_t id) {
  const auto found = owners_.find(id);
  const Member member = found->second.route.origin->owner;
  owners_.erase(found);
  {
    const std::lock_guard lock(mutex_);
    known_.erase(id);
    mail_.erase(id);
  }
  connections_.forget(id);
  if (heard_.owner_lost) {
    heard_.owner_lost(member);
  }
}

// What a broken connection has to say waits for no one at the end: the owner sees that it broke.
bool Notices::all_said() const {
  return std::ranges::none_of(
      owners_, [](const auto& entry) { return entry.second.line && entry.second.has_mail(); });
}

void Notices::wait() {
  std::vector<pollfd> awaited{{bell_.get(), POLLIN, 0}};
  Time until = Time::max();
  {
    const std::lock_guard lock(mutex_);
    until = stop_at_;
  }
  std::unordered_set<int> heirs;
  for (const auto& [id, owner] : owners_) {
    for (const Inherited& one : owner.inherited) {
      heirs.insert(one.heirs.front()->descriptor());
    }
    if (!owner.line) {
      until = owner.is_returning ? until : std::min(until, owner.retry_at);
      continue;
    }
    until = std::min(until, owner.renew_at);
    const Transport& transport = *owner.line->transport;
    auto events = transport.awaited(false);
    if (owner.has_mail()) {
      events = static_cast<short>(events | transport.awaited(true));
    }
    awaited.push_back({transport.descriptor(), events, 0});
  }
  for (const int heir : heirs) {
    awaited.push_back({heir, POLLIN, 0});
  }
  const int timeout = until == Time::max() ? -1 : poll_time(until);
  ::poll(awaited.data(), awaited.size(), timeout);
}

}  // namespace tenure::store
