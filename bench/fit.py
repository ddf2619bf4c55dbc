"""Fit beside the other ways to make a step fit, all arms interleaved in one process.

    python bench/fit.py [--tokens 8192,32768] [--peers build/gpu-deps/peers] [--rounds 5]
                        [--arms "checkpointing;TRL"] [--compile] [--tiny] [--cost] [--equal]

The job is that of bench/offload.py: forward and backward of a Hugging Face Llama (16 layers, width
2048, inner 8192, 8 key-value heads, bf16, SDPA, batch 1) without its head. Three steps of each peer
show its lowest peak, and a Fit gets that as its budget; further Fits have the budgets of the bars,
and one has a budget that nothing exceeds, which shows what watching costs. Each Fit is run until it
follows its plan and two steps more. Then every arm runs once a round, in turn, from a device at
rest to a device at rest; times are medians, ratios medians of ratios within a round, a peak is the
highest of all steps, for a Fit of all after those that profile and prove. Last a step with a stop
after forward shows what is left on the device.

A Fit keeps the host memory that its plan needs, at most what forward saves: where the host has no
room for another one the arms are measured in groups, eager in each. TRL's offloading, which pins
all of it, and each torch.compile (--compile, minutes) have groups of their own.

Budgets that are at most --merge apart share a Fit, at the lower one. A budget that cannot be met is
said so, and a Fit at the least stands in for it, whose peak does not hold then.

--cost: what Fit adds to an operator on the CPU. --equal: gradients against eager's. Either runs
alone. --tiny, and any machine without a GPU, runs a tiny model on the CPU to see that all of it
works; its figures mean nothing, and peers' peaks are made up.
"""

from __future__ import annotations

import sys

sys.path.append(sys.path.pop(0))  # last, for inspect.py here is not Python's

import argparse
import os
import warnings
from dataclasses import asdict
from pathlib import Path

import fit_cost
import fit_equal
import tables
import torch
import transformers
from fit_arms import Peer, gib, peers, trl_of
from fit_rounds import SLOWER, Found, Run, bars, beside, measured
from offload_arms import TINY, Job, Shape, Trl
from offload_bars import Bar
from offload_device import Cpu, Device, Gpu
from offload_rounds import FAILURES, first_line, say


def row(run: Run, found: Found) -> list[str]:
    if not found.rounds:
        return [found.name, "failed", *[""] * 6]
    ratio = run.to_eager(found)
    return [
        found.name + (f" (asked {gib(found.asked)})" if found.asked else ""),
        f"{1e3 * found.seconds:.1f}",
        "" if ratio is None else f"{ratio:.3f}",
        f"{1e3 * found.median('forward'):.1f}",
        f"{1e3 * found.median('backward'):.1f}",
        gib(found.peak),
        "" if found.after is None else gib(found.after),
        "" if found.budget is None else f"{found.within} of {len(found.peaks)}",
    ]


def record(found: Found) -> dict[str, object]:
    out = asdict(found)
    out["rounds"] = [asdict(step) for step in found.rounds.values()]
    return out


def show(run: Run, name: str, versions: dict[str, str]) -> None:
    columns = ["arm", "ms", "× eager", "T_f", "T_b", "peak", "after", "peak ≤ budget"]
    table = tables.Table(name, columns)
    for found in sorted(run.founds, key=lambda each: (each.group, each.budget is not None)):
        timed = bool(found.rounds)
        table.add(
            row(run, found),
            **record(found),
            seconds=found.seconds if timed else None,
            peak=found.peak if timed else None,
            to_eager=run.to_eager(found),
            tokens=run.tokens,
            versions=versions,
        )
    print(f"\nT {run.tokens}", flush=True)
    table.show()
    for found in run.founds:
        if found.error:
            print(f"{found.name}: {found.error}")
        if found.said:
            print(
                f"{found.name} dropped {gib(found.said['dropped_bytes'])}, made again "
                f"{gib(found.said['remade_bytes'])} in {found.said['remade_calls']} calls, moved "
                f"{gib(found.said['moved_out_bytes'])}, kept {gib(found.said['kept_bytes'])}; "
                f"promised {gib(found.said['promised'])}, the device waited "
                f"{1e3 * found.said['exposed_seconds']:.1f} ms for copies"
            )


