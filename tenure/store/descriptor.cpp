#include <tenure/store/descriptor.h>

#include <tenure/core/fork.h>

#include <unistd.h>

#include <mutex>
#include <unordered_set>
#include <utility>

namespace tenure::store {
namespace {

// The open ones of this process. Leaked: a fork may happen while static destructors run.
struct OpenDescriptors {
  std::mutex mutex;
  std::unordered_set<int> numbers;
};

void close_inherited();

OpenDescriptors& open_descriptors() {
  static auto* instance = [] {
    auto* made = new OpenDescriptors;
    protect_across_fork(made->mutex);
    on_fork_in_child(close_inherited);
    return made;
  }();
  return *instance;
}

void close_inherited() {
  auto& open = open_descriptors();
  for (const int descriptor : open.numbers) {
    ::close(descriptor);
  }
  open.numbers.clear();
}

}  // namespace

Descriptor::Descriptor(int descriptor) : descriptor_(descriptor), generation_(fork_generation()) {
  if (descriptor_ < 0) {
    return;
  }
  auto& open = open_descriptors();
  const std::lock_guard lock(open.mutex);
  open.numbers.insert(descriptor_);
}

Descriptor::Descriptor(Descriptor&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), generation_(other.generation_) {}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    close();
    descriptor_ = std::exchange(other.descriptor_, -1);
    generation_ = other.generation_;
  }
  return *this;
}

Descriptor::~Descriptor() { close(); }

void Descriptor::close() {
  const int descriptor = std::exchange(descriptor_, -1);
  if (descriptor < 0 || generation_ != fork_generation()) {
    return;
  }
  auto& open = open_descriptors();
  const std::lock_guard lock(open.mutex);
  open.numbers.erase(descriptor);
  ::close(descriptor);
}

}  // namespace tenure::store
