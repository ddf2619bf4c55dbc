"""Where ranks meet beside their collectives: to see that they do the same, or who does not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from tenure import _C
from tenure._groups import new_group
from tenure.errors import InputError
from tenure.sharding.choosing import Choice

__all__ = ["Ranks", "agree", "least_left", "meeting_of", "ranks_of", "refusal_of"]

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Who has which piece."""

    shards: dist.ProcessGroup  # those who have a piece of their own each
    replicas: dist.ProcessGroup | None  # those who have the same piece, if there are such
    everyone: list[int]


def ranks_of(group: dist.ProcessGroup | DeviceMesh | None) -> Ranks:
    """The ranks of a group or a mesh. Raises InputError for what shards nothing."""
    if isinstance(group, DeviceMesh):
        if group.ndim not in (1, 2):
            raise InputError(
                f"a DeviceMesh of one dimension shards, one of two has replicas and shards; "
                f"this one has {group.ndim}"
            )
        if group.get_coordinate() is None:
            raise InputError("this rank is not in the mesh")
        replicas = group.get_group(0) if group.ndim == 2 else None
        return Ranks(group.get_group(-1 % group.ndim), replicas, group.mesh.flatten().tolist())
    found: object = group if group is not None else dist.group.WORLD
    if found == dist.GroupMember.NON_GROUP_MEMBER:
        raise InputError("this rank is not in the group")
    if not isinstance(found, dist.ProcessGroup):
        raise InputError(f"group is a process group or a DeviceMesh, not {found!r}")
    return Ranks(found, None, dist.get_process_group_ranks(found))


def meeting_of(ranks: list[int], timeout: float) -> tuple[dist.ProcessGroup, c10d.Store]:
    """A group of these ranks on the host, and a store that they alone use.

    Raises:
        CollectiveError: The others do not come.
    """
    side = new_group(ranks, timeout, "tenure.shard")
    return side, c10d.PrefixStore(f"tenure/{side.group_name}", c10d._get_default_store())


def refusal_of(find: Callable[[], T]) -> T | InputError:
    """What `find` gives, or why this rank cannot go on: the others are to hear of it first."""
    try:
        return find()
    except InputError as error:
        return error


def agree(found: list[Choice] | InputError, how: str, side: dist.ProcessGroup) -> list[Choice]:
    """What this rank found. A collective.

    Raises:
        InputError: This rank cannot go on, or another cannot, or their models or settings differ.
    """
    mine = f"{found}" if isinstance(found, InputError) else _digest(found, how)
    all_of_them: list[str | tuple[str, int] | None] = [None] * dist.get_world_size(side)
    dist.all_gather_object(all_of_them, mine, group=side)
    if isinstance(found, InputError):
        raise found
    for rank, other in enumerate(all_of_them):
        if isinstance(other, str):
            raise InputError(f"rank {rank} cannot take part: {other}")
    others = [str(rank) for rank, other in enumerate(all_of_them) if other != all_of_them[0]]
    if others:
        raise InputError(
            f"the model or the settings on rank {', '.join(others)} are not those of rank 0: "
            "names, shapes, dtypes and units must be the same everywhere"
        )
    return found


def _digest(choices: list[Choice], how: str) -> tuple[str, int]:
    lines = [how]
    for choice in choices:
        lines.append(choice.name)
        for member in choice.members:
            one = member.parameter
            lines.append(f"{member.name} {tuple(one.shape)} {one.dtype} {one.requires_grad}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest(), len(lines)


def least_left(memory: int, device: torch.device, side: dist.ProcessGroup) -> int:
    """Bytes of `memory` that the rank which has least left still has. A collective."""
    on_host = device.type == "cpu"
    used = _C.sample().process.rss if on_host else torch.accelerator.memory_allocated(device)
    most = torch.tensor(used)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=side)
    return max(memory - int(most), 0)
