#include <tenure/pipeline/lessons.h>

#include <algorithm>
#include <utility>

namespace tenure::pipeline {

void Lessons::begin() {
  shapes_.clear();
  alike_.clear();
  for (auto& known : known_) {
    alike_.push_back(&known);
  }
}

void Lessons::narrow(uint64_t shapes) {
  const auto position = shapes_.size();
  shapes_.push_back(shapes);
  std::erase_if(alike_, [&](const auto* known) { return known->shapes[position] != shapes; });
}

bool Lessons::end(const std::vector<MicrobatchBytes>& took) {
  const auto was_new = is_new();
  auto& of = was_new ? room() : *alike_.front();
  if (!of.is_settled) {
    of.figures = {.bytes = took, .levels = levels(schedule_, rank_, took)};
    of.is_settled = !was_new;
  }
  of.used = ++steps_;
  last_ = of.figures;
  return was_new;
}

Lessons::Known& Lessons::room() {
  auto& out = known_.size() < kMost
                  ? known_.emplace_back()
                  : *std::ranges::min_element(known_, {}, [](const auto& of) { return of.used; });
  out = {.shapes = shapes_, .figures = {}, .is_settled = false, .used = 0};
  return out;
}

bool Lessons::is_settled() const {
  return std::ranges::all_of(alike_, [](const auto* known) { return known->is_settled; });
}

int64_t Lessons::level(size_t position) const {
  int64_t out = 0;
  for (const auto* known : alike_) {
    out = std::max(out, known->figures.levels[position]);
  }
  return out;
}

int64_t Lessons::whole(size_t stage) const {
  int64_t out = 0;
  for (const auto* known : alike_) {
    out = std::max(out, known->figures.bytes[stage].whole);
  }
  return out;
}

int64_t Lessons::highest() const {
  return last_.levels.empty() ? 0 : *std::ranges::max_element(last_.levels);
}

}  // namespace tenure::pipeline
