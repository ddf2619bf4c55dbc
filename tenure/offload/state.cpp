#include <tenure/offload/state.h>

#include <tenure/core/error.h>
#include <tenure/core/hold.h>
#include <tenure/core/ledger.h>
#include <tenure/core/names.h>
#include <tenure/core/part.h>
#include <tenure/core/scope.h>
#include <tenure/core/streams.h>
#include <tenure/core/text.h>
#include <tenure/core/torch_compat.h>
#include <tenure/offload/geometry.h>

#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <tuple>
#include <utility>

namespace tenure::offload {
namespace {

// A view that covers less than this part of its storage goes alone, without the rest.
constexpr size_t kSmallPart = 16;
// Unless what went so is more than this part of it.
constexpr size_t kMostInParts = 2;
// Ranges begin where any element type may.
constexpr size_t kRangeAlign = 512;
// So many bytes may wait for the disk before the step does.
constexpr uint64_t kMostUnwritten = uint64_t{1} << 30;
// What so many steps have saved, and is alive, is someone's long-lived state.
constexpr uint32_t kMetForLong = 2;
// Below this nothing is worth a look, until the planner has derived the true limit.
constexpr uint64_t kLeastBytes = 1024;

bool earlier(c10::Device a, c10::Device b) {
  return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
}

// Where in its storage the tensor reads, in bytes.
State::Range range_of(const at::Tensor& tensor) {
  size_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) == 0) {
      return {0, 0};
    }
    last += static_cast<size_t>((tensor.size(i) - 1) * tensor.stride(i));
  }
  const auto begin = static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
  return {begin, begin + (last + 1) * tensor.itemsize()};
}

}  // namespace

Lane::Lane(c10::Device at, const Options& options)
    : device(at), copier(at, options.streams), pool([&] {
        auto source = host_memory_for(at.type());
        source.in_order = options.streams != Streams::none;
        return std::make_shared<HostPool>(std::move(source), options.host_limit);
      }()) {}

State::State(Options given)
    : options(std::move(given)), of_cpu_(options.target == Target::copy), lanes_(&earlier) {
  if (options.target == Target::disk) {
    disk_ = std::make_unique<Disk>(options.folder);
    of_cpu_ = at::accelerator::deviceCount() == 0;
  }
  if (options.recompute && of_cpu_) {
    host_count_ = std::make_unique<HostCount>();
    meter_ = std::make_unique<Meter>(c10::Device(c10::DeviceType::CPU));
  }
  if (options.recompute) {
    recorder_.ask_of_holders([this](size_t index, const StorageRef& storage) {
      return others_hold_profiled(index, storage);
    });
  }
}

// A forked child does not have the threads, whose locks and waits it has: it leaves them alone.
State::~State() {
  if (process_ == fork_generation()) {
    return;
  }
  for (auto& [device, lane] : lanes_) {
    std::ignore = lane.release();
  }
  std::ignore = disk_.release();
}

void State::never(std::vector<StorageRef> storages) {
  std::lock_guard lock(mutex_);
  never_ = {std::make_move_iterator(storages.begin()), std::make_move_iterator(storages.end())};
}

bool State::active() const {
  std::lock_guard lock(mutex_);
  return active_;
}

bool State::measuring() const {
  std::lock_guard lock(mutex_);
  return active_ && mode_ == Mode::measuring;
}

Lane& State::lane(c10::Device device) {
  auto& lane = lanes_[device];
  if (lane == nullptr) {
    lane = std::make_unique<Lane>(device, options);
    lane->copier.start_measuring();
    if (meter_ == nullptr && (!device.is_cpu() || host_count_ != nullptr)) {
      meter_ = std::make_unique<Meter>(device);
      recorder_.begin(meter_.get());
    }
  }
  return *lane;
}

std::optional<Kept> State::why_kept(const at::Tensor& tensor) const {
  if (compat::in_backward()) {
    return Kept::in_backward;
  }
  if (tensor.device().is_cpu() != of_cpu_) {
    return Kept::elsewhere;
  }
  return std::nullopt;
}

