#include <tenure/store/objects.h>

#include "objects_fixture.h"
#include <tenure/core/error.h>
#include <tenure/store/departed.h>
#include <tenure/store/errors.h>

#include <gtest/gtest.h>

#include <malloc.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace tenure::store {
namespace {

TEST(Objects, SmallAndLargeComeBackByteExact) {
  Objects objects(kOwner);
  const auto reader = objects.admit(trainer(0));
  for (const uint64_t bytes : {0, 1, 63, 4096, 65'536, 65'537, 5'000'000}) {
    const auto placed = put(objects, step(1), bytes, anyone(), "", bytes);
    const auto fetched = objects.fetch(reader, placed.id, {});
    EXPECT_EQ(read_whole(*fetched.content), pattern(bytes, bytes)) << bytes;
    EXPECT_EQ(fetched.bytes, bytes);
  }
}

TEST(Objects, SmallOnesLieInSlabsAndLargeOnesInMemfds) {
  Objects objects(kOwner);
  put(objects, step(1), 4096);
  put(objects, step(1), 1 << 20);
  const auto listed = objects.list(0, 10, nullptr);
  ASSERT_EQ(listed.size(), 2U);
  EXPECT_EQ(listed[0].place, "slab");
  EXPECT_EQ(listed[1].place, "memfd");
}

TEST(Objects, PiecesAreFilledInOrder) {
  Objects objects(kOwner);
  const auto reader = objects.admit(trainer(0));
  for (const uint64_t bytes : {uint64_t{1000}, uint64_t{300'000}}) {
    const auto whole = pattern(bytes);
    uint64_t next = 0;
    const auto placed =
        objects.put(terms(step(1), bytes), 999, [&](uint64_t offset, std::span<std::byte> piece) {
          EXPECT_EQ(offset, next);
          EXPECT_LE(piece.size(), 999U);
          std::memcpy(piece.data(), whole.data() + offset, piece.size());
          next += piece.size();
        });
    EXPECT_EQ(read_whole(*objects.fetch(reader, placed.id, {}).content), whole);
  }
}

TEST(Objects, AFillThatThrowsStoresNothing) {
  Objects objects(kOwner);
  for (const uint64_t bytes : {uint64_t{1000}, uint64_t{300'000}}) {
    EXPECT_THROW(objects.put(terms(step(1), bytes), 500,
                             [](uint64_t offset, std::span<std::byte>) {
                               if (offset >= 500) {
                                 throw std::domain_error("no");
                               }
                             }),
                 std::domain_error);
  }
  EXPECT_EQ(objects.stats().objects, 0U);
  EXPECT_EQ(objects.stats().bytes, 0U);
  EXPECT_EQ(objects.account(step(1)).total.stored, 0U);
}

TEST(Objects, BytesOfAnotherNumberThanTheLayoutsAreRefused) {
  Objects objects(kOwner);
  EXPECT_THROW(objects.put(terms(step(1), 10), pattern(11)), InputError);
}

TEST(Objects, RowsAreAStretchOfTheContent) {
  Objects objects(kOwner);
  const auto reader = objects.admit(trainer(0));
  auto what = terms(step(1), 0);
  what.layout = {Dtype::int32, {10, 3}};
  const auto placed = objects.put(what, pattern(120));
  const auto fetched = objects.fetch(reader, placed.id, {2, 4});
  EXPECT_EQ(fetched.offset, 24U);
  EXPECT_EQ(fetched.bytes, 48U);
  EXPECT_EQ(fetched.layout, (Layout{Dtype::int32, {4, 3}}));
  EXPECT_THROW(objects.fetch(reader, placed.id, {8, 4}), InputError);
}

TEST(Objects, AFetchedContentOutlivesItsObject) {
  Objects objects(kOwner);
  const auto reader = objects.admit(trainer(0));
  for (const uint64_t bytes : {100, 1 << 20}) {
    const auto placed = put(objects, step(1), bytes);
    const auto fetched = objects.fetch(reader, placed.id, {});
    EXPECT_TRUE(objects.free(placed.id, kController));
    EXPECT_EQ(read_whole(*fetched.content), pattern(bytes));
  }
}

TEST(Objects, AContentOutlivesTheTable) {
  Fetched fetched;
  {
    Objects objects(kOwner);
    fetched = objects.fetch(objects.admit(trainer(0)), put(objects, step(1), 100).id, {});
  }
  EXPECT_EQ(read_whole(*fetched.content), pattern(100));
}

TEST(Objects, SharedContentsCountOnce) {
  Objects objects(kOwner);
  const auto first = put(objects, step(1), 1 << 20);
  const auto second = objects.put_again(terms(step(2), 1 << 20), first.id);
  EXPECT_EQ(objects.stats().bytes, 1U << 20);
  EXPECT_EQ(objects.stats().objects, 2U);
  objects.close(step(1), kController);
  EXPECT_EQ(objects.stats().bytes, 1U << 20);
  const auto fetched = objects.fetch(objects.admit(trainer(0)), second.id, {});
  EXPECT_EQ(read_whole(*fetched.content), pattern(1 << 20));
}

TEST(Objects, WhatIsGoneCannotBePutAgain) {
  Objects objects(kOwner);
  const auto first = put(objects, step(1), 100);
  objects.free(first.id, kController);
  EXPECT_EQ(objects.put_again(terms(step(1), 100), first.id).unstored, "gone");
}

TEST(Objects, AStaleHandleSaysWhoFreedItAndWhatToDo) {
  Objects objects(kOwner);
  const auto reader = objects.admit(trainer(0));
  const auto placed = put(objects, step(168), 4096);
  objects.close(step(168), kController);
  const auto what = what_of<StaleHandle>([&] { objects.fetch(reader, placed.id, {}); });
  for (const auto* part :
       {"4.0 KiB uint8 [4096]", "train.py:41", "step 168", "rollout 0",
        "controller 0 closed the scope at 20", "fetch before the scope closes"}) {
    EXPECT_NE(what.find(part), std::string::npos) << part << " in: " << what;
  }
  EXPECT_EQ(objects.stats().stale, 1U);
}

TEST(Objects, AStaleHandleSaysWhy) {
  Objects objects(kOwner);
  const auto reader = objects.admit(trainer(0));
  const auto why = [&](ObjectId id) {
    return what_of<StaleHandle>([&] { objects.fetch(reader, id, {}); });
  };
  const auto asked = put(objects, step(1), 10).id;
  objects.free(asked, kController);
  EXPECT_NE(why(asked).find("was freed by controller 0"), std::string::npos) << why(asked);
  const auto last = put(objects, step(1), 10, counted(1)).id;
  objects.fetched(reader, last);
  EXPECT_NE(why(last).find("trainer 0 had fetched it as the last"), std::string::npos);
  const auto failed = put(objects, step(1), 10, anyone(), "rollout-7").id;
  objects.fail_call(step(1), "rollout-7");
  EXPECT_NE(why(failed).find("call rollout-7 of rollout 0 failed"), std::string::npos);
  const auto replaced = put(objects, step(1), 10, anyone(), "rollout-7").id;
  objects.begin_call(step(1), "rollout-7");
  EXPECT_NE(why(replaced).find("call rollout-7 was begun again"), std::string::npos);
}

TEST(Objects, APlaceIsUsedAgainWithAnotherGenerationAndNeverServesTheOld) {
  Objects objects(kOwner);
  const auto reader = objects.admit(trainer(0));
  const auto first = put(objects, step(1), 8, anyone(), "", 1).id;
  objects.free(first, kController);
  ObjectId again;
  for (int i = 0; i < 10'000 && again.slot + again.generation == 0; ++i) {
    const auto id = put(objects, step(1), 8, anyone(), "", 2).id;
    if (id.slot == first.slot) {
      again = id;
    } else {
      objects.free(id, kController);
    }
  }
  ASSERT_EQ(again.generation, first.generation + 1);
  const auto what = what_of<StaleHandle>([&] { objects.fetch(reader, first, {}); });
  EXPECT_NE(what.find("was freed by controller 0 at 20"), std::string::npos) << what;
  EXPECT_EQ(read_whole(*objects.fetch(reader, again, {}).content), pattern(8, 2));
}

TEST(Objects, TheWordOnWhoFreedAnObjectIsKeptLongAndThenSaidToBeDropped) {
  Objects objects(kOwner);
  const auto reader = objects.admit(trainer(0));
  const auto why = [&](ObjectId id) {
    return what_of<StaleHandle>([&] { objects.fetch(reader, id, {}); });
  };
  std::vector<ObjectId> freed;
  for (int scope = 1; scope <= 20; ++scope) {
    for (int i = 0; i < 5'000; ++i) {
      freed.push_back(put(objects, step(scope), 8).id);
    }
    objects.close(step(scope), trainer(scope));
  }
  for (size_t i = 0; i < freed.size(); i += 499) {
    const auto said = why(freed[i]);
    if (freed.size() - i <= kDepartedKept) {
      const auto who =
          "when trainer " + std::to_string((i / 5'000) + 1) + " closed the scope at 20";
      EXPECT_NE(said.find(who), std::string::npos) << i << said;
    } else if (freed.size() - i > kDepartedKept + 10'000) {
      EXPECT_NE(said.find("keeps those of the latest 65536"), std::string::npos) << i << said;
    }
  }
}

TEST(Objects, AHandleThatWasNeverGivenOutIsSaidToBeSo) {
  Objects objects(kOwner);
  const auto reader = objects.admit(trainer(0));
  const auto what = what_of<StaleHandle>([&] { objects.fetch(reader, {7, 1}, {}); });
  EXPECT_NE(what.find("never given out"), std::string::npos) << what;
}

TEST(Objects, AFullCapIsRefusedInAClearSentence) {
  Objects objects(kOwner, capped(1 << 20));
  put(objects, step(1), 700'000);
  const auto what = what_of<BudgetError>([&] { put(objects, step(1), 700'000); });
  for (const auto* part : {"683.6 KiB", "rollout 0", "the cap is 1.0 MiB", "close scopes"}) {
    EXPECT_NE(what.find(part), std::string::npos) << part << " in: " << what;
  }
  EXPECT_EQ(objects.stats().objects, 1U);
  objects.close(step(1), kController);
  EXPECT_EQ(put(objects, step(2), 700'000).unstored, "");
}

TEST(Objects, AFullCapTakesASmallObjectInThePlaceOfAFreedOne) {
  Objects objects(kOwner, capped(uint64_t{16} * 4096));
  std::vector<ObjectId> ids;
  for (int i = 0; i < 16; ++i) {
    ids.push_back(put(objects, step(1), 4096).id);
  }
  EXPECT_THROW(put(objects, step(1), 4096), BudgetError);
  objects.free(ids[5], kController);
  EXPECT_EQ(put(objects, step(1), 4096).unstored, "");
}

TEST(Objects, TheListIsReadInPages) {
  Objects objects(kOwner);
  for (int i = 0; i < 5; ++i) {
    put(objects, step(1), 10, listed({{"trainer", 3}, {"trainer", std::nullopt}}), "call");
  }
  uint32_t next = 0;
  size_t seen = 0;
  do {
    for (const auto& entry : objects.list(next, 2, &next)) {
      EXPECT_EQ(entry.waiting, (std::vector<std::string>{"trainer 3", "any trainer"}));
      EXPECT_EQ(entry.call, "call");
      ++seen;
    }
  } while (next != 0);
  EXPECT_EQ(seen, 5U);
}

TEST(Objects, WithoutDescriptorsLargeOnesGoToAnonymousMemory) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  Objects objects(kOwner);
  const auto reader = objects.admit(trainer(0));
  const rlimit few{64, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  std::vector<ObjectId> ids;
  for (int i = 0; i < 100; ++i) {
    ids.push_back(put(objects, step(1), 100'000, anyone(), "", i + 1).id);
  }
  const int spare = ::dup(0);
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_GE(spare, 0) << "none was left to the rest of the process";
  ::close(spare);
  size_t memfds = 0;
  for (const auto& entry : objects.list(0, 100, nullptr)) {
    memfds += entry.place == "memfd" ? 1 : 0;
  }
  EXPECT_GT(memfds, 0U);
  EXPECT_LT(memfds, 64U);
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(read_whole(*objects.fetch(reader, ids[i], {}).content), pattern(100'000, i + 1));
  }
  objects.close(step(1), kController);
  EXPECT_EQ(objects.stats().bytes, 0U);
}

TEST(Objects, LargeOnesGoBackToTheSystemAtClose) {
  Objects objects(kOwner);
  ASSERT_EQ(memfd_bytes(), 0);
  const auto bytes = pattern(20 << 20);
  for (int i = 0; i < 10; ++i) {
    objects.put(terms(step(1), bytes.size()), bytes);
  }
  EXPECT_EQ(memfd_bytes(), 200 << 20);
  EXPECT_EQ(objects.stats().bytes, 200U << 20);
  objects.close(step(1), kController);
  EXPECT_EQ(memfd_bytes(), 0);
  EXPECT_LT(resident("RssShmem:"), 1 << 20) << "nor is any of it mapped";
}

TEST(Objects, SmallOnesGoBackToTheSystemAtClose) {
  if (kSanitized) {
    GTEST_SKIP() << "a sanitizer's memory is among ours";
  }
  Objects objects(kOwner);
  ::malloc_trim(0);  // what earlier tests left would hide ours
  const auto before = resident("RssAnon:");
  const auto bytes = pattern(2048);
  for (int i = 0; i < 100'000; ++i) {
    objects.put(terms(step(1), bytes.size()), bytes);
  }
  EXPECT_GE(resident("RssAnon:") - before, 195'000'000);
  objects.close(step(1), kController);
  ::malloc_trim(0);
  // The table keeps a cache line for each, with the word on who freed it.
  EXPECT_LE(resident("RssAnon:") - before, 100'000 * 100);
  EXPECT_EQ(objects.stats().bytes, 0U);
}

TEST(Objects, AMillionSmallOnesCostLittleBesideTheirBytes) {
  if (kSanitized) {
    GTEST_SKIP() << "a sanitizer's memory is among ours";
  }
  constexpr int kCount = 200'000;
  Objects objects(kOwner);
  const auto bytes = pattern(4096);
  const auto what = terms(step(1), bytes.size(), listed({{"trainer", 0}, {"trainer", 4}}));
  ::malloc_trim(0);  // what earlier tests left would hide ours
  const auto before = resident("RssAnon:");
  for (int i = 0; i < kCount; ++i) {
    objects.put(what, bytes);
  }
  const auto overhead = (resident("RssAnon:") - before) / kCount - 4096;
  std::printf("overhead of an object of 4 KB: %ld B\n", static_cast<long>(overhead));
  EXPECT_LE(overhead, 300);
  EXPECT_GT(overhead, 0);
}

TEST(Objects, AForkedChildLeavesTheParentsObjectsAlone) {
  auto objects = std::make_unique<Objects>(kOwner);
  const auto reader = objects->admit(trainer(0));
  const auto placed = put(*objects, step(1), 1 << 20);
  const auto child = ::fork();
  if (child == 0) {
    const bool refused = !what_of<Error>([&] { objects->fetch(reader, placed.id, {}); }).empty();
    objects.reset();
    ::_exit(refused ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(read_whole(*objects->fetch(reader, placed.id, {}).content), pattern(1 << 20));
}

TEST(Objects, AForkedChildKeepsNoMemoryOfItsParents) {
  Objects objects(kOwner);
  const auto large = put(objects, step(1), 8 << 20);
  const auto small = put(objects, step(1), 1000);
  const auto* const slab = objects.content(small.id)->memory().data();
  int gate[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, gate), 0);
  char byte = 0;
  const auto child = ::fork();
  if (child == 0) {
    ::close(gate[1]);
    static_cast<void>(::write(gate[0], &byte, 1));
    static_cast<void>(::read(gate[0], &byte, 1));
    ::_exit(0);
  }
  ASSERT_EQ(::read(gate[1], &byte, 1), 1);
  const auto of_child = std::filesystem::path("/proc") / std::to_string(child);
  for (const auto& entry : std::filesystem::directory_iterator(of_child / "fd")) {
    EXPECT_EQ(std::filesystem::read_symlink(entry).string().find("memfd:tenure"),
              std::string::npos);
  }
  std::ifstream maps(of_child / "maps");
  uintptr_t from = 0;
  uintptr_t to = 0;
  char dash = 0;
  for (std::string rest; maps >> std::hex >> from >> dash >> to && std::getline(maps, rest);) {
    EXPECT_FALSE(from <= reinterpret_cast<uintptr_t>(slab) &&
                 reinterpret_cast<uintptr_t>(slab) < to);
  }
  EXPECT_NE(to, 0U);
  for (const int end : gate) {
    ::close(end);
  }
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(read_whole(*objects.content(large.id)), pattern(8 << 20));
  EXPECT_EQ(read_whole(*objects.content(small.id)), pattern(1000));
}

}  // namespace
}  // namespace tenure::store
