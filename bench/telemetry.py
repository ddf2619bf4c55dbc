"""What a monitor costs: the training thread, the step, the wire, and many ranks.

    python bench/telemetry.py [--ranks 2] [--steps 20] [--rounds 40] [--many 128] [--device cpu]
    python bench/telemetry.py --only step,thread --arms plain,ours --rounds 70    # the bars of cost

thread    `monitor.step()` on the training thread, at an interval's end and between two, beside what
          it replaces: `torch.cuda.memory_stats()` where there is a GPU, `tenure.sample()` else; and
          while sinks write each interval on threads of the same interpreter.
step      a step of 100 ms with a monitor at every=10, without any, and with one that has sinks
          (JSON lines; TensorBoard and Prometheus where they are installed), in the same processes,
          ranks on Gloo with one thread each. A round has a short block of each, in random order;
          told is the median over rounds of the ratio in a round, with the range in which it lies in
          95 of 100 draws of as many rounds. Three witnesses, from the noisiest to the least noisy:
          the clock; CPU time of the process; and what is added, the CPU time in `monitor.step()`
          and of the threads that a monitor has, as if the training thread waited for all of it.
          Each of the rank where it is highest. The first that is not too noisy to tell decides.
          Bar: 1.005.
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
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import tables
import torch
from ranges import Range, against, verdict
from torch import distributed as dist
from torch import multiprocessing
from torch.distributed import distributed_c10d as c10d

import tenure
from tenure import _C
from tenure.telemetry import sinks
from tenure.telemetry.figures import Figure, Figures, Key
from tenure.telemetry.keys import KEYS
from tenure.telemetry.sinks.heat_map import drawn
from tenure.telemetry.sinks.naming import plain
from tenure.telemetry.standing import Standing

BAR_THREAD_US, BAR_STEP = 50.0, 1.005
SIMULATED_RANKS, SIMULATED_STAGES, SIMULATED_KEYS = 16_384, 64, 64


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


WARM = 10  # steps of an arm that are not counted: an interval, and what a monitor does once


@dataclass
class Block:
    """What a step of one arm took in one round, in seconds."""

    wall: float
    process: float  # CPU time, all threads
    thread: float  # CPU time of the thread that trains
    added: float  # CPU time in `monitor.step()` and of the threads that came with the monitor


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


def cpu_of_threads() -> dict[int, float]:
    """Seconds of CPU time that each thread of this process has had."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def block(
    work: Callable[[], None], gradient: torch.Tensor, monitor: tenure.Monitor | None, count: int
) -> tuple[float, float, float, float]:
    """Seconds by the clock, of CPU time, of this thread and in `monitor.step()`."""
    in_monitor = 0
    dist.barrier()
    wall, process, thread = time.perf_counter(), time.process_time(), time.thread_time()
    for _ in range(count):
        work()
        dist.all_reduce(gradient)
        if monitor is not None:
            begin = time.thread_time_ns()
            monitor.step()
            in_monitor += time.thread_time_ns() - begin
    return (
        time.perf_counter() - wall,
        time.process_time() - process,
        time.thread_time() - thread,
        in_monitor / 1e9,
    )


