"""Which parameter of which model a whole tensor is, for who meets it without its module."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from tenure.sharding.sharded import Sharded

__all__ = ["Identity", "identify", "identity_of", "sharded_in", "whole_parameters"]

_NAME = "_tenure_identity"


@dataclass(frozen=True)
class Identity:
    """Where a parameter belongs."""

    model: Callable[[], Sharded | None]
    unit: int
    flat: int
    index: int


def identify(model: Sharded, unit: int, flats: list[list[nn.Parameter]]) -> None:
    """These are the whole parameters of a unit."""
    weak = weakref.ref(model)
    for flat, parameters in enumerate(flats):
        for index, parameter in enumerate(parameters):
            identity = Identity(weak, unit, flat, index)
            parameter.__dict__[_NAME] = identity
            # Dynamo then makes a graph for each, as it must, for a graph says what it gathers.
            parameter.__dict__["_dynamo_static_input_type"] = "guarded"


def whole_parameters(module: nn.Module) -> list[torch.Tensor]:
    """Those of a module that are sharded, each once: `parameters()` gives their pieces."""
    found: dict[int, torch.Tensor] = {}
    for one in module.modules():
        for name in one._parameters:
            whole = one.__dict__.get(name)
            if whole is not None and identity_of(whole) is not None:
                found[id(whole)] = whole
    return list(found.values())


def sharded_in(module: nn.Module) -> list[Sharded]:
    """What the sharded parameters of a module belong to: `model.tenure` of it or of others."""
    found: dict[int, Sharded] = {}
    for whole in whole_parameters(module):
        identity = identity_of(whole)
        model = identity.model() if identity is not None else None
        if model is not None:
            found.setdefault(id(model), model)
    return list(found.values())


def identity_of(tensor: object) -> Identity | None:
    """Where it belongs, if it is a whole parameter of a sharded model that is alive."""
    identity = tensor.__dict__.get(_NAME) if isinstance(tensor, torch.Tensor) else None
    return identity if isinstance(identity, Identity) and identity.model() is not None else None
