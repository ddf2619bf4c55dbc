// Tokens: a long row of them, to train on: a file of llm.c's, a text whose bytes are the tokens, or
// a part of either. A cheap value; all methods from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

namespace tenure::train {

class Tokens {
 public:
  // llm.c's .bin: 256 int32 of header, then tokens: uint16 (magic 20240520, version 1: GPT-2) or
  // uint32 (magic 20240801, version 7: Llama 3). Stays on disk. Throws InputError for any other.
  static Tokens from_bin(const std::string& path);
  // The bytes of a file.
  static Tokens from_text(const std::string& path);
  // The bytes of the files *.py in a folder, not below it, one after the other by name, up to so
  // many in all. Python's own standard library is such a folder on every machine.
  static Tokens from_sources(const std::string& folder, uint64_t most_bytes);
  // By the name: .bin is llm.c's, a folder has sources, all else is text.
  static Tokens open(const std::string& path, uint64_t most_bytes);

  uint64_t size() const { return end_ - begin_; }
  // What they are tokens of, for messages.
  const std::string& name() const;

  // Tokens [first, first + out.size()). REQUIRES that there are so many.
  void read(uint64_t first, std::span<int64_t> out) const;

  // All but the last `fraction` of them, and those. InputError unless 0 < fraction < 1.
  std::pair<Tokens, Tokens> split(double fraction) const;

 private:
  struct Source;
  struct Bin;
  struct Text;

  Tokens(std::shared_ptr<const Source> source, uint64_t begin, uint64_t end)
      : source_(std::move(source)), begin_(begin), end_(end) {}

  std::shared_ptr<const Source> source_;  // shared by the parts of one row
  uint64_t begin_ = 0;
  uint64_t end_ = 0;
};

}  // namespace tenure::train
