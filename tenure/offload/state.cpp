#include <tenure/offload/state.h>

#include <tenure/core/error.h>
#include <tenure/core/hold.h>
#include <tenure/core/ledger.h>
#include <tenure/core/names.h>
#include <tenure/core/part.h>
#include <tenure/core/release.h>
#include <tenure/core/scope.h>
#include <tenure/core/text.h>
#include <tenure/core/torch_compat.h>

#include <ATen/DeviceAccelerator.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

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

// The allocator must not give the memory away before what `stream` does with it is done.
void used_on(const c10::Storage& storage, const c10::Stream& stream) {
  c10::getDeviceAllocator(stream.device_type())->recordStream(storage.data_ptr(), stream);
}

c10::Stream current_stream(c10::Device device) {
  return device.is_cpu() ? c10::Stream(c10::Stream::DEFAULT, device)
                         : c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Not at::isTensorSubclassLike, for which every tensor is one while a dispatch mode is on.
bool is_subclass(const at::Tensor& tensor) {
  return !(tensor.key_set() & at::kTensorSubclassLike).empty();
}

// Whether it is a view of one storage and no more than that.
bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && !tensor.is_nested() && !tensor.is_quantized() &&
         !tensor.is_inference() && !is_subclass(tensor) && tensor.has_storage() &&
         tensor.storage().data() != nullptr;
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

Lane& State::lane(c10::Device device) {
  auto& lane = lanes_[device];
  if (lane == nullptr) {
    lane = std::make_unique<Lane>(device, options);
    lane->copier.start_measuring();
    if (meter_ == nullptr && !device.is_cpu()) {
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
    if (entry != nullptr && entry->version == version && range.first >= entry->begin &&
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
  if (goes_alone(storage, version, range)) {
    entry->begin = range.first / kRangeAlign * kRangeAlign;
    entry->bytes = range.second - entry->begin;
  } else {
    entry->bytes = storage.nbytes();
  }
  entry->step = step_;
  name_owners(*entry);
  if (const auto first = first_part(storage, version)) {
    save_more(entry, storage, *first);
  } else {
    save_first(entry, storage);
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
    if (entry != nullptr && entry->version == version && entry->step == step_) {
      return entry;
    }
  }
  return nullptr;
}

void State::save_first(const Entry& entry, const c10::Storage& storage) {
  entry->index = recorder_.saved(entry->original, storage.nbytes());
  order_.push_back(entry);
  largest_ = std::max<uint64_t>(largest_, storage.nbytes());
  ++now_.saved.count;
  now_.saved.bytes += storage.nbytes();
  auto why = why_planned(*entry, storage.nbytes());
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
    return entry.index < saved.size() && saved[entry.index].bytes == bytes;
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
  if (plan.actions[entry.index] == Action::offload) {
    return std::nullopt;
  }
  const auto why = plan.why[entry.index];
  for (size_t i = 0; i < fits_.size() && why == Kept::budget; ++i) {
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
  const bool first = order_[entry.index].lock().get() == &entry;
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

// Note [What backward is given]
// Autograd takes a gradient as its own, to keep as `.grad` or to add to in place, if nobody else
// refers to that tensor: a backward may return what it saved. So where the saved tensor is alive,
// it is given out itself, as PyTorch does. Else a view is, of memory that others may get, too:
//   - the saved storage, because something else of it is alive. The view has the saved tensor's
//     version counter, so that a write is found as PyTorch would.
//   - a storage that was fetched. Views of one share a counter, and once it has moved, who asks
//     next gets a fresh copy.
//   - where the graph is retained, a storage of its own: it may be asked for again when `.grad`
//     has been written to.
at::Tensor State::unpack(const Saved& saved, Sharing sharing) {
  saved.require_unchanged();
  if (saved.storage_ == nullptr) {
    const auto original = saved.original();
    return original.defined() ? original : saved.passed_;
  }
  auto& entry = *saved.storage_;
  std::lock_guard lock(mutex_);
  const auto compute = current_stream(entry.original.device());
  reach(entry);
  auto& lane = this->lane(entry.original.device());
  lane.outgoing.set_needed(&entry, true);
  keep_planned();
  limit_outgoing(lane);  // before memory is taken for this tick
  auto out = board(saved, compute, sharing);
  fetch_ahead(entry);
  return out;
}

// The step has come to the first need of this storage.
void State::reach(const SavedStorage& entry) {
  if (entry.step != step_ || !open_) {
    return;
  }
  recorder_.needed(entry.index);
  doubt(entry);
  if (mode_ == Mode::planned) {
    const auto needed = known_->timeline.saved[entry.index].needed;
    position_ = needed == kNever ? position_ : std::max(position_, needed);
  }
}

// A plan said that others hold it until now. They do if there are more references than ours: the
// lease, the one in this function, and one of each tensor that autograd was given.
void State::doubt(const SavedStorage& entry) {
  if (!entry.lives_on || mode_ != Mode::planned || entry.uses > 0 || !entry.kept.held()) {
    return;
  }
  const auto storage = entry.kept.storage();
  if (storage.use_count() <= entry.views + 2) {
    alone_ += storage.nbytes();
  }
}

// The saved tensor on the device.
at::Tensor State::board(const Saved& saved, const c10::Stream& compute, Sharing sharing) {
  auto& entry = *saved.storage_;
  auto original = saved.original();
  if (original.defined() &&
      (StorageRef(original.storage()) != entry.original || is_released(original.storage()))) {
    original.reset();
  }
  const bool first = entry.uses++ == 0;
  if (entry.action == Action::keep) {
    return original.defined() ? original : saved.passed_;
  }
  if (first && entry.fetched.held()) {
    ahead_ -= std::min<uint64_t>(ahead_, entry.bytes);
  }
  lane(entry.original.device()).outgoing.set_needed(&entry, false);
  const bool retained = compat::backward_retains_graph();
  if (auto there = entry.original.lock();
      there && !is_released(*there) && (original.defined() || !retained)) {
    ++now_.reused.count;
    now_.reused.bytes += entry.bytes;
    stay_or_go(entry, *there);
    return original.defined() ? original
                              : saved.view_of(std::move(*there), 0, saved.version_.counter());
  }
  const auto storage = fetched(entry, compute, retained ? Sharing::own : sharing);
  return saved.view_of(storage, entry.begin, entry.board);
}

c10::Storage State::fetched(SavedStorage& entry, const c10::Stream& compute, Sharing sharing) {
  const bool untouched = entry.board.enabled() && entry.board.current_version() == 0;
  std::optional<c10::Storage> there;
  if (untouched && entry.fetched.held() && StorageRef(entry.fetched.storage()) != entry.original) {
    there = entry.fetched.storage();
  } else if (sharing == Sharing::shared && untouched) {
    there = entry.on_board.lock();
  }
  if (!there) {
    fetch(entry, Urgency::now);
    there = entry.fetched.storage();
  }
  lane(there->device()).copier.wait(entry.arrived, compute);
  if (compute != entry.compute) {
    used_on(*there, compute);
  }
  if (sharing == Sharing::own) {
    entry.on_board = StorageRef();
    entry.fetched.release();
  } else {
    entry.on_board = StorageRef(*there);
    stay_or_go(entry, *there);
  }
  return std::move(*there);
}

// Handed out: from here on it lives as long as backward uses it, or until its last use.
void State::stay_or_go(SavedStorage& entry, const c10::Storage& storage) {
  if (!stays(entry)) {
    entry.fetched.release();
  } else if (!entry.fetched.held()) {
    entry.fetched = hold(storage, entry.on_device, ScopeId::process);
  }
}

bool State::stays(const SavedStorage& entry) const {
  if (entry.step != step_ || !open_ || mode_ == Mode::measuring) {
    return false;
  }
  if (mode_ == Mode::planned) {
    const bool whole = order_[entry.index].lock().get() == &entry;  // not another part of it
    return whole && known_->plan.stays[entry.index] &&
           entry.uses < known_->timeline.saved[entry.index].uses;
  }
  // Until the graph lets go of it.
  return !options.budget && !compat::backward_retains_graph();
}

// Queues the copy back, into memory of the stream that computes.
void State::fetch(SavedStorage& entry, Urgency urgency) {
  auto& lane = this->lane(entry.original.device());
  const c10::OptionalStreamGuard guard(lane.device.is_cpu() ? std::nullopt
                                                            : std::optional(entry.compute));
  const c10::Storage storage(c10::Storage::use_byte_size_t(),
                             c10::SymInt(static_cast<int64_t>(entry.bytes)),
                             c10::GetAllocator(lane.device.type()), true);
  entry.fetched = hold(storage, entry.on_device, ScopeId::process);
  entry.board = c10::VariableVersion(0);
  const auto copy_back = [&](HostCopy& from) {
    entry.arrived = lane.copier.back(from, storage, entry.compute, entry.left, urgency);
  };
  if (entry.rest != nullptr) {
    const auto room = [&] { return room_for(entry, HostPool::Limit::exceeded); };
    disk_->with_bytes(entry.rest, room, copy_back);
  } else {
    copy_back(entry.host);
  }
  ++now_.moved_in.count;
}

void State::fetch_ahead(const SavedStorage& entry) {
  if (entry.step != step_ || !open_ || mode_ == Mode::measuring) {
    return;
  }
  if (mode_ == Mode::planned) {
    fetch_planned();
  } else {
    fetch_in_reverse(entry);
  }
}

// What is to be fetched now and has not left yet need not go.
void State::keep_planned() {
  if (mode_ != Mode::planned || !open_) {
    return;
  }
  const auto& fetch_at = known_->plan.fetch;
  for (auto tick = fetched_upto_; tick <= position_ && tick < fetch_at.size(); ++tick) {
    for (const auto index : fetch_at[tick]) {
      const auto entry = index < order_.size() ? order_[index].lock() : nullptr;
      const auto original = entry != nullptr ? entry->original.lock() : std::nullopt;
      if (original && entry->action == Action::offload && !entry->fetched.held()) {
        stay(*entry, *original);
      }
    }
  }
}

void State::fetch_planned() {
  const auto& fetch_at = known_->plan.fetch;
  for (; fetched_upto_ <= position_ && fetched_upto_ < fetch_at.size(); ++fetched_upto_) {
    for (const auto index : fetch_at[fetched_upto_]) {
      if (!try_fetch(index)) {
        return;
      }
    }
  }
}

// As if backward were forward's mirror image.
void State::fetch_in_reverse(const SavedStorage& entry) {
  const auto room = following_room();
  for (size_t i = std::min(entry.index, order_.size()); i-- > 0 && ahead_ < room;) {
    if (!try_fetch(i)) {
      return;
    }
  }
}

// It has not left yet, and will be needed soon.
void State::stay(SavedStorage& entry, const c10::Storage& storage) {
  if (lane(storage.device()).outgoing.set_needed(&entry, true)) {
    entry.fetched = hold(storage, entry.on_device, ScopeId::process);
  }
}

// False where the device has no room for it now.
bool State::try_fetch(size_t index) {
  const auto entry = index < order_.size() ? order_[index].lock() : nullptr;
  if (entry == nullptr || entry->action == Action::keep || entry->uses > 0 ||
      entry->fetched.held()) {
    return true;
  }
  try {
    if (const auto original = entry->original.lock()) {
      stay(*entry, *original);
    } else if (entry->rest != nullptr) {
      disk_->read_ahead(entry->rest, [&] { return room_for(*entry); });
      return true;  // to the device when it is asked for: only then is it in memory for sure
    } else {
      fetch(*entry, Urgency::ahead);
    }
  } catch (const c10::OutOfMemoryError&) {
    return false;  // it is fetched when it is asked for, and an error then is the user's
  } catch (const BudgetError&) {
    return false;  // no room on the host to read it ahead
  }
  ahead_ += entry->bytes;
  return true;
}

void State::limit_outgoing(Lane& lane) {
  if (lane.device.is_cpu()) {
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

// Who made it, where someone watches that, and the device it is from.
void State::name_owners(SavedStorage& entry) {
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
}

}  // namespace tenure::offload
