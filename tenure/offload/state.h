// State: what a session and the tensors it saved share. Inside offload only; see session.h.
#pragma once

#include <tenure/core/lock.h>
#include <tenure/core/meter.h>
#include <tenure/offload/call_times.h>
#include <tenure/offload/copier.h>
#include <tenure/offload/disk.h>
#include <tenure/offload/fitted.h>
#include <tenure/offload/host_pool.h>
#include <tenure/offload/lineage.h>
#include <tenure/offload/outgoing.h>
#include <tenure/offload/planner.h>
#include <tenure/offload/profile.h>
#include <tenure/offload/recorder.h>
#include <tenure/offload/session.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace tenure::offload {

// Plans remembered, one for each shape of step.
inline constexpr size_t kMostKnown = 8;
// What a copy costs the host: below the bytes that move meanwhile a storage is not worth one.
inline constexpr double kCopyOverhead = 10e-6;

inline int64_t part_of(int64_t bytes, double part) {
  return static_cast<int64_t>(static_cast<double>(bytes) * part);
}

// By which steps are told apart.
uint64_t shape_of(const Timeline& timeline);

// All that one device needs.
struct Lane {
  Lane(c10::Device at, const Options& options);

  c10::Device device;
  Copier copier;
  std::shared_ptr<HostPool> pool;  // shared with copies that outlive the session
  Outgoing outgoing;
};

// A measured step and what was made of it.
struct Known {
  Timeline timeline;
  uint64_t shape = 0;
  int64_t most = 0;     // allocated at once in that step
  bool drifts = false;  // it was measured before, at another level
  // How often it was made for a higher level since it was measured, and at which level that was:
  // Note [Levels that drift].
  uint32_t lifts = 0;
  int64_t began_at = 0;
  uint64_t small = 0;  // not worth a copy; decided once, so that what moves stays the same
  Plan plan;
  // With recompute: the step as it was measured, while `timeline` and `plan` are the fit's.
  Timeline measured;
  std::shared_ptr<Followed> followed;  // shared with the lineage of the step that follows it
};

class State : public std::enable_shared_from_this<State>, public Watcher, private Lineage::Shelf {
 public:
  using Range = std::pair<size_t, size_t>;  // bytes of a storage

  explicit State(Options given);
  ~State() override;
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  const Options options;

  void never(std::vector<StorageRef> storages);
  void begin();
  void end();
  void abandon();
  bool active() const;
  bool measuring() const;
  Saved pack(const at::Tensor& tensor, std::optional<Kept> known);
  Saved pass(const at::Tensor& tensor);
  at::Tensor unpack(const Saved& saved, Sharing sharing);
  void settle();
  Stats stats();
  void call(const Operator& op, Invocation& invocation) override;
  Fitted fitted();
  std::vector<Point> frontier(size_t points);
  // What it keeps alive; nothing while another thread is in the middle of something.
  std::vector<c10::Storage> held(const SavedStorage& entry);
  // See part.h, and Note [As if nothing had moved].
  int64_t displaced(c10::Device device);

 private:
  using Entry = std::shared_ptr<SavedStorage>;
  struct Totals {
    Moved out;
    Moved back;
    double exposed = 0;
  };

  std::optional<Kept> why_kept(const at::Tensor& tensor) const;
  Entry find(const c10::Storage& storage, const Version& version, Range range);
  bool goes_alone(const c10::Storage& storage, const Version& version, Range range) const;
  Entry save(const c10::Storage& storage, const Version& version, Range range);
  std::optional<Kept> why_planned(const SavedStorage& entry, uint64_t bytes);
  bool others_hold(const SavedStorage& entry, const c10::Storage& storage) const;
  Entry first_part(const c10::Storage& storage, const Version& version) const;
  bool serves(const SavedStorage& entry, const Version& version) const;
  void save_first(const Entry& entry, const c10::Storage& storage, bool named);
  void save_more(const Entry& entry, const c10::Storage& storage, const SavedStorage& first);
  void keep(SavedStorage& entry, const c10::Storage& storage, Kept why);
  void move_out(SavedStorage& entry, const c10::Storage& storage);
  HostCopy room_for(const SavedStorage& entry, HostPool::Limit limit = HostPool::Limit::kept);

