"""Where the ranks of a monitor meet: to see that they agree, and to connect."""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from tenure import _C
from tenure.errors import CollectiveError, InputError

__all__ = ["Meeting", "levels_of", "meet"]

_made: defaultdict[str, int] = defaultdict(int)  # monitors of each group so far


@dataclass(frozen=True)
class Meeting:
    """Who is there, and the groups that this rank reduces in.

    Ranks are those of the group; `members` has what the job calls them, as users are told.
    """

    rank: int = 0
    ranks: int = 1
    stages: int = 1
    groups: list[Any] = field(default_factory=list)  # from its neighbours up; none: it is alone
    levels: int = 0
    leads: bool = True  # whether this is the lowest rank of its stage
    store: c10d.Store | None = None  # for this monitor alone; other threads use clones of it
    members: Sequence[int] = (0,)
    job_ranks: int = 1
    job_store: c10d.Store | None = None

    @property
    def job_rank(self) -> int:
        """What the job calls this rank."""
        return self.members[self.rank]


def meet(
    group: dist.ProcessGroup | None,
    *,
    settings: dict[str, Any],
    stage: int,
    node: str | None = None,
    failure: str = "",
    timeout: float = 60.0,
) -> Meeting:
    """Waits for all ranks of the group and connects them. Every rank calls it.

    Args:
        group: The ranks; None: all, or this process alone where there are no groups.
        settings: What must be the same on all ranks, by name; JSON.
        stage: Of the pipeline.
        node: What ranks that are near each other have in common; None: the host's name.
        failure: Why this rank cannot take part: then none does, and all know.
        timeout: Seconds to wait for the others.

    Raises:
        InputError: A rank's monitor is not like rank 0's, on all ranks; or this one is not in it.
        CollectiveError: A rank has made none in time, or cannot be reached.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise InputError("there is no process group: call torch.distributed's first")
        return _alone(stage, failure)
    found: object = group if group is not None else dist.group.WORLD
    if found == dist.GroupMember.NON_GROUP_MEMBER:
        raise InputError("this rank is not in the group: make the monitor on the ranks that are")
    if not isinstance(found, dist.ProcessGroup):
        # The others are most likely with all ranks, and wait for this one there.
        failure, group, found = f"group is a process group, not {found!r}", None, dist.group.WORLD
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    job: dict[str, Any] = {
        "members": dist.get_process_group_ranks(group),
        "job_ranks": dist.get_world_size(),
        "job_store": c10d._get_default_store(),
    }
    if ranks == 1:
        return replace(_alone(stage, failure), **job)
    assert isinstance(found, dist.ProcessGroup)
    name = found.group_name
    _made[name] += 1
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = c10d.PrefixStore(f"tenure/monitor/{attempt}/{name}/{_made[name]}", job["job_store"])
    mine = {
        "settings": {"version of Tenure": _C.telemetry_layout(), **settings},
        "stage": stage,
        "node": node or socket.gethostname(),
        "failure": failure,
    }
    agreed = _agreement(store, rank, job["members"], mine, timeout)
    levels = levels_of(agreed["nodes"])
    groups = _connected(store, rank, levels, timeout)
    leads = rank in agreed["leaders"]
    return Meeting(rank, ranks, agreed["stages"], groups, len(levels), leads, store, **job)


def _connected(
    store: c10d.Store, rank: int, levels: list[list[list[int]]], timeout: float
) -> list[Any]:
    """This rank's group of each level it is in."""
    groups: list[Any] = []
    try:
        gloo: Any = c10d.ProcessGroupGloo
        options = gloo._Options()
        options._devices = _devices()
        options._threads = 1  # one collective at a time
        options._timeout = timedelta(seconds=timeout)
        for number, level in enumerate(levels):
            for members in level:
                if rank in members:
                    place = c10d.PrefixStore(f"level/{number}/{members[0]}", store)
                    own = members.index(rank)
                    groups.append(gloo(place, own, len(members), options))
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise CollectiveError(
            f"the monitors agree and cannot connect within {timeout:g} s: {why}; a rank has ended, "
            "or GLOO_SOCKET_IFNAME names no network that reaches all"
        ) from error
    return groups


