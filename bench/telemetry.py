"""What a monitor costs: the training thread, the step, the wire, and many ranks.

    python bench/telemetry.py [--ranks 2] [--steps 100] [--rounds 7] [--many 128] [--device cpu]

thread    `monitor.step()` on the training thread, at an interval's end and between two, beside what
          it replaces: `torch.cuda.memory_stats()` where there is a GPU, `tenure.sample()` else; and
          while sinks write each interval on threads of the same interpreter.
step      a step of 100 ms with a monitor at every=10 and without any, in turn in the same
          processes, ranks on Gloo with one thread each: the median over rounds of the ratio. Bar:
          1.005. With sinks, too: JSON lines, TensorBoard and Prometheus.
wire      16,384 ranks x 64 stages, simulated: bytes of one reduction beside an all-gather of the
          same rows, the time of both between real ranks that have the rows of all, and the time to
          pack, to merge, to read and to show: as scalars, as a picture of ranks, in `tenure top`.
many      real ranks with the reduction in levels, nodes of 8: time until all are connected, sockets
          of a rank, an interval; beside one Gloo group of all.
"""

from __future__ import annotations

import sys

sys.path.append(sys.path.pop(0))  # last, for a file here has the name of one of Python's modules

import argparse
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import tables
import torch
from rich.console import Console
from torch import distributed as dist
from torch import multiprocessing
from torch.distributed import distributed_c10d as c10d

import tenure
from tenure import _C
from tenure.telemetry import sinks
from tenure.telemetry.figures import Figure, Figures
from tenure.telemetry.keys import KEYS
from tenure.telemetry.sinks.heat_map import drawn
from tenure.telemetry.sinks.naming import plain
from tenure.telemetry.standing import Standing
from tenure.telemetry.top import frame

BAR_THREAD_US, BAR_STEP = 50.0, 1.005
SIMULATED_RANKS, SIMULATED_STAGES = 16_384, 64


def in_ranks(fn: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """What rank 0 returns."""
    with tempfile.TemporaryDirectory() as folder:
        # Forked, for 128 processes that import torch would take minutes of two cores.
        multiprocessing.start_processes(
            _rank, (fn, ranks, folder, args), nprocs=ranks, start_method="fork"
        )
        return torch.load(Path(folder) / "result", weights_only=False)


def _rank(rank: int, fn: Callable[..., Any], ranks: int, folder: str, args: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = (
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    )
    port = Path(folder) / "port"
    if store is not None:
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
    while not port.exists():
        time.sleep(0.01)
    store = store or dist.TCPStore("127.0.0.1", int(port.read_text()), wait_for_workers=False)
    # One group a process: the job's own full mesh of many ranks is not what is measured.
    backend = "gloo" if ranks <= 16 else "fake"
    if backend == "fake":
        from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers it
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=300)
    )
    result = fn(rank, ranks, store, *args)
    if rank == 0:
        torch.save(result, Path(folder) / "result")
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < ranks:
        time.sleep(0.01)
    os._exit(0)


# --- thread ---------------------------------------------------------------------------------


def median_us(fn: Callable[[], object], times: int = 2000) -> float:
    took = []
    for _ in range(times):
        begin = time.perf_counter_ns()
        fn()
        took.append(time.perf_counter_ns() - begin)
    return statistics.median(took) / 1000


def thread(table: tables.Table, device: str) -> None:
    if device != "cpu":
        torch.ones(1, device=device)
    with tempfile.TemporaryDirectory() as folder:
        between = tenure.Monitor(sinks=[], every=1 << 30, folder=folder)
        table.add(
            ["step(), between intervals", f"{median_us(between.step):.1f} µs", "", ""],
            part="thread",
        )
        between.close()
        monitor = tenure.Monitor(sinks=[], every=1, folder=folder)

        def paced() -> None:
            monitor.step()

        took = []
        for _ in range(1000):
            begin = time.perf_counter_ns()
            paced()
            took.append((time.perf_counter_ns() - begin) / 1000)
            time.sleep(0.001)  # the monitor's thread has its turn, as in a loop that trains
        at_end = statistics.median(took)
        monitor.close()
        table.add(
            ["step(), an interval's end", f"{at_end:.1f} µs", f"bar {BAR_THREAD_US:.0f} µs", ""],
            part="thread",
            microseconds=at_end,
            bar=BAR_THREAD_US,
        )
        beside_sinks(table, folder)
    table.add(["tenure.sample()", f"{median_us(tenure.sample):.1f} µs", "", ""], part="thread")
    if device != "cpu":
        stats = median_us(torch.cuda.memory_stats)
        table.add(
            ["torch.cuda.memory_stats()", f"{stats:.1f} µs", f"{at_end / stats:.2f} x", ""],
            part="thread",
            microseconds=stats,
        )


def sinks_in(folder: str) -> list[Any]:
    """Those that a rank that writes has, as far as their clients are installed."""
    made: list[Any] = [sinks.JsonLines(f"{folder}/memory.jsonl")]
    for sink, options in ((sinks.TensorBoard, {"folder": folder}), (sinks.Prometheus, {"port": 0})):
        with suppress(tenure.InputError):
            made.append(sink(**options))
    return made


