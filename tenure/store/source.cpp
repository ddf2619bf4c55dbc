#include <tenure/store/source.h>

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

namespace tenure::store {
namespace {

// Larger pieces are not faster, and the buffer is memory, too.
constexpr uint64_t kMostBuffer = uint64_t{8} << 20;
// One write() moves at most 2 GiB less a page.
constexpr uint64_t kMostWrite = uint64_t{1} << 30;

}  // namespace

void Source::copy_to(std::byte* to) const {
  if (fill_ == nullptr) {
    if (bytes_ != 0) {
      std::memcpy(to, whole_.data(), bytes_);
    }
    return;
  }
  for (uint64_t offset = 0; offset < bytes_;) {
    const auto piece = std::min(piece_bytes_, bytes_ - offset);
    (*fill_)(offset, {to + offset, piece});
    offset += piece;
  }
}

void Source::drain(const std::function<void(std::span<const std::byte> stretch)>& take) const {
  if (fill_ == nullptr) {
    if (bytes_ != 0) {
      take(whole_);
    }
    return;
  }
  const auto most = std::min({piece_bytes_, bytes_, kMostBuffer});
  const auto buffer = std::make_unique_for_overwrite<std::byte[]>(most);
  for (uint64_t offset = 0; offset < bytes_;) {
    const std::span<std::byte> piece(buffer.get(), std::min(most, bytes_ - offset));
    (*fill_)(offset, piece);
    take(piece);
    offset += piece.size();
  }
}

int write_all(int fd, uint64_t offset, std::span<const std::byte> stretch) {
  while (!stretch.empty()) {
    const auto most = std::min<uint64_t>(stretch.size(), kMostWrite);
    const auto done = ::pwrite(fd, stretch.data(), most, static_cast<off_t>(offset));
    if (done < 0) {
      if (errno == EINTR) {
        continue;
      }
      return errno;
    }
    offset += static_cast<uint64_t>(done);
    stretch = stretch.subspan(static_cast<size_t>(done));
  }
  return 0;
}

int read_all(int fd, uint64_t offset, std::span<std::byte> to) {
  while (!to.empty()) {
    const auto most = std::min<uint64_t>(to.size(), kMostWrite);
    const auto done = ::pread(fd, to.data(), most, static_cast<off_t>(offset));
    if (done < 0) {
      if (errno == EINTR) {
        continue;
      }
      return errno;
    }
    if (done == 0) {
      return EIO;
    }
    offset += static_cast<uint64_t>(done);
    to = to.subspan(static_cast<size_t>(done));
  }
  return 0;
}

}  // namespace tenure::store
