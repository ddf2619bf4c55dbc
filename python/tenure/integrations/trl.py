"""TRL's ``activation_offloading=True``, done by Tenure."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Unpack

from torch import nn

from tenure.errors import InputError
from tenure.integrations.options import OffloadOptions, need_options
from tenure.offload import Offload

__all__ = ["TESTED", "disable", "enable"]

TESTED = ("1.8.0", "1.16.0")
"""The versions of trl that this was tested with."""

_MODULE = "trl.models.activation_offloading"
_FUNCTION = "get_act_offloading_ctx_manager"
_TESTED_WITH = f"Tested with {' and '.join(TESTED)}"


def enable(**options: Unpack[OffloadOptions]) -> None:
    """From now on a TRL trainer with ``activation_offloading=True`` offloads with `tenure.Offload`.

    That is so for every trainer of TRL that has the setting (SFT, DPO, KTO, Reward), whether its
    module was imported before or will be. A trainer that was made before keeps what it has.

    The trainer's Offload is ``trainer.maybe_activation_offload_context``: print it, or ask its
    ``stats()``. TRL leaves the output layer out of its offloading; here it needs no exception.

    Calling it again changes the options, for trainers made from then on.

    Args:
        options: Those of `tenure.Offload`.

    Raises:
        InputError: If trl is not installed, or is one whose offloading is not where it was; and for
            options that Offload does not have.

    Example:
        >>> import tenure
        >>> tenure.integrations.trl.enable(budget="40GiB")  # doctest: +SKIP
        >>> args = SFTConfig(activation_offloading=True, ...)  # doctest: +SKIP
        >>> trainer = SFTTrainer(model, args=args, ...)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
        >>> print(trainer.maybe_activation_offload_context)  # doctest: +SKIP
    """
    need_options(options)
    found = _find()
    if isinstance(found, _Offloads):
        found.options = options
    else:
        _replace(found, _Offloads(found, options))


def disable() -> None:
    """TRL's own offloading again, for trainers made from now on."""
    found = getattr(sys.modules.get(_MODULE), _FUNCTION, None)
    if isinstance(found, _Offloads):
        _replace(found, found.replaced)


class _Offloads:
    """Stands where TRL's function stood: takes what that takes and makes an Offload."""

    def __init__(self, replaced: Callable[..., object], options: OffloadOptions) -> None:
        self.replaced = replaced
        self.options = options

    def __call__(self, model: nn.Module, *args: Any, **kwargs: Any) -> Offload:
        # TRL's trainers give the model alone; others who call it may give more.
        asked = inspect.signature(self.replaced).bind(model, *args, **kwargs).arguments
        options: OffloadOptions = {}
        if not asked.get("use_streams", True):
            options["streams"] = 0
        if "min_offload_size" in asked:
            options["min_bytes"] = max(1, asked["min_offload_size"])
        options.update(self.options)
        return Offload(model, **options)


def _find() -> Callable[..., object]:
    try:
        trl = importlib.import_module("trl")
    except ImportError as error:
        raise InputError(
            f"trl cannot be imported ({error}): pip install trl. {_TESTED_WITH}"
        ) from error
    try:
        found: object = getattr(importlib.import_module(_MODULE), _FUNCTION)
    except (ImportError, AttributeError) as error:
        raise _unknown(trl, str(error)) from error
    if not callable(found) or "model" not in inspect.signature(found).parameters:
        raise _unknown(trl, f"{_FUNCTION}() takes no model")
    return found


def _unknown(trl: ModuleType, why: str) -> InputError:
    return InputError(
        f"trl {getattr(trl, '__version__', '?')} offloads in a way that is not known here: {why}. "
        f"{_TESTED_WITH}; with any other, tenure.integrations.transformers.offload(trainer) does "
        "the same without activation_offloading=True"
    )


def _replace(old: object, new: object) -> None:
    """In every module that has it: trainers imported it from its module by name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(_FUNCTION) is old:
            setattr(module, _FUNCTION, new)
