#include <tenure/shard/flat.h>

#include <tenure/core/error.h>
#include <tenure/core/names.h>
#include <tenure/core/text.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace tenure::shard {
namespace {

constexpr uint64_t kAlignment = 64;  // bytes
constexpr std::chrono::minutes kSetUp{30};
const Releaser kSettingUp{"shard", "set-up"};

Layout layout_of(const std::vector<at::Tensor>& values, uint32_t ranks, c10::ScalarType gathered) {
  std::vector<uint64_t> sizes;
  for (const auto& value : values) {
    sizes.push_back(static_cast<uint64_t>(value.numel()));
  }
  const auto smaller =
      std::min(values.front().element_size(), static_cast<int64_t>(c10::elementSize(gathered)));
  return lay_out(sizes, ranks, kAlignment / static_cast<uint64_t>(smaller));
}

// As the tensor, in pinned memory.
at::Tensor empty_on_host(const at::Tensor& like) {
  return at::empty(like.sizes(), like.options().device(at::kCPU).pinned_memory(true));
}

// "layers.3: weight, bias", as long as it may be.
std::string owner_name(const std::string& unit, const std::vector<std::string>& names) {
  constexpr size_t named = 6;
  auto out = unit;
  for (size_t i = 0; i < std::min(names.size(), named); ++i) {
    out += text(i == 0 ? ": " : ", ", names[i]);
  }
  if (names.size() > named) {
    out += text(" and ", names.size() - named, " more");
  }
  return out;
}

}  // namespace

Flat::Flat(const std::string& unit, const std::vector<std::string>& names,
           const std::vector<at::Tensor>& values, c10::ScalarType gathered, Pieces pieces,
           const Collectives& collectives)
    : names_(names),
      layout_(layout_of(values, collectives.ranks(), gathered)),
      rank_(collectives.rank()) {
  const at::NoGradGuard no_grad;
  const auto size = static_cast<int64_t>(layout_.size);
  const auto options = values.front().options().requires_grad(false);
  // Padding is zero for ever: it is gathered and reduced along with the rest.
  auto all = at::zeros({size}, options);
  for (size_t i = 0; i < values.size(); ++i) {
    shapes_.emplace_back(values[i].sizes().vec());
    part(all, layout_.parameters[i]).copy_(values[i].reshape({-1}));
  }
  const auto owner = intern_owner(OwnerKind::parameter, fitting(owner_name(unit, names)));
  values_ = Alias(all, owner);
  const auto own = part(all, layout_.shard(rank_));
  piece_ = Alias(
      pieces == Pieces::on_host && !own.is_cpu() ? empty_on_host(own) : at::empty_like(own), owner);
  if (all.scalar_type() == gathered) {
    whole_ = Alias(all, owner);
  } else {
    const auto other = at::empty({size}, options.dtype(gathered));
    whole_ = Alias(other, owner);
    release_storage(other, kSettingUp);
  }
}

void Flat::share(const std::string& unit, Collectives& collectives) {
  const at::NoGradGuard no_grad;
  const auto all = std::exchange(values_, {}).tensor();
  const auto what = [&] { return text("sharing the values of unit '", unit, "'"); };
  collectives.broadcast(all, [&](const Pending& pending) { pending.wait(kSetUp, what); });
  piece().copy_(part(all, layout_.shard(rank_)));
  if (all.scalar_type() == whole_.type()) {  // it is the whole
    release_storage(all, kSettingUp);
  }
}

uint64_t Flat::gathered_bytes() const { return layout_.size * c10::elementSize(whole_.type()); }
uint64_t Flat::piece_bytes() const {
  return layout_.shard_size() * c10::elementSize(piece_.type());
}

// From a tensor of its own, for views of one tensor would share a version counter.
at::Tensor Flat::view_of(size_t index) const {
  return part(whole(), layout_.parameters[index]).view(shapes_[index]);
}

std::vector<at::Tensor> Flat::parameters() {
  std::vector<at::Tensor> out;
  for (size_t i = 0; i < names_.size(); ++i) {
    out.push_back(view_of(i));
    versions_.push_back(out.back().unsafeGetTensorImpl()->version_counter());
  }
  gathered_at_.resize(versions_.size());
  return out;
}

void Flat::hand_to(const std::vector<at::Tensor>& leaves) {
  for (size_t i = 0; i < names_.size(); ++i) {
    leaves[i].set_data(view_of(i));
    versions_.push_back(leaves[i].unsafeGetTensorImpl()->version_counter());
  }
  gathered_at_.resize(versions_.size());
}

