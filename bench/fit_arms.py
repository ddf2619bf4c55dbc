"""What bench/fit.py compares: eager, its peers, and Fit at a budget; on bench/offload.py's job."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._functorch.config
from offload_arms import FULL, MATMULS_AND_ATTENTION, Arm, Job, Trl, aten
from offload_device import GIB
from torch.utils import checkpoint as checkpoints

import tenure

ATTENTION = MATMULS_AND_ATTENTION - {aten.mm.default, aten.addmm.default, aten.bmm.default}
COMPILED = (1.0, 0.5, 0.25, 0.1)
EAGER = "eager"


@dataclass(frozen=True)
class Peer:
    """Another way to make a step fit."""

    name: str
    make: Callable[[Job], Arm]
    missing: Callable[[str], str | None] = lambda _device: None  # why it cannot run here
    # With eager alone, in a group of its own: it pins as much as a profile does, or holds what
    # another one would find in its way.
    alone: bool = False


def eager() -> Arm:
    return Arm(EAGER)


def saving(ops: set[object]) -> dict[str, object]:
    """Checkpointing that saves what these operators make."""

    def policy(_context: object, op: object, *_: object, **__: object) -> object:
        if op in ops:
            return checkpoints.CheckpointPolicy.MUST_SAVE
        return checkpoints.CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(checkpoints.create_selective_checkpoint_contexts, policy)
    return {**FULL, "context_fn": contexts}


def trl_of(folder: Path) -> Trl:
    """TRL's offloader from that folder, or from where Python finds TRL."""
    trl = Trl(folder)
    found = None if trl.file.exists() else importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        return trl
    return Trl(Path(found.origin).parents[1])


def compiled(job: Job, name: str, budget: float) -> Arm:
    """torch.compile with that part of the activations; it compiles when it runs first."""
    torch._dynamo.reset()
    # Without a GPU only to see that it works: the same partitioner, and no C++ to compile.
    backend = "inductor" if job.device == "cuda" else "aot_eager_decomp_partition"
    with torch._functorch.config.patch(activation_memory_budget=budget):
        call = torch.compile(job.model._call_impl, backend=backend)

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            job.model._compiled_call_impl = call
            try:
                yield
            finally:
                job.model._compiled_call_impl = None

    return Arm(name, context)


def peers(trl: Trl, *, compile_too: bool) -> list[Peer]:
    out = [
        Peer("checkpointing", lambda _: Arm("checkpointing", checkpoint=FULL)),
        Peer(
            "selective: matmuls, attention",
            lambda _: Arm("selective", checkpoint=saving(MATMULS_AND_ATTENTION)),
        ),
        Peer("selective: attention", lambda _: Arm("selective", checkpoint=saving(ATTENTION))),
        Peer(
            "checkpointing+TRL",
            lambda job: trl.arm(job, "checkpointing+TRL", FULL),
            trl.missing,
        ),
        Peer("TRL", lambda job: trl.arm(job, "TRL"), trl.missing, alone=True),
    ]
    if compile_too:
        for part in COMPILED:
            name = f"compile, budget {part}"
            make = functools.partial(compiled, name=name, budget=part)
            out.append(Peer(name, make, alone=True))
    return out


def gib(count: float) -> str:
    """Small ones too: those of a tiny model."""
    return f"{count / GIB:.2f} GiB" if count >= GIB / 8 else f"{count / 2**20:.2f} MiB"


def fitted(job: Job, budget: int) -> Arm:
    fit = tenure.Fit(job.model, budget=budget)
    return Arm(f"fit {gib(budget)}", lambda: fit, offload=fit, budget=budget)
