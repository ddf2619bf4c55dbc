#include <tenure/inspect/recording.h>

#include <tenure/config.h>
#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/core/ticks.h>
#include <tenure/inspect/modules.h>
#include <tenure/inspect/step_row.h>

#if TENURE_HAVE_SQLITE

#include <sqlite3.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string>

namespace tenure::inspect {
namespace {

constexpr const char* kTables = R"sql(
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE origins(id INTEGER PRIMARY KEY, op TEXT, module TEXT, phase TEXT, site TEXT,
  forward_site TEXT, device INTEGER, stack TEXT, communication INTEGER);
CREATE TABLE storages(id INTEGER PRIMARY KEY, bytes INTEGER, origin INTEGER, thread INTEGER,
  born_step INTEGER, born_ns INTEGER, died_step INTEGER, died_ns INTEGER,
  died_in_backward INTEGER);
CREATE TABLE kinds(storage INTEGER PRIMARY KEY, kind TEXT, name TEXT);
CREATE TABLE steps(step INTEGER PRIMARY KEY, seconds REAL, held INTEGER, peak INTEGER,
  births INTEGER, born_bytes INTEGER, deaths INTEGER, rss INTEGER, files INTEGER, pss INTEGER, shared INTEGER,
  cgroup INTEGER, children INTEGER, in_memory INTEGER, heap INTEGER, heap_free INTEGER, reserve INTEGER,
  pinned INTEGER,
  device_used INTEGER, device_reserved INTEGER, device_allocated INTEGER);
CREATE TABLE cuts(step INTEGER, origin INTEGER, bytes INTEGER, count INTEGER, birth_steps INTEGER,
  PRIMARY KEY(origin, step)) WITHOUT ROWID;
CREATE TABLE figures(step INTEGER, part TEXT, name TEXT, value INTEGER,
  PRIMARY KEY(step, part, name)) WITHOUT ROWID;
CREATE TABLE holdings(id INTEGER PRIMARY KEY, step INTEGER, origin INTEGER, bytes_per_step REAL,
  bytes INTEGER, count INTEGER, path TEXT);
CREATE TABLE notes(id INTEGER PRIMARY KEY, seconds REAL, kind TEXT, text TEXT);
)sql";

// A prepared statement: bind with put(), then run().
class Statement {
 public:
  Statement(sqlite3* file, const char* sql) : file_(file) {
    if (sqlite3_prepare_v3(file, sql, -1, SQLITE_PREPARE_PERSISTENT, &statement_, nullptr) !=
        SQLITE_OK) {
      throw Error(text("the recording cannot be written: ", sqlite3_errmsg(file)));
    }
  }
  ~Statement() { sqlite3_finalize(statement_); }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  template <class... Values>
  void run(const Values&... values) {
    int at = 0;
    (put(++at, values), ...);
    const auto result = sqlite3_step(statement_);
    sqlite3_reset(statement_);
    if (result != SQLITE_DONE && result != SQLITE_ROW) {
      throw Error(text("the recording cannot be written: ", sqlite3_errmsg(file_)));
    }
  }
  int64_t number() {
    const auto result = sqlite3_step(statement_);
    const auto value = result == SQLITE_ROW ? sqlite3_column_int64(statement_, 0) : 0;
    sqlite3_reset(statement_);
    return value;
  }

 private:
  void put(int at, int64_t value) { sqlite3_bind_int64(statement_, at, value); }
  void put(int at, uint64_t value) { put(at, static_cast<int64_t>(value)); }
  void put(int at, uint32_t value) { put(at, static_cast<int64_t>(value)); }
  void put(int at, double value) { sqlite3_bind_double(statement_, at, value); }
  void put(int at, const std::string& value) { put(at, std::string_view(value)); }
  void put(int at, std::string_view value) {
    sqlite3_bind_text(statement_, at, value.data(), static_cast<int>(value.size()),
                      SQLITE_TRANSIENT);
  }
  void put(int at, const std::optional<int64_t>& value) {
    value ? put(at, *value) : static_cast<void>(sqlite3_bind_null(statement_, at));
  }
  void put(int at, std::nullptr_t) { sqlite3_bind_null(statement_, at); }

