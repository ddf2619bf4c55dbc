"""Process groups that only their own ranks make."""

from __future__ import annotations

import hashlib
import inspect
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from tenure.errors import CollectiveError

__all__ = ["new_group"]


def new_group(
    ranks: list[int], timeout: float, who: str, backend: str | None = "gloo"
) -> dist.ProcessGroup:
    """A group of these ranks; each of them calls it, in the same order as the others.

    `torch.distributed.new_group(use_local_synchronization=True)` names a group by how many groups
    this rank is in. Where some are in more than others, by an earlier `new_group([0])` say, each
    waits for ranks that have come under another name. So the name is made of what all of these
    ranks know: the ones that they made here before. A torch that makes groups in another way inside
    has no such names here, and the limitation.

    Args:
        ranks: Of the job; in the group they are in their order. This one is among them.
        timeout: Seconds to wait for the others, here and in collectives.
        who: Wants it: "tenure.shard". Groups of one are counted apart from those of another.
        backend: None: the job's.

    Raises:
        CollectiveError: The others did not come in time, or cannot be reached.
    """
    ranks = sorted(ranks)
    make = _named if _can_be_named() else _unnamed
    try:
        return make(ranks, timeout, who, backend)
    except RuntimeError as error:
        if isinstance(error, CollectiveError):
            raise
        why = str(error).partition("\n")[0]
        raise CollectiveError(
            f"{who} cannot connect the ranks within {timeout:g} s: {why}; one of them has ended, "
            "or GLOO_SOCKET_IFNAME names no network that reaches all"
        ) from error


def _can_be_named() -> bool:
    """Whether this torch makes groups as `_named` has it: these are names that it keeps to itself.

    A backend of Python that makes groups on its own is not asked to, either.
    """
    helper = getattr(c10d, "_new_process_group_helper", None)
    world = getattr(c10d, "_world", None)
    default = getattr(c10d, "_get_default_group", None)
    if helper is None or default is None or hasattr(default(), "new_group"):
        return False
    known = all(hasattr(world, name) for name in ("pg_names", "pg_map", "pg_group_ranks"))
    takes = list(inspect.signature(helper).parameters)
    return known and takes[: len(_TAKES)] == _TAKES and {"timeout", "group_desc"} <= {*takes}


_TAKES = [
    *("group_size", "group_rank", "global_ranks_in_group"),
    *("backend", "store", "group_name"),
]


def _unnamed(ranks: list[int], timeout: float, who: str, backend: str | None) -> dist.ProcessGroup:
    """By what torch has for all. Ranks must be in equally many groups."""
    made = dist.new_group(
        ranks,
        timeout=timedelta(seconds=timeout),
        backend=backend,
        use_local_synchronization=True,
        group_desc=who,
    )
    assert isinstance(made, dist.ProcessGroup)
    return made


def _named(ranks: list[int], timeout: float, who: str, backend: str | None) -> dist.ProcessGroup:
    digest = hashlib.sha256(str(ranks).encode()).hexdigest()
    family = f"{who}/{digest[:32]}/"
    made = sum(one.startswith(family) for one in c10d._world.pg_names.values())
    name: Any = f"{family}{made}"  # which has a type of its own in newer torch
    of_job, store = c10d._world.pg_map[c10d._get_default_group()]
    _require_all(c10d.PrefixStore(f"tenure/meeting/{name}", store), ranks, timeout, who)
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend(backend or of_job),
        store,
        name,
        timeout=timedelta(seconds=timeout),
        group_desc=who,
    )
    c10d._world.pg_group_ranks[group] = {rank: own for own, rank in enumerate(ranks)}
    made_one: dist.ProcessGroup = group
    return made_one


def _require_all(store: c10d.Store, ranks: list[int], timeout: float, who: str) -> None:
    """Waits for the others: addresses of a rank that gave up would lead those who try again astray.

    Raises:
        CollectiveError: Some do not come.
    """
    mine = f"here/{dist.get_rank()}"
    store.set(mine, "here")
    if store.add("count", 1) == len(ranks):
        store.set("all", "here")
    try:
        store.wait(["all"], timedelta(seconds=timeout))
    except RuntimeError as error:
        missing = [str(rank) for rank in ranks if not _is_here(store, rank)]
        store.add("count", -1)
        store.set(mine, "gone")
        if store.check(["all"]):
            return
        raise CollectiveError(
            f"{who}: rank {', '.join(missing)} did not come within {timeout:g} s: every rank of "
            "the group must call it"
        ) from error


def _is_here(store: c10d.Store, rank: int) -> bool:
    key = f"here/{rank}"
    return store.check([key]) and store.get(key) == b"here"
