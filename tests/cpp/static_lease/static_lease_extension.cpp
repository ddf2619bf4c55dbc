// A lease in a static object of C++, which is destroyed after the interpreter: the Python module
// `tenure_static_lease`.

#include <tenure/core/hold.h>
#include <tenure/core/owner.h>

#include <torch/csrc/utils/pybind.h>

namespace {

tenure::Lease kept;

}  // namespace

PYBIND11_MODULE(tenure_static_lease, m) {
  m.def("keep", [](const at::Tensor& tensor) {
    kept = tenure::hold(tensor, tenure::intern_owner(tenure::OwnerKind::user, "static"));
  });
}
