// A sharded model of C++ that is held for several microbatches, and what is put together from its
// pieces. Each throws if what it checks does not hold.
#pragma once

#include "sharded_model.h"

// Gradients are those of the same microbatches without sharding, bit by bit.
void held_gradients(const Group& group, const Group& side, const Store& store);
// Parameters that had a gradient on some ranks only, and gradients of another dtype.
void held_kinds(const Group& group, const Group& side, const Store& store);
// Evaluation gathers once and adds up nothing.
void held_evaluation(const Group& group, const Group& side, const Store& store);
// Exceptions, writes, and holds that may not be.
void held_misuse(const Group& group, const Group& side, const Store& store);
// A rank that holds while the others do not.
void held_alone(const Group& group, const Group& side, const Store& store);
// Whole tensors from pieces, and pieces of whole ones.
void joined_pieces(const Group& group, const Group& side, const Store& store);
