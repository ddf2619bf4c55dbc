"""Storages: their identity, and freeing their data whatever aliases exist."""

from __future__ import annotations

import functools

import torch

from tenure import _C, _inputs, _site
from tenure._C import Fence, StorageRef
from tenure.errors import InputError, UseAfterRelease

__all__ = ["Fence", "StorageRef", "is_released", "need_tensor", "refill", "release"]


def release(tensor: torch.Tensor, *, by: str = "user", after: Fence | None = None) -> None:
    """Frees the data of a tensor's storage, whatever aliases of it exist.

    Views, saved tensors and other aliases keep their shapes. Reading any of them raises, with a
    text that says who released the storage, where and in which scope. :func:`refill` makes all of
    them good again.

    What was exported through DLPack (``np.from_dlpack``, ``torch.from_dlpack``) is not seen:
    PyTorch keeps no trace of an export, and its reader would read freed memory without an error.
    Release only when no such reader is left.

    Args:
        tensor: Any tensor on the storage.
        by: Who releases it, for the error of a later reader.
        after: The memory itself goes only when this fence is ready. Needed where another stream may
            still read it.

    Example:
        >>> import tenure, torch
        >>> x = torch.arange(4.0)
        >>> view = x[2:]
        >>> tenure.release(x)
        >>> try:
        ...     view.sum()
        ... except RuntimeError as error:
        ...     print(str(error)[:15])
        UseAfterRelease
        >>> tenure.refill(x, torch.ones(4))
        >>> view.sum()
        tensor(2.)
    """
    need_tensor(tensor, "release")
    _inputs.need_text(by, "name of the releaser")
    if after is not None and not isinstance(after, Fence):
        raise InputError(f"tenure.release() needs a tenure.Fence and got {type(after).__name__}")
    _guard_is_shared()
    _C.release_storage(tensor, by, _site.caller(), after if after is not None else Fence())


@functools.cache
def _guard_is_shared() -> None:
    """Makes ``is_shared()`` of a released storage raise: torch's own ends the process.

    It asks for the data's address and does not translate what that throws, up to torch 2.13.
    """
    plain = torch.UntypedStorage.is_shared

    @functools.wraps(plain)
    def is_shared(self: torch.UntypedStorage) -> bool:
        if why := _C.released_text(self):
            raise UseAfterRelease(why)
        return plain(self)

    torch.UntypedStorage.is_shared = is_shared  # type: ignore[assignment, method-assign]


def refill(tensor: torch.Tensor, source: torch.Tensor | None = None) -> None:
    """Gives a released storage its memory back; every alias is good again, its version unchanged.

    Args:
        tensor: Any tensor on the storage.
        source: Its content: as many bytes as the storage has, on the same device. If it has the
            tensor's shape and the tensor is all of its storage, the two are equal afterwards,
            whatever their strides; else the source's bytes are copied in its row-major order.
            Without it the memory holds whatever was there.

    Example:
        >>> import tenure, torch
        >>> x = torch.arange(6.0).view(2, 3).t()
        >>> content = x.clone()
        >>> tenure.release(x)
        >>> tenure.refill(x, content)
        >>> torch.equal(x, content)
        True
    """
    need_tensor(tensor, "refill")
    if source is not None:
        need_tensor(source, "refill")
    _C.refill_storage(tensor, source)


def is_released(tensor: torch.Tensor) -> bool:
    """Whether the data of the tensor's storage is gone."""
    need_tensor(tensor, "is_released")
    return _C.is_released(tensor)


def need_tensor(tensor: object, call: str) -> None:
    """Raises InputError, in the name of `call`, for anything that is no tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"tenure.{call}() needs a torch.Tensor and got {type(tensor).__name__}")
