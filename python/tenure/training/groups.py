"""The process groups of a rank: its pipeline, its peers in other pipelines, and all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import Store

from tenure._groups import new_group
from tenure.pipelining.pipeline import groups_of
from tenure.training.meeting import store_of
from tenure.training.plan import Plan
from tenure.training.planning import World

__all__ = ["Groups", "connected"]


@dataclass(frozen=True)
class Groups:
    """As the trainer takes them.

    Attributes:
        up: The ranks of this pipeline, for what goes to higher ranks.
        down: The same, for what goes to lower ranks: see pipelining/pipeline.py.
        side: The same, on the host.
        data: The ranks with the same stages, on the device.
        data_side: The same, on the host.
        world: All ranks, on the host.
        store: Where all ranks can leave word.
    """

    up: dist.ProcessGroup
    down: dist.ProcessGroup
    side: dist.ProcessGroup
    data: dist.ProcessGroup
    data_side: dist.ProcessGroup
    world: dist.ProcessGroup
    store: Store


@contextmanager
def connected(
    plan: Plan, world: World, device: torch.device, store: Store | None = None
) -> Iterator[Groups]:
    """Connects all ranks, for as long as it lasts. All of them call it, with a store or without."""
    timeout = timedelta(seconds=plan.timeout)
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    dist.init_process_group(
        backend,
        store=store_of(world, timeout) if store is None else store,
        rank=world.rank,
        world_size=world.ranks,
        timeout=timeout,
    )
    try:
        yield _groups(plan, world, device)
    finally:
        dist.destroy_process_group()


def _groups(plan: Plan, world: World, device: torch.device) -> Groups:
    mine, column = divmod(world.rank, plan.dp)
    pipeline = [rank * plan.dp + column for rank in range(plan.pp)]
    peers = [mine * plan.dp + one for one in range(plan.dp)]

    def new(ranks: list[int], backend: str | None, name: str) -> dist.ProcessGroup:
        return new_group(ranks, plan.timeout, f"tenure.{name}", backend)

    up, down, side = groups_of(pipeline, device, plan.timeout)
    data_side = new(peers, "gloo", "data")
    return Groups(
        up=up,
        down=down,
        side=side,
        data=data_side if device.type == "cpu" else new(peers, None, "data"),
        data_side=data_side,
        world=new(list(range(plan.ranks)), "gloo", "world"),
        store=dist.distributed_c10d._get_default_store(),
    )
