// C++ cases that run on several ranks: the Python module `tenure_rank_cases`. torch's wheel lacks
// gloo's headers, so a group is made in Python (tests/python/ranks.py) and handed over here. Every
// case runs without the GIL, as Tenure's own threads do.

#include "held_model.h"
#include "pipelined_model.h"
#include "sharded_model.h"
#include <tenure/core/hold.h>
#include <tenure/core/scope.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

namespace py = pybind11;

namespace {

struct Ring {
  double total = 0;     // of rank + 1, over all ranks
  double received = 0;  // the left neighbour's rank + 1
  uint64_t left = 0;    // leases still held when the scope closed
  std::string report;
};

// One value in every element, or the case fails.
double value_of(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.min().equal(tensor.max()), "elements differ: ", tensor);
  return tensor[0].item<double>();
}

at::Tensor one_for(const Group& group) { return at::full({1000}, group->getRank() + 1.0); }

double all_reduce(const Group& group) {
  std::vector<at::Tensor> sum{one_for(group)};
  group->allreduce(sum)->wait();
  return value_of(sum[0]);
}

// Sends to the right, receives from the left. The caller's lease is all that keeps the buffer.
double pass_on(const Group& group, tenure::Lease& lease) {
  const int rank = group->getRank();
  const int size = group->getSize();
  std::vector<at::Tensor> out{one_for(group)};
  std::vector<at::Tensor> in{at::empty({1000})};
  lease = tenure::hold(in[0], tenure::intern_owner(tenure::OwnerKind::receive_buffer, "ring"));
  const auto sent = group->send(out, (rank + 1) % size, /*tag=*/0);
  group->recv(in, (rank + size - 1) % size, /*tag=*/0)->wait();
  sent->wait();
  return value_of(in[0]);
}

enum class Buffer { released, forgotten };

Ring run_ring(const Group& group, Buffer buffer) {
  TORCH_CHECK(PyGILState_Check() == 0, "the case must run without the GIL");
  Ring ring;
  ring.total = all_reduce(group);
  tenure::Scope scope("microbatch", 0);
  tenure::Lease lease;
  ring.received = pass_on(group, lease);
  TORCH_CHECK(lease.storage().use_count() == 2, "the lease and this line hold it, nobody else");
  if (buffer == Buffer::released) {
    lease.release();
  }
  const auto report = scope.close();
  ring.left = report.leases;
  ring.report = report.text();
  return ring;
}

}  // namespace

PYBIND11_MODULE(tenure_rank_cases, m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<Losses>(m, "Losses")
      .def_readonly("plain", &Losses::plain)
      .def_readonly("sharded", &Losses::sharded);
  m.def("train_sharded", &train_sharded, NoGil());
  m.def("release_sharded", &release_sharded, NoGil());
  m.def("misuse_sharded", &misuse_sharded, NoGil());
  m.def("failing_sharded", &failing_sharded, NoGil());
  m.def("partly_sharded", &partly_sharded, NoGil());
  m.def("written_in_backward", &written_in_backward, NoGil());
  m.def("held_gradients", &held_gradients, NoGil());
  m.def("held_kinds", &held_kinds, NoGil());
  m.def("held_evaluation", &held_evaluation, NoGil());
  m.def("held_misuse", &held_misuse, NoGil());
  m.def("held_alone", &held_alone, NoGil());
  m.def("joined_pieces", &joined_pieces, NoGil());
  m.def("train_pipelined", &train_pipelined, NoGil());
  py::class_<Ring>(m, "Ring")
      .def_readonly("total", &Ring::total)
      .def_readonly("received", &Ring::received)
      .def_readonly("left", &Ring::left)
      .def_readonly("report", &Ring::report);
  m.def(
      "ring", [](const Group& group) { return run_ring(group, Buffer::released); },
      py::arg("group"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "ring_that_forgets", [](const Group& group) { return run_ring(group, Buffer::forgotten); },
      py::arg("group"), py::call_guard<py::gil_scoped_release>());
}
