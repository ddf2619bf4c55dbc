// Flat: parameters of one unit that share a dtype, in one storage. This rank's piece is always
// there; the whole is there between gather and release. See Note [One flat buffer]. The tensors
// that it hands out are aliases: whoever keeps one keeps the storage's identity, not its memory.
// One thread at a time.
#pragma once

#include <tenure/core/release.h>
#include <tenure/shard/collectives.h>
#include <tenure/shard/layout.h>
#include <tenure/shard/options.h>
#include <tenure/shard/part.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace tenure::shard {

class Flat {
 public:
  // Copies the values, which have one dtype and device, and takes all the memory that it needs.
  // Gathered, the parameters have the dtype `gathered`. REQUIRES: then share(), and before it
  // nothing else.
  Flat(const std::string& unit, const std::vector<std::string>& names,
       const std::vector<at::Tensor>& values, c10::ScalarType gathered, Pieces pieces,
       const Collectives& collectives);
  // On every rank the values are those of rank 0 from now on. A collective.
  void share(const std::string& unit, Collectives& collectives);

  const Layout& layout() const { return layout_; }
  const std::vector<std::string>& names() const { return names_; }
  uint64_t gathered_bytes() const;
  uint64_t piece_bytes() const;
  c10::ScalarType kept_type() const { return piece_.type(); }
  // A piece's gradient where the piece is. On its way until the fence is ready.
  std::pair<at::Tensor, Fence> brought_home(const at::Tensor& gradient) const;

  // All of the storage that is gathered and released.
  at::Tensor whole() const { return whole_.tensor(); }
  // The parameters in their true shapes, views of the whole. REQUIRES: called once, this or the
  // next.
  std::vector<at::Tensor> parameters();
  // The same, as what these leaves are from now on, in the order of their names.
  void hand_to(const std::vector<at::Tensor>& leaves);
  // This rank's piece of all, and of one parameter: one dimension, perhaps no element.
  at::Tensor piece() const { return piece_.tensor(); }
  at::Tensor piece_of(size_t index);
  // Whether the tensor still is that, and not on other memory: by set_data().
  bool is_piece_of(size_t index, const at::Tensor& tensor) const;
  // Of a whole tensor in the parameter's shape what this rank's piece has, in memory of its own.
  // Throws InputError for another shape.
  at::Tensor piece_from(size_t index, const at::Tensor& whole) const;

  // Another number once somebody has written to the pieces.
  uint64_t values() const;
  // Whether somebody has since they were gathered.
  bool pieces_written() const { return values() != gathered_values_; }

  // Whole tensors from pieces of the parameters, gathered into memory of their own.
  using Gather = std::function<void(const at::Tensor& whole)>;
  std::vector<at::Tensor> join(const std::vector<at::Tensor>& pieces, const Gather& gather) const;

  // Memory for the whole, and every rank's piece into it. Pieces that were written to since the
  // last time make it a write to the parameters, for autograd: what it has saved of them is not
  // what it was. If the collective cannot be started the memory is given back.
  Pending gather(Collectives& collectives);
  // Throws MutationError, once it is released, if a parameter was written to since the gather.
  // Writes through `.data` are not seen: no version counter sees them. Memory that others have
  // without a tensor, as a numpy array has, stays for good, and is gathered into.
  void release(const Releaser& by);
  // After a gather that failed; the memory goes once the backend does not write to it any more.
  void abandon(const Fence& done);
  // Why the memory cannot go; empty: it can.
  const std::string& why_stuck() const { return why_stuck_; }

 private:
  void free(const Releaser& by, const Fence& done);
  at::Tensor view_of(size_t index) const;
  std::string written() const;
  Range in_piece(size_t index) const;

  std::vector<std::string> names_;
  std::vector<std::vector<int64_t>> shapes_;
  Layout layout_;
  uint32_t rank_;
  Alias values_;  // until they are shared
  Alias whole_;
  Alias piece_;
  std::vector<c10::VariableVersion> piece_versions_;  // of those that were handed out
  uint64_t gathered_values_ = 0;
  std::vector<c10::VariableVersion> versions_;  // of the parameters that were handed out
  std::vector<uint32_t> gathered_at_;           // what they said when the whole was gathered
  std::string why_stuck_;
};

}  // namespace tenure::shard
