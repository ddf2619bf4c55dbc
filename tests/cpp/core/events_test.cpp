#include <tenure/core/events.h>

#include <tenure/core/clock.h>
#include <tenure/core/error.h>
#include <tenure/core/hold.h>
#include <tenure/core/release.h>
#include <tenure/core/scope.h>
#include <tenure/core/storage_ref.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <vector>

namespace tenure {
namespace {

OwnerId owner() { return intern_owner(OwnerKind::activation, "events"); }
at::Tensor tensor_of(int64_t bytes) { return at::empty({bytes}, at::kByte); }

std::vector<Event> drained(EventReader& reader) {
  std::vector<Event> events;
  reader.drain(events);
  return events;
}

std::vector<EventType> types(const std::vector<Event>& events) {
  std::vector<EventType> out;
  std::ranges::transform(events, std::back_inserter(out), &Event::type);
  return out;
}

TEST(Events, NothingIsRecordedWithoutAReader) {
  EXPECT_FALSE(events_on());
  hold(tensor_of(8), owner()).release();
  EventReader reader;
  EXPECT_TRUE(events_on());
  EXPECT_TRUE(drained(reader).empty());
}

TEST(Events, TellALeasesLife) {
  EventReader reader;
  const Scope scope("events");
  auto lease = hold(tensor_of(100), owner());
  lease.transfer(ScopeId::process);
  lease.release();
  const auto events = drained(reader);
  ASSERT_EQ(types(events), (std::vector{EventType::scope_opened, EventType::lease_taken,
                                        EventType::lease_moved, EventType::lease_released}));
  for (const auto& event : std::span(events).subspan(1)) {
    EXPECT_EQ(event.bytes, 100);
    EXPECT_EQ(event.owner, static_cast<uint32_t>(owner()));
    EXPECT_EQ(event.storage, events[1].storage);
    EXPECT_EQ(event.device, device_tag(c10::kCPU));
    EXPECT_EQ(event.thread, static_cast<uint32_t>(gettid()));
  }
  EXPECT_NE(events[1].storage, 0);
  EXPECT_EQ(events[1].scope, static_cast<uint64_t>(scope.id()));
  EXPECT_EQ(events[2].scope, 0);
  EXPECT_TRUE(std::ranges::is_sorted(events, {}, &Event::ticks));
}

// A reader that adds up what it sees must come to what the ledger holds.
TEST(Events, TellWhatAClosingScopeDidToItsLeases) {
  EventReader reader;
  Lease released;
  Lease moved;
  {
    Scope scope("events", OnClose::release);
    released = hold(tensor_of(100), owner());
    scope.close();
  }
  {
    Scope scope("events", OnClose::report);
    moved = hold(tensor_of(100), owner());
    scope.close();
  }
  std::vector<Event> leases;
  for (const auto& event : drained(reader)) {
    if (event.storage != 0) {
      leases.push_back(event);
    }
  }
  ASSERT_EQ(types(leases), (std::vector{EventType::lease_taken, EventType::lease_released,
                                        EventType::lease_taken, EventType::lease_moved}));
  EXPECT_EQ(leases[1].storage, leases[0].storage);
  EXPECT_EQ(leases[3].storage, leases[2].storage);
  EXPECT_EQ(leases[3].scope, 0);
}

TEST(Events, TellScopesAndSteps) {
  EventReader reader;
  {
    Scope scope("step", 41);
    scope.close();
  }
  {
    Scope scope("step", 42);  // announced twice, so that the clock follows it for certain
    scope.close();
  }
  const auto events = drained(reader);
  ASSERT_GE(events.size(), 5);
  EXPECT_EQ(events[0].type, EventType::scope_opened);
  EXPECT_EQ(name_of(NameId{events[0].name}), "step");
  EXPECT_EQ(events[0].value, 41);
  EXPECT_EQ(events.back().type, EventType::step);
  EXPECT_EQ(events.back().value, 42);
}

TEST(Events, TellReleasesOfStorages) {
  EventReader reader;
  const auto x = tensor_of(100);
  release_storage(x, {.name = "test", .site = ""});
  refill_storage(x);
  const auto events = drained(reader);
  ASSERT_EQ(types(events), (std::vector{EventType::storage_released, EventType::storage_refilled}));
  EXPECT_EQ(events[0].bytes, 100);
  EXPECT_EQ(events[1].bytes, 100);
}

TEST(Events, AFullRingDropsTheNewestAndCountsThem) {
  EventReader reader(8);
  for (uint64_t i = 0; i < 20; ++i) {
    append({.type = EventType::step, .value = i});
  }
  const auto events = drained(reader);
  ASSERT_EQ(events.size(), 8);
  EXPECT_EQ(events.front().value, 0);
  EXPECT_EQ(events.back().value, 7);
  EXPECT_EQ(reader.dropped(), 12);
  append({.type = EventType::step, .value = 99});
  EXPECT_EQ(drained(reader).front().value, 99) << "draining made room";
}

TEST(Events, CapacityIsRoundedUp) {
  EventReader reader(5);
  for (int i = 0; i < 20; ++i) {
    append({.type = EventType::step});
  }
  EXPECT_EQ(drained(reader).size(), 8);
}

TEST(Events, AThreadThatEndedIsStillHeard) {
  EventReader reader(4);
  std::thread([] {
    for (int i = 0; i < 6; ++i) {
      append({.type = EventType::step});
    }
  }).join();
  EXPECT_EQ(drained(reader).size(), 4);
  EXPECT_EQ(drained(reader).size(), 0);
  EXPECT_EQ(reader.dropped(), 2) << "what an ended thread lost stays counted";
}

TEST(Events, ASecondReaderIsRefused) {
  EventReader reader;
  EXPECT_THROW(EventReader(), Error);
  append({.type = EventType::step});
  EXPECT_EQ(drained(reader).size(), 1);
}

TEST(Events, ANewReaderStartsAnew) {
  {
    EventReader reader(1);
    append({.type = EventType::step});
    append({.type = EventType::step});
    EXPECT_EQ(reader.dropped(), 1);
  }
  EventReader reader;
  EXPECT_EQ(reader.dropped(), 0);
  append({.type = EventType::step, .value = 7});
  const auto events = drained(reader);
  ASSERT_EQ(events.size(), 1);
  EXPECT_EQ(events[0].value, 7);
}

TEST(Events, AForkedChildRecordsNothingAndMayHaveAReaderOfItsOwn) {
  EventReader reader;
  append({.type = EventType::step, .value = 1});
  const auto child = fork();
  if (child == 0) {
    alarm(20);
    bool right = !events_on();
    append({.type = EventType::step, .value = 2});
    {
      EventReader own;
      append({.type = EventType::step, .value = 3});
      const auto events = drained(own);
      right = right && events.size() == 1 && events[0].value == 3;
    }
    _exit(right ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  const auto events = drained(reader);
  ASSERT_EQ(events.size(), 1);
  EXPECT_EQ(events[0].value, 1);
}

// Leases end while a thread's own objects are destroyed, when its ring may be gone.
TEST(Events, MayComeFromAThreadThatIsEnding) {
  EventReader reader;
  std::thread([] {
    thread_local Lease lease;
    lease = hold(tensor_of(8), owner());
  }).join();
  const auto events = drained(reader);
  ASSERT_GE(events.size(), 1);
  EXPECT_EQ(events[0].type, EventType::lease_taken);
}

}  // namespace
}  // namespace tenure