def show_beside(run: Run, name: str) -> None:
    columns = ["peer", "ms", "peak", "ours", "ms", "peak", "ours / peer", ""]
    table = tables.Table(f"{name}-beside", columns)
    pairs = list(beside(run))
    for pair in pairs:
        verdict = "holds" if pair.holds else "MISSED"
        table.add(
            [
                pair.peer.name,
                f"{1e3 * pair.peer.seconds:.1f}",
                gib(pair.peer.peak),
                pair.ours.name,
                f"{1e3 * pair.ours.seconds:.1f}",
                gib(pair.ours.peak),
                f"{pair.ratio:.3f}",
                verdict,
            ],
            peer=pair.peer.name,
            ours=pair.ours.name,
            ratio=pair.ratio,
            peer_peak=pair.peer.peak,
            our_peak=pair.ours.peak,
            holds=pair.holds,
            tokens=run.tokens,
        )
    table.show()
    print(
        f"{sum(pair.holds for pair in pairs)} of {len(pairs)} hold: no slower than "
        f"{SLOWER} × the peer at no more memory\n",
        flush=True,
    )


def judge(run: Run, name: str) -> None:
    found: list[Bar] = list(bars(run))
    table = tables.Table(f"{name}-bars", ["bar", "measured", "limit", ""])
    for bar in found:
        table.add(bar.texts(), **asdict(bar), holds=bar.holds, tokens=run.tokens)
    table.show()
    print(f"{sum(bar.holds for bar in found)} of {len(found)} bars hold\n", flush=True)


def choose(names: str, trl: Trl, device: Device, *, compile_too: bool) -> list[Peer]:
    """The peers to run; says why one is left out."""
    known = {peer.name: peer for peer in peers(trl, compile_too=compile_too)}
    asked = names.split(";") if names else list(known)
    unknown = set(asked) - set(known)
    if unknown:
        sys.exit(f"no such arm: {'; '.join(unknown)}; there are {'; '.join(known)}")
    chosen = []
    for name in asked:
        reason = known[name].missing(device.name)
        if reason is None:
            chosen.append(known[name])
        else:
            say(f"{name} left out: {reason}")
    return chosen


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="", help="lengths of the sequence, with commas between")
    parser.add_argument("--arms", default="", help="some peers only, with semicolons between")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--merge", type=float, default=0.02, help="budgets so near share a Fit")
    parser.add_argument("--peers", type=Path, help="folder with the unpacked wheel of TRL")
    parser.add_argument("--compile", action="store_true", help="torch.compile's budgets too")
    parser.add_argument("--cost", action="store_true", help="an operator's cost, on the CPU")
    parser.add_argument("--equal", action="store_true", help="gradients against eager's")
    parser.add_argument("--told", action="store_true", help="print what each Fit says of its plan")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    warnings.filterwarnings("ignore", "`gradient_checkpointing", FutureWarning)
    if options.cost:
        fit_cost.show(10 if options.tiny else fit_cost.ROUNDS)
        if not options.equal:
            return
    tiny = options.tiny or not torch.cuda.is_available()
    device: Device = Cpu() if tiny else Gpu()
    if tiny:
        say("no GPU is used: a tiny model on the CPU, whose figures mean nothing")
        torch.set_num_threads(1)
    job = Job(TINY if tiny else Shape(), device.name)
    device.release()
    base = "fit-tiny" if tiny else "fit"
    if options.equal:
        tokens = int(options.tokens or (48 if tiny else 2048))
        if not fit_equal.show(device, job, tokens, base):
            sys.exit("gradients differ")
        return
    trl = trl_of(options.peers or Path(os.environ.get("TENURE_PEERS", "build/gpu-deps/peers")))
    versions = {"transformers": transformers.__version__, "trl": trl.version}
    say(", ".join(f"{name} {version}" for name, version in versions.items()))
    chosen = choose(options.arms, trl, device, compile_too=options.compile)
    failed = []
    for tokens in [int(x) for x in (options.tokens or ("64" if tiny else "8192,32768")).split(",")]:
        try:
            run = measured(device, job, tokens, chosen, options.rounds, options.merge)
        except FAILURES as error:  # of eager, which all others are measured by
            say(f"T {tokens} cannot be measured: {first_line(error)}")
            failed.append(f"T {tokens}")
            continue
        name = base if tiny else f"{base}-{tokens}"
        show(run, name, versions)
        show_beside(run, name)
        judge(run, name)
        if options.told:
            print("\n\n".join(found.told for found in run.founds if found.told))
        failed += [
            f"{each.name} failed: {each.error}"
            for each in run.founds
            if each.error and not each.error.startswith("BudgetError")
        ]
    say("done")
    if tiny and failed:
        sys.exit(", ".join(failed))


if __name__ == "__main__":
    main()
