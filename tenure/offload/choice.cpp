#include <tenure/offload/choice.h>

#include <tenure/offload/min_cut.h>
#include <tenure/offload/planner.h>

#include <algorithm>
#include <numeric>

namespace tenure::offload {
namespace {

// Of the bytes that can be made again, so many at either end are strays.
constexpr double kStrays = 0.01;
// Forward is parted into about 4, 8, ... parts, at most so many.
constexpr uint64_t kFewestParts = 4;
constexpr uint64_t kMostParts = 512;
// A part is at least and at most so much of its due size: in between, where least crosses.
constexpr double kLeastPart = 0.6;
constexpr double kMostPart = 1.6;
// Nodes of the network.
constexpr uint32_t kSource = 0;
constexpr uint32_t kSink = 1;
constexpr uint32_t kNoNode = kSource;

}  // namespace

Choice::Choice(const Timeline& timeline, const Trace& trace) : timeline_(timeline), trace_(trace) {
  find_remakeable();
  find_wanted();
  find_prices();
  find_borders();
}

bool Choice::may_repeat(const CallTrace& call) const {
  return call.repeatable && std::ranges::all_of(call.inputs, [&](uint32_t input) {
           return trace_.values[input].steady;
         });
}

// Others hold it until backward has used it.
bool Choice::is_free(const ValueTrace& value) const {
  if (value.gone == kNever) {
    return true;
  }
  if (value.saved == kNone) {
    return false;
  }
  const auto& saved = timeline_.saved[value.saved];
  return saved.gone == kNever || gone_from(saved) >= saved.needed;
}

// What backward did not need is not promised to be needed never: it is not dropped.
bool Choice::may_drop(const ValueTrace& value) const {
  return value.steady &&
         (value.saved == kNone || timeline_.saved[value.saved].needed < timeline_.ticks());
}

void Choice::find_remakeable() {
  remakeable_.resize(trace_.values.size());
  for (const auto& call : trace_.calls) {
    if (may_repeat(call)) {
      for (const auto output : call.outputs) {
        remakeable_[output] = may_drop(trace_.values[output]);
      }
    }
  }
}

void Choice::find_wanted() {
  std::vector<bool> seen(trace_.values.size());
  const auto want = [&](uint32_t value) {
    if (!seen[value]) {
      seen[value] = true;
      wanted_.push_back(value);
    }
  };
  for (uint32_t v = 0; v < trace_.values.size(); ++v) {
    if (trace_.values[v].saved != kNone) {
      want(v);
    }
  }
  for (size_t next = 0; next != wanted_.size();) {  // it grows
    if (const auto value = wanted_[next++]; remakeable_[value]) {
      std::ranges::for_each(trace_.calls[trace_.values[value].call].inputs, want);
    }
  }
}

void Choice::find_prices() {
  std::vector<std::pair<double, uint64_t>> ratios;
  uint64_t all = 0;
  for (const auto v : wanted_) {
    const auto& value = trace_.values[v];
    if (remakeable_[v] && value.bytes > 0) {
      ratios.emplace_back(
          remake_seconds(trace_.calls[value.call]) / static_cast<double>(value.bytes), value.bytes);
      all += value.bytes;
    }
  }
  std::ranges::sort(ratios);
  const auto strays = static_cast<uint64_t>(static_cast<double>(all) * kStrays);
  uint64_t below = 0;
  for (const auto& [ratio, bytes] : ratios) {
    least_ = below <= strays ? ratio : least_;
    most_ = below < all - strays ? ratio : most_;
    below += bytes;
  }
}

void Choice::find_borders() {
  borders_.emplace_back(trace_.values.size());
  last_use_.assign(trace_.values.size(), 0);
  for (uint32_t c = 0; c < trace_.calls.size(); ++c) {
    if (may_repeat(trace_.calls[c])) {
      for (const auto input : trace_.calls[c].inputs) {
        last_use_[input] = c;
      }
    }
  }
  const auto crossing = this->crossing();
  const auto saved = saved_bytes();
  const auto all = saved.empty() ? 0 : saved.back();
  for (auto parts = kFewestParts; parts <= kMostParts && all >= parts; parts *= 2) {
    auto border = part(all / parts, crossing, saved);
    if (border != borders_.back()) {
      borders_.push_back(std::move(border));
    }
  }
}

// By call: the bytes that calls before it made and that it or a later one reads.
std::vector<int64_t> Choice::crossing() const {
  std::vector<int64_t> out(trace_.calls.size() + 1);
  for (const auto v : wanted_) {
    const auto& value = trace_.values[v];
    if (remakeable_[v] && !is_free(value) && last_use_[v] > value.call) {
      out[value.call + 1] += static_cast<int64_t>(value.bytes);
      out[last_use_[v] + 1] -= static_cast<int64_t>(value.bytes);
    }
  }
  std::partial_sum(out.begin(), out.end(), out.begin());
  return out;
}

// By call: what was saved of the outputs up to it.
std::vector<uint64_t> Choice::saved_bytes() const {
  std::vector<uint64_t> out(trace_.calls.size());
  for (const auto& value : trace_.values) {
    if (value.saved != kNone && value.call != kNone) {
      out[value.call] += value.bytes;
    }
  }
  std::partial_sum(out.begin(), out.end(), out.begin());
  return out;
}

std::vector<bool> Choice::part(uint64_t size, const std::vector<int64_t>& crossing,
                               const std::vector<uint64_t>& saved) const {
  std::vector<uint32_t> part_of(trace_.calls.size());
  const auto least = static_cast<uint64_t>(static_cast<double>(size) * kLeastPart);
  const auto most = static_cast<uint64_t>(static_cast<double>(size) * kMostPart);
  const auto until = [&](uint64_t bytes) {
    return static_cast<size_t>(std::ranges::upper_bound(saved, bytes) - saved.begin());
  };
  size_t begin = 0;
  uint64_t before = 0;
  for (uint32_t number = 1; begin < saved.size(); ++number) {
    const auto from = std::max(until(before + least), begin + 1);
    const auto to = std::max(until(before + most), from + 1);
    if (to >= saved.size()) {
      break;
    }
    const auto at = [&](size_t call) { return crossing.begin() + static_cast<int64_t>(call); };
    begin = static_cast<size_t>(std::min_element(at(from), at(to)) - crossing.begin());
    before = saved[begin - 1];
    std::fill(part_of.begin() + static_cast<int64_t>(begin), part_of.end(), number);
  }
  std::vector<bool> out(trace_.values.size());
  for (const auto v : wanted_) {
    const auto call = trace_.values[v].call;
    out[v] = remakeable_[v] && last_use_[v] > call && part_of[call] != part_of[last_use_[v]];
  }
  return out;
}

std::vector<bool> Choice::at(const Price& price, const std::vector<bool>& border) const {
  return between(std::vector<bool>(trace_.values.size()), remakeable_, price, border);
}

// By value: whether backward needs it, or what is made again.
std::vector<bool> Choice::needed_with(const std::vector<bool>& remade) const {
  std::vector<bool> out(trace_.values.size());
  for (const auto v : wanted_) {
    const auto& value = trace_.values[v];
    out[v] = out[v] || value.saved != kNone;
    if (remade[v]) {
      for (const auto input : trace_.calls[value.call].inputs) {
        out[input] = true;
      }
    }
  }
  return out;
}

std::vector<bool> Choice::between(const std::vector<bool>& less, const std::vector<bool>& more,
                                  const Price& price, const std::vector<bool>& border) const {
  uint32_t nodes = 2;
  std::vector<uint32_t> in(trace_.values.size(), kSource);  // the source, unless it is open
  std::vector<uint32_t> out(trace_.values.size(), kNoNode);
  std::vector<uint32_t> call(trace_.calls.size(), kNoNode);
  const auto needed = needed_with(less);
  const auto is_open = [&](uint32_t v) { return more[v] && !less[v] && !border[v]; };
  const auto add = [&](uint32_t& node) { node = node == kNoNode ? nodes++ : node; };
  for (const auto v : wanted_) {
    if (!is_open(v)) {
      continue;
    }
    add(out[v]);
    add(in[v]);
    add(call[trace_.values[v].call]);
    for (const auto input : trace_.calls[trace_.values[v].call].inputs) {
      // Others cost nothing more by being needed once again.
      if (is_open(input) || !(less[input] || needed[input] || is_free(trace_.values[input]))) {
        add(out[input]);
      }
    }
  }
  Network network(nodes);
  for (uint32_t c = 0; c < call.size(); ++c) {
    if (call[c] == kNoNode) {
      continue;
    }
    const auto& outputs = trace_.calls[c].outputs;
    if (std::ranges::none_of(outputs, [&](uint32_t v) { return less[v]; })) {
      network.edge(kSource, call[c], remake_seconds(trace_.calls[c]));
    }
    for (const auto input : trace_.calls[c].inputs) {
      if (out[input] != kNoNode) {
        network.edge(out[input], call[c], Network::kEndless);
      }
    }
  }
  for (const auto v : wanted_) {
    if (out[v] == kNoNode) {
      continue;
    }
    const auto& value = trace_.values[v];
    network.edge(in[v], out[v],
                 is_free(value) ? 0 : static_cast<double>(value.bytes) * price.of(value));
    if (in[v] != kSource) {
      network.edge(call[value.call], in[v], Network::kEndless);
    }
    if (needed[v]) {
      network.edge(out[v], kSink, Network::kEndless);
    }
  }
  const auto cut = network.cut(kSource, kSink);
  auto remade = less;
  for (const auto v : wanted_) {
    remade[v] = remade[v] || (in[v] != kSource && cut[in[v]]);
  }
  return remade;
}

}  // namespace tenure::offload