  void reach(const SavedStorage& entry);
  void doubt(const SavedStorage& entry);
  at::Tensor board(const Saved& saved, const c10::Stream& compute, Sharing sharing);
  c10::Storage fetched(SavedStorage& entry, const c10::Stream& compute, Sharing sharing);
  void stay_or_go(SavedStorage& entry, const c10::Storage& storage);
  bool stays(const SavedStorage& entry) const;
  void fetch(SavedStorage& entry, Urgency urgency);
  void fetch_ahead(const SavedStorage& entry);
  void keep_planned();
  void fetch_planned();
  void fetch_in_reverse(const SavedStorage& entry);
  void stay(SavedStorage& entry, const c10::Storage& storage);
  bool try_fetch(size_t index);
  void limit_outgoing(Lane& lane);

  bool keeps_profiled(const c10::Storage& storage) const;
  bool others_hold_profiled(size_t index, const StorageRef& ref) const;
  Timeline profiled_timeline() const;
  void follow();
  void open(const Operator& op, const torch::jit::Stack& stack);
  void call_profiled(const Operator& op, Invocation& invocation);
  void call_followed(const Operator& op, Invocation& invocation);
  void tell_writes(const Operator& op, const torch::jit::Stack& stack);
  void keep_dropped(const c10::Storage& storage);
  void follow_ticks();
  bool is_dropped(const SavedStorage& entry) const;
  void drop(const Entry& entry, const c10::Storage& storage);
  std::shared_ptr<SavedStorage> save_root(const at::Tensor& tensor, size_t place) override;
  c10::Storage content(SavedStorage& entry, const c10::Stream& compute) override;
  void used_up(SavedStorage& root) override;
  at::Tensor remade(const Saved& saved, const c10::Stream& compute, Sharing sharing);
  bool is_audited(const SavedStorage& entry);
  bool is_proven(const SavedStorage& entry) const;
  c10::Storage brought_back(SavedStorage& entry, const c10::Stream& compute);
  static bool is_on_host(const SavedStorage& entry, const c10::Storage& made);
  std::optional<c10::Storage> audit(SavedStorage& entry, const std::optional<c10::Storage>& there,
                                    bool alone, const c10::Stream& compute);
  void refuse(SavedStorage& entry, const c10::Storage& was);
  void learn_fit();
  void make_fit(Known& known);
  void finish_fit();
  bool learn_call_times();
  int64_t least_of(const Known& known) const;
  Bus bus() const;
  Entry entry_at(size_t index) const;

  void forget_dead();
  void choose_mode();
  std::shared_ptr<Known> best_of(const std::vector<std::shared_ptr<Known>>& known,
                                 std::optional<uint64_t> expected) const;
  bool choose_by(uint64_t opening);
  bool measure_if_due(uint64_t opening);
  int64_t above_plan(const Known& known) const;
  int64_t same_level(const Known& known) const;
  bool begins_alike(const Known& known) const;
  bool reaches_begin(Known& known);
  void add_known(std::shared_ptr<Known> known);
  bool lift(Known& known, int64_t by);
  void lose_plan();
  void forget_plans();
  bool is_to_be_measured(uint64_t shape);
  uint64_t shape() const;
  void remember(uint64_t shape);
  void meet(std::vector<StorageRef> alive);
  void check_lives_on();
  void finish_step();
  void learn();
  void check_peak();
  void report();
  int64_t cap_of(int64_t budget) const;
  uint64_t least_budget(int64_t level) const;
  Plan plan_for(const Known& known) const;
  int64_t cap_for(const Timeline& timeline) const;
  uint64_t following_room() const;
  int64_t displaced_of(const StorageRef& original,
                       const std::vector<std::weak_ptr<SavedStorage>>& parts) const;
  void count(Kept why, uint64_t bytes);
  Lane& lane(c10::Device device);
  Totals totals() const;
  static bool name_owners(SavedStorage& entry);
  static void tell_of_copy(const SavedStorage& entry, const HostCopy& copy);

