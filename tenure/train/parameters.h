// Parameters: the weights of a rank's stages, as layers run with them and as an optimizer updates
// them: whole on every data-parallel rank, or in pieces that these ranks share out among
// themselves.
//
// All data-parallel ranks of the same stages make the same calls; one thread.
#pragma once

#include <tenure/shard/model.h>
#include <tenure/train/adamw.h>
#include <tenure/train/stage.h>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace tenure::train {

using Stages = std::vector<std::shared_ptr<Stage>>;

// The ranks that have the same stages.
struct DataGroup {
  c10::intrusive_ptr<c10d::ProcessGroup> group;  // on the device
  c10::intrusive_ptr<c10d::ProcessGroup> side;   // on the host
  c10::intrusive_ptr<c10d::Store> store;         // theirs alone
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

class Parameters {
 public:
  struct Entry {
    std::string name;
    at::Tensor value;  // what an optimizer updates
    Decay decay = Decay::none;
    bool is_tied = false;  // the embedding's matrix, which is the head's, too
    bool is_copy = false;  // of that, in a stage without the embedding: it counts once, there
  };

  Parameters() = default;
  Parameters(const Parameters&) = delete;
  Parameters& operator=(const Parameters&) = delete;
  virtual ~Parameters() = default;

  const std::vector<Entry>& entries() const { return entries_; }
  std::vector<at::Tensor> values() const;

  // A layer of one of the stages, with its weights in place.
  virtual at::Tensor run(size_t stage, size_t layer, const at::Tensor& x) = 0;
  // The weights that a layer runs with, and all there are: leaves of autograd.
  const std::vector<at::Tensor>& weights_of(size_t stage, size_t layer) const {
    return weights_.at(stage).at(layer);
  }
  std::vector<at::Tensor> weights() const;

  // Around the passes of a step. At the end the gradients of entries() are means over the ranks.
  virtual void begin() = 0;
  virtual void end() = 0;
  // A step that failed.
  virtual void give_up() noexcept = 0;

  // Whether a rank has pieces, whose norms add up over ranks.
  virtual bool in_pieces() const = 0;
  // Whole tensors from those like the entries' values. A collective.
  using Visit = std::function<void(size_t entry, const at::Tensor& whole)>;
  virtual void join(const std::vector<at::Tensor>& own, const Visit& visit) const = 0;
  // What of a whole tensor belongs to this rank.
  virtual at::Tensor own_part(size_t entry, const at::Tensor& whole) const = 0;

 protected:
  std::vector<Entry> entries_;
  std::vector<std::vector<std::vector<at::Tensor>>> weights_;  // by stage and layer
};

std::unique_ptr<Parameters> whole_parameters(Stages stages, DataGroup data);

// How long weights that were gathered for a step's first pass stay.
enum class Gathered : uint8_t { while_used, whole_step };

std::unique_ptr<Parameters> sharded_parameters(Stages stages, const DataGroup& data,
                                               Gathered gathered);

}  // namespace tenure::train
