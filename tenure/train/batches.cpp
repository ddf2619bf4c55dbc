#include <tenure/train/batches.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

namespace tenure::train {
namespace {

constexpr int kRounds = 6;

uint64_t mixed(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

// A Feistel network on twice `half_bits` bits: whatever the rounds mix, it can be undone, so no two
// values meet.
uint64_t scrambled(uint64_t value, int half_bits, uint64_t key) {
  const uint64_t mask = (uint64_t{1} << half_bits) - 1;
  auto left = value >> half_bits;
  auto right = value & mask;
  for (int round = 0; round < kRounds; ++round) {
    const auto turned = left ^ (mixed(right + mixed(key + static_cast<uint64_t>(round))) & mask);
    left = right;
    right = turned;
  }
  return (left << half_bits) | right;
}

void check(const BatchOptions& options) {
  if (options.rows < 1 || options.length < 1) {
    throw InputError(text("a batch has 1 row of 1 token or more, not ", options.rows, " of ",
                          options.length, "."));
  }
  if (options.ranks < 1 || options.rank < 0 || options.rank >= options.ranks) {
    throw InputError(
        text("there is no data-parallel rank ", options.rank, " of ", options.ranks, "."));
  }
}

int64_t windows_in(const Tokens& tokens, const BatchOptions& options) {
  check(options);
  const auto needed = static_cast<uint64_t>(options.length) + 1;
  if (tokens.size() < needed) {
    throw InputError(text(tokens.name(), " is too short: a sequence of ", options.length,
                          " needs at least ", needed, " tokens, and it has ", tokens.size(), "."));
  }
  return static_cast<int64_t>((tokens.size() - 1) / static_cast<uint64_t>(options.length));
}

}  // namespace

uint64_t shuffled(uint64_t index, uint64_t size, uint64_t key) {
  const int half_bits = std::max(1, (static_cast<int>(std::bit_width(size - 1)) + 1) / 2);
  // A walk along a cycle of the larger bijection, from a place inside, comes back inside.
  do {
    index = scrambled(index, half_bits, key);
  } while (index >= size);
  return index;
}

Batches::Batches(Tokens tokens, const BatchOptions& options)
    : tokens_(std::move(tokens)), options_(options), windows_(windows_in(tokens_, options)) {}

void Batches::seek(int64_t position) {
  if (position < 0) {
    throw InputError(text("there is no batch ", position, "."));
  }
  position_ = position;
}

Batch Batches::next() {
  const auto [rows, length, rank, ranks, seed, vocab] = options_;
  const auto make = [&] { return at::empty({rows, length}, at::TensorOptions().dtype(at::kLong)); };
  Batch batch{make(), make()};
  auto* to_tokens = batch.tokens.mutable_data_ptr<int64_t>();
  auto* to_targets = batch.targets.mutable_data_ptr<int64_t>();
  std::vector<int64_t> window(static_cast<size_t>(length) + 1);
  const auto first = (position_ * ranks + rank) * rows;
  for (int64_t row = 0; row < rows; ++row) {
    const auto epoch = static_cast<uint64_t>((first + row) / windows_);
    const auto number = static_cast<uint64_t>((first + row) % windows_);
    const auto at = shuffled(number, static_cast<uint64_t>(windows_), mixed(seed + 1) + epoch) *
                    static_cast<uint64_t>(length);
    tokens_.read(at, window);
    for (size_t i = 0; i < window.size(); ++i) {
      if (window[i] >= vocab) {
        throw InputError(text(tokens_.name(), " has the token ", window[i], " at place ", at + i,
                              ", and the model's vocabulary has ", vocab,
                              ": take a model with a larger one, or data of its tokenizer."));
      }
    }
    std::copy(window.begin(), window.end() - 1, to_tokens + row * length);
    std::copy(window.begin() + 1, window.end(), to_targets + row * length);
  }
  ++position_;
  return batch;
}

}  // namespace tenure::train
