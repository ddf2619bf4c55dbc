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

__all__ = ["Identity", "identify", "identity_of"]

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


def identity_of(tensor: object) -> Identity | None:
    """Where it belongs, if it is a whole parameter of a sharded model that is alive."""
    identity = tensor.__dict__.get(_NAME) if isinstance(tensor, torch.Tensor) else None
    return identity if isinstance(identity, Identity) and identity.model() is not None else None
