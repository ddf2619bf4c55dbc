#include <tenure/pipeline/schedule.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <functional>
#include <initializer_list>

namespace tenure::pipeline {

std::string Action::text() const { return tenure::text(stage, letter_of(kind), microbatch); }

std::string Action::words() const {
  static constexpr std::array words_of_kinds = {"forward", "backward", "input backward",
                                                "weight backward"};
  return tenure::text("the ", words_of_kinds[static_cast<size_t>(kind)], " of stage ", stage,
                      " for microbatch ", microbatch);
}

std::vector<uint32_t> Schedule::stages_of(uint32_t rank) const {
  std::vector<uint32_t> out;
  for (uint32_t stage = 0; stage < stages(); ++stage) {
    if (rank_of_stage[stage] == rank) {
      out.push_back(stage);
    }
  }
  return out;
}

Schedule forward_only(const Schedule& schedule) {
  auto out = schedule;
  for (auto& actions : out.actions) {
    std::erase_if(actions, [](const Action& action) { return action.kind != Kind::forward; });
  }
  return out;
}

namespace {

struct Sizes {
  uint32_t ranks = 0;
  uint32_t microbatches = 0;
  uint32_t chunks = 0;
};

// What a rank does next with one of its chunks; which microbatch follows from what it did before.
struct Move {
  Kind kind;
  uint32_t chunk;
};

// Writes one rank's order as phases: so many times this pattern of moves. Each kind of move takes
// the microbatches of a chunk in their order; those beyond the last one are left out, so that a
// pattern need not know how many there are.
class Writer {
 public:
  Writer(const Sizes& sizes, std::vector<uint32_t> stages)
      : microbatches_(sizes.microbatches), stages_(std::move(stages)), next_(stages_.size()) {}

  void repeat(int64_t times, std::initializer_list<Move> pattern) {
    const auto is_done = [&](Move move) { return done(move) >= microbatches_; };
    for (int64_t i = 0; i < times && !std::ranges::all_of(pattern, is_done); ++i) {
      for (const auto move : pattern) {
        add(move);
      }
    }
  }

  void add(Move move) {
    auto& next = next_[move.chunk];
    const auto microbatch = next[counter(move.kind)]++;
    if (move.kind == Kind::backward) {
      next[counter(Kind::weight_backward)]++;
    }
    add({.stage = stages_[move.chunk], .microbatch = microbatch, .kind = move.kind});
    if (move.kind == Kind::input_backward) {
      owed_.push_back(move.chunk);
    }
  }

  void add(const Action& action) {
    if (action.microbatch < microbatches_) {
      actions_.push_back(action);
    }
  }

  // The oldest weight backward that an input backward left, if there is one.
  void settle() {
    if (paid_ < owed_.size()) {
      add({Kind::weight_backward, owed_[paid_++]});
    }
  }
  void settle_all() {
    while (paid_ < owed_.size()) {
      settle();
    }
  }
  std::vector<Action> take() { return std::move(actions_); }

 private:
  // Backward counts as both of its halves, and goes by the first of them.
  static size_t counter(Kind kind) {
    return static_cast<size_t>(kind == Kind::backward ? Kind::input_backward : kind);
  }
  uint32_t done(Move move) const { return next_[move.chunk][counter(move.kind)]; }

