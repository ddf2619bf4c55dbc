#include "threads.h"

#include "frames.h"
#include <tenure/core/kernel_file.h>

#include <dlfcn.h>
#include <link.h>
#include <opcode.h>
#include <sys/syscall.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace tenure::python {
namespace {

constexpr auto kLong = std::chrono::seconds(2);

// The interpreter's state, of which the GIL is a part.
struct Range {
  uintptr_t begin = 0, end = 0;
  bool contains(uintptr_t address) const { return begin <= address && address < end; }
};
Range interpreter_state() {
  auto* address = dlsym(RTLD_DEFAULT, "_PyRuntime");
  Dl_info info{};
  void* symbol = nullptr;
  if (address == nullptr || dladdr1(address, &info, &symbol, RTLD_DL_SYMENT) == 0 ||
      symbol == nullptr) {
    return {};
  }
  const auto begin = reinterpret_cast<uintptr_t>(address);
  return {begin, begin + static_cast<const ElfW(Sym)*>(symbol)->st_size};
}

// Calls in which no operator waits: for time, files, sockets, processes.
constexpr auto kOutside = std::to_array<int64_t>({
    SYS_nanosleep,
    SYS_clock_nanosleep,
    SYS_ppoll,
    SYS_pselect6,
    SYS_epoll_pwait,
    SYS_read,
    SYS_recvfrom,
    SYS_recvmsg,
    SYS_accept,
    SYS_accept4,
    SYS_wait4,
    SYS_waitid,
    SYS_rt_sigtimedwait,
#ifdef SYS_poll
    SYS_poll,
    SYS_select,
    SYS_epoll_wait,
#endif
});

std::string task_file(unsigned long thread, const char* name) {
  return read_kernel_file("/proc/self/task/" + std::to_string(thread) + "/" + name);
}

// Whether it waits where it can do no harm: for the GIL, or outside. Where the kernel does not
// tell, it does not: it may be in the middle of an operator.
bool waits_safely(unsigned long thread) {
  static const auto state = interpreter_state();
  const auto text = task_file(thread, "syscall");  // "98 0xffff8a2c 0x189 …", or "running"
  const auto call = leading_number(text);
  if (!call) {
    return false;
  }
  uintptr_t address = 0;
  if (const auto at = text.find(" 0x"); at != std::string::npos) {
    std::from_chars(text.data() + at + 3, text.data() + text.size(), address, 16);
  }
  return std::ranges::find(kOutside, *call) != kOutside.end() ||
         (*call == SYS_futex && state.contains(address));
}

struct Place {
  bool in_engine = false;
  bool sets_attribute = false;
  bool in_library = true;  // or nowhere in Python
};
// As written: the interpreter's own copy of the code may have a faster one in its place.
int operation_at(PyCodeObject* code, int instruction) {
  auto* bytes = PyCode_GetCode(code);
  if (bytes == nullptr) {
    PyErr_Clear();
    return -1;
  }
  const auto at = Py_ssize_t{instruction} * 2;
  const bool inside = at >= 0 && at < PyBytes_GET_SIZE(bytes);
  const int found = inside ? static_cast<unsigned char>(PyBytes_AS_STRING(bytes)[at]) : -1;
  Py_DECREF(bytes);
  return found;
}
bool is_of_library(PyCodeObject* code, const std::string& library) {
  const auto* file = PyUnicode_AsUTF8(code->co_filename);
  if (file == nullptr) {
    PyErr_Clear();
    return false;
  }
  const std::string_view name(file);
  return name.starts_with("<frozen ") ||
         (name.starts_with(library) && name.find("-packages/") == std::string_view::npos);
}
Place place_of(PyThreadState* thread, const std::string& engine, const std::string& library) {
  Place out;
  bool innermost = true;
  each_local(thread, [&](PyCodeObject* code, int instruction, PyObject**, int) {
    const int operation = operation_at(code, instruction);
    if (std::exchange(innermost, false)) {
      // f(*arguments) is how it calls what others gave it: an operator, for a pool of threads.
      out.in_library = operation != CALL_FUNCTION_EX && is_of_library(code, library);
    }
    out.sets_attribute = out.sets_attribute || operation == STORE_ATTR || operation == DELETE_ATTR;
    out.in_engine =
        out.in_engine || PyUnicode_CompareWithASCIIString(code->co_filename, engine.c_str()) == 0;
  });
  return out;
}

// Since when threads have slept, as far as was seen: they were not given a processor in between.
class Sleepers {
 public:
  // Whether a thread, of which the kernel says `status`, has slept for long.
  bool long_asleep(unsigned long thread, const std::string& status) {
    const auto now = std::chrono::steady_clock::now();
    // At the start of a line: another one ends the same way.
    const auto at = std::min(status.find("\nvoluntary_ctxt_switches:"), status.size() - 1);
    const auto switches = number_after("voluntary_ctxt_switches:", status.substr(at + 1));
    if (!switches) {
      return false;
    }
    const auto before = before_.find(thread);
    const bool same = before != before_.end() && before->second.switches == *switches;
    const auto since = same ? before->second.since : now;
    seen_.emplace(thread, Sleep{*switches, since});
    return now - since > kLong;
  }
  // Threads that were not asked about since the last time are forgotten.
  void next() { before_ = std::exchange(seen_, {}); }

 private:
  struct Sleep {
    int64_t switches;
    std::chrono::steady_clock::time_point since;
  };
  std::unordered_map<unsigned long, Sleep> before_, seen_;
};

bool rests(PyThreadState* thread, const Place& place, Sleepers& sleepers) {
  const auto status = task_file(thread->native_thread_id, "status");
  if (status.empty()) {
    return true;  // it has ended, or is not of this process: a forked one has the records of others
  }
  if (status.find("\nState:\tS") == std::string::npos) {
    return false;
  }
  const bool is_long = sleepers.long_asleep(thread->native_thread_id, status);
  return is_long || place.in_library || waits_safely(thread->native_thread_id);
}

}  // namespace

bool others_change_gradients(const std::string& engine) {
  auto* own = PyThreadState_Get();
  bool any = false;
  for (auto* thread = PyInterpreterState_ThreadHead(PyInterpreterState_Get()); thread != nullptr;
       thread = PyThreadState_Next(thread)) {
    const auto place = thread == own ? Place() : place_of(thread, engine, "");
    any = any || place.in_engine || place.sets_attribute;
  }
  return any;
}

bool others_rest(const std::string& engine, const std::string& library) {
  static auto* sleepers = new Sleepers;  // used with the GIL only
  auto* own = PyThreadState_Get();
  bool all = true;
  for (auto* thread = PyInterpreterState_ThreadHead(PyInterpreterState_Get()); thread != nullptr;
       thread = PyThreadState_Next(thread)) {
    const auto place = place_of(thread, engine, library);
    const bool resting = thread == own || rests(thread, place, *sleepers);
    all = all && resting && !place.in_engine && !place.sets_attribute;
  }
  sleepers->next();
  return all;
}

}  // namespace tenure::python
