// Buffers: memory for tensors that are received. Each one is a new storage over memory that an
// earlier one may have had: whoever kept the earlier tensor reads an error and not the new content.
//
// Memory comes back when a storage is released or dies, on any thread; everything else is one
// thread's.
#pragma once

#include <tenure/pipeline/header.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace tenure::pipeline {

class Buffers {
 public:
  struct Pool;

  Buffers();
  ~Buffers();
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  // Undefined for a spec without a tensor. `front`: bytes that its storage has before it, a
  // multiple of any element's size; none before an empty tensor.
  at::Tensor make(const Spec& spec, c10::Device device, size_t front = 0);

  // Gives back what is free. What is in use goes by itself when it comes back, until the next make.
  void trim();

  // In use and free together, now and at most since the last trim.
  int64_t held() const;
  int64_t most_held() const;

 private:
  std::shared_ptr<Pool> pool_;  // shared with the storages that it lent memory to
};

}  // namespace tenure::pipeline