  sqlite3* file_;
  sqlite3_stmt* statement_ = nullptr;
};

std::string thinning(const std::string& table) {
  return "DELETE FROM " + table +
         " WHERE step IN (SELECT step FROM (SELECT step, row_number() OVER (ORDER BY step) AS at,"
         " count(*) OVER () AS all_of_them FROM (SELECT DISTINCT step FROM " +
         table + ")) WHERE at % 2 = 0 AND 2 * at < all_of_them)";
}

struct Handle {
  explicit Handle(const std::string& path) {
    const auto made = ::open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (made < 0) {
      throw InputError(text("cannot write the recording ", path, ": ", std::strerror(errno),
                            ": give --out a folder that can be written to"));
    }
    ::close(made);
    if (sqlite3_open_v2(path.c_str(), &file, SQLITE_OPEN_READWRITE, nullptr) != SQLITE_OK) {
      const std::string why = sqlite3_errmsg(file);
      sqlite3_close(file);
      throw InputError(text("cannot write the recording ", path, ": ", why));
    }
  }
  ~Handle() { sqlite3_close(file); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  void execute(const char* sql) const {
    char* why = nullptr;
    if (sqlite3_exec(file, sql, nullptr, nullptr, &why) != SQLITE_OK) {
      const std::string kept = why == nullptr ? "unknown error" : why;
      sqlite3_free(why);
      throw Error(text("the recording cannot be written: ", kept));
    }
  }

  sqlite3* file = nullptr;
};

constexpr int kTries = 20;  // to be alone with a file that is complete
constexpr int kPause = 50;  // ms, between them
constexpr uint64_t kSmall = uint64_t{16}
                            << 20;  // caps below it are of the file, not of its content

// What a write-ahead log needs, and each table with its columns.
void prepare(const Handle& handle, uint64_t cap) {
  if (cap < kSmall) {  // free pages are cut off, and the log is kept short
    handle.execute("PRAGMA auto_vacuum=FULL; PRAGMA wal_autocheckpoint=16;");
  }
  handle.execute("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA temp_store=MEMORY;");
  handle.execute(kTables);
}

}  // namespace

struct Recording::File {
  File(const std::string& path, uint64_t most)
      : handle(path), cap(most), ready((prepare(handle, most), true)) {}

