"""What the store costs beside its peers: a tensor of one process in another, arms in turn.

    python bench/store.py [--rounds 5] [--sizes 4K,1M,64M,512M] [--only get,many,fan,loop,cold,live]
                          [--arms "same host,TCP,socket,RTensor,Ray,Mooncake,torchstore"]

`same host` and `TCP` are Tenure's two wires, `socket` the same bytes through one plain blocking
socket, and the others are the packages themselves, each in an environment of its own that
`scripts/peers` makes; one that is missing is named. Every arm has processes of its own with one
thread for torch, and each consumer times itself. Figures are medians over rounds.

get    a tensor of each size in fp32 and bf16, the connection open, nothing cached
many   10,000 tensors of 4 KB in one call
fan    one producer, four consumers that hold and have read the same 256 MB: PSS of all processes,
       grown by how many copies (a memory file that nobody maps is in no one's PSS)
loop   a loop of Python in the process that serves, while another fetches 1 MB again and again:
       CPU time of an iteration beside the same loop alone, and how often its thread slept, which
       it does only to give the GIL away
cold   put of 512 MB in a process that has stored nothing that large, beside the same bytes written
       into a memory file by write() in another such process. As it comes, and after it took as
       much memory and gave it back: a virtual machine may have to get it from its host first, and
       write() then waits for that
live   1,000,000 objects of 64 bytes: what each costs beyond its bytes
"""

from __future__ import annotations

import sys

sys.path.append(sys.path.pop(0))  # last, for a file here has the name of one of Python's modules

import argparse
import signal
import statistics
from collections import defaultdict
from collections.abc import Callable

import tables
from rich.progress import Progress
from store_arms import KINDS, Arm, ArmFailed, Kind, started

PARTS = ["get", "many", "fan", "loop", "cold", "live"]
SIZES = {"4K": 4 << 10, "1M": 1 << 20, "64M": 64 << 20, "512M": 512 << 20}
LARGE = {"64M", "512M"}
FAN_BYTES, FAN_CONSUMERS = 256 << 20, 4
LOOP_SECONDS = 1.5
OURS = ["same host", "TCP"]


class Findings:
    """The figures, the bars beside them, and the arms that are missing."""

    def __init__(self, arms: list[str]) -> None:
        self.arms = arms
        self.missing: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self.table = tables.Table("store", ["what", *arms])
        self.bars = tables.Table("store-bars", ["bar", "figure", "wanted", ""])

    def row(self, what: str, cells: dict[str, str], **record: object) -> None:
        self.table.add([what, *(cells.get(arm, "") for arm in self.arms)], what=what, **record)
        if not sys.stderr.isatty():  # which shows what is under way
            told = ", ".join(f"{arm} {cell}" for arm, cell in cells.items())
            print(f"{what}: {told}", file=sys.stderr, flush=True)

    def bar(self, what: str, figure: float, shown: str, wanted: str, held: bool) -> None:
        said = "holds" if held else "MISSED"
        self.bars.add([what, shown, wanted, said], bar=what, figure=figure, holds=held)

    def show(self) -> None:
        self.table.show()
        self.bars.show()
        names = dict.fromkeys(version for version in self.versions.values() if version)
        print("measured: " + ", ".join(names))
        for name, why in self.missing.items():
            print(f"not measured: {name}: {why}")


class Rounds:
    """Arms in turn, another one first in every round; one that fails is left out from there."""

    def __init__(self, arms: list[Arm], findings: Findings, progress: Progress) -> None:
        self.arms = arms
        self._findings = findings
        self._progress = progress
        for arm in arms:
            findings.versions[arm.name] = arm.version

    def run(self, what: str, rounds: int, one: Callable[[Arm], dict[str, float]]) -> Samples:
        """One call warms up and is not counted."""
        found = Samples()
        task = self._progress.add_task(what, total=(rounds + 1) * len(self.arms))
        for number in range(rounds + 1):
            at = number % max(1, len(self.arms))
            for arm in self.arms[at:] + self.arms[:at]:
                try:
                    sample = one(arm)
                except ArmFailed as failed:
                    self._findings.missing[f"{arm.name}, {what}"] = str(failed)
                    self.arms = [other for other in self.arms if other is not arm]
                    continue
                if number:
                    found.add(arm.name, sample)
                self._progress.advance(task)
        self._progress.remove_task(task)
        return found


