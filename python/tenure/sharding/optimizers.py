"""Optimizers that would do something else with pieces than with parameters."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim import optimizer as hooks

from tenure.errors import InputError

__all__ = ["replaced"]

# They look at more than one element at a time: at rows and columns, or at sums and products of all.
_NOT_BY_ELEMENT = {
    *("Adafactor", "AdaFactor", "Adalomo", "CAME", "DAdaptAdam", "DAdaptLion", "DAdaptSGD"),
    *("FusedLAMB", "GaLoreAdamW", "KFAC", "Kron", "LAMB", "LARS", "LBFGS", "Lamb", "Lars", "Muon"),
    *("NovoGrad", "Prodigy", "SOAP", "Shampoo"),
}

_OLD = "_tenure_replaced"
_PIECE = "_tenure_piece"

_seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_listening = False


def replaced(parameter: nn.Parameter, piece: nn.Parameter) -> None:
    """A piece stands in its place: an optimizer that still has it is told so."""
    global _listening
    parameter.__dict__[_OLD] = True
    piece.__dict__[_PIECE] = True
    if not _listening:
        _listening = True
        hooks.register_optimizer_step_pre_hook(_look)


def _look(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    """Once for each optimizer, and again when it has got parameters."""
    if _seen.get(optimizer) == len(optimizer.param_groups):
        return
    own = [one for group in optimizer.param_groups for one in group["params"]]
    if any(one.__dict__.get(_OLD, False) for one in own):
        raise InputError(
            "the optimizer has parameters from before tenure.shard(): make it afterwards, of "
            "model.parameters()"
        )
    kinds = [one.__name__ for one in type(optimizer).__mro__]
    name = next((one for one in kinds if one in _NOT_BY_ELEMENT), "")
    if name and any(one.__dict__.get(_PIECE, False) for one in own):
        raise InputError(
            f"{name} looks at more than one element of a parameter at a time, and a rank has a "
            "piece without a shape: take an optimizer that works element by element, as AdamW does"
        )
    _seen[optimizer] = len(optimizer.param_groups)
