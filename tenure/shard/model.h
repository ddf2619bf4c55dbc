// Model: a sharded model of C++. torch::nn has no hooks, so a block says itself when it runs:
//
//   shard::Model model(group, side, store, options);
//   auto unit = model.unit("blocks.0", {{"weight", weight}, {"bias", bias}});
//   torch::optim::AdamW optimizer(model.pieces());
//
//   at::Tensor Block::forward(const at::Tensor& x) {
//     const auto use = unit.use();  // gathered as long as it lives, and again for backward
//     return at::linear(x, weight, bias);
//   }
//
// Note [Who reads a unit in backward]
// While an InUse lives, every operator of its thread is looked at: the node that autograd makes for
// one which was given any alias of the unit's parameters may read them in backward. The first of
// these nodes to run gathers the unit, and the last one releases it; what the end of the backward
// finds open it closes.
//
// One thread makes units and runs forward; backward may run on others.
#pragma once

#include <tenure/shard/options.h>
#include <tenure/shard/stats.h>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace tenure::shard {

class Held;
class InUse;

class Unit {
 public:
  // The outermost InUse of a model begins a pass. Throws CollectiveError if the unit cannot be
  // gathered.
  [[nodiscard]] InUse use() const;

 private:
  friend class InUse;
  friend class Model;
  struct State;
  explicit Unit(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;  // shared with the nodes of graphs that may outlive the model
};

class Model {
 public:
  using Parameters = std::vector<std::pair<std::string, at::Tensor>>;

  // `side` has the same ranks as `group` and runs on the host; `store` is theirs alone.
  Model(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::intrusive_ptr<c10d::ProcessGroup> side,
        c10::intrusive_ptr<c10d::Store> store, Options options = {});
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  // Takes over these leaves, on every rank with the values of rank 0: from now on they have memory
  // only while the unit is in use. Throws InputError for parameters of several devices, and for
  // what is no leaf. All ranks make the same calls.
  Unit unit(const std::string& name, const Parameters& parameters);

  // This rank's pieces of all parameters, for an optimizer. Their gradients are means over ranks.
  std::vector<at::Tensor> pieces() const;
  // Their parameters' names, as given to unit().
  std::vector<std::string> names() const;
  // Whole tensors, in the parameters' shapes, from tensors in the shapes of pieces(): values,
  // gradients, what an optimizer has. Parameters of a unit that have one dtype get tensors of one
  // dtype, and no more than these are whole at a time, unless `visit` keeps them. A collective.
  // Throws InputError for other shapes, before anything is sent.
  using Visit = std::function<void(size_t index, const at::Tensor& whole)>;
  void join(const std::vector<at::Tensor>& like_pieces, const Visit& visit) const;
  // The part of a whole tensor that is this rank's, in memory of its own, as pieces()[index] is:
  // one dimension, perhaps no element. No collective. Throws InputError for another shape.
  at::Tensor piece_of(size_t index, const at::Tensor& whole) const;

  // Gathers all units and keeps them so, for several forwards and backwards; see Held. Begins a
  // pass; all ranks call it. Throws InputError if one lives already or a unit is in use,
  // CollectiveError if a unit cannot be gathered.
  [[nodiscard]] Held hold();

  // The norm of all gradients on all ranks; torch's clip_grad_norm_ would see this rank's. A
  // collective.
  double gradient_norm() const;

  Stats stats() const;

 private:
  friend class Unit;
  friend class InUse;
  friend class Held;
  struct State;
  std::shared_ptr<State> state_;
};

// While it lives all units are gathered: uses cost next to nothing, and parameters have their
// gradients in `.grad`, where backwards add them up on this rank alone, in the parameter's dtype.
// Uses in it end before it does, and so do backwards through what was computed in it. Move-only;
// one thread at a time.
class Held {
 public:
  Held(Held&& other) noexcept;
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  Held& operator=(Held&&) = delete;
  // Without end(), after an exception say: releases the units, and gradients that came are lost. No
  // collective.
  ~Held();

  // Releases the units and adds up gradients over ranks, once, into those of the pieces; nothing
  // came: nothing is added up. All ranks call it. Throws MutationError if parameters or pieces were
  // written to since hold(), CollectiveError if gradients cannot be added up; then they are lost.
  void end();

 private:
  friend class Model;
  explicit Held(std::shared_ptr<Model::State> model);
  std::shared_ptr<Model::State> model_;  // none: ended; shared with the model, which may end first
};

// Move-only; ends on the thread that made it, innermost first.
class InUse {
 public:
  InUse(InUse&& other) noexcept;
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;
  InUse& operator=(InUse&&) = delete;
  ~InUse();

 private:
  friend class Unit;
  struct State;
  explicit InUse(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace tenure::shard
