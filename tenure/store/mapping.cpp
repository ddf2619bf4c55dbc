#include <tenure/store/mapping.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/store/descriptor.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace tenure::store {
namespace {

uint64_t page_bytes() {
  static const auto bytes = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

void check(int descriptor, const ObjectFound& found) {
  constexpr int wanted_seals = F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK;
  const int seals = ::fcntl(descriptor, F_GET_SEALS);
  if (seals < 0 || (seals & wanted_seals) != wanted_seals) {
    throw Error("an object came as a file that is not sealed against change, and was not taken");
  }
  struct stat state{};
  if (::fstat(descriptor, &state) != 0 ||
      static_cast<uint64_t>(state.st_size) != found.whole_bytes) {
    throw Error(text("an object of ", found.whole_bytes, " bytes came as a file of ", state.st_size,
                     ", and was not taken"));
  }
}

}  // namespace

// NOLINTNEXTLINE(performance-unnecessary-value-param): it is closed when this returns
std::unique_ptr<Mapping> MappedFile::map(Descriptor file, const ObjectFound& found) {
  check(file.get(), found);
  const uint64_t ahead = found.offset % page_bytes();
  const uint64_t length = ahead + found.bytes;
  void* const base = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                            file.get(), static_cast<off_t>(found.offset - ahead));
  if (base == MAP_FAILED) {
    return nullptr;
  }
  std::unique_ptr<Mapping> mapping(new Mapping);
  mapping->base_ = static_cast<std::byte*>(base);
  mapping->length_ = length;
  mapping->data_ = mapping->base_ + ahead;
  mapping->bytes_ = found.bytes;
  return mapping;
}

void MappedFile::set_tell(Mapping& mapping, std::function<void(Heirs)> tell) {
  mapping.tell_ = std::move(tell);
}

Mapping::~Mapping() {
  ::munmap(base_, length_);
  if (tell_) {
    tell_(inheritable_.heirs());
  }
}

bool Mapping::dirty() const {
  constexpr uint64_t present = uint64_t{1} << 63U;
  constexpr uint64_t swapped = uint64_t{1} << 62U;
  constexpr uint64_t of_file = uint64_t{1} << 61U;
  const Descriptor pagemap(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  if (pagemap.get() < 0) {
    return true;
  }
  std::array<uint64_t, 4096> entries;  // filled as far as they are read
  const uint64_t first = reinterpret_cast<uintptr_t>(base_) / page_bytes();
  const uint64_t pages = (length_ + page_bytes() - 1) / page_bytes();
  for (uint64_t page = 0; page < pages;) {
    const uint64_t wanted = std::min<uint64_t>(entries.size(), pages - page);
    const ssize_t got = ::pread(pagemap.get(), entries.data(), wanted * sizeof(uint64_t),
                                static_cast<off_t>((first + page) * sizeof(uint64_t)));
    if (got < static_cast<ssize_t>(sizeof(uint64_t))) {
      return true;
    }
    const auto count = static_cast<size_t>(got) / sizeof(uint64_t);
    const bool written = std::any_of(
        entries.begin(), entries.begin() + static_cast<ptrdiff_t>(count), [](uint64_t entry) {
          return (entry & (present | swapped)) != 0 && (entry & of_file) == 0;
        });
    if (written) {
      return true;
    }
    page += count;
  }
  return false;
}

}  // namespace tenure::store
