// Course: the nodes of autograd's graph that one backward runs. Stretch: those of them that a
// thread has made between two moments, a unit's forward say, and when a backward is through them.
//
// Note [The last reader of a forward]
// A thread numbers the nodes that it makes. So those of a forward are the ones between two numbers,
// whatever their inputs are and however their outputs leave: tensors that other units are given
// too, tensors in objects and in attributes. What comes after them in a backward begins where an
// edge leads out of the stretch. When all nodes with such an edge have run, all have: of a node
// without one the next is in the stretch as well, and runs later.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace torch::autograd {
struct Node;
}  // namespace torch::autograd

namespace tenure::shard {

// Nodes by the thread that has made them, from one number on, before another.
struct Made {
  uint64_t thread = 0;
  uint64_t begin = 0;
  uint64_t end = 0;

  bool has(const torch::autograd::Node& node) const;
};

// A node that may be gone: another one may get its address, but not its number too.
struct Known {
  uint64_t thread = 0;
  uint64_t number = 0;
  const torch::autograd::Node* node = nullptr;

  explicit Known(const torch::autograd::Node& one);
};

// Belongs to the backward and is of no use when that is over: the nodes are not kept alive. Any
// thread of the backward.
class Course {
 public:
  // Of the backward that this thread works for. REQUIRES: there is one.
  Course();

  bool runs(const torch::autograd::Node& node) const;
  bool runs(const Known& known) const;
  // How many of these leaves get a gradient in it.
  size_t gradients(std::span<const at::Tensor> leaves) const;

 private:
  friend class Stretch;
  std::vector<torch::autograd::Node*> last_of(const Made& made) const;

  int backward_;
  std::vector<torch::autograd::Node*> nodes_;  // but for leaves: by thread, then by number
};

// One thread at a time.
class Stretch {
 public:
  // From now on, of this thread.
  Stretch();
  ~Stretch();
  Stretch(const Stretch&) = delete;
  Stretch& operator=(const Stretch&) = delete;
  // Until now.
  void end();

  // Whether the tensor was made in it, by a node.
  bool made(const at::Tensor& tensor) const;

  // Calls `passed` once, on a thread of the backward, when that has run the last node of this.
  // False, and nothing is called: it runs none. Calling it again ends what was before.
  bool follow(const Course& course, std::function<void()> passed);
  // Nothing is called any more.
  void forget();

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the nodes' hooks
};

}  // namespace tenure::shard
