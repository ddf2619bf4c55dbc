// A live server that a fuzzer talks to. An input is an opening (one byte) and what is said after
// it; whatever that is, the connection ends when it is said, nothing of it stays, and a member is
// served as before. Torch-free.
//
// The opening: how far a stranger comes in by the rules, and how it goes on.
//   1, 2   0 nothing was said yet, 1 hello and proof, 2 introduced for requests, 3 for notices
//   4      over TCP, otherwise the Unix socket
//   8      it goes without hearing the answers
//   16     it speaks seven bytes at a time
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace tenure::store::fuzz {

class LiveServer {
 public:
  LiveServer();
  LiveServer(const LiveServer&) = delete;
  LiveServer& operator=(const LiveServer&) = delete;
  LiveServer(LiveServer&&) = delete;
  LiveServer& operator=(LiveServer&&) = delete;
  ~LiveServer();

  // Answers what is wrong, or nothing.
  std::string fault(std::span<const std::byte> input);
  // Whether a member is served, and no descriptor stayed.
  std::string fault_of_the_rest();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tenure::store::fuzz
