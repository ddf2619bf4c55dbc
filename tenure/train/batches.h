// Batches: what a rank trains on, batch by batch. A row of tokens is cut into windows of one
// sequence each (and the one token more that its targets need); an epoch takes each window once, in
// an order that the seed gives, and another one every epoch.
//
// Note [A batch is a function of its number]
// Which windows the ranks take in a step depends on the seed, the step's number and the place of a
// row among all rows of all ranks, on nothing that happened before. So a position is one number, a
// resumed run goes on exactly, and 2 ranks with 4 rows each see together what 1 rank with 8 sees.
//
// One thread at a time.
#pragma once

#include <tenure/train/tokens.h>

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tenure::train {

struct BatchOptions {
  int64_t rows = 1;
  int64_t length = 1;
  int64_t rank = 0;   // among the data-parallel ranks; those of a pipeline or a shard that work on
  int64_t ranks = 1;  // the same rows have the same
  uint64_t seed = 0;
  int64_t vocab = 256;  // of the model
};

struct Batch {
  at::Tensor tokens;   // both [rows, length] of int64, on the host
  at::Tensor targets;  // the token that follows
};

class Batches {
 public:
  // Throws InputError for a row of tokens that is shorter than one window, and for options without
  // meaning.
  Batches(Tokens tokens, const BatchOptions& options);

  // Throws InputError for a token that is not in the vocabulary.
  Batch next();

  // How many batches were taken. Set on a like object, the next batch is the same.
  int64_t position() const { return position_; }
  void seek(int64_t position);

  // Windows in one epoch, of all ranks.
  int64_t windows() const { return windows_; }

 private:
  Tokens tokens_;
  BatchOptions options_;
  int64_t windows_;
  int64_t position_ = 0;
};

// The place of `index` in an order of [0, size) that the key gives: a bijection, made without a
// table. REQUIRES 0 <= index < size.
uint64_t shuffled(uint64_t index, uint64_t size, uint64_t key);

}  // namespace tenure::train
