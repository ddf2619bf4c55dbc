#include <tenure/store/identity.h>

#include <tenure/core/error.h>

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <ctime>
#include <set>
#include <string>

namespace tenure::store {
namespace {

const Member kTrainer{.role = "trainer", .rank = 3, .incarnation = 7};

Origin origin() {
  return {.job = "job",
          .owner = kTrainer,
          .host = {},
          .path = "/run/socket",
          .address = "127.0.0.1",
          .port = 4000};
}

template <class Check>
std::string complaint(const Check& check) {
  try {
    check();
  } catch (const InputError& error) {
    return error.what();
  }
  return {};
}

TEST(Identity, TextsAreWhatPeopleSay) {
  EXPECT_EQ(member_text(kTrainer), "trainer 3");
  EXPECT_EQ(scope_text({.kind = "step", .id = "168"}), "step 168");
  EXPECT_EQ(scope_text({.kind = "eval", .id = ""}), "eval");
}

TEST(Identity, AProcessIsAlwaysOnItsOwnHost) {
  const Host host = this_host();
  EXPECT_EQ(host, this_host());
  EXPECT_EQ(host.user, geteuid());
  EXPECT_NE(host.network, 0);
  EXPECT_NE(host.boot, decltype(host.boot){});
}

TEST(Identity, AForkedChildIsOnTheSameHost) {
  const Host host = this_host();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    _exit(this_host() == host ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(Identity, IncarnationsDiffer) {
  std::set<uint64_t> seen;
  for (int i = 0; i < 1000; ++i) {
    seen.insert(new_incarnation());
  }
  EXPECT_EQ(seen.size(), 1000);
  EXPECT_FALSE(seen.contains(0));
}

TEST(Identity, TimesAreReadInTheZoneOfTheReader) {
  const char* before = std::getenv("TZ");
  const std::string kept = before == nullptr ? "" : before;
  setenv("TZ", "UTC-2", 1);
  tzset();
  EXPECT_EQ(time_text(0), "1970-01-01 02:00:00");
  EXPECT_EQ(time_text(1'794'751'402'999), "2026-11-15 16:03:22");
  EXPECT_EQ(time_text(-1), "1970-01-01 01:59:59");
  if (before == nullptr) {
    unsetenv("TZ");
  } else {
    setenv("TZ", kept.c_str(), 1);
  }
  tzset();
}

TEST(Identity, AMemberOfTheLargestSizesIsOne) {
  EXPECT_NO_THROW(
      check_member({.role = std::string(64, 'r'), .rank = INT32_MAX, .incarnation = 1}));
  EXPECT_NO_THROW(check_member({.role = "übersetzer", .rank = 0, .incarnation = UINT64_MAX}));
}

TEST(Identity, AMemberThatCannotBeIsNamed) {
  const auto with = [](auto change) {
    Member member = kTrainer;
    change(member);
    return complaint([&] { check_member(member); });
  };
  EXPECT_EQ(with([](Member& m) { m.role = ""; }), "the role is empty: give it a name");
  EXPECT_EQ(with([](Member& m) { m.role = "a:b"; }),
            "the role 'a:b' has a ':' in it: leave it out");
  EXPECT_EQ(with([](Member& m) { m.role = std::string(65, 'r'); }),
            "the role '" + std::string(40, 'r') + "...' has 65 bytes: at most 64 are allowed");
  EXPECT_EQ(with([](Member& m) { m.role = "a\nb"; }),
            "the role 'a\nb' is not UTF-8, or has control characters in it");
  EXPECT_EQ(with([](Member& m) { m.rank = -1; }),
            "the rank of trainer is -1: ranks are counted from 0");
  EXPECT_EQ(with([](Member& m) { m.incarnation = 0; }),
            "trainer 3 has incarnation 0: new_incarnation() gives one");
}

TEST(Identity, AJobHasAName) {
  EXPECT_NO_THROW(check_job(std::string(128, 'j')));
  EXPECT_THROW(check_job(std::string(129, 'j')), InputError);
  EXPECT_THROW(check_job(""), InputError);
  EXPECT_THROW(check_job("\xff"), InputError);
}

TEST(Identity, AScopeHasAKindAndMayHaveAnId) {
  EXPECT_NO_THROW(check_scope({.kind = "eval", .id = ""}));
  EXPECT_NO_THROW(check_scope({.kind = std::string(64, 'k'), .id = std::string(128, 'i')}));
  EXPECT_THROW(check_scope({.kind = "", .id = "1"}), InputError);
  EXPECT_THROW(check_scope({.kind = std::string(65, 'k'), .id = ""}), InputError);
  EXPECT_THROW(check_scope({.kind = "step", .id = std::string(129, 'i')}), InputError);
  EXPECT_THROW(check_scope({.kind = "step", .id = "\x1b"}), InputError);
}

TEST(Identity, AnOriginIsWhereSomebodyCanBeReached) {
  const auto with = [](auto change) {
    Origin changed = origin();
    change(changed);
    return complaint([&] { check_origin(changed); });
  };
  EXPECT_EQ(with([](Origin&) {}), "");
  EXPECT_EQ(with([](Origin& o) { o.path = "socket"; }),
            "the path of a socket 'socket' does not begin with '/'");
  EXPECT_NE(with([](Origin& o) { o.path = "/" + std::string(107, 'p'); }), "");
  EXPECT_NE(with([](Origin& o) { o.address = std::string(254, 'a'); }), "");
  EXPECT_EQ(with([](Origin& o) { o.port = 0; }),
            "the address '127.0.0.1' goes with port 0: there are both or neither");
  EXPECT_EQ(with([](Origin& o) { o.address = ""; }),
            "the address '' goes with port 4000: there are both or neither");
}

}  // namespace
}  // namespace tenure::store
