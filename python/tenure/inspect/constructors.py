"""How Python makes storages that torch's allocator does not: they are told to the observer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _device

from tenure import _C

__all__ = ["unwatch", "watch"]

_MAPPED = ("_new_shared_fd_cpu", "_new_shared_filename_cpu")  # from another process
_MOVED = ("_share_fd_cpu_", "_share_filename_cpu_")  # to where other processes see it
# Tensors on memory of numpy's, or of whoever else.
_WRAPPERS = ("from_numpy", "frombuffer", "from_dlpack", "as_tensor", "asarray")
_before: list[tuple[Any, str, Any]] = []  # whose attribute, its name, and what it was


def watch() -> None:
    """Takes the place of those that make storages."""
    kind = torch.UntypedStorage
    _replace(kind, "__init__", _made)
    for name in _MAPPED:
        _replace(kind, name, _mapping(getattr(kind, name)))
    for name in _MOVED:
        _replace(kind, name, _moving(getattr(kind, name)))
    for name in _WRAPPERS:
        before = getattr(torch, name)
        _replace(torch, name, _wrapping(before))
        if before in _device_constructors():
            _device_constructors().add(getattr(torch, name))


def unwatch() -> None:
    """Puts all back."""
    while _before:
        owner, name, value = _before.pop()
        if owner is torch:
            _device_constructors().discard(getattr(torch, name))
        if value is None:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


def _device_constructors() -> set[Any]:
    """Those that torch knows by identity, to give them the default device."""
    known: set[Any] = getattr(_device, "_device_constructors", set)()
    return known


def _replace(owner: Any, name: str, value: Any) -> None:
    _before.append((owner, name, vars(owner).get(name)))  # none: it is inherited
    setattr(owner, name, value)


def _made(storage: torch.UntypedStorage, *_: Any, **__: Any) -> None:
    """Deepcopy and unpickling make storages so."""
    _C.welcome(storage)


def _mapping(
    make: Callable[..., torch.UntypedStorage],
) -> classmethod[torch.UntypedStorage, Any, torch.UntypedStorage]:
    def mapped(_: type, *args: Any, **kwargs: Any) -> torch.UntypedStorage:
        storage = make(*args, **kwargs)
        _C.welcome_shared(storage)
        return storage

    return classmethod(mapped)


def _moving(move: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(move)
    def moved(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        out = move(storage, *args, **kwargs)
        _C.welcome_shared(storage)
        return out

    return moved


def _wrapping(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if not torch.compiler.is_compiling():  # torch.compile cannot trace what is ours
            _C.welcome_wrapped(tensor)
        return tensor

    return wrapped
