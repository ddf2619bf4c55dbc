// What a model of C++ and its units are inside: for model.cpp, which runs them, and held.cpp. Not
// for others.
#pragma once

#include <tenure/shard/course.h>
#include <tenure/shard/model.h>
#include <tenure/shard/sharder.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace tenure::shard {

// One forward of a unit, and the nodes that may read its parameters in backward.
struct Call {
  uint64_t values = 0;  // that the unit had
  std::vector<Known> nodes;
  size_t left = 0;    // of those that the backward runs
  int backward = -1;  // in which it is gathered
};

struct Unit::State {
  std::shared_ptr<Model::State> model;
  uint32_t number = 0;
  std::vector<std::vector<at::Tensor>> leaves;    // the whole parameters, by flat
  std::vector<std::vector<at::Tensor>> pieces;    // by flat
  std::vector<const c10::StorageImpl*> storages;  // of the whole parameters
  std::map<int, size_t> to_come;                  // gradients, by backward
  std::vector<std::shared_ptr<Call>> open;        // gathered for a backward

  bool has(const at::Tensor& tensor) const;
  void before(const std::shared_ptr<Call>& call);
  void after(const std::shared_ptr<Call>& call);
  void take(uint32_t flat, size_t index, const at::Tensor& gradient);
  void await_gradients(const Course& course);
  void finish();
  void close(int backward);
};

// REQUIRES of everything that backward calls: `mutex`.
struct Model::State {
  State(std::shared_ptr<Sharder> made, c10::intrusive_ptr<c10d::ProcessGroup> ranks,
        std::chrono::milliseconds patience);
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  // Where one of `pieces` belongs.
  struct Place {
    uint32_t unit = 0;
    uint32_t flat = 0;
    size_t index = 0;
  };

  std::shared_ptr<Sharder> sharder;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  std::chrono::milliseconds timeout;
  mutable std::mutex mutex;
  std::vector<std::weak_ptr<Unit::State>> units;
  std::vector<at::Tensor> pieces;
  std::vector<Place> places;  // of the pieces
  uint32_t depth = 0;
  struct Running {
    Course course;
    // What the engine has as long as it runs: one that an exception ends is not told of in another
    // way.
    std::weak_ptr<const int> lives;
  };
  std::map<int, Running> backwards;
  std::atomic<bool> held = false;  // read by any thread that runs forward or backward

  std::vector<std::shared_ptr<Unit::State>> living() const;
  void begin();
  // Throws InputError for a piece that is not gathered any more.
  void require_pieces() const;
  // What a backward that has never ended left behind goes.
  void forget_backwards();
  // The same, of those that an exception has ended, before another one begins.
  void give_up_failed();
  // What the backward that runs will do.
  static const Course& backward_runs(const std::shared_ptr<State>& self);
  void end_backward(int number);
  void set_gradients(const std::vector<Reduced>& all) const;
};

}  // namespace tenure::shard
