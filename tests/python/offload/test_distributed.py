"""Under DDP and FSDP2: gradients as without Offload, and gathered parameters are not moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tenure
from offloading import Context, batch, blocks, equal, grads_of
from ranks import run_ranks


def steps_of(model: nn.Module, x: Tensor, context: Context) -> list[Tensor]:
    """Two steps with an optimizer; the second one's gradients, whole on every rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        with context:
            model(x).square().sum().backward()
        optimizer.step()
    return [whole(grad) for grad in grads_of(model)]


def whole(grad: Tensor) -> Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def with_ddp(rank: int, world_size: int) -> dict[str, Any]:
    del world_size

    def job() -> tuple[nn.Module, Tensor]:
        return nn.parallel.DistributedDataParallel(blocks(), bucket_cap_mb=1), batch() + rank

    plain = steps_of(*job(), torch.enable_grad())
    model, x = job()
    offload = tenure.Offload(model, target="copy", min_bytes=1)
    ours = steps_of(model, x, offload)
    return {"equal": equal(ours, plain), "moved": offload.stats().moved_out_bytes}


def with_fsdp(rank: int, world_size: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,))

    def job() -> tuple[nn.Module, Tensor]:
        model = blocks()
        for layer in model:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, batch() + rank

    plain = steps_of(*job(), torch.enable_grad())
    model, x = job()
    offload = tenure.Offload(model, target="copy", min_bytes=1)
    ours = steps_of(model, x, offload)
    alone = blocks()
    dist.barrier()
    expected = tenure.Offload(alone, target="copy", min_bytes=1)
    steps_of(alone, x, expected)
    return {
        "equal": equal(ours, plain),
        "moved": offload.stats().moved_out_bytes,
        "moved without FSDP2": expected.stats().moved_out_bytes,
    }


def with_both(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    return {"ddp": with_ddp(rank, world_size), "fsdp2": with_fsdp(rank, world_size)}


@pytest.fixture(scope="module")
def results() -> list[dict[str, dict[str, Any]]]:
    """By rank."""
    return run_ranks(with_both, 2, timeout=120)


def test_ddp(results: list[dict[str, dict[str, Any]]]) -> None:
    for result in results:
        assert result["ddp"]["equal"]
        assert result["ddp"]["moved"] > 0


def test_fsdp2(results: list[dict[str, dict[str, Any]]]) -> None:
    for result in results:
        assert result["fsdp2"]["equal"]
        assert result["fsdp2"]["moved"] == result["fsdp2"]["moved without FSDP2"] > 0