Saved State::pack(const at::Tensor& tensor, std::optional<Kept> known) {
  if (!is_plain(tensor)) {
    return pass(tensor);
  }
  Saved saved(tensor);
  saved.state_ = shared_from_this();
  saved.remember_view(tensor);
  auto why = known ? known : why_kept(tensor);
  std::lock_guard lock(mutex_);
  if (!why && never_.contains(StorageRef(tensor.storage()))) {
    why = Kept::parameter;
  }
  if (!why && tensor.storage().nbytes() < options.min_bytes.value_or(kLeastBytes)) {
    why = Kept::small;
  }
  if (why) {
    if (counted_.insert(StorageRef(tensor.storage())).second) {
      count(*why, tensor.storage().nbytes());
    }
    saved.passed_ = tensor.tensor_data();
    return saved;
  }
  const auto range = range_of(tensor);
  saved.storage_ = find(tensor.storage(), saved.version_, range);
  if (saved.storage_ == nullptr) {
    saved.storage_ = save(tensor.storage(), saved.version_, range);
  }
  if (saved.storage_->action == Action::keep) {
    saved.passed_ = tensor.tensor_data();
    ++saved.storage_->views;
  }
  if (mode_ == Mode::planned && options.recompute && saved.storage_->action != Action::recompute) {
    lineage_.rest(saved.storage_, tensor, saved.storage_->index);
  }
  return saved;
}

Saved State::pass(const at::Tensor& tensor) {
  Saved saved(tensor);
  saved.state_ = shared_from_this();
  // With its graph it would hold itself. That of a subclass may run Python, so outside the lock.
  saved.passed_ = tensor.is_leaf() ? tensor : tensor.detach();
  std::lock_guard lock(mutex_);
  count(Kept::not_plain, 0);
  return saved;
}

State::Entry State::find(const c10::Storage& storage, const Version& version, Range range) {
  const auto known = table_.find(StorageRef(storage));
  if (known == table_.end()) {
    return nullptr;
  }
  for (const auto& weak : known->second) {
    const auto entry = weak.lock();
    if (entry != nullptr && serves(*entry, version) && range.first >= entry->begin &&
        range.second <= entry->begin + entry->bytes) {
      return entry;
    }
  }
  return nullptr;
}

// A small part does, but not when such parts make up much of the storage: they may overlap.
bool State::goes_alone(const c10::Storage& storage, const Version& version, Range range) const {
  const auto bytes = range.second - range.first;
  if (bytes * kSmallPart >= storage.nbytes()) {
    return false;
  }
  size_t parts = bytes;
  if (const auto known = table_.find(StorageRef(storage)); known != table_.end()) {
    for (const auto& weak : known->second) {
      const auto entry = weak.lock();
      parts += entry != nullptr && entry->version == version ? entry->bytes : 0;
    }
  }
  return parts * kMostInParts < storage.nbytes();
}

State::Entry State::save(const c10::Storage& storage, const Version& version, Range range) {
  auto& lane = this->lane(storage.device());
  auto entry = std::make_shared<SavedStorage>(storage, current_stream(lane.device));
  entry->version = version;
  if (!options.recompute && goes_alone(storage, version, range)) {
    entry->begin = range.first / kRangeAlign * kRangeAlign;
    entry->bytes = range.second - entry->begin;
  } else {
    entry->bytes = storage.nbytes();
  }
  entry->step = step_;
  const bool named = name_owners(*entry);
  if (const auto first = first_part(storage, version)) {
    save_more(entry, storage, *first);
  } else {
    save_first(entry, storage, named);
  }
  table_[entry->original].push_back(entry);
  limit_outgoing(lane);
  return entry;
}

// What this step has saved of the same storage before.
State::Entry State::first_part(const c10::Storage& storage, const Version& version) const {
  const auto known = table_.find(StorageRef(storage));
  if (known == table_.end()) {
    return nullptr;
  }
  for (const auto& weak : known->second) {
    const auto entry = weak.lock();
    if (entry != nullptr && serves(*entry, version) && entry->step == step_) {
      return entry;
    }
  }
  return nullptr;
}

// Whether it may be asked for on account of what is saved now. What was dropped may not once the
// step is not as planned: how often it can be made is a part of the plan.
bool State::serves(const SavedStorage& entry, const Version& version) const {
  const bool planned = mode_ == Mode::planned && entry.step == step_;
  return entry.version == version && (entry.action != Action::recompute || planned);
}

