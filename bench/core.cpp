// What core costs, beside the floors it stands on. Run by bench/core.py, which interleaves the
// repetitions and prints the ratios.
#include <tenure/core/events.h>
#include <tenure/core/hold.h>
#include <tenure/core/ledger.h>
#include <tenure/core/scope.h>
#include <tenure/core/ticks.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <benchmark/benchmark.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

namespace tenure {
namespace {

// --- floors

void floor_atomic_increment(benchmark::State& state) {
  static std::atomic<uint64_t> counter;
  for (auto _ : state) {
    counter.fetch_add(1, std::memory_order_relaxed);
  }
}
BENCHMARK(floor_atomic_increment)->ThreadRange(1, 4)->UseRealTime();

void floor_malloc_free(benchmark::State& state) {
  for (auto _ : state) {
    void* memory = std::malloc(64);
    benchmark::DoNotOptimize(memory);
    std::free(memory);
  }
}
BENCHMARK(floor_malloc_free)->ThreadRange(1, 4)->UseRealTime();

void floor_mutex_hash_pair(benchmark::State& state) {
  static std::mutex mutex;
  static std::unordered_map<uint64_t, uint64_t> map;
  const auto key = static_cast<uint64_t>(state.thread_index());
  for (auto _ : state) {
    {
      const std::lock_guard lock(mutex);
      map.emplace(key, key);
    }
    {
      const std::lock_guard lock(mutex);
      map.erase(key);
    }
  }
}
BENCHMARK(floor_mutex_hash_pair)->ThreadRange(1, 4)->UseRealTime();

void floor_cycle_counter(benchmark::State& state) {
  for (auto _ : state) {
    benchmark::DoNotOptimize(ticks());
  }
}
BENCHMARK(floor_cycle_counter)->UseRealTime();

void floor_steady_clock(benchmark::State& state) {
  for (auto _ : state) {
    benchmark::DoNotOptimize(std::chrono::steady_clock::now().time_since_epoch().count());
  }
}
BENCHMARK(floor_steady_clock)->UseRealTime();

// What a snapshot cannot do without: reading each lease's 64 bytes once.
void floor_copy_of_a_million_rows(benchmark::State& state) {
  const std::vector<Event> rows(1'000'000);
  for (auto _ : state) {
    const auto copy = rows;
    benchmark::DoNotOptimize(copy.data());
  }
}
BENCHMARK(floor_copy_of_a_million_rows)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond)
    ->Iterations(5);

// --- events

void event_append_off(benchmark::State& state) {
  for (auto _ : state) {
    append({.ticks = ticks(), .type = EventType::step});
  }
}
BENCHMARK(event_append_off)->UseRealTime();

// A reader keeps up, as in a recording: nothing may be dropped, or the cheap path is measured.
void event_append(benchmark::State& state) {
  static std::unique_ptr<EventReader> reader;
  static std::vector<Event> sink;
  constexpr size_t kBatch = 4096;
  if (state.thread_index() == 0) {
    reader = std::make_unique<EventReader>(size_t{1} << 14);
    sink.reserve(kBatch * 8);
  }
  size_t since = 0;
  for (auto _ : state) {
    append({.ticks = ticks(), .type = EventType::step});
    if (++since == kBatch) {
      state.PauseTiming();
      since = 0;
      if (state.thread_index() == 0) {
        sink.clear();
        reader->drain(sink);
      }
      state.ResumeTiming();
    }
  }
  if (state.thread_index() == 0) {
    if (state.threads() == 1 && reader->dropped() != 0) {
      state.SkipWithError("events were dropped");
    }
    reader.reset();
  }
}
BENCHMARK(event_append)->UseRealTime();

// --- leases

OwnerId an_owner() { return intern_owner(OwnerKind::activation, "bench"); }

void lease_take_release(benchmark::State& state) {
  const auto tensor = at::empty({1024});
  const auto owner = an_owner();
  for (auto _ : state) {
    const auto lease = hold(tensor, owner, ScopeId::process);
    benchmark::DoNotOptimize(&lease);
  }
}
BENCHMARK(lease_take_release)->ThreadRange(1, 16)->UseRealTime();

void lease_take_release_in_scope(benchmark::State& state) {
  const auto tensor = at::empty({1024});
  const auto owner = an_owner();
  const Scope scope("bench", OnClose::release);
  for (auto _ : state) {
    const auto lease = hold(tensor, owner);
    benchmark::DoNotOptimize(&lease);
  }
}
BENCHMARK(lease_take_release_in_scope)->UseRealTime();

void lease_take_release_among_a_million(benchmark::State& state) {
  std::vector<Lease> others;
  std::vector<at::Tensor> tensors;
  const auto owner = an_owner();
  for (int i = 0; i < 100'000; ++i) {
    tensors.push_back(at::empty({1}));
  }
  for (int i = 0; i < 1'000'000; ++i) {
    others.push_back(hold(tensors[i % tensors.size()], owner, ScopeId::process));
  }
  const auto tensor = at::empty({1024});
  for (auto _ : state) {
    const auto lease = hold(tensor, owner, ScopeId::process);
    benchmark::DoNotOptimize(&lease);
  }
}
BENCHMARK(lease_take_release_among_a_million)->UseRealTime()->Iterations(200'000);

void lease_take_release_recorded(benchmark::State& state) {
  EventReader reader(size_t{1} << 14);
  std::vector<Event> sink;
  const auto tensor = at::empty({1024});
  const auto owner = an_owner();
  size_t since = 0;
  for (auto _ : state) {
    {
      const auto lease = hold(tensor, owner, ScopeId::process);
      benchmark::DoNotOptimize(&lease);
    }
    if (++since == 4096) {
      state.PauseTiming();
      since = 0;
      sink.clear();
      reader.drain(sink);
      state.ResumeTiming();
    }
  }
}
BENCHMARK(lease_take_release_recorded)->UseRealTime();

// --- scopes

void scope_enter_exit(benchmark::State& state) {
  for (auto _ : state) {
    const Scope scope("bench");
    benchmark::DoNotOptimize(scope.id());
  }
}
BENCHMARK(scope_enter_exit)->ThreadRange(1, 4)->UseRealTime();

void scope_enter_exit_with_counter(benchmark::State& state) {
  int64_t count = 0;
  for (auto _ : state) {
    const Scope scope("bench", ++count, OnClose::release);
    benchmark::DoNotOptimize(scope.id());
  }
}
BENCHMARK(scope_enter_exit_with_counter)->UseRealTime();

// --- the ledger

void snapshot_of_a_million(benchmark::State& state) {
  std::vector<Lease> leases;
  std::vector<at::Tensor> tensors;
  leases.reserve(1'000'000);
  for (int i = 0; i < 1'000'000; ++i) {
    if (i % 4 == 0) {
      tensors.push_back(at::empty({1}));
    }
    leases.push_back(hold(tensors.back(), an_owner(), ScopeId::process));
  }
  for (auto _ : state) {
    const auto snapshot = ledger().snapshot();
    benchmark::DoNotOptimize(snapshot.bytes.data());
  }
}
BENCHMARK(snapshot_of_a_million)->UseRealTime()->Unit(benchmark::kMillisecond)->Iterations(5);

void totals(benchmark::State& state) {
  for (auto _ : state) {
    const auto now = ledger().totals();
    benchmark::DoNotOptimize(now.all.bytes);
  }
}
BENCHMARK(totals)->UseRealTime();

}  // namespace
}  // namespace tenure
