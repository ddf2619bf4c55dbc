// The half of saved_weights.h that knows a Stage.
#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/train/saved_weights.h>
#include <tenure/train/stage.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>

#include <set>
#include <string_view>

namespace tenure::train {
namespace {

constexpr size_t kNamed = 5;
constexpr const char* kHead = "lm_head.weight";

// "3 weights are missing (a, b, …)"
class Complaint {
 public:
  explicit Complaint(std::string_view what) : what_(what) {}

  void add(const std::string& name) {
    if (++count_ <= kNamed) {
      names_ += text(count_ == 1 ? "" : ", ", name);
    }
  }

  void join(std::string& sentence) const {
    if (count_ > 0) {
      sentence += text(sentence.empty() ? "" : "; ", count_text(count_, "weight"), " ", what_, " (",
                       names_, count_ > kNamed ? ", …)" : ")");
    }
  }

 private:
  std::string_view what_;
  uint64_t count_ = 0;
  std::string names_;
};

std::string_view prefix_of(const ModelConfig& config) {
  return config.kind == ModelKind::gpt2 ? "transformer." : "model.";
}

// Causal masks and rotary frequencies, which are computed, not learned.
bool is_buffer(std::string_view name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
         name.ends_with(".rotary_emb.inv_freq");
}

class Loading {
 public:
  Loading(const Stage& stage, const SavedWeights& saved)
      : stage_(stage), saved_(saved), prefix_(prefix_of(stage.config())) {}

  void check() const {
    Complaint missing("missing");
    Complaint shaped("of another shape");
    Complaint typed("that are no floating-point numbers");
    for (const auto& [name, value] : stage_.named_weights()) {
      const auto there = saved_name(name);
      if (!saved_.has(there)) {
        missing.add(name);
        continue;
      }
      const auto& entry = saved_.entry(there);
      if (value.sizes() != at::IntArrayRef(entry.shape)) {
        shaped.add(text(name, ": ", at::IntArrayRef(entry.shape), " for ", value.sizes()));
      }
      if (!c10::isFloatingType(entry.type)) {
        typed.add(name);
      }
    }
    std::string sentence;
    missing.join(sentence);
    unexpected().join(sentence);
    shaped.join(sentence);
    typed.join(sentence);
    if (!sentence.empty()) {
      throw InputError(text(saved_.path(), " does not fit this ",
                            train::name_of(stage_.config().kind), ": ", sentence, "."));
    }
    check_tied_head();
  }

  void copy() const {
    const at::NoGradGuard no_grad;
    for (auto& [name, value] : stage_.named_weights()) {
      value.copy_(saved_.read(saved_name(name)));
    }
  }

 private:
  std::string saved_name(const std::string& name) const {
    if (!saved_.has(name) && name.starts_with(prefix_)) {
      return name.substr(prefix_.size());
    }
    return name;
  }

  bool is_tied() const { return stage_.config().head == HeadKind::tied; }

  Complaint unexpected() const {
    std::set<std::string> known;
    for (const auto& name : weight_names(stage_.config())) {
      known.insert(saved_name(name));
    }
    Complaint out("unexpected");
    for (const auto& name : saved_.names()) {
      if (!known.contains(name) && !is_buffer(name) && !(is_tied() && name == kHead)) {
        out.add(name);
      }
    }
    return out;
  }

  void check_tied_head() const {
    if (!is_tied() || !stage_.is_last() || !saved_.has(kHead)) {
      return;
    }
    const auto embedding = stage_.config().kind == ModelKind::gpt2 ? "wte" : "embed_tokens";
    const auto there = saved_name(text(prefix_, embedding, ".weight"));
    if (!at::equal(saved_.read(kHead).to(at::kFloat), saved_.read(there).to(at::kFloat))) {
      throw InputError(text(saved_.path(), " has a head (", kHead,
                            ") other than the embedding, and this model ties the two."));
    }
  }

  const Stage& stage_;
  const SavedWeights& saved_;
  std::string prefix_;
};

}  // namespace

void load_weights(Stage& stage, const SavedWeights& saved) {
  const Loading loading(stage, saved);
  loading.check();
  loading.copy();
}

}  // namespace tenure::train