def steps(rank: int, ranks: int, _store: Any, names: list[str], count: int, rounds: int) -> Any:
    """Of each rank, the blocks of each arm."""
    work = busy(0.1)
    gradient = torch.ones(4096)
    order = random.Random(0)  # the same on all ranks
    blocks: dict[str, list[Block]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for arm in order.sample(names, len(names)):
                before = cpu_of_threads()
                made = sinks_in(folder) if arm == "sinks" and rank == 0 else []
                monitor = (
                    tenure.Monitor(sinks=made, every=10, folder=folder) if arm != "plain" else None
                )
                block(work, gradient, monitor, WARM)
                begin = cpu_of_threads()
                wall, process, thread, added = block(work, gradient, monitor, count)
                if monitor is not None:
                    end = cpu_of_threads()
                    new = begin.keys() & end.keys() - before.keys()
                    added += sum(end[one] - begin[one] for one in new)
                    monitor.close()
                took = (wall, process, thread, added)
                blocks[arm].append(Block(*(one / count for one in took)))
    of_all: list[Any] = [None] * ranks
    dist.all_gather_object(of_all, blocks)
    return of_all


def step(table: tables.Table, ranks: int, names: list[str], count: int, rounds: int) -> None:
    of_all = in_ranks(steps, ranks, names, count, rounds)
    for arm in names[1:]:
        witnesses = {
            "the clock": most(of_all, lambda arms, arm=arm: paired(arms, arm, "wall")),
            "CPU time": most(of_all, lambda arms, arm=arm: paired(arms, arm, "process")),
            "what is added": most(of_all, lambda arms, arm=arm: with_added(arms, arm)),
        }
        training = most(of_all, lambda arms, arm=arm: paired(arms, arm, "thread"))
        wall = statistics.median(one.wall for one in of_all[0][arm])
        added = max(statistics.median(one.added for one in arms[arm]) for arms in of_all)
        name = f"a step, {ranks} ranks, every=10{', sinks' if arm == 'sinks' else ''}"
        table.add(
            [
                name,
                f"{1000 * wall:.2f} ms",
                f"{witnesses['the clock'].text()} x plain",
                f"bar {BAR_STEP}: {verdict(BAR_STEP, witnesses)}",
            ],
            part="step",
            arm=arm,
            bar=BAR_STEP,
            verdict=verdict(BAR_STEP, witnesses),
            rounds=rounds,
            witnesses={name: asdict(found) for name, found in witnesses.items()},
            blocks=[[asdict(one) for one in arms[arm]] for arms in of_all],
        )
        for what, found in (
            ("CPU time of the process", witnesses["CPU time"]),
            ("CPU time of the training thread", training),
            (f"what is added, {1e6 * added:.0f} µs a step", witnesses["what is added"]),
        ):
            said = against(BAR_STEP, found)
            table.add([f"  {what}", "", f"{found.text()} x plain", said], part="step", arm=arm)


def most(of_all: list[Any], figures: Callable[[Any], list[float]]) -> Range:
    """Of the rank whose median is highest."""
    return max((Range.of(figures(arms)) for arms in of_all), key=lambda found: found.middle)


def paired(arms: dict[str, list[Block]], arm: str, what: str) -> list[float]:
    """Round by round, an arm's time to that of plain."""
    pairs = zip(arms[arm], arms["plain"], strict=True)
    return [getattr(mine, what) / getattr(plain, what) for mine, plain in pairs]


def with_added(arms: dict[str, list[Block]], arm: str) -> list[float]:
    """The same if all that a monitor does were done while the training thread waits for it."""
    pairs = zip(arms[arm], arms["plain"], strict=True)
    return [1 + mine.added / plain.wall for mine, plain in pairs]


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


def simulated_keys() -> tuple[Key, ...]:
    """Those that there are, and as many of them again as are missing."""
    more = (replace(key, name=f"{key.name}_2") for key in KEYS.values())
    return (*KEYS.values(), *more)[:SIMULATED_KEYS]


def shown(slots: list[dict[str, tuple[int, int]]], row: dict[str, int]) -> dict[str, float]:
    """Seconds to show an interval of all simulated ranks, by how."""
    world, *stages = ({name: Figure(*found) for name, found in slot.items()} for slot in slots)
    interval = Figures(
        step=1,
        time=0,
        rank=0,
        ranks=SIMULATED_RANKS,
        keys=simulated_keys(),
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
    ways: dict[str, Callable[[], object]] = {
        "scalars": lambda: plain(interval),
        "picture": lambda: drawn(interval),
    }
    with suppress(ImportError):
        from rich.console import Console

        from tenure.telemetry.top import frame

        console = Console(file=io.StringIO(), width=120)
        ways["top"] = lambda: console.print(frame(ranks, "memory", 40, 120))
    return {name: median_us(way, 5) / 1e6 for name, way in ways.items()}


def wire(table: tables.Table, ranks: int) -> None:
    figures = dict.fromkeys(KEYS, 1 << 30)
    begin = time.perf_counter()
    packed = [
        _C.telemetry_words(figures, rank, rank % SIMULATED_STAGES, SIMULATED_STAGES, SIMULATED_KEYS)
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
    slots = _C.telemetry_slots(words, SIMULATED_KEYS)
    read = time.perf_counter() - begin
    reducing, gathering = in_ranks(collectives, ranks, SIMULATED_KEYS, len(words))
    seconds = shown(slots, {key.name: 1 << 30 for key in simulated_keys()})
    reduced = 8 * len(words)
    gathered = 8 * SIMULATED_KEYS * SIMULATED_RANKS
    table.add(
        [
            f"wire, {SIMULATED_RANKS:,} ranks x {SIMULATED_STAGES} stages x {SIMULATED_KEYS} keys",
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
    parser.add_argument("--steps", type=int, default=20, help="of an arm in a round, counted")
    parser.add_argument("--rounds", type=int, default=40, help="of 3 s an arm")
    parser.add_argument("--arms", default="plain,ours,sinks", help="plain and some of the others")
    parser.add_argument("--many", type=int, default=128, help="ranks; 9 at least")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="thread,step,wire,many")
    asked = parser.parse_args()
    parts = asked.only.split(",")
    arms = asked.arms.split(",")
    if arms[:1] != ["plain"] or not {*arms} <= {"plain", "ours", "sinks"}:
        parser.error(f"--arms {asked.arms}: plain first, then ours, sinks or both")
    if asked.many < 9:  # a second node
        parser.error(f"--many {asked.many}: at least 9; leave the part out with --only")
    table = tables.Table("telemetry", ["what", "figure", "beside", ""])
    if "thread" in parts:
        thread(table, asked.device)
    if "step" in parts:
        step(table, asked.ranks, arms, asked.steps, asked.rounds)
    if "wire" in parts:
        wire(table, asked.ranks)
    if "many" in parts:
        many(table, asked.many)
    table.show()


if __name__ == "__main__":
    main()
