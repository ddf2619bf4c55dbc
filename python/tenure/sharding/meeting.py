"""Where ranks meet beside their collectives: to see that they do the same, or who does not."""

from __future__ import annotations

import hashlib
from datetime import timedelta

from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from tenure.errors import InputError
from tenure.sharding.choosing import Choice

__all__ = ["meeting_of", "require_same"]


def meeting_of(group: dist.ProcessGroup, timeout: float) -> tuple[dist.ProcessGroup, c10d.Store]:
    """A group of the same ranks on the host, and a store that they alone use."""
    ranks = dist.get_process_group_ranks(group)
    side = dist.new_group(
        ranks,
        timeout=timedelta(seconds=timeout),
        backend="gloo",
        use_local_synchronization=True,
        group_desc="tenure.shard",
    )
    return side, c10d.PrefixStore(f"tenure/{side.group_name}", c10d._get_default_store())


def require_same(choices: list[Choice], how: str, side: dist.ProcessGroup) -> None:
    """Raises InputError if another rank's model or settings differ."""
    lines = [how]
    for choice in choices:
        lines.append(choice.name)
        for member in choice.members:
            one = member.parameter
            lines.append(f"{member.name} {tuple(one.shape)} {one.dtype} {one.requires_grad}")
    mine = hashlib.sha256("\n".join(lines).encode()).hexdigest(), len(lines)
    all_of_them: list[tuple[str, int] | None] = [None] * dist.get_world_size(side)
    dist.all_gather_object(all_of_them, mine, group=side)
    others = [str(rank) for rank, other in enumerate(all_of_them) if other != all_of_them[0]]
    if others:
        raise InputError(
            f"the model or the settings on rank {', '.join(others)} are not those of rank 0: "
            "names, shapes, dtypes and units must be the same everywhere"
        )
