#include <tenure/pipeline/channel.h>

#include <tenure/core/error.h>
#include <tenure/core/storage_ref.h>
#include <tenure/core/text.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

namespace tenure::pipeline {
namespace {

using Clock = std::chrono::steady_clock;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

at::Tensor over(Header::Words& words) {
  return at::from_blob(words.data(), {static_cast<int64_t>(words.size())}, at::kLong);
}

// Its bytes, for backends do not know every dtype, and `front` bytes before them. REQUIRES:
// contiguous.
at::Tensor as_bytes(const at::Tensor& tensor, size_t front = 0) {
  auto out = at::empty({0}, at::TensorOptions(at::kByte).device(tensor.device()));
  auto* impl = out.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(tensor.storage());
  impl->set_storage_offset(tensor.storage_offset() * static_cast<int64_t>(tensor.element_size()) -
                           static_cast<int64_t>(front));
  impl->set_sizes_contiguous({static_cast<int64_t>(tensor.nbytes() + front)});
  return out;
}

// See Note [A message]: beyond this a copy costs more than a message.
constexpr uint64_t kSmall = 256 << 10;

bool goes_as_one(const std::vector<Spec>& specs, c10::Device device) {
  return device.is_cpu() && specs.size() == 1 && specs[0].bytes() > 0 && specs[0].bytes() <= kSmall;
}

// The front of the header and the tensor's bytes, in one piece.
at::Tensor with_front(const Header::Words& words, const at::Tensor& tensor) {
  const auto bytes = tensor.nbytes();
  auto out = at::empty({static_cast<int64_t>(Header::kFront + bytes)}, at::kByte);
  auto* to = static_cast<std::byte*>(out.data_ptr());
  std::memcpy(to, words.data(), Header::kFront);
  std::memcpy(to + Header::kFront, tensor.const_data_ptr(), bytes);
  return out;
}

Spec spec_of(const Sent& sent) {
  Spec out;
  if (sent.tensor.defined()) {
    out.type = sent.tensor.scalar_type();
    out.gradient = sent.gradient;
    out.sizes.assign(sent.tensor.sizes().begin(), sent.tensor.sizes().end());
  }
  return out;
}

std::string words_of(const Message& message) {
  return text(message.cargo == Cargo::activations ? "the output" : "the gradients", " of stage ",
              message.from_stage, " for microbatch ", message.microbatch);
}

// Before anything of its message is under way: whoever was told of a tensor waits for it.
void require_sendable(const at::Tensor& tensor, const Message& message, c10::Device device) {
  if (tensor.device() != device) {
    throw InputError(text(words_of(message), " is on ", tensor.device().str(),
                          ", the other stages' on ", device.str(),
                          ": have a stage give back tensors on its own device"));
  }
  if (tensor.layout() == c10::kStrided && !tensor.is_nested() && tensor.nbytes() == 0) {
    return;
  }
  try {
    const StorageRef named(tensor);
    if (tensor.layout() == c10::kStrided) {
      return;
    }
  } catch (const LeaseError& error) {
    throw InputError(text(words_of(message), " cannot be sent: ", error.what()));
  }
  throw InputError(text(words_of(message), " cannot be sent: it is of the layout ", tensor.layout(),
                        ": have a stage give back to_dense() of it"));
}

OwnerId owner_of_buffer(const Message& message) {
  return intern_owner(
      OwnerKind::receive_buffer,
      text(message.cargo == Cargo::activations ? "input of stage " : "gradients for stage ",
           message.to_stage));
}

OwnerId owner_of_cargo(const Message& message) {
  return intern_owner(
      OwnerKind::communication,
      text(message.cargo == Cargo::activations ? "output of stage " : "gradients from stage ",
           message.from_stage));
}

}  // namespace

struct Channel::Incoming {
  Message message;
  bool as_one = false;
  Header::Words words{};
  WorkPtr header;  // none yet, if it comes as one
  std::vector<Spec> specs;
  std::vector<Alias> tensors;  // by spec
  std::vector<WorkPtr> works;
};

Channel::Channel(Groups groups, uint32_t microbatches, std::chrono::milliseconds timeout)
    : groups_(std::move(groups)),
      microbatches_(microbatches),
      timeout_(timeout),
      rank_(static_cast<uint32_t>(groups_.side->getRank())),
      ranks_(static_cast<uint32_t>(groups_.side->getSize())),
      sends_(timeout),
      outcome_(groups_.side, timeout) {}

Channel::~Channel() = default;

void Channel::begin(uint64_t step, bool trains, uint32_t send_slots) {
  if (!broken_.empty()) {
    throw CollectiveError(text("this pipeline cannot go on, because ", broken_,
                               ": start the ranks again, from the last checkpoint"));
  }
  step_ = 2 * step + (trains ? 1 : 0);
  send_slots_ = send_slots;
  stats_.most_held_bytes = 0;
}

Channel::Key Channel::key(const Message& message) const { return key_of(message, microbatches_); }

c10d::ProcessGroup& Channel::group_to(uint32_t from, uint32_t to) const {
  return from < to ? *groups_.up : *groups_.down;
}

template <class Transfer>
auto Channel::with_peer(const Message& message, const char* doing, Transfer transfer) {
  const auto begin = Clock::now();
  try {
    return transfer();
  } catch (const std::exception& error) {
    const auto late = Clock::now() - begin >= timeout_;
    broken_ = text(
        "rank ", message.peer,
        late ? text(" did not answer for ", timeout_.count() / 1000, " s") : std::string(" ended"));
    throw CollectiveError(text(broken_, ": rank ", rank_, " was ", doing, " ", words_of(message),
                               " (", front_of(error.what(), 200), ")"));
  }
}

template <class Wait>
void Channel::timed(const Message& message, const char* doing, Wait wait) {
  const auto begin = Clock::now();
  with_peer(message, doing, wait);
  stats_.waited += std::chrono::duration<double>(Clock::now() - begin).count();
}

void Channel::wait(c10d::Work& work, const Message& message, const char* doing) {
  timed(message, doing, [&] { return work.wait(timeout_); });
}

WorkPtr Channel::receive_into(c10d::ProcessGroup& group, at::Tensor into, const Message& message) {
  std::vector<at::Tensor> one = {std::move(into)};
  return with_peer(message, "asking for", [&] {
    return group.recv(one, static_cast<int>(message.peer), static_cast<int>(key(message)));
  });
}

WorkPtr Channel::send_off(c10d::ProcessGroup& group, at::Tensor what, const Message& message) {
  std::vector<at::Tensor> one = {std::move(what)};
  return with_peer(message, "sending", [&] {
    return group.send(one, static_cast<int>(message.peer), static_cast<int>(key(message)));
  });
}

void Channel::ask_for_header(Incoming& incoming) {
  incoming.header = receive_into(*groups_.side, over(incoming.words), incoming.message);
}

void Channel::ask(Incoming& incoming, const std::vector<Spec>& specs, size_t front) {
  const auto& message = incoming.message;
  incoming.specs = specs;
  incoming.tensors.clear();
  incoming.works.clear();
  for (const auto& spec : specs) {
    const auto tensor = buffers_.make(spec, device_, front);
    if (!tensor.defined()) {
      incoming.tensors.emplace_back();
      continue;
    }
    incoming.tensors.emplace_back(tensor, owner_of_buffer(message));
    if (spec.bytes() > 0) {
      incoming.works.push_back(
          receive_into(group_to(message.peer, rank_), as_bytes(tensor, front), message));
    }
  }
}

void Channel::post(const Message& message) {
  auto incoming = std::make_unique<Incoming>();
  incoming->message = message;
  const auto& specs = received_before_[key(message)];
  incoming->as_one = goes_as_one(specs, device_);
  if (!incoming->as_one) {
    ask_for_header(*incoming);
  }
  ask(*incoming, specs, incoming->as_one ? Header::kFront : 0);
  incoming_[key(message)] = std::move(incoming);
}

Header Channel::receive(Incoming& incoming) {
  const auto& message = incoming.message;
  const auto all_there = [&](const char* doing) {
    for (const auto& work : incoming.works) {
      wait(*work, message, doing);
    }
    incoming.works.clear();
  };
  const auto whole = [&] {
    wait(*incoming.header, message, "waiting for");
    return Header(incoming.words);
  };
  const auto front = [&] {
    all_there("waiting for");
    const auto tensor = incoming.tensors.front().tensor();
    return Header::of_front(static_cast<const std::byte*>(tensor.const_data_ptr()) -
                            Header::kFront);
  };
  auto header = incoming.as_one ? front() : whole();
  if (header.step() != step_) {
    const auto doing = [](uint64_t step) {
      return text(step % 2 == 1 ? "trains in step " : "evaluates in step ", step / 2);
    };
    throw CollectiveError(text("rank ", message.peer, " ", doing(header.step()), " and rank ",
                               rank_, " ", doing(step_),
                               ": call step() and eval() on all ranks in the same order"));
  }
  all_there("receiving");
  if (incoming.as_one && header.status() != Header::Status::as_before) {
    ask_for_header(incoming);
    header = whole();
  }
  if (header.status() == Header::Status::changed) {
    ask(incoming, header.specs());
    all_there("receiving");
    received_before_[key(message)] = header.specs();
  }
  return header;
}

Received Channel::take(const Message& message, ScopeId scope, std::vector<Alias>& leases) {
  const auto found = incoming_.find(key(message));
  const auto incoming = std::move(found->second);
  incoming_.erase(found);
  const auto header = receive(*incoming);
  if (header.status() == Header::Status::failed) {
    throw PeerFailed(header.failure());
  }
  Received out{.tensors = {}, .share = header.share()};
  for (size_t i = 0; i < incoming->specs.size(); ++i) {
    if (!incoming->tensors[i].defined()) {
      out.tensors.emplace_back();
      continue;
    }
    out.tensors.push_back({incoming->tensors[i].tensor(), incoming->specs[i].gradient});
    leases.emplace_back(out.tensors.back().tensor, owner_of_buffer(message), scope);
  }
  stats_.most_held_bytes = std::max(stats_.most_held_bytes, buffers_.most_held());
  return out;
}

void Channel::finish_all(const Sends::Which& which) {
  while (const auto one = sends_.take(which)) {
    finish(*one);
  }
}

void Channel::finish(const Send& send) {
  timed(send.message, "sending", [&] { sends_.wait(send); });
}

void Channel::make_room(const Message& message) {
  const auto same = [&](const Send& one) {
    return one.message.peer == message.peer && one.message.cargo == message.cargo;
  };
  sends_.settle();
  for (auto under_way = sends_.count(same); under_way >= send_slots_; --under_way) {
    if (const auto oldest = sends_.take(same)) {
      finish(*oldest);
    }
  }
}

void Channel::send_words(const Message& message, const Header::Words& words,
                         const std::vector<at::Tensor>& tensors, const std::vector<Spec>& before,
                         ScopeId scope) {
  Send send;
  send.message = message;
  send.words() = words;
  const auto send_tensor = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.nbytes() == 0) {
      return;
    }
    send.tensors.emplace_back(tensor, owner_of_cargo(message), scope);
    auto work = send_off(group_to(rank_, message.peer), as_bytes(tensor), message);
    if (tensor.is_cpu()) {
      send.add_on_host(std::move(work));
    } else {
      send.on_device.push_back(std::move(work));
    }
    stats_.sent_bytes += tensor.nbytes();
  };
  const auto as_one = goes_as_one(before, device_);
  if (as_one) {
    send_tensor(with_front(words, tensors.front()));
  }
  if (!as_one || Header(words).status() != Header::Status::as_before) {
    send.add_on_host(send_off(*groups_.side, over(send.words()), message));
  }
  std::for_each(tensors.begin() + (as_one ? 1 : 0), tensors.end(), send_tensor);
  ++stats_.messages;
  sends_.add(std::move(send));
}

