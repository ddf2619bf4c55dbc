// A step of a Llama-like model as the fit planner sees it: what its calls take on an H200, what
// autograd saves of it, and the levels that an allocator would count.
#pragma once

#include "step.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace tenure::offload {

// What an op of the model is to a plan.
enum class Kind : uint8_t { cheap = 1, matmul, widening, attention };

inline bool is(const CallTrace& call, Kind kind) {
  return static_cast<uint32_t>(call.op) == static_cast<uint32_t>(kind);
}

class Builder {
 public:
  static constexpr double kBandwidth = 3e12;
  static constexpr double kFlops = 6e14;

  uint32_t given(uint64_t bytes) {
    step_.trace.values.push_back({.bytes = bytes});
    return last();
  }
  uint32_t call(Kind kind, std::vector<uint32_t> inputs, uint64_t bytes, double seconds) {
    const auto number = static_cast<uint32_t>(step_.trace.calls.size());
    step_.trace.values.push_back({.bytes = bytes, .call = number, .born = born()});
    step_.trace.calls.push_back({.op = static_cast<NameId>(kind),
                                 .inputs = std::move(inputs),
                                 .outputs = {last()},
                                 .seconds = seconds,
                                 .repeatable = kind != Kind::attention});
    return last();
  }
  uint32_t cheap(const std::vector<uint32_t>& inputs, uint64_t bytes) {
    auto moved = bytes;
    for (const auto input : inputs) {
      moved += step_.trace.values[input].bytes;
    }
    return call(Kind::cheap, inputs, bytes, static_cast<double>(moved) / kBandwidth);
  }
  uint32_t matmul(uint32_t input, uint32_t weight, uint64_t rows, uint64_t inner,
                  uint64_t columns) {
    save(input);
    return call(columns > inner ? Kind::widening : Kind::matmul, {input, weight},
                2 * rows * columns,
                2.0 * static_cast<double>(rows * inner) * static_cast<double>(columns) / kFlops);
  }
  // Autograd saves it; each time is a use.
  void save(uint32_t value) {
    auto& of = step_.trace.values[value];
    if (of.call == kNone) {
      return;
    }
    if (of.saved == kNone) {
      of.saved = static_cast<uint32_t>(step_.timeline.saved.size());
      step_.timeline.saved.push_back({.bytes = of.bytes, .saved = ticks_++});
    }
    saves_.push_back(of.saved);
  }

  // Backward needs everything in reverse; `working` bytes come on top wherever it is.
  Step finish(int64_t floor, int64_t working) {
    auto& timeline = step_.timeline;
    for (size_t i = saves_.size(); i-- > 0;) {
      auto& saved = timeline.saved[saves_[i]];
      saved.needed = saved.needed == kNever ? ticks_++ : saved.needed;
      saved.last = ticks_ - 1;
      ++saved.uses;
    }
    timeline.at_begin = floor;
    timeline.level.assign(ticks_, floor);
    find_gone();
    timeline.peak = timeline.level;
    for (auto& peak : timeline.peak) {
      peak += working;
    }
    for (const auto& saved : timeline.saved) {
      timeline.peak[saved.needed] += static_cast<int64_t>(saved.bytes);
      timeline.peak[saved.last] +=
          saved.last == saved.needed ? 0 : static_cast<int64_t>(saved.bytes);
    }
    return std::move(step_);
  }

 private:
  uint32_t last() const { return static_cast<uint32_t>(step_.trace.values.size() - 1); }
  size_t born() const { return std::max<size_t>(ticks_, 1) - 1; }

  // With the interval of the last call that reads it.
  void find_gone() {
    auto& trace = step_.trace;
    std::vector<size_t> used(trace.values.size(), 0);
    for (const auto& call : trace.calls) {
      for (const auto input : call.inputs) {
        used[input] = std::max(used[input], trace.values[call.outputs.front()].born);
      }
    }
    for (uint32_t v = 0; v < trace.values.size(); ++v) {
      auto& value = trace.values[v];
      if (value.call == kNone) {
        continue;
      }
      value.gone = std::max(used[v], value.born) + 1;
      if (value.saved != kNone) {
        step_.timeline.saved[value.saved].gone = value.gone;
      }
      for (auto t = value.born; t + 1 < value.gone; ++t) {
        step_.timeline.level[t] += static_cast<int64_t>(value.bytes);
      }
    }
  }