def _devices() -> list[Any]:
    """What Gloo reaches the others through: the job's where it has them.

    A device has a thread that wakes up a hundred times a second even when there is nothing to do,
    and then takes a core from training. Groups on one device share no order of collectives.
    """
    with suppress(RuntimeError):  # the job has no backend for the CPU
        backend = c10d._get_default_group()._get_backend(torch.device("cpu"))
        of_job: Any = backend.options if isinstance(backend, c10d.ProcessGroupGloo) else None
        if of_job and of_job._devices:
            return list(of_job._devices)
    names = [one for one in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if one]
    if names:
        return [c10d.ProcessGroupGloo.create_device(interface=one) for one in names]
    return [c10d.ProcessGroupGloo.create_default_device()]


def _alone(stage: int, failure: str) -> Meeting:
    if failure:
        raise InputError(failure)
    return Meeting(stages=stage + 1)


def levels_of(nodes: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """The groups of each level, from neighbours up to one group. See Note [Levels] in C++."""
    most = _C.telemetry_most_members
    everyone = sorted(itertools.chain.from_iterable(nodes))
    if len(everyone) <= most:
        return [[everyone]]
    levels = [[part for node in nodes for part in _parts(node, most)]]
    while len(levels[-1]) > 1:
        levels.append(_parts([members[0] for members in levels[-1]], most))
    return levels


def _parts(ranks: Sequence[int], most: int) -> list[list[int]]:
    return [list(ranks[at : at + most]) for at in range(0, len(ranks), most)]


def _agreement(
    store: c10d.Store, rank: int, members: Sequence[int], mine: dict[str, Any], timeout: float
) -> dict[str, Any]:
    """What all ranks have found. The last one to come looks, so that each asks for one answer."""
    ranks = len(members)
    store.set(f"hello/{rank}", json.dumps(mine))
    if store.add("arrived", 1) == ranks:
        everyone = [json.loads(store.get(f"hello/{one}")) for one in range(ranks)]
        store.set("agreed", json.dumps(_compared(everyone, members)))
    try:
        store.wait(["agreed"], timedelta(seconds=timeout))
    except RuntimeError:
        if mine["failure"]:
            raise InputError(mine["failure"]) from None
        missing = [members[one] for one in range(ranks) if not store.check([f"hello/{one}"])]
        raise CollectiveError(
            f"no monitor on rank {_named(missing)}{' …' if len(missing) > 8 else ''} "
            f"after {timeout:g} s: every rank of the group makes one, in the same order"
        ) from None
    agreed: dict[str, Any] = json.loads(store.get("agreed"))
    if "error" in agreed:
        raise InputError(agreed["error"])
    return agreed


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8]))


def _compared(everyone: list[dict[str, Any]], members: Sequence[int]) -> dict[str, Any]:
    for rank, one in zip(members, everyone, strict=True):
        if one["failure"]:
            return {"error": f"the monitor on rank {rank}: {one['failure']}"}
    first = everyone[0]["settings"]
    for what, wanted in first.items():
        others = [rank for rank, one in enumerate(everyone) if one["settings"].get(what) != wanted]
        if others:
            theirs = everyone[others[0]]["settings"].get(what)
            shown = f" ({theirs} and {wanted})" if len(str(theirs)) < 80 else ""
            return {
                "error": f"the monitor on rank {_named([members[one] for one in others])} is not "
                f"like rank {members[0]}'s: {what} differs{shown}; make it in the same way on "
                "every rank"
            }
    nodes: dict[str, list[int]] = {}
    for rank, one in enumerate(everyone):
        nodes.setdefault(one["node"], []).append(rank)
    leaders: dict[int, int] = {}
    for rank, one in enumerate(everyone):
        leaders.setdefault(one["stage"], rank)
    return {
        "stages": 1 + max(leaders),
        "nodes": list(nodes.values()),
        "leaders": sorted(leaders.values()),
    }
