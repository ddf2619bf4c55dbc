#include <tenure/offload/lineage.h>

#include <tenure/core/error.h>
#include <tenure/core/hold.h>
#include <tenure/core/release.h>
#include <tenure/core/streams.h>
#include <tenure/core/text.h>
#include <tenure/core/where.h>

#include <ATen/ScalarOps.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>

namespace tenure::offload {
namespace {

at::Tensor number_tensor(const c10::Scalar& number) {
  auto out = c10::scalar_to_tensor(number);
  out.unsafeGetTensorImpl()->set_wrapped_number(true);
  return out;
}

// Past Python's modes, as most of them are at once.
c10::IValue number_in(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case c10::ScalarType::Double:
      return *static_cast<const double*>(tensor.const_data_ptr());
    case c10::ScalarType::Long:
      return *static_cast<const int64_t*>(tensor.const_data_ptr());
    default:
      return at::native::_local_scalar_dense_cpu(tensor);
  }
}

// Puts it where the call takes it.
void put(torch::jit::Stack& stack, const Source& source, at::Tensor tensor) {
  auto& argument = stack[source.argument];
  if (source.element == kNone) {
    argument = std::move(tensor);
    return;
  }
  auto list = argument.isNone() ? c10::List<at::Tensor>() : argument.toTensorList();
  list.push_back(std::move(tensor));
  argument = std::move(list);
}

// Whether the value is what the storage holds now.
bool is_still(const Value& value, const void* storage) {
  return value.storage.address() == storage && !value.written && value.version.is_current();
}

}  // namespace

void Followed::index() {
  const auto& values = script.trace.values;
  saves = fit.timeline.saved.size() - fit.roots.size();
  value_of_saved.assign(fit.timeline.saved.size(), kNone);
  root_of_value.assign(values.size(), kNone);
  asks_of_value.assign(values.size(), 0);
  proven.resize(values.size());
  owners.clear();
  keepers.clear();
  for (const auto& value : values) {
    const auto* call = value.call == kNone ? nullptr : &script.trace.calls[value.call];
    const auto name = call == nullptr ? "saved activation" : call_text(call->op, call->module);
    const auto shown = front_of(name, kLongestName);
    owners.push_back(intern_owner(OwnerKind::activation, shown, "of what is made again"));
    keepers.push_back(intern_owner(OwnerKind::activation, shown, "kept for backward"));
  }
  for (uint32_t i = 0; i < values.size(); ++i) {
    if (values[i].saved != kNone) {
      value_of_saved[values[i].saved] = i;
    }
  }
  for (size_t i = 0; i < fit.roots.size(); ++i) {
    value_of_saved[saves + i] = fit.roots[i];
    root_of_value[fit.roots[i]] = static_cast<uint32_t>(saves + i);
  }
  passing.clear();
  for (size_t i = 0; i < script.calls.size(); ++i) {
    const auto& call = script.calls[i];
    const bool passes = !fit.recorded[i] && std::ranges::none_of(call.makes, [&](const auto& made) {
      return root_of_value[made.second] != kNone;
    });
    passing.push_back(passes ? call.op : nullptr);
    for (const auto input : script.trace.calls[i].inputs) {
      if (fit.recorded[i] && !makes_again(input)) {
        ++asks_of_value[input];
      }
    }
  }
}

void Lineage::begin(std::shared_ptr<const Followed> followed, size_t made) {
  let_go();
  followed_ = std::move(followed);
  next_ = made;
  inside_ = false;
  lost_ = followed_ == nullptr ? "no plan" : "";
  is_lost_ = std::make_shared<bool>(false);
  values_.assign(followed_ == nullptr ? 0 : followed_->script.trace.values.size(), nullptr);
  made_ = {};
  std::erase_if(seen_, [](const auto& known) { return known.expired(); });
  by_storage_.clear();
  indexed_ = 0;
}

void Lineage::let_go() {
  if (holding_) {
    std::ranges::fill(values_, nullptr);
    waiting_.clear();
    holding_ = false;
  }
}

void Lineage::lose(std::string why) {
  if (lost_.empty()) {
    lost_ = std::move(why);
    *is_lost_ = true;
  }
}

bool Lineage::passes(const Operator& op) {
  if (!lost_.empty()) {
    return true;
  }
  if (next_ >= followed_->passing.size() || followed_->passing[next_] != &op) {
    return false;
  }
  ++next_;
  return true;
}

