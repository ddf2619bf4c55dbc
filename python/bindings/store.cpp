// Store: joining, putting, fetching and the books. Handles are values here; what a user calls on
// them is in python/tenure/store.
#include "store.h"

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/store/store.h>
#include <tenure/store/waiting.h>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <functional>

namespace py = pybind11;
namespace store = tenure::store;

namespace {

using Milliseconds = std::chrono::milliseconds;
using Member = std::tuple<std::string, int32_t, uint64_t>;
using Listed = std::vector<std::pair<std::string, std::optional<int32_t>>>;

store::Collectors collectors_of(const std::optional<Listed>& listed,
                                const std::optional<uint32_t>& count) {
  store::Collectors out;
  if (listed) {
    out.kind = store::Collectors::Kind::listed;
    for (const auto& [role, rank] : *listed) {
      out.listed.push_back({.role = role, .rank = rank});
    }
  } else if (count) {
    out.kind = store::Collectors::Kind::counted;
    out.count = *count;
  }
  return out;
}

Member to_python(const store::Member& member) {
  return {member.role, member.rank, member.incarnation};
}

py::dict to_python(const store::Tally& tally) {
  py::dict out;
  out["stored"] = tally.stored;
  out["stored_bytes"] = tally.stored_bytes;
  py::dict freed;
  py::dict freed_bytes;
  for (size_t i = 0; i < store::kFreedReasons; ++i) {
    const auto name = py::str(std::string(store::freed_name(static_cast<store::Freed>(i))));
    freed[name] = tally.freed[i];
    freed_bytes[name] = tally.freed_bytes[i];
  }
  out["freed"] = freed;
  out["freed_bytes"] = freed_bytes;
  out["live"] = tally.live;
  out["live_bytes"] = tally.live_bytes;
  return out;
}

py::list to_python(const std::vector<store::StillMapped>& mapped) {
  py::list out;
  for (const auto& one : mapped) {
    py::dict row;
    row["by"] = py::cast(to_python(one.by));
    row["since_ms"] = one.since_ms;
    row["objects"] = one.objects;
    row["bytes"] = one.bytes;
    out.append(row);
  }
  return out;
}

py::dict to_python(const store::Account& account) {
  py::dict out;
  out["total"] = to_python(account.total);
  py::list lines;
  for (const auto& line : account.lines) {
    auto row = to_python(line.tally);
    row["call"] = line.call;
    row["site"] = line.site;
    lines.append(row);
  }
  out["lines"] = lines;
  out["still_mapped"] = to_python(account.still_mapped);
  out["dropped"] = account.dropped;
  out["difference"] = account.difference;
  return out;
}

std::string how_name(store::Unreached::How how) {
  switch (how) {
    case store::Unreached::How::silent:
      return "silent";
    case store::Unreached::How::unasked:
      return "unasked";
    case store::Unreached::How::gone:
      return "gone";
    case store::Unreached::How::foreign:
      return "foreign";
  }
  return "unknown";
}

py::list unreached_list(const std::vector<store::Unreached>& unreached) {
  py::list out;
  for (const auto& one : unreached) {
    out.append(py::make_tuple(py::cast(to_python(one.owner)), one.why, how_name(one.how)));
  }
  return out;
}

py::dict to_python(const store::Closing& closing) {
  auto out = to_python(closing.here);
  py::list elsewhere;
  for (const auto& [member, answer] : closing.elsewhere) {
    py::dict row;
    row["owner"] = py::cast(to_python(member));
    row["freed"] = answer.freed;
    row["bytes"] = answer.bytes;
    row["difference"] = answer.difference;
    row["still_mapped"] = answer.still_mapped;
    elsewhere.append(row);
  }
  out["elsewhere"] = elsewhere;
  out["unreached"] = unreached_list(closing.unreached);
  return out;
}

py::dict to_python(const store::StoreStats& stats) {
  py::dict out;
  const auto& objects = stats.objects;
  out["objects"] = objects.objects;
  out["bytes"] = objects.bytes;
  out["spilled_bytes"] = objects.spilled_bytes;
  out["still_mapped_bytes"] = objects.mapped_bytes;
  out["put_objects"] = objects.put_objects;
  out["put_bytes"] = objects.put_bytes;
  out["unstored"] = objects.unstored;
  out["fetches"] = objects.fetches;
  out["fetched_bytes"] = objects.fetched_bytes;
  out["dropped"] = objects.dropped;
  out["stale"] = objects.stale;
  out["expired"] = objects.expired;
  out["differences"] = objects.differences;
  out["scopes"] = objects.scopes;
  out["consumers"] = objects.consumers;
  out["kept_bytes"] = stats.kept_bytes;
  out["passed_through"] = stats.passed_through;
  out["shared"] = stats.shared;
  const auto& server = stats.server;
  out["connections"] = server.connections;
  out["accepted"] = server.accepted;
  out["refused_user"] = server.refused_user;
  out["refused_secret"] = server.refused_secret;
  out["refused_version"] = server.refused_version;
  out["refused_job"] = server.refused_job;
  out["refused_full"] = server.refused_full;
  out["dropped_protocol"] = server.dropped_protocol;
  out["dropped_slow"] = server.dropped_slow;
  out["sent_bytes"] = server.sent_bytes;
  return out;
}

py::dict to_python(const store::Listed& object) {
  py::dict out;
  out["scope"] = store::scope_text(object.scope);
  out["call"] = object.call;
  out["site"] = object.site;
  out["dtype"] = std::string(store::dtype_name(object.layout.dtype));
  out["shape"] = object.layout.shape;
  out["bytes"] = object.bytes;
  out["place"] = object.place;
  out["waiting"] = object.waiting;
  out["put_ms"] = object.put_ms;
  return out;
}

std::span<const std::byte> view_of(const py::bytes& bytes) {
  const auto text = static_cast<std::string_view>(bytes);
  return std::as_bytes(std::span(text.data(), text.size()));
}

py::bytes py_bytes(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};  // NOLINT
}

