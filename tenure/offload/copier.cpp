#include <tenure/offload/copier.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>

namespace tenure::offload {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kTimedEvent = c10::EventFlag::BACKEND_DEFAULT;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Our own copies are nobody's business: no autograd, and no mode of the user's sees them.
struct Unseen {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_modes{c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
       c10::DispatchKey::Functionalize, c10::DispatchKey::TESTING_ONLY_GenericMode,
       c10::DispatchKey::TESTING_ONLY_GenericWrapper})};
};

// `bytes` of a storage as a tensor of bytes.
at::Tensor bytes_of(const c10::Storage& storage, size_t begin, size_t bytes) {
  auto keys =
      c10::DispatchKeySet(c10::computeDispatchKey(c10::kByte, c10::kStrided, storage.device()));
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(storage), keys,
                                                   caffe2::TypeMeta::Make<uint8_t>());
  const auto size = static_cast<int64_t>(bytes);
  const int64_t stride = 1;
  impl->set_sizes_and_strides(c10::IntArrayRef(size), c10::IntArrayRef(stride),
                              static_cast<int64_t>(begin));
  return at::Tensor(std::move(impl));
}

// Queues a copy of two byte tensors on the current stream.
void queue_copy(const at::Tensor& to, const at::Tensor& from) {
  const Unseen unseen;
  to.copy_(from, /*non_blocking=*/true);
}

}  // namespace

// A stretch of a stream between two events: of a copy, or of a wait if `moved` is null.
struct Copier::Timing {
  c10::Event begin;
  c10::Event end;
  Moved* moved;
  uint64_t bytes;
  std::shared_ptr<double> exposed;
};

Copier::Copier(c10::Device device, Streams streams) : device_(device) {
  if (device.is_cpu() || streams == Streams::none) {
    return;
  }
  const c10::impl::VirtualGuardImpl guard(device.type());
  out_stream_ = guard.getStreamFromGlobalPool(device);
  back_stream_ = out_stream_;
  if (streams == Streams::two) {
    back_stream_ = guard.getStreamFromGlobalPool(device);
    urgent_stream_ = guard.getStreamFromGlobalPool(device);
  }
}

Copier::~Copier() = default;

Fence Copier::out(const c10::Storage& storage, size_t begin, HostCopy& to,
                  const c10::Stream& compute) {
  const auto stream = out_stream_.value_or(compute);
  const auto started = Clock::now();
  if (stream != compute) {
    Fence::record(compute).wait(stream);
  }
  const c10::OptionalStreamGuard guard(device_.is_cpu() ? std::nullopt : std::optional(stream));
  to.for_each_piece([&](const c10::Storage&, const HostPool::Busy& busy) {
    busy.back.wait(stream);
    busy.out.wait(stream);
  });
  auto timing = this->begin(stream, &out_, to.bytes());
  to.for_each_piece([&](const c10::Storage& piece, const HostPool::Busy&) {
    queue_copy(bytes_of(piece, 0, piece.nbytes()), bytes_of(storage, begin, piece.nbytes()));
    begin += piece.nbytes();
  });
  end(std::move(timing), stream);
  auto left = Fence::record(stream);
  to.written_until(left);
  out_.bytes += to.bytes();
  if (device_.is_cpu() && measuring_) {
    out_.seconds += seconds_since(started);
    out_.timed_bytes += to.bytes();
    *exposed_ += seconds_since(started);
  }
  return left;
}

Fence Copier::back(HostCopy& from, const c10::Storage& storage, const c10::Stream& compute,
                   const Fence& left, Urgency urgency) {
  const auto usual = back_stream_.value_or(compute);
  const auto stream = urgency == Urgency::now ? urgent_stream_.value_or(usual) : usual;
  const auto started = Clock::now();
  if (stream != compute) {
    // The memory may have been another tensor's, whose last reader is still queued there.
    Fence::record(compute).wait(stream);
  }
  left.wait(stream);
  const c10::OptionalStreamGuard guard(device_.is_cpu() ? std::nullopt : std::optional(stream));
  auto timing = begin(stream, &back_, from.bytes());
  size_t at = 0;
  from.for_each_piece([&](const c10::Storage& piece, const HostPool::Busy&) {
    queue_copy(bytes_of(storage, at, piece.nbytes()), bytes_of(piece, 0, piece.nbytes()));
    at += piece.nbytes();
  });
  end(std::move(timing), stream);
  auto arrived = Fence::record(stream);
  if (stream != usual) {
    // So that what is recorded on the usual stream from now on stands for this copy, too: the pool
    // counts on the order of fences.
    arrived.wait(usual);
  }
  from.read_until(stream == usual ? arrived : Fence::record(usual));
  back_.bytes += from.bytes();
  if (device_.is_cpu() && measuring_) {
    back_.seconds += seconds_since(started);
    back_.timed_bytes += from.bytes();
    *exposed_ += seconds_since(started);
  }
  return arrived;
}

void Copier::wait(const Fence& fence, const c10::Stream& compute) {
  auto timing = begin(compute, nullptr, 0);
  fence.wait(compute);
  end(std::move(timing), compute);
}

void Copier::start_measuring() {
  measuring_ = true;
  exposed_ = std::make_shared<double>(0);
}

std::unique_ptr<Copier::Timing> Copier::begin(const c10::Stream& stream, Moved* moved,
                                              uint64_t bytes) {
  if (!measuring_ || device_.is_cpu()) {
    return nullptr;
  }
  auto timing = std::make_unique<Timing>(Timing{c10::Event(device_.type(), kTimedEvent),
                                                c10::Event(device_.type(), kTimedEvent), moved,
                                                bytes, exposed_});
  timing->begin.record(stream);
  return timing;
}

void Copier::end(std::unique_ptr<Timing> timing, const c10::Stream& stream) {
  if (timing != nullptr) {
    timing->end.record(stream);
    timings_.push_back(std::move(timing));
  }
}

void Copier::collect_all() {
  for (const auto& timing : timings_) {
    timing->end.synchronize();
  }
  collect();
}

void Copier::collect() {
  std::erase_if(timings_, [](const auto& timing) {
    if (!timing->end.query()) {
      return false;
    }
    const auto seconds = timing->begin.elapsedTime(timing->end) / 1e3;
    if (timing->moved == nullptr) {
      *timing->exposed += seconds;
    } else {
      timing->moved->seconds += seconds;
      timing->moved->timed_bytes += timing->bytes;
    }
    return true;
  });
}

}  // namespace tenure::offload
