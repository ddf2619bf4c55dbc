#include "fixture.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <set>
#include <string>
#include <thread>

namespace fake_accelerator {
namespace {

class Streams : public Fixture {
 protected:
  // Queues an item that appends its name to the log when the device reaches it.
  void put(c10::Stream stream, char name) {
    enqueue(stream, [this, name] { log += name; });
  }

  c10::Event record(c10::Stream stream) {
    c10::Event event(kDeviceType);
    event.record(stream);
    return event;
  }

  c10::Stream a = new_stream();
  c10::Stream b = new_stream();
  std::string log;
};

TEST_F(Streams, RunAtOnceUnlessHeld) {
  put(a, '1');
  EXPECT_EQ(log, "1");
  hold(a);
  put(a, '2');
  put(b, '3');
  EXPECT_EQ(log, "13");
  EXPECT_EQ(pending(a), 1);
  EXPECT_FALSE(a.query());
  release(a);
  EXPECT_EQ(log, "132");
  EXPECT_TRUE(a.query());
}

TEST_F(Streams, AdvanceByItems) {
  hold(a);
  for (const char name : {'1', '2', '3'}) {
    put(a, name);
  }
  EXPECT_EQ(advance(a, 2), 2);
  EXPECT_EQ(log, "12");
  EXPECT_EQ(advance(a, 5), 1);
  EXPECT_TRUE(held(a));
}

TEST_F(Streams, EventsBecomeReadyInTheOrderTheTestChooses) {
  hold(a);
  hold(b);
  const auto first = record(a);
  const auto second = record(b);
  EXPECT_FALSE(first.query());
  release(b);
  EXPECT_TRUE(second.query());
  EXPECT_FALSE(first.query());
  release(a);
  EXPECT_TRUE(first.query());
}

TEST_F(Streams, EventIsReadyWhenReachedAndNotBefore) {
  hold(a);
  put(a, '1');
  const auto event = record(a);
  EXPECT_EQ(advance(a), 1);
  EXPECT_FALSE(event.query());
  EXPECT_EQ(advance(a), 1);
  EXPECT_TRUE(event.query());
}

TEST_F(Streams, WaitStopsAStreamThatIsNotHeld) {
  hold(a);
  put(a, '1');
  const auto event = record(a);
  event.block(b);
  put(b, '2');
  EXPECT_EQ(log, "");
  EXPECT_EQ(advance(b), 0) << "advance must not jump a wait";
  release(a);
  EXPECT_EQ(log, "12");
}

TEST_F(Streams, WaiterKeepsTheVersionItWaitedFor) {
  hold(a);
  auto event = record(a);
  event.block(b);
  put(b, '1');
  event.record(a);
  EXPECT_EQ(advance(a), 1);
  EXPECT_EQ(log, "1");
  EXPECT_FALSE(event.query()) << "an event answers for its last record";
}

TEST_F(Streams, WaitOutlivesItsEvent) {
  hold(a);
  put(a, '1');
  record(a).block(b);
  put(b, '2');
  release(a);
  EXPECT_EQ(log, "12");
}

TEST_F(Streams, HostWaitForcesWhatTheEventNeedsAndNoMore) {
  hold(a);
  hold(b);
  put(a, '1');
  const auto on_a = record(a);
  put(a, '2');
  on_a.block(b);
  put(b, '3');
  const auto on_b = record(b);
  put(b, '4');
  on_b.synchronize();
  EXPECT_EQ(log, "13");
  EXPECT_EQ(pending(a), 1);
  EXPECT_EQ(pending(b), 1);
  EXPECT_EQ(waits().host, 1);
  EXPECT_EQ(waits().forced, 5) << "'1', its record, the wait, '3', its record";
}

TEST_F(Streams, QueryForcesNothing) {
  hold(a);
  const auto event = record(a);
  EXPECT_FALSE(event.query());
  EXPECT_FALSE(a.query());
  EXPECT_EQ(waits().host, 0);
  EXPECT_EQ(waits().forced, 0);
}

TEST_F(Streams, SynchronizeDeviceLeavesTheOtherDeviceAlone) {
  const auto other = new_stream(1);
  for (const auto stream : {a, b, other}) {
    hold(stream);
  }
  put(a, '1');
  put(b, '2');
  put(other, '3');
  at::accelerator::synchronizeDevice(0);
  EXPECT_EQ(log, "12");
  at::accelerator::synchronizeDevice(1);
  EXPECT_EQ(log, "123");
}

TEST_F(Streams, ElapsedTimeIsBetweenReachingTheEvents) {
  c10::Event start(kDeviceType, c10::EventFlag::BACKEND_DEFAULT);
  c10::Event stop(kDeviceType, c10::EventFlag::BACKEND_DEFAULT);
  start.record(a);
  stop.record(a);
  EXPECT_GE(start.elapsedTime(stop), 0);
  EXPECT_LE(stop.elapsedTime(start), 0);
}

TEST_F(Streams, CurrentStreamAndDeviceBelongToTheThread) {
  const c10::StreamGuard guard(a);
  at::accelerator::setDeviceIndex(1);
  EXPECT_EQ(at::accelerator::getCurrentStream(0), a);
  std::thread([&] {
    EXPECT_EQ(at::accelerator::getDeviceIndex(), 0);
    EXPECT_NE(at::accelerator::getCurrentStream(0), a);
  }).join();
  at::accelerator::setDeviceIndex(0);
}

TEST_F(Streams, PoolWrapsAroundAsOnCuda) {
  const c10::impl::VirtualGuardImpl guard(kDeviceType);
  std::set<c10::StreamId> ids;
  for (int i = 0; i < 40; ++i) {
    ids.insert(guard.getStreamFromGlobalPool(c10::Device(kDeviceType, 0)).id());
  }
  EXPECT_EQ(ids.size(), 32);
}

TEST_F(Streams, UnknownStreamsAndDevicesAreRefused) {
  const c10::Stream none(c10::Stream::UNSAFE, c10::Device(kDeviceType, 0), 1'000'000);
  EXPECT_THROW(hold(none), c10::Error);
  EXPECT_THROW(new_stream(2), c10::Error);
  EXPECT_THROW(hold(c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kCPU, 0))), c10::Error);
}

