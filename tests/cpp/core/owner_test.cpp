#include <tenure/core/owner.h>

#include <tenure/core/error.h>
#include <tenure/core/names.h>

#include <gtest/gtest.h>

#include <set>

namespace tenure {
namespace {

TEST(Owner, EqualOwnersHaveEqualIds) {
  const auto id = intern_owner(OwnerKind::activation, "mlp", "a.py:1");
  EXPECT_EQ(intern_owner(OwnerKind::activation, "mlp", "a.py:1"), id);
  EXPECT_NE(intern_owner(OwnerKind::gradient, "mlp", "a.py:1"), id);
  EXPECT_NE(intern_owner(OwnerKind::activation, "attention", "a.py:1"), id);
  EXPECT_NE(intern_owner(OwnerKind::activation, "mlp", "a.py:2"), id);
}

TEST(Owner, CostsFourBytesAndCarriesItsKind) {
  static_assert(sizeof(OwnerId) == 4);
  std::set<OwnerId> ids;
  for (size_t kind = 0; kind < kOwnerKinds; ++kind) {
    const auto id = intern_owner(static_cast<OwnerKind>(kind), "same name");
    EXPECT_EQ(kind_of(id), static_cast<OwnerKind>(kind));
    ids.insert(id);
  }
  EXPECT_EQ(ids.size(), kOwnerKinds);
}

TEST(Owner, ComesBackAsItWas) {
  const auto owner = owner_of(intern_owner(OwnerKind::host_copy, "layers.3", "train.py:41"));
  EXPECT_EQ(owner.kind, OwnerKind::host_copy);
  EXPECT_EQ(owner.name, "layers.3");
  EXPECT_EQ(owner.site, "train.py:41");
}

TEST(Owner, TextNamesAllOfIt) {
  EXPECT_EQ(owner_text(intern_owner(OwnerKind::user, "cache", "a.py:4")), "user 'cache' (a.py:4)");
  EXPECT_EQ(owner_text(intern_owner(OwnerKind::user, "cache")), "user 'cache'");
}

TEST(Owner, EveryKindHasItsOwnName) {
  for (size_t kind = 0; kind < kOwnerKinds; ++kind) {
    const auto name = kind_name(static_cast<OwnerKind>(kind));
    EXPECT_EQ(kind_named(name), static_cast<OwnerKind>(kind)) << name;
  }
}

TEST(Owner, AnUnknownKindIsRefusedWithTheKnownOnes) {
  try {
    kind_named("weights");
    FAIL() << "accepted";
  } catch (const InputError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("unknown owner kind 'weights'"), std::string::npos) << text;
    EXPECT_NE(text.find("parameter, gradient, optimizer, activation, host_copy"),
              std::string::npos);
  }
}

TEST(Owner, ABadNameIsRefused) {
  EXPECT_THROW(intern_owner(OwnerKind::user, ""), InputError);
  EXPECT_THROW(intern_owner(OwnerKind::user, "a\nb"), InputError);
  EXPECT_THROW(intern_owner(OwnerKind::user, std::string(10'000, 'x')), InputError);
}

TEST(Owner, AnIdThatWasNeverGivenIsRefused) {
  EXPECT_THROW(owner_of(OwnerId{99'999'999}), InputError);
  EXPECT_THROW(owner_of(OwnerId{0xffffffff}), InputError);
}

TEST(Owner, ASiteIsMendedInsteadOfRefused) {
  const auto site = [](const std::string& given) {
    return owner_of(intern_owner(OwnerKind::user, "test", given)).site;
  };
  EXPECT_EQ(site("a\nb.py:1"), "a?b.py:1");
  EXPECT_EQ(site("a\xe2\x80\xa8\xc2\x85"
                 "b.py:1"),
            "a??b.py:1");
  const auto cut = site(std::string(1000, '/') + "train.py:41");
  EXPECT_EQ(cut.size(), kLongestName);
  EXPECT_TRUE(cut.ends_with("/train.py:41"));
}

}  // namespace
}  // namespace tenure
