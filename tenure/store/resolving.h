// Resolving: the addresses of a host's name, with a deadline. Threading: any thread. Torch-free.
#pragma once

#include <tenure/store/transport.h>

#include <netdb.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace tenure::store {

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;  // never null when returned
// As getaddrinfo().
using Resolver =
    std::function<int(const char* name, const char* port, const addrinfo* hints, addrinfo** found)>;

// Throws OwnerLost for a name that leads nowhere, StoreTimeout at the deadline or when nobody can
// say now.
Addresses resolve(const std::string& name, uint16_t port, Transport::Deadline deadline,
                  const Resolver& resolver = ::getaddrinfo);

}  // namespace tenure::store