class Samples:
    def __init__(self) -> None:
        self.of: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, arm: str, sample: dict[str, float]) -> None:
        for figure, value in sample.items():
            self.of[arm][figure].append(value)

    def medians(self, figure: str) -> dict[str, float]:
        return {arm: statistics.median(found[figure]) for arm, found in self.of.items()}

    def ratio(self, figure: str, over: str, under: str) -> float | None:
        """Median over rounds of one arm's figure by another's in the same round."""
        pairs = zip(self.of[over][figure], self.of[under][figure], strict=False)
        found = [a / b for a, b in pairs]
        return statistics.median(found) if found else None


def milliseconds(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:.3f}" if ms < 10 else f"{ms:,.0f}"


def gigabytes(a_second: float) -> str:
    """Faster than memory is: the arm keeps the tensor that it was given."""
    return f"{a_second / 1e9:.2f}" if a_second < 50e9 else "no copy"


def fetched(count: int, nbytes: int, dtype: str) -> Callable[[Arm], dict[str, float]]:
    def one(arm: Arm) -> dict[str, float]:
        put = arm.producer.call("put", "object", count, nbytes, dtype)
        got: dict[str, float] = arm.consumer.call("get", put["token"], put["bits"])
        arm.producer.call("release", "object")
        return got | {"put": put["seconds"]}

    return one


def get(rounds: Rounds, findings: Findings, times: int, sizes: list[str]) -> None:
    for size in sizes:
        for dtype in ("fp32", "bf16"):
            what = f"get {size}B {dtype}"
            found = rounds.run(what, times, fetched(1, SIZES[size], dtype))
            medians = found.medians("seconds")
            cells = {arm: milliseconds(value) for arm, value in medians.items()}
            findings.row(f"{what}, ms", cells, seconds=found.of)
            if size == sizes[-1]:
                puts = found.medians("put")
                cells = {arm: gigabytes(SIZES[size] / value) for arm, value in puts.items()}
                findings.row(f"put {size}B {dtype}, GB/s", cells)
            judge_get(found, findings, size, what)


def judge_get(found: Samples, findings: Findings, size: str, what: str) -> None:
    here = found.of.get("same host")
    if here and size == "512M":
        took = statistics.median(here["seconds"])
        findings.bar(f"{what}, same host", took, f"{1e6 * took:.0f} µs", "≤ 100 µs", took <= 1e-4)
        pairs = zip(here["with_read"], here["warm_read"], strict=True)
        ratio = statistics.median(cold / warm for cold, warm in pairs)
        what = f"{what} + full read, same host"
        findings.bar(what, ratio, f"{ratio:.2f} × a warm read", "≤ 2.5", ratio <= 2.5)
    if size not in LARGE:
        return
    for peer, wanted in (("socket", 0.85), ("RTensor", 10.0)):
        fast = found.ratio("seconds", peer, "TCP")
        if fast is not None:
            shown = f"{fast:.2f} × as fast as {peer}"
            findings.bar(f"{what.split(' +')[0]}, TCP", fast, shown, f"≥ {wanted}", fast >= wanted)


def many(rounds: Rounds, findings: Findings, times: int, count: int) -> None:
    what = f"get {count:,} × 4KB at once"
    found = rounds.run(what, times, fetched(count, 4096, "fp32"))
    medians = found.medians("seconds")
    cells = {arm: milliseconds(value) for arm, value in medians.items()}
    findings.row(f"{what}, ms", cells, seconds=found.of)
    used = {arm: milliseconds(value) for arm, value in found.medians("cpu").items()}
    findings.row("… the consumer's CPU, ms", used)
    for arm in OURS:
        if arm in medians:
            took = medians[arm]
            findings.bar(f"{what}, {arm}", took, f"{1e3 * took:.0f} ms", "≤ 100 ms", took <= 0.1)


