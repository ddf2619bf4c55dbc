// The flight recorder's threads. None of them takes the GIL: what Python has to do is left with
// Requests, at which a thread of Python's waits without it.
#include "telemetry.h"
#include <tenure/telemetry/last_word.h>
#include <tenure/telemetry/requests.h>
#include <tenure/telemetry/signals.h>
#include <tenure/telemetry/watcher.h>

#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace py = pybind11;
using tenure::telemetry::LastWord;
using tenure::telemetry::Requests;
using tenure::telemetry::Signals;
using tenure::telemetry::Watcher;

namespace {

using Store = c10::intrusive_ptr<c10d::Store>;

// Snapshots on request: what C++ can write at once, and Python after it.
class Flight {
 public:
  Flight(const std::string& path, const std::string& identity)
      : word_(std::make_shared<LastWord>(path, identity)),
        requests_(std::make_shared<Requests>()) {}
  ~Flight() { close(); }
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;

  // `headlines` has the JSON of each signal; a signal waits for Python no longer than `seconds`.
  void take_signals(const std::map<int, std::string>& headlines, double seconds) {
    std::vector<int> numbers;
    for (const auto& [number, headline] : headlines) {
      numbers.push_back(number);
    }
    const auto limit = std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
    signals_ = std::make_unique<Signals>(
        numbers, [word = word_, requests = requests_, headlines, limit](int signal) {
          word->write(headlines.at(signal));
          requests->wait(requests->post(signal, ""), limit);
        });
  }

  void watch(const Store& store, const std::string& file, const std::string& prefix, uint32_t rank,
             uint32_t ranks, const std::string& headline) {
    watcher_ = std::make_unique<Watcher>(
        store, Watcher::Options{file, prefix, rank, ranks},
        [word = word_, requests = requests_, headline](const std::string& text) {
          word->write(headline);
          requests->post(0, text);
        });
  }

  bool tell(const std::string& text) { return !watcher_ || watcher_->tell(text); }

  std::optional<std::tuple<uint64_t, int, std::string>> next() {
    auto request = requests_->next();
    if (!request) {
      return std::nullopt;
    }
    return std::make_tuple(request->number, request->signal, std::move(request->text));
  }
  void done(uint64_t number) { requests_->done(number); }
  std::string row(const std::string& headline) const { return word_->text(headline); }
  void keep() { word_->keep(); }
  void remember(std::string earlier) { word_->remember(std::move(earlier)); }

  void close() {
    requests_->close();  // first: a signal that waits for Python would wait for who closes
    signals_.reset();
    watcher_.reset();
  }

 private:
  // Shared with a thread that close() may have to leave behind.
  std::shared_ptr<LastWord> word_;
  std::shared_ptr<Requests> requests_;
  std::unique_ptr<Signals> signals_;
  std::unique_ptr<Watcher> watcher_;
};

}  // namespace

void bind_flight(py::module_& m) {
  py::class_<Flight>(m, "Flight")
      .def(py::init<std::string, std::string>(), py::arg("path"), py::arg("identity"))
      .def("take_signals", &Flight::take_signals, py::arg("headlines"), py::arg("seconds"), NoGil())
      .def("watch", &Flight::watch, py::arg("store"), py::arg("file"), py::arg("prefix"),
           py::arg("rank"), py::arg("ranks"), py::arg("headline"), NoGil())
      .def("tell", &Flight::tell, py::arg("text"), NoGil())
      .def("next", &Flight::next, NoGil())
      .def("done", &Flight::done, py::arg("number"), NoGil())
      .def("row", &Flight::row, py::arg("headline"), NoGil())
      .def("keep", &Flight::keep, NoGil())
      .def("remember", &Flight::remember, py::arg("earlier"), NoGil())
      .def("close", &Flight::close, NoGil());
}
