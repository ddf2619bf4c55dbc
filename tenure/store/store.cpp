#include <tenure/store/store.h>

#include <tenure/core/error.h>
#include <tenure/core/fork.h>
#include <tenure/core/part.h>
#include <tenure/core/text.h>
#include <tenure/store/arrivals.h>
#include <tenure/store/errors.h>
#include <tenure/store/fingerprint.h>
#include <tenure/store/patience.h>
#include <tenure/store/recent_puts.h>
#include <tenure/store/room.h>
#include <tenure/store/same_bytes.h>
#include <tenure/store/socket.h>
#include <tenure/store/source.h>
#include <tenure/store/staging.h>
#include <tenure/store/tensors.h>
#include <tenure/store/unconfirmed.h>

#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <ostream>

namespace tenure::store {

namespace {

using std::chrono::steady_clock;

Member self_of(const StoreOptions& options) {
  Member self{.role = options.role, .rank = options.rank, .incarnation = new_incarnation()};
  check_job(options.job);
  check_member(self);
  return self;
}

ServerOptions server_options(const StoreOptions& options, const Member& self) {
  ServerOptions server;
  server.job = options.job;
  server.self = self;
  server.folder = job_folder(options.job);
  name_folder(server.folder, options.job);
  remove_dead_sockets(server.folder);
  if (options.listen) {
    (void)parse_host_port(*options.listen);  // also where nobody will come in by it
  }
  server.listen = options.secret.empty() ? std::nullopt : options.listen;
  server.advertise = options.advertise;
  server.secret = options.secret;
  server.tls = options.tls;
  server.lease_ms = options.limits.lease_ms;
  return server;
}

// A view of other numbers, too, is stored as what it shows.
bool lies_as_stored(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace

// What askers of the part go through: a call that is in flight when the store ends is waited for.
// In a forked child the store is the parent's, and a thread that is not there may have the mutex.
struct Gate {
  std::mutex mutex;
  const Store* store = nullptr;
  const uint32_t generation = fork_generation();

  template <class Ask>
  void pass(const Ask& ask) {
    if (generation != fork_generation()) {
      return;
    }
    const std::scoped_lock lock(mutex);
    if (store != nullptr) {
      ask(*store);
    }
  }
};

struct Store::State {
  explicit State(StoreOptions given);

  [[nodiscard]] Client::Deadline deadline(std::optional<std::chrono::milliseconds> given) const {
    return steady_clock::now() + given.value_or(options.timeout);
  }
  Handle handle_of(const ScopeName& scope, Layout layout, Placed placed) const;
  std::optional<Handle> passed_through(const ScopeName& scope, const at::Tensor& tensor,
                                       const PutOptions& put);
  std::optional<Placed> shared(const Terms& terms, const at::Tensor& tensor, const Source& source);

  StoreOptions options;
  Member self;
  Objects objects;
  Arrivals arrivals;  // before the client, whose thread tells it
  RecentPuts recent;
  Patience patience;
  std::shared_ptr<Room> copies = Room::make(0);  // shared with their charges
  Server server;
  Client client;
  Unconfirmed unconfirmed;

  std::atomic<uint64_t> passes{0};
  std::atomic<uint64_t> shares{0};
  std::shared_ptr<Gate> gate = std::make_shared<Gate>();  // shared with askers in flight
  PartRegistration part;
};

Store::State::State(StoreOptions given)
    : options(std::move(given)),
      self(self_of(options)),
      objects(self, options.limits),
      server(objects, server_options(options, self)),
      client(
          {.job = options.job,
           .self = self,
           .secret = options.secret,
           .tls = options.tls,
           .scope_closed =
               [this](const Member& owner, const ScopeName& scope) {
                 is_all(scope) ? arrivals.owner_lost(owner) : arrivals.scope_closed(owner, scope);
               },
           .withdrawn = [this](const Member& owner,
                               std::span<const ObjectId> ids) { arrivals.withdrawn(owner, ids); },
           .owner_lost = [this](const Member& owner) { arrivals.owner_lost(owner); }}),
      unconfirmed(client, options.timeout) {}

Handle Store::State::handle_of(const ScopeName& scope, Layout layout, Placed placed) const {
  return {.origin = server.origin(),
          .scope = scope,
          .id = placed.id,
          .layout = std::move(layout),
          .unstored = std::move(placed.unstored)};
}

// Note [Pass-through]
// A tensor that was fetched and is put again unchanged need not be stored again. Torch's version
// counter does not see every write (numpy, raw pointers), so it only says when not to look further:
// then no page of a mapping may have been written to, or the owner must find its own bytes to have
// the same fingerprint. The old object keeps its scope and its collectors, so only a put that asks
// for no others can have its handle.
std::optional<Handle> Store::State::passed_through(const ScopeName& scope, const at::Tensor& tensor,
                                                   const PutOptions& put) {
  auto known = arrivals.arrived_as(tensor);
  if (!known || known->handle.scope != scope || put.collectors.kind != Collectors::Kind::anyone ||
      !put.call.empty()) {
    return std::nullopt;
  }
  if (known->mapping != nullptr && known->mapping->dirty()) {
    return std::nullopt;
  }
  // Without its answer a copy of our own is right as well.
  const auto owner = known->handle.origin->owner.incarnation;
  const auto until = patience.until(owner, tensor.nbytes());
  if (!until) {
    return std::nullopt;
  }
  try {
    const auto print = known->mapping != nullptr ? kAnyFingerprint : fingerprint(bytes_of(tensor));
    if (!client.same(known->handle, print, std::min(*until, deadline({})))) {
      return std::nullopt;
    }
  } catch (const StoreTimeout&) {
    patience.ran_out(owner);
    return std::nullopt;
  } catch (const Error&) {
    return std::nullopt;
  }
  ++passes;
  return std::move(known->handle);
}

std::optional<Placed> Store::State::shared(const Terms& terms, const at::Tensor& tensor,
                                           const Source& source) {
  const auto before = recent.find(tensor);
  if (!before) {
    return std::nullopt;
  }
  const auto content = objects.content(*before);
  if (content == nullptr || !same_bytes(*content, source)) {
    return std::nullopt;
  }
  auto placed = objects.put_again(terms, *before);
  if (placed.unstored == kGone) {
    return std::nullopt;
  }
  ++shares;
  return placed;
}

namespace {

std::vector<std::pair<std::string, int64_t>> figures_of(const StoreStats& stats) {
  const auto figure = [](uint64_t value) { return static_cast<int64_t>(value); };
  return {
      {"stored_bytes", figure(stats.objects.bytes)},
      {"spilled_bytes", figure(stats.objects.spilled_bytes)},
      {"still_mapped_bytes", figure(stats.objects.mapped_bytes)},
      {"kept_bytes", figure(stats.kept_bytes)},
      {"objects", figure(stats.objects.objects)},
      {"scopes", figure(stats.objects.scopes)},
      {"dropped", figure(stats.objects.dropped)},
      {"stale", figure(stats.objects.stale)},
      {"differences", figure(stats.objects.differences)},
  };
}

void dump(const Store& store, std::ostream& out) {
  uint32_t next = 0;
  for (const auto& object : store.list(0, 100, &next)) {
    out << bytes_text(object.bytes) << " in " << scope_text(object.scope) << ' ' << object.site
        << '\n';
  }
  for (const auto& mapped : store.still_mapped()) {
    out << bytes_text(mapped.bytes) << " still mapped by " << member_text(mapped.by) << " since "
        << time_text(mapped.since_ms) << '\n';
  }
}

// A process may have several stores; the first of them is the one that others know by name.
std::string part_name(const Member& self) {
  return part_named("store") == nullptr
             ? std::string("store")
             : text("store of ", self.role, ' ', self.rank, ' ', self.incarnation);
}

}  // namespace

Store::Store(StoreOptions options) : state_(std::make_unique<State>(std::move(options))) {
  state_->gate->store = this;
  state_->part = register_part(
      {.name = part_name(state_->self),
       .kinds = {OwnerKind::stored_object},
       .stats =
           [gate = state_->gate] {
             std::vector<std::pair<std::string, int64_t>> figures;
             gate->pass([&](const Store& store) { figures = figures_of(store.stats()); });
             return figures;
           },
       .dump =
           [gate = state_->gate](std::ostream& out) {
             gate->pass([&](const Store& store) { dump(store, out); });
           }});
}

Store::~Store() {
  state_->part = {};
  const std::scoped_lock lock(state_->gate->mutex);
  state_->gate->store = nullptr;
}

const Origin& Store::origin() const { return *state_->server.origin(); }

Handle Store::unstored(const ScopeName& scope, const at::Tensor& tensor, std::string why) {
  check_scope(scope);
  return state_->handle_of(scope, layout_of(tensor, "stored"),
                           {.id = {}, .unstored = std::move(why)});
}

Handle Store::put(const ScopeName& scope, const at::Tensor& tensor, const PutOptions& options) {
  check_scope(scope);
  auto layout = layout_of(tensor, "stored");
  if (options.collectors.nobody()) {
    return state_->handle_of(scope, std::move(layout),
                             {.id = {}, .unstored = "nobody collects it"});
  }
  if (tensor.device().is_cpu()) {
    if (auto handle = state_->passed_through(scope, tensor, options)) {
      return std::move(*handle);
    }
  }
  const Terms terms{.scope = scope,
                    .call = options.call,
                    .attempt = options.attempt,
                    .collectors = options.collectors,
                    .layout = layout,
                    .site = options.site};
  if (!tensor.device().is_cpu()) {
    // Conjugate and negative views are views of other numbers; contiguous() leaves them so.
    FromDevice source(tensor.detach().resolve_conj().resolve_neg().contiguous());
    return state_->handle_of(
        scope, std::move(layout),
        state_->objects.put(terms, kPieceBytes, [&](uint64_t offset, std::span<std::byte> piece) {
          source.read(offset, piece);
        }));
  }
  // What does not lie as it is stored is copied first, which is faster, if the group and the
  // machine have room for that, too; otherwise it is read piece by piece.
  auto elements = tensor.detach();
  std::string lack;
  std::optional<Charge> second;
  if (!lies_as_stored(elements)) {
    second = state_->copies->take(2 * bytes_of(layout), lack);
    elements = second ? elements.resolve_conj().resolve_neg().contiguous() : elements;
  }
  const Fill fill = [&](uint64_t offset, std::span<std::byte> piece) {
    read_elements(elements, offset, piece);
  };
  const bool whole = lies_as_stored(elements);
  const auto source =
      whole ? Source(bytes_of(elements)) : Source(bytes_of(layout), kPieceBytes, fill);
  auto placed = state_->shared(terms, tensor, source);
  if (!placed) {
    placed = whole ? state_->objects.put(terms, bytes_of(elements))
                   : state_->objects.put(terms, kPieceBytes, fill);
  }
  if (placed->unstored.empty()) {
    state_->recent.note(tensor, placed->id);
  }
  return state_->handle_of(scope, std::move(layout), std::move(*placed));
}

at::Tensor Store::get(const Handle& handle, const GetOptions& options) {
  return std::move(get_all({&handle, 1}, options).front());
}

std::vector<at::Tensor> Store::get_all(std::span<const Handle> handles, const GetOptions& options) {
  auto parcel = fetch(handles, options);
  accept(parcel);
  return std::move(parcel.tensors);
}

Parcel Store::fetch(std::span<const Handle> handles, const GetOptions& options) {
  return fetch_tensors(state_->client, state_->arrivals, handles, options,
                       state_->deadline(options.timeout));
}

void Store::accept(const Parcel& parcel) {
  store::accept(state_->client, state_->arrivals, parcel);
}

uint32_t Store::begin_call(const ScopeName& scope, const std::string& call) {
  check_scope(scope);
  const auto attempt = state_->objects.begin_call(scope, call);
  state_->server.tell_withdrawn();
  return attempt;
}

void Store::fail_call(const ScopeName& scope, const std::string& call, uint32_t attempt) {
  state_->objects.fail_call(scope, call, attempt);
  state_->server.tell_withdrawn();
}

void Store::adopt(const ScopeName& scope, std::span<const Handle> handles) {
  check_scope(scope);
  state_->unconfirmed.adopt(scope, handles);
}

Closing Store::close(const ScopeName& scope) {
  check_scope(scope);
  Closing closing;
  closing.here = state_->server.close(scope, state_->self);
  state_->arrivals.scope_closed_by_us(scope);
  auto others = state_->unconfirmed.close(scope);
  closing.elsewhere = std::move(others.closed);
  closing.unreached = std::move(others.unreached);
  return closing;
}

Account Store::account(const ScopeName& scope) const { return state_->objects.account(scope); }

Client::FreeAnswer Store::free(std::span<const Handle> handles) {
  for (const auto& handle : handles) {
    if (!handle.origin) {
      throw InputError("a handle without an origin cannot be freed");
    }
  }
  state_->arrivals.forget(handles);
  return state_->client.free(handles, state_->deadline({}));
}

size_t Store::forget(std::span<const Handle> handles) { return state_->arrivals.forget(handles); }
size_t Store::forget(const ScopeName& scope) { return state_->arrivals.forget(scope); }
size_t Store::kept_of(const ScopeName& scope) const { return state_->arrivals.kept_of(scope); }

StoreStats Store::stats() const {
  return {.objects = state_->objects.stats(),
          .server = state_->server.stats(),
          .kept_bytes = state_->arrivals.kept_bytes(),
          .passed_through = state_->passes,
          .shared = state_->shares};
}

std::vector<Listed> Store::list(uint32_t from, size_t most, uint32_t* next) const {
  return state_->objects.list(from, most, next);
}

std::vector<StillMapped> Store::still_mapped() const { return state_->objects.still_mapped(); }

TextAnswer Store::ask(const std::string& socket, const Ask& question) {
  return state_->client.ask(socket, question, state_->deadline({}));
}

}  // namespace tenure::store
