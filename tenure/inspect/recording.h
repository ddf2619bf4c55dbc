// Recording: what one process saw, in one SQLite file that any tool opens; docs/recording.md has
// its tables. Written in batches, each a transaction, so that a process that is killed leaves all
// but the last batch. One thread. Holds no tensor values and no contents of the program's strings.
#pragma once

#include <tenure/inspect/birth_table.h>
#include <tenure/inspect/redactor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tenure::inspect {

struct StepRow;

// Bytes alive of one origin at the end of a step.
struct Cut {
  uint64_t step = 0;
  OriginId origin{};
  int64_t bytes = 0;
  int64_t count = 0;
  int64_t birth_steps = 0;  // how many different steps those alive were born in
};

// What a part of Tenure says of itself at the end of a step.
struct Figure {
  uint64_t step = 0;
  std::string part;  // "shard"
  std::string name;  // "peak_gathered_bytes"
  int64_t value = 0;
};

// How the storages of one origin were held when someone looked.
struct Holding {
  uint64_t step = 0;
  OriginId origin{};
  double bytes_per_step = 0;
  int64_t bytes = 0;
  int64_t count = 0;
  std::string path;  // JSON
};

// What a storage is to the program, as far as its holders tell: births alone do not.
struct Mark {
  uint64_t storage = 0;  // Birth::id
  std::string kind;      // "parameter", "gradient", "optimizer"
  std::string name;      // "GPT.blocks.3.mlp.weight"
};

// Whether this build has SQLite.
bool can_record();

class Recording {
 public:
  static constexpr int kSchema = 1;

  // Makes the file, for its owner's eyes only. Detail beyond `cap` bytes is thinned, oldest first.
  // A file with a small cap is never larger than that once it is closed; one with a large cap may
  // have pages that are free.
  // Origins and notes pass through the redactor; other texts are the caller's to redact.
  // Throws InputError if it cannot be made or exists, Error in a build without SQLite.
  Recording(const std::string& path, uint64_t cap, Redactor redact = {});
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  // Each throws Error when the file can no longer be written: disk full, folder gone.
  void raise_cap(uint64_t cap);
  void put(std::string_view key, std::string_view value);
  void begin();
  void commit();
  void add(const StepRow& row);
  void add(const Changes& changes);
  void add(const Cut& cut);
  void add(const Figure& figure);
  void add(const Holding& holding);
  void add(const Mark& mark);
  void forget_steps();  // and cuts and figures; storages were in step 0
  void note(double seconds, std::string_view kind, std::string_view text);
  // What SQLite keeps of it in memory.
  int64_t cached_bytes() const;

 private:
  void add_origins();
  void thin();
  struct File;
  std::unique_ptr<File> file_;
  Redactor redact_;
};

}  // namespace tenure::inspect
