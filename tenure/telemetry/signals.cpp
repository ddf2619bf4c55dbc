#include <tenure/telemetry/signals.h>

#include <tenure/core/error.h>
#include <tenure/core/fork.h>
#include <tenure/core/quiet_thread.h>

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <new>
#include <string>
#include <utility>

namespace tenure::telemetry {
namespace {

struct Course {
  struct sigaction before = {};
  std::atomic<bool> passing{false};  // the next one is ours, for `before`
};

// What a handler can reach. It lives for ever, and so does the pipe: a handler may still be running
// on some thread when everything else has ended.
struct Noted {
  std::array<Course, NSIG> courses;
  std::atomic<int> write_end{-1};
  int read_end = -1;
  std::atomic<pid_t> process{0};  // whose threads read the pipe
  std::atomic<bool> taken{false};
  std::atomic<bool> heeded{false};  // else the pipe has no reader
};

Noted& noted() {
  static auto* instance = new Noted;
  return *instance;
}
Noted* const kForHandlers = &noted();  // made before any handler runs

constexpr char kStop = 0;
// Nobody can take them, or they come of what the thread does and the thread cannot go on.
constexpr std::array kNever = {SIGKILL, SIGSTOP, SIGSEGV, SIGBUS, SIGFPE,
                               SIGILL,  SIGABRT, SIGTRAP, SIGSYS};

bool has_handler(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 ||
         (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN);
}

// On the thread that the kernel has chosen: async-signal-safe calls alone.
void take(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  auto& course = kForHandlers->courses[static_cast<size_t>(signal)];
  const auto& before = course.before;
  const bool inherited = kForHandlers->process.load(std::memory_order_relaxed) != getpid();
  const bool heeded = !inherited && kForHandlers->heeded.load(std::memory_order_relaxed);
  if (!heeded || course.passing.exchange(false)) {
    if ((before.sa_flags & SA_SIGINFO) != 0) {
      before.sa_sigaction(signal, info, context);
    } else if (has_handler(before)) {
      before.sa_handler(signal);
    } else {
      sigaction(signal, &before, nullptr);
      raise(signal);  // taken when this handler returns
    }
  } else {
    const auto note = static_cast<char>(signal);
    // The pipe holds thousands: if it is full there is no lack of notes.
    [[maybe_unused]] const auto written = write(kForHandlers->write_end.load(), &note, 1);
  }
  errno = error;
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == take;
}

// The signal takes the course that it would have taken without us.
void pass_on(int signal) {
  auto& course = noted().courses[static_cast<size_t>(signal)];
  if (has_handler(course.before)) {
    course.passing = true;
    kill(getpid(), signal);  // not raise(): the kernel prefers the main thread, as it did before
    return;
  }
  struct sigaction now = {};
  sigaction(signal, &course.before, &now);
  sigset_t one;
  sigemptyset(&one);
  sigaddset(&one, signal);
  pthread_sigmask(SIG_UNBLOCK, &one, nullptr);
  raise(signal);
  // The default action did not end the process: SIGCONT, SIGTSTP.
  pthread_sigmask(SIG_BLOCK, &one, nullptr);
  sigaction(signal, &now, nullptr);
}

void check(const std::vector<int>& signals) {
  for (const int signal : signals) {
    if (signal <= 0 || signal >= NSIG) {
      throw InputError("there is no signal " + std::to_string(signal));
    }
    if (std::ranges::find(kNever, signal) != kNever.end()) {
      throw InputError("signal " + std::to_string(signal) +
                       " leaves no time to do anything before it: choose among SIGTERM, SIGINT, "
                       "SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGXCPU");
    }
  }
}

// A child has its parent's pipe, whose other end is the parent's.
void open_pipe() {
  auto& all = noted();
  if (all.process == getpid()) {
    return;
  }
  std::array<int, 2> ends = {-1, -1};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw Error("cannot take signals: no pipe can be made; raise the limit of open files");
  }
  fcntl(ends[1], F_SETFL, O_NONBLOCK);  // a handler never waits
  all.read_end = ends[0];
  all.write_end = ends[1];
  all.process = getpid();
}

}  // namespace

Signals::Signals(std::vector<int> signals, Before before)
    : signals_(std::move(signals)), before_(std::move(before)), generation_(fork_generation()) {
  check(signals_);
  auto& all = noted();
  if (all.process != getpid()) {
    all.taken = false;  // a parent's
  }
  if (all.taken.exchange(true)) {
    throw InputError("signals are taken already in this process: close the other recorder first");
  }
  try {
    open_pipe();
    thread_ =
        std::make_unique<std::jthread>(quiet_thread("the signals' thread", [this] { run(); }));
  } catch (...) {
    all.taken = false;
    throw;
  }
  all.heeded = true;
  install();
}

Signals::~Signals() {
  put_back();
  noted().heeded = false;  // whoever put a handler over ours may still call it
  if (generation_ != fork_generation()) {
    [[maybe_unused]] auto* parents = thread_.release();  // there is no such thread here
    return;
  }
  // The pipe is empty enough for this: its reader runs.
  while (write(noted().write_end, &kStop, 1) < 0 && errno == EAGAIN) {
    std::this_thread::yield();
  }
  thread_.reset();
  noted().taken = false;
}

void Signals::install() {
  std::erase_if(signals_, [](int signal) {
    auto& course = noted().courses[static_cast<size_t>(signal)];
    sigaction(signal, nullptr, &course.before);
    course.passing = false;
    if (!has_handler(course.before) && course.before.sa_handler == SIG_IGN) {
      return true;
    }
    struct sigaction ours = {};
    ours.sa_sigaction = take;
    ours.sa_mask = course.before.sa_mask;
    // Calls are interrupted where the handler that was there would have interrupted them: Python's
    // does, so that a sleep() ends. Without one nothing is to be noticed of ours.
    const int restart =
        has_handler(course.before) ? course.before.sa_flags & SA_RESTART : SA_RESTART;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | restart;
    sigaction(signal, &ours, nullptr);
    return false;
  });
}

void Signals::put_back() const {
  for (const int signal : signals_) {
    struct sigaction now = {};
    sigaction(signal, nullptr, &now);
    if (is_ours(now)) {
      sigaction(signal, &noted().courses[static_cast<size_t>(signal)].before, nullptr);
    }
  }
}

void Signals::run() const {
  pthread_setname_np(pthread_self(), "tenure-signals");
  char note = kStop;
  while (true) {
    const auto got = read(noted().read_end, &note, 1);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got != 1 || note == kStop) {
      return;
    }
    try {
      before_(note);
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): it takes its course
    }
    pass_on(note);
  }
}

}  // namespace tenure::telemetry
