#include <tenure/telemetry/requests.h>

#include <tenure/core/error.h>

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace tenure::telemetry {

Requests::Requests() : count_(eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE)) {
  if (count_ < 0) {
    throw Error("cannot record flights: no file can be opened; raise the limit of open files");
  }
}

Requests::~Requests() { ::close(count_); }

uint64_t Requests::post(int signal, std::string text) {
  const std::lock_guard lock(mutex_);
  waiting_.push_back({++posted_, signal, std::move(text)});
  eventfd_write(count_, 1);
  return posted_;
}

std::optional<Request> Requests::next() {
  eventfd_t one = 0;
  while (eventfd_read(count_, &one) != 0 && errno == EINTR) {
  }
  const std::lock_guard lock(mutex_);
  if (closed_ || waiting_.empty()) {
    return std::nullopt;
  }
  auto first = std::move(waiting_.front());
  waiting_.pop_front();
  return first;
}

void Requests::done(uint64_t number) {
  const std::lock_guard lock(mutex_);
  done_ = number;
  changed_.notify_all();
}

bool Requests::wait(uint64_t number, std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, limit, [&] { return closed_ || done_ >= number; });
  return done_ >= number;
}

void Requests::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  eventfd_write(count_, 1);
  changed_.notify_all();
}

}  // namespace tenure::telemetry
