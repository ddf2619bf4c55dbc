"""Where in a parallel job this process is: its stage, its data, tensor and expert ranks.

Ranks that leak usually have something in common, and it is one of these. They come from the
program itself (:func:`coordinates`), from Megatron's ``parallel_state``, or from a ``DeviceMesh``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed

from tenure import _C
from tenure.errors import InputError

__all__ = ["coordinates", "found_coordinates", "found_gpu", "found_rank"]

_MEGATRON = "megatron.core.parallel_state"
_MEGATRON_RANKS = {
    "stage": "get_pipeline_model_parallel_rank",
    "tp": "get_tensor_model_parallel_rank",
    "dp": "get_data_parallel_rank",
    "cp": "get_context_parallel_rank",
    "ep": "get_expert_model_parallel_rank",
}
_STAGE_NAMES = {"pp", "pipeline", "pipe"}  # what others call a stage

_given: dict[str, int] = {}


def coordinates(**given: int) -> None:
    """Says where in the job this process is, for verdicts over many ranks.

    Not needed where the program uses a ``DeviceMesh`` or Megatron.

    Args:
        given: Names and numbers, such as ``stage=2, dp=0``.

    Example:
        >>> import tenure
        >>> tenure.coordinates(stage=2, dp=0)
    """
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(
                f"coordinate {name} must be a whole number, not {type(value).__name__}"
            )
    _given.update(given)


def found_coordinates() -> dict[str, int]:
    """The coordinates of this process, as far as they are known."""
    if _given:
        return dict(_given)
    return _from_megatron() or _from_mesh()


def found_rank() -> int | None:
    """The rank that the program gave its process group, where no variable says it."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed.get_rank()


def found_gpu() -> str:
    """The number on its host of the GPU that this process uses; empty if it uses none."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    at = torch.cuda.current_device()
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return shown[at].strip() if at < len(shown) and shown[at].strip() else str(at)


def _from_megatron() -> dict[str, int]:
    state: Any = sys.modules.get(_MEGATRON)
    if state is None:
        return {}
    out = {}
    for name, function in _MEGATRON_RANKS.items():
        try:
            out[name] = int(getattr(state, function)())
        except Exception:  # noqa: BLE001  it asserts that this kind is in use
            continue
    return out


def _from_mesh() -> dict[str, int]:
    """From the mesh with the most dimensions that have names."""
    module: Any = sys.modules.get("torch.distributed.device_mesh")
    if module is None or not torch.distributed.is_available():
        return {}
    if not torch.distributed.is_initialized():
        return {}
    best: dict[str, int] = {}
    for found in _C.instances([module.DeviceMesh]):
        try:
            names, place = found.mesh_dim_names, found.get_coordinate()
        except AttributeError:  # it is just being made
            continue
        if names and place and len(names) > len(best):
            best = dict(zip(names, map(int, place), strict=True))
    return {"stage" if name in _STAGE_NAMES else name: rank for name, rank in best.items()}
