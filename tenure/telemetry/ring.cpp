#include <tenure/telemetry/ring.h>

#include <tenure/core/error.h>
#include <tenure/core/fork.h>
#include <tenure/core/kernel_file.h>
#include <tenure/core/text.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <system_error>
#include <utility>

namespace tenure::telemetry {
namespace {

namespace fs = std::filesystem;

constexpr std::array<char, 8> kMagic{'t', 'e', 'n', 'r', 'i', 'n', 'g', '\0'};
constexpr uint32_t kVersion = 1;
constexpr size_t kPage = 4096;
constexpr size_t kMostSlots = size_t{1} << 20;
constexpr size_t kLongestName = 128;
constexpr mode_t kMode = 0644;
constexpr int kStartTime = 19;  // field of /proc/PID/stat, counted after the name

// The file begins with this. Text follows, a line each: "host\tnode7", ..., and for each figure, in
// order, "key\tNAME\tUNIT". Then, at slots_at, the slots.
struct Head {
  std::array<char, 8> magic = kMagic;
  uint32_t version = kVersion;
  uint32_t text_bytes = 0;
  uint32_t slots_at = 0;
  uint32_t slot_bytes = 0;
  uint32_t slots = 0;
  uint32_t figures = kKeys;
  uint64_t appended = 0;  // rows so far: where the last one lies
  uint64_t closed = 0;    // 1: reason says why; else it does if the process is gone
  std::array<char, 80> reason{};

  void say(std::string_view text) {
    const auto rest = std::ranges::copy(front_of(text, reason.size()), reason.begin()).out;
    std::fill(rest, reason.end(), '\0');
  }
};
static_assert(sizeof(Head) == 128);

// Note [A row is whole or not there]
// A slot is words: the check, the row's number (from 1; 0: never written), its step, its time, its
// figures. The check is a polynomial over all words behind it. A reader copies a slot once and
// drops the row if the check is another: it was being overwritten, or its writer was killed
// halfway, or the machine died before all of it reached the disk. A sequence number alone would
// need two reads in order, which neither read() nor numpy promises on a machine that reorders them.
constexpr size_t kCheck = 0;
constexpr size_t kNumber = 1;
constexpr size_t kStep = 2;
constexpr size_t kWhen = 3;
constexpr size_t kFigures = 4;
constexpr size_t kWords = kFigures + kKeys;
constexpr uint64_t kBase = 0x9e3779b97f4a7c15;

uint64_t check_of(const uint64_t* slot) {
  uint64_t check = 0;
  for (size_t i = kNumber; i < kWords; ++i) {
    check = check * kBase + slot[i];
  }
  return check;
}

[[noreturn]] void refuse(const std::string& folder, const std::string& why) {
  throw InputError(text("cannot keep samples in ", folder, ": ", why, ": give another folder"));
}

std::string why(int error) { return std::generic_category().message(error); }

void need_name(const char* what, const std::string& name) {
  const auto is_control = [](char c) { return static_cast<unsigned char>(c) < ' ' || c == '\x7f'; };
  if (name.size() > kLongestName || std::ranges::any_of(name, is_control)) {
    throw InputError(text("a ", what, " is one line of at most ", kLongestName, " bytes"));
  }
}

void need(const RingIdentity& identity, size_t slots) {
  need_name("host", identity.host);
  need_name("role", identity.role);
  if (identity.host.empty() || identity.host.find('/') != std::string::npos) {
    throw InputError(text("'", identity.host, "' is no name of a host"));
  }
  if (identity.rank < 0 || identity.rank >= identity.ranks) {
    throw InputError(text("there is no rank ", identity.rank, " of ", identity.ranks));
  }
  if (identity.stage < 0 || identity.stage >= identity.stages) {
    throw InputError(text("there is no stage ", identity.stage, " of ", identity.stages));
  }
  if (identity.attempt < 0) {
    throw InputError(text("an attempt counts from 0 and is ", identity.attempt));
  }
  if (slots == 0 || slots > kMostSlots) {
    throw InputError(text("a ring has from 1 to ", kMostSlots, " rows, not ", slots));
  }
}

// When this process began, in ticks since boot: with it a process id is unmistakable.
std::string own_start() {
  const auto stat = read_kernel_file("/proc/self/stat");
  const auto name_ends = stat.rfind(')');  // a name may have anything in it
  if (name_ends == std::string::npos) {
    return {};
  }
  std::istringstream fields(stat.substr(name_ends + 1));
  std::string field;
  for (int i = 0; i <= kStartTime; ++i) {
    fields >> field;
  }
  return field;
}

// Where process ids mean the same: one boot of one machine, one namespace.
std::string own_machine() {
  auto boot = read_kernel_file("/proc/sys/kernel/random/boot_id");
  std::erase(boot, '\n');
  std::error_code none;
  const auto space = fs::read_symlink("/proc/self/ns/pid", none).string();
  return boot.empty() || space.empty() ? std::string() : text(boot, ' ', space);
}

std::string described(const RingIdentity& identity) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  std::ostringstream out;
  out << "host\t" << identity.host << "\nrank\t" << identity.rank << "\nranks\t" << identity.ranks
      << "\nstage\t" << identity.stage << "\nstages\t" << identity.stages << "\nrole\t"
      << identity.role << "\nattempt\t" << identity.attempt << "\npid\t" << ::getpid()
      << "\nprocess_start\t" << own_start() << "\nmachine\t" << own_machine() << "\nstarted\t"
      << std::chrono::nanoseconds(now).count() << '\n';
  for (const auto& key : keys()) {
    out << "key\t" << key.name << '\t' << unit_name(key.unit) << '\n';
  }
  return std::move(out).str();
}

// The blocks of a file that is `size` long, so that no later write can lack room. 0, or why not.
int take_room(int file, size_t size) {
  int done = -1;
  do {
    done = ::fallocate(file, 0, 0, static_cast<off_t>(size));
  } while (done != 0 && errno == EINTR);
  if (done == 0) {
    return 0;
  }
  if (errno != EOPNOTSUPP && errno != ENOSYS) {
    return errno;
  }
  const std::array<char, kPage> zeros{};
  for (size_t at = 0; at < size;) {
    const auto wrote =
        ::pwrite(file, zeros.data(), std::min(kPage, size - at), static_cast<off_t>(at));
    if (wrote <= 0) {
      return wrote < 0 ? errno : ENOSPC;
    }
    at += static_cast<size_t>(wrote);
  }
  return ::fsync(file) == 0 ? 0 : errno;  // network file systems may not know before
}

int open_anew(const std::string& path) {
  ::unlink(path.c_str());
  return ::open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, kMode);
}

