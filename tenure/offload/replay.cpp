#include <tenure/offload/replay.h>

#include <tenure/offload/choice.h>
#include <tenure/offload/planner.h>

#include <algorithm>

namespace tenure::offload {
namespace {

class Backward {
 public:
  Backward(const Timeline& timeline, const Trace& trace, const std::vector<bool>& remade)
      : measured_(timeline), trace_(trace), remade_(remade) {
    out_.timeline = timeline;
    out_.asks.resize(trace.values.size());
    out_.recorded.resize(trace.calls.size());
    out_.seconds.resize(timeline.ticks());
    out_.lives.resize(trace.values.size());
    given_.resize(trace.values.size());
    held_.resize(trace.values.size());
    ran_.resize(trace.calls.size());
    boarding_.resize(timeline.ticks() + 1);
    find_needs();
  }

  Replay run() {
    count_asks();
    for (size_t tick = 0; tick < measured_.ticks(); ++tick) {
      play(tick);
    }
    for (uint32_t v = 0; v < held_.size(); ++v) {
      board(v);
    }
    add_boarded();
    last_until_last_use();
    return std::move(out_);
  }

 private:
  // When a held value is asked for to make others.
  struct Asked {
    uint32_t times = 0;
    size_t first = 0;
    size_t last = 0;
  };

  const CallTrace& call_of(uint32_t value) const { return trace_.calls[trace_.values[value].call]; }
  int64_t bytes(uint32_t value) const { return static_cast<int64_t>(trace_.values[value].bytes); }

  void find_needs() {
    first_.assign(measured_.ticks(), kNone);
    last_.resize(measured_.ticks());
    for (uint32_t v = 0; v < trace_.values.size(); ++v) {
      const auto index = trace_.values[v].saved;
      if (index == kNone || !remade_[v]) {
        continue;
      }
      out_.timeline.saved[index].remade = true;
      const auto& saved = measured_.saved[index];
      if (saved.needed < measured_.ticks()) {
        first_[saved.needed] = v;
        if (saved.uses > 1) {
          last_[saved.last].push_back(v);
        }
      }
    }
  }

  // A call runs once, so each of its inputs is asked for once on its account.
  void count_asks() {
    std::vector<uint32_t> calls;
    const auto ask = [&](uint32_t value, uint32_t times) {
      if (!remade_[value]) {
        return;
      }
      out_.asks[value] += times;
      const auto call = trace_.values[value].call;
      if (!out_.recorded[call]) {
        out_.recorded[call] = true;
        calls.push_back(call);
      }
    };
    for (const auto v : first_) {
      if (v != kNone) {
        ask(v, std::max<uint32_t>(measured_.saved[trace_.values[v].saved].uses, 1));
      }
    }
    while (!calls.empty()) {
      const auto call = calls.back();
      calls.pop_back();
      for (const auto input : trace_.calls[call].inputs) {
        ask(input, 1);
      }
    }
  }

  void play(size_t tick) {
    most_ = live_;
    const auto before = live_;
    const auto first = first_[tick];
    if (first != kNone) {
      make(first, tick);
      give(first, 1, tick);
    }
    auto& timeline = out_.timeline;
    const auto level = measured_.level.empty() ? measured_.peak[tick] : measured_.level[tick];
    // What backward has just taken is in what was measured.
    const auto taken = first != kNone && given_[first] < out_.asks[first] ? bytes(first) : 0;
    timeline.peak[tick] =
        std::max(measured_.peak[tick] + live_ - taken, first != kNone ? level + most_ : 0);
    if (!timeline.level.empty()) {
      timeline.level[tick] += before;
    }
    for (const auto v : last_[tick]) {
      give(v, measured_.saved[trace_.values[v].saved].uses - 1, tick);
    }
  }

