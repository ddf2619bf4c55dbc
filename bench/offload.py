"""Activations on the host: ours beside its peers, all arms interleaved in one process.

    python bench/offload.py [--tokens 8192,32768] [--arms none,ours,ours@0.6] [--rounds 10]
                            [--seconds 5] [--peers build/gpu-deps/peers] [--smoke]

The job is forward and backward of a Hugging Face Llama (16 layers, width 2048, inner 8192, 8
key-value heads, bf16, SDPA, batch 1) without its head. Each round runs every arm once, in turn; an
arm that has had --seconds of timed steps and 3 of them sits out the rest. Figures are medians, the
peak is the highest. A step is timed from a device at rest to a device at rest, its halves by events
on the stream that computes. Then each arm runs once more, untimed, with a stop after forward, for
the bytes that are left on the device and those that the profiler saw copied. Where the host cannot
hold the pinned memory of all arms at once (--host) they are measured in groups, `none` in each.

T*/T is the time that compute and the copy engine make possible to the time it took, where
T* = max(T_f, A/B) + max(T_b, A/B) with T_f and T_b of `none` in the same group, B of copies of
1 GiB in the same run, and A what `none` holds after forward and save_on_cpu does not; for a budget
A is what `none`'s peak exceeds it by.

--smoke, and any machine without a GPU, runs a tiny model on the CPU to see that all of it works;
its figures mean nothing.
"""

from __future__ import annotations

import sys

sys.path.append(sys.path.pop(0))  # last, for inspect.py here is not Python's

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tables
import torch
import transformers
from offload_arms import TINY, Arm, Job, Shape, Trl, Way, ours, ways
from offload_bars import Bar, Found, Run, bars
from offload_device import GIB, Cpu, Device, Gpu
from offload_rounds import FAILURES, first_line, measured, reference_of, say
from torch.nn.attention import SDPBackend, sdpa_kernel

import tenure

COLUMNS = ["arm", "ms", "T_f", "T_b", "peak", "after", "out", "back", "pinned", "exposed", "T*/T"]


def gradients(job: Job, arm: Arm, steps: int) -> list[torch.Tensor]:
    """Of the last of some steps, for by then ours has a plan; on the host, to leave the device."""
    for _ in range(steps):
        job.clear()
        with job.checkpointing(arm.checkpoint), arm.context():
            job.loss().backward()
    found = [
        parameter.grad.cpu() for parameter in job.model.parameters() if parameter.grad is not None
    ]
    job.clear()
    return found