std::vector<at::Tensor> Channel::anything(const std::vector<Spec>& specs) const {
  std::vector<at::Tensor> out;
  for (const auto& spec : specs) {
    if (spec.bytes() > 0) {
      out.push_back(at::empty(spec.sizes, at::TensorOptions(spec.type).device(device_)));
    }
  }
  return out;
}

void Channel::send(const Message& message, const std::vector<Sent>& tensors, Share share,
                   ScopeId scope) {
  std::vector<Spec> specs;
  std::vector<at::Tensor> whole;
  for (const auto& sent : tensors) {
    if (sent.tensor.defined()) {
      require_sendable(sent.tensor, message, device_);
    }
    specs.push_back(spec_of(sent));
    whole.push_back(sent.tensor.defined()
                        ? sent.tensor.detach().resolve_conj().resolve_neg().contiguous()
                        : at::Tensor());
  }
  auto& before = sent_before_[key(message)];
  const auto changed = before != specs;
  const auto words = Header::of(
      step_, changed ? Header::Status::changed : Header::Status::as_before, specs, share);
  make_room(message);
  const auto expected = before;
  if (changed) {
    auto all = anything(before);
    all.insert(all.end(), whole.begin(), whole.end());
    whole = std::move(all);
    before = std::move(specs);
    ++stats_.changed;
  }
  send_words(message, words, whole, expected, scope);
}

