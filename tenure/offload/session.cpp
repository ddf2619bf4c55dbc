#include <tenure/offload/session.h>

#include <tenure/core/error.h>
#include <tenure/offload/promise.h>
#include <tenure/offload/state.h>

namespace tenure::offload {
namespace {

void check(const Options& options) {
  if (options.budget && *options.budget == 0) {
    throw InputError("a budget of 0 bytes cannot be met: give the most that the device may hold");
  }
  if (options.recompute && !options.budget) {
    throw InputError("what is to be made again depends on the budget: give one");
  }
  if (options.audit < 0 || options.audit > 1) {
    throw InputError("audit is a part of what is made again, from 0 to 1");
  }
}

}  // namespace

Session::Session(Options options) {
  check(options);
  const auto budget = options.budget;
  state_ = std::make_shared<State>(std::move(options));
  const std::weak_ptr<State> weak = state_;
  promise_ = std::make_unique<Promise>(budget, [weak](const c10::Device& device) {
    const auto state = weak.lock();
    return state == nullptr ? 0 : state->displaced(device);
  });
}

Session::~Session() = default;

void Session::never(std::vector<StorageRef> storages) { state_->never(std::move(storages)); }
void Session::begin() { state_->begin(); }
void Session::end() { state_->end(); }
void Session::abandon() { state_->abandon(); }
bool Session::active() const { return state_->active(); }
bool Session::measuring() const { return state_->measuring(); }

Saved Session::pack(const at::Tensor& tensor, std::optional<Kept> known) {
  return state_->pack(tensor, known);
}

Saved Session::pass(const at::Tensor& tensor) { return state_->pass(tensor); }

at::Tensor Session::unpack(const Saved& saved, Sharing sharing) {
  return saved.state_->unpack(saved, sharing);
}

std::vector<c10::Storage> Session::held(const Saved& saved) {
  if (saved.passed_.defined()) {
    return saved.passed_.has_storage() ? std::vector{saved.passed_.storage()}
                                       : std::vector<c10::Storage>();
  }
  return saved.storage_ == nullptr ? std::vector<c10::Storage>()
                                   : saved.state_->held(*saved.storage_);
}

void Session::settle() { state_->settle(); }
Stats Session::stats() const { return state_->stats(); }
Fitted Session::fitted() const { return state_->fitted(); }
std::vector<Point> Session::frontier(size_t points) const { return state_->frontier(points); }
const Options& Session::options() const { return state_->options; }

}  // namespace tenure::offload
