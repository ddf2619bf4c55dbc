// Fetching: one owner's part of a get(): its wishes in batches, the answers straight to where they
// belong. One thread. Torch-free.
#pragma once

#include <tenure/store/client.h>
#include <tenure/store/exchange.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace tenure::store {

class Fetching final : public Exchange {
 public:
  struct Call {
    std::span<const Want> wants;
    std::span<Got> gots;
    const std::function<std::byte*(size_t want, uint64_t bytes)>& memory;
    // What a mapping's end tells; and at once, for a descriptor that could not be used.
    std::function<std::function<void(Heirs)>(const Handle&)> unmapped;
  };
  // The first want that the owner refused, and why.
  struct Refused {
    size_t want = 0;
    RefusalKind kind = RefusalKind::failed;
    std::string why;
  };

  Fetching(Route route, const Call& call) : Exchange(std::move(route)), call_(call) {}

  void add(size_t want) { to_ask_.push_back({want, call_.wants[want].copied}); }

  [[nodiscard]] bool finished() const override { return finished_; }
  [[nodiscard]] const std::vector<Refused>& refused() const { return refused_; }

 protected:
  void speak() override;
  std::byte* hear(const Header& header, std::span<const std::byte> body) override;

 private:
  struct Asked {
    size_t want = 0;
    bool copied = false;
  };

  void ask_next();
  std::byte* take_object(const Header& header, const ObjectFound& found);
  void take_mapping(const ObjectFound& found);
  void take_done();
  const Asked& answered(uint32_t wish);

  const Call& call_;
  std::deque<Asked> to_ask_;
  std::vector<Asked> batch_;  // of the fetch that is under way
  size_t next_ = 0;           // of it
  // Those of the batch whose descriptor came and was of no use: asked for again, as bytes.
  std::vector<Asked> again_;
  std::vector<Refused> refused_;
  bool finished_ = false;
};

}  // namespace tenure::store
