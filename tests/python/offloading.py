"""What the tests of Offload share: small jobs, their gradients and an exact view of the device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import tenure

MIB = 1 << 20

Context = AbstractContextManager[Any]


def blocks(layers: int = 3, width: int = 64, device: str = "cpu") -> nn.Sequential:
    """A stack whose every layer saves something; the same for every call."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)]
    return nn.Sequential(*parts).to(device)


def batch(rows: int = 32, width: int = 64, device: str = "cpu") -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(device)


def gradients(model: nn.Module, x: Tensor, context: Context | None = None) -> list[Tensor]:
    """Of one step, forward and backward inside the context; on the CPU."""
    model.zero_grad()
    with context or nullcontext():
        model(x).square().sum().backward()
    return grads_of(model)


def grads_of(model: nn.Module) -> list[Tensor]:
    return [p.grad.detach().cpu().clone() for p in model.parameters() if p.grad is not None]


def equal(ours: Sequence[Tensor], plain: Sequence[Tensor]) -> bool:
    """Bit by bit, and not two empty lists."""
    return len(ours) == len(plain) > 0 and all(map(torch.equal, ours, plain))


class Keep(torch.autograd.Function):
    """Passes its first tensor through and saves the others; `seen` gets what backward finds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[Tensor], *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        ctx.seen.extend(t.detach().cpu().clone() for t in saved)
        return grads[0], None, *(None for _ in saved)


def tell(fake: ModuleType) -> None:
    """Makes Offload's meter exact on the fake device, as libtenure_cuda does on CUDA."""
    library = ctypes.CDLL(str(Path(tenure.__file__).parent / "lib" / "libtenure.so"))
    listener = ctypes.cast(library.tenure_privateuse1_allocated, ctypes.c_void_p)
    fake.tell_allocations(listener.value)


def used() -> int:
    return torch.accelerator.memory_allocated("fake:0")


def peak_of(work: Callable[[], object]) -> int:
    """The most that the fake device had allocated at once meanwhile."""
    torch.accelerator.reset_peak_memory_stats("fake:0")
    work()
    return torch.accelerator.max_memory_allocated("fake:0")


def drop_graphs() -> None:
    """Has the fake device's autograd thread let go of the last backward's graph.

    It does so when it gets round to it, which is after `backward()` has returned.
    """
    torch.ones(1, device="fake", requires_grad=True).sum().backward()


def side_streams(fake: ModuleType) -> list[torch.Stream]:
    """All streams of the fake device but the default one: Offload's copy streams are among them."""
    last = fake.new_stream()
    return [
        torch.Stream(stream_id=i, device_index=0, device_type=last.device_type)
        for i in range(1, last.stream_id)
    ]
