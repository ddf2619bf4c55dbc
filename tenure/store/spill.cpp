#include <tenure/store/spill.h>

#include <tenure/core/error.h>
#include <tenure/core/fork.h>
#include <tenure/core/text.h>
#include <tenure/store/descriptor.h>
#include <tenure/store/segment.h>

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <map>
#include <mutex>
#include <system_error>
#include <utility>

namespace tenure::store {
namespace {

constexpr uint64_t kCopyPiece = uint64_t{1} << 20;

bool in_memory(const std::string& folder) {
  struct statfs what{};
  return ::statfs(folder.c_str(), &what) == 0 &&
         (what.f_type == TMPFS_MAGIC || what.f_type == RAMFS_MAGIC);
}

// fork_generation() counts from the first registration on.
void count_forks() {
  static const bool once = [] {
    on_fork_in_child([] {});
    return true;
  }();
  static_cast<void>(once);
}

// A file without a name. Not made: errno says why.
Descriptor nameless_file(const std::string& folder) {
  Descriptor file(::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (file.is_open() || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT)) {
    return file;
  }
  auto path = folder + "/tenure-spill-XXXXXX";
  Descriptor named(::mkostemp(path.data(), O_CLOEXEC));
  if (named.is_open()) {
    ::unlink(path.c_str());
  }
  return named;
}

bool disk_is_full(int error) { return error == ENOSPC || error == EDQUOT || error == EFBIG; }

[[noreturn]] void fail(const std::string& folder, uint64_t bytes, int error) {
  const auto why = text("an object of ", bytes_text(bytes), " could not be spilled to ", folder,
                        " (", std::generic_category().message(error), ")");
  if (disk_is_full(error)) {
    throw BudgetError(why + ": free or fetch other objects first, or name a larger spill folder");
  }
  throw Error(why);
}

// Room that the file system promises, so that a full disk shows before anything is written.
void promise(int fd, uint64_t offset, uint64_t bytes, const std::string& folder) {
  if (bytes == 0) {
    return;
  }
  int done = 0;
  do {
    done = ::fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (done != 0 && errno == EINTR);
  if (done != 0 && errno != EOPNOTSUPP && errno != ENOSYS) {
    fail(folder, bytes, errno);
  }
}

void fill_file(int fd, uint64_t offset, const Source& source, const std::string& folder) {
  source.drain([&](std::span<const std::byte> stretch) {
    if (const int error = write_all(fd, offset, stretch)) {
      fail(folder, source.bytes(), error);
    }
    offset += stretch.size();
  });
}

}  // namespace

struct SpillFiles {
  std::string folder;
  uint64_t small_bytes = 0;
  uint32_t generation = 0;
  std::atomic<uint64_t> bytes{0};

  std::mutex mutex;
  Descriptor common;                  // of the small ones; made with the first
  std::map<uint64_t, uint64_t> free;  // offset -> bytes, no two of them adjacent
  uint64_t end = 0;                   // of the common file

  uint64_t take(uint64_t length);
  void give_back(uint64_t offset, uint64_t length);
};

// Note [The common file has holes]
// A place in the middle that was given back is used again, and only the end is cut off: to punch a
// hole, ext4 first writes what is dirty there to the disk, 4 ms each, where a cut takes 20 us. What
// is counted is the file's length.
uint64_t SpillFiles::take(uint64_t length) {
  std::lock_guard lock(mutex);
  if (!common.is_open()) {
    common = nameless_file(folder);
    if (!common.is_open()) {
      fail(folder, length, errno);
    }
  }
  const auto fit = std::find_if(free.begin(), free.end(),
                                [&](const auto& hole) { return hole.second >= length; });
  const auto offset = fit == free.end() ? end : fit->first;
  if (fit == free.end()) {
    end += length;
    bytes += length;
  } else {
    const auto rest = fit->second - length;
    free.erase(fit);
    if (rest != 0) {
      free.emplace(offset + length, rest);
    }
  }
  return offset;
}

void SpillFiles::give_back(uint64_t offset, uint64_t length) {
  if (fork_generation() != generation) {
    return;  // a forked child's: the file is the parent's
  }
  std::lock_guard lock(mutex);
  auto hole = free.emplace(offset, length).first;
  if (const auto next = std::next(hole); next != free.end() && next->first == offset + length) {
    hole->second += next->second;
    free.erase(next);
  }
  if (hole != free.begin()) {
    const auto before = std::prev(hole);
    if (before->first + before->second == hole->first) {
      before->second += hole->second;
      free.erase(hole);
      hole = before;
    }
  }
  if (hole->first + hole->second == end) {
    // A file that cannot be made shorter keeps the hole, which is then used again.
    if (::ftruncate(common.get(), static_cast<off_t>(hole->first)) == 0) {
      bytes -= hole->second;
      end = hole->first;
      free.erase(hole);
    }
  }
}

namespace {

void check_part(uint64_t whole, uint64_t offset, uint64_t bytes) {
  if (offset > whole || bytes > whole - offset) {
    throw Error(text("bytes ", offset, " to ", offset + bytes, " of an object of ", whole,
                     " were asked for"));
  }
}

void read_back(int fd, uint64_t offset, std::span<std::byte> to, const std::string& folder) {
  if (const int error = read_all(fd, offset, to)) {
    throw Error(text("an object that was spilled to ", folder, " could not be read back (",
                     std::generic_category().message(error), "); put it again"));
  }
}

class LoneFile final : public Content {
 public:
  LoneFile(std::shared_ptr<SpillFiles> files, Descriptor file, uint64_t bytes)
      : files_(std::move(files)), file_(std::move(file)), bytes_(bytes) {
    files_->bytes += segment_bytes(bytes_);
  }
  LoneFile(const LoneFile&) = delete;
  LoneFile& operator=(const LoneFile&) = delete;
  LoneFile(LoneFile&&) = delete;
  LoneFile& operator=(LoneFile&&) = delete;
  ~LoneFile() override { files_->bytes -= segment_bytes(bytes_); }

