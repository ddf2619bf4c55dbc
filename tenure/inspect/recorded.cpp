#include <tenure/inspect/recorded.h>

#include <tenure/config.h>
#include <tenure/core/error.h>
#include <tenure/core/text.h>

#if TENURE_HAVE_SQLITE

#include <sqlite3.h>

#include <unistd.h>

#include <memory>
#include <optional>
#include <string_view>

namespace tenure::inspect {
namespace {

struct Close {
  void operator()(sqlite3* file) const { sqlite3_close(file); }
  void operator()(sqlite3_stmt* statement) const { sqlite3_finalize(statement); }
};
using File = std::unique_ptr<sqlite3, Close>;

[[noreturn]] void fail(sqlite3* file) { throw Error(sqlite3_errmsg(file)); }

// A path as a URI: what has a meaning there is written as a number.
std::string uri_of(const std::string& path, const char* how) {
  constexpr const char* digits = "0123456789ABCDEF";
  std::string out = "file:";
  for (const char c : path) {
    if (c == '%' || c == '?' || c == '#') {
      const auto byte = static_cast<unsigned char>(c);
      out += {'%', digits[byte >> 4U], digits[byte & 15U]};
    } else {
      out += c;
    }
  }
  return out + how;
}

File opened(const std::string& uri) {
  sqlite3* file = nullptr;
  const auto result =
      sqlite3_open_v2(uri.c_str(), &file, SQLITE_OPEN_READONLY | SQLITE_OPEN_URI, nullptr);
  File owned(file);
  if (result != SQLITE_OK ||
      sqlite3_exec(file, "SELECT 1 FROM sqlite_master", nullptr, nullptr, nullptr) != SQLITE_OK) {
    return nullptr;
  }
  sqlite3_busy_timeout(file, 5000);
  return owned;
}

// Without a log beside it nobody writes a recording, and SQLite needs no files of its own to read
// it. Nor can it make them in a folder that cannot be written to.
File open_recording(const std::string& path) {
  if (::access((path + "-wal").c_str(), F_OK) == 0) {
    if (auto file = opened(uri_of(path, "?mode=ro"))) {
      return file;
    }
  }
  if (auto file = opened(uri_of(path, "?immutable=1"))) {
    return file;
  }
  throw Error(text("it cannot be read: ", path));
}

// The rows of an answer, column by column.
class Answer {
 public:
  Answer(sqlite3* file, const char* sql) : file_(file) {
    sqlite3_stmt* made = nullptr;
    if (sqlite3_prepare_v2(file, sql, -1, &made, nullptr) != SQLITE_OK) {
      fail(file);
    }
    statement_.reset(made);
  }
  bool next() {
    const auto result = sqlite3_step(statement_.get());
    if (result != SQLITE_ROW && result != SQLITE_DONE) {
      fail(file_);
    }
    return result == SQLITE_ROW;
  }
  // -1: there is no such column.
  int column(std::string_view name) const {
    for (int i = 0; i < sqlite3_column_count(statement_.get()); ++i) {
      if (sqlite3_column_name(statement_.get(), i) == name) {
        return i;
      }
    }
    return -1;
  }
  int64_t number(int at) const { return sqlite3_column_int64(statement_.get(), at); }
  void get(int at, int64_t& value) const { value = number(at); }
  void get(int at, uint64_t& value) const { value = static_cast<uint64_t>(number(at)); }
  void get(int at, double& value) const { value = sqlite3_column_double(statement_.get(), at); }
  void get(int at, std::optional<int64_t>& value) const {
    if (sqlite3_column_type(statement_.get(), at) != SQLITE_NULL) {
      value = number(at);
    }
  }

 private:
  sqlite3* file_;
  std::unique_ptr<sqlite3_stmt, Close> statement_;
};

// A figure for which an older recording has no column is not known.
std::vector<StepRow> rows_of(sqlite3* file) {
  Answer answer(file, "SELECT * FROM steps ORDER BY step");
  std::vector<int> columns;
  StepRow empty;
  each_figure(empty, [&](const char* name, const auto& /*value*/) {
    columns.push_back(answer.column(name));
  });
  std::vector<StepRow> out;
  while (answer.next()) {
    auto column = columns.begin();
    each_figure(out.emplace_back(), [&](const char* /*name*/, auto& value) {
      if (const auto at = *column++; at >= 0) {
        answer.get(at, value);
      }
    });
  }
  return out;
}

Cuts cuts_of(sqlite3* file) {
  Answer answer(file,
                "SELECT origin, step, bytes, count, birth_steps FROM cuts ORDER BY origin, step");
  Cuts out;
  while (answer.next()) {
    const OriginId origin{static_cast<uint32_t>(answer.number(0))};
    out[origin].push_back({.step = static_cast<uint64_t>(answer.number(1)),
                           .origin = origin,
                           .bytes = answer.number(2),
                           .count = answer.number(3),
                           .birth_steps = answer.number(4)});
  }
  return out;
}

}  // namespace

Recorded read_recording(const std::string& path) {
  const auto file = open_recording(path);
  return {rows_of(file.get()), cuts_of(file.get())};
}

}  // namespace tenure::inspect

#else

namespace tenure::inspect {

Recorded read_recording(const std::string& /*path*/) {
  throw Error("this build of Tenure has no SQLite");
}

}  // namespace tenure::inspect

#endif
