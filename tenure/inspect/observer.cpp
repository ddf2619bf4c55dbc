#include <tenure/inspect/observer.h>

#include <tenure/core/error.h>
#include <tenure/core/fork.h>
#include <tenure/core/storage_ref.h>
#include <tenure/core/text.h>
#include <tenure/core/ticks.h>
#include <tenure/core/torch_compat.h>
#include <tenure/inspect/frames.h>
#include <tenure/inspect/modules.h>
#include <tenure/inspect/part.h>

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <malloc.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_map>

namespace tenure::inspect {
namespace {

std::atomic<Level> current_level{Level::off};
std::atomic<uint32_t> current_step{0};
std::atomic<uint64_t> spent{0};  // ticks
std::atomic<uint64_t> operators_seen{0};
std::atomic<int64_t> on_devices{0};      // bytes
std::atomic<int64_t> of_interpreter{0};  // bytes
std::atomic<bool> devices_seen{false};
std::atomic<bool> stepped_up{false};  // from counting, since watching began

BirthTable& birth_table() {
  static auto* instance = new BirthTable;
  return *instance;
}

bool tracing() { return current_level.load(std::memory_order_relaxed) >= Level::trace; }

// Note [Where a storage comes from]
// An operator called from Python gives up the GIL and then allocates, on the same thread. That
// thread's Python frames cannot change while it is inside the call, and nobody else may change
// them, so it reads its own frames without the GIL. Forward operators leave the line and module
// that they were called from under the sequence number of the nodes they make; a storage born while
// such a node runs, on whichever thread, finds its forward line there.
struct Trail {
  static constexpr size_t kLength = 1 << 15;
  struct Step {
    uint64_t number = ~uint64_t{0};
    NameId site = NameId::none;
    uint32_t module = 0;
  };
  std::mutex mutex;
  std::array<Step, kLength> steps;

  void leave(uint64_t from, uint64_t to, NameId site, uint32_t module) {
    std::lock_guard lock(mutex);
    for (auto number = from; number < to && number < from + 64; ++number) {
      steps[number % kLength] = {number, site, module};
    }
  }
  Step find(uint64_t number) {
    std::lock_guard lock(mutex);
    const auto& step = steps[number % kLength];
    return step.number == number ? step : Step();
  }
};

// By the number that autograd gives the thread. Leaked, as its threads may outlive everything.
struct Trails {
  std::mutex mutex;
  std::unordered_map<uint64_t, std::unique_ptr<Trail>> by_thread;

