"""What core costs, beside its floors, from one interleaved run of build/dev/bench/bench_core.

    python bench/core.py [--repetitions 9] [--min-time 0.1]

The figure is the ratio to the floor; nanoseconds belong to the machine they were measured on.
"""

from __future__ import annotations

import sys

sys.path.append(sys.path.pop(0))  # last, for inspect.py here is not Python's

import argparse
import json
import subprocess
from pathlib import Path
from typing import NamedTuple

import tables

PROGRAM = Path(__file__).parent.parent / "build/dev/bench/bench_core"


class Line(NamedTuple):
    name: str
    arm: str
    floor: str
    bar_ns: float | None = None


LINES = [
    Line("event append", "event_append", "floor_cycle_counter", 40),
    Line("event append, nobody reads", "event_append_off", "floor_cycle_counter"),
    Line(
        "lease take + release",
        "lease_take_release/threads:1",
        "floor_mutex_hash_pair/threads:1",
        150,
    ),
    Line(
        "… in the current scope",
        "lease_take_release_in_scope",
        "floor_mutex_hash_pair/threads:1",
        150,
    ),
    Line(
        "… among a million leases",
        "lease_take_release_among_a_million",
        "floor_mutex_hash_pair/threads:1",
    ),
    Line(
        "… with events recorded", "lease_take_release_recorded", "floor_mutex_hash_pair/threads:1"
    ),
    Line(
        "… 2 threads, each pair", "lease_take_release/threads:2", "floor_mutex_hash_pair/threads:2"
    ),
    Line(
        "… 4 threads, each pair", "lease_take_release/threads:4", "floor_mutex_hash_pair/threads:4"
    ),
    Line(
        "scope enter + exit", "scope_enter_exit/threads:1", "floor_mutex_hash_pair/threads:1", 300
    ),
    Line(
        "… with a counter", "scope_enter_exit_with_counter", "floor_mutex_hash_pair/threads:1", 300
    ),
    Line("snapshot of 1e6 leases", "snapshot_of_a_million", "floor_copy_of_a_million_rows", 300e6),
    Line("totals", "totals", "floor_mutex_hash_pair/threads:1"),
]
FLOORS = {
    "floor_atomic_increment/threads:1": "atomic increment",
    "floor_malloc_free/threads:1": "malloc + free, 64 B",
    "floor_mutex_hash_pair/threads:1": "mutex + hash insert, erase",
    "floor_cycle_counter": "cycle counter",
    "floor_steady_clock": "steady_clock",
    "floor_copy_of_a_million_rows": "copy of 1e6 rows of 64 B",
}
_UNITS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}


def medians(repetitions: int, min_time: float) -> dict[str, float]:
    """Median nanoseconds of real time of each arm, repetitions of all arms interleaved."""
    output = subprocess.run(
        [
            PROGRAM,
            f"--benchmark_repetitions={repetitions}",
            f"--benchmark_min_time={min_time}",
            "--benchmark_enable_random_interleaving=true",
            "--benchmark_report_aggregates_only=true",
            "--benchmark_format=json",
        ],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ).stdout
    found = {}
    for run in json.loads(output)["benchmarks"]:
        if run.get("aggregate_name") == "median":
            parts = [
                p for p in run["run_name"].split("/") if p[:10] not in {"real_time", "iterations"}
            ]
            found["/".join(parts)] = run["real_time"] * _UNITS[run["time_unit"]]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--min-time", type=float, default=0.1, help="seconds a repetition")
    options = parser.parse_args()
    if not PROGRAM.exists():
        sys.exit("bench_core is not built: install libbenchmark-dev and run make build")

    measured = medians(options.repetitions, options.min_time)
    table = tables.Table("core", ["what", "ns", "× floor", "floor", "bar (ns)", ""])
    for arm, name in FLOORS.items():
        table.add([name, f"{measured[arm]:,.1f}", "", "", "", ""], arm=arm, ns=measured[arm])
    table.rule()
    for line in LINES:
        ns, floor = measured[line.arm], measured[line.floor]
        verdict = "" if line.bar_ns is None else "holds" if ns <= line.bar_ns else "MISSED"
        bar = "" if line.bar_ns is None else f"{line.bar_ns:,.0f}"
        floor_name = FLOORS.get(line.floor, line.floor.removeprefix("floor_"))
        table.add(
            [line.name, f"{ns:,.1f}", f"{ns / floor:.2f}", floor_name, bar, verdict],
            arm=line.arm,
            ns=ns,
            ratio=ns / floor,
            bar_ns=line.bar_ns,
        )
    table.show()


if __name__ == "__main__":
    main()