def beside_sinks(table: tables.Table, folder: str) -> None:
    made = sinks_in(folder)
    without_end, without_between = at_a_pace([], folder)
    at_end, between = at_a_pace(made, folder)
    table.add(
        [
            f"step(), an interval's end, {len(made)} sinks",
            f"{at_end:.1f} µs",
            f"{at_end / without_end:.2f} x without, at the same pace",
            f"between: {between:.1f} µs, {between / without_between:.2f} x",
        ],
        part="thread",
        microseconds=at_end,
        ratio=at_end / without_end,
    )


def at_a_pace(made: list[Any], folder: str) -> tuple[float, float]:
    """Medians at an interval's end and between, in a loop of quick steps that leaves cores idle."""
    monitor = tenure.Monitor(sinks=made, every=10, folder=folder)
    took = []
    for _ in range(1000):
        begin = time.perf_counter_ns()
        monitor.step()
        took.append((time.perf_counter_ns() - begin) / 1000)
        time.sleep(0.005)
    monitor.close()
    between = [one for number, one in enumerate(took) if number % 10 != 9]
    return statistics.median(took[9::10]), statistics.median(between)


# --- step -----------------------------------------------------------------------------------


def busy(seconds: float) -> Callable[[], None]:
    """Work of about so long, the same every time."""
    a = torch.randn(256, 256)

    def work(times: int) -> None:
        for _ in range(times):
            torch.mm(a, a)

    work(200)  # the first ones take longer
    begin = time.perf_counter()
    work(1000)
    each = (time.perf_counter() - begin) / 1000
    return lambda: work(max(int(seconds / each), 1))


def steps(rank: int, _ranks: int, _store: Any, count: int, rounds: int) -> Any:
    work = busy(0.1)
    gradient = torch.ones(4096)
    folder = tempfile.mkdtemp()
    without: list[float] = []
    ours: list[float] = []
    with_sinks: list[float] = []
    for number in range(rounds):
        arms = [("plain", without), ("ours", ours), ("sinks", with_sinks)]
        for arm, times in arms if number % 2 else reversed(arms):
            made = sinks_in(folder) if arm == "sinks" and rank == 0 else []
            monitor = (
                tenure.Monitor(sinks=made, every=10, folder=folder) if arm != "plain" else None
            )
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(count):
                work()
                dist.all_reduce(gradient)
                if monitor is not None:
                    monitor.step()
            times.append((time.perf_counter() - begin) / count)
            if monitor is not None:
                monitor.close()
    return without, ours, with_sinks


def step(table: tables.Table, ranks: int, count: int, rounds: int) -> None:
    without, *watched = in_ranks(steps, ranks, count, rounds)
    for times, which in zip(watched, ("", ", sinks"), strict=True):
        ratio = statistics.median(b / a for a, b in zip(without, times, strict=True))
        table.add(
            [
                f"a step, {ranks} ranks, every=10{which}",
                f"{1000 * statistics.median(times):.2f} ms",
                f"{ratio:.4f} x plain",
                f"bar {BAR_STEP}",
            ],
            part="step",
            ratio=ratio,
            bar=BAR_STEP,
        )


# --- wire -----------------------------------------------------------------------------------


