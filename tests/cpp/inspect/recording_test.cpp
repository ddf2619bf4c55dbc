#include <tenure/inspect/recording.h>

#include <tenure/config.h>
#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/core/ticks.h>
#include <tenure/inspect/modules.h>
#include <tenure/inspect/step_row.h>

#include <gtest/gtest.h>

#if TENURE_HAVE_SQLITE

#include <sqlite3.h>

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <string>
#include <vector>

namespace tenure::inspect {
namespace {

constexpr uint64_t kRoomy = uint64_t{1} << 40;

// A folder of its own, and what any tool would read there.
class RecordingTest : public testing::Test {
 protected:
  void SetUp() override {
    folder = testing::TempDir() + "tenure-XXXXXX";
    EXPECT_NE(::mkdtemp(folder.data()), nullptr);
    path = folder + "/run.tenure";
  }
  void TearDown() override {
    for (const auto& file : files()) {
      ::unlink(file.c_str());
    }
    ::rmdir(folder.c_str());
  }

  std::vector<std::string> files() const {
    std::vector<std::string> out;
    for (const char* end : {"", "-wal", "-shm"}) {
      if (::access((path + end).c_str(), F_OK) == 0) {
        out.push_back(path + end);
      }
    }
    return out;
  }

  // -1: there is no such file.
  int64_t size() const {
    struct stat seen{};
    return ::stat(path.c_str(), &seen) == 0 ? seen.st_size : -1;
  }

  // All rows, columns divided by | and rows by a space; NULL is -.
  std::string read(const char* sql) const {
    sqlite3* file = nullptr;
    sqlite3_stmt* statement = nullptr;
    std::string out;
    if (sqlite3_open_v2(path.c_str(), &file, SQLITE_OPEN_READWRITE, nullptr) != SQLITE_OK ||
        sqlite3_prepare_v2(file, sql, -1, &statement, nullptr) != SQLITE_OK) {
      out = sqlite3_errmsg(file);
    }
    while (statement != nullptr && sqlite3_step(statement) == SQLITE_ROW) {
      out += out.empty() ? "" : " ";
      for (int i = 0; i < sqlite3_column_count(statement); ++i) {
        const auto* value = reinterpret_cast<const char*>(sqlite3_column_text(statement, i));
        out += (i > 0 ? "|" : "") + std::string(value == nullptr ? "-" : value);
      }
    }
    sqlite3_finalize(statement);
    sqlite3_close(file);
    return out;
  }

  Recording recording(uint64_t cap = kRoomy) const { return Recording(path, cap); }