// Nobody sees a file that is not all there: it gets its name last.
class NewFile {
 public:
  NewFile(const std::string& folder, const std::string& name)
      : folder_(folder), hidden_(folder + "/." + name + ".new"), file_(open_anew(hidden_)) {
    if (file_ < 0) {
      refuse(folder_, why(errno));
    }
  }
  ~NewFile() {
    ::close(file_);
    ::unlink(hidden_.c_str());
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  std::byte* map(size_t size) const {
    if (const int error = take_room(file_, size)) {
      refuse(folder_, text(size, " bytes for a ring: ", why(error)));
    }
    auto* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (memory == MAP_FAILED) {
      refuse(folder_, text("a file there cannot be mapped: ", why(errno)));
    }
    return static_cast<std::byte*>(memory);
  }

  // 0, or why not.
  int rename_to(const std::string& path) const {
    return ::rename(hidden_.c_str(), path.c_str()) == 0 ? 0 : errno;
  }

 private:
  const std::string& folder_;
  std::string hidden_;
  int file_;
};

uint32_t own_process() {
  // Forks are counted from the first registration on.
  [[maybe_unused]] static const bool counted = (on_fork_in_child([] {}), true);
  return fork_generation();
}

void make_folder(const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) {
    refuse(folder, error.message());
  }
}

}  // namespace

Ring::Ring(const std::string& folder, const RingIdentity& identity, size_t slots)
    : slots_(slots), process_(own_process()) {
  need(identity, slots);
  make_folder(folder);
  const auto name =
      text(identity.host, '-', identity.rank, '-', ::getpid(), '-', identity.attempt, ".ring");
  path_ = folder + "/" + name;
  const auto words = described(identity);
  Head head;
  head.text_bytes = static_cast<uint32_t>(words.size());
  head.slots_at = static_cast<uint32_t>((sizeof(Head) + words.size() + kPage - 1) / kPage * kPage);
  head.slot_bytes = kWords * sizeof(uint64_t);
  head.slots = static_cast<uint32_t>(slots);
  size_ = head.slots_at + slots * head.slot_bytes;

  const NewFile file(folder, name);
  file_ = file.map(size_);
  std::memcpy(file_, &head, sizeof(Head));
  std::memcpy(file_ + sizeof(Head), words.data(), words.size());
  rows_ = reinterpret_cast<uint64_t*>(file_ + head.slots_at);
  if (const int error = file.rename_to(path_)) {
    ::munmap(file_, size_);
    refuse(folder, why(error));
  }
}

Ring::~Ring() { close("ended"); }

bool Ring::is_ours() const { return process_ == fork_generation(); }

uint64_t Ring::appended() const {
  const std::lock_guard lock(mutex_);
  return appended_;
}

void Ring::append(const Row& row) noexcept {
  if (!is_ours()) {
    return;
  }
  const std::lock_guard lock(mutex_);
  if (file_ == nullptr) {
    return;
  }
  uint64_t* slot = rows_ + (appended_ % slots_) * kWords;
  ++appended_;
  slot[kNumber] = appended_;
  slot[kStep] = row.step;
  slot[kWhen] = static_cast<uint64_t>(row.when);
  std::memcpy(slot + kFigures, row.figures.data(), sizeof(row.figures));
  slot[kCheck] = check_of(slot);  // Note [A row is whole or not there]
  auto& appended = reinterpret_cast<Head*>(file_)->appended;
  std::atomic_ref(appended).store(appended_, std::memory_order_release);
}

void Ring::flush() noexcept {
  if (!is_ours()) {
    return;
  }
  const std::lock_guard lock(mutex_);
  if (file_ != nullptr) {
    ::msync(file_, size_, MS_SYNC);
  }
}

void Ring::note(std::string_view reason) noexcept {
  if (!is_ours()) {
    return;
  }
  const std::lock_guard lock(mutex_);
  if (file_ != nullptr) {
    reinterpret_cast<Head*>(file_)->say(reason);
  }
}

void Ring::close(std::string_view reason) noexcept {
  if (!is_ours()) {
    // The parent's thread may have held the lock when it forked; here nobody else has this.
    if (file_ != nullptr) {
      ::munmap(std::exchange(file_, nullptr), size_);
    }
    return;
  }
  const std::lock_guard lock(mutex_);
  if (file_ == nullptr) {
    return;
  }
  auto& head = *reinterpret_cast<Head*>(file_);
  head.say(reason);
  std::atomic_ref(head.closed).store(1, std::memory_order_release);
  ::munmap(std::exchange(file_, nullptr), size_);
}

}  // namespace tenure::telemetry
