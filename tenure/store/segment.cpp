#include <tenure/store/segment.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/store/descriptor.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

namespace tenure::store {
namespace {

constexpr int kSeals = F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;

// For the sockets, files and libraries of the rest of the process.
constexpr rlim_t kDescriptorsLeft = 64;

// Descriptors are given out from the lowest free number on, so a high one means that few are left.
bool one_of_the_last(int fd) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return false;
  }
  const auto left = std::min(kDescriptorsLeft, limit.rlim_cur / 4);
  return static_cast<rlim_t>(fd) + left >= limit.rlim_cur;
}

Error system_failure(const char* what, int error) {
  return Error(
      text("a memfd could not be ", what, " (", std::generic_category().message(error), ")"));
}

class Segment final : public Content {
 public:
  Segment(Descriptor file, uint64_t bytes, Charge charge)
      : charge_(std::move(charge)), file_(std::move(file)), bytes_(bytes) {}

  [[nodiscard]] uint64_t bytes() const override { return bytes_; }
  [[nodiscard]] int descriptor() const override { return file_.get(); }
  void read(uint64_t offset, std::span<std::byte> to) const override {
    if (offset > bytes_ || to.size() > bytes_ - offset) {
      throw Error(text("bytes ", offset, " to ", offset + to.size(), " of an object of ", bytes_,
                       " were asked for"));
    }
    if (const int error = read_all(file_.get(), offset, to)) {
      throw system_failure("read", error);
    }
  }

 private:
  Charge charge_;  // given back after the file
  Descriptor file_;
  uint64_t bytes_;
};

}  // namespace

uint64_t segment_bytes(uint64_t bytes) {
  static const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

std::shared_ptr<const Content> make_segment(const Source& source, Charge& charge) {
  Descriptor file(::memfd_create("tenure", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file.is_open()) {
    if (errno == EMFILE || errno == ENFILE) {
      return nullptr;
    }
    throw system_failure("made", errno);
  }
  if (one_of_the_last(file.get())) {
    return nullptr;
  }
  uint64_t offset = 0;
  source.drain([&](std::span<const std::byte> stretch) {
    if (const int error = write_all(file.get(), offset, stretch)) {
      throw BudgetError(
          text("the kernel refused memory for an object of ", bytes_text(source.bytes()), " (",
               std::generic_category().message(error), "); free or fetch other objects first"));
    }
    offset += stretch.size();
  });
  if (::fcntl(file.get(), F_ADD_SEALS, kSeals) != 0) {
    throw system_failure("sealed", errno);
  }
  charge.settle();
  return std::make_shared<Segment>(std::move(file), source.bytes(), std::move(charge));
}

}  // namespace tenure::store