  Handle handle;
  uint64_t cap;
  bool ready;
  uint32_t origins = 1;            // the first that is not written
  std::vector<uint32_t> nameless;  // origins whose module has no name yet
  Statement meta{handle.file, "INSERT OR REPLACE INTO meta VALUES(?,?)"};
  Statement origin{handle.file, "INSERT OR REPLACE INTO origins VALUES(?,?,?,?,?,?,?,?,?)"};
  Statement storage{handle.file, "INSERT OR REPLACE INTO storages VALUES(?,?,?,?,?,?,?,?,?)"};
  Statement death{handle.file,
                  "UPDATE storages SET died_step=?, died_ns=?, died_in_backward=? WHERE id=?"};
  Statement step{handle.file,
                 "INSERT OR REPLACE INTO steps VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"};
  Statement cut{handle.file, "INSERT OR REPLACE INTO cuts VALUES(?,?,?,?,?)"};
  Statement figure{handle.file, "INSERT OR REPLACE INTO figures VALUES(?,?,?,?)"};
  Statement holding{handle.file, "INSERT INTO holdings VALUES(NULL,?,?,?,?,?,?)"};
  Statement mark{handle.file, "INSERT OR REPLACE INTO kinds VALUES(?,?,?)"};
  Statement note{handle.file, "INSERT INTO notes VALUES(NULL,?,?,?)"};
  Statement pages{handle.file, "PRAGMA page_count"};
  Statement free_pages{handle.file, "PRAGMA freelist_count"};
  Statement page_size{handle.file, "PRAGMA page_size"};
  // The oldest detail first; of what shows the course of things, every other one of the older half.
  std::array<Statement, 4> thin{
      Statement(handle.file,
                "DELETE FROM storages WHERE id IN (SELECT id FROM storages WHERE died_step IS NOT "
                "NULL ORDER BY id LIMIT 20000)"),
      Statement(handle.file, thinning("cuts").c_str()),
      Statement(handle.file, thinning("figures").c_str()),
      Statement(handle.file, thinning("steps").c_str())};
};

bool can_record() { return true; }

Recording::Recording(const std::string& path, uint64_t cap, Redactor redact)
    : file_(std::make_unique<File>(path, cap)), redact_(std::move(redact)) {
  put("schema", std::to_string(kSchema));
}

// What is complete is one file: whoever reads it needs no log and leaves none behind. Someone who
// reads it just now is waited for, but not for long.
Recording::~Recording() {
  for (int i = 0; i < kTries && sqlite3_exec(file_->handle.file, "PRAGMA journal_mode=DELETE",
                                             nullptr, nullptr, nullptr) == SQLITE_BUSY;
       ++i) {
    sqlite3_sleep(kPause);
  }
}

void Recording::raise_cap(uint64_t cap) {
  if (file_->cap < kSmall && cap >= kSmall) {
    file_->handle.execute("PRAGMA auto_vacuum=INCREMENTAL; PRAGMA wal_autocheckpoint=1000;");
  }
  file_->cap = std::max(file_->cap, cap);
}

void Recording::put(std::string_view key, std::string_view value) { file_->meta.run(key, value); }
void Recording::begin() { file_->handle.execute("BEGIN"); }

void Recording::commit() {
  add_origins();
  thin();
  file_->handle.execute("COMMIT");
}

int64_t Recording::cached_bytes() const {
  int now = 0;
  int most = 0;
  sqlite3_db_status(file_->handle.file, SQLITE_DBSTATUS_CACHE_USED, &now, &most, 0);
  return now;
}

void Recording::add(const StepRow& row) {
  file_->step.run(row.step, row.seconds, row.held, row.peak, row.births, row.born_bytes, row.deaths,
                  row.rss, row.files, row.pss, row.shared, row.cgroup, row.children, row.in_memory,
                  row.heap, row.heap_free, row.reserve, row.pinned, row.device_used,
                  row.device_reserved, row.device_allocated);
}

void Recording::add(const Changes& changes) {
  const auto origin = [](const Birth& birth) { return static_cast<uint32_t>(birth.origin); };
  for (const auto& birth : changes.births) {
    file_->storage.run(birth.id, birth.bytes, origin(birth), birth.thread, birth.step,
                       nanoseconds_at(birth.born), nullptr, nullptr, nullptr);
  }
  for (const auto& [birth, died, step, told, in_backward] : changes.deaths) {
    if (told) {
      file_->death.run(step, nanoseconds_at(died), uint32_t{in_backward}, birth.id);
    } else {
      file_->storage.run(birth.id, birth.bytes, origin(birth), birth.thread, birth.step,
                         nanoseconds_at(birth.born), step, nanoseconds_at(died),
                         uint32_t{in_backward});
    }
  }
}

void Recording::add(const Cut& cut) {
  file_->cut.run(cut.step, static_cast<uint32_t>(cut.origin), cut.bytes, cut.count,
                 cut.birth_steps);
}

void Recording::add(const Figure& figure) {
  file_->figure.run(figure.step, figure.part, figure.name, figure.value);
}

void Recording::add(const Holding& holding) {
  file_->holding.run(holding.step, static_cast<uint32_t>(holding.origin), holding.bytes_per_step,
                     holding.bytes, holding.count, std::string_view(holding.path));
}

void Recording::add(const Mark& mark) {
  file_->mark.run(mark.storage, mark.kind, redact_(mark.name));
}

void Recording::forget_steps() {
  file_->handle.execute(
      "DELETE FROM steps; DELETE FROM cuts; DELETE FROM figures; UPDATE storages SET born_step = 0;"
      "UPDATE storages SET died_step = 0 WHERE died_step IS NOT NULL;");
}

void Recording::note(double seconds, std::string_view kind, std::string_view text) {
  file_->note.run(seconds, kind, redact_(text));
}

void Recording::add_origins() {
  const auto write = [&](uint32_t id) {
    const auto origin = origin_of(OriginId{id});
    const auto module = module_name(origin.module);
    const auto shown = [&](std::string_view name) { return redact_(name); };
    file_->origin.run(id, shown(name_of(origin.op)), shown(module),
                      std::string_view(phase_name(origin.phase)), shown(name_of(origin.site)),
                      shown(name_of(origin.forward_site)), static_cast<uint32_t>(origin.device),
                      shown(name_of(origin.stack)), uint32_t{origin.communication});
    return origin.module == 0 || !module.empty();
  };
  std::erase_if(file_->nameless, write);
  for (const auto end = origins(); file_->origins < end; ++file_->origins) {
    if (!write(file_->origins)) {
      file_->nameless.push_back(file_->origins);
    }
  }
}

void Recording::thin() {
  const auto bytes = [&] {
    return (file_->pages.number() - file_->free_pages.number()) * file_->page_size.number();
  };
  for (auto& thin : file_->thin) {
    while (static_cast<uint64_t>(bytes()) > file_->cap) {
      thin.run();
      if (sqlite3_changes(file_->handle.file) == 0) {
        break;
      }
      put("thinned", "yes");
    }
  }
}

}  // namespace tenure::inspect

#else

namespace tenure::inspect {

struct Recording::File {};
bool can_record() { return false; }
Recording::Recording(const std::string& /*path*/, uint64_t /*cap*/, Redactor /*redact*/) {
  throw Error("this build of Tenure has no SQLite, so it cannot record: watch without --out");
}
Recording::~Recording() = default;
void Recording::raise_cap(uint64_t /*cap*/) {}
void Recording::put(std::string_view /*key*/, std::string_view /*value*/) {}
void Recording::begin() {}
void Recording::commit() {}
void Recording::add(const StepRow& /*row*/) {}
void Recording::add(const Changes& /*changes*/) {}
void Recording::add(const Cut& /*cut*/) {}
void Recording::add(const Figure& /*figure*/) {}
void Recording::add(const Holding& /*holding*/) {}
void Recording::add(const Mark& /*mark*/) {}
void Recording::forget_steps() {}
void Recording::note(double /*seconds*/, std::string_view /*kind*/, std::string_view /*text*/) {}
void Recording::add_origins() {}
void Recording::thin() {}
int64_t Recording::cached_bytes() const { return 0; }

}  // namespace tenure::inspect

#endif