// While this call runs the processor fetches what the plan says of the next one.
void Lineage::look_ahead() const {
  const auto& calls = followed_->script.calls;
  if (next_ + 1 < calls.size()) {
    __builtin_prefetch(&calls[next_ + 1]);
    __builtin_prefetch(&calls[next_ + 1].makes);
  }
}

std::shared_ptr<Call> Lineage::before(const Operator& op, const torch::jit::Stack& stack) {
  if (!lost_.empty()) {
    return nullptr;
  }
  inside_ = holding_ = true;
  const auto& script = followed_->script;
  if (next_ >= script.calls.size() || script.calls[next_].op != &op) {
    lose(text("call ", next_ + 1, " was ", call_text(op.name, where().module), ", not ",
              next_ < script.calls.size() ? std::string(name_of(script.calls[next_].op->name))
                                          : std::string("the end")));
    return nullptr;
  }
  if (!followed_->fit.recorded[next_]) {
    return nullptr;
  }
  look_ahead();
  auto call = std::allocate_shared<Call>(FromPool<Call>(*calls_), op,
                                         c10::Stream(c10::Stream::DEFAULT, c10::kCPU),
                                         script.calls[next_].module);
  if (!take_arguments(*call, stack)) {
    lose(text(call_text(op.name, where().module), " was given other arguments"));
    return nullptr;
  }
  return call;
}

// Whether they are those that the plan expects.
bool Lineage::take_arguments(Call& call, const torch::jit::Stack& stack) {
  const auto& expected = followed_->script.calls[next_].tensors;
  const auto add_others = [&](size_t upto) {
    const auto* arguments = stack.data() + stack.size() - call.op->arguments;
    call.arguments.append(arguments + call.arguments.size(), arguments + upto);
  };
  const bool told = each_tensor(*call.op, stack, [&](const Argument& argument) {
    const auto& [place, element, tensor] = argument;
    const auto value =
        call.sources.size() < expected.size() ? expected[call.sources.size()] : kNone;
    if (call.sources.size() >= expected.size() || (value == kNone) != is_number(tensor)) {
      return false;
    }
    if (call.arguments.size() <= place) {
      add_others(place);
      call.arguments.emplace_back();
    }
    auto& into = call.sources.emplace_back(place, element);
    if (value == kNone) {
      call.arguments[place] = number_in(tensor);
      return true;
    }
    into.value = source(tensor, value);
    if (into.value == nullptr) {
      return false;
    }
    if (!lies_so(tensor, into.value->geometry)) {
      into.geometry = std::make_unique<Geometry>(geometry_of(tensor));
    }
    if (!tensor.device().is_cpu()) {
      call.stream = current_stream(tensor.device());
    }
    return true;
  });
  add_others(call.op->arguments);
  return told && call.sources.size() == expected.size();
}

std::shared_ptr<Value> Lineage::value_for(const at::Tensor& tensor, uint32_t value) {
  auto out = std::allocate_shared<Value>(FromPool<Value>(*nodes_), tensor, value);
  out->owner = followed_->owners[value];
  out->asks = std::max(followed_->asks_of_value[value], followed_->fit.asks[value]);
  out->lost = is_lost_;
  return out;
}

// The value that the plan expects there; null: it is another.
std::shared_ptr<Value> Lineage::source(const at::Tensor& tensor, uint32_t value) {
  auto& known = values_[value];
  if (known != nullptr) {
    return is_still(*known, tensor.storage().unsafeGetStorageImpl()) ? known : nullptr;
  }
  known = value_for(tensor, value);
  if (const auto place = followed_->root_of_value[value]; place != kNone) {
    known->entry = shelf_.save_root(tensor, place);
    known->entry->asks = known->asks;
  } else {
    known->kept = hold(tensor.storage(), known->owner, ScopeId::process);
  }
  seen_.push_back(known);
  return known;
}

