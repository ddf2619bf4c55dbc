#include <tenure/train/new_file.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

namespace tenure::train {
namespace {

constexpr mode_t kAsTheUserWants = 0666;  // less what umask says
constexpr int kTries = 100;

std::string why(int error) { return std::generic_category().message(error); }

std::string folder_of(const std::string& path) {
  const auto folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

}  // namespace

NewFile::NewFile(std::string path) : path_(std::move(path)) {
  for (int number = 0; fd_ < 0 && number < kTries; ++number) {
    beside_ = text(path_, ".", ::getpid(), ".", number, ".partial");
    fd_ = ::open(beside_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, kAsTheUserWants);
    if (fd_ < 0 && errno != EEXIST) {
      break;
    }
  }
  if (fd_ < 0) {
    throw InputError(text(path_, " cannot be written: ", why(errno), "."));
  }
}

NewFile::~NewFile() {
  if (fd_ >= 0) {
    ::close(fd_);
    ::unlink(beside_.c_str());
  }
}

void NewFile::fail(int error) const {
  throw Error(
      text(path_, " was not written: ", why(error), "; what was there before is unchanged."));
}

void NewFile::write(const void* data, size_t bytes) {
  written_.bytes += bytes;
  written_.hash = hash_of(data, bytes, written_.hash);
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const auto done = ::write(fd_, from, bytes);
    if (done < 0 && errno != EINTR) {
      fail(errno);
    }
    if (done > 0) {
      from += done;
      bytes -= static_cast<size_t>(done);
    }
  }
}

void NewFile::commit() {
  if (::fsync(fd_) != 0 || ::rename(beside_.c_str(), path_.c_str()) != 0) {
    fail(errno);
  }
  ::close(std::exchange(fd_, -1));
  sync_folder(folder_of(path_));
}

void sync_folder(const std::string& path) {
  const int folder = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder >= 0) {
    ::fsync(folder);
    ::close(folder);
  }
}

Written write_whole(const std::string& path, std::string_view content) {
  NewFile file(path);
  file.write(content.data(), content.size());
  file.commit();
  return file.written();
}

}  // namespace tenure::train