  // Note [Order of making], with a stack of our own: chains are long.
  void make(uint32_t wanted, size_t tick) {
    struct Step {
      uint32_t call;
      size_t input;
    };
    std::vector<Step> stack;
    const auto begin = [&](uint32_t value) {
      const auto call = trace_.values[value].call;
      if (!ran_[call]) {
        ran_[call] = true;
        stack.push_back({call, 0});
      }
    };
    begin(wanted);
    while (!stack.empty()) {
      const auto& call = trace_.calls[stack.back().call];
      if (stack.back().input < call.inputs.size()) {
        const auto input = call.inputs[stack.back().input++];
        if (remade_[input]) {
          begin(input);
        } else {
          ask_held(input, tick);
        }
      } else {
        stack.pop_back();
        repeat(call, tick);
      }
    }
  }

  void repeat(const CallTrace& call, size_t tick) {
    for (const auto output : call.outputs) {
      live_ += bytes(output);
      out_.lives[output] = {.made = tick, .last = tick};
    }
    most_ = std::max(most_, live_ + static_cast<int64_t>(call.scratch));
    for (const auto output : call.outputs) {
      live_ -= out_.asks[output] == 0 ? bytes(output) : 0;
    }
    for (const auto input : call.inputs) {
      if (remade_[input]) {
        give(input, 1, tick);
      }
    }
    out_.seconds[tick] += remake_seconds(call);
  }

  void give(uint32_t value, uint32_t times, size_t tick) {
    given_[value] += times;
    out_.lives[value].last = tick;
    live_ -= given_[value] == out_.asks[value] ? bytes(value) : 0;
  }

  void ask_held(uint32_t value, size_t tick) {
    auto& asked = held_[value];
    asked.first = asked.times == 0 ? tick : asked.first;
    asked.last = tick;
    ++asked.times;
  }

  // A held value that others are made of is on board from its first use to its last.
  void board(uint32_t v) {
    const auto& asked = held_[v];
    if (asked.times == 0) {
      return;
    }
    const auto& value = trace_.values[v];
    auto& saved = value.saved == kNone ? root(v) : out_.timeline.saved[value.saved];
    const bool early = asked.first < saved.needed;
    saved.needed = std::min(saved.needed, asked.first);
    saved.last = std::max(saved.last, asked.last);
    saved.uses += asked.times;
    saved.stays = true;
    add(saved, early ? saved.needed : saved.needed + 1);
  }

  SavedTrace& root(uint32_t v) {
    const auto& value = trace_.values[v];
    out_.roots.push_back(v);
    out_.timeline.saved.push_back({.bytes = value.bytes, .saved = value.born, .gone = value.gone});
    return out_.timeline.saved.back();
  }

  void last_until_last_use() {
    for (auto& saved : out_.timeline.saved) {
      saved.lasts = !saved.remade && !saved.stays && saved.needed < saved.last;
    }
  }

  // From that interval to the last use, unless others hold it.
  void add(const SavedTrace& saved, size_t begin) {
    begin = std::max(begin, gone_from(saved));
    const auto end = std::min(saved.last + 1, measured_.ticks());
    if (begin < end) {
      boarding_[begin] += static_cast<int64_t>(saved.bytes);
      boarding_[end] -= static_cast<int64_t>(saved.bytes);
    }
  }

  void add_boarded() {
    auto& timeline = out_.timeline;
    int64_t boarded = 0;
    for (size_t t = 0; t < timeline.ticks(); ++t) {
      boarded += boarding_[t];
      timeline.peak[t] += boarded;
      if (!timeline.level.empty()) {
        timeline.level[t] += boarded;
      }
    }
  }

  const Timeline& measured_;
  const Trace& trace_;
  const std::vector<bool>& remade_;
  std::vector<uint32_t> first_;              // by tick: the value that makes it
  std::vector<std::vector<uint32_t>> last_;  // by interval: the values last used in it
  std::vector<uint32_t> given_;              // by value: asks that were answered
  std::vector<Asked> held_;                  // by value
  std::vector<bool> ran_;                    // by call
  std::vector<int64_t> boarding_;            // by interval: held bytes that come on board, or go
  int64_t live_ = 0;                         // what was made again and is there
  int64_t most_ = 0;                         // of it, at this tick
  Replay out_;
};

}  // namespace

Replay replay(const Timeline& timeline, const Trace& trace, const std::vector<bool>& remade) {
  return Backward(timeline, trace, remade).run();
}

}  // namespace tenure::offload