  uint32_t process_ = fork_generation();
  bool of_cpu_;  // tensors on the CPU are moved, not those on the accelerator
  mutable Lock mutex_;
  bool active_ = false;
  bool open_ = false;        // the step is not finished: its backward may come after end()
  std::thread::id stepper_;  // began it
  std::unordered_set<StorageRef> never_;
  std::map<c10::Device, std::unique_ptr<Lane>, bool (*)(c10::Device, c10::Device)> lanes_;
  std::unique_ptr<Disk> disk_;             // of Target::disk
  std::unique_ptr<HostCount> host_count_;  // with recompute, of the CPU
  std::unique_ptr<Meter> meter_;           // of the first device seen

  // This step.
  uint64_t step_ = 0;
  Mode mode_ = Mode::measuring;
  Recorder recorder_;
  std::unordered_map<StorageRef, std::vector<std::weak_ptr<SavedStorage>>> table_;
  std::vector<std::weak_ptr<SavedStorage>> order_;  // by index
  std::vector<std::weak_ptr<SavedStorage>> roots_;  // by index, after those
  Profile profile_;
  Lineage lineage_{*this};
  std::vector<bool> kept_profiled_;  // by index: it was on the device all the time
  bool proving_ = false;             // something that was dropped is compared for the first time
  bool opened_ = true;               // its first call that works on something has come,
  size_t calls_before_ = 0;          // after so many others
  uint64_t opening_ = 0;             // what it is: Note [What a step begins with]
  std::optional<uint64_t> sought_;   // it is measured because one of this shape is expected
  bool inside_call_ = false;         // that is profiled: no waits between its begin and its end
  CallTimes call_times_;             // of its forward, if its plan is not yet made with them
  std::shared_ptr<Known> known_;     // that it follows
  std::vector<bool> fits_;           // of all that are known: it has gone so far
  uint64_t alone_ = 0;               // bytes kept for others whom nobody has seen
  size_t position_ = 0;              // in its timeline
  size_t fetched_upto_ = 0;
  std::unordered_set<StorageRef> counted_;  // that stay
  uint64_t ahead_ = 0;                      // bytes fetched that were not asked for yet
  uint64_t largest_ = 0;                    // storage so far
  Stats now_;
  Totals before_;  // it began

  // What was learnt.
  std::vector<std::shared_ptr<Known>> all_known_;  // last used first
  // Steps of a shape that has no plan: how many there were, and at how many one was to be measured.
  struct Unknown {
    uint32_t seen = 0;
    uint32_t tried = 0;
    uint64_t opening = 0;  // the last one's
  };
  std::unordered_map<uint64_t, Unknown> unknown_;    // by shape
  std::unordered_map<uint64_t, uint64_t> followed_;  // which shape came after which
  uint64_t shape_of_last_ = 0;
  // In how many steps a storage was saved that is still alive.
  std::unordered_map<StorageRef, uint32_t> met_;
  uint64_t doubt_from_ = 0;  // the step from which on a plan may be doubted again
  uint64_t doubt_pause_ = 1;
  uint64_t level_from_ = 0;  // the step from which on one may be measured again for its level
  uint64_t level_pause_ = 2;
  int64_t margin_ = 0;  // by which plans were exceeded
  Stats last_;
  bool saves_nothing_ = false;  // the last whole step, that could go
  bool refused_ = false;        // no plan of the last one made is within the budget
  uint64_t audited_ = 0;
  // Operators, by name and module, that gave something else when they were called again.
  std::set<std::pair<NameId, NameId>> denied_;
};

}  // namespace tenure::offload
