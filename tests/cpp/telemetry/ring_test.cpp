#include <tenure/telemetry/ring.h>

#include <tenure/core/error.h>

#include <gtest/gtest.h>

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

namespace tenure::telemetry {
namespace {

namespace fs = std::filesystem;

// The file as a stranger reads it: by the offsets that its head gives.
struct Read {
  std::string reason;
  std::string words;
  uint32_t slots = 0;
  uint64_t appended = 0;
  std::map<uint64_t, std::vector<uint64_t>> rows;  // by number: step, time, figures

  explicit Read(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    const std::string file((std::istreambuf_iterator<char>(in)), {});
    EXPECT_EQ(file.substr(0, 8), std::string("tenring\0", 8));
    const auto small = [&](size_t at) { return number<uint32_t>(file, at); };
    words = file.substr(128, small(12));
    slots = small(24);
    appended = number<uint64_t>(file, 32);
    if (number<uint64_t>(file, 40) != 0) {
      reason = std::string(file.data() + 48, strnlen(file.data() + 48, 80));
    }
    EXPECT_EQ(file.size(), small(16) + size_t{small(20)} * slots);
    for (uint32_t i = 0; i < slots; ++i) {
      std::vector<uint64_t> slot(small(20) / 8);
      std::memcpy(slot.data(), file.data() + small(16) + size_t{i} * small(20), small(20));
      uint64_t check = 0;
      for (size_t word = 1; word < slot.size(); ++word) {
        check = check * 0x9e3779b97f4a7c15 + slot[word];
      }
      if (slot[1] != 0 && slot[0] == check) {
        EXPECT_EQ((slot[1] - 1) % slots, i);
        rows[slot[1]] = {slot.begin() + 2, slot.end()};
      }
    }
  }

  template <class T>
  static T number(const std::string& file, size_t at) {
    T out = 0;
    std::memcpy(&out, file.data() + at, sizeof(T));
    return out;
  }
};

// All words equal, so that half of one and half of another shows.
Row uniform(uint64_t value) {
  Row row;
  row.step = value;
  row.when = static_cast<int64_t>(value);
  row.figures.fill(static_cast<int64_t>(value));
  return row;
}

bool is_uniform(const std::vector<uint64_t>& row) {
  return std::ranges::all_of(row, [&](uint64_t word) { return word == row.front(); });
}

std::string said(const std::string& folder, const RingIdentity& identity, size_t slots = 4) {
  try {
    const Ring ring(folder, identity, slots);
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

// A process that is killed at the latest when the test ends, however that ends.
class Child {
 public:
  explicit Child(pid_t pid) : pid_(pid) {}
  ~Child() { kill(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  void kill() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
      pid_ = 0;
    }
  }

 private:
  pid_t pid_;
};

class RingTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = fs::temp_directory_path() / "ring-XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { fs::remove_all(folder_); }

  RingIdentity node(int rank = 0) const { return {"node7", rank, 4, 1, 2, "policy", 3}; }
  std::string folder_;
};

TEST_F(RingTest, IsAFileOfItsFullSizeFromTheBeginning) {
  const Ring ring(folder_ + "/made/here", node(2));
  EXPECT_EQ(fs::path(ring.path()).filename(), "node7-2-" + std::to_string(::getpid()) + "-3.ring");
  struct stat before{};
  ASSERT_EQ(::stat(ring.path().c_str(), &before), 0);
  EXPECT_GE(before.st_blocks * 512, before.st_size);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_ + "/made/here"), {}), 1);
}

TEST_F(RingTest, SaysWhoWritesAndWhatTheFiguresAre) {
  const Ring ring(folder_, node(2));
  const Read read(ring.path());
  EXPECT_NE(read.words.find("host\tnode7\nrank\t2\nranks\t4\nstage\t1\nstages\t2\nrole\tpolicy\n"
                            "attempt\t3\n"),
            std::string::npos);
  EXPECT_NE(read.words.find("key\tdevice_allocated_bytes\tbytes\n"), std::string::npos);
  EXPECT_NE(read.words.find("key\tstep_microseconds\tmicroseconds\n"), std::string::npos);
  EXPECT_EQ(read.slots, Ring::kSlots);
  EXPECT_TRUE(read.rows.empty());
}

TEST_F(RingTest, KeepsTheLastRows) {
  Ring ring(folder_, node(), 4);
  for (uint64_t i = 1; i <= 10; ++i) {
    ring.append(uniform(i));
  }
  const Read read(ring.path());
  EXPECT_EQ(read.appended, 10);
  ASSERT_EQ(read.rows.size(), 4);
  EXPECT_EQ(read.rows.begin()->first, 7);
  for (const auto& [number, row] : read.rows) {
    EXPECT_EQ(row.front(), number);
    EXPECT_TRUE(is_uniform(row));
  }
}

