// The calling thread's Python frames, read by that thread itself and without the GIL. See Note
// [Where a storage comes from] for why that is sound. Everything that is read here is immutable
// while the frame lives (code objects, their names and line tables) or belongs to this thread.
#define Py_BUILD_CORE  // frames are reached through CPython's own headers
#include "frames.h"

#include <tenure/core/names.h>
#include <tenure/core/text.h>
#include <tenure/inspect/frames.h>

#include <internal/pycore_code.h>
#include <internal/pycore_frame.h>

#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#undef Py_BUILD_CORE

using tenure::NameId;
using tenure::inspect::Depth;
using tenure::inspect::FrameInfo;

namespace {

_PyInterpreterFrame* innermost(PyThreadState* thread) {
#if PY_VERSION_HEX >= 0x030D0000
  return thread->current_frame;
#else
  return thread->cframe == nullptr ? nullptr : thread->cframe->current_frame;
#endif
}

// Null for frames that run no code of Python's: the interpreter's own entry frames.
PyCodeObject* code_of(const _PyInterpreterFrame* frame) {
#if PY_VERSION_HEX >= 0x030D0000
  auto* code = frame->f_executable;
  return code != nullptr && PyCode_Check(code) ? reinterpret_cast<PyCodeObject*>(code) : nullptr;
#elif PY_VERSION_HEX >= 0x030C0000
  return frame->owner == FRAME_OWNED_BY_CSTACK ? nullptr : frame->f_code;
#else
  return frame->f_code;
#endif
}

bool finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// A str as UTF-8 without the cache that PyUnicode_AsUTF8 would write to it.
std::string utf8(PyObject* object) {
  std::string out;
  if (object == nullptr || !PyUnicode_Check(object)) {
    return out;
  }
  const auto kind = PyUnicode_KIND(object);
  const auto* data = PyUnicode_DATA(object);
  const auto length = PyUnicode_GET_LENGTH(object);
  out.reserve(static_cast<size_t>(length));
  for (Py_ssize_t i = 0; i < length; ++i) {
    const Py_UCS4 c = PyUnicode_READ(kind, data, i);
    if (c < 0x80) {
      out += static_cast<char>(c);
    } else if (c < 0x800) {
      out += static_cast<char>(0xC0 | (c >> 6));
      out += static_cast<char>(0x80 | (c & 0x3F));
    } else if (c < 0x10000) {
      out += static_cast<char>(0xE0 | (c >> 12));
      out += static_cast<char>(0x80 | ((c >> 6) & 0x3F));
      out += static_cast<char>(0x80 | (c & 0x3F));
    } else {
      out += static_cast<char>(0xF0 | (c >> 18));
      out += static_cast<char>(0x80 | ((c >> 12) & 0x3F));
      out += static_cast<char>(0x80 | ((c >> 6) & 0x3F));
      out += static_cast<char>(0x80 | (c & 0x3F));
    }
  }
  return out;
}

enum class CodeKind : uint8_t {
  unknown,
  user,
  library,
  torch,
  optimizer,
  communication,
  module_call
};

// Written once, before the first look.
struct Places {
  std::string torch;                 // its package folder, with a slash at the end
  std::vector<std::string> library;  // other folders that are not the user's
  PyCodeObject* module_call = nullptr;
};
const Places* places = nullptr;

CodeKind kind_of(PyCodeObject* code) {
  if (code == places->module_call) {
    return CodeKind::module_call;
  }
  const auto file = utf8(code->co_filename);
  if (file.starts_with(places->torch)) {
    const auto within = std::string_view(file).substr(places->torch.size());
    if (within.starts_with("optim/")) {
      return CodeKind::optimizer;
    }
    return within.starts_with("distributed/") || within.starts_with("nn/parallel/")
               ? CodeKind::communication
               : CodeKind::torch;
  }
  if (file.starts_with("<frozen ")) {
    return CodeKind::library;
  }
  for (const auto& folder : places->library) {
    if (file.starts_with(folder)) {
      return CodeKind::library;
    }
  }
  return CodeKind::user;
}

// What identifies a code object besides its address, which another one may get after it.
struct Print {
  const void* code = nullptr;
  const void* filename = nullptr;
  const void* name = nullptr;
  int line = 0;
  explicit Print(const PyCodeObject* of = nullptr) {
    if (of != nullptr) {
      code = of;
      filename = of->co_filename;
      name = of->co_qualname;
      line = of->co_firstlineno;
    }
  }
  friend bool operator==(const Print&, const Print&) = default;
};

// Each thread's own: what it has looked up already, by the low bits of the address.
struct Cache {
  struct Kind {
    Print print;
    CodeKind kind = CodeKind::unknown;
  };
  struct Site {
    Print print;
    int instruction = -1;
    NameId name = NameId::none;
  };
  std::array<Kind, 512> kinds;
  std::array<Site, 2048> sites;
};

Cache& cache() {
  static thread_local std::unique_ptr<Cache> mine;
  if (mine == nullptr) {
    mine = std::make_unique<Cache>();
  }
  return *mine;
}

CodeKind cached_kind(PyCodeObject* code) {
  auto& entry = cache().kinds[(reinterpret_cast<uintptr_t>(code) >> 5) % 512];
  if (const Print print(code); entry.print != print) {
    entry = {print, kind_of(code)};
  }
  return entry.kind;
}

std::string site_text(PyCodeObject* code, int instruction) {
  const auto line = PyCode_Addr2Line(code, instruction * static_cast<int>(sizeof(_Py_CODEUNIT)));
  return tenure::text(utf8(code->co_filename), ":", line, " ", utf8(code->co_qualname));
}

NameId cached_site(PyCodeObject* code, int instruction) {
  const auto mixed =
      (reinterpret_cast<uintptr_t>(code) >> 5) * 31 + static_cast<unsigned>(instruction);
  auto& entry = cache().sites[mixed % 2048];
  if (const Print print(code); entry.print != print || entry.instruction != instruction) {
    entry = {print, instruction, tenure::intern(site_text(code, instruction))};
  }
  return entry.name;
}

constexpr int kDeepest = 200;

bool look(FrameInfo& out, Depth depth) {
  if (places == nullptr || finalizing()) {
    return false;
  }
  auto* thread = PyGILState_GetThisThreadState();
  if (thread == nullptr) {
    return false;
  }
  std::pair<PyCodeObject*, int> user;
  std::pair<PyCodeObject*, int> other;  // the innermost of a library, else of torch
  bool other_is_torch = true;
  std::string stack;
  auto* frame = innermost(thread);
  for (int i = 0; frame != nullptr && i < kDeepest; frame = frame->previous, ++i) {
    auto* code = code_of(frame);
    if (code == nullptr || _PyFrame_IsIncomplete(frame)) {
      continue;
    }
    const std::pair here(code, _PyInterpreterFrame_LASTI(frame));
    if (depth == Depth::stack) {
      stack += site_text(code, here.second) + "\n";
    }
    const auto kind = cached_kind(code);
    if (kind == CodeKind::user) {
      user = user.first == nullptr ? here : user;
    } else if (kind == CodeKind::module_call && out.module == nullptr) {
      out.module = frame->localsplus[0];
    } else if (kind == CodeKind::optimizer && user.first == nullptr) {
      out.optimizer = true;
    } else if (kind == CodeKind::communication && user.first == nullptr && out.module == nullptr) {
      out.communication = true;
    }
    if (other.first == nullptr || (other_is_torch && kind == CodeKind::library)) {
      other = here;
      other_is_torch = kind != CodeKind::library;
    }
    if (user.first != nullptr && out.module != nullptr && depth == Depth::site) {
      break;
    }
  }
  const auto& best = user.first != nullptr ? user : other;
  if (best.first == nullptr) {
    return false;
  }
  out.site = cached_site(best.first, best.second);
  if (!stack.empty()) {
    out.stack = tenure::intern(stack);
  }
  return true;
}

constexpr tenure::inspect::LanguageFrames kPythonFrames{look};

}  // namespace

void install_python_frames(const std::string& torch, std::vector<std::string> library,
                           PyObject* module_call) {
  static const auto* once = [&] {
    Py_INCREF(module_call);
    places = new Places{torch, std::move(library), reinterpret_cast<PyCodeObject*>(module_call)};
    tenure::inspect::install(&kPythonFrames);
    return places;
  }();
  (void)once;
}

void each_local(PyThreadState* thread,
                const std::function<void(PyCodeObject*, int, PyObject**, int)>& fn) {
  for (auto* frame = innermost(thread); frame != nullptr; frame = frame->previous) {
    auto* code = code_of(frame);
    if (code != nullptr && !_PyFrame_IsIncomplete(frame)) {
      // The values that an expression in progress holds lie behind the locals.
      const int all = std::max(frame->stacktop, code->co_nlocalsplus);
      fn(code, _PyInterpreterFrame_LASTI(frame), frame->localsplus, all);
    }
  }
}
