"""Whether Fit's gradients are those of eager: bench/fit.py --equal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import tables
import torch
from fit_arms import EAGER, eager, fitted, gib
from offload_arms import Arm, Job
from offload_device import Device
from offload_rounds import FAILURES, first_line, say
from torch.nn.attention import SDPBackend, sdpa_kernel

AGAIN = 3  # times eager against itself
STEPS = 5  # the profile, the proof, and some that are like all others
PARTS = (0.7, 0.35, 0.05)  # of the way from the least to all
# Math is deterministic; flash, which torch takes for bf16 on a GPU, is not in its backward.
CHOICES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "math": lambda: sdpa_kernel(SDPBackend.MATH),
    "torch's choice": contextlib.nullcontext,
}
MARGIN = 1.03  # by which a budget is above the peak that it is for


@dataclass(frozen=True)
class Compared:
    name: str
    same: int
    gradients: int
    deviation: float
    dropped: int = 0
    moved: int = 0
    error: str | None = None


def gradients(job: Job, arm: Arm, steps: int = 1) -> list[torch.Tensor]:
    """Of the last of some steps, on the host."""
    for _ in range(steps):
        job.clear()
        with job.checkpointing(arm.checkpoint), arm.context():
            job.loss().backward()
    found = [each.grad.cpu() for each in job.model.parameters() if each.grad is not None]
    job.clear()
    return found


def compared(name: str, found: list[torch.Tensor], plain: list[torch.Tensor], arm: Arm) -> Compared:
    same = sum(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    most = max(
        ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30)).item()
        for a, b in zip(found, plain, strict=True)
    )
    stats = None if arm.offload is None else arm.offload.stats()
    return Compared(
        name,
        same,
        len(plain),
        most,
        stats.dropped_bytes if stats else 0,
        stats.moved_out_bytes if stats else 0,
    )


def budgets(job: Job) -> list[int]:
    """Between the least and all, by what one profiled step says."""
    fit = fitted(job, 1 << 50).offload
    assert fit is not None
    with fit:
        job.loss().backward()
    job.clear()
    peaks = [point.peak for point in fit.frontier(32).points]  # type: ignore[union-attr]
    low, high = min(peaks), max(peaks)
    return [int(MARGIN * (low + part * (high - low))) for part in PARTS]


def arms(
    job: Job, attention: Callable[[], contextlib.AbstractContextManager[None]]
) -> list[Compared]:
    with attention():
        plain = gradients(job, eager())
        again = [
            compared(f"{EAGER}, again", gradients(job, eager()), plain, eager())
            for _ in range(AGAIN)
        ]
        out = [max(again, key=lambda each: each.deviation)]
        for budget in budgets(job):
            arm = fitted(job, budget)
            try:
                out.append(compared(arm.name, gradients(job, arm, STEPS), plain, arm))
            except FAILURES as error:
                out.append(Compared(arm.name, 0, len(plain), 0, error=first_line(error)))
                say(f"{arm.name} failed: {first_line(error)}")
    return out


def show(device: Device, job: Job, tokens: int, name: str) -> bool:
    """Whether all are equal under a deterministic attention, and as near as eager's own else."""
    job.resize(tokens)
    table = tables.Table(
        f"{name}-equal",
        ["attention", "against eager", "bit-equal", "deviation", "dropped", "moved"],
    )
    right = True
    for attention, context in CHOICES.items():
        found = arms(job, context)
        spread = found[0].deviation
        for each in found:
            equal = each.same == each.gradients
            right &= each.error is None and (equal or each.deviation <= 2 * spread)
            table.add(
                [
                    attention,
                    each.name,
                    "failed" if each.error else f"{each.same} of {each.gradients}",
                    f"{each.deviation:.2e}",
                    gib(each.dropped),
                    gib(each.moved),
                ],
                **vars(each),
                attention=attention,
                tokens=tokens,
            )
        device.release()
    table.show()
    print(
        "deviation: the largest difference to that gradient's largest element; eager again: the "
        f"most of {AGAIN} runs. {'All hold' if right else 'MISSED'}\n",
        flush=True,
    )
    return right