  uint32_t microbatches_;
  std::vector<uint32_t> stages_;
  std::vector<std::array<uint32_t, 4>> next_;  // by chunk and kind
  std::vector<uint32_t> owed_;                 // chunks, in the order of their input backwards
  size_t paid_ = 0;
  std::vector<Action> actions_;
};

constexpr Kind kF = Kind::forward;
constexpr Kind kB = Kind::backward;
constexpr Kind kI = Kind::input_backward;
constexpr Kind kW = Kind::weight_backward;

void gpipe(Writer& writer, const Sizes& sizes, uint32_t /*rank*/) {
  writer.repeat(sizes.microbatches, {{kF, 0}});
  writer.repeat(sizes.microbatches, {{kB, 0}});
}

void one_f_one_b(Writer& writer, const Sizes& sizes, uint32_t rank) {
  const auto ahead = std::min(sizes.microbatches, sizes.ranks - rank);
  writer.repeat(ahead, {{kF, 0}});
  writer.repeat(sizes.microbatches - ahead, {{kB, 0}, {kF, 0}});
  writer.repeat(ahead, {{kB, 0}});
}

// All microbatches through a chunk before the next chunk; backward the same way round.
void looped_bfs(Writer& writer, const Sizes& sizes, uint32_t rank) {
  for (uint32_t chunk = 0; chunk < sizes.chunks; ++chunk) {
    writer.repeat(sizes.microbatches, {{kF, chunk}});
  }
  for (auto chunk = sizes.chunks; chunk-- > 0;) {
    for (auto microbatch = sizes.microbatches; microbatch-- > 0;) {
      writer.add({.stage = chunk * sizes.ranks + rank, .microbatch = microbatch, .kind = kB});
    }
  }
}

// How many microbatches go through a chunk before the next one has its turn.
uint32_t a_round(const Sizes& sizes, std::string_view name) {
  const auto rounds = std::max(1U, sizes.microbatches / sizes.ranks);
  if (sizes.microbatches % rounds != 0) {
    throw InputError(text("schedule '", name, "' takes microbatches in rounds of ", sizes.ranks,
                          " or more, one for each rank, and ", sizes.microbatches,
                          " do not divide into ", rounds, " rounds: take ",
                          sizes.microbatches / sizes.ranks * sizes.ranks));
  }
  return sizes.microbatches / rounds;
}

// One forward, one backward, over all chunks in turn; `split` leaves weight backwards for later:
// from the moment on that a rank has as many microbatches as the first one ever has.
void interleaved(Writer& writer, const Sizes& sizes, uint32_t rank, bool split) {
  const auto round = a_round(sizes, split ? "zb-h1" : "interleaved-1f1b");
  const auto all = sizes.microbatches * sizes.chunks;
  const auto hops = sizes.ranks - 1 - rank;
  const auto ahead = std::min(all, (sizes.chunks - 1) * round + (split ? hops : 2 * hops));
  const auto turn = [&](uint32_t step) { return step / round % sizes.chunks; };
  const auto backward = [&](uint32_t step) {
    writer.add({split ? kI : kB, sizes.chunks - 1 - turn(step)});
    if (split && step >= rank) {
      writer.settle();
    }
  };
  for (uint32_t step = 0; step < ahead; ++step) {
    writer.add({kF, turn(step)});
  }
  for (uint32_t step = ahead; step < all; ++step) {
    writer.add({kF, turn(step)});
    backward(step - ahead);
  }
  for (auto step = all - ahead; step < all; ++step) {
    backward(step);
  }
  writer.settle_all();
}

// The first chunks run down the ranks and the second ones up again, so that the last stage lies
// beside the first. Without a bubble if F, I and W take equally long.
void zb_v(Writer& writer, const Sizes& sizes, uint32_t rank) {
  const auto up = static_cast<int64_t>(sizes.ranks - rank);
  const auto down = static_cast<int64_t>(rank);
  writer.repeat(2 * up - 1, {{kF, 0}});
  writer.repeat(down, {{kF, 1}, {kF, 0}});
  writer.repeat(up, {{kF, 1}, {kI, 1}, {kW, 1}});
  // Fewer microbatches than fill the pipeline are a full one of which some are left out.
  const auto fill = std::max(2 * sizes.ranks - 1, sizes.microbatches);
  writer.repeat(fill - sizes.ranks, {{kF, 0}, {kI, 0}, {kW, 0}, {kF, 1}, {kI, 1}, {kW, 1}});
  writer.repeat(down, {{kI, 0}, {kI, 1}});
  writer.repeat(up, {{kI, 0}, {kW, 0}});
  writer.repeat(sizes.microbatches, {{kW, 1}});
  writer.repeat(sizes.microbatches, {{kW, 0}});
}

// As zb_v in its layout; in the middle each rank has a forward and a backward side by side.
void dualpipe_v(Writer& writer, const Sizes& sizes, uint32_t rank) {
  const auto after = int64_t{sizes.ranks} - rank - 1;
  const auto upto = int64_t{rank} + 1;
  writer.repeat(2 * after, {{kF, 0}});
  writer.repeat(upto, {{kF, 0}, {kF, 1}});
  for (int64_t i = 0; i < after; ++i) {
    writer.add({kI, 1});
    writer.settle();
    writer.add({kF, 1});
  }
  writer.repeat(int64_t{sizes.microbatches} - int64_t{2} * sizes.ranks + upto,
                {{kF, 0}, {kB, 1}, {kF, 1}, {kB, 0}});
  writer.repeat(after, {{kB, 1}, {kF, 1}, {kB, 0}});
  // Towards the end the weights wait, so that the ranks before have their gradients sooner. Half
  // way through, and for even ranks half a pattern later.
  const auto half = upto / 2;
  for (int64_t i = 0; i < upto; ++i) {
    writer.add({i > half || (i == half && rank % 2 == 1) ? kI : kB, 1});
    writer.add({i >= half ? kI : kB, 0});
  }
  for (int64_t i = 0; i < after; ++i) {
    writer.settle();
    writer.add({kI, 0});
  }
  writer.settle_all();
}

// Of one kind, in all ranks together: what fits into memory.
constexpr uint64_t kMostActions = uint64_t{1} << 28;

enum class Layout : uint8_t { loop, v };

struct Known {
  const char* name;
  const char* in_torch;  // what torch.distributed.pipelining calls it
  uint32_t least_chunks;
  uint32_t most_chunks;
  uint32_t usual_chunks;
  Layout layout;
  std::function<void(Writer&, const Sizes&, uint32_t rank)> write;
};

const std::vector<Known>& known() {
  constexpr uint32_t any = 1U << 16;
  static const auto* all = new std::vector<Known>{
      {"gpipe", "gpipe", 1, 1, 1, Layout::loop, gpipe},
      {"1f1b", "1f1b", 1, 1, 1, Layout::loop, one_f_one_b},
      {"interleaved-1f1b", "interleaved1f1b", 1, any, 2, Layout::loop,
       [](Writer& writer, const Sizes& sizes, uint32_t rank) {
         interleaved(writer, sizes, rank, false);
       }},
      {"looped-bfs", "loopedbfs", 1, any, 2, Layout::loop, looped_bfs},
      {"zb-h1", "interleavedzerobubble", 1, any, 1, Layout::loop,
       [](Writer& writer, const Sizes& sizes, uint32_t rank) {
         interleaved(writer, sizes, rank, true);
       }},
      {"zb-v", "zbvzerobubble", 2, 2, 2, Layout::v, zb_v},
      {"dualpipev", "dualpipev", 2, 2, 2, Layout::v, dualpipe_v},
  };
  return *all;
}

// Letters and digits in lower case: "ZB-V", "zb_v" and "zbv" are one name.
std::string bare(std::string_view name) {
  std::string out;
  for (const auto c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) {
      out += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
  }
  return out;
}

std::string listed(const std::vector<std::string>& names) {
  std::string out;
  for (const auto& name : names) {
    out += (out.empty() ? "" : ", ") + name;
  }
  return out;
}

const Known& find(std::string_view name) {
  const auto wanted = bare(name);
  for (const auto& one : known()) {
    if (wanted == bare(one.name) || wanted == one.in_torch) {
      return one;
    }
  }
  throw InputError(text("there is no schedule '", name, "': take one of ", listed(schedule_names()),
                        ", or a CSV file of one"));
}

}  // namespace

const std::vector<std::string>& schedule_names() {
  static const auto* names = [] {
    auto* out = new std::vector<std::string>;
    for (const auto& one : known()) {
      out->emplace_back(one.name);
    }
    return out;
  }();
  return *names;
}

Schedule make_schedule(std::string_view name, uint32_t ranks, uint32_t microbatches,
                       uint32_t chunks) {
  const auto& one = find(name);
  const Sizes sizes{.ranks = ranks,
                    .microbatches = microbatches,
                    .chunks = chunks == 0 ? one.usual_chunks : chunks};
  if (ranks == 0 || microbatches == 0) {
    throw InputError(text("a schedule needs a rank and a microbatch at least, not ",
                          count_text(ranks, "rank"), " and ", microbatches, " microbatches"));
  }
  if (uint64_t{ranks} * sizes.chunks * microbatches > kMostActions) {
    throw InputError(text(ranks, " ranks with ", sizes.chunks, " stages each and ", microbatches,
                          " microbatches are more than a schedule can have"));
  }
  if (sizes.chunks < one.least_chunks || sizes.chunks > one.most_chunks) {
    const auto most = one.most_chunks > one.least_chunks ? text(" to ", one.most_chunks) : "";
    throw InputError(text("schedule '", one.name, "' has ", one.least_chunks, most,
                          one.most_chunks == 1 ? " stage" : " stages", " a rank, not ",
                          sizes.chunks));
  }
  if (one.in_torch == std::string_view("dualpipev") && microbatches < 2 * ranks) {
    throw InputError(text("schedule 'dualpipev' needs as many microbatches as stages, ", 2 * ranks,
                          " at least, not ", microbatches));
  }
  Schedule out;
  out.name = one.name;
  out.microbatches = microbatches;
  const auto stages = ranks * sizes.chunks;
  for (uint32_t stage = 0; stage < stages; ++stage) {
    const auto turned = one.layout == Layout::v && stage >= ranks;
    out.rank_of_stage.push_back(turned ? stages - 1 - stage : stage % ranks);
  }
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    std::vector<uint32_t> own;
    for (uint32_t chunk = 0; chunk < sizes.chunks; ++chunk) {
      const auto turned = one.layout == Layout::v && chunk == 1;
      own.push_back(turned ? stages - 1 - rank : chunk * ranks + rank);
    }
    Writer writer(sizes, std::move(own));
    one.write(writer, sizes, rank);
    out.actions.push_back(writer.take());
  }
  return out;
}

}  // namespace tenure::pipeline