void Lineage::after(const Operator& op, const std::shared_ptr<Call>& call,
                    const torch::jit::Stack& stack) {
  inside_ = false;
  if (!lost_.empty()) {
    waiting_.clear();
    return;
  }
  const auto& scripted = followed_->script.calls[next_++];
  const auto* first = op.returns > 0 ? &stack[stack.size() - op.returns] : nullptr;
  if (scripted.bytes != 0 &&
      (first == nullptr || !first->isTensor() || !is_plain(first->toTensor()) ||
       first->toTensor().storage().nbytes() != scripted.bytes)) {
    lose(text(call_text(op.name, where().module), " made an output of another size"));
    waiting_.clear();
    return;
  }
  for (const auto& [output, value] : scripted.makes) {
    if (const auto* made = output_at(stack, op, output)) {
      make_value(call, *made, output, value);
    }
  }
  for (const auto& [value, weak] : waiting_) {
    const auto entry = weak.lock();
    // One that failed, and was tried again, leaves those of the first time behind.
    if (entry != nullptr && values_[value] != nullptr &&
        is_still(*values_[value], entry->original.address())) {
      entry->value = values_[value];
      entry->kept.release();
    }
  }
  waiting_.clear();
}

void Lineage::make_value(const std::shared_ptr<Call>& call, const at::Tensor& output,
                         uint32_t place, uint32_t value) {
  if (followed_->makes_again(value) && call != nullptr) {
    auto made = value_for(output, value);
    made->call = call;
    made->output = place;
    call->outputs.push_back(made);
    for (const auto& from : call->sources) {
      if (from.value != nullptr && from.value->call == nullptr) {
        from.value->dependents.push_back(made);
      }
    }
    seen_.push_back(made);
    values_[value] = std::move(made);
  } else if (followed_->root_of_value[value] != kNone) {
    (void)source(output, value);
  }
}

// They are nobody's to be told of again.
std::vector<std::shared_ptr<Value>> Lineage::take_values_on(const c10::Storage& storage) {
  for (; indexed_ < seen_.size(); ++indexed_) {
    if (const auto value = seen_[indexed_].lock(); value != nullptr && !value->written) {
      by_storage_.emplace(value->storage, value);
    }
  }
  std::vector<std::shared_ptr<Value>> out;
  const auto [first, last] = by_storage_.equal_range(StorageRef(storage));
  for (auto known = first; known != last; ++known) {
    if (auto value = known->second.lock()) {
      out.push_back(std::move(value));
    }
  }
  by_storage_.erase(first, last);
  return out;
}

bool Lineage::written(const at::Tensor& tensor) {
  if (seen_.empty() || !is_plain(tensor)) {
    return false;
  }
  const auto values = take_values_on(tensor.storage());
  for (const auto& value : values) {
    for (const auto& weak : std::exchange(value->dependents, {})) {
      if (const auto dependent = weak.lock()) {
        make_for_good(*dependent);
      }
    }
    value->written = true;
  }
  return !values.empty();
}

void Lineage::make_for_good(Value& value) {
  if (value.call != nullptr) {
    value.hold_for_good(remake(value));
  }
}

bool Lineage::drop(const std::shared_ptr<SavedStorage>& entry, size_t place) {
  if (!lost_.empty() || place >= followed_->value_of_saved.size()) {
    return false;
  }
  const auto value = followed_->value_of_saved[place];
  if (value == kNone) {
    return false;
  }
  if (const auto& known = values_[value];
      known != nullptr && is_still(*known, entry->original.address())) {
    entry->value = known;
    return true;
  }
  if (inside_ && values_[value] == nullptr) {
    waiting_.emplace_back(value, entry);
  }
  return false;
}

void Lineage::rest(const std::shared_ptr<SavedStorage>& entry, const at::Tensor& tensor,
                   size_t place) {
  if (!lost_.empty() || place >= followed_->value_of_saved.size()) {
    return;
  }
  const auto value = followed_->value_of_saved[place];
  if (value == kNone || followed_->asks_of_value[value] == 0 ||
      entry->bytes != tensor.storage().nbytes()) {
    return;
  }
  auto& known = values_[value];
  if (known == nullptr) {
    known = value_for(tensor, value);
    seen_.push_back(known);
  }
  if (is_still(*known, entry->original.address()) && known->entry == nullptr &&
      known->call == nullptr) {
    entry->asks = known->asks;
    known->entry = entry;
    known->kept.release();
  }
}

int64_t Lineage::bytes_remade(c10::Device device) const {
  int64_t out = 0;
  for (const auto& weak : seen_) {
    const auto value = weak.lock();
    if (value == nullptr || value->storage.device() != device) {
      continue;
    }
    for (const auto* lease : {&value->memo, &value->kept}) {
      if (lease->held() && StorageRef(lease->storage()) != value->storage) {
        out += static_cast<int64_t>(value->bytes);
      }
    }
  }
  return out;
}

