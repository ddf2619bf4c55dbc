"""What a parameter becomes: the whole one that its modules read, and this rank's piece."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tenure.sharding.changes import refuse_moves
from tenure.sharding.choosing import Member
from tenure.sharding.optimizers import replaced

__all__ = ["alike", "replace"]


def alike(members: list[Member]) -> list[list[Member]]:
    """Those that one collective may move: frozen ones apart, for they have no gradients."""
    groups: dict[tuple[torch.dtype, bool], list[Member]] = {}
    for member in members:
        parameter = member.parameter
        groups.setdefault((parameter.dtype, parameter.requires_grad), []).append(member)
    return list(groups.values())


def replace(
    member: Member, gathered: torch.Tensor, piece: torch.Tensor
) -> tuple[nn.Parameter, nn.Parameter]:
    """The module's attribute is the whole parameter, and what `parameters()` gives is the piece."""
    old = member.parameter
    whole = nn.Parameter(gathered, requires_grad=old.requires_grad)
    kept = nn.Parameter(piece, requires_grad=old.requires_grad)
    for new in (whole, kept):
        new.__dict__.update(old.__dict__)
    for hook in (old._backward_hooks or {}).values():
        register: Any = whole.register_hook  # which has no types
        register(hook)
    replaced(old, kept)
    for home in member.homes:
        home.module._parameters[home.name] = kept
        home.module.__dict__[home.name] = whole
    for home in member.homes:
        refuse_moves(home.module)
        if isinstance(home.module, nn.RNNBase):
            _refresh(home.module)
    return whole, kept


def _refresh(module: Any) -> None:
    """A recurrent module lists its weights apart."""
    module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
