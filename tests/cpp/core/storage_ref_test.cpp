#include <tenure/core/storage_ref.h>

#include <tenure/core/error.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <array>
#include <random>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace tenure {
namespace {

at::Tensor tensor_of(int64_t bytes) { return at::empty({bytes}, at::kByte); }

// Sizes of a training step: scalars, biases, activations, and some that malloc takes from the
// system each time.
int64_t some_size(std::mt19937& random) {
  constexpr std::array<int64_t, 8> sizes{1, 64, 100, 512, 4096, 10'000, 65'536, 200'000};
  return sizes[random() % sizes.size()];
}

// Allocates and frees, a few tensors being alive at any time, and calls `see` with each new one.
template <class See>
void churn(size_t rounds, See see) {
  std::mt19937 random(0);
  std::vector<at::Tensor> alive(16);
  for (size_t i = 0; i < rounds; ++i) {
    auto& place = alive[random() % alive.size()];
    place = at::Tensor();
    place = tensor_of(some_size(random));
    see(place);
  }
}

constexpr size_t kRounds = 1'000'000;

// ASan gives no address out again for a long time: there is then nothing to be confused by.
#ifdef __SANITIZE_ADDRESS__
constexpr bool kAddressesComeBack = false;
#else
constexpr bool kAddressesComeBack = true;
#endif

// What makes the next test one: left alone, the allocator gives out both kinds of address again.
TEST(AddressReuse, TheAllocatorUsesAddressesAgain) {
  std::unordered_set<const void*> data;
  std::unordered_set<const void*> storages;
  churn(100'000, [&](const at::Tensor& tensor) {
    data.insert(tensor.const_data_ptr());
    storages.insert(tensor.storage().unsafeGetStorageImpl());
  });
  EXPECT_TRUE(data.size() < 10'000 || !kAddressesComeBack) << data.size();
  EXPECT_TRUE(storages.size() < 10'000 || !kAddressesComeBack) << storages.size();
}

TEST(AddressReuse, NoRefEverEqualsThatOfAnotherStorage) {
  std::unordered_set<StorageRef> all;
  std::unordered_set<const void*> data;
  all.reserve(kRounds);
  std::vector<StorageRef> window(16);  // compared one by one, besides what the hash finds
  size_t equal = 0;
  churn(kRounds, [&](const at::Tensor& tensor) {
    const StorageRef ref(tensor);
    for (const auto& other : window) {
      equal += other == ref ? 1 : 0;
    }
    window[all.size() % window.size()] = ref;
    all.insert(ref);
    data.insert(tensor.const_data_ptr());
  });
  EXPECT_EQ(equal, 0);
  EXPECT_EQ(all.size(), kRounds);
  // Many small blocks are taken by the million StorageImpls that the refs keep; the others come
  // back as data.
  EXPECT_TRUE(kRounds - data.size() > kRounds / 10 || !kAddressesComeBack) << data.size();
}

// A map by address is what TRL's activation offloading had, and it took new storages for old ones.
TEST(AddressReuse, AMapByRefDoesNotFindOldEntriesForNewStorages) {
  std::unordered_map<StorageRef, size_t> by_ref;
  std::unordered_map<const void*, size_t> by_address;
  size_t found_by_ref = 0;
  size_t found_by_address = 0;
  churn(10'000, [&](const at::Tensor& tensor) {
    found_by_ref += by_ref.contains(StorageRef(tensor)) ? 1 : 0;
    found_by_address += by_address.contains(tensor.const_data_ptr()) ? 1 : 0;
    by_ref.emplace(StorageRef(tensor), by_ref.size());
    by_address.emplace(tensor.const_data_ptr(), by_address.size());
  });
  EXPECT_EQ(found_by_ref, 0);
  EXPECT_TRUE(found_by_address > 1000 || !kAddressesComeBack) << found_by_address;
}

TEST(StorageRef, AliasesAreOneStorage) {
  const auto x = at::zeros({4, 4});
  EXPECT_EQ(StorageRef(x), StorageRef(x.t()));
  EXPECT_EQ(StorageRef(x), StorageRef(x.select(0, 3)));
  EXPECT_EQ(StorageRef(x), StorageRef(x.detach()));
  EXPECT_EQ(StorageRef(x), StorageRef(x.storage()));
  EXPECT_EQ(StorageRef(x).hash(), StorageRef(x.t()).hash());
  EXPECT_FALSE(StorageRef(x) == StorageRef(at::zeros({4, 4})));
}

TEST(StorageRef, DeadRefsOfDifferentStoragesDiffer) {
  const StorageRef first(tensor_of(64));
  const StorageRef second(tensor_of(64));
  EXPECT_FALSE(first.alive());
  EXPECT_FALSE(second.alive());
  EXPECT_FALSE(first == second);
  EXPECT_TRUE(first == StorageRef(first));
}

TEST(StorageRef, DoesNotKeepTheDataAlive) {
  auto x = tensor_of(4096);
  const StorageRef ref(x);
  EXPECT_EQ(x.storage().use_count(), 1);
  EXPECT_TRUE(ref.alive());
  EXPECT_EQ(ref.nbytes(), 4096);
  x = at::Tensor();
  EXPECT_FALSE(ref.alive());
  EXPECT_EQ(ref.nbytes(), 0);
  EXPECT_FALSE(ref.lock().has_value());
}

TEST(StorageRef, LockKeepsItAlive) {
  auto x = tensor_of(4096);
  const StorageRef ref(x);
  auto locked = ref.lock();
  x = at::Tensor();
  EXPECT_TRUE(ref.alive());
  EXPECT_EQ(locked->nbytes(), 4096);
  locked.reset();
  EXPECT_FALSE(ref.alive());
}

TEST(StorageRef, KnowsItsDeviceWhenDead) {
  EXPECT_EQ(StorageRef(tensor_of(1)).device(), c10::Device(c10::kCPU));
}

TEST(StorageRef, OfNoStorageIsNeverAlive) {
  const StorageRef none;
  EXPECT_FALSE(none.alive());
  EXPECT_FALSE(none.lock().has_value());
  EXPECT_EQ(none.nbytes(), 0);
  EXPECT_EQ(none, StorageRef());
  EXPECT_FALSE(none == StorageRef(tensor_of(1)));
}

TEST(StorageRef, TextSaysHowLargeOrThatItIsDead) {
  auto x = tensor_of(4096);
  const StorageRef ref(x);
  EXPECT_TRUE(ref.text().ends_with("(4.0 KiB on cpu)")) << ref.text();
  x = at::Tensor();
  EXPECT_TRUE(ref.text().ends_with("(dead)")) << ref.text();
}

std::string refusal(const at::Tensor& tensor) {
  try {
    storage_of(tensor, "leased");
  } catch (const LeaseError& error) {
    return error.what();
  }
  return "";
}

TEST(StorageOf, RefusesTensorsWithoutStorageAndSaysWhy) {
  EXPECT_EQ(refusal(at::Tensor()), "this tensor cannot be leased: it is undefined (None)");
  EXPECT_NE(refusal(at::empty({4}, at::kMeta)).find("meta device"), std::string::npos);
  EXPECT_NE(refusal(at::eye(4).to_sparse()).find("sparse"), std::string::npos);
  EXPECT_EQ(refusal(at::zeros({4})), "");
}

TEST(StorageOf, AcceptsTensorsWithoutElements) { EXPECT_EQ(refusal(at::zeros({0})), ""); }

TEST(DeviceTag, ComesBackAsItWas) {
  for (const auto device : {c10::Device(c10::kCPU), c10::Device(c10::kCUDA, 7),
                            c10::Device(c10::kPrivateUse1, 1), c10::Device(c10::kCUDA)}) {
    EXPECT_EQ(device_from_tag(device_tag(device)), device);
  }
}

}  // namespace
}  // namespace tenure
