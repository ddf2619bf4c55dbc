// Active: while it lives, what autograd saves on this thread goes through a session.
//
//   for (...) { offload::Active active(session); net(x).sum().backward(); }
//
// Note [Two engines]
// Autograd asks its engine for the hooks of what it saves. In a program without Python that is
// torch's own engine, which has none; the first Active puts one with ours in its place, which is
// the same engine otherwise. Where Python runs, its engine is in that place and asks for hooks in
// Python: `import tenure` brings those, and Active uses them.
#pragma once

#include <tenure/offload/session.h>

#include <ATen/core/Tensor.h>

#include <vector>

namespace tenure::offload {

// One thread's: make and end it on the same.
class Active {
 public:
  // Begins the session. Throws InputError if it has begun, or if Python runs in this process
  // without Tenure's module.
  explicit Active(Session& session);
  // Ends it, or abandons it while an exception unwinds. What end() would throw is printed to
  // stderr: call end() to have it thrown.
  ~Active();
  Active(const Active&) = delete;
  Active& operator=(const Active&) = delete;

  void end();

 private:
  Session& session_;
  int exceptions_;
  bool open_ = true;
};

// How a language runtime has autograd call a session on this thread, and what it knows of tensors.
// Installed once, by its bindings, and lives forever.
struct LanguageHooks {
  void (*push)(Session& session);
  void (*pop)();
  std::vector<at::Tensor> (*wrapped)(const at::Tensor& tensor);
};
void install(const LanguageHooks* hooks);

// The tensors that one of a class of the language's is made of, as far as it can be told. Any
// thread, holding no lock.
std::vector<at::Tensor> wrapped_in(const at::Tensor& tensor);

}  // namespace tenure::offload
