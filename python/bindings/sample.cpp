#include <tenure/core/sample.h>

#include "bindings.h"
#include <tenure/core/text.h>

#include <c10/core/Device.h>
#include <torch/csrc/Device.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace py = pybind11;

namespace {

// A class of read-only fields whose repr lists them.
template <class T>
class Record {
 public:
  Record(py::module_& m, const char* name, const char* doc) : class_(m, name, doc), name_(name) {}

  template <class Field>
  Record& field(const char* name, Field T::* member, const char* doc) {
    class_.def_readonly(name, member, doc);
    return named(name);
  }

  template <class Get>
  Record& computed(const char* name, Get get, const char* doc) {
    class_.def_property_readonly(name, std::move(get), doc);
    return named(name);
  }

  void done() {
    class_.attr("__match_args__") = py::tuple(names_);
    class_.def("__repr__", [name = name_, names = names_](const py::object& self) {
      std::string out = name + "(";
      const char* comma = "";
      for (const auto& field : names) {
        out += comma + py::cast<std::string>(field) + "=" +
               py::cast<std::string>(py::repr(self.attr(field)));
        comma = ", ";
      }
      return out + ")";
    });
  }

 private:
  Record& named(const char* name) {
    names_.append(name);
    return *this;
  }

  py::class_<T> class_;
  std::string name_;
  py::list names_;
};

double seconds(std::chrono::nanoseconds duration) {
  return std::chrono::duration<double>(duration).count();
}

void bind_process(py::module_& m) {
  using tenure::CgroupSample;
  using tenure::MappedSample;
  using tenure::ProcessSample;
  Record<CgroupSample>(m, "CgroupSample", "The memory control group of the process, in bytes.")
      .field("usage", &CgroupSample::usage, "Charged to the group, cached files included.")
      .field("limit", &CgroupSample::limit, "The tightest limit upwards; None: no limit.")
      .field("headroom", &CgroupSample::headroom, "Left under the limit that is met first.")
      .done();
  Record<MappedSample>(m, "MappedSample", "A walk over all mappings, in bytes.")
      .field("pss", &MappedSample::pss, "Pages shared with n processes count 1/n.")
      .field("pss_file", &MappedSample::pss_file, "The part of pss that is files.")
      .field("rss", &MappedSample::rss, "Exact, unlike ProcessSample.rss on older kernels.")
      .field("cgroup_inactive_file", &MappedSample::cgroup_inactive_file,
             "Cached files of the group that the kernel drops first.")
      .field("cgroup_files_in_memory", &MappedSample::cgroup_files_in_memory,
             "Of the group, less what the process maps itself: files in /dev/shm, say.")
      .computed(
          "age", [](const MappedSample& self) { return seconds(self.age); },
          "Seconds since the walk began.")
      .done();
  Record<ProcessSample>(m, "ProcessSample", "What the system says of this process, in bytes.")
      .field("rss", &ProcessSample::rss, "Resident.")
      .field("virtual_size", &ProcessSample::virtual_size, "Mapped, resident or not.")
      .field("virtual_limit", &ProcessSample::virtual_limit, "Of that: ulimit -v. None: no limit.")
      .field("data", &ProcessSample::data, "Private and writable, resident or not.")
      .field("data_limit", &ProcessSample::data_limit, "Of that: ulimit -d. None: no limit.")
      .field("peak_rss", &ProcessSample::peak_rss, "Most resident since the program began.")
      .field("shared", &ProcessSample::shared, "Resident shared memory: memfd, /dev/shm, tmpfs.")
      .field("files", &ProcessSample::files, "Resident pages of files, which the kernel may drop.")
      .field("swap", &ProcessSample::swap, "Swapped out.")
      .field("host_total", &ProcessSample::host_total, "Memory of the machine.")
      .field("host_available", &ProcessSample::host_available, "What new programs could take.")
      .field("cgroup", &ProcessSample::cgroup, "None where none accounts for the process.")
      .field("mapped", &ProcessSample::mapped, "None unless something refreshes samples.")
      .done();
}

void bind_devices(py::module_& m) {
  using tenure::AllocatorSample;
  using tenure::DeviceSample;
  using tenure::DriverSample;
  using tenure::Gauge;
  using tenure::PinnedSample;
  Record<Gauge>(m, "Gauge", "A figure and its highest value, in bytes.")
      .field("current", &Gauge::current, "Now.")
      .field("peak", &Gauge::peak, "Since the allocator's statistics were last reset.")
      .done();
  Record<AllocatorSample>(m, "AllocatorSample", "A device's caching allocator.")
      .field("allocated", &AllocatorSample::allocated, "In tensors.")
      .field("active", &AllocatorSample::active, "Allocated, or freed but in use by a stream.")
      .field("inactive", &AllocatorSample::inactive, "The free remainder of split blocks.")
      .field("reserved", &AllocatorSample::reserved, "Taken from the driver.")
      .field("retries", &AllocatorSample::retries, "Allocations that first emptied the cache.")
      .field("ooms", &AllocatorSample::ooms, "Out-of-memory errors.")
      .done();
  Record<DriverSample>(m, "DriverSample", "A device as its driver sees it, in bytes.")
      .field("free", &DriverSample::free, "Free for any process.")
      .field("total", &DriverSample::total, "Of the device.")
      .done();
  Record<PinnedSample>(m, "PinnedSample", "Page-locked host memory, in bytes.")
      .field("active", &PinnedSample::active, "In tensors, or in use by a stream.")
      .field("reserved", &PinnedSample::reserved, "Taken from the system, cache included.")
      .done();
  Record<DeviceSample>(m, "DeviceSample", "A device on which this process has a context.")
      .computed(
          "device",
          [](const DeviceSample& self) {
            return py::reinterpret_steal<py::object>(THPDevice_New(self.device));
          },
          "A torch.device.")
      .field("allocator", &DeviceSample::allocator, "None where the allocator does not say.")
      .field("driver", &DeviceSample::driver, "None where the driver does not say.")
      .done();
}

// Python's handle on a Refresh: ends it early, or at the end of a with block.
class SampleRefresh {
 public:
  explicit SampleRefresh(double period)
      : refresh_(tenure::Sampler::shared().refresh(std::chrono::duration<double>(period))) {}

  void stop() { refresh_ = {}; }

 private:
  tenure::Sampler::Refresh refresh_;
};

}  // namespace

void bind_sample(py::module_& m) {
  using tenure::Sample;
  bind_process(m);
  bind_devices(m);
  Record<Sample>(m, "Sample", "One reading of process, pinned memory and devices.")
      .field("process", &Sample::process, "This process, as the system sees it.")
      .field("pinned", &Sample::pinned, "None without an initialised accelerator.")
      .field("devices", &Sample::devices, "One for each device that the program has used.")
      .done();
  m.def(
      "sample", [] { return tenure::Sampler::shared().sample(); },
      "What the system and the device allocators say of this process's memory now.");

  m.def("bytes_text", &tenure::bytes_text, py::arg("size"), "1536 -> '1.5 KiB'.");

  py::class_<SampleRefresh>(m, "SampleRefresh",
                            "While it lives, samples have a ProcessSample.mapped.")
      .def(py::init<double>(), py::arg("period") = 1.0, py::call_guard<py::gil_scoped_release>())
      .def("stop", &SampleRefresh::stop, py::call_guard<py::gil_scoped_release>(),
           "Ends it. A second call does nothing.")
      .def("__enter__", [](SampleRefresh& self) -> SampleRefresh& { return self; })
      .def("__exit__", [](SampleRefresh& self, const py::args&) {
        const py::gil_scoped_release unlocked;
        self.stop();
      });
}