void Channel::finish(const Message& message) {
  finish_all([&](const Send& one) { return one.message == message; });
}

void Channel::finish_readers(const at::Tensor& tensor) {
  finish_all([&](const Send& one) {
    return std::ranges::any_of(one.tensors, [&](const Alias& alias) {
      return alias.lease().storage().is_alias_of(tensor.storage());
    });
  });
}

void Channel::finish() {
  finish_all([](const Send&) { return true; });
  buffers_.trim();
}

std::optional<Failure> Channel::end() {
  try {
    return outcome_.well(step_);
  } catch (const std::exception& error) {
    broken_ = "a rank ended or did not answer";
    throw CollectiveError(text(broken_, ": rank ", rank_,
                               " was waiting to hear how the others ended the step before (",
                               front_of(error.what(), 200), ")"));
  }
}

void Channel::abandon(const Failure& failure, const std::vector<Message>& unmade,
                      const std::vector<Message>& unneeded) {
  const auto words = Header::of(step_, failure);
  uint32_t gone = ~0U;  // the peer that does not answer
  const auto settle = [&](const Message& message, const auto& todo) {
    if (message.peer == gone) {
      return;
    }
    try {
      todo();
    } catch (const std::exception&) {  // it has gone, too: there is nothing to settle with it
      gone = message.peer;
    }
  };
  for (const auto& message : unmade) {
    settle(message, [&] {
      const auto& before = sent_before_[key(message)];
      send_words(message, words, anything(before), before, ScopeId::process);
    });
  }
  for (const auto& message : unneeded) {
    settle(message, [&] {
      if (!incoming_.contains(key(message))) {
        post(message);
      }
      const auto incoming = std::move(incoming_.extract(key(message)).mapped());
      receive(*incoming);
    });
  }
  while (const auto one = sends_.take([](const Send&) { return true; })) {
    settle(one->message, [&] { finish(*one); });
  }
  incoming_.clear();
  buffers_.trim();
  if (broken_.empty()) {
    try {
      outcome_.badly(step_, failure.rank == rank_ ? std::optional(failure) : std::nullopt);
    } catch (const std::exception& error) {
      broken_ = text("a rank ended or did not answer (", front_of(error.what(), 200), ")");
    }
  }
}

}  // namespace tenure::pipeline