  std::string folder, path;
};

Birth birth_of(uint64_t id, uint32_t step = 0) {
  return {.data = nullptr,
          .id = id,
          .bytes = 100 * id,
          .born = 1000 + id,
          .step = step,
          .origin = OriginId::unknown,
          .thread = 7};
}

// Storages that were born and died between two drains.
Changes dead(uint64_t first, uint64_t count) {
  Changes out;
  for (uint64_t id = first; id < first + count; ++id) {
    out.deaths.push_back({.birth = birth_of(id), .died = 5000 + id, .step = 3, .told = false});
  }
  return out;
}

Changes alive(uint64_t first, uint64_t count) {
  Changes out;
  for (uint64_t id = first; id < first + count; ++id) {
    out.births.push_back(birth_of(id));
  }
  return out;
}

StepRow row_of(uint64_t step) {
  StepRow row;
  row.step = step;
  return row;
}

TEST_F(RecordingTest, ThisBuildCanRecord) { EXPECT_TRUE(can_record()); }

TEST_F(RecordingTest, ANewOneSaysItsSchemaAndWhatIsPut) {
  {
    auto writes = recording();
    writes.put("program", "train.py");
    writes.put("program", "evaluate.py");
  }
  EXPECT_EQ(read("SELECT key, value FROM meta ORDER BY key"), "program|evaluate.py schema|1");
}

TEST_F(RecordingTest, StepsAreReadBackWithWhatIsNotKnownAbsent) {
  StepRow row;
  row.step = 4;
  row.seconds = 1.5;
  row.held = 10;
  row.peak = 20;
  row.births = 30;
  row.born_bytes = 40;
  row.deaths = 50;
  row.rss = 60;
  row.shared = 70;
  row.in_memory = 75;
  row.heap = 80;
  row.heap_free = 90;
  row.device_used = 100;
  row.device_reserved = 110;
  row.device_allocated = 120;
  {
    auto writes = recording();
    writes.begin();
    writes.add(row);
    writes.commit();
  }
  EXPECT_EQ(read("SELECT step, seconds, held, peak, births, born_bytes, deaths, rss FROM steps"),
            "4|1.5|10|20|30|40|50|60");
  EXPECT_EQ(read("SELECT pss, shared, cgroup, children, in_memory, pinned FROM steps"),
            "-|70|-|-|75|-");
  EXPECT_EQ(read("SELECT heap, heap_free, device_used, device_reserved, device_allocated FROM "
                 "steps"),
            "80|90|100|110|120");
}

TEST_F(RecordingTest, CutsHoldingsAndNotesAreReadBack) {
  {
    auto writes = recording();
    writes.begin();
    writes.add(Cut{.step = 2, .origin = OriginId{5}, .bytes = 300, .count = 4, .birth_steps = 3});
    writes.add(Holding{.step = 2,
                       .origin = OriginId{5},
                       .bytes_per_step = 0.5,
                       .bytes = 300,
                       .count = 4,
                       .path = R"(["it's", "losses"])"});
    writes.note(2.5, "warning", "a; b");
    writes.note(3.5, "end", "");
    writes.commit();
  }
  EXPECT_EQ(read("SELECT step, origin, bytes, count, birth_steps FROM cuts"), "2|5|300|4|3");
  EXPECT_EQ(read("SELECT step, origin, bytes_per_step, bytes, count, path FROM holdings"),
            R"(2|5|0.5|300|4|["it's", "losses"])");
  EXPECT_EQ(read("SELECT seconds, kind, text FROM notes ORDER BY id"), "2.5|warning|a; b 3.5|end|");
}

TEST_F(RecordingTest, AStorageHasOneRowFromItsBirthToItsDeath) {
  {
    auto writes = recording();
    writes.begin();
    writes.add(alive(1, 2));
    writes.add(dead(3, 1));
    writes.add(Changes{.births = {},
                       .deaths = {{.birth = birth_of(1), .died = 9, .step = 8, .told = true}}});
    writes.commit();
  }
  EXPECT_EQ(read("SELECT id, bytes, thread, born_step, born_ns, died_step, died_ns FROM storages "
                 "ORDER BY id"),
            text("1|100|7|0|", nanoseconds_at(1001), "|8|", nanoseconds_at(9), " 2|200|7|0|",
                 nanoseconds_at(1002), "|-|- 3|300|7|0|", nanoseconds_at(1003), "|3|",
                 nanoseconds_at(5003)));
}

TEST_F(RecordingTest, AnOriginIsWrittenOnceItIsKnownAndItsModuleOnceItIsNamed) {
  const char module = 0;
  const auto number = module_number(&module);
  const auto origin = intern(Origin{.op = tenure::intern("aten::mm"),
                                    .site = tenure::intern("train.py:41 main"),
                                    .forward_site = NameId::none,
                                    .stack = NameId::none,
                                    .module = number,
                                    .phase = Phase::backward,
                                    .device = 2});
  const auto row = "SELECT op, module, phase, site, device FROM origins WHERE id = " +
                   std::to_string(static_cast<uint32_t>(origin));
  auto writes = recording();
  EXPECT_EQ(read(row.c_str()), "");
  writes.begin();
  writes.commit();
  EXPECT_EQ(read(row.c_str()), "aten::mm||backward|train.py:41 main|2");
  name_module(number, "model.head");
  writes.begin();
  writes.commit();
  EXPECT_EQ(read(row.c_str()), "aten::mm|model.head|backward|train.py:41 main|2");
  forget_module(&module);
}

TEST_F(RecordingTest, OnlyItsOwnerMayReadIt) {
  const auto old = ::umask(0);
  auto writes = recording();
  writes.put("key", "value");
  ::umask(old);
  for (const auto& file : files()) {
    struct stat seen{};
    ASSERT_EQ(::stat(file.c_str(), &seen), 0);
    EXPECT_EQ(seen.st_mode & 0777, 0600) << file;
  }
  EXPECT_GT(files().size(), 1) << "the log that it is written through is not here";
}

TEST_F(RecordingTest, AnExistingFileIsRefusedAndKept) {
  {
    auto writes = recording();
    writes.put("mine", "yes");
  }
  EXPECT_THROW(recording(), InputError);
  EXPECT_EQ(read("SELECT value FROM meta WHERE key = 'mine'"), "yes");
}

TEST_F(RecordingTest, AFolderThatIsNotThereIsRefused) {
  path = folder + "/absent/run.tenure";
  try {
    recording();
    FAIL() << "made a file in " << path;
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find(path), std::string::npos) << error.what();
  }
}

TEST_F(RecordingTest, BeyondItsCapOnlyTheDeadAreThinned) {
  {
    auto writes = recording(200'000);
    writes.begin();
    for (uint64_t step = 0; step < 500; ++step) {
      writes.add(row_of(step));
    }
    writes.add(alive(1, 1000));
    writes.add(dead(2000, 30'000));
    writes.commit();
  }
  EXPECT_EQ(read("SELECT count(*) FROM steps"), "500");
  EXPECT_EQ(read("SELECT count(*) FROM storages WHERE died_step IS NULL"), "1000");
  EXPECT_EQ(read("SELECT value FROM meta WHERE key = 'thinned'"), "yes");
  EXPECT_LT(std::stoi(read("SELECT count(*) FROM storages WHERE died_step IS NOT NULL")), 30'000);
}

TEST_F(RecordingTest, TheOldestAreThinnedFirst) {
  {
    auto writes = recording(500'000);
    writes.begin();
    writes.add(dead(1, 25'000));
    writes.commit();
  }
  EXPECT_EQ(read("SELECT max(id) FROM storages"), "25000");
  EXPECT_GT(std::stoi(read("SELECT min(id) FROM storages")), 1);
}

TEST_F(RecordingTest, TheLivingAreKeptHoweverManyTheyAre) {
  {
    auto writes = recording(200'000);
    writes.begin();
    writes.add(alive(1, 30'000));
    writes.commit();
  }
  EXPECT_EQ(read("SELECT count(*) FROM storages"), "30000");
  EXPECT_EQ(read("SELECT value FROM meta WHERE key = 'thinned'"), "");
}

TEST_F(RecordingTest, OfTheCourseOfThingsTheOlderHalfIsMadeCoarser) {
  {
    auto writes = recording(300'000);
    for (uint64_t step = 0; step < 2000; ++step) {
      writes.begin();
      writes.add(row_of(step));
      for (uint32_t origin = 1; origin <= 20; ++origin) {
        writes.add(Cut{.step = step, .origin = OriginId{origin}, .bytes = 1, .count = 1});
      }
      writes.commit();
    }
  }
  EXPECT_EQ(read("SELECT value FROM meta WHERE key = 'thinned'"), "yes");
  EXPECT_LT(std::stoi(read("SELECT (SELECT page_count FROM pragma_page_count) * page_size - "
                           "(SELECT freelist_count FROM pragma_freelist_count) * page_size FROM "
                           "pragma_page_size")),
            310'000);
  EXPECT_EQ(read("SELECT min(step), max(step) FROM cuts"), "0|1999");
  EXPECT_EQ(read("SELECT min(step), max(step) FROM steps"), "0|1999");
  EXPECT_EQ(read("SELECT count(*) FROM cuts WHERE step > 1990"), "180");
}

TEST_F(RecordingTest, ASmallCapIsThatOfTheFileWithItsLog) {
  constexpr uint64_t kCap = 256'000;
  {
    auto writes = recording(kCap);
    for (uint64_t batch = 0; batch < 100; ++batch) {
      writes.begin();
      for (uint64_t step = 0; step < 500; ++step) {
        auto row = row_of(500 * batch + step);
        row.held = row.peak = row.rss = int64_t{1} << 40;
        row.heap = row.heap_free = row.device_used = row.device_reserved = int64_t{1} << 40;
        writes.add(row);
      }
      writes.commit();
    }
  }
  EXPECT_EQ(files().size(), 1);
  EXPECT_LE(size(), static_cast<int64_t>(kCap));
  EXPECT_EQ(read("SELECT min(step), max(step) FROM steps"), "0|49999");
  EXPECT_GT(std::stoi(read("SELECT count(*) FROM steps")), 500);
}

TEST_F(RecordingTest, ACapThatIsRaisedLeavesRoom) {
  {
    auto writes = recording(256'000);
    writes.begin();
    writes.add(row_of(1));
    writes.commit();
    writes.raise_cap(kRoomy);
    writes.begin();
    writes.add(dead(1, 30'000));
    writes.commit();
  }
  EXPECT_EQ(read("SELECT count(*) FROM storages"), "30000");
  EXPECT_EQ(read("SELECT value FROM meta WHERE key = 'thinned'"), "");
}

TEST_F(RecordingTest, BelowItsCapNothingIsThinned) {
  {
    auto writes = recording();
    writes.begin();
    writes.add(dead(1, 30'000));
    writes.commit();
  }
  EXPECT_EQ(read("SELECT count(*) FROM storages"), "30000");
  EXPECT_EQ(read("SELECT value FROM meta WHERE key = 'thinned'"), "");
}

TEST_F(RecordingTest, LargeBatchesDoNotOutgrowTheCap) {
  constexpr uint64_t kCap = 4'000'000;
  constexpr uint64_t kBatch = 60'000;  // about 1.7 MB
  {
    auto writes = recording(kCap);
    for (uint64_t batch = 0; batch < 6; ++batch) {
      writes.begin();
      writes.add(dead(1 + batch * kBatch, kBatch));
      writes.commit();
    }
  }
  EXPECT_LT(size(), static_cast<int64_t>(kCap * 3 / 2));
}

TEST_F(RecordingTest, ForgottenStepsTakeTheirCutsAlongAndNothingElse) {
  {
    auto writes = recording();
    writes.begin();
    writes.add(row_of(1));
    writes.add(Cut{.step = 1, .origin = OriginId{5}, .bytes = 1, .count = 1, .birth_steps = 1});
    writes.add(alive(1, 1));
    writes.note(1, "kind", "text");
    writes.forget_steps();
    writes.add(row_of(7));
    writes.commit();
  }
  EXPECT_EQ(read("SELECT step FROM steps"), "7");
  EXPECT_EQ(read("SELECT count(*) FROM cuts"), "0");
  EXPECT_EQ(read("SELECT count(*) FROM storages"), "1");
  EXPECT_EQ(read("SELECT born_step FROM storages"), "0");
  EXPECT_EQ(read("SELECT count(*) FROM notes"), "1");
}

TEST_F(RecordingTest, AProcessThatIsKilledLeavesAllThatItCommitted) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  const auto process = ::fork();
  if (process == 0) {
    auto writes = recording();
    for (uint64_t step = 0; step < 50; ++step) {
      writes.begin();
      writes.add(row_of(step));
      writes.add(dead(1 + 100 * step, 100));
      writes.commit();
    }
    writes.begin();
    writes.add(row_of(50));
    EXPECT_EQ(::write(ends[1], "x", 1), 1);
    while (true) {
      ::pause();
    }
  }
  char written = 0;
  ASSERT_EQ(::read(ends[0], &written, 1), 1);
  ASSERT_EQ(::kill(process, SIGKILL), 0);
  ASSERT_EQ(::waitpid(process, nullptr, 0), process);
  ::close(ends[0]);
  ::close(ends[1]);
  EXPECT_EQ(read("PRAGMA integrity_check"), "ok");
  EXPECT_EQ(read("SELECT count(*), max(step) FROM steps"), "50|49");
  EXPECT_EQ(read("SELECT count(*) FROM storages"), "5000");
}

TEST_F(RecordingTest, AProcessThatIsKilledAtAnyTimeLeavesWholeBatches) {
  const auto process = ::fork();
  if (process == 0) {
    auto writes = recording();
    for (uint64_t step = 0;; ++step) {
      writes.begin();
      writes.add(row_of(step));
      writes.add(dead(1 + 10 * step, 10));
      writes.commit();
    }
  }
  while (size() < 100'000) {
    ::usleep(1000);
  }
  ASSERT_EQ(::kill(process, SIGKILL), 0);
  ASSERT_EQ(::waitpid(process, nullptr, 0), process);
  EXPECT_EQ(read("PRAGMA integrity_check"), "ok");
  const auto steps = std::stoll(read("SELECT count(*) FROM steps"));
  EXPECT_GT(steps, 0);
  EXPECT_EQ(std::stoll(read("SELECT count(*) FROM storages")), 10 * steps);
}

TEST_F(RecordingTest, AFileThatCannotGrowIsAnErrorAndKeepsWhatItHas) {
  const auto process = ::fork();
  if (process == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{.rlim_cur = 1'000'000, .rlim_max = 1'000'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    bool refused = false;
    try {
      auto writes = recording();
      for (uint64_t batch = 0; batch < 100; ++batch) {
        writes.begin();
        writes.add(row_of(batch));
        writes.add(dead(1 + 5000 * batch, 5000));
        writes.commit();
      }
    } catch (const Error&) {
      refused = true;
    }
    ::_exit(refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(process, &status, 0), process);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(read("PRAGMA integrity_check"), "ok");
  EXPECT_GT(std::stoi(read("SELECT count(*) FROM steps")), 0);
}

}  // namespace
}  // namespace tenure::inspect

#endif
