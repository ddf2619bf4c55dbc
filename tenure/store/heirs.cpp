#include <tenure/store/heirs.h>

#include <tenure/core/fork.h>

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <mutex>
#include <utility>

namespace tenure::store {
namespace {

struct Child {
  uint64_t fork = 0;
  std::shared_ptr<const Heir> heir;
};

struct Estate {
  std::mutex mutex;  // no other is taken while it is held: heirs end after it
  uint64_t forks = 0;
  size_t own = 0;        // mapped by this process
  size_t inherited = 0;  // and by its parents before it
  std::vector<Child> children;
  std::vector<int> of_parents;      // this process's ends of their pipes
  std::array<int, 2> pipe{-1, -1};  // of the fork that is under way
};

void before_fork();
void after_fork_in_parent();
void after_fork_in_child();

// Leaked: a fork may happen while static destructors run.
Estate& estate() {
  static auto* instance = [] {
    auto* made = new Estate;
    protect_across_fork(made->mutex);
    around_fork({before_fork, after_fork_in_parent, after_fork_in_child});
    return made;
  }();
  return *instance;
}

// REQUIRES: the mutex is held. What it returns ends when it is not.
std::vector<Child> take_gone(Estate& all) {
  const auto gone =
      std::stable_partition(all.children.begin(), all.children.end(),
                            [](const Child& child) { return child.heir->is_there(); });
  std::vector<Child> out(std::make_move_iterator(gone),
                         std::make_move_iterator(all.children.end()));
  all.children.erase(gone, all.children.end());
  return out;
}

void before_fork() {
  auto& all = estate();
  std::vector<Child> gone;
  const std::lock_guard lock(all.mutex);
  gone = take_gone(all);
  if (all.own + all.inherited > 0 && ::pipe2(all.pipe.data(), O_CLOEXEC) != 0) {
    all.pipe = {-1, -1};  // no descriptors left: the child is not seen
  }
}

void after_fork_in_parent() {
  auto& all = estate();
  const auto [alive, childs] = std::exchange(all.pipe, {-1, -1});
  std::shared_ptr<const Heir> heir;
  if (alive >= 0) {
    ::close(childs);
    heir = std::make_shared<const Heir>(Descriptor(alive));
  }
  const std::lock_guard lock(all.mutex);
  ++all.forks;
  if (heir) {
    all.children.push_back({all.forks, std::move(heir)});
  }
}

void after_fork_in_child() {
  auto& all = estate();
  all.inherited += std::exchange(all.own, 0);
  all.children.clear();
  const auto [parents, mine] = std::exchange(all.pipe, {-1, -1});
  if (parents >= 0) {
    ::close(parents);
    all.of_parents.push_back(mine);
  }
}

}  // namespace

bool Heir::is_there() const {
  pollfd state{alive_.get(), POLLIN, 0};
  return ::poll(&state, 1, 0) == 0;
}

Inheritable::Inheritable() : generation_(fork_generation()) {
  auto& all = estate();
  const std::lock_guard lock(all.mutex);
  born_ = all.forks;
  ++all.own;
}

Inheritable::~Inheritable() {
  auto& all = estate();
  const std::lock_guard lock(all.mutex);
  if (generation_ == fork_generation()) {
    --all.own;
  } else if (--all.inherited == 0) {
    for (const int descriptor : std::exchange(all.of_parents, {})) {
      ::close(descriptor);
    }
  }
}

Heirs Inheritable::heirs() const {
  Heirs out;
  if (generation_ != fork_generation()) {
    return out;
  }
  auto& all = estate();
  std::vector<Child> gone;
  const std::lock_guard lock(all.mutex);
  gone = take_gone(all);
  for (const auto& child : all.children) {
    if (child.fork > born_) {
      out.push_back(child.heir);
    }
  }
  return out;
}

}  // namespace tenure::store
