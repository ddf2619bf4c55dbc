#include <tenure/offload/disk.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/core/ticks.h>

#include <c10/core/Storage.h>
#include <c10/util/Exception.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>

namespace tenure::offload {
namespace {

constexpr size_t kThreads = 2;
constexpr mode_t kOnlyOwner = 0600;
// Direct transfers begin and end at multiples of this, in the file and in memory.
constexpr size_t kBlock = 4096;
constexpr size_t kChunk = size_t{4} << 20;
constexpr uint64_t kMuchLarger = 2;

uint64_t in_blocks(uint64_t bytes) { return (bytes + kBlock - 1) / kBlock * kBlock; }

std::string why(int error) { return std::generic_category().message(error); }

// A file without a name, direct where the file system can do that.
int open_unnamed(const std::string& folder) {
  int file = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | O_DIRECT, kOnlyOwner);
  if (file < 0 && (errno == EINVAL || errno == EOPNOTSUPP)) {
    file = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, kOnlyOwner);
  }
  if (file < 0 && (errno == EISDIR || errno == EOPNOTSUPP)) {  // no O_TMPFILE here
    auto path = folder + "/tenure-offload-XXXXXX";
    file = ::mkostemp(path.data(), O_CLOEXEC);
    if (file >= 0) {
      ::unlink(path.c_str());
    }
  }
  return file;
}

// Memory that direct transfers may use; one a thread.
char* bounce() {
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<char, Free> memory(
      static_cast<char*>(std::aligned_alloc(kBlock, kChunk)));
  return memory.get();
}

using Transfer = ssize_t (*)(int file, void* memory, size_t bytes, off_t offset);

ssize_t write_some(int file, void* memory, size_t bytes, off_t offset) {
  return ::pwrite(file, memory, bytes, offset);
}
ssize_t read_some(int file, void* memory, size_t bytes, off_t offset) {
  return ::pread(file, memory, bytes, offset);
}

// All of it, or why not.
int transfer(Transfer some, int file, char* memory, size_t bytes, int64_t offset) {
  while (bytes > 0) {
    const auto done = some(file, memory, bytes, offset);
    if (done < 0 && errno == EINTR) {
      continue;
    }
    if (done <= 0) {
      return done < 0 ? errno : EIO;
    }
    memory += done;
    offset += done;
    bytes -= static_cast<size_t>(done);
  }
  return 0;
}

// The pieces of a copy are one row in the file. Both go through the bounce buffer in chunks, and
// return why they failed, or 0.
int write_copy(int file, const HostCopy& copy, int64_t offset) {
  int error = 0;
  size_t filled = 0;
  const auto flush = [&] {
    if (error == 0 && filled > 0) {
      error = transfer(&write_some, file, bounce(), in_blocks(filled), offset);
      offset += static_cast<int64_t>(filled);
      filled = 0;
    }
  };
  copy.for_each_piece([&](const c10::Storage& piece, const HostPool::Busy&) {
    for (size_t at = 0; at < piece.nbytes() && error == 0;) {
      const auto now = std::min(kChunk - filled, piece.nbytes() - at);
      std::memcpy(bounce() + filled, static_cast<const char*>(piece.data()) + at, now);
      at += now;
      filled += now;
      if (filled == kChunk) {
        flush();
      }
    }
  });
  flush();
  return error;
}

int read_copy(int file, const HostCopy& copy, int64_t offset) {
  int error = 0;
  size_t unread = copy.bytes();
  size_t have = 0;  // bytes of the bounce buffer that were not used yet
  size_t from = 0;  // where they begin
  copy.for_each_piece([&](const c10::Storage& piece, const HostPool::Busy& busy) {
    busy.out.wait();  // this thread's business alone
    busy.back.wait();
    for (size_t at = 0; at < piece.nbytes() && error == 0;) {
      if (have == 0) {
        have = std::min(kChunk, unread);
        error = transfer(&read_some, file, bounce(), in_blocks(have), offset);
        offset += static_cast<int64_t>(have);
        unread -= have;
        from = 0;
      }
      const auto now = std::min(have, piece.nbytes() - at);
      std::memcpy(static_cast<char*>(piece.mutable_data()) + at, bounce() + from, now);
      at += now;
      from += now;
      have -= now;
    }
  });
  return error;
}

}  // namespace

