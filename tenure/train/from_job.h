// From a job: what one rank's trainer is made of. Any thread.
//
// Note [Gathered for a step]
// In a pipeline a rank's weights are used by every microbatch in turn, so they are gathered once a
// step, and their gradients are added up over ranks once. A rank that has all layers and few
// microbatches gathers each layer when it is its turn: there the memory matters more. What is
// gathered then is not the schedule's to promise, so that only microbatches are counted there.
#pragma once

#include <tenure/offload/session.h>
#include <tenure/pipeline/schedule.h>
#include <tenure/train/adamw.h>
#include <tenure/train/batches.h>
#include <tenure/train/checkpoint.h>
#include <tenure/train/job.h>
#include <tenure/train/parameters.h>
#include <tenure/train/split.h>
#include <tenure/train/stage.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tenure::train {

// "embedding, layers 0-1"
std::string described(const std::vector<LayerRange>& stages, const pipeline::Schedule& schedule,
                      uint32_t rank);

// All stages once, one after the other: for a model that is asked, not trained.
pipeline::Schedule one_after_the_other(const pipeline::Schedule& like);

// The checkpoint that the job goes on from; nothing where it begins anew.
std::optional<Checkpoint> begun_in(const Job& job);

// With the weights of `begun`, those that the job names, or new ones.
Stages stages_on(const Job& job, const pipeline::Schedule& schedule, uint32_t rank,
                 const std::optional<Checkpoint>& begun);

// See Note [Gathered for a step].
bool stays_gathered(const Job& job);
std::unique_ptr<Parameters> parameters_of(const Job& job, const Stages& stages,
                                          const DataGroup& data);
AdamW optimizer_of(const Job& job, const Parameters& parameters);

// Null where nothing is to be moved or made again.
std::unique_ptr<offload::Session> session_of(const Job& job);

Batches training_of(const Job& job, int64_t data_rank);
// Without evaluation nothing is read from it, and it may be too short.
Batches validation_of(const Job& job, int64_t data_rank);

}  // namespace tenure::train