  [[nodiscard]] uint64_t bytes() const override { return bytes_; }
  [[nodiscard]] int file() const override { return file_.get(); }
  void read(uint64_t offset, std::span<std::byte> to) const override {
    check_part(bytes_, offset, to.size());
    read_back(file_.get(), offset, to, files_->folder);
  }

 private:
  std::shared_ptr<SpillFiles> files_;
  Descriptor file_;
  uint64_t bytes_;
};

// A stretch of the common file.
class Stretch final : public Content {
 public:
  Stretch(std::shared_ptr<SpillFiles> files, uint64_t bytes)
      : files_(std::move(files)), bytes_(bytes), offset_(files_->take(segment_bytes(bytes))) {}
  Stretch(const Stretch&) = delete;
  Stretch& operator=(const Stretch&) = delete;
  Stretch(Stretch&&) = delete;
  Stretch& operator=(Stretch&&) = delete;
  ~Stretch() override { files_->give_back(offset_, segment_bytes(bytes_)); }

  void fill(const Source& source) const {
    fill_file(files_->common.get(), offset_, source, files_->folder);
  }
  [[nodiscard]] uint64_t bytes() const override { return bytes_; }
  void read(uint64_t offset, std::span<std::byte> to) const override {
    check_part(bytes_, offset, to.size());
    read_back(files_->common.get(), offset_ + offset, to, files_->folder);
  }

 private:
  std::shared_ptr<SpillFiles> files_;
  uint64_t bytes_;
  uint64_t offset_;
};

}  // namespace

std::string spill_folder(const std::string& folder) {
  if (!folder.empty()) {
    return folder;
  }
  if (const char* chosen = std::getenv("TMPDIR"); chosen != nullptr && *chosen != '\0') {
    return chosen;
  }
  return in_memory("/tmp") ? "/var/tmp" : "/tmp";
}

Spill::Spill(const std::string& folder, uint64_t small_bytes)
    : files_(std::make_shared<SpillFiles>()) {
  count_forks();
  files_->generation = fork_generation();
  files_->folder = spill_folder(folder);
  files_->small_bytes = small_bytes;
  if (!nameless_file(files_->folder).is_open()) {
    throw InputError(text("the spill folder ", files_->folder, " cannot be used (",
                          std::generic_category().message(errno), "); name another one"));
  }
  if (in_memory(files_->folder)) {
    throw InputError(text("the spill folder ", files_->folder,
                          " lies in memory itself (tmpfs); name one on a disk"));
  }
}

std::shared_ptr<const Content> Spill::store(const Source& source) {
  if (source.bytes() > files_->small_bytes) {
    if (auto file = nameless_file(files_->folder); file.is_open()) {
      promise(file.get(), 0, source.bytes(), files_->folder);
      fill_file(file.get(), 0, source, files_->folder);
      return std::make_shared<LoneFile>(files_, std::move(file), source.bytes());
    }
    if (errno != EMFILE && errno != ENFILE) {
      fail(files_->folder, source.bytes(), errno);
    }
  }
  auto stretch = std::make_shared<Stretch>(files_, source.bytes());
  stretch->fill(source);
  return stretch;
}

std::shared_ptr<const Content> Spill::store(const Content& content) {
  if (const auto memory = content.memory(); !memory.empty()) {
    return store(Source(memory));
  }
  const Fill fill = [&](uint64_t offset, std::span<std::byte> piece) {
    content.read(offset, piece);
  };
  return store(Source(content.bytes(), kCopyPiece, fill));
}

uint64_t Spill::bytes() const { return files_->bytes; }

}  // namespace tenure::store
