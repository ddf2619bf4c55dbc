#include <tenure/pipeline/account.h>

#include <tenure/core/error.h>
#include <tenure/core/part.h>
#include <tenure/core/text.h>

#include <algorithm>
#include <iterator>
#include <unordered_set>
#include <utility>

namespace tenure::pipeline {
namespace {

// A caching allocator rounds up: what it has given out may be more than tensors have.
constexpr int64_t kRounding = 1 << 20;
constexpr uint32_t kLessons = 8;  // in a row that may leave something behind
constexpr int kReadings = 8;      // until nothing comes or goes meanwhile

int64_t displaced(c10::Device device) {
  int64_t out = 0;
  for (const auto& part : parts()) {
    out += part->displaced ? part->displaced(device) : 0;
  }
  return out;
}

}  // namespace

void Remains::add(Step step, int64_t left, uint32_t rank) {
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
                         ", gradients not counted: a stage keeps tensors of its microbatches; "
                         "`tenure run` says who"));
}

Account::Account(const Schedule& schedule, uint32_t rank, c10::Device device)
    : schedule_(schedule),
      rank_(rank),
      counting_(device.is_cpu() ? std::optional<HostCount>(std::in_place) : std::nullopt),
      meter_(device),
      stages_(schedule.stages_of(rank)) {}

Account::~Account() = default;

int64_t Account::gradient_bytes() const {
  int64_t out = 0;
  for (const auto& parameter : parameters_) {
    if (const auto& gradient = parameter.grad(); gradient.defined()) {
      out += static_cast<int64_t>(gradient.nbytes());
    }
  }
  return out;
}

// Where copies are waited for by another thread, what it lets go just then is in neither figure.
Account::Reading Account::read() {
  Reading out{.there = meter_.read(), .displaced = displaced(meter_.device())};
  for (int i = 1; i < kReadings && !meter_.device().is_cpu(); ++i) {
    const auto again = meter_.read();
    const auto same = again.current == out.there.current;
    out.there = {.current = again.current, .peak = std::max(out.there.peak, again.peak)};
    if (same) {
      break;
    }
    out.displaced = displaced(meter_.device());
  }
  return out;
}

void Account::start() {
  const auto now = read();
  start_ = now.there.current;
  displaced_at_start_ = now.displaced;
}

Account::Level Account::level() {
  const auto now = read();
  const auto gradients = gradient_bytes() - gradients_at_start_;
  peak_ = std::max(peak_, now.there.peak - start_ - gradients);
  const auto there = now.there.current - start_ - gradients;
  return {.there = there, .whole = there + now.displaced - displaced_at_start_};
}

void Account::begin(const std::vector<at::Tensor>& parameters) {
  parameters_.clear();
  std::unordered_set<const c10::TensorImpl*> seen;  // a parameter may be of two stages
  std::ranges::copy_if(parameters, std::back_inserter(parameters_), [&](const at::Tensor& one) {
    return seen.insert(one.unsafeGetTensorImpl()).second;
  });
  gradients_at_start_ = gradient_bytes();
  start();
  peak_between_ = 0;
  peak_ = 0;
  most_messages_ = 0;
  checking_ = !learned_.empty();
  learning_.assign(stages_.size(), {});
  if (checking_) {
    allowed_ = levels(schedule_, rank_, learned_);
  }
}

int64_t Account::bound() const {
  return allowed_.empty() ? 0 : *std::ranges::max_element(allowed_);
}

void Account::before() { before_ = level().whole; }

void Account::after(size_t position, const Action& action, int64_t messages) {
  const auto level = this->level();
  const auto now = level.whole;
  peak_between_ = std::max(peak_between_, level.there);
  most_messages_ = std::max(most_messages_, messages);
  const auto stage = std::ranges::find(stages_, action.stage) - stages_.begin();
  auto& bytes = learning_[static_cast<size_t>(stage)];
  if (action.kind == Kind::forward) {
    bytes.whole = std::max(bytes.whole, now - before_);
    if (checking_ && bytes.whole > learned_[static_cast<size_t>(stage)].whole) {
      shapes_changed();
    }
  } else if (action.kind == Kind::input_backward) {
    bytes.waiting = std::max(bytes.waiting, bytes.whole + now - before_);
  }
  const auto rounding = counting_ ? 0 : kRounding;
  if (!checking_ || now <= allowed_[position] + messages + rounding) {
    return;
  }
  throw BudgetError(
      text("rank ", rank_, " of the pipeline has ", bytes_text(static_cast<uint64_t>(now)),
           " more than when the step began after ", action.words(), ", and its schedule allows ",
           bytes_text(static_cast<uint64_t>(allowed_[position])), " and messages of ",
           bytes_text(static_cast<uint64_t>(messages)),
           ": something keeps tensors of microbatches that are done; "
           "`tenure run` says who"));
}

void Account::end(int64_t handed_out) {
  const auto left = level().whole - handed_out;
  const auto rounding = counting_ ? 0 : kRounding * static_cast<int64_t>(parameters_.size());
  parameters_.clear();
  const auto step =
      std::exchange(checking_, false) ? Remains::Step::checked : Remains::Step::lesson;
  of_training_.add(step, left - rounding, rank_);
  learned_ = learning_;
}

void Account::begin_evaluation() {
  checking_ = std::exchange(has_evaluated_, true);
  gradients_at_start_ = gradient_bytes();
  start();
}

void Account::end_evaluation(int64_t handed_out) {
  const auto left = level().whole - handed_out;
  const auto step =
      std::exchange(checking_, false) ? Remains::Step::checked : Remains::Step::lesson;
  of_evaluation_.add(step, left - (counting_ ? 0 : kRounding), rank_);
}

void Account::drop() {
  parameters_.clear();
  checking_ = false;
}

}  // namespace tenure::pipeline