  Trail& of(uint64_t thread) {
    std::lock_guard lock(mutex);
    auto& trail = by_thread[thread];
    if (trail == nullptr) {
      trail = std::make_unique<Trail>();
    }
    return *trail;
  }
  Trail* find(uint64_t thread) {
    std::lock_guard lock(mutex);
    const auto found = by_thread.find(thread);
    return found == by_thread.end() ? nullptr : found->second.get();
  }
};

Trails& trails() {
  static auto* instance = new Trails;
  return *instance;
}

// What this thread is in the middle of. Plain data but for the trail, which is the thread's own.
struct Here {
  static constexpr int kDeepest = 32;
  std::array<const char*, kDeepest> operators{};
  int depth = 0;
  uint64_t sequence = 0;  // of the next node, when the outermost operator began
  bool looked = false;    // frame is that of the outermost operator
  FrameInfo frame;
  Trail* trail = nullptr;
  uint32_t thread = 0;
  uint32_t births = 0;
};
thread_local Here here;

const FrameInfo& frame_here() {
  if (here.looked) {
    return here.frame;
  }
  here.frame = FrameInfo();
  const auto* frames = language_frames();
  if (frames != nullptr) {
    const auto deep = current_level.load(std::memory_order_relaxed) == Level::deep;
    frames->look(here.frame, deep ? Depth::stack : Depth::site);
  }
  here.looked = here.depth > 0;  // the same until the outermost operator ends
  return here.frame;
}

std::unique_ptr<at::ObserverContext> operator_begins(const at::RecordFunction& function) {
  if (here.depth == 0) {
    here.looked = false;
    here.sequence = at::sequence_number::peek();
  }
  if (here.depth < Here::kDeepest) {
    here.operators[static_cast<size_t>(here.depth)] = function.name();
  }
  ++here.depth;
  return nullptr;
}

void operator_ends(const at::RecordFunction& /*function*/, at::ObserverContext* /*context*/) {
  here.depth = std::max(0, here.depth - 1);
  if (here.depth > 0) {
    return;
  }
  operators_seen.fetch_add(1, std::memory_order_relaxed);
  const auto now = at::sequence_number::peek();
  if (now != here.sequence && tracing()) {
    if (here.trail == nullptr) {
      here.trail = &trails().of(at::RecordFunction::currentThreadId());
    }
    ++here.depth;  // so that the look is kept if it was made
    const auto& frame = frame_here();
    --here.depth;
    here.trail->leave(here.sequence, now, frame.site, module_number(frame.module));
  }
  here.looked = false;
}

// The innermost operator that computes something, rather than make room for the result.
NameId operator_here() {
  for (int i = std::min(here.depth, Here::kDeepest) - 1; i >= 0; --i) {
    const std::string_view name(here.operators[static_cast<size_t>(i)]);
    if (i == 0 || !(name.starts_with("aten::empty") || name.starts_with("aten::resize") ||
                    name.starts_with("aten::_to_copy"))) {
      return tenure::intern(name);
    }
  }
  return NameId::none;
}

bool in_collective() {
  return here.depth > 0 && std::string_view(here.operators[0]).starts_with("c10d::");
}

OriginId origin_here(uint16_t device) {
  const auto& frame = frame_here();
  Origin origin{.op = operator_here(),
                .site = frame.site,
                .stack = frame.stack,
                .module = module_number(frame.module),
                .device = device,
                .communication = frame.communication || in_collective()};
  if (const auto node = torch::autograd::get_current_node()) {
    origin.phase = Phase::backward;
    if (auto* trail = trails().find(node->thread_id())) {
      const auto step = trail->find(node->sequence_nr());
      origin.forward_site = step.site;
      origin.module = step.module != 0 ? step.module : origin.module;
    }
  } else if (frame.optimizer) {
    origin.phase = Phase::optimizer;
  } else if (frame.module != nullptr || (here.depth > 0 && c10::GradMode::is_enabled())) {
    origin.phase = Phase::forward;
  }
  return intern(origin);
}

void record_birth(const void* data, uint64_t bytes, uint16_t device) {
  if (here.thread == 0) {
    here.thread = static_cast<uint32_t>(syscall(SYS_gettid));
  }
  const bool timed = (here.births++ & 63) == 0;
  const auto begin = timed ? ticks() : 0;
  birth_table().born(data, bytes, current_step.load(std::memory_order_relaxed), origin_here(device),
                     here.thread);
  if (timed) {
    spent.fetch_add((ticks() - begin) * 64, std::memory_order_relaxed);
  }
}

// Bytes that died, or none if nobody knew of them.
std::optional<uint64_t> record_death(const void* data) {
  return birth_table().died(data, current_step.load(std::memory_order_relaxed),
                            torch::autograd::get_current_graph_task_id() != -1);
}

// Sizes of blocks that are only counted and that malloc knows nothing of.
BirthTable& sizes() {
  static auto* instance = new BirthTable;
  return *instance;
}

int64_t malloced_bytes() {
  const auto heap = mallinfo2();
  return static_cast<int64_t>(heap.uordblks + heap.hblkhd);
}

// Whether an allocator's blocks are malloc's, so that malloc can be asked about them. On aarch64
// torch brings an allocator of its own; others are preloaded. Asked several times, for threads may
// use malloc meanwhile; a wrong "no" costs time and a wrong "yes" cannot be afforded.
bool takes_from_malloc(c10::Allocator& allocator) {
  for (int64_t bytes = 1'000'003; bytes < 3'000'000; bytes += 700'001) {
    const auto before = malloced_bytes();
    const auto made = allocator.allocate(static_cast<size_t>(bytes));
    const auto more = malloced_bytes() - before;
    if (more < bytes || more > bytes + 65'536) {
      return false;
    }
  }
  return true;
}

// Note [Watching the CPU allocator]
// The wrapper hands out what the allocator beneath it made, with our deleter in place of that
// allocator's: the pointer is its own context before and after, so code that asks whether a block
// is plain memory gets the same answer. Nothing is added to a block, so sizes and alignment are
// what they were.
class WatchedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto made = inner_->allocate(bytes);
    if (made.get() == nullptr || made.get() != made.get_context() ||
        !made.compare_exchange_deleter(inner_deleter_, &WatchedAllocator::free)) {
      return made;
    }
    if (tracing()) {
      record_birth(made.get(), bytes, 0);
    } else if (current_level.load(std::memory_order_relaxed) == Level::count) {
      count_in(made.get(), bytes);
    }
    return made;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &WatchedAllocator::free; }
  void copy_data(void* dest, const void* src, size_t bytes) const override {
    inner_->copy_data(dest, src, bytes);
  }

