"""How long it takes to find who holds what in a large process, and what tracing a storage takes.

    python bench/holders.py [--objects 1000000] [--storages 100000] [--rounds 5]

A process with a million Python objects, 1e5 storages, 1e5 live autograd nodes and 1e4 freed ones
is made, and then asked: the graph of all references, `tenure.explain` of one tensor,
`tenure.census` of all. Beside them what Python's own tool takes to walk the same objects without
seeing into autograd: one `gc.get_referrers`. Then 1e6 storages are traced, in a process of their
own, and its memory is compared with that of the same process unwatched.
"""

from __future__ import annotations

import sys

sys.path.append(sys.path.pop(0))  # last, for inspect.py beside this has the name of Python's

import argparse
import gc
import statistics
import subprocess
import time
from collections.abc import Callable

import tables
import torch

import tenure
from tenure import _C
from tenure.inspect import holders

BAR_SECONDS = 3.0
BAR_BYTES = 200
LIVE_NODES, FREED_NODES = 100_000, 10_000

TRACED = """
import os, sys, torch, tenure
def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
session = tenure.watch(quiet=True) if sys.argv[1] == "watched" else None
kept = [None] * 1_000_000
kept[0] = torch.empty(16)
before = rss()
for i in range(1, len(kept)):
    kept[i] = torch.empty(16)
print(rss() - before, flush=True)
os._exit(0)
"""


class Thing:
    """An object with a container in it, as most are."""

    def __init__(self, number: int) -> None:
        self.parts = [number]


def chains(nodes: int, leaf: torch.Tensor) -> list[torch.Tensor]:
    """Graphs of a hundred nodes each."""
    out = []
    for _ in range(nodes // 100):
        end = leaf
        for _ in range(100):
            end = end * leaf
        out.append(end)
    return out


def seconds(call: Callable[[], object], rounds: int) -> list[float]:
    out = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        out.append(time.perf_counter() - begin)
    return out


def memory_of(arm: str) -> int:
    ended = subprocess.run([sys.executable, "-c", TRACED, arm], capture_output=True, text=True)
    return int(ended.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--objects", type=int, default=1_000_000)
    parser.add_argument("--storages", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    leaf = torch.ones(8, requires_grad=True)
    kept = [torch.zeros(8) for _ in range(options.storages)]
    live, freed = chains(LIVE_NODES, leaf), chains(FREED_NODES, leaf)
    torch.stack(freed).sum().backward()
    things = []
    while len(gc.get_objects()) < options.objects:
        things.append([Thing(i) for i in range(10_000)])
    table = tables.Table("holders", ["what", "seconds", "bar", ""])

    def add(name: str, call: Callable[[], object], bar: float | None = None) -> None:
        found = seconds(call, options.rounds)
        middle = statistics.median(found)
        holds = "" if bar is None else "holds" if middle <= bar else "MISSED"
        table.add([name, f"{middle:.2f}", f"{bar or ''}", holds], arm=name, seconds=found)

    def graph() -> None:
        with _C.References(holders.own_objects()):
            pass

    add("graph", graph)
    add("graph + explain", lambda: tenure.explain(kept[5]), BAR_SECONDS)
    add("graph + census", tenure.census, BAR_SECONDS)
    add("graph + explain in autograd", lambda: tenure.explain(live[5]), BAR_SECONDS)
    add("gc.get_referrers", lambda: gc.get_referrers(kept[5]))
    table.show()

    each = (memory_of("watched") - memory_of("plain")) / 1_000_000
    memory = tables.Table("traced", ["what", "bytes a storage", "bar", ""])
    holds = "holds" if each <= BAR_BYTES else "MISSED"
    memory.add(["traced", f"{each:.0f}", f"{BAR_BYTES}", holds], bytes=each)
    memory.show()


if __name__ == "__main__":
    main()
