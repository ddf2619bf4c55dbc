"""Watching storages on CUDA devices, through the library that is loaded where they are used."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from tenure import _C
from tenure.inspect.options import say

__all__ = ["watch_when_used"]

_LIBRARY = Path(__file__).resolve().parents[1] / "lib" / "libtenure_cuda.so"
_asked = False


def watch_when_used() -> None:
    """From when the program first uses CUDA; where it does already, from now on."""
    global _asked
    if _asked or torch.version.cuda is None:
        return
    _asked = True
    torch.cuda._lazy_call(_watch)  # type: ignore[no-untyped-call]


def _watch() -> None:
    if not _LIBRARY.exists():
        say(
            "storages on CUDA devices are counted and not named: this build has no libtenure_cuda, "
            "which needs CUDA's headers (cuda_runtime_api.h) to build"
        )
        return
    library = ctypes.CDLL(str(_LIBRARY))
    library.tenure_watch_cuda.restype = ctypes.c_char_p
    why = library.tenure_watch_cuda()
    if why is not None:
        reason = why.decode(errors="replace").splitlines()[0]
        say(f"storages on CUDA devices are counted and not named: {reason}")
        return
    _C.see_devices()
    _C.References([]).adopt()