  // False: the allocator beneath gives out more than plain memory, and cannot be watched.
  bool install() {
    if (installed_) {
      return true;
    }
    inner_ = c10::GetCPUAllocator();
    inner_deleter_ = inner_->raw_deleter();
    if (inner_deleter_ == nullptr) {
      return false;
    }
    in_malloc_.store(takes_from_malloc(*inner_), std::memory_order_relaxed);
    c10::SetCPUAllocator(this, kPriority);
    installed_ = true;
    return true;
  }
  bool in_malloc() const { return in_malloc_.load(std::memory_order_relaxed); }
  // Where another allocator wraps this one by now, it stays beneath that and does nothing.
  void remove() {
    if (c10::GetCPUAllocator() == this) {
      c10::SetCPUAllocator(inner_, kPriority);
      installed_ = false;
    }
  }
  bool adopt(c10::StorageImpl& storage) {
    auto& data = storage._mutable_data_ptr_no_checks();  // it may be one that raises
    return inner_deleter_ != nullptr && data.get() != nullptr && data.get() == data.get_context() &&
           data.compare_exchange_deleter(inner_deleter_, &WatchedAllocator::free);
  }
  // Counts out a storage that was only counted, so that it can be known by itself.
  static bool uncount(c10::StorageImpl& storage) {
    auto& data = storage._mutable_data_ptr_no_checks();
    if (data.get() == nullptr || data.get() != data.get_context() ||
        data.get_deleter() != &WatchedAllocator::free || birth_table().find(data.get())) {
      return false;
    }
    count_out(data.get());
    return true;
  }

 private:
  // An allocator's priority only ever rises, so each of ours is as high as can be.
  static constexpr uint8_t kPriority = 255;

  static void free(void* data) {
    if (!record_death(data)) {
      count_out(data);
    }
    inner_deleter_(data);
  }

  // Counting alone keeps nothing for a block where malloc knows its size.
  static void count_in(const void* data, uint64_t bytes) {
    if (in_malloc_.load(std::memory_order_relaxed)) {
      bytes = malloc_usable_size(const_cast<void*>(data));  // NOLINT(*-const-cast)
    } else {
      sizes().born(data, bytes, 0, OriginId::unknown, 0);
    }
    birth_table().count(static_cast<int64_t>(bytes));
  }
  static void count_out(void* data) {
    if (const auto known = sizes().died(data, 0)) {
      birth_table().count(-static_cast<int64_t>(*known));
    } else if (in_malloc_.load(std::memory_order_relaxed) &&
               current_level.load(std::memory_order_relaxed) != Level::off) {
      birth_table().count(-static_cast<int64_t>(malloc_usable_size(data)));
    }
  }

  c10::Allocator* inner_ = nullptr;
  bool installed_ = false;
  static inline std::atomic<bool> in_malloc_{false};
  static inline c10::DeleterFnPtr inner_deleter_ = nullptr;
};

WatchedAllocator& cpu_allocator() {
  static auto* instance = new WatchedAllocator;
  return *instance;
}

// Storages that are not the allocator's. Leaked, as every table here.
struct Foreign {
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
  struct Known {
    Weak storage;
    Observer::Memory memory;
  };
  Foreign() { protect_across_fork(mutex); }

  // Returns whether it is new.
  bool add(c10::StorageImpl& storage, Observer::Memory memory) {
    const auto* data = storage._mutable_data_ptr_no_checks().get();
    if (data == nullptr || storage.device_type() != c10::DeviceType::CPU ||
        birth_table().find(data)) {
      return false;
    }
    std::lock_guard lock(mutex);
    const auto before = storages.find(data);
    if (before != storages.end()) {
      if (!bury(before->second)) {
        return false;
      }
      storages.erase(before);
    }
    Weak weak(c10::intrusive_ptr<c10::StorageImpl>::unsafe_reclaim_from_nonowning(&storage));
    storages.emplace(data, Known{std::move(weak), memory});
    in(memory) += static_cast<int64_t>(storage.nbytes());
    return true;
  }