def fan(kinds: list[Kind], findings: Findings, progress: Progress) -> None:
    """In processes that have done nothing else."""
    found: dict[str, float] = {}
    for kind in progress.track(kinds, description="fan"):
        with started([kind], findings.missing) as arms:
            for arm in arms:
                findings.versions[arm.name] = arm.version
                try:
                    found[arm.name] = copies(arm)
                except ArmFailed as failed:
                    findings.missing[f"{arm.name}, fan"] = str(failed)
    cells = {arm: f"{value:.2f}" for arm, value in found.items()}
    findings.row(f"1 → {FAN_CONSUMERS} × {FAN_BYTES >> 20} MB, copies by PSS", cells, copies=found)
    if "same host" in found:
        what = f"{FAN_CONSUMERS} consumers of {FAN_BYTES >> 20} MB, PSS of all"
        here = found["same host"]
        findings.bar(what, here, f"{here:.2f} copies", "1 (≤ 1.1)", here <= 1.1)


def copies(arm: Arm) -> float:
    while len(arm.consumers) < FAN_CONSUMERS:
        arm.add_consumer()
    small = arm.producer.call("put", "small", 1, 4096, "fp32")["token"]
    for consumer in arm.consumers:
        consumer.call("hold", small)
        consumer.call("drop")
    before = arm.pss
    token = arm.producer.call("put", "large", 1, FAN_BYTES, "fp32")["token"]
    for consumer in arm.consumers:
        consumer.call("hold", token)
    return (arm.pss - before) / FAN_BYTES


def loop(rounds: Rounds, findings: Findings, times: int) -> None:
    def one(arm: Arm) -> dict[str, float]:
        if arm.kind.alone:
            raise ArmFailed("the process that puts is the one that gets")
        token = arm.producer.call("put", "object", 1, 1 << 20, "fp32")["token"]
        alone = arm.producer.call("loop", LOOP_SECONDS)
        arm.consumer.ask("fetch_for", token, LOOP_SECONDS + 0.2)
        served = arm.producer.call("loop", LOOP_SECONDS)
        fetches = arm.consumer.answer()
        arm.producer.call("release", "object")
        return {
            "cpu": served["cpu"] / alone["cpu"],
            "gave_way": served["gave_way"],
            "alone": alone["gave_way"],
            "fetches": fetches,
        }

    found = rounds.run("loop", times, one)
    cpu, ways, gets = (found.medians(figure) for figure in ("cpu", "gave_way", "fetches"))
    named = {arm: f"{value:.2f}" for arm, value in cpu.items()}
    findings.row("loop while serving, CPU × alone", named, samples=found.of)
    for what, counts in (("slept to give the GIL away", ways), ("1 MB fetches meanwhile", gets)):
        findings.row(f"… {what}", {arm: f"{value:.0f}" for arm, value in counts.items()})
    for arm in OURS:
        if arm in ways:
            shown = f"{ways[arm]:.0f} in {gets[arm]:.0f} fetches"
            few = ways[arm] <= 0.01 * gets[arm] + 5
            findings.bar(f"serving takes no GIL, {arm}", ways[arm], shown, "none", few)


def cold(findings: Findings, times: int, progress: Progress) -> None:
    """A new process for every put, or what was freed before would be written again."""
    nbytes = SIZES["512M"]
    kinds = [Kind("same host", "Tenure", alone=True), Kind("write()", "Write", alone=True)]
    found = {warm: Samples() for warm in (False, True)}
    for number in progress.track(range(times), description="cold put"):
        for warm, samples in found.items():
            for kind in kinds[:: -1 if number % 2 else 1]:
                with started([kind], findings.missing) as arms:
                    for arm in arms:
                        arm.producer.call("put", "small", 1, 4096, "fp32")
                        put = arm.producer.call("put", "large", 1, nbytes, "fp32", warm)
                        samples.add(arm.name, {"seconds": put["seconds"], "cpu": put["cpu"]})
    for warm, samples in found.items():
        judge_cold(samples, findings, nbytes, ", memory that was used before" if warm else "")


