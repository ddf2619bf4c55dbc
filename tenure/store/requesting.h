// Requesting: requests that have one answer each, to one owner or to several at once. One thread.
// Torch-free.
#pragma once

#include <tenure/store/client.h>
#include <tenure/store/exchange.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace tenure::store {

class Requesting final : public Exchange {
 public:
  // Each request is answered by a message of this kind.
  Requesting(Route route, MessageKind answered_by)
      : Exchange(std::move(route)), answered_by_(answered_by) {}

  void ask(MessageKind kind, std::vector<std::byte> body) {
    requests_.emplace_back(kind, std::move(body));
  }

  [[nodiscard]] bool finished() const override { return answers_.size() == requests_.size(); }
  [[nodiscard]] const std::vector<std::vector<std::byte>>& answers() const { return answers_; }

 protected:
  void speak() override;
  std::byte* hear(const Header& header, std::span<const std::byte> body) override;

 private:
  MessageKind answered_by_;
  std::vector<std::pair<MessageKind, std::vector<std::byte>>> requests_;
  std::vector<std::vector<std::byte>> answers_;
};

// To several owners, each of which may fail.
class Requests {
 public:
  Requests(Connections& connections, Transport::Deadline deadline)
      : connections_(connections), deadline_(deadline) {}

  Requesting& add(Route route, MessageKind answered_by);
  void run();

  // Of those that were added, in their order.
  [[nodiscard]] const Requesting& at(size_t i) const { return *all_[i].requesting; }
  // Why it was not answered, if it was not.
  [[nodiscard]] const std::optional<Unreached>& unreached(size_t i) const {
    return all_[i].unreached;
  }

 private:
  struct Asked {
    std::unique_ptr<Requesting> requesting;
    std::optional<Unreached> unreached;
  };

  Connections& connections_;
  Transport::Deadline deadline_;
  std::vector<Asked> all_;
};

}  // namespace tenure::store