  // REQUIRES: mutex. Returns whether the storage is gone, and tells its death if so.
  bool bury(const Known& known) {
    if (known.storage.use_count() > 0) {
      return false;
    }
    const auto gone = record_death(known.storage._unsafe_get_target());
    in(known.memory) -= static_cast<int64_t>(gone.value_or(0));
    return true;
  }

  int64_t& in(Observer::Memory memory) { return bytes[static_cast<size_t>(memory)]; }

  std::mutex mutex;
  std::unordered_map<const void*, Known> storages;  // by the memory's address
  std::array<int64_t, 3> bytes{};                   // by Memory
};

Foreign& foreign() {
  static auto* instance = new Foreign;
  return *instance;
}

at::CallbackHandle operators_handle = at::INVALID_CALLBACK_HANDLE;

void watch_operators(bool on) {
  if (on && operators_handle == at::INVALID_CALLBACK_HANDLE) {
    operators_handle =
        at::addGlobalCallback(at::RecordFunctionCallback(&operator_begins, &operator_ends)
                                  .scopes({at::RecordScope::FUNCTION}));
  } else if (!on && operators_handle != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(operators_handle);
    operators_handle = at::INVALID_CALLBACK_HANDLE;
  }
}

void stop_in_child() {
  current_level.store(Level::off, std::memory_order_relaxed);
  cpu_allocator().remove();
  watch_operators(false);
}

}  // namespace

Observer& observer() {
  static auto* instance = new Observer;
  return *instance;
}

void Observer::start(Level level) {
  if (this->level() != Level::off) {
    throw Error("this process is being watched already: stop watching first");
  }
  static const bool once = [] {
    on_fork_in_child(stop_in_child);
    register_inspect();
    return true;
  }();
  (void)once;
  spent.store(0, std::memory_order_relaxed);
  stepped_up.store(false, std::memory_order_relaxed);
  operators_seen.store(0, std::memory_order_relaxed);
  if (!cpu_allocator().install()) {
    throw Error(
        "the CPU allocator of this program cannot be watched: it gives out more than memory");
  }
  current_level.store(level, std::memory_order_relaxed);
  watch_operators(level >= Level::trace);
}

void Observer::stop() {
  current_level.store(Level::off, std::memory_order_relaxed);
  cpu_allocator().remove();
  watch_operators(false);
}

Level Observer::level() const { return current_level.load(std::memory_order_relaxed); }

void Observer::step_down(Level level) {
  if (level < this->level() && level != Level::off) {
    current_level.store(level, std::memory_order_relaxed);
    watch_operators(level >= Level::trace);
  }
}

void Observer::step_up(Level level) {
  if (level > this->level() && this->level() != Level::off) {
    stepped_up.store(true, std::memory_order_relaxed);
    current_level.store(level, std::memory_order_relaxed);
    watch_operators(level >= Level::trace);
  }
}

void Observer::set_step(uint64_t step) {
  current_step.store(static_cast<uint32_t>(step), std::memory_order_relaxed);
}

bool Observer::adopt(c10::StorageImpl& storage) {
  const auto device = device_tag(storage.device());
  const auto* data = storage._mutable_data_ptr_no_checks().get();  // it may be one that raises
  if (storage.device_type() == c10::DeviceType::CPU) {
    if (!cpu_allocator().adopt(storage) && !WatchedAllocator::uncount(storage)) {
      return false;
    }
  } else if (!devices_seen.load(std::memory_order_relaxed) ||
             storage.device_type() != c10::DeviceType::CUDA || data == nullptr ||
             birth_table().find(data)) {
    return false;
  } else if (stepped_up.load(std::memory_order_relaxed)) {
    // It was counted, rounded up by the allocator: those few bytes stay in the count.
    birth_table().count(-static_cast<int64_t>(storage.nbytes()));
  } else {
    on_devices.fetch_add(static_cast<int64_t>(storage.nbytes()), std::memory_order_relaxed);
  }
  const auto before = intern(Origin{.site = tenure::intern("before watching"), .device = device});
  birth_table().born(data, storage.nbytes(), current_step.load(std::memory_order_relaxed), before,
                     0);
  return true;
}

