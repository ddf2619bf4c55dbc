#include <tenure/core/kernel_file.h>

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <utility>

namespace tenure {
namespace {

ssize_t pread_again(int fd, char* data, size_t size, off_t offset) {
  ssize_t got = 0;
  do {
    got = ::pread(fd, data, size, offset);
  } while (got < 0 && errno == EINTR);
  return got;
}

}  // namespace

KernelFile::KernelFile(const std::string& path) : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}

KernelFile::KernelFile(KernelFile&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

KernelFile& KernelFile::operator=(KernelFile&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

KernelFile::~KernelFile() {
  if (is_open()) {
    ::close(fd_);
  }
}

std::string_view KernelFile::read(std::span<char> buffer) const {
  if (!is_open()) {
    return {};
  }
  const ssize_t got = pread_again(fd_, buffer.data(), buffer.size(), 0);
  return {buffer.data(), got > 0 ? static_cast<size_t>(got) : 0};
}

std::string read_kernel_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return {};
  }
  std::string text;
  std::array<char, 4096> chunk{};
  ssize_t got = 0;
  while ((got = pread_again(fd, chunk.data(), chunk.size(), static_cast<off_t>(text.size()))) > 0) {
    text.append(chunk.data(), static_cast<size_t>(got));
  }
  ::close(fd);
  return text;
}

std::optional<int64_t> leading_number(std::string_view text) {
  const size_t start = text.find_first_not_of(" \t");
  if (start == std::string_view::npos) {
    return std::nullopt;
  }
  int64_t value = 0;
  const auto parsed = std::from_chars(text.data() + start, text.data() + text.size(), value);
  return parsed.ec == std::errc{} ? std::optional(value) : std::nullopt;
}

std::optional<int64_t> number_after(std::string_view key, std::string_view text) {
  for (size_t at = text.find(key); at != std::string_view::npos; at = text.find(key, at + 1)) {
    if (at == 0 || text[at - 1] == '\n') {
      return leading_number(text.substr(at + key.size()));
    }
  }
  return std::nullopt;
}

std::optional<int64_t> bytes_after(std::string_view key, std::string_view text) {
  const auto kib = number_after(key, text);
  return kib ? std::optional(*kib * 1024) : std::nullopt;
}

}  // namespace tenure