// Where a parameter lies in this rank's piece.
Range Flat::in_piece(size_t index) const {
  const auto held = layout_.held(index, rank_);
  if (held.size == 0) {
    return {};
  }
  return {layout_.parameters[index].begin + held.begin - layout_.shard(rank_).begin, held.size};
}

at::Tensor Flat::piece_of(size_t index) {
  auto out = part(piece(), in_piece(index));
  piece_versions_.push_back(out.unsafeGetTensorImpl()->version_counter());
  return out;
}

bool Flat::is_piece_of(size_t index, const at::Tensor& tensor) const {
  const auto own = part(piece(), in_piece(index));
  return tensor.is_alias_of(own) && tensor.storage_offset() == own.storage_offset() &&
         tensor.sizes() == own.sizes();
}

at::Tensor Flat::piece_from(size_t index, const at::Tensor& whole) const {
  if (whole.sizes() != at::IntArrayRef(shapes_.at(index))) {
    throw InputError(text("'", names_[index], "' has the shape ", at::IntArrayRef(shapes_[index]),
                          ", and was given a tensor of ", whole.sizes()));
  }
  const at::NoGradGuard no_grad;
  return part(whole.detach().reshape({-1}), layout_.held(index, rank_)).clone();
}

uint64_t Flat::values() const {
  uint64_t out = 0;
  for (const auto& version : piece_versions_) {
    out += version.current_version();
  }
  return out;
}

std::vector<at::Tensor> Flat::join(const std::vector<at::Tensor>& pieces,
                                   const Gather& gather) const {
  const auto found = std::ranges::find_if(pieces, &at::Tensor::defined);
  if (pieces.size() != names_.size() || found == pieces.end()) {
    throw InputError("joining needs a piece for each parameter");
  }
  const auto device = whole_.tensor().device();
  const auto whole =
      at::zeros({static_cast<int64_t>(layout_.size)}, found->options().device(device));
  const auto own = part(whole, layout_.shard(rank_));
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i].defined()) {
      part(own, in_piece(i)).copy_(pieces[i]);
    }
  }
  gather(whole);
  std::vector<at::Tensor> out;
  for (size_t i = 0; i < pieces.size(); ++i) {
    out.push_back(part(whole, layout_.parameters[i]).view(shapes_[i]).clone());
  }
  return out;
}

Pending Flat::gather(Collectives& collectives) {
  const at::NoGradGuard no_grad;
  const auto all = whole();
  if (why_stuck_.empty()) {
    refill_storage(all);
  }
  const bool written = pieces_written();
  for (size_t i = 0; i < versions_.size(); ++i) {
    if (written) {
      versions_[i].bump();
    }
    gathered_at_[i] = versions_[i].current_version();
  }
  gathered_values_ = values();
  try {
    part(all, layout_.shard(rank_)).copy_(piece(), /*non_blocking=*/true);
    return collectives.gather(all);
  } catch (...) {
    free({"shard", "a gather that failed"}, {});
    throw;
  }
}

std::pair<at::Tensor, Fence> Flat::brought_home(const at::Tensor& gradient) const {
  if (gradient.device() == piece().device()) {
    return {gradient, Fence()};
  }
  auto copy = empty_on_host(gradient).copy_(gradient, /*non_blocking=*/true);
  return {std::move(copy), Fence::record(gradient.device())};
}

std::string Flat::written() const {
  for (size_t i = 0; i < versions_.size(); ++i) {
    if (versions_[i].current_version() != gathered_at_[i]) {
      return names_[i];
    }
  }
  return {};
}

void Flat::free(const Releaser& by, const Fence& done) {
  try {
    if (why_stuck_.empty()) {
      release_storage(whole(), by, done);
    }
  } catch (const ReleaseError& error) {
    why_stuck_ = error.what();
  }
}

void Flat::abandon(const Fence& done) { free({"shard", "a gather that failed"}, done); }

void Flat::release(const Releaser& by) {
  const auto name = written();
  free(by, {});
  if (!name.empty()) {
    throw MutationError(text("parameter '", name, "' was written to while it was gathered, in ",
                             by.site,
                             ": the write is lost, for each rank keeps its own piece; "
                             "write to the pieces that model.parameters() gives"));
  }
}

}  // namespace tenure::shard
