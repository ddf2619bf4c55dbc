#include <tenure/shard/course.h>

#include <tenure/core/fence.h>
#include <tenure/core/streams.h>
#include <tenure/core/torch_compat.h>

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <tuple>
#include <unordered_set>
#include <utility>

namespace tenure::shard {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

constexpr uint64_t kLeaf = std::numeric_limits<uint64_t>::max();  // the number of all of them

std::pair<uint64_t, uint64_t> number_of(const Node* node) {
  return {node->thread_id(), node->sequence_nr()};
}

bool runs_here(Node* node) {
  // Empty: all nodes run.
  const auto& wanted = *torch::autograd::get_current_graph_task_exec_info();
  if (wanted.empty()) {
    return torch::autograd::get_current_graph_task_nodes_in_graph()->contains(node);
  }
  const auto found = wanted.find(node);
  return found != wanted.end() && found->second.needed_;
}

}  // namespace

bool Made::has(const Node& node) const {
  return node.thread_id() == thread && begin <= node.sequence_nr() && node.sequence_nr() < end;
}

Known::Known(const Node& one) : thread(one.thread_id()), number(one.sequence_nr()), node(&one) {}

Course::Course() : backward_(torch::autograd::get_current_graph_task_id()) {
  const auto& all = *torch::autograd::get_current_graph_task_nodes_in_graph();
  nodes_.reserve(all.size());
  std::ranges::copy_if(all, std::back_inserter(nodes_),
                       [](Node* node) { return node->sequence_nr() != kLeaf && runs_here(node); });
  std::ranges::sort(nodes_, {}, number_of);
}

bool Course::runs(const Node& node) const { return runs(Known(node)); }

bool Course::runs(const Known& known) const {
  const auto same =
      std::ranges::equal_range(nodes_, std::pair{known.thread, known.number}, {}, number_of);
  return std::ranges::find(same, known.node) != same.end();
}

size_t Course::gradients(std::span<const at::Tensor> leaves) const {
  return static_cast<size_t>(std::ranges::count_if(leaves, [](const at::Tensor& leaf) {
    const auto node = torch::autograd::impl::try_get_grad_accumulator(leaf);
    return node && runs_here(node.get());
  }));
}

std::vector<Node*> Course::last_of(const Made& made) const {
  const auto leads_out = [&](Node* node) {
    return std::ranges::any_of(node->next_edges(), [&](const auto& edge) {
      return edge.is_valid() && !(made.has(*edge.function) && runs(*edge.function));
    });
  };
  const auto from = std::pair{made.thread, made.begin};
  const auto to = std::pair{made.thread, made.end};
  const auto begin = std::ranges::lower_bound(nodes_, from, {}, number_of);
  const auto end = std::ranges::lower_bound(begin, nodes_.end(), to, {}, number_of);
  std::vector<Node*> out;
  std::copy_if(begin, end, std::back_inserter(out), leads_out);
  return out;
}

struct Stretch::State {
  Made made;
  std::mutex mutex;                  // of what follows: a backward may have several threads
  std::unordered_set<Node*> hooked;  // no other node can have a number of this stretch
  int backward = -1;                 // which is followed
  size_t left = 0;                   // of its last nodes
  std::vector<c10::Stream> streams;  // they run on
  std::function<void()> passed;
};

namespace {

// What the current stream does from now on comes after what these have queued.
void after_all(const std::vector<c10::Stream>& streams) {
  for (const auto& stream : streams) {
    if (const auto now = current_stream(stream.device()); now != stream) {
      Fence::record(stream).wait(now);
    }
  }
}

template <class State>
class Ran final : public torch::autograd::FunctionPostHook {
 public:
  explicit Ran(std::shared_ptr<State> state) : state_(std::move(state)) {}
  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    std::function<void()> passed;
    {
      const std::lock_guard lock(state_->mutex);
      if (state_->backward == torch::autograd::get_current_graph_task_id() && --state_->left == 0) {
        state_->backward = -1;
        passed = std::exchange(state_->passed, {});
        after_all(state_->streams);
      }
    }
    if (passed) {
      passed();
    }
    return outputs;
  }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace

Stretch::Stretch() : state_(std::make_shared<State>()) {
  state_->made.thread = at::RecordFunction::currentThreadId();
  state_->made.begin = at::sequence_number::peek();
}
Stretch::~Stretch() { forget(); }

void Stretch::end() { state_->made.end = at::sequence_number::peek(); }

bool Stretch::made(const at::Tensor& tensor) const {
  const auto& node = tensor.grad_fn();
  return node && state_->made.has(*node);
}

bool Stretch::follow(const Course& course, std::function<void()> passed) {
  const auto last = course.last_of(state_->made);
  forget();
  if (last.empty()) {
    return false;
  }
  const std::lock_guard lock(state_->mutex);
  state_->backward = course.backward_;
  state_->left = last.size();
  state_->passed = std::move(passed);
  state_->streams.clear();
  for (auto* node : last) {
    if (const auto stream = node->stream();
        stream && std::ranges::find(state_->streams, *stream) == state_->streams.end()) {
      state_->streams.push_back(*stream);
    }
    if (state_->hooked.insert(node).second) {
      node->add_post_hook(std::make_unique<Ran<State>>(state_));
    }
  }
  return true;
}

void Stretch::forget() {
  std::function<void()> passed;  // goes outside the lock: what it holds may be Python's
  const std::lock_guard lock(state_->mutex);
  state_->backward = -1;
  passed.swap(state_->passed);
}

}  // namespace tenure::shard
