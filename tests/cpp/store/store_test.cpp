#include <tenure/store/store.h>

#include "served.h"
#include <tenure/core/part.h>
#include <tenure/core/text.h>
#include <tenure/store/errors.h>
#include <tenure/store/listening_sockets.h>
#include <tenure/store/tensors.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <sstream>
#include <string>

namespace tenure::store {
namespace {

const ScopeName kStep{.kind = "step", .id = "1"};

StoreOptions options(const std::string& role) {
  StoreOptions out;
  out.job = text("store-test-", ::getpid());
  out.role = role;
  return out;
}

class StoreTest : public ::testing::Test {
 protected:
  Store rollout_{options("rollout")};
  Store trainer_{options("trainer")};
};

TEST_F(StoreTest, AnotherStoreFetches) {
  const auto tensor = at::arange(100'000);
  const auto handle = rollout_.put(kStep, tensor);
  EXPECT_TRUE(at::equal(trainer_.get(handle), tensor));
  GetOptions rows;
  rows.rows = {.first = 10, .count = 5};
  EXPECT_TRUE(at::equal(trainer_.get(handle, rows), tensor.slice(0, 10, 15)));
}

TEST_F(StoreTest, ManyAreOneFetch) {
  std::vector<Handle> handles;
  handles.reserve(100);
  for (int64_t i = 0; i < 100; ++i) {
    handles.push_back(rollout_.put(kStep, at::arange(i)));
  }
  const auto tensors = trainer_.get_all(handles);
  for (int64_t i = 0; i < 100; ++i) {
    EXPECT_TRUE(at::equal(tensors[static_cast<size_t>(i)], at::arange(i)));
  }
}

TEST_F(StoreTest, AClosedScopeIsGoneEverywhere) {
  GetOptions keep;
  keep.keep = true;
  const auto handle = rollout_.put(kStep, at::ones({100'000}));
  (void)trainer_.get(handle, keep);
  EXPECT_EQ(trainer_.stats().kept_bytes, 400'000U);
  trainer_.adopt(kStep, {&handle, 1});
  const auto closing = trainer_.close(kStep);
  ASSERT_EQ(closing.elsewhere.size(), 1U);
  EXPECT_EQ(closing.elsewhere[0].second.freed, 1U);
  EXPECT_EQ(trainer_.stats().kept_bytes, 0U);
  EXPECT_EQ(rollout_.stats().objects.objects, 0U);
  EXPECT_THROW((void)trainer_.get(handle), StaleHandle);
  EXPECT_FALSE(rollout_.put(kStep, at::ones({3})).stored());
}

TEST_F(StoreTest, WhatIsForgottenOnItsWayIsNotKept) {
  GetOptions keep;
  keep.keep = true;
  const std::array handles{rollout_.put(kStep, at::ones({3})), rollout_.put(kStep, at::ones({4}))};
  auto parcel = trainer_.fetch(handles, keep);
  EXPECT_EQ(trainer_.forget({handles.data(), 1}), 0U);
  trainer_.accept(parcel);
  EXPECT_EQ(trainer_.kept_of(kStep), 1U);
  EXPECT_EQ(trainer_.stats().kept_bytes, 16U);

  parcel = trainer_.fetch(handles, keep);
  EXPECT_EQ(trainer_.forget(kStep), 1U);
  trainer_.accept(parcel);
  EXPECT_EQ(trainer_.kept_of(kStep), 0U);

  (void)trainer_.get_all(handles, keep);  // and one that begins later is
  EXPECT_EQ(trainer_.kept_of(kStep), 2U);
  EXPECT_EQ(trainer_.forget(handles), 2U);
}

TEST_F(StoreTest, AHalfWayFetchTargetMustFit) {
  const auto handle = rollout_.put(kStep, at::ones({4}));
  GetOptions into;
  into.into = {at::zeros({5})};
  EXPECT_THROW((void)trainer_.get(handle, into), InputError);
  into.into = {at::zeros({4})};
  EXPECT_TRUE(at::equal(trainer_.get(handle, into), at::ones({4})));
}

TEST_F(StoreTest, ATensorWithoutBytesIsRefused) {
  EXPECT_THROW((void)rollout_.put(kStep, at::Tensor()), InputError);
  const auto meta = at::empty({3}, at::TensorOptions().device(at::kMeta));
  EXPECT_THROW((void)rollout_.put(kStep, meta), InputError);
}

TEST_F(StoreTest, AHandleOfAnotherJobIsRefused) {
  auto other = options("rollout");
  other.job += "-other";
  Store stranger(other);
  const auto handle = stranger.put(kStep, at::ones({3}));
  EXPECT_THROW((void)trainer_.get(handle), AccessRefused);
}

TEST_F(StoreTest, OthersSeeItsFigures) {
  (void)rollout_.put(kStep, at::ones({100'000}));
  const auto part = part_named("store");
  ASSERT_NE(part, nullptr);
  const auto figures = part->stats();
  EXPECT_EQ(figures.front().first, "stored_bytes");
  EXPECT_GE(figures.front().second, 400'000);
}

TEST_F(StoreTest, OthersSeeWhatWentWrong) {
  (void)rollout_.close(kStep);
  (void)rollout_.put(kStep, at::ones({3}));
  const auto figures = part_named("store")->stats();
  const auto figure = [&](std::string_view name) {
    return std::ranges::find(figures, name, &std::pair<std::string, int64_t>::first)->second;
  };
  EXPECT_EQ(figure("dropped"), 1);
  EXPECT_EQ(figure("stale"), 0);
  EXPECT_EQ(figure("differences"), 0);
}

TEST_F(StoreTest, AForkedChildIsToldNothingOfItsParentsStore) {
  (void)rollout_.put(kStep, at::ones({3}));
  const pid_t child = ::fork();
  if (child == 0) {
    std::ostringstream said;
    part_named("store")->dump(said);
    ::_exit(part_named("store")->stats().empty() && said.str().empty() ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST_F(StoreTest, AnAddressIsLookedAtAlsoWhereNobodyComesIn) {
  auto listening = options("listening");
  for (const char* nonsense : {"nonsense", "::1:80", "127.0.0.1:65536"}) {
    listening.listen = nonsense;
    EXPECT_TRUE(says(what_of<InputError>([&] { const Store store(listening); }),
                     {nonsense, "not an address to listen on"}));
  }
}

// Closes scopes of others for a process that is stopped.
class LostDeletes : public ::testing::Test {
 protected:
  static StoreOptions impatient() {
    StoreOptions out;
    out.job = kJob;
    out.role = "controller";
    out.timeout = std::chrono::milliseconds(200);
    return out;
  }
  Closing close(int scope) { return controller_.close(step(scope)); }
  // Of an owner that never answers: connections to it are made, and nobody takes them.
  Handle silent(uint64_t incarnation, int scope) {
    auto origin = std::make_shared<Origin>(*handle_.origin);
    origin->owner.incarnation = incarnation;
    origin->path = folder_.path() + "/silent.sock";
    Handle handle = handle_;
    handle.origin = std::move(origin);
    handle.scope = step(scope);
    return handle;
  }

  TestFolder folder_;
  Socket silent_ = listen_local(folder_.path() + "/silent.sock");
  OwnerProcess owner_{{1000}};
  const Handle& handle_ = owner_.handles()[0];
  Store controller_{impatient()};
};

TEST_F(LostDeletes, OfAnotherScopeAreAskedForAgain) {
  controller_.adopt(step(2), {&handle_, 1});
  owner_.stop();
  EXPECT_EQ(close(2).unreached.size(), 1U);
  EXPECT_EQ(close(3).unreached.size(), 1U);
  owner_.go_on();
  EXPECT_TRUE(eventually([&, scope = 4]() mutable { return close(scope++).unreached.empty(); }));
  EXPECT_THROW((void)controller_.get(handle_), StaleHandle);
}

TEST_F(LostDeletes, AreNamedWhenTheyAreGivenUp) {
  controller_.adopt(step(1), {&handle_, 1});
  owner_.stop();
  for (int scope = 1; scope < 8; ++scope) {
    const auto unreached = close(scope).unreached;
    ASSERT_EQ(unreached.size(), 1U) << scope;
    EXPECT_EQ(unreached[0].why.find("not asked again"), std::string::npos) << scope;
  }
  const auto last = close(8).unreached;
  ASSERT_EQ(last.size(), 1U);
  EXPECT_TRUE(says(last[0].why, {"not asked again"}));
  EXPECT_TRUE(close(9).unreached.empty());
  owner_.go_on();
}

TEST_F(LostDeletes, OfAnOwnerWithoutARouteAreOneHoweverManyTheyAre) {
  auto away = std::make_shared<Origin>(*handle_.origin);
  ++away->host.network;
  away->address.clear();
  away->port = 0;
  std::vector<Handle> handles(1500, handle_);
  for (uint32_t i = 0; i < handles.size(); ++i) {
    handles[i].origin = away;
    handles[i].id.slot = i;
  }
  controller_.adopt(step(2), handles);
  for (int scope = 2; scope < 4; ++scope) {
    const auto unreached = close(scope).unreached;
    ASSERT_EQ(unreached.size(), 1U) << scope;
    EXPECT_TRUE(says(unreached[0].why, {"cannot be reached from here", "asked again"}));
  }
}

TEST_F(LostDeletes, OfSilentOwnersDoNotStarveThoseOfOthers) {
  for (uint64_t i = 1; i <= 40; ++i) {
    const Handle handle = silent(i, 1);
    controller_.adopt(step(2), {&handle, 1});
  }
  controller_.adopt(step(2), {&handle_, 1});
  owner_.stop();
  EXPECT_EQ(close(2).unreached.size(), 41U);
  owner_.go_on();
  auto owes = [&, scope = 3]() mutable {
    return std::ranges::any_of(close(scope++).unreached, [&](const Unreached& one) {
      EXPECT_TRUE(one.owner != handle_.origin->owner || says(one.why, {"is asked again"}));
      return one.owner == handle_.origin->owner;
    });
  };
  EXPECT_TRUE(eventually([&] { return !owes(); }));
  EXPECT_THROW((void)controller_.get(handle_), StaleHandle);
}

TEST_F(LostDeletes, TakeNoMoreThanTheTimeout) {
  for (int scope = 2; scope < 5; ++scope) {
    for (uint64_t i = 1; i <= 10; ++i) {
      const std::array both{silent(i, scope), silent(100 + i, 1)};
      controller_.adopt(step(scope), both);
    }
    const auto begun = std::chrono::steady_clock::now();
    EXPECT_FALSE(close(scope).unreached.empty());
    EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::milliseconds(330)) << scope;
  }
}

TEST(Tensors, ElementsAreReadInAnyPieces) {
  const auto base = at::arange(5 * 6 * 7, at::kFloat).view({5, 6, 7});
  for (const auto& view : {base.permute({2, 0, 1}), base.slice(1, 1, 6, 2), base.select(2, 3),
                           base.slice(0, 1, 2).expand({4, 6, 7}), base._neg_view()}) {
    const auto whole = view.resolve_neg().contiguous();
    const auto bytes = bytes_of(whole);
    for (const size_t elements : {1, 2, 5, 7, 43, 1000}) {
      std::vector<std::byte> read(bytes.size());
      const auto most = elements * sizeof(float);
      for (size_t offset = 0; offset < bytes.size(); offset += most) {
        const auto size = std::min(most, bytes.size() - offset);
        read_elements(view, offset, std::span(read).subspan(offset, size));
      }
      EXPECT_TRUE(std::ranges::equal(read, bytes)) << view.sizes() << " by " << elements;
    }
  }
}

}  // namespace
}  // namespace tenure::store
