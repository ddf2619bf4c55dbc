// A live server against streams that a fuzzer makes up.
#include "live.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static tenure::store::fuzz::LiveServer live;
  static unsigned long inputs = 0;
  auto fault = live.fault(std::as_bytes(std::span(data, size)));
  if (fault.empty() && ++inputs % 1000 == 0) {
    fault = live.fault_of_the_rest();
  }
  if (!fault.empty()) {
    std::fprintf(stderr, "%s\n", fault.c_str());
    std::abort();
  }
  return 0;
}