class Disk::Rest {
 public:
  enum class At : uint8_t { memory, both, file, coming, lost };

  Rest(Disk& on, HostCopy bytes, Fence copied)
      : disk(on), copy(std::move(bytes)), left(std::move(copied)), size(copy.bytes()) {}
  Rest(const Rest&) = delete;
  Rest& operator=(const Rest&) = delete;
  ~Rest() {
    if (offset >= 0) {
      disk.room_is_free(offset, size);
    }
  }

  Disk& disk;  // outlives it: what is saved holds the state that holds the disk
  HostCopy copy;
  Fence left;
  uint64_t size;
  At at = At::memory;
  int64_t offset = -1;
  int error = 0;
  uint32_t users = 0;  // of the bytes in memory
};

Disk::Disk(const std::string& folder) : folder_(folder), file_(open_unnamed(folder)) {
  if (file_ < 0) {
    throw InputError(text("cannot offload to ", folder, ": ", why(errno),
                          ": give disk: a folder that can be written to"));
  }
  for (size_t i = 0; i < kThreads; ++i) {
    threads_.emplace_back([this](const std::stop_token& stop) { work(stop); });
  }
}

Disk::~Disk() {
  threads_.clear();
  jobs_.clear();
  ::close(file_);
}

void Disk::Busy::begin() {
  if (now++ == 0) {
    since = ticks();
  }
}

void Disk::Busy::end(uint64_t bytes) {
  moved.bytes += bytes;
  moved.timed_bytes += bytes;
  if (--now == 0) {
    moved.seconds += seconds_between(since, ticks());
  }
}

void Disk::wait_for_writes(uint64_t unwritten) {
  std::unique_lock lock(mutex_);
  const auto begin = ticks();
  changed_.wait(lock, [&] { return unwritten_ <= unwritten; });
  waited_ += seconds_between(begin, ticks());
}

void Disk::begin_step() {
  std::lock_guard lock(mutex_);
  full_.clear();
  waited_ = 0;
  const auto last = free_.empty() ? free_.end() : std::prev(free_.end());
  if (last != free_.end() && last->first + static_cast<int64_t>(last->second) == end_ &&
      static_cast<uint64_t>(end_) > kMuchLarger * most_used_ &&
      ::ftruncate(file_, last->first) == 0) {
    end_ = last->first;
    free_.erase(last);
  }
  most_used_ = used_;
}

std::shared_ptr<Disk::Rest> Disk::put(HostCopy copy, Fence left) {
  auto rest = std::make_shared<Rest>(*this, std::move(copy), std::move(left));
  std::lock_guard lock(mutex_);
  if (!full_.empty()) {
    throw BudgetError(text("cannot offload more to ", folder_, ": ", full_, " after ",
                           bytes_text(used_),
                           ": free some room there, or give host_full=\"keep\" to keep on the "
                           "device what does not fit"));
  }
  unwritten_ += rest->size;
  jobs_.push_back({rest, false});
  changed_.notify_all();
  return rest;
}

void Disk::read_ahead(const std::shared_ptr<Rest>& rest, const std::function<HostCopy()>& room) {
  std::lock_guard lock(mutex_);
  if (rest->at != Rest::At::file) {
    return;
  }
  rest->copy = room();
  rest->at = Rest::At::coming;
  jobs_.push_front({rest, true});  // someone waits for it sooner than for a write
  changed_.notify_all();
}

void Disk::with_bytes(const std::shared_ptr<Rest>& rest, const std::function<HostCopy()>& room,
                      const std::function<void(HostCopy&)>& use) {
  read_ahead(rest, room);
  {
    std::unique_lock lock(mutex_);
    const auto begin = ticks();
    changed_.wait(lock, [&] { return rest->at != Rest::At::coming; });
    waited_ += seconds_between(begin, ticks());
    if (rest->at == Rest::At::lost) {
      throw Error(text("a saved activation cannot be read back from ", folder_, ": ",
                       why(rest->error), ": the step cannot go on, the next one may"));
    }
    ++rest->users;
  }
  use(rest->copy);
  HostCopy ending;  // given up outside the lock
  std::lock_guard lock(mutex_);
  --rest->users;
  ending = forget_memory(*rest);
}

