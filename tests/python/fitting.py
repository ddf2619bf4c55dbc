"""What the tests of Fit share: a job done twice, plainly and under a tight budget."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tenure
from offloading import Context

PLENTY = "1TiB"


@dataclass
class Job:
    """A model, and the loss of its n-th step."""

    model: nn.Module
    loss: Callable[[int], Tensor]


Run = Callable[[Job, int, Context], None]


def inside(job: Job, n: int, context: Context) -> None:
    """Forward and backward inside the context."""
    with context:
        job.loss(n).backward()


def deep(layers: int = 4, width: int = 64, rows: int = 512) -> Job:
    """Blocks whose every part can be made again."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.SiLU(), nn.LayerNorm(width), nn.GELU()]
    model = nn.Sequential(*parts)
    x = torch.randn(rows, width)
    return Job(model, lambda n: model(x + n).square().mean())


def probe(job: Job, run: Run = inside) -> tenure.Frontier:
    """What budgets would cost the job. Of one step, from which its model does not recover."""
    fit = tenure.Fit(job.model, budget=PLENTY)
    run(job, 0, fit)
    job.model.zero_grad(set_to_none=True)
    with warnings.catch_warnings(), fit:  # where backward came later, it counts from here on
        warnings.simplefilter("ignore")
    frontier = fit.frontier()
    del fit
    gc.collect()
    return frontier


def budget_at(frontier: tenure.Frontier, part: float) -> int:
    """0 is the least, 1 what keeps everything; with the part that a Fit leaves free.

    What is the least depends on times: one that was found by one profile may not be by the next.
    """
    peaks = sorted(point.peak for point in frontier.points)
    peak = peaks[0] + part * (peaks[-1] - peaks[0])
    return int(peak / 0.98) + 4096


def tight(
    make: Callable[[], Job], run: Run = inside, part: float = 0.25, **options: Any
) -> tuple[Job, tenure.Fit]:
    """A job and a Fit that must drop much of what the job saves."""
    job = make()
    budget = budget_at(probe(job, run), part)
    job.model.load_state_dict(make().model.state_dict())
    gc.collect()
    return job, tenure.Fit(job.model, budget=budget, **options)


def settle(job: Job, fit: tenure.Fit, run: Run = inside) -> None:
    """Until a step follows a plan that is proven: what a proof refuses means another plan."""
    for _ in range(10):
        job.model.zero_grad(set_to_none=True)
        run(job, 0, fit)
        if fit.stats().mode == "planned":
            return
    raise AssertionError(str(fit))


def bits(tensors: Iterable[Tensor]) -> list[bytes]:
    """Outside of torch's memory, which counts."""
    return [t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in map(flat, tensors)]


def grads(model: nn.Module) -> list[bytes]:
    """Of all its parameters; at least one has a gradient."""
    out = bits(p.grad for p in model.parameters() if p.grad is not None)
    assert out
    return out


def flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)


def train(
    job: Job, steps: int, run: Run, context: Context | None = None, seen: Any = lambda: None
) -> list[list[bytes]]:
    """Of every step the gradients; then parameters, buffers and the state of the generator."""
    torch.manual_seed(1)
    out = []
    for n in range(steps):
        job.model.zero_grad(set_to_none=True)
        run(job, n, context or nullcontext())
        out.append(grads(job.model))
        with torch.no_grad():
            for p in job.model.parameters():
                if p.grad is not None:
                    p -= 0.01 * p.grad
        seen()
    out.append(bits(job.model.state_dict().values()))
    out.append(bits([torch.get_rng_state()]))
    return out


def steady(make: Callable[[], Job], steps: int, run: Run) -> list[list[bytes]]:
    """What plain steps give twice: where they differ by themselves, there is nothing to equal."""
    last = train(make(), steps, run)
    for _ in range(4):
        again = train(make(), steps, run)
        if again == last:
            return last
        last = again
    raise AssertionError("plain steps are not the same from one run to the next")


def difference(mine: list[bytes], theirs: list[bytes]) -> str:
    """Which tensors differ, and in how many bytes."""
    found = [
        f"tensor {n} in {sum(a != b for a, b in zip(one, other, strict=True))} of {len(one)} bytes"
        for n, (one, other) in enumerate(zip(mine, theirs, strict=True))
        if one != other
    ]
    return ", ".join(found)


def same_as_plain(
    make: Callable[[], Job],
    *,
    steps: int = 5,
    part: float = 0.25,
    run: Run = inside,
    **options: Any,
) -> tenure.Fit:
    """Each step's gradients are plain's, and so is all that it leaves; much was made again."""
    plain = steady(make, steps, run)
    job, fit = tight(make, run, part, **options)
    remade: list[int] = []
    ours = train(job, steps, run, fit, lambda: remade.append(fit.stats().remade_calls))
    for n, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        assert mine == theirs, f"step {n} of {steps}: {difference(mine, theirs)}"
    assert all(plain)
    assert fit.stats().dropped_bytes > 0
    assert remade[-1] > 0
    return fit
