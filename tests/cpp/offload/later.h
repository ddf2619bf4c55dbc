// A fence that is ready when told, or when someone waits for it.
#pragma once

#include <tenure/core/fence.h>

#include <atomic>
#include <memory>

namespace tenure::offload::test {

class Later final : public Fence::Point {
 public:
  bool ready() const override { return *done; }
  void wait_on_host() const override { *done = true; }
  void wait_on(const c10::Stream& /*stream*/) const override {}
  std::shared_ptr<std::atomic<bool>> done = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace tenure::offload::test
