// How a store is joined, and how tensors are put and got. Plain data.
#pragma once

#include <tenure/store/client.h>
#include <tenure/store/collectors.h>
#include <tenure/store/hello.h>
#include <tenure/store/layout.h>
#include <tenure/store/objects.h>
#include <tenure/store/server.h>

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tenure::store {

struct StoreOptions {
  std::string job;
  std::string role = "default";
  int32_t rank = 0;
  Limits limits;
  // TCP, for other hosts: "127.0.0.1:0", "0.0.0.0:0". None, or no secret: this host alone.
  std::optional<std::string> listen;
  std::string advertise;  // the address that handles carry; empty: the one listened on
  Secret secret;
  std::optional<TlsFiles> tls;  // then TCP is with TLS alone
  std::chrono::milliseconds timeout{30'000};
};

struct PutOptions {
  Collectors collectors;
  std::string call;  // the call's id; empty: none
  // Of the call, as begin_call() gave it.
  std::optional<uint32_t> attempt{};  // NOLINT(readability-redundant-member-init): may be left out
  std::string site;                   // "train.py:41"
};

enum class Access : uint8_t {
  copy_on_write,  // writes stay this process's own
  read_only       // writes raise
};

struct GetOptions {
  Rows rows;
  std::vector<at::Tensor> into;  // empty, or one for each handle
  std::optional<at::Device> device;
  Access access = Access::copy_on_write;
  bool more = false;  // the caller will fetch more of it: not the expected fetch yet
  bool keep = false;  // remember it until its scope closes
  Over over = Over::best;
  std::optional<std::chrono::milliseconds> timeout;
};

}  // namespace tenure::store