void Disk::work(const std::stop_token& stop) {
  while (true) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, stop, [this] { return !jobs_.empty(); });
      if (jobs_.empty()) {
        return;
      }
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    try {
      run(job);
    } catch (const c10::Error&) {  // the device has failed: who uses it hears of that elsewhere
      give_up(job);
    }
  }
}

void Disk::run(const Job& job) {
  if (job.read) {
    read(*job.rest);
  } else if (job.rest.use_count() > 1) {
    write(*job.rest);
  } else {  // nobody wants it any more
    std::lock_guard lock(mutex_);
    unwritten_ -= job.rest->size;
    changed_.notify_all();
  }
}

void Disk::give_up(const Job& job) {
  std::lock_guard lock(mutex_);
  job.rest->at = Rest::At::lost;
  job.rest->error = EIO;
  if (!job.read) {
    unwritten_ -= job.rest->size;
  }
  changed_.notify_all();
}

void Disk::write(Rest& rest) {
  rest.left.wait();  // this thread's business alone
  std::unique_lock lock(mutex_);
  int error = full_.empty() ? 0 : ENOSPC;
  const auto offset = error == 0 ? take_room(rest.size) : -1;
  writing_.begin();
  lock.unlock();
  if (error == 0) {
    error = write_copy(file_, rest.copy, offset);
  }
  HostCopy ending;  // given up outside the lock
  lock.lock();
  writing_.end(error == 0 ? rest.size : 0);
  unwritten_ -= rest.size;
  if (error == 0) {
    rest.offset = offset;
    rest.at = Rest::At::both;
    ending = forget_memory(rest);
  } else {
    if (offset >= 0) {
      give_room(offset, rest.size);
    }
    full_ = full_.empty() ? why(error) : full_;  // the bytes stay in memory
  }
  changed_.notify_all();
}

void Disk::read(Rest& rest) {
  {
    std::lock_guard lock(mutex_);
    reading_.begin();
  }
  const auto error = read_copy(file_, rest.copy, rest.offset);
  std::lock_guard lock(mutex_);
  reading_.end(error == 0 ? rest.size : 0);
  rest.error = error;
  rest.at = error == 0 ? Rest::At::both : Rest::At::lost;
  changed_.notify_all();
}

// What is in the file need not be in memory, unless someone uses it.
HostCopy Disk::forget_memory(Rest& rest) {
  if (rest.users > 0 || rest.at != Rest::At::both) {
    return {};
  }
  rest.at = Rest::At::file;
  return std::move(rest.copy);
}

int64_t Disk::take_room(uint64_t bytes) {
  bytes = in_blocks(bytes);
  used_ += bytes;
  most_used_ = std::max(most_used_, used_);
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second >= bytes) {
      const auto [offset, size] = *it;
      free_.erase(it);
      if (size > bytes) {
        free_.emplace(offset + static_cast<int64_t>(bytes), size - bytes);
      }
      return offset;
    }
  }
  const auto offset = end_;
  end_ += static_cast<int64_t>(bytes);
  return offset;
}

void Disk::room_is_free(int64_t offset, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  full_.clear();
  give_room(offset, bytes);
}

void Disk::give_room(int64_t offset, uint64_t bytes) {
  bytes = in_blocks(bytes);
  used_ -= bytes;
  auto [it, inserted] = free_.emplace(offset, bytes);
  const auto next = std::next(it);
  if (next != free_.end() && it->first + static_cast<int64_t>(it->second) == next->first) {
    it->second += next->second;
    free_.erase(next);
  }
  if (it != free_.begin()) {
    const auto before = std::prev(it);
    if (before->first + static_cast<int64_t>(before->second) == it->first) {
      before->second += it->second;
      free_.erase(it);
    }
  }
}

bool Disk::full() const {
  std::lock_guard lock(mutex_);
  return !full_.empty();
}

Moved Disk::written() const {
  std::lock_guard lock(mutex_);
  return writing_.moved;
}

Moved Disk::read_back() const {
  std::lock_guard lock(mutex_);
  return reading_.moved;
}

double Disk::waited_seconds() const {
  std::lock_guard lock(mutex_);
  return waited_;
}

uint64_t Disk::bytes() const {
  std::lock_guard lock(mutex_);
  return used_;
}

uint64_t Disk::file_bytes() const {
  std::lock_guard lock(mutex_);
  return static_cast<uint64_t>(end_);
}

}  // namespace tenure::offload
