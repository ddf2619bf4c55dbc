// What the fuzzers found worth keeping, without a fuzzer: scripts/fuzz looks for more.
#include "../../fuzz/entries.h"
#include "../../fuzz/live.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace tenure::store::fuzz {
namespace {

struct Corpus {
  std::string folder;
  std::string (*fault)(Input) = nullptr;
};

class Corpora : public testing::TestWithParam<Corpus> {};

TEST_P(Corpora, WhatWasKeptHoldsStill) {
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(
           std::filesystem::path(TENURE_FUZZ_CORPUS) / GetParam().folder)) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string content{std::istreambuf_iterator<char>(file), {}};
    EXPECT_EQ(GetParam().fault(std::as_bytes(std::span(content))), "") << entry.path();
    ++files;
  }
  EXPECT_GT(files, 0) << "the corpus is not there";
}

TEST(Fuzz, WhatWasKeptLeavesALiveServerAsItWas) {
  LiveServer live;
  ASSERT_EQ(live.fault_of_the_rest(), "");
  size_t files = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::filesystem::path(TENURE_FUZZ_CORPUS) / "server")) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string content{std::istreambuf_iterator<char>(file), {}};
    ASSERT_EQ(live.fault(std::as_bytes(std::span(content))), "") << entry.path();
    ++files;
  }
  EXPECT_GT(files, 0) << "the corpus is not there";
  EXPECT_EQ(live.fault_of_the_rest(), "");
}

INSTANTIATE_TEST_SUITE_P(Fuzz, Corpora,
                         testing::Values(Corpus{"frame", frame_fault},
                                         Corpus{"handle", handle_fault},
                                         Corpus{"hello", [](Input i) { return hello_fault(i); }}),
                         [](const auto& corpus) { return corpus.param.folder; });

}  // namespace
}  // namespace tenure::store::fuzz