def judge_cold(found: Samples, findings: Findings, nbytes: int, where: str) -> None:
    fast = {arm: nbytes / took / 1e9 for arm, took in found.medians("seconds").items()}
    if (here := fast.get("same host")) is None:
        return
    what = f"cold put of 512MB{where}"
    findings.row(f"{what}, GB/s", {"same host": f"{here:.2f}"}, samples=found.of)
    findings.bar(what, here, f"{here:.2f} GB/s", "≥ 2 GB/s", here >= 2)
    if share := found.ratio("seconds", "write()", "same host"):
        findings.row("… write() alone, GB/s", {"same host": f"{fast['write()']:.2f}"})
        findings.row("… of write()'s rate", {"same host": f"{share:.2f}"})


def live(findings: Findings, count: int) -> None:
    kind = Kind("same host", "Tenure", alone=True)
    with started([kind], findings.missing) as arms:
        for arm in arms:
            found = arm.producer.call("keep_many", count, 64)
            each = found["without"]
            cells = {"same host": f"{each:.0f}"}
            findings.row(f"{count:,} live objects, bytes beyond their own", cells, **found)
            cells = {"same host": f"{found['with_handles']:.0f}"}
            findings.row("… with their handles in Python", cells)
            cells = {"same host": f"{1e6 * found['seconds']:.1f}"}
            findings.row("… put of one, µs", cells)
            shown = f"{each:.0f} B each"
            findings.bar(f"{count:,} live objects", each, shown, "≤ 300 B", each <= 300)


def measure(
    findings: Findings,
    parts: list[str],
    kinds: list[Kind],
    sizes: list[str],
    options: argparse.Namespace,
    progress: Progress,
) -> None:
    if {"get", "many", "loop"} & set(parts):
        with started(kinds, findings.missing) as arms:
            if "get" in parts:
                inorder = [size for size in SIZES if size in sizes]
                get(Rounds(arms, findings, progress), findings, options.rounds, inorder)
            if "many" in parts:
                many(Rounds(arms, findings, progress), findings, options.rounds, options.many)
            if "loop" in parts:
                loop(Rounds(arms, findings, progress), findings, options.rounds)
    if "fan" in parts:
        fan(kinds, findings, progress)
    if "cold" in parts and "same host" in findings.arms:
        cold(findings, options.rounds, progress)
    if "live" in parts and "same host" in findings.arms:
        live(findings, options.live)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [kind.name for kind in KINDS]
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--arms", default=",".join(names))
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    parser.add_argument("--many", type=int, default=10_000)
    parser.add_argument("--live", type=int, default=1_000_000)
    options = parser.parse_args()
    asked = {"sizes": options.sizes, "arms": options.arms, "only": options.only}
    known = {"sizes": list(SIZES), "arms": names, "only": PARTS}
    chosen = {name: [word.strip() for word in text.split(",")] for name, text in asked.items()}
    for name, words in chosen.items():
        if unknown := [word for word in words if word not in known[name]]:
            sys.exit(f"--{name} has no {unknown[0]}: it has {', '.join(known[name])}")

    parts, kinds = chosen["only"], [kind for kind in KINDS if kind.name in chosen["arms"]]
    findings = Findings([kind.name for kind in kinds])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with Progress(transient=True, disable=not sys.stderr.isatty()) as progress:
            measure(findings, parts, kinds, chosen["sizes"], options, progress)
    finally:  # what is there is shown, however it ends
        findings.show()


if __name__ == "__main__":
    main()
