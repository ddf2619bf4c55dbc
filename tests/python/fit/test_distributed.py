"""Under DDP, FSDP2 and tenure.shard: gradients as without Fit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenure
from fitting import PLENTY, bits, budget_at, deep
from offloading import Context, batch
from ranks import run_ranks


def whole(grad: Tensor) -> Tensor:
    out: Tensor = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return out


def steps_of(model: nn.Module, x: Tensor, context: Context, steps: int = 7) -> list[list[bytes]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    out = []
    for _ in range(steps):
        optimizer.zero_grad()
        with context:
            model(x).square().sum().backward()
        out.append(bits(whole(p.grad) for p in model.parameters() if p.grad is not None))
        optimizer.step()
    return out


def compared(make: Callable[[], nn.Module], rank: int) -> dict[str, Any]:
    x = batch(512) + rank
    plain = steps_of(make(), x, torch.enable_grad())
    probe_model = make()
    probe = tenure.Fit(probe_model, budget=PLENTY)
    steps_of(probe_model, x, probe, 1)
    probe_model.zero_grad()
    budget = budget_at(probe.frontier(), 0.4)
    del probe, probe_model
    gc.collect()
    model = make()
    fit = tenure.Fit(model, budget=budget)
    ours = steps_of(model, x, fit)
    stats = fit.stats()
    return {
        "equal": ours == plain,
        "remade": stats.remade_calls,
        "peak": stats.peak,
        "budget": budget,
        "mode": stats.mode,
        "diverged": stats.diverged,
    }


def on_ranks(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,))

    def fsdp2() -> nn.Module:
        model = deep().model
        for layer in model.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    return {
        "ddp": compared(lambda: nn.parallel.DistributedDataParallel(deep().model), rank),
        "fsdp2": compared(fsdp2, rank),
        "shard": compared(lambda: tenure.shard(deep().model), rank),
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, dict[str, Any]]]:
    """By rank."""
    return run_ranks(on_ranks, 2, timeout=120)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "shard"])
def test_gradients(results: list[dict[str, dict[str, Any]]], kind: str) -> None:
    for result in results:
        assert result[kind]["equal"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_much_is_made_again(results: list[dict[str, dict[str, Any]]], kind: str) -> None:
    for result in results:
        assert result[kind]["mode"] == "planned", result[kind]
        assert result[kind]["remade"] > 0
        assert result[kind]["peak"] <= result[kind]["budget"]
