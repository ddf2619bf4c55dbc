#include <tenure/telemetry/board.h>

#include <tenure/core/text.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <type_traits>
#include <utility>

namespace tenure::telemetry {
namespace {

static_assert(std::is_trivially_copyable_v<Row>);

// A row with its interval's number before it.
std::vector<uint8_t> bytes_of(uint64_t number, const Row& row) {
  std::vector<uint8_t> out(sizeof(number) + sizeof(Row));
  std::memcpy(out.data(), &number, sizeof(number));
  std::memcpy(out.data() + sizeof(number), &row, sizeof(Row));
  return out;
}

// One of another interval has no figures.
Row row_of(uint64_t number, const std::vector<uint8_t>& bytes) {
  Row out;
  uint64_t told = 0;
  if (bytes.size() == sizeof(told) + sizeof(Row)) {
    std::memcpy(&told, bytes.data(), sizeof(told));
    if (told == number) {
      std::memcpy(static_cast<void*>(&out), bytes.data() + sizeof(told), sizeof(Row));
    }
  }
  return out;
}

// For a store that does not answer. What it has to say is not worth waiting for.
constexpr std::chrono::seconds kStoreTimeout{10};
constexpr std::chrono::milliseconds kLook{1};        // between two looks for a row, at first
constexpr std::chrono::milliseconds kMostLook{100};  // and later

std::string row_key(uint32_t rank) { return text("row/", rank); }
std::string peak_key(uint64_t number) { return text("peak/", number); }

}  // namespace

Board::Board(c10::intrusive_ptr<c10d::Store> store, uint32_t rank, uint32_t ranks)
    : jobs_(std::move(store)), rank_(rank), ranks_(ranks) {}

Board::~Board() = default;

c10d::Store& Board::store() {
  if (!clone_) {
    clone_ = jobs_->clone();
    clone_->setTimeout(kStoreTimeout);
  }
  return *clone_;
}

void Board::post(uint64_t number, const Row& own) {
  store().set(row_key(rank_), bytes_of(number, own));
}

std::vector<Row> Board::all(uint64_t number) {
  std::vector<std::string> names;
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    names.push_back(row_key(rank));
  }
  std::vector<Row> out;
  if (!store().check(names)) {
    return out;
  }
  if (store().hasExtendedApi()) {
    for (const auto& bytes : store().multiGet(names)) {
      out.push_back(row_of(number, bytes));
    }
  } else {
    for (const auto& name : names) {
      out.push_back(row_of(number, store().get(name)));
    }
  }
  return out;
}

void Board::post_peak(uint64_t number, const Row& own) {
  posted_ = peak_key(number);
  store().set(posted_, bytes_of(number, own));
}

std::optional<Row> Board::peak(uint64_t number, std::chrono::milliseconds patience,
                               const std::stop_token& stop) {
  const auto key = peak_key(number);
  const auto until = std::chrono::steady_clock::now() + patience;
  std::mutex mutex;
  std::condition_variable_any asked;
  std::unique_lock lock(mutex);
  // Looks instead of the store's own wait: that cannot be ended, and complains on stderr.
  for (auto pause = kLook; !store().check({key}); pause = std::min(2 * pause, kMostLook)) {
    asked.wait_for(lock, stop, pause, [] { return false; });
    if (stop.stop_requested() || std::chrono::steady_clock::now() >= until) {
      return std::nullopt;  // it has left, or is late: extremes are told without it
    }
  }
  return row_of(number, store().get(key));
}

void Board::tidy() {
  if (!posted_.empty()) {
    store().deleteKey(std::exchange(posted_, {}));
  }
}

void Board::abandon() { static_cast<void>(clone_.release()); }

}  // namespace tenure::telemetry
