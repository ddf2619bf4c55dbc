#include <tenure/telemetry/signals.h>

#include <tenure/core/error.h>

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <future>
#include <string>
#include <thread>

namespace tenure::telemetry {
namespace {

using testing::KilledBySignal;

std::atomic<int> handled{0};
std::atomic<bool> handled_on_main{false};
pid_t main_thread = 0;

void count(int) {
  ++handled;
  handled_on_main = gettid() == main_thread;
}

class SignalsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    handled = 0;
    main_thread = getpid();
    std::signal(SIGUSR1, SIG_DFL);
  }
  void TearDown() override { std::signal(SIGUSR1, SIG_DFL); }

  static struct sigaction now(int signal) {
    struct sigaction action = {};
    sigaction(signal, nullptr, &action);
    return action;
  }
};

void say(const char* text) {
  [[maybe_unused]] const auto written = write(STDERR_FILENO, text, strlen(text));
}

TEST_F(SignalsTest, DefaultActionComesAfterWhatIsDoneBefore) {
  EXPECT_EXIT(
      {
        const Signals signals({SIGTERM}, [](int) { say("before"); });
        kill(getpid(), SIGTERM);
        while (true) {
          pause();
        }
      },
      KilledBySignal(SIGTERM), "before");
}

TEST_F(SignalsTest, DefaultActionComesAlsoWhenAllOtherThreadsBlockIt) {
  EXPECT_EXIT(
      {
        const Signals signals({SIGTERM}, [](int) {
          sigset_t one;
          sigemptyset(&one);
          sigaddset(&one, SIGTERM);
          pthread_sigmask(SIG_BLOCK, &one, nullptr);
        });
        kill(getpid(), SIGTERM);
        sigset_t one;
        sigemptyset(&one);
        sigaddset(&one, SIGTERM);
        pthread_sigmask(SIG_BLOCK, &one, nullptr);
        while (true) {
          pause();
        }
      },
      KilledBySignal(SIGTERM), "");
}

TEST_F(SignalsTest, HandlerThatWasThereRunsOnTheMainThread) {
  std::signal(SIGUSR1, count);
  std::promise<int> before;
  const Signals signals({SIGUSR1}, [&](int signal) {
    EXPECT_EQ(handled, 0);
    before.set_value(signal);
  });
  kill(getpid(), SIGUSR1);
  EXPECT_EQ(before.get_future().get(), SIGUSR1);
  while (handled == 0) {
    std::this_thread::yield();
  }
  EXPECT_EQ(handled, 1);
  EXPECT_TRUE(handled_on_main);
}

TEST_F(SignalsTest, IgnoredSignalsStayIgnored) {
  std::signal(SIGUSR1, SIG_IGN);
  const Signals signals({SIGUSR1}, [](int) { ADD_FAILURE(); });
  EXPECT_EQ(now(SIGUSR1).sa_handler, SIG_IGN);
}

TEST_F(SignalsTest, EndPutsBackWhatWasThere) {
  std::signal(SIGUSR1, count);
  {
    const Signals signals({SIGUSR1}, [](int) {});
  }
  EXPECT_EQ(now(SIGUSR1).sa_handler, count);
}

TEST_F(SignalsTest, EndLeavesWhatOthersPutOverOurs) {
  {
    const Signals signals({SIGUSR1}, [](int) {});
    std::signal(SIGUSR1, count);
  }
  EXPECT_EQ(now(SIGUSR1).sa_handler, count);
}

struct sigaction below = {};

void pass_below(int signal, siginfo_t* info, void* context) {
  below.sa_sigaction(signal, info, context);
}

// As libraries do that chain: the signal takes its course also when ours has ended.
TEST_F(SignalsTest, EndLeavesOthersACourseBelowTheirs) {
  std::signal(SIGUSR1, count);
  {
    const Signals signals({SIGUSR1}, [](int) {});
    struct sigaction over = {};
    over.sa_sigaction = pass_below;
    over.sa_flags = SA_SIGINFO;
    sigaction(SIGUSR1, &over, &below);
  }
  raise(SIGUSR1);
  EXPECT_EQ(handled, 1);
}

TEST_F(SignalsTest, OneAtATime) {
  const Signals signals({SIGUSR1}, [](int) {});
  EXPECT_THROW(Signals({SIGUSR2}, [](int) {}), InputError);
}

TEST_F(SignalsTest, OneAfterTheOther) {
  {
    const Signals signals({SIGUSR1}, [](int) {});
  }
  EXPECT_NO_THROW(Signals({SIGUSR1}, [](int) {}));
}

TEST_F(SignalsTest, RefusesWhatLeavesNoTime) {
  EXPECT_THROW(Signals({SIGKILL}, [](int) {}), InputError);
  EXPECT_THROW(Signals({SIGSEGV}, [](int) {}), InputError);
  EXPECT_THROW(Signals({0}, [](int) {}), InputError);
  EXPECT_NO_THROW(Signals({SIGUSR1}, [](int) {}));  // nothing was left taken
}

TEST_F(SignalsTest, ForkedChildDiesOfItsOwnAndItsParentHearsNothing) {
  const Signals signals({SIGUSR1}, [](int) { ADD_FAILURE(); });
  const pid_t child = fork();
  if (child == 0) {
    kill(getpid(), SIGUSR1);
    _exit(1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGUSR1);
}

TEST_F(SignalsTest, ForkedChildHasTheHandlerThatWasThere) {
  std::signal(SIGUSR1, count);
  const Signals signals({SIGUSR1}, [](int) { ADD_FAILURE(); });
  const pid_t child = fork();
  if (child == 0) {
    kill(getpid(), SIGUSR1);
    _exit(handled == 1 ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace tenure::telemetry