TEST_F(RingTest, TellsWhyItWasClosedAndTakesNoMore) {
  Ring ring(folder_, node(), 4);
  ring.append(uniform(1));
  EXPECT_EQ(Read(ring.path()).reason, "");
  ring.close("out of memory");
  ring.close("ended");
  ring.append(uniform(2));
  ring.flush();
  const Read read(ring.path());
  EXPECT_EQ(read.reason, "out of memory");
  EXPECT_EQ(read.rows.size(), 1);
}

TEST_F(RingTest, CutsALongReasonBetweenCharacters) {
  std::string path;
  {
    Ring ring(folder_, node(), 4);
    path = ring.path();
    std::string reason;
    for (int i = 0; i < 40; ++i) {
      reason += "€";  // three bytes: 80 is in the middle of one
    }
    ring.close(reason);
  }
  EXPECT_EQ(Read(path).reason.size(), 78);
}

TEST_F(RingTest, EndsWithItsOwner) {
  std::string path;
  {
    const Ring ring(folder_, node(), 4);
    path = ring.path();
  }
  EXPECT_EQ(Read(path).reason, "ended");
}

TEST_F(RingTest, GivesWholeRowsWhileItIsWrittenAndAfterAKill) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    Ring ring(folder_, node(), 8);
    for (uint64_t i = 1;; ++i) {
      ring.append(uniform(i));
    }
  }
  Child child(pid);
  const auto path = folder_ + "/node7-0-" + std::to_string(pid) + "-3.ring";
  while (!fs::exists(path)) {
    ::usleep(1000);
  }
  uint64_t seen = 0;
  for (int reads = 0; reads < 2000; ++reads) {
    for (const auto& [number, row] : Read(path).rows) {
      ASSERT_TRUE(is_uniform(row)) << number;
      ++seen;
    }
  }
  EXPECT_GT(seen, 0);
  child.kill();
  const Read read(path);
  EXPECT_GE(read.rows.size(), 7);  // at most the one that was being written is lost
  EXPECT_EQ(read.reason, "");
}

TEST_F(RingTest, IsNotWrittenByAChildThatInheritedIt) {
  Ring ring(folder_, node(), 4);
  ring.append(uniform(1));
  const pid_t child = ::fork();
  if (child == 0) {
    ring.append(uniform(2));
    ring.flush();
    ring.close("by the child");
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
  const Read read(ring.path());
  EXPECT_EQ(read.reason, "");
  EXPECT_EQ(read.appended, 1);
  ASSERT_EQ(read.rows.size(), 1);
  ring.append(uniform(3));
  EXPECT_EQ(Read(ring.path()).appended, 2);
}

TEST_F(RingTest, TakesThePlaceOfAnEarlierOneOfThatName) {
  Ring earlier(folder_, node(), 4);
  earlier.append(uniform(1));
  const Ring later(folder_, node(), 8);
  earlier.append(uniform(2));  // its file has no name any more
  EXPECT_TRUE(Read(later.path()).rows.empty());
  EXPECT_EQ(Read(later.path()).slots, 8);
}

TEST_F(RingTest, RefusesFoldersInASentence) {
  const auto file = folder_ + "/file";
  std::ofstream(file) << "x";
  EXPECT_EQ(said(file, node()),
            "cannot keep samples in " + file + ": Not a directory: give another folder");
  EXPECT_EQ(said(file + "/below", node()),
            "cannot keep samples in " + file + "/below: Not a directory: give another folder");
  EXPECT_NE(said("/proc/self/net", node()).find("cannot keep samples in /proc"), std::string::npos);
}

TEST_F(RingTest, RefusesADiskWithoutRoomWhenItIsMade) {
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit least{4096, 4096};
    ::setrlimit(RLIMIT_FSIZE, &least);
    ::signal(SIGXFSZ, SIG_IGN);
    const auto sentence = said(folder_, node());
    ::_exit(sentence.find("bytes for a ring: File too large") == std::string::npos);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(RingTest, RefusesWhatIsNoIdentity) {
  auto identity = node();
  identity.host = "a/b";
  EXPECT_EQ(said(folder_, identity), "'a/b' is no name of a host");
  identity.host = "a\nb";
  EXPECT_EQ(said(folder_, identity), "a host is one line of at most 128 bytes");
  identity = node(4);
  EXPECT_EQ(said(folder_, identity), "there is no rank 4 of 4");
  identity = node();
  identity.stage = 2;
  EXPECT_EQ(said(folder_, identity), "there is no stage 2 of 2");
  EXPECT_EQ(said(folder_, node(), 0), "a ring has from 1 to 1048576 rows, not 0");
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(RingTest, TakesARowInLessThanTwoMicroseconds) {
  Ring ring(folder_, node());
  const auto row = uniform(1);
  auto least = std::chrono::nanoseconds::max();
  constexpr int kRows = 1000;
  for (int batch = 0; batch < 50; ++batch) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kRows; ++i) {
      ring.append(row);
    }
    least = std::min(least, (std::chrono::steady_clock::now() - begin) / kRows);
  }
  RecordProperty("nanoseconds", static_cast<int>(least.count()));
  EXPECT_LT(least.count(), 2000);
}

}  // namespace
}  // namespace tenure::telemetry
