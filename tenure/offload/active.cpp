#include <tenure/offload/active.h>

#include <tenure/core/error.h>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <dlfcn.h>

#include <atomic>
#include <exception>
#include <iostream>
#include <mutex>
#include <vector>

namespace tenure::offload {
namespace {

std::atomic<const LanguageHooks*> g_language = nullptr;

// The sessions of this thread, the innermost last.
std::vector<Session*>& sessions() {
  thread_local std::vector<Session*> here;
  return here;
}

class Hooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit Hooks(Session& session) : session_(session) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    const auto base = tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
    const bool parameter = base.is_leaf() && base.requires_grad();
    saved_ = session_.pack(tensor, parameter ? std::optional(Kept::parameter) : std::nullopt);
  }
  at::Tensor call_unpack_hook() override { return Session::unpack(saved_); }

 private:
  Session& session_;  // packs at once, and never again
  Saved saved_;
};

class OurEngine final : public torch::autograd::Engine {
 public:
  OurEngine() = default;
  OurEngine(const OurEngine&) = delete;
  OurEngine& operator=(const OurEngine&) = delete;
  ~OurEngine() override { stop(); }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return sessions().empty() ? nullptr : std::make_unique<Hooks>(*sessions().back());
  }
};

torch::autograd::Engine& our_engine() {
  static auto* engine = new OurEngine;  // leaked, as torch's own: its threads outlive main
  return *engine;
}

void use_our_engine() {
  static std::once_flag once;
  std::call_once(once, [] { torch::autograd::set_default_engine_stub(&our_engine); });
}

bool python_has_the_engine() {
  void* library = dlopen("libtorch_python.so", RTLD_NOW | RTLD_NOLOAD);
  if (library != nullptr) {
    dlclose(library);
  }
  return library != nullptr;
}

void push(Session& session) {
  if (const auto* language = g_language.load()) {
    language->push(session);
    return;
  }
  if (python_has_the_engine()) {
    throw InputError(
        "this process runs Python, whose autograd engine asks for hooks in Python: import tenure "
        "before offloading from C++");
  }
  use_our_engine();
  sessions().push_back(&session);
}

void pop() {
  if (const auto* language = g_language.load()) {
    language->pop();
  } else {
    sessions().pop_back();
  }
}

}  // namespace

void install(const LanguageHooks* hooks) { g_language = hooks; }

std::vector<at::Tensor> wrapped_in(const at::Tensor& tensor) {
  const auto* language = g_language.load();
  return language == nullptr ? std::vector<at::Tensor>() : language->wrapped(tensor);
}

Active::Active(Session& session) : session_(session), exceptions_(std::uncaught_exceptions()) {
  session_.begin();
  try {
    push(session_);
  } catch (...) {
    session_.abandon();
    throw;
  }
}

Active::~Active() {
  if (!open_) {
    return;
  }
  if (std::uncaught_exceptions() > exceptions_) {
    pop();
    session_.abandon();
    return;
  }
  try {
    end();
  } catch (const std::exception& error) {
    std::cerr << "tenure: " << error.what() << "\n";
  }
}

void Active::end() {
  open_ = false;
  pop();
  session_.end();
}

}  // namespace tenure::offload