void bind_handle(py::module_& m) {
  using store::Handle;
  py::class_<Handle>(m, "StoreHandle")
      .def_property_readonly("job", [](const Handle& h) { return h.origin->job; })
      .def_property_readonly("owner", [](const Handle& h) { return to_python(h.origin->owner); })
      .def_property_readonly("scope",
                             [](const Handle& h) { return std::pair(h.scope.kind, h.scope.id); })
      .def_property_readonly("id",
                             [](const Handle& h) { return std::pair(h.id.slot, h.id.generation); })
      .def_property_readonly("bytes", [](const Handle& h) { return store::bytes_of(h.layout); })
      .def_property_readonly(
          "dtype", [](const Handle& h) { return std::string(store::dtype_name(h.layout.dtype)); })
      .def_property_readonly("shape",
                             [](const Handle& h) { return py::tuple(py::cast(h.layout.shape)); })
      .def_property_readonly("stored", &Handle::stored)
      .def_property_readonly("why", [](const Handle& h) { return h.unstored; })
      .def_property_readonly(
          "address", [](const Handle& h) { return std::pair(h.origin->address, h.origin->port); })
      .def("text", [](const Handle& h) { return store::to_text(h); })
      .def_static("from_text",
                  [](const std::string& text) { return store::handle_from_text(text); })
      .def("encode", [](const Handle& h) { return py_bytes(store::encode(h)); })
      .def_static("decode", [](const py::bytes& b) { return store::decode_handle(view_of(b)); })
      .def("__eq__", [](const Handle& a, const Handle& b) { return a == b; })
      .def("__hash__",
           [](const Handle& h) {
             return std::hash<uint64_t>()(h.origin->owner.incarnation ^
                                          (uint64_t{h.id.generation} << 32) ^ h.id.slot);
           })
      .def("__str__", [](const Handle& h) { return store::handle_text(h); });
}

// Ending a store waits for its threads, which may end leases whose storages Python knows of.
struct EndWithoutGil {
  void operator()(store::Store* ended) const {
    const py::gil_scoped_release no_gil;
    const std::unique_ptr<store::Store> owned(ended);
  }
};
using Joined = std::unique_ptr<store::Store, EndWithoutGil>;

