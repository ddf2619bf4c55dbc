#include <tenure/store/connections.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>
#include <tenure/store/errors.h>
#include <tenure/store/frame.h>
#include <tenure/store/socket.h>
#include <tenure/store/waiting.h>

#include <poll.h>

#include <chrono>

namespace tenure::store {
namespace {

constexpr size_t kMostIdle = 8;  // for each owner and wire

bool is_dead(const Line& line) {
  pollfd state{line.transport->descriptor(), POLLIN | POLLRDHUP, 0};
  // Nothing may come on an idle connection: whatever did is its end.
  return ::poll(&state, 1, 0) != 0;
}

}  // namespace

std::string route_text(const Route& route) {
  const Origin& origin = *route.origin;
  if (route.wire == Wire::local) {
    return text(member_text(origin.owner), " on this host (", origin.path, ")");
  }
  return text(member_text(origin.owner), " at ", host_port_text(origin.address, origin.port));
}

std::exception_ptr named(const Route& route, const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const OwnerLost& lost) {
    return std::make_exception_ptr(OwnerLost(text(route_text(route), " is gone: ", lost.what())));
  } catch (const StoreTimeout& late) {
    return std::make_exception_ptr(StoreTimeout(
        text(route_text(route), " does not answer: ", late.what(),
             "; it is stopped or busy, it has no descriptors left, or the link to it is cut")));
  } catch (const AccessRefused& refused) {
    return std::make_exception_ptr(
        AccessRefused(text(route_text(route), " cannot be asked: ", refused.what())));
  } catch (...) {
    return std::current_exception();
  }
}

std::unique_ptr<Line> Connections::take(const Route& route, Deadline deadline) {
  for (;;) {
    std::unique_ptr<Line> line;
    {
      const std::lock_guard lock(mutex_);
      const auto idle = idle_.find({route.owner(), route.wire});
      if (idle == idle_.end() || idle->second.empty()) {
        break;
      }
      line = std::move(idle->second.back());
      idle->second.pop_back();
    }
    if (!is_dead(*line)) {
      line->was_idle = true;
      return line;
    }
  }
  return connect(route, Purpose::requests, deadline);
}

void Connections::give_back(const Route& route, std::unique_ptr<Line> line) {
  if (!line->incoming.empty()) {
    return;
  }
  const std::lock_guard lock(mutex_);
  auto& idle = idle_[{route.owner(), route.wire}];
  if (idle.size() < kMostIdle) {
    idle.push_back(std::move(line));
  }
}

bool Connections::has_idle(const Route& route) const {
  const std::lock_guard lock(mutex_);
  const auto idle = idle_.find({route.owner(), route.wire});
  return idle != idle_.end() && !idle->second.empty();
}

void Connections::forget(uint64_t owner) {
  const std::lock_guard lock(mutex_);
  idle_.erase({owner, Wire::local});
  idle_.erase({owner, Wire::tcp});
  idle_.erase({owner, Wire::tls});
}

void Connections::forget_all() {
  const std::lock_guard lock(mutex_);
  idle_.clear();
}

std::unique_ptr<Transport> Connections::reach(const Route& route, Deadline deadline) const {
  const Origin& origin = *route.origin;
  if (route.wire != Wire::local) {
    return connect_tcp(origin.address, origin.port, who_, deadline);
  }
  try {
    return connect_local(origin.path, who_, deadline);
  } catch (const OwnerLost&) {
    // Containers of one pod share all that a host is known by, and not the folder of the socket.
    if (origin.address.empty() || who_.secret.empty()) {
      throw;
    }
  }
  return connect_tcp(origin.address, origin.port, who_, deadline);
}

Member Connections::introduce(Line& line, Purpose purpose, Deadline deadline) const {
  const Introduce self{.job = who_.job, .member = self_, .purpose = purpose};
  send_all(*line.transport, frame(MessageKind::introduce, encode(self)), deadline);
  const Welcome welcome =
      decode_welcome(receive_body(*line.transport, MessageKind::welcome, deadline));
  line.lease_ms = welcome.lease_ms;
  return welcome.owner;
}

std::unique_ptr<Line> Connections::connect(const Route& route, Purpose purpose,
                                           Deadline deadline) const {
  try {
    auto line = std::make_unique<Line>();
    line->transport = reach(route, deadline);
    if (introduce(*line, purpose, deadline).incarnation != route.owner()) {
      throw OwnerLost("it was started again, and what it had went with it");
    }
    return line;
  } catch (...) {
    std::rethrow_exception(named(route, std::current_exception()));
  }
}

std::unique_ptr<Line> Connections::connect(const std::string& socket, Deadline deadline) const {
  try {
    auto line = std::make_unique<Line>();
    line->transport = connect_local(socket, who_, deadline);
    introduce(*line, Purpose::requests, deadline);
    return line;
  } catch (const OwnerLost& lost) {
    throw OwnerLost(text("the store at ", socket, " is gone: ", lost.what()));
  } catch (const StoreTimeout& late) {
    throw StoreTimeout(text("the store at ", socket, " does not answer: ", late.what()));
  } catch (const AccessRefused& refused) {
    throw AccessRefused(text("the store at ", socket, " cannot be asked: ", refused.what()));
  }
}

}  // namespace tenure::store