c10::Storage Lineage::ask(Value& value, bool alone) {
  Scratch scratch;
  return ask(value, alone, scratch);
}

c10::Storage Lineage::remake(Value& value) {
  Scratch scratch;
  return make(value, true, scratch);
}

c10::Storage Lineage::ask(Value& value, bool alone, Scratch& scratch) {
  auto out = content(value, alone, scratch);
  if (alone || value.asks == 0) {
    return out;
  }
  --value.asks;
  if (value.entry != nullptr) {
    value.entry->asks = value.asks;
  }
  if (value.asks == 0) {
    value.memo.release();
    if (value.entry != nullptr && value.entry->root && !*value.lost) {
      shelf_.used_up(*value.entry);
    }
  }
  return out;
}

c10::Storage Lineage::content(Value& value, bool alone, Scratch& scratch) {
  if (value.call == nullptr) {
    return held(value);
  }
  if (const auto known = scratch.find(&value); known != scratch.end()) {
    return known->second;
  }
  if (!alone && value.memo.held() && value.board.current_version() == 0) {
    return value.memo.storage();
  }
  if (auto there = value.storage.lock();
      there && !is_released(*there) && is_still(value, value.storage.address())) {
    return std::move(*there);
  }
  // Where the plan has asks to come, a memo is kept for exactly as long.
  const bool planned = !alone && value.asks > 0;
  auto out = make(value, alone, scratch);
  if (!planned) {
    scratch.emplace(&value, out);
  }
  return out;
}

c10::Storage Lineage::held(Value& value) {
  if (!value.version.is_current()) {
    throw MutationError(
        text("a tensor that saved activations are made again of has been modified by an inplace "
             "operation where Tenure could not see it: ",
             value.storage.text(), " is at version ", value.version.now(), "; expected version ",
             value.version.number(),
             " instead. Write to it inside the step's context, or after its backward"));
  }
  auto out = value.kept.held()
                 ? value.kept.storage()
                 : shelf_.content(*value.entry, current_stream(value.storage.device()));
  if (out.nbytes() < value.bytes || is_released(out)) {
    throw UseAfterRelease(text("what saved activations are made again of is not there: ",
                               value.storage.text(), " has been released or resized"));
  }
  return out;
}

c10::Storage Lineage::make(Value& value, bool alone, Scratch& scratch) {
  const auto call = value.call;
  const auto compute = current_stream(call->stream.device());
  std::unordered_map<const Value*, c10::Storage> inputs;
  torch::jit::Stack stack(call->arguments.begin(), call->arguments.end());
  for (const auto& source : call->sources) {
    if (source.value == nullptr) {
      put(stack, source, number_tensor(stack[source.argument].toScalar()));
      continue;
    }
    auto known = inputs.find(source.value.get());
    if (known == inputs.end()) {
      known = inputs.emplace(source.value.get(), ask(*source.value, alone, scratch)).first;
    }
    put(stack, source,
        tensor_on(known->second, source.geometry ? *source.geometry : source.value->geometry));
  }
  const c10::OptionalStreamGuard guard(
      call->stream.device().is_cpu() ? std::nullopt : std::optional(call->stream));
  {
    const Plainly plainly;
    const c10::AutoGradMode no_grad(false);
    call->op->handle.callBoxed(&stack);
  }
  ++made_.count;
  c10::Storage out;
  for (const auto& weak : call->outputs) {
    const auto output = weak.lock();
    if (output == nullptr) {
      continue;
    }
    const auto& tensor = stack[output->output].toTensor();
    if (geometry_of(tensor) != output->geometry || tensor.storage().nbytes() != output->bytes) {
      throw Error(text(call_text(call->op->name, call->module),
                       " made something of another shape than in forward"));
    }
    made_.bytes += output->bytes;
    if (compute != call->stream) {
      used_on(tensor.storage(), compute);
    }
    if (output.get() == &value) {
      out = tensor.storage();
    }
    const auto more = output.get() == &value ? 1U : 0U;
    if (!alone && output->asks > more && output->call != nullptr) {
      output->memo = hold(tensor.storage(), output->owner, ScopeId::process);
      output->board = c10::VariableVersion(0);
    }
  }
  if (compute != call->stream) {
    c10::Event made(call->stream.device_type());
    made.record(call->stream);
    made.block(compute);
  }
  return out;
}

}  // namespace tenure::offload
