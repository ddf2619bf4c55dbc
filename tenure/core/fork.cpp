#include <tenure/core/fork.h>

#include <pthread.h>

#include <atomic>
#include <ranges>
#include <vector>

namespace tenure {
namespace {

std::atomic<uint32_t> generation{0};

struct ForkList {
  std::mutex mutex;
  std::vector<std::mutex*> mutexes;
  std::vector<void (*)()> in_child;
  std::vector<void (*)()> before;
  std::vector<void (*)()> in_parent;
};

void before_fork();
void after_fork_in_parent();
void after_fork_in_child();

// Leaked: a fork may happen while static destructors run.
ForkList& list() {
  static auto* instance = [] {
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    return new ForkList;
  }();
  return *instance;
}

void unlock_all(ForkList& forks) {
  for (auto* mutex : std::views::reverse(forks.mutexes)) {
    mutex->unlock();
  }
  forks.mutex.unlock();
}

void before_fork() {
  auto& forks = list();
  forks.mutex.lock();
  for (auto* fn : forks.before) {
    fn();
  }
  for (auto* mutex : forks.mutexes) {
    mutex->lock();
  }
}

void after_fork_in_parent() {
  auto& forks = list();
  const auto in_parent = forks.in_parent;
  unlock_all(forks);
  for (auto* fn : in_parent) {
    fn();
  }
}

void after_fork_in_child() {
  generation.fetch_add(1, std::memory_order_relaxed);
  auto& forks = list();
  unlock_all(forks);
  for (auto* fn : forks.in_child) {
    fn();
  }
}

}  // namespace

uint32_t fork_generation() { return generation.load(std::memory_order_relaxed); }

void protect_across_fork(std::mutex& mutex) {
  auto& forks = list();
  std::lock_guard lock(forks.mutex);
  forks.mutexes.push_back(&mutex);
}

void on_fork_in_child(void (*fn)()) {
  auto& forks = list();
  std::lock_guard lock(forks.mutex);
  forks.in_child.push_back(fn);
}

void around_fork(const AroundFork& functions) {
  auto& forks = list();
  std::lock_guard lock(forks.mutex);
  forks.before.push_back(functions.before);
  forks.in_parent.push_back(functions.in_parent);
  forks.in_child.push_back(functions.in_child);
}

}  // namespace tenure