void State::save_first(const Entry& entry, const c10::Storage& storage, bool named) {
  entry->index = recorder_.saved(entry->original, storage.nbytes());
  order_.push_back(entry);
  largest_ = std::max<uint64_t>(largest_, storage.nbytes());
  ++now_.saved.count;
  now_.saved.bytes += storage.nbytes();
  if (mode_ == Mode::measuring && options.recompute) {
    follow_ticks();
    profile_.saved(storage, entry->version, static_cast<uint32_t>(entry->index),
                   recorder_.interval());
  }
  auto why = why_planned(*entry, storage.nbytes());
  if (!named && mode_ == Mode::planned && known_->followed != nullptr) {
    const auto& followed = *known_->followed;
    const auto value = followed.value_of_saved[entry->index];
    entry->on_device = value == kNone ? entry->on_device : followed.keepers[value];
  }
  if (is_dropped(*entry)) {
    drop(entry, storage);
    return;
  }
  if (!why && options.recompute && mode_ == Mode::following && !options.moves) {
    why = Kept::unplanned;
  }
  if (options.recompute && mode_ == Mode::measuring) {
    why = why || keeps_profiled(storage) ? Kept::unplanned : why;
    kept_profiled_.push_back(why.has_value());
  }
  if (!why && others_hold(*entry, storage)) {
    why = Kept::lives_on;
  }
  if (why) {
    keep(*entry, storage, *why);
  } else {
    move_out(*entry, storage);
  }
}

// The storage is on the device or not: its parts share one fate, and count once.
void State::save_more(const Entry& entry, const c10::Storage& storage, const SavedStorage& first) {
  entry->index = first.index;
  if (first.action == Action::keep) {
    entry->action = Action::keep;
    entry->kept = hold(storage, entry->on_device, current_scope());
  } else {
    move_out(*entry, storage);
  }
}

// State that outlives steps: some before have saved it, too, or someone who leases it says so.
bool State::others_hold(const SavedStorage& entry, const c10::Storage& storage) const {
  const auto met = met_.find(entry.original);
  if (met != met_.end() && met->second >= kMetForLong) {
    return true;
  }
  const auto leases = ledger().leases().rows_of(storage.unsafeGetStorageImpl());
  return std::ranges::any_of(
      leases, [](const LeaseRow& lease) { return kind_of(lease.owner) != OwnerKind::activation; });
}

// What the plan says of it, if it is what the plan expects here. Where the step may still become
// another one that is known, it is kept only if that one keeps it, too.
std::optional<Kept> State::why_planned(const SavedStorage& entry, uint64_t bytes) {
  const auto expects = [&](const Known& known) {
    const auto& saved = known.timeline.saved;
    const auto saves = known.followed != nullptr ? known.followed->saves : saved.size();
    return entry.index < saves && saved[entry.index].bytes == bytes;
  };
  for (size_t i = 0; i < fits_.size(); ++i) {
    fits_[i] = fits_[i] && expects(*all_known_[i]);
  }
  if (mode_ == Mode::planned && !expects(*known_)) {
    lose_plan();
  }
  if (mode_ != Mode::planned) {
    return std::nullopt;
  }
  position_ = std::max(position_, known_->timeline.saved[entry.index].saved);
  const auto& plan = known_->plan;
  if (plan.actions[entry.index] != Action::keep) {
    return std::nullopt;
  }
  const auto why = plan.why[entry.index];
  for (size_t i = 0; i < fits_.size() && why == Kept::budget && !options.recompute; ++i) {
    if (fits_[i] && all_known_[i]->plan.actions[entry.index] == Action::offload) {
      return std::nullopt;
    }
  }
  return why;
}

void State::keep(SavedStorage& entry, const c10::Storage& storage, Kept why) {
  entry.action = Action::keep;
  entry.lives_on = why == Kept::lives_on;
  entry.kept = hold(storage, entry.on_device, current_scope());
  count(why, storage.nbytes());
}

