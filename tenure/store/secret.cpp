#include <tenure/store/secret.h>

#include <tenure/config.h>
#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/store/descriptor.h>

#if TENURE_HAVE_OPENSSL
#include <openssl/crypto.h>
#endif

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

namespace tenure::store {
namespace {

constexpr size_t kLeastSecretBytes = 16;
constexpr size_t kMostSecretBytes = 4096;

void wipe(std::string& bytes) noexcept {
  bytes.resize(bytes.capacity());  // also what a move or an assignment left behind the end
#if TENURE_HAVE_OPENSSL
  OPENSSL_cleanse(bytes.data(), bytes.size());
#else
  explicit_bzero(bytes.data(), bytes.size());
#endif
}

[[noreturn]] void refuse_file(const std::string& path, std::string_view why) {
  throw InputError(text("the store's secret cannot be taken from ", path, ": ", why));
}

void check_private(const std::string& path, int file) {
  struct stat status{};
  if (fstat(file, &status) != 0) {
    refuse_file(path, std::strerror(errno));
  }
  if (!S_ISREG(status.st_mode)) {
    refuse_file(path, "it is not a file");
  }
  if ((status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    refuse_file(path, "others than its owner can use it. Run: chmod 600 " + path);
  }
  if (status.st_uid != geteuid() && status.st_uid != 0) {
    refuse_file(path, text("it belongs to user ", status.st_uid, ", and this process is user ",
                           geteuid(), ". Make a copy that is its own"));
  }
}

// Reads into `bytes`, which its owner wipes.
void read_whole(const std::string& path, int file, std::string& bytes) {
  bytes.resize(kMostSecretBytes + 3);  // and a line's end, and one that shows that it is longer
  size_t length = 0;
  while (length < bytes.size()) {
    const ssize_t got = ::read(file, bytes.data() + length, bytes.size() - length);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      refuse_file(path, std::strerror(errno));
    }
    if (got == 0) {
      break;
    }
    length += static_cast<size_t>(got);
  }
  bytes.resize(length);
}

std::string_view without_line_end(std::string_view bytes) {
  if (bytes.ends_with('\n')) {
    bytes.remove_suffix(1);
  }
  if (bytes.ends_with('\r')) {
    bytes.remove_suffix(1);
  }
  return bytes;
}

}  // namespace

Secret::Secret(std::string_view bytes) {
  if (bytes.size() < kLeastSecretBytes) {
    throw InputError(text("the store's secret has ", count_text(bytes.size(), "byte"),
                          ": at least ", kLeastSecretBytes, " are needed"));
  }
  bytes_ = bytes;
}

Secret& Secret::operator=(Secret other) noexcept {
  bytes_.swap(other.bytes_);
  return *this;
}

Secret::~Secret() { wipe(bytes_); }

Secret secret_from_file(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) {
    refuse_file(path, std::strerror(errno));
  }
  check_private(path, file.get());
  const auto wiped = [](std::string* bytes) { wipe(*bytes); };
  std::string bytes;
  const std::unique_ptr<std::string, decltype(wiped)> guard(&bytes, wiped);
  read_whole(path, file.get(), bytes);
  const auto secret = without_line_end(bytes);
  if (secret.size() > kMostSecretBytes) {
    refuse_file(path, text("it has more than ", kMostSecretBytes, " bytes"));
  }
  if (secret.size() < kLeastSecretBytes) {
    refuse_file(path, text("it holds ", count_text(secret.size(), "byte"), ", and at least ",
                           kLeastSecretBytes, " are needed"));
  }
  return Secret(secret);
}

}  // namespace tenure::store
