#include <tenure/pipeline/csv.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/pipeline/check.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

namespace tenure::pipeline {
namespace {

std::string_view trimmed(std::string_view part) {
  constexpr std::string_view blank = " \t\r\n\"";
  const auto begin = part.find_first_not_of(blank);
  if (begin == std::string_view::npos) {
    return {};
  }
  return part.substr(begin, part.find_last_not_of(blank) - begin + 1);
}

// The parts between separators, of which there is one at least.
std::vector<std::string_view> split(std::string_view whole, char separator) {
  std::vector<std::string_view> out;
  while (true) {
    const auto end = whole.find(separator);
    out.push_back(whole.substr(0, end));
    if (end == std::string_view::npos) {
      return out;
    }
    whole.remove_prefix(end + 1);
  }
}

// A number from the front of `rest`, which loses it.
std::optional<uint32_t> take_number(std::string_view& rest) {
  uint32_t number = 0;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), number);
  // Beyond this it is no schedule but a mistake, and would take all memory to check.
  constexpr uint32_t most = 1U << 20;
  if (error != std::errc() || number >= most) {
    return std::nullopt;
  }
  rest.remove_prefix(static_cast<size_t>(end - rest.data()));
  return number;
}

bool follows_from_schedule(std::string_view word) {
  constexpr std::array<std::string_view, 7> words = {"SEND_F",  "RECV_F",  "SEND_B",     "RECV_B",
                                                     "UNSHARD", "RESHARD", "REDUCE_GRAD"};
  return std::ranges::find(words, word) != words.end();
}

class Reader {
 public:
  // `cells` are the numbers of the cells that actions are from.
  Reader(uint32_t rank, std::vector<Action>& into, std::vector<uint32_t>& cells)
      : rank_(rank), into_(into), cells_(cells) {}

  void read(std::string_view cell) {
    cell = trimmed(cell);
    if (!cell.empty() && cell.front() == '(') {
      const auto end = cell.find(')');
      if (end == std::string_view::npos || cell.substr(end + 1) != "OVERLAP_F_B") {
        refuse(cell);
      }
      for (const auto part : split(cell.substr(1, end - 1), ';')) {
        read_action(trimmed(part));
      }
    } else if (!cell.empty()) {
      read_action(cell);
    }
    ++number_;
  }

 private:
  [[noreturn]] void refuse(std::string_view cell) const {
    std::string shown(front_of(cell, 40));
    std::ranges::replace_if(shown, [](char c) { return static_cast<unsigned char>(c) < ' '; }, '?');
    throw InputError(text("row ", rank_, ", cell ", number_, ": '", shown,
                          "' is no action: write stage, F, B, I or W, and microbatch, as 2F0"));
  }

  void read_action(std::string_view cell) {
    auto rest = cell;
    const auto stage = take_number(rest);
    const auto word_end = rest.find_first_of("0123456789");
    const auto word = rest.substr(0, word_end);
    rest.remove_prefix(word.size());
    const auto microbatch = take_number(rest);
    if (stage && rest.empty() && follows_from_schedule(word)) {
      return;
    }
    const auto* kind = std::ranges::find_if(
        kKinds, [&](Kind one) { return word.size() == 1 && word.front() == letter_of(one); });
    if (!stage || !microbatch || !rest.empty() || kind == std::end(kKinds)) {
      refuse(cell);
    }
    into_.push_back({.stage = *stage, .microbatch = *microbatch, .kind = *kind});
    cells_.push_back(number_);
  }

  uint32_t rank_;
  uint32_t number_ = 0;
  std::vector<Action>& into_;
  std::vector<uint32_t>& cells_;
};

// Which rank has which stage, from who does what.
void place_stages(Schedule& schedule) {
  constexpr auto nobody = ~0U;
  for (uint32_t rank = 0; rank < schedule.ranks(); ++rank) {
    for (const auto& action : schedule.actions[rank]) {
      if (action.stage >= schedule.stages()) {
        schedule.rank_of_stage.resize(action.stage + size_t{1}, nobody);
      }
      auto& owner = schedule.rank_of_stage[action.stage];
      if (owner == nobody) {
        owner = rank;
      }
      schedule.microbatches = std::max(schedule.microbatches, action.microbatch + 1);
    }
  }
  for (uint32_t stage = 0; stage < schedule.stages(); ++stage) {
    if (schedule.rank_of_stage[stage] == nobody) {
      throw InputError(text("no rank has anything of stage ", stage, ", though there is a stage ",
                            schedule.stages() - 1));
    }
  }
}

}  // namespace

Schedule from_csv(std::string_view csv, std::string_view name) {
  Schedule out;
  out.name = name;
  size_t actions = 0;
  std::vector<std::vector<uint32_t>> cells;
  if (constexpr std::string_view mark = "\xef\xbb\xbf"; csv.starts_with(mark)) {
    csv.remove_prefix(mark.size());  // some spreadsheets write it
  }
  for (const auto line : split(csv, '\n')) {
    if (trimmed(line).empty()) {
      continue;
    }
    auto& row = out.actions.emplace_back();
    Reader reader(out.ranks() - 1, row, cells.emplace_back());
    for (const auto cell : split(line, ',')) {
      reader.read(cell);
    }
    actions += row.size();
  }
  if (actions == 0) {
    throw InputError("there is no action in it: write a row for each rank, cells like 0F0");
  }
  place_stages(out);
  const auto wanted = static_cast<double>(out.stages()) * out.microbatches;
  if (wanted > 4.0 * static_cast<double>(actions) + 64) {
    throw InputError(text("it has ", actions, " actions for ", count_text(out.stages(), "stage"),
                          " and ", out.microbatches, " microbatches: most are missing"));
  }
  check(out, [&](uint32_t rank, uint32_t position) { return cells[rank][position]; });
  return out;
}

std::string to_csv(const Schedule& schedule) {
  std::string out;
  for (const auto& actions : schedule.actions) {
    for (const auto& action : actions) {
      out += action.text();
      out += &action == &actions.back() ? "" : ",";
    }
    out += '\n';
  }
  return out;
}

}  // namespace tenure::pipeline