Joined join(const std::string& job, const std::string& role, int32_t rank,
            const std::optional<std::string>& listen, const std::string& advertise,
            const std::string& secret, const std::string& secret_file, uint64_t cap,
            const std::string& when_full, const std::string& spill_folder, int64_t lease_ms,
            int64_t timeout_ms, const std::optional<std::array<std::string, 3>>& tls) {
  store::StoreOptions options;
  options.job = job;
  options.role = role;
  options.rank = rank;
  options.listen = listen;
  options.advertise = advertise;
  if (!secret_file.empty()) {
    options.secret = store::secret_from_file(secret_file);
  } else if (!secret.empty()) {
    options.secret = store::Secret(secret);
  }
  options.limits.cap = cap;
  options.limits.when_full =
      when_full == "spill" ? store::WhenFull::spill : store::WhenFull::refuse;
  options.limits.spill_folder = spill_folder;
  options.limits.lease_ms = lease_ms;
  options.timeout = Milliseconds(timeout_ms);
  if (tls) {
    options.tls = {.certificate = (*tls)[0], .key = (*tls)[1], .authority = (*tls)[2]};
  }
  return Joined(std::make_unique<store::Store>(std::move(options)).release());
}

store::GetOptions get_options(std::pair<uint64_t, std::optional<uint64_t>> rows,
                              std::vector<at::Tensor> into, const std::optional<at::Device>& device,
                              bool readonly, bool more, bool keep, bool tcp,
                              const std::optional<int64_t>& timeout_ms) {
  store::GetOptions options;
  options.rows = {.first = rows.first, .count = rows.second.value_or(store::kAllRows)};
  options.into = std::move(into);
  options.device = device;
  options.access = readonly ? store::Access::read_only : store::Access::copy_on_write;
  options.more = more;
  options.keep = keep;
  options.over = tcp ? store::Over::tcp : store::Over::best;
  if (timeout_ms) {
    options.timeout = Milliseconds(*timeout_ms);
  }
  return options;
}

// A fetch whose caller may have gone when the tensors are there: see Store::fetch.
struct Fetch {
  store::Store& from;
  std::vector<store::Handle> handles;
  store::Parcel parcel;
};

void raise_for_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

void bind_tables(py::class_<store::Store, Joined>& bound) {
  bound
      .def("close",
           [](store::Store& self, const std::string& kind, const std::string& id) {
             store::Closing closing;
             {
               const py::gil_scoped_release no_gil;
               const store::WhenInterrupted check(raise_for_signals);
               closing = self.close({.kind = kind, .id = id});
             }
             return to_python(closing);
           })
      .def("account",
           [](const store::Store& self, const std::string& kind, const std::string& id) {
             return to_python(self.account({.kind = kind, .id = id}));
           })
      .def("free",
           [](store::Store& self, const std::vector<store::Handle>& handles) {
             store::Client::FreeAnswer answer;
             {
               const py::gil_scoped_release no_gil;
               const store::WhenInterrupted check(raise_for_signals);
               answer = self.free(handles);
             }
             return py::make_tuple(answer.freed, unreached_list(answer.unreached));
           })
      .def(
          "forget",
          [](store::Store& self, const std::vector<store::Handle>& handles) {
            return self.forget(handles);
          },
          NoGil())
      .def(
          "forget_scope",
          [](store::Store& self, const std::string& kind, const std::string& id) {
            return self.forget({.kind = kind, .id = id});
          },
          NoGil())
      .def("kept_of", [](const store::Store& self, const std::string& kind,
                         const std::string& id) { return self.kept_of({.kind = kind, .id = id}); })
      .def("stats", [](const store::Store& self) { return to_python(self.stats()); })
      .def("list",
           [](const store::Store& self, uint32_t from, size_t most) {
             uint32_t next = 0;
             py::list rows;
             for (const auto& object : self.list(from, most, &next)) {
               rows.append(to_python(object));
             }
             return py::make_tuple(rows, next);
           })
      .def("still_mapped", [](const store::Store& self) { return to_python(self.still_mapped()); })
      .def(
          "ask_stats",
          [](store::Store& self, const std::string& socket) {
            return self.ask(socket, {.question = store::Question::stats}).json;
          },
          NoGil())
      .def(
          "ask_list",
          [](store::Store& self, const std::string& socket, uint32_t from, uint32_t most) {
            auto answer =
                self.ask(socket, {.question = store::Question::list, .from = from, .most = most});
            return std::pair(std::move(answer.json), answer.next);
          },
          NoGil());
}

}  // namespace

