#include <tenure/pipeline/sends.h>

#include <tenure/core/fork.h>
#include <tenure/core/quiet_thread.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <stop_token>
#include <thread>

namespace tenure::pipeline {
namespace {

// A line waits for as long as it takes: who is late is for the thread that needs the room to say.
constexpr std::chrono::milliseconds kEver = std::chrono::hours(24 * 365);

// Null if it throws nothing.
template <class Call>
std::exception_ptr caught(Call call) {
  try {
    call();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace

struct Send::OnHost {
  Header::Words words{};
  std::vector<WorkPtr> works;
  // The line's.
  size_t done = 0;  // works
  bool left = false;
  std::exception_ptr error;
};

Send::Send() : on_host(std::make_shared<OnHost>()) {}
Send::~Send() = default;
Send::Send(Send&&) noexcept = default;
Send& Send::operator=(Send&&) noexcept = default;

Header::Words& Send::words() { return on_host->words; }

void Send::add_on_host(WorkPtr work) { on_host->works.push_back(std::move(work)); }

// See Note [When a send is done]. Whoever waits for the thread may be any other.
class Sends::Line {
 public:
  Line() = default;  // throws as quiet_thread does
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;

  ~Line() {
    std::lock_guard lock(mutex_);
    stop_.request_stop();
    for (const auto& one : waiting_) {
      for (auto i = one->done; i < one->works.size(); ++i) {
        caught(
            [&] { one->works[i]->abort(); });  // not every backend can: its timeout ends it there
      }
    }
  }

  // A forked child has not the thread, nor the right to what it waits with.
  bool is_inherited() const { return generation_ != fork_generation(); }

  void add(std::shared_ptr<Send::OnHost> one) {
    std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(one));
    added_.notify_one();
  }

  bool has_left(const Send::OnHost& one) {
    std::lock_guard lock(mutex_);
    return one.left && one.error == nullptr;
  }

  void wait(const Send::OnHost& one, std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    if (!ended_.wait_for(lock, timeout, [&] { return one.left; })) {
      const auto done = one.done;
      lock.unlock();
      break_off(one, done);
      throw std::runtime_error("it was not taken in time");
    }
    if (one.error) {
      std::rethrow_exception(one.error);
    }
  }

 private:
  // A wait that ends too late tells the backend that nothing more comes over this connection, so
  // that all who wait for something there hear of it.
  static void break_off(const Send::OnHost& one, size_t done) {
    for (auto i = done; i < one.works.size(); ++i) {
      caught([&] { one.works[i]->wait(std::chrono::milliseconds(1)); });
    }
  }

  // What it has waited for it must not hold any more when it says so.
  void run(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (added_.wait(lock, stop, [&] { return !waiting_.empty(); }) && !stop.stop_requested()) {
      auto& one = *waiting_.front();
      while (one.done < one.works.size() && !one.error && !stop.stop_requested()) {
        auto& work = *one.works[one.done];
        lock.unlock();
        auto error = caught([&] { work.wait(kEver); });
        lock.lock();
        ++one.done;
        one.error = std::move(error);
      }
      one.left = true;
      waiting_.pop_front();
      ended_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable_any added_;
  std::condition_variable ended_;
  std::deque<std::shared_ptr<Send::OnHost>> waiting_;
  std::stop_source stop_;
  uint32_t generation_ = fork_generation();
  // Last: joined first.
  std::jthread thread_ = quiet_thread("the thread that waits for sends",
                                      [this, stop = stop_.get_token()] { run(stop); });
};

Sends::Sends(std::chrono::milliseconds timeout) : timeout_(timeout) {}

Sends::~Sends() {
  for (auto& [key, line] : lines_) {
    if (line->is_inherited()) {
      (void)line.release();  // NOLINT(bugprone-unused-return-value)
    }
  }
}

Sends::Line& Sends::line_of(const Message& message) {
  auto& line = lines_[{message.peer, message.cargo}];
  if (!line) {
    line = std::make_unique<Line>();
  }
  return *line;
}

void Sends::add(Send send) {
  line_of(send.message).add(send.on_host);
  all_.push_back(std::move(send));
}

bool Sends::has_left(const Send& sent) {
  const auto is_done = [](const auto& work) { return work->isCompleted(); };
  return line_of(sent.message).has_left(*sent.on_host) &&
         std::ranges::all_of(sent.on_device, is_done);
}

void Sends::settle() {
  for (size_t i = 0; i < all_.size();) {
    if (!has_left(all_[i])) {
      ++i;
      continue;
    }
    const auto one = std::move(all_[i]);  // gone, also if it fails
    all_.erase(all_.begin() + static_cast<std::ptrdiff_t>(i));
    wait(one);  // no longer long; what the backend holds on to until then goes
  }
}

size_t Sends::count(const Which& which) const {
  return static_cast<size_t>(std::ranges::count_if(all_, which));
}

std::optional<Send> Sends::take(const Which& which) {
  const auto found = std::ranges::find_if(all_, which);
  if (found == all_.end()) {
    return std::nullopt;
  }
  auto out = std::move(*found);
  all_.erase(found);
  return out;
}

void Sends::wait(const Send& sent) {
  line_of(sent.message).wait(*sent.on_host, timeout_);
  for (const auto& work : sent.on_device) {
    work->wait(timeout_);
  }
}

int64_t Sends::bytes() const {
  int64_t out = 0;
  for (const auto& one : all_) {
    for (const auto& tensor : one.tensors) {
      if (const auto row = tensor.lease().row()) {
        out += static_cast<int64_t>(row->bytes);
      }
    }
  }
  return out;
}

}  // namespace tenure::pipeline
