// Sockets that listen. Torch-free, and free of Asio.
#pragma once

#include <tenure/store/socket.h>

#include <cstdint>
#include <string>

namespace tenure::store {

// For this user alone. Both listen when they return, and throw InputError or tenure::Error.
Socket listen_local(const std::string& path);
// `port` is the one that the system chose, where 0 was asked for.
Socket listen_tcp(const HostPort& where, uint16_t* port);

}  // namespace tenure::store
