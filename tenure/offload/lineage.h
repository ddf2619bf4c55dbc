// Lineage: in a step that follows a fit plan, knows each call again, writes down the recipes of
// what is dropped, and makes it again. Inside offload only; under the session's lock but for
// recipes that are let go.
//
// Note [One window]
// What is made again stays for as long as the plan says that it will be asked for, by backward or
// to make another, and goes with the last time. A backward that retains its graph, or a node that
// may write to what it is given, gets storages of its own, which nobody remembers.
//
// In a step that turns out not to be as planned nothing says how often more things will be asked
// for: from then on what others are made of stays until the last of them goes.
//
// Note [Writes]
// What is held may be written to by its owner, to whom it is an ordinary tensor. The write is seen
// before it happens, and what was dropped and is made of it is made then, for good. Writes on other
// threads and after the session has ended are found when it is asked for, by the version counter;
// those that no counter sees, by an audit.
#pragma once

#include <tenure/core/owner.h>
#include <tenure/offload/fit_planner.h>
#include <tenure/offload/node_pool.h>
#include <tenure/offload/recipe.h>
#include <tenure/offload/script.h>
#include <tenure/offload/stats.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tenure::offload {

// A plan, and what is needed to follow it.
struct Followed {
  Script script;
  FitPlan fit;
  size_t saves = 0;                      // of autograd; roots come after them
  std::vector<uint32_t> value_of_saved;  // by place in the timeline, of saves and roots
  std::vector<uint32_t> root_of_value;   // place in the timeline; kNone: it is not one
  std::vector<const Operator*> passing;  // by call; null: the plan has something to do with it
  std::vector<uint32_t> asks_of_value;   // of those that are held, to make others
  std::vector<bool> proven;              // by value: has been made again, and was the same
  uint32_t proofs = 0;                   // steps that were for that
  bool keeps_budget = false;     // also in a step that compares what was never dropped before
  bool timed_in_place = false;   // calls have the time that they take where they stand
  std::vector<OwnerId> owners;   // by value: under whom it is leased,
  std::vector<OwnerId> keepers;  // and where autograd has saved it

  // After `fit` was made.
  void index();
  bool makes_again(uint32_t value) const { return fit.asks[value] > 0; }
};

class Lineage {
 public:
  // Where what is held rests.
  class Shelf {
   public:
    virtual ~Shelf() = default;
    virtual std::shared_ptr<SavedStorage> save_root(const at::Tensor& tensor, size_t place) = 0;
    virtual c10::Storage content(SavedStorage& entry, const c10::Stream& compute) = 0;
    // That was asked for the last time: nothing more is made of it.
    virtual void used_up(SavedStorage& root) = 0;

   protected:
    Shelf() = default;
    Shelf(const Shelf&) = default;
    Shelf& operator=(const Shelf&) = default;
  };
  explicit Lineage(Shelf& shelf) : shelf_(shelf) {}

  // A step begins that follows the plan, or none. So many of its calls have been made.
  void begin(std::shared_ptr<const Followed> followed, size_t made = 0);
  // Backward begins, or the step is over: what nobody needs goes.
  void let_go();
  // Not as planned; empty: so far it is.
  const std::string& lost() const { return lost_; }
  void lose(std::string why);

  // The call that comes now, as the plan counts.
  size_t next() const { return next_; }
  // Whether the plan has nothing to do with it; then it counts as made.
  bool passes(const Operator& op);
  // Around a call. What before() returns is for after() alone.
  std::shared_ptr<Call> before(const Operator& op, const torch::jit::Stack& stack);
  void after(const Operator& op, const std::shared_ptr<Call>& call, const torch::jit::Stack& stack);
  // Someone is about to write to it. Whether it is among what the step follows.
  bool written(const at::Tensor& tensor);

  // Autograd saves what the plan drops, at that place: entry.value, now or when the call is over.
  // False: it cannot be made again.
  bool drop(const std::shared_ptr<SavedStorage>& entry, size_t place);
  // Autograd saves what the plan holds.
  void rest(const std::shared_ptr<SavedStorage>& entry, const at::Tensor& tensor, size_t place);

  // Its content. `alone`: on a storage that nobody else gets.
  c10::Storage ask(Value& value, bool alone);
  // The same, made now, whatever is there; nothing is counted.
  c10::Storage remake(Value& value);

  const Count& made() const { return made_; }
  // Bytes on the device that were made again, or stand for what was.
  int64_t bytes_remade(c10::Device device) const;

 private:
  // What was made for one request, where it may not stay longer.
  using Scratch = std::unordered_map<const Value*, c10::Storage>;

  void look_ahead() const;
  bool take_arguments(Call& call, const torch::jit::Stack& stack);
  std::shared_ptr<Value> value_for(const at::Tensor& tensor, uint32_t value);
  std::shared_ptr<Value> source(const at::Tensor& tensor, uint32_t value);
  std::vector<std::shared_ptr<Value>> take_values_on(const c10::Storage& storage);
  void make_value(const std::shared_ptr<Call>& call, const at::Tensor& output, uint32_t place,
                  uint32_t value);
  c10::Storage ask(Value& value, bool alone, Scratch& scratch);
  c10::Storage content(Value& value, bool alone, Scratch& scratch);
  c10::Storage held(Value& value);
  c10::Storage make(Value& value, bool alone, Scratch& scratch);
  void make_for_good(Value& value);

  Shelf& shelf_;
  NodePool::Owned calls_ = NodePool::make();
  NodePool::Owned nodes_ = NodePool::make();  // of values
  std::shared_ptr<const Followed> followed_;
  size_t next_ = 0;       // call
  bool inside_ = false;   // one
  bool holding_ = false;  // values_ for what is to come of forward
  std::string lost_ = "no plan";
  std::shared_ptr<bool> is_lost_;  // shared with the values of the step, which may outlive it
  std::vector<std::shared_ptr<Value>> values_;
  std::vector<std::pair<uint32_t, std::weak_ptr<SavedStorage>>>
      waiting_;  // for the call to be over
  // Values of this step, and those that are still held.
  std::vector<std::weak_ptr<Value>> seen_;
  // The first of them by the storage that a write would go to; made when somebody writes. One may
  // be several values: where the profiled step had two tensors, this one may have one.
  std::unordered_multimap<StorageRef, std::weak_ptr<Value>> by_storage_;
  size_t indexed_ = 0;  // of seen_
  Count made_;
};

}  // namespace tenure::offload