void Observer::device_born(const void* data, uint64_t bytes, uint16_t device) {
  if (tracing()) {
    record_birth(data, bytes, device);
  } else if (level() == Level::count) {
    birth_table().count(static_cast<int64_t>(bytes));
  } else {
    return;
  }
  on_devices.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
}

void Observer::device_born_at(const void* data, uint64_t bytes, uint16_t device, NameId site) {
  if (!tracing()) {
    return;
  }
  birth_table().born(data, bytes, current_step.load(std::memory_order_relaxed),
                     intern(Origin{.site = site, .device = device}), 0);
  on_devices.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
}

void Observer::device_died(const void* data, uint64_t bytes) {
  if (level() == Level::off && on_devices.load(std::memory_order_relaxed) <= 0) {
    return;
  }
  auto gone = static_cast<int64_t>(bytes);
  if (const auto known = record_death(data)) {
    gone = static_cast<int64_t>(*known);
  } else if (level() == Level::count) {
    birth_table().count(-gone);
  } else {
    return;  // born before anyone watched
  }
  on_devices.fetch_sub(gone, std::memory_order_relaxed);
}

bool Observer::storages_are_malloced() const { return cpu_allocator().in_malloc(); }
int64_t Observer::device_bytes() const { return on_devices.load(std::memory_order_relaxed); }
void Observer::see_devices() { devices_seen.store(true, std::memory_order_relaxed); }

bool Observer::welcome(c10::StorageImpl& storage) {
  if (!tracing() || storage.device_type() != c10::DeviceType::CPU ||
      !cpu_allocator().adopt(storage)) {
    return false;
  }
  record_birth(storage.data(), storage.nbytes(), 0);
  return true;
}

void Observer::welcome_foreign(c10::StorageImpl& storage, Memory memory) {
  if (tracing() && foreign().add(storage, memory)) {
    record_birth(&storage, storage.nbytes(), 0);
  }
}

void Observer::find_foreign(c10::StorageImpl& storage) {
  if (tracing() && foreign().add(storage, Memory::heap)) {
    const auto origin = intern(Origin{.site = tenure::intern("memory of another library's")});
    birth_table().born(&storage, storage.nbytes(), current_step.load(std::memory_order_relaxed),
                       origin, 0);
  }
}

void Observer::welcome_copy(c10::StorageImpl& copy, const StorageRef& original) {
  const auto source = original.lock();
  if (!tracing() || !source ||
      !foreign().add(copy, original.device().is_cpu() ? Memory::heap : Memory::pinned)) {
    return;
  }
  const auto birth = birth_table().find(source->data());
  auto origin = birth ? origin_of(birth->origin) : Origin{};
  origin.op = tenure::intern(text(name_of(origin.op), origin.op == NameId::none ? "" : ", ",
                                  "on the host, from ", original.device().str()));
  origin.device = 0;
  birth_table().born(&copy, copy.nbytes(), current_step.load(std::memory_order_relaxed),
                     intern(origin), 0);
}

void Observer::sweep() {
  auto& known = foreign();
  std::lock_guard lock(known.mutex);
  std::erase_if(known.storages, [&](const auto& one) { return known.bury(one.second); });
}

int64_t Observer::shared_bytes() const {
  auto& known = foreign();
  std::lock_guard lock(known.mutex);
  return known.in(Memory::shared);
}

int64_t Observer::pinned_bytes() const {
  auto& known = foreign();
  std::lock_guard lock(known.mutex);
  return known.in(Memory::pinned);
}

int64_t Observer::malloced_bytes() const {
  auto& known = foreign();
  std::lock_guard lock(known.mutex);
  if (!cpu_allocator().in_malloc()) {
    return known.in(Memory::heap);
  }
  return std::max<int64_t>(0, birth_table().flow().bytes - device_bytes() -
                                  known.in(Memory::shared) - known.in(Memory::pinned));
}

BirthTable& Observer::births() { return birth_table(); }

void Observer::interpreter_took(int64_t bytes) {
  of_interpreter.fetch_add(bytes, std::memory_order_relaxed);
}
int64_t Observer::interpreter_bytes() const {
  return of_interpreter.load(std::memory_order_relaxed);
}

uint64_t Observer::cost() const {
  return static_cast<uint64_t>(seconds_between(0, spent.load(std::memory_order_relaxed)) * 1e9);
}

uint64_t Observer::operators() const { return operators_seen.load(std::memory_order_relaxed); }

}  // namespace tenure::inspect