def collectives(_rank: int, ranks: int, _store: Any, keys: int, words: int) -> Any:
    """Seconds of a reduction, and of an all-gather of all simulated ranks' rows between these."""
    mine = torch.ones(words, dtype=torch.int64)
    rows = torch.ones(SIMULATED_RANKS // ranks * keys, dtype=torch.int64)
    all_rows = [torch.empty_like(rows) for _ in range(ranks)]
    reducing, gathering = [], []
    for _ in range(20):
        for collective, times in (
            (lambda: dist.all_reduce(mine, dist.ReduceOp.MAX), reducing),
            (lambda: dist.all_gather(all_rows, rows), gathering),
        ):
            dist.barrier()
            begin = time.perf_counter()
            collective()
            times.append(time.perf_counter() - begin)
    return statistics.median(reducing), statistics.median(gathering)


def shown(slots: list[dict[str, tuple[int, int]]], row: dict[str, int]) -> dict[str, float]:
    """Seconds to show an interval of all simulated ranks, by how."""
    world, *stages = ({name: Figure(*found) for name, found in slot.items()} for slot in slots)
    interval = Figures(
        step=1,
        time=0,
        rank=0,
        ranks=SIMULATED_RANKS,
        keys=tuple(KEYS.values()),
        world=world,
        stages=dict(enumerate(stages)),
        peak_rank=0,
        peak_row=row,
        rows=dict.fromkeys(range(SIMULATED_RANKS), row),
    )
    ranks = [
        Standing(n, SIMULATED_RANKS, 0, 1, "", "", "running", "", 1, 1, 1, n, 1, 1, 1, 500)
        for n in range(SIMULATED_RANKS)
    ]
    console = Console(file=io.StringIO(), width=120)
    ways: dict[str, Callable[[], object]] = {
        "scalars": lambda: plain(interval),
        "picture": lambda: drawn(interval),
        "top": lambda: console.print(frame(ranks, "memory", 40, 120)),
    }
    return {name: median_us(way, 5) / 1e6 for name, way in ways.items()}


def wire(table: tables.Table, ranks: int) -> None:
    figures = {name: 1 << 30 for name, *_ in _C.telemetry_keys()}
    begin = time.perf_counter()
    packed = [
        _C.telemetry_words(figures, rank, rank % SIMULATED_STAGES, SIMULATED_STAGES)
        for rank in range(64)
    ]
    pack = (time.perf_counter() - begin) / len(packed)
    tensors = [torch.tensor(words) for words in packed]
    merged = tensors[0].clone()
    begin = time.perf_counter()
    for other in tensors:
        torch.maximum(merged, other, out=merged)
    merge = (time.perf_counter() - begin) / len(tensors)
    words = merged.tolist()
    begin = time.perf_counter()
    slots = _C.telemetry_slots(words)
    read = time.perf_counter() - begin
    reducing, gathering = in_ranks(collectives, ranks, len(figures), len(words))
    seconds = shown(slots, figures)
    reduced = 8 * len(words)
    gathered = 8 * len(figures) * SIMULATED_RANKS
    table.add(
        [
            f"wire, {SIMULATED_RANKS:,} ranks x {SIMULATED_STAGES} stages x {len(figures)} keys",
            f"{reduced:,} B a rank",
            f"{reduced / gathered:.4f} x an all-gather",
            f"pack {pack * 1e6:.0f} µs, merge {merge * 1e6:.0f} µs, read {read * 1e6:.0f} µs",
        ],
        part="wire",
        reduced=reduced,
        gathered=gathered,
        pack=pack,
        merge=merge,
        read=read,
    )
    table.add(
        [
            f"the same between {ranks} ranks",
            f"{reducing * 1e3:.2f} ms",
            f"{reducing / gathering:.4f} x an all-gather",
            ", ".join(f"{name} {each * 1e3:.0f} ms" for name, each in seconds.items()),
        ],
        part="wire time",
        reducing=reducing,
        gathering=gathering,
        **seconds,
    )


# --- many -----------------------------------------------------------------------------------


def sockets() -> int:
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            count += str(link.readlink()).startswith("socket:")
        except OSError:
            continue
    return count


def of_a_leader(rank: int, store: Any, opened: int) -> int:
    """Sockets of rank 8, the first of its node: rank 0 has those of the store's clients, too."""
    store.set(f"sockets/{rank}", str(opened))
    return int(store.get("sockets/8"))


def connect(rank: int, ranks: int, store: Any, levels: bool) -> Any:
    before = sockets()
    store.add("ready", 1)
    while store.add("ready", 0) < ranks:
        time.sleep(0.05)
    begin = time.perf_counter()
    if levels:
        monitor = tenure.Monitor(
            sinks=[],
            every=1,
            folder=tempfile.gettempdir(),
            flight_recorder=False,
            timeout=240,
            _node=str(rank // 8),
        )
        took, opened = time.perf_counter() - begin, sockets() - before
        begin = time.perf_counter()
        for _ in range(5):
            monitor.step()
        monitor.close(60)
        return took, of_a_leader(rank, store, opened), (time.perf_counter() - begin) / 5
    group = c10d.ProcessGroupGloo(
        c10d.PrefixStore("flat", store), rank, ranks, timedelta(seconds=240)
    )
    took, opened = time.perf_counter() - begin, sockets() - before
    words = torch.zeros(len(_C.telemetry_words({}, 0, 0, 1)), dtype=torch.int64)
    options = c10d.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    begin = time.perf_counter()
    for _ in range(5):
        group.allreduce([words], options).wait()
    return took, of_a_leader(rank, store, opened), (time.perf_counter() - begin) / 5


def many(table: tables.Table, ranks: int) -> None:
    for levels, name in ((True, "in levels, nodes of 8"), (False, "one Gloo group")):
        took, opened, interval = in_ranks(connect, ranks, levels)
        table.add(
            [
                f"{ranks} ranks {name}",
                f"{took:.1f} s to connect",
                f"{opened} sockets of rank 8",
                f"{interval * 1000:.1f} ms an interval",
            ],
            part="many",
            levels=levels,
            seconds=took,
            sockets=opened,
            interval=interval,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--many", type=int, default=128, help="ranks; 9 at least")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="thread,step,wire,many")
    asked = parser.parse_args()
    parts = asked.only.split(",")
    if asked.many < 9:  # a second node
        parser.error(f"--many {asked.many}: at least 9; leave the part out with --only")
    table = tables.Table("telemetry", ["what", "figure", "beside", ""])
    if "thread" in parts:
        thread(table, asked.device)
    if "step" in parts:
        step(table, asked.ranks, asked.steps, asked.rounds)
    if "wire" in parts:
        wire(table, asked.ranks)
    if "many" in parts:
        many(table, asked.many)
    table.show()


if __name__ == "__main__":
    main()
