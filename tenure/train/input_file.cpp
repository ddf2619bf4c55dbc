#include <tenure/train/input_file.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

namespace tenure::train {
namespace {

[[noreturn]] void refuse(const std::string& path, int error) {
  throw InputError(text(path, " cannot be read: ", std::generic_category().message(error), "."));
}

}  // namespace

// Not to wait for whoever writes to a pipe, which is no file.
InputFile::InputFile(std::string path)
    : path_(std::move(path)), fd_(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  struct stat status{};
  if (fd_ < 0 || ::fstat(fd_, &status) != 0) {
    refuse(path_, errno);
  }
  if (!S_ISREG(status.st_mode)) {
    ::close(std::exchange(fd_, -1));
    throw InputError(text(path_, " is no file."));
  }
  size_ = static_cast<uint64_t>(status.st_size);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), size_(other.size_) {}

InputFile& InputFile::operator=(InputFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(size_, other.size_);
  return *this;
}

InputFile::~InputFile() {
  if (fd_ >= 0) {
    ::close(fd_);
  }
}

void InputFile::read(void* data, uint64_t bytes, uint64_t offset) const {
  auto* to = static_cast<char*>(data);
  while (bytes > 0) {
    const auto got = ::pread(fd_, to, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      refuse(path_, errno);
    }
    if (got == 0) {
      throw InputError(text(path_, " became shorter while it was read."));
    }
    to += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<uint64_t>(got);
  }
}

std::string read_whole(const std::string& path) {
  const InputFile file(path);
  std::string content(file.size(), '\0');
  file.read(content.data(), content.size(), 0);
  return content;
}

bool is_folder(const std::string& path) {
  std::error_code refused;
  return std::filesystem::is_directory(path, refused);
}

}  // namespace tenure::train