  Step step_;
  std::vector<uint32_t> saves_;
  size_t ticks_ = 0;
};

struct LlamaShape {
  size_t layers = 16;
  uint64_t tokens = 8192;
  uint64_t hidden = 2048;
  uint64_t inner = 8192;
  uint64_t keys = 512;  // hidden size of keys and values
};

class Llama {
 public:
  explicit Llama(const LlamaShape& shape) : shape_(shape) {}

  Step step() {
    auto x = build_.given(half(shape_.hidden));
    cos_ = build_.given(half(64));
    for (size_t i = 0; i < shape_.layers; ++i) {
      x = layer(x);
    }
    norm(x);
    const auto working = static_cast<int64_t>(4 * half(shape_.inner));
    return build_.finish(int64_t{2} << 30, working);
  }

 private:
  uint64_t half(uint64_t columns) const { return 2 * shape_.tokens * columns; }
  uint32_t weight(uint64_t bytes) { return build_.given(bytes); }

  uint32_t linear(uint32_t x, uint64_t inner, uint64_t columns) {
    return build_.matmul(x, weight(2 * inner * columns), shape_.tokens, inner, columns);
  }

  uint32_t norm(uint32_t x) {
    const auto whole = 2 * half(shape_.hidden);
    const auto row = 4 * shape_.tokens;
    const auto wide = build_.cheap({x}, whole);
    build_.save(wide);
    const auto square = build_.cheap({wide}, whole);
    const auto mean = build_.cheap({square}, row);
    const auto root = build_.cheap({build_.cheap({mean}, row)}, row);
    build_.save(root);
    const auto scaled = build_.cheap({wide, root}, whole);
    const auto narrow = build_.cheap({scaled}, half(shape_.hidden));
    build_.save(narrow);
    return build_.cheap({narrow, weight(2 * shape_.hidden)}, half(shape_.hidden));
  }

  uint32_t rotated(uint32_t x, uint64_t columns) {
    const auto one = build_.cheap({x, cos_}, half(columns));
    const auto turned = build_.cheap({x}, half(columns));
    const auto other = build_.cheap({turned, cos_}, half(columns));
    return build_.cheap({one, other}, half(columns));
  }

  uint32_t attention(uint32_t x) {
    const auto q = rotated(linear(x, shape_.hidden, shape_.hidden), shape_.hidden);
    const auto k = rotated(linear(x, shape_.hidden, shape_.keys), shape_.keys);
    const auto v = linear(x, shape_.hidden, shape_.keys);
    const auto flops = 2.0 * static_cast<double>(shape_.tokens * shape_.tokens * shape_.hidden);
    build_.save(q);
    build_.save(k);
    build_.save(v);
    const auto out =
        build_.call(Kind::attention, {q, k, v}, half(shape_.hidden), flops / Builder::kFlops);
    build_.save(out);
    return linear(out, shape_.hidden, shape_.hidden);
  }

  uint32_t mlp(uint32_t x) {
    const auto gate = linear(x, shape_.hidden, shape_.inner);
    const auto up = linear(x, shape_.hidden, shape_.inner);
    build_.save(gate);
    const auto silu = build_.cheap({gate}, half(shape_.inner));
    build_.save(silu);
    build_.save(up);
    return linear(build_.cheap({silu, up}, half(shape_.inner)), shape_.inner, shape_.hidden);
  }

  uint32_t layer(uint32_t x) {
    x = build_.cheap({x, attention(norm(x))}, half(shape_.hidden));
    return build_.cheap({x, mlp(norm(x))}, half(shape_.hidden));
  }

  LlamaShape shape_;
  Builder build_;
  uint32_t cos_ = 0;
};

}  // namespace tenure::offload
