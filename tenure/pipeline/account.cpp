#include <tenure/pipeline/account.h>

#include <tenure/core/error.h>
#include <tenure/core/part.h>
#include <tenure/core/text.h>

#include <algorithm>
#include <utility>

namespace tenure::pipeline {
namespace {

// What libraries take on a device when they first need it.
constexpr int64_t kRounding = 1 << 20;
constexpr uint32_t kLessons = 8;  // in a row that may leave something behind
constexpr int kReadings = 8;      // until nothing comes or goes meanwhile
constexpr size_t kShapes = 1024;  // of evaluations, that are remembered

int64_t bytes_of(const at::Tensor& gradient) {
  if (gradient.is_sparse()) {
    return static_cast<int64_t>(gradient._values().nbytes() + gradient._indices().nbytes());
  }
  return gradient.layout() == c10::kStrided ? static_cast<int64_t>(gradient.nbytes()) : 0;
}

int64_t displaced(c10::Device device) {
  int64_t out = 0;
  for (const auto& part : parts()) {
    out += part->displaced ? part->displaced(device) : 0;
  }
  return out;
}

}  // namespace

void Remains::add(Step step, int64_t left, uint32_t rank, const char* whose) {
  if (left <= 0) {
    *this = {};
    return;
  }
  bytes_ += left;
  ++lessons_;
  if (step == Step::lesson && lessons_ < kLessons) {
    return;
  }
  const auto steps = std::exchange(lessons_, 0);
  const auto bytes = bytes_text(static_cast<uint64_t>(std::exchange(bytes_, 0)));
  const auto when = steps == 1
                        ? std::string(" of the pipeline ends the step with ")
                        : text(" of the pipeline ends each of ", steps, " steps with more, ");
  throw BudgetError(text("rank ", rank, when, bytes,
                         steps == 1 ? " more than it began with" : " in all",
                         ", gradients not counted: ", whose, "; `tenure run` says who"));
}

Account::Account(const Schedule& schedule, uint32_t rank, c10::Device device)
    : rank_(rank), device_(device), stages_(schedule.stages_of(rank)), lessons_(schedule, rank) {
  if (device.is_cpu()) {
    own_.emplace();
  } else {
    meter_.emplace(device);
  }
}

Account::~Account() = default;

int64_t Account::gradient_bytes() const {
  int64_t out = 0;
  for (const auto& [impl, leaf] : leaves_) {
    if (const at::Tensor tensor(leaf.lock()); tensor.defined() && tensor.grad().defined()) {
      out += bytes_of(tensor.grad());
    }
  }
  return out;
}

void Account::add_leaves(const std::vector<at::Tensor>& leaves) {
  for (const auto& leaf : leaves) {
    const auto is_new = leaves_.try_emplace(leaf.unsafeGetTensorImpl(), leaf.getIntrusivePtr());
    if (is_new.second && leaf.grad().defined()) {
      gradients_at_start_ += bytes_of(leaf.grad());
    }
  }
}

// Where copies are waited for by another thread, what it lets go just then is in neither figure.
Account::Reading Account::read() {
  if (!meter_) {
    return {.there = own_ ? own_->read() : Meter::Reading(), .displaced = displaced(device_)};
  }
  Reading out{.there = meter_->read(), .displaced = displaced(device_)};
  for (int i = 1; i < kReadings; ++i) {
    const auto again = meter_->read();
    const auto same = again.current == out.there.current;
    out.there = {.current = again.current,
                 .peak = std::max(out.there.peak, again.peak),
                 .asked = again.asked};
    if (same) {
      break;
    }
    out.displaced = displaced(device_);
  }
  return out;
}

// What allocators round up differs from step to step: but for the peak, which nobody knows without,
// what was asked for counts.
Account::Level Account::level() {
  const auto now = read();
  const auto gradients = gradient_bytes() - gradients_at_start_;
  peak_ = std::max(peak_, now.there.peak - at_start_.there.current - gradients);
  const auto there = now.there.asked - at_start_.there.asked - gradients;
  return {.there = there, .whole = there + now.displaced - at_start_.displaced};
}

void Account::begin(const std::vector<at::Tensor>& parameters) {
  leaves_.clear();
  gradients_at_start_ = 0;
  add_leaves(parameters);
  if (own_) {
    here_.emplace(*own_);
  }
  at_start_ = read();
  peak_between_ = 0;
  peak_ = 0;
  most_messages_ = 0;
  over_lesson_ = false;
  learning_.assign(stages_.size(), {});
  lessons_.begin();
}

void Account::before(int64_t given) { before_ = level().whole - given; }

void Account::after(size_t position, const Action& action, uint64_t shapes, int64_t messages) {
  const auto level = this->level();
  const auto now = level.whole;
  peak_between_ = std::max(peak_between_, level.there);
  most_messages_ = std::max(most_messages_, messages);
  lessons_.narrow(shapes);
  learn(action, now, messages);
  if (lessons_.is_new() || over_lesson_) {
    return;
  }
  const auto allowed = lessons_.level(position);
  if (now <= allowed + messages + rounding()) {
    return;
  }
  throw BudgetError(
      text("rank ", rank_, " of the pipeline has ", bytes_text(static_cast<uint64_t>(now)),
           " more than when the step began after ", action.words(), ", and its schedule allows ",
           bytes_text(static_cast<uint64_t>(allowed)), " and messages of ",
           bytes_text(static_cast<uint64_t>(messages)), ": ", whose(), "; `tenure run` says who"));
}

// What the action's microbatch takes, now that it is done.
void Account::learn(const Action& action, int64_t now, int64_t messages) {
  const auto stage =
      static_cast<size_t>(std::ranges::find(stages_, action.stage) - stages_.begin());
  auto& bytes = learning_[stage];
  if (action.kind == Kind::input_backward) {
    bytes.waiting = std::max(bytes.waiting, bytes.whole + now - before_);
  }
  if (action.kind != Kind::forward) {
    return;
  }
  bytes.whole = std::max(bytes.whole, now - before_);
  if (lessons_.is_new() || bytes.whole <= lessons_.whole(stage) + messages + rounding()) {
    return;
  }
  if (!lessons_.is_settled()) {
    over_lesson_ = true;
    return;
  }
  throw BudgetError(
      text("rank ", rank_, " of the pipeline has ", bytes_text(static_cast<uint64_t>(bytes.whole)),
           " of ", action.words(), ", and had at most ",
           bytes_text(static_cast<uint64_t>(lessons_.whole(stage))),
           " in the first steps with these shapes: the stage or the loss keeps more from step to "
           "step, which `tenure run` shows; if what they take depends on more than shapes, do "
           "without strict"));
}

// Of a device's memory nobody knows which thread has taken it.
const char* Account::whose() const {
  return own_ ? "a stage or the loss keeps tensors of microbatches"
              : "a stage or the loss keeps tensors of microbatches, or another thread of this "
                "process has taken memory of the device meanwhile";
}

int64_t Account::rounding() const { return own_ ? 0 : kRounding; }

void Account::end(int64_t handed_out) {
  const auto left = level().whole - handed_out;
  stop();
  of_training_.add(lessons_.end(learning_) ? Remains::Step::lesson : Remains::Step::checked,
                   left - rounding(), rank_, whose());
}

void Account::begin_evaluation() {
  gradients_at_start_ = 0;
  if (own_) {
    here_.emplace(*own_);
  }
  at_start_ = read();
}

void Account::end_evaluation(uint64_t shapes, int64_t handed_out) {
  const auto left = level().whole - handed_out;
  stop();
  if (evaluated_.size() == kShapes) {
    evaluated_.clear();
  }
  of_evaluation_.add(
      evaluated_.insert(shapes).second ? Remains::Step::lesson : Remains::Step::checked,
      left - rounding(), rank_, whose());
}

void Account::drop() { stop(); }

void Account::stop() {
  leaves_.clear();
  here_.reset();
}

}  // namespace tenure::pipeline