void bind_store(py::module_& m) {
  bind_handle(m);
  py::class_<Fetch>(m, "StoreFetch").def("accept", [](Fetch& self) {
    self.from.accept(self.parcel);
    return std::move(self.parcel.tensors);
  });
  py::class_<store::Store, Joined> bound(m, "Store");
  bound
      .def(py::init(&join), py::kw_only(), py::arg("job"), py::arg("role"), py::arg("rank"),
           py::arg("listen"), py::arg("advertise"), py::arg("secret"), py::arg("secret_file"),
           py::arg("cap"), py::arg("when_full"), py::arg("spill_folder"), py::arg("lease_ms"),
           py::arg("timeout_ms"), py::arg("tls"), NoGil())
      .def_property_readonly(
          "owner", [](const store::Store& self) { return to_python(self.origin().owner); })
      .def_property_readonly("job", [](const store::Store& self) { return self.origin().job; })
      .def_property_readonly("address",
                             [](const store::Store& self) {
                               return std::pair(self.origin().address, self.origin().port);
                             })
      .def_property_readonly("socket", [](const store::Store& self) { return self.origin().path; })
      .def(
          "put",
          [](store::Store& self, const std::string& kind, const std::string& id,
             const at::Tensor& tensor, const std::optional<Listed>& listed,
             const std::optional<uint32_t>& count, const std::string& call,
             const std::optional<uint32_t>& attempt, const std::string& site) {
            const store::WhenInterrupted check(raise_for_signals);
            return self.put({.kind = kind, .id = id}, tensor,
                            {.collectors = collectors_of(listed, count),
                             .call = call,
                             .attempt = attempt,
                             .site = site});
          },
          NoGil())
      .def(
          "unstored",
          [](store::Store& self, const std::string& kind, const std::string& id,
             const at::Tensor& tensor, std::string why) {
            return self.unstored({.kind = kind, .id = id}, tensor, std::move(why));
          },
          NoGil())
      .def(
          "get_all",
          [](store::Store& self, const std::vector<store::Handle>& handles,
             std::pair<uint64_t, std::optional<uint64_t>> rows, std::vector<at::Tensor> into,
             const std::optional<at::Device>& device, bool readonly, bool more, bool keep, bool tcp,
             const std::optional<int64_t>& timeout_ms) {
            const store::WhenInterrupted check(raise_for_signals);
            return self.get_all(handles, get_options(rows, std::move(into), device, readonly, more,
                                                     keep, tcp, timeout_ms));
          },
          py::kw_only(), py::arg("handles"), py::arg("rows"), py::arg("into"), py::arg("device"),
          py::arg("readonly"), py::arg("more"), py::arg("keep"), py::arg("tcp"),
          py::arg("timeout_ms"), NoGil())
      .def(
          "fetch",
          [](store::Store& self, std::vector<store::Handle> handles,
             std::pair<uint64_t, std::optional<uint64_t>> rows, std::vector<at::Tensor> into,
             const std::optional<at::Device>& device, bool readonly, bool more, bool keep, bool tcp,
             const std::optional<int64_t>& timeout_ms) {
            auto fetch = std::make_unique<Fetch>(Fetch{self, std::move(handles), {}});
            fetch->parcel = self.fetch(
                fetch->handles,
                get_options(rows, std::move(into), device, readonly, more, keep, tcp, timeout_ms));
            return fetch;
          },
          py::kw_only(), py::arg("handles"), py::arg("rows"), py::arg("into"), py::arg("device"),
          py::arg("readonly"), py::arg("more"), py::arg("keep"), py::arg("tcp"),
          py::arg("timeout_ms"), py::keep_alive<0, 1>(), NoGil())
      .def(
          "begin_call",
          [](store::Store& self, const std::string& kind, const std::string& id,
             const std::string& call) { return self.begin_call({.kind = kind, .id = id}, call); },
          NoGil())
      .def(
          "fail_call",
          [](store::Store& self, const std::string& kind, const std::string& id,
             const std::string& call,
             uint32_t attempt) { self.fail_call({.kind = kind, .id = id}, call, attempt); },
          NoGil())
      .def(
          "adopt",
          [](store::Store& self, const std::string& kind, const std::string& id,
             const std::vector<store::Handle>& handles) {
            self.adopt({.kind = kind, .id = id}, handles);
          },
          NoGil());
  bind_tables(bound);
  m.def("store_folder", &store::job_folder);
  m.def("store_sockets",
        [](const std::string& job) { return store::sockets_in(store::job_folder(job)); });
}