// --- shuffle ---------------------------------------------------------------------------------

class Shuffle : public Streams {
 protected:
  // a: 1 2 3 then an event; b: x, waits for it, y z. Legal: 1 2 3 in order, x before y, 3 before y.
  std::string one_run(uint64_t seed) {
    log.clear();
    shuffle(seed);
    put(a, '1');
    put(b, 'x');
    put(a, '2');
    put(a, '3');
    record(a).block(b);
    put(b, 'y');
    put(b, 'z');
    run_in_order();
    return log;
  }
};

TEST_F(Shuffle, OrdersVaryButStayLegal) {
  std::set<std::string> seen;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const auto order = one_run(seed);
    ASSERT_EQ(order.size(), 6) << order;
    const auto at = [&](char name) { return order.find(name); };
    EXPECT_TRUE(at('1') < at('2') && at('2') < at('3')) << order;
    EXPECT_TRUE(at('x') < at('y') && at('y') < at('z') && at('3') < at('y')) << order;
    seen.insert(order);
  }
  EXPECT_EQ(seen.size(), 4) << "x may come anywhere among 1 2 3";
}

TEST_F(Shuffle, SameSeedSameOrder) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    EXPECT_EQ(one_run(seed), one_run(seed));
  }
}

TEST_F(Shuffle, PollingEnds) {
  shuffle(7);
  hold(b);
  put(b, '2');
  for (int i = 0; i < 100; ++i) {
    put(a, '1');
  }
  const auto event = record(a);
  while (!event.query()) {
  }
  EXPECT_EQ(log, std::string(100, '1')) << "and a held stream stays where it is";
}

}  // namespace
}  // namespace fake_accelerator