def compared(job: Job, plain: list[torch.Tensor], make: Callable[[], Arm]) -> tuple[str, bool]:
    try:
        arm = make()
        found = gradients(job, arm, 4)
    except FAILURES as error:
        return f"failed ({first_line(error)})", False
    same = sum(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    return f"{arm.name} {same} of {len(plain)}", same == len(plain)


def gradients_equal(device: Device, job: Job, tokens: int) -> bool:
    """Ours bit for bit against none, and none against itself: attention is deterministic here."""
    job.resize(tokens)
    with sdpa_kernel(SDPBackend.MATH):
        peak = reference_of(device, job).peak
        plain = gradients(job, Arm("none"), 1)
        makes: list[Callable[[], Arm]] = [lambda: Arm("none")]
        if hasattr(tenure, "Offload"):
            makes += [
                lambda: ours(job, "ours"),
                lambda: ours(job, "ours@0.8", int(0.8 * peak)),
                lambda: ours(job, "ours+checkpointing"),
            ]
        found = [compared(job, plain, make) for make in makes]
    device.release()
    told = ", ".join(text for text, _ in found)
    say(f"gradients equal to none's at T {tokens}, math attention: {told}")
    return all(equal for _, equal in found)


def gib(count: float | None) -> str:
    return "" if count is None else f"{count / GIB:.2f}"


def row(run: Run, found: Found) -> list[str]:
    if not found.steps:
        return [found.name, "failed", *[""] * 9]
    exposed, efficiency = run.exposed(found), run.efficiency(found)
    return [
        found.name,
        f"{1e3 * found.seconds:.1f}",
        f"{1e3 * found.median('forward'):.1f}",
        f"{1e3 * found.median('backward'):.1f}",
        gib(found.peak),
        gib(found.after),
        gib(found.out),
        gib(found.back),
        gib(found.pinned),
        "" if exposed is None else f"{1e3 * exposed:.1f}",
        "" if efficiency is None else f"{efficiency:.3f}",
    ]


def claims(said: dict[str, Any]) -> str:
    """What ours counted itself in the last timed step."""
    return (
        f"saved {gib(said['saved_bytes'])}, kept {gib(said['kept_bytes'])}, "
        f"out {gib(said['moved_out_bytes'])}, back {gib(said['moved_in_bytes'])} GiB, "
        f"exposed {1e3 * said['exposed_seconds']:.1f} ms, "
        f"{said['out_bandwidth'] / 1e9:.1f} GB/s out, {said['in_bandwidth'] / 1e9:.1f} back"
    )


def show(run: Run, name: str, versions: dict[str, str]) -> None:
    table = tables.Table(name, COLUMNS)
    for found in run.founds:
        table.add(
            row(run, found),
            **asdict(found),
            seconds=found.seconds if found.steps else None,
            peak=found.peak if found.steps else None,
            exposed=run.exposed(found),
            efficiency=run.efficiency(found),
            tokens=run.tokens,
            reference=asdict(run.reference),
            bandwidth=run.bandwidth,
            versions=versions,
        )
    out, back = run.bandwidth
    reference = run.reference
    print(
        f"\nT {run.tokens}, milliseconds and GiB. Copies: {out / 1e9:.1f} GB/s out, "
        f"{back / 1e9:.1f} back. None holds {gib(reference.rest)} at rest, {gib(reference.after)} "
        f"after forward, {gib(reference.peak)} at most; A = {gib(run.movable())}."
    )
    table.show()
    for found in run.founds:
        if found.said:
            print(f"{found.name} says: {claims(found.said)}")
        if found.held > 16 << 20:
            print(f"{found.name} leaves {gib(found.held)} GiB on the device between steps")


def judge(run: Run, name: str) -> None:
    found: list[Bar] = list(bars(run))
    if not found:
        return
    table = tables.Table(f"{name}-bars", ["bar", "measured", "limit", ""])
    for bar in found:
        table.add(bar.texts(), **asdict(bar), holds=bar.holds, tokens=run.tokens)
    table.show()
    print(f"{sum(bar.holds for bar in found)} of {len(found)} bars hold\n", flush=True)


def choose(names: str, trl: Trl, device: Device) -> list[Way]:
    """The arms to run; says why one that was not asked for by name is left out."""
    known = {way.name: way for way in ways(trl)}
    asked = names.split(",") if names else []
    unknown = set(asked) - set(known)
    if unknown:
        sys.exit(f"no such arm: {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = []
    for name, way in known.items():
        if asked and name not in {*asked, "none"}:
            continue
        reason = way.missing(device.name)
        if reason is not None:
            say(f"{name}{' nevertheless' if name in asked else ' left out'}: {reason}")
        if reason is None or name in asked:
            chosen.append(way)
    return chosen


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="", help="lengths of the sequence, with commas between")
    parser.add_argument("--arms", default="", help="some of them only, with commas between")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm", type=int, default=3, help="rounds that are not counted")
    parser.add_argument("--seconds", type=float, default=5, help="of timed steps of an arm")
    parser.add_argument("--host", type=float, default=96, help="GiB of the host to pin at once")
    parser.add_argument("--peers", type=Path, help="folder with the unpacked wheel of TRL")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    smoke = options.smoke or not torch.cuda.is_available()
    device: Device = Cpu() if smoke else Gpu()
    folder = options.peers or Path(os.environ.get("TENURE_PEERS", "build/gpu-deps/peers"))
    trl = Trl(folder)
    lengths = [int(x) for x in (options.tokens or ("64" if smoke else "8192,32768")).split(",")]
    if smoke:
        say("no GPU is used: a tiny model on the CPU, whose figures mean nothing")
        options.rounds, options.seconds = min(options.rounds, 2), min(options.seconds, 2)
    chosen = choose(options.arms, trl, device)
    versions = {"transformers": transformers.__version__, "trl": trl.version}
    say(", ".join(f"{name} {version}" for name, version in versions.items()))
    job = Job(TINY if smoke else Shape(), device.name)
    device.release()

    equal = gradients_equal(device, job, 32 if smoke else 1024)
    failed = []
    for tokens in lengths:
        try:
            run = measured(device, job, tokens, chosen, options)
        except FAILURES as error:  # of arm none, which all others are measured by
            say(f"T {tokens} cannot be measured: {first_line(error)}")
            continue
        name = "offload-smoke" if smoke else f"offload-{tokens}"
        show(run, name, versions)
        if smoke:
            say(f"{len(list(bars(run)))} bars would be judged on a GPU")
        else:
            judge(run, name)
        failed += [f"{found.name} failed" for found in run.founds if found.error is not None]
        failed += [f"{found.name} moved nothing" for found in run.founds if found.out == 0]
    say("done")
    if not equal:
        sys.exit("gradients differ")
    if smoke and failed:
        sys.exit(", ".join(failed))


if __name__ == "__main__":
    main()
