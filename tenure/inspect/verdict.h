// Verdict: whether a process's memory is flat, leaks or grows, from its rows and cuts alone, so
// that a live process and a recording are judged alike. Pure functions, any thread.
//
// Note [Leak or growth]
// A leak is said only of storages that can be named: the storages of one origin, alive at the ends
// of steps, come from ever more different steps, and their bytes grow for good (trend.h). Memory
// that grows in any other way is growth, with the parts that do. So sequences that get longer are
// growth: what is alive at the end of a step is larger, and still only as old as the step. A
// storage that is made anew in each step a little longer (x = torch.cat([x, y])) is a leak, which
// is told from longer sequences by this: it alone grows, not all that a step makes. Losses that are
// kept after backward, or added up with their graphs, are a leak too, of the storages that head the
// graphs: those have few bytes, but nodes come with them. Only a look at holders can tell.
#pragma once

#include <tenure/inspect/recording.h>
#include <tenure/inspect/step_row.h>
#include <tenure/inspect/trend.h>

#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace tenure::inspect {

enum class Judgement : uint8_t { flat, leak, growth, too_short };
const char* judgement_name(Judgement judgement);

// A part of the memory and how it grows. Every part is judged by itself.
struct Share {
  const char* name = "";  // "held", "allocator", "heap" …
  double per_step = 0;    // bytes, robust, since the growth began; 0 if it is not known
  bool grows = false;     // for good, and more than noise
  double confidence = 0;
};

struct Suspect {
  OriginId origin{};
  double per_step = 0;
  double confidence = 0;
  int64_t bytes = 0;  // alive now
  int64_t count = 0;
  uint64_t since = 0;  // step
  bool one = false;    // one storage that grows, not ever more storages
};

struct Verdict {
  Judgement judgement = Judgement::too_short;
  uint64_t steps = 0;
  uint64_t since = 0;     // step at which the growth began
  double per_step = 0;    // of what is said: the suspects, or the part that grows most
  double confidence = 0;  // that it grows
  double seconds_per_step = 0;
  Share total;                    // what the operating system and the driver see
  std::vector<Share> shares;      // add up to it, the last being what is not explained
  Share peak;                     // most storages held at once within a step: larger inputs
  std::vector<Suspect> suspects;  // the fastest first
  // Origins with one storage that gets larger, while all that a step makes does so as well: either
  // its inputs get longer, or it reads something that is kept from step to step. Who looks at what
  // holds them can tell, and may accuse them.
  std::vector<OriginId> doubtful;
  // Of those: what makes up a large part of all that becomes larger.
  std::vector<OriginId> leading;
  // What would be suspected, had it not been seen to be held by something that has a bound.
  std::vector<Suspect> filling;
  std::string why;  // one sentence
};

// Autograd graphs of which there are ever more. Their nodes lie in no storage.
struct KeptGraphs {
  double per_step = 0;  // bytes of nodes
  int64_t bytes = 0;    // alive now
  uint64_t since = 0;   // step
};

// What someone who looked at holders knows of origins, beyond their numbers.
struct Evidence {
  std::set<OriginId> accused;             // kept from step to step: see Verdict::doubtful
  std::set<OriginId> bounded;             // held by a container that has a bound and is not full
  std::map<OriginId, KeptGraphs> graphs;  // by the origin of the storages that head them
};

using Cuts = std::map<OriginId, std::vector<Cut>>;

// What a row stands for. A program that announces no steps has intervals of time, and its first
// seconds, in which it imports and loads, are among them.
enum class Unit : uint8_t { step, interval };

// Rows in the order of their steps.
Verdict judge(std::span<const StepRow> rows, const Cuts& cuts, Unit unit = Unit::step,
              const Evidence& evidence = {});

}  // namespace tenure::inspect
