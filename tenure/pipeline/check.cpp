#include <tenure/pipeline/check.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/pipeline/timeline.h>

#include <array>

namespace tenure::pipeline {
namespace {

// Where the actions of one stage and microbatch are in their rank's order.
struct Places {
  static constexpr uint32_t kNone = ~0U;
  std::array<uint32_t, 4> at{kNone, kNone, kNone, kNone};

  uint32_t of(Kind kind) const { return at[static_cast<size_t>(kind)]; }
  bool has(Kind kind) const { return of(kind) != kNone; }
};

class Checker {
 public:
  using Number = std::function<uint32_t(uint32_t rank, uint32_t position)>;

  Checker(const Schedule& schedule, const Number& number)
      : schedule_(schedule),
        number_(number),
        places_(size_t{schedule.stages()} * schedule.microbatches) {}

  void run() {
    for (uint32_t rank = 0; rank < schedule_.ranks(); ++rank) {
      for (uint32_t i = 0; i < schedule_.actions[rank].size(); ++i) {
        place(rank, i);
      }
    }
    for (uint32_t stage = 0; stage < schedule_.stages(); ++stage) {
      for (uint32_t microbatch = 0; microbatch < schedule_.microbatches; ++microbatch) {
        order(stage, microbatch);
      }
    }
    deadlock();
  }

 private:
  std::string cell(uint32_t rank, uint32_t position) const {
    return text("rank ", rank, ", cell ", number_(rank, position), " (",
                schedule_.actions[rank][position].text(), ")");
  }

  Places& places(uint32_t stage, uint32_t microbatch) {
    return places_[size_t{stage} * schedule_.microbatches + microbatch];
  }

  void place(uint32_t rank, uint32_t position) {
    const auto& action = schedule_.actions[rank][position];
    if (action.stage >= schedule_.stages() || action.microbatch >= schedule_.microbatches) {
      throw InputError(text(cell(rank, position), " is of a schedule with more than ",
                            count_text(schedule_.stages(), "stage"), " and ",
                            schedule_.microbatches, " microbatches"));
    }
    if (schedule_.rank_of_stage[action.stage] != rank) {
      throw InputError(text(cell(rank, position), " is of stage ", action.stage,
                            ", which is on rank ", schedule_.rank_of_stage[action.stage]));
    }
    auto& at = places(action.stage, action.microbatch).at[static_cast<size_t>(action.kind)];
    if (at != Places::kNone) {
      throw InputError(
          text(cell(rank, position), " repeats cell ", number_(rank, at), " of the same rank"));
    }
    at = position;
    any_backward_ |= action.kind != Kind::forward;
  }

  [[noreturn]] void missing(uint32_t stage, uint32_t microbatch, Kind kind) const {
    const Action action{.stage = stage, .microbatch = microbatch, .kind = kind};
    throw InputError(text("rank ", schedule_.rank_of_stage[stage], " has no ", action.text(), ": ",
                          action.words(), " is missing"));
  }

  void require_after(uint32_t rank, uint32_t later, uint32_t earlier) const {
    if (later < earlier) {
      throw InputError(text(cell(rank, later), " comes before ", cell(rank, earlier),
                            ", whose result it needs"));
    }
  }

  void order(uint32_t stage, uint32_t microbatch) {
    const auto& found = places(stage, microbatch);
    const auto rank = schedule_.rank_of_stage[stage];
    if (!found.has(Kind::forward)) {
      missing(stage, microbatch, Kind::forward);
    }
    if (!any_backward_) {
      return;
    }
    if (found.has(Kind::backward)) {
      for (const auto half : {Kind::input_backward, Kind::weight_backward}) {
        if (found.has(half)) {
          throw InputError(text(cell(rank, found.of(half)), " is part of ",
                                cell(rank, found.of(Kind::backward)), " already"));
        }
      }
      require_after(rank, found.of(Kind::backward), found.of(Kind::forward));
      return;
    }
    if (!found.has(Kind::input_backward)) {
      missing(stage, microbatch,
              found.has(Kind::weight_backward) ? Kind::input_backward : Kind::backward);
    }
    if (!found.has(Kind::weight_backward)) {
      missing(stage, microbatch, Kind::weight_backward);
    }
    require_after(rank, found.of(Kind::input_backward), found.of(Kind::forward));
    require_after(rank, found.of(Kind::weight_backward), found.of(Kind::input_backward));
  }

  void deadlock() const {
    std::vector<Stuck> stuck;
    run_on_paper(schedule_, {}, &stuck);
    if (stuck.empty()) {
      return;
    }
    std::string why;
    for (const auto& one : stuck) {
      why += text(why.empty() ? "" : "; ", cell(one.rank, one.position), " waits for ",
                  one.waits_for.words(), " on rank ", schedule_.rank_of_stage[one.waits_for.stage]);
      if (&one - stuck.data() == 3 && stuck.size() > 4) {
        why += text("; and ", stuck.size() - 4, " more ranks wait");
        break;
      }
    }
    throw InputError(text("the schedule is a deadlock: ", why));
  }

  const Schedule& schedule_;
  const Number& number_;
  std::vector<Places> places_;
  bool any_backward_ = false;
};

}  // namespace

void check(const Schedule& schedule) {
  check(schedule, [](uint32_t /*rank*/, uint32_t position) { return position; });
}

void check(const Schedule& schedule,
           const std::function<uint32_t(uint32_t rank, uint32_t position)>& cell) {
  Checker(schedule, cell).run();
}

}  // namespace tenure::pipeline