void State::move_out(SavedStorage& entry, const c10::Storage& storage) {
  auto& lane = this->lane(storage.device());
  try {
    if (disk_ != nullptr) {
      disk_->wait_for_writes(std::min(kMostUnwritten, options.host_limit / 2));
    }
    auto copy = room_for(entry);
    entry.left = lane.copier.out(storage, entry.begin, copy, entry.compute);
    now_.most_host_bytes = std::max(now_.most_host_bytes, lane.pool->held());
    tell_of_copy(entry, copy);
    if (disk_ != nullptr) {
      entry.rest = disk_->put(std::move(copy), entry.left);
    } else {
      entry.host = std::move(copy);
    }
  } catch (const BudgetError&) {
    if (options.host_full == HostFull::raise) {
      throw;
    }
    const bool on_disk = disk_ != nullptr && disk_->full();
    keep(entry, storage, on_disk ? Kept::disk_full : Kept::host_full);
    return;
  }
  ++now_.moved_out.count;
  if (lane.device.is_cpu()) {
    return;  // done
  }
  // Autograd would hold it for this stream, which may be another than the one it is from.
  used_on(storage, entry.compute);
  const auto gone = mode_ == Mode::planned ? gone_from(known_->timeline.saved[entry.index]) : 0;
  const bool first = entry_at(entry.index).get() == &entry;
  lane.outgoing.add({.key = &entry,
                     .bytes = first ? storage.nbytes() : entry.bytes,
                     .compute = entry.compute,
                     .gone = gone,
                     .lease = hold(storage, entry.on_device, ScopeId::process),
                     .left = entry.left});
}

HostCopy State::room_for(const SavedStorage& entry, HostPool::Limit limit) {
  const auto device = entry.original.device();
  return {lane(device).pool, entry.bytes, entry.on_host, current_scope(), limit};
}

void State::limit_outgoing(Lane& lane) {
  if (lane.device.is_cpu() || inside_call_) {
    return;
  }
  int64_t room = 0;
  if (mode_ == Mode::planned) {
    const auto& rooms = known_->plan.room;
    room = position_ < rooms.size() ? rooms[position_] : 0;
    if (!options.budget) {
      room = std::min(room, static_cast<int64_t>(following_room()));
    }
  } else if (mode_ == Mode::following) {
    room = static_cast<int64_t>(following_room()) - static_cast<int64_t>(ahead_);
  }
  lane.outgoing.limit(room, position_, [&](const Outgoing::Leaving& leaving) {
    lane.copier.wait(leaving.left, leaving.compute);
  });
}

void State::settle() {
  std::lock_guard lock(mutex_);
  for (const auto& [device, lane] : lanes_) {
    lane->outgoing.settle();
  }
}

void State::count(Kept why, uint64_t bytes) {
  auto& kept = now_.kept[static_cast<size_t>(why)];
  ++kept.count;
  kept.bytes += bytes;
}

std::vector<c10::Storage> State::held(const SavedStorage& entry) {
  std::vector<c10::Storage> out;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) {
    return out;
  }
  for (const auto* lease : {&entry.kept, &entry.fetched}) {
    if (lease->held()) {
      out.push_back(lease->storage());
    }
  }
  try {
    entry.host.for_each_piece(
        [&](const c10::Storage& piece, const HostPool::Busy&) { out.push_back(piece); });
  } catch (const LeaseError&) {  // NOLINT(bugprone-empty-catch): a scope has released it
  }
  return out;
}

void State::tell_of_copy(const SavedStorage& entry, const HostCopy& copy) {
  for (const auto& part : parts()) {
    if (part->copied) {
      copy.for_each_piece([&](const c10::Storage& piece, const HostPool::Busy&) {
        part->copied(*piece.unsafeGetStorageImpl(), entry.original);
      });
    }
  }
}

// Who made it, where someone watches that (else false), and the device it is from.
bool State::name_owners(SavedStorage& entry) {
  std::string name;
  for (const auto& part : parts()) {
    if (part->origin && name.empty()) {
      name = part->origin(entry.original);
    }
  }
  const auto shown = name.empty() ? "saved activation" : front_of(name, kLongestName);
  const auto site = text("from ", entry.original.device().str());
  entry.on_device = intern_owner(OwnerKind::activation, shown, site);
  entry.on_host = intern_owner(OwnerKind::host_copy, shown, site);
  return !name.empty();
}

}  // namespace tenure::offload
