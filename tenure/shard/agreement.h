// Agreement: that all ranks are about to do the same, asked over a group of its own, so that ranks
// which do not are told of it and never mix up each other's collectives; and, when a collective has
// failed, which rank it was that did not come. One thread at a time.
#pragma once

#include <tenure/shard/order.h>

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace tenure::shard {

// Where in its work a rank is.
struct Place {
  uint64_t pass = 0;
  uint64_t position = 0;  // in the pass
  Use use;
};

class Agreement {
 public:
  using Tell = std::function<std::string(const Place&)>;  // a place in words

  // `side` has the same ranks as the group that the collectives are on, and runs on the host.
  Agreement(c10::intrusive_ptr<c10d::ProcessGroup> side, c10::intrusive_ptr<c10d::Store> store,
            std::chrono::milliseconds timeout);
  Agreement(Agreement&&) noexcept;
  Agreement& operator=(Agreement&&) noexcept;
  Agreement(const Agreement&) = delete;
  Agreement& operator=(const Agreement&) = delete;
  ~Agreement();

  uint32_t rank() const { return rank_; }

  // Waits for all ranks. `here` is the place in words. Throws CollectiveError if another rank is
  // elsewhere or does not come.
  void require(const Place& place, const std::string& here, const Tell& tell);

  // Sets each flag that another rank has set. A collective, `here` is in words where.
  void share(std::vector<uint8_t>& flags, const std::string& here);

  // A collective failed here. Where the other ranks are, as far as they say within a few seconds:
  // "rank 2 does not answer". Never throws.
  std::string others(const std::string& here) noexcept;

 private:
  std::string ask_others(const std::string& here);
  std::string key(std::string_view what, uint32_t rank) const;

  c10::intrusive_ptr<c10d::ProcessGroup> side_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::chrono::milliseconds timeout_;
  uint32_t rank_ = 0;
  uint32_t ranks_ = 1;
  uint32_t failures_ = 0;
};

}  // namespace tenure::shard
