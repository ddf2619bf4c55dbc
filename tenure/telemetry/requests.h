// Requests: what threads of C++ ask a thread of Python's to do. Those that ask never take the GIL,
// and wait no longer than they want to. Any thread may call any method; one calls next().
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>

namespace tenure::telemetry {

struct Request {
  uint64_t number = 0;
  int signal = 0;    // that waits for this; 0: none
  std::string text;  // what another rank or a person has asked for; empty with a signal
};

class Requests {
 public:
  // Throws Error if no more files can be opened.
  Requests();
  ~Requests();
  Requests(const Requests&) = delete;
  Requests& operator=(const Requests&) = delete;

  // Its number. After close() nobody takes it.
  uint64_t post(int signal, std::string text);
  // Waits for one. Closed: nullopt.
  std::optional<Request> next();
  // They are done in order.
  void done(uint64_t number);
  // Whether it was done within that time, or before close().
  bool wait(uint64_t number, std::chrono::milliseconds limit);
  void close();

 private:
  // next() sleeps in a read of it, and not on the condition: a look at who refers to whom counts
  // threads that wait for files among those that rest.
  int count_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Request> waiting_;
  uint64_t posted_ = 0;
  uint64_t done_ = 0;
  bool closed_ = false;
};

}  // namespace tenure::telemetry
