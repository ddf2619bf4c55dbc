"""ZeRO-3: each rank keeps a piece of the parameters, and gathers the rest while it is used."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tenure import _C
from tenure.errors import InputError
from tenure.sharding.choosing import Choice, Units, check, check_modules, choose, device_of
from tenure.sharding.compiled import backend
from tenure.sharding.deepspeed import from_deepspeed
from tenure.sharding.gradients import Group
from tenure.sharding.meeting import agree, meeting_of, ranks_of, refusal_of
from tenure.sharding.sharded import Ahead, Sharded

__all__ = ["Sharded", "backend", "from_deepspeed", "shard"]

_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Model = TypeVar("Model", bound=nn.Module)


def shard(
    model: Model,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    units: Units = None,
    reshard_after_forward: bool = True,
    prefetch: int = 1,
    prefetch_bytes: int | None = None,
    keep_resident: int = 0,
    offload: bool = False,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    timeout: float = 300.0,
) -> Model:
    """Shards the parameters of a model over a group, in place.

    Afterwards `model.parameters()` gives this rank's pieces, for any optimizer; the modules see
    their parameters whole while they run. Every rank gets the values of the group's first.

    Args:
        model: Any module; the same one is returned, with `model.tenure` for statistics.
        group: The ranks, the default group if left out; or a DeviceMesh: one dimension shards, of
            two the first has replicas and the second shards (HSDP).
        units: What is gathered and released as one: classes of modules, names of modules, or a
            function of name and module. Left out: the elements of the model's lists.
        reshard_after_forward: Whether a unit is released after forward and gathered again for
            backward.
        prefetch: How many units are gathered ahead.
        prefetch_bytes: Gathered ahead only while all that is gathered is less than this.
        keep_resident: Parameters with fewer elements are gathered once a step, all with one
            collective, and stay until the end of backward.
        offload: Whether pieces, their gradients and so the optimizer's state are kept on the host,
            in pinned memory, while the model computes on its accelerator.
        param_dtype: What parameters are gathered and computed in; left out: as they are.
        reduce_dtype: What gradients are added up in; left out: as they are.
        timeout: Seconds after which a collective has failed.

    Raises:
        InputError: The model cannot be sharded so; it is as it was.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"a torch.nn.Module is sharded, not {type(model).__name__}")
    if not dist.is_initialized():
        raise InputError("there is no process group: call torch.distributed.init_process_group()")
    if any("tenure" in module.__dict__ for module in model.modules()):
        raise InputError("the model is sharded already, or a part of it is")
    if not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise InputError(f"timeout is a number of seconds, not {timeout!r}")
    ranks = ranks_of(group)

    def find() -> list[Choice]:
        _check_amounts(
            prefetch=prefetch, prefetch_bytes=prefetch_bytes, keep_resident=keep_resident
        )
        _check_types(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        _check_choices(reshard_after_forward=reshard_after_forward, offload=offload)
        check_modules(model)
        found = choose(model, units, keep_resident)
        device_of(found)
        check(found)
        return found

    found = refusal_of(find)
    side, store = meeting_of(ranks.everyone, timeout)
    how = (reshard_after_forward, prefetch, prefetch_bytes, offload, param_dtype, reduce_dtype)
    choices = agree(found, f"{how}", side)
    sharder = _C.Sharder(
        group=ranks.shards,
        replicas=ranks.replicas,
        side=side,
        store=store,
        gathered=param_dtype,
        reduced=reduce_dtype,
        keep=not reshard_after_forward,
        on_host=offload,
        prefetch=prefetch,
        prefetch_bytes=prefetch_bytes,
        timeout=timeout,
    )
    pieces = Group(ranks.shards, device_of(choices))
    ahead = Ahead(prefetch, prefetch_bytes)
    model.__dict__["tenure"] = Sharded(choices, sharder, pieces, side, ahead)
    return model


def _check_amounts(**given: int | None) -> None:
    for name, amount in given.items():
        if amount is None and name == "prefetch_bytes":
            continue
        if isinstance(amount, bool) or not isinstance(amount, int) or amount < 0:
            raise InputError(f"{name} is a whole number from 0 on, not {amount!r}")


def _check_choices(**given: bool) -> None:
    for name, choice in given.items():
        if not isinstance(choice, bool):
            raise InputError(f"{name} is True or False, not {choice!r}")


def _check_types(**given: torch.dtype | None) -> None:
    for name, dtype in given.items():
        if dtype is not None and dtype not in _TYPES:
            raise InputError(f"{name} is {', '.join(map(str, _TYPES))} or None, not {dtype!r}")
