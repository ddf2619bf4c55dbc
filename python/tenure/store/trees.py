"""Tensors and handles in nests of other things."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from tenure.errors import InputError
from tenure.store.fetching import fetch, free_handles
from tenure.store.handles import Handle

if TYPE_CHECKING:
    from tenure.store.scopes import Call, Scope


def map_tree(tree: Any, function: Callable[[Any], Any], kind: type = torch.Tensor) -> Any:
    """The same nest with each tensor replaced by what `function` makes of it.

    Looks into dicts, lists, tuples, named tuples and dataclasses, and leaves all else as it is. A
    part in which nothing is replaced is not copied. An object that appears twice is replaced once.

    >>> import tenure, torch
    >>> tenure.store.map_tree({"a": [torch.ones(2), "b"]}, lambda tensor: tuple(tensor.shape))
    {'a': [(2,), 'b']}
    """
    return _Mapper(function, kind).swap(tree)


def put_tree(scope: Scope | Call, tree: Any, **options: Any) -> Any:
    """The same nest with each tensor put, and its handle in its place; options as for ``put``."""
    return map_tree(tree, lambda tensor: scope.put(tensor, **options))


def get_tree(tree: Any, **options: Any) -> Any:
    """The same nest with each handle's tensor in its place, fetched at once as by ``get_all``.

    >>> import tenure, torch
    >>> with tenure.store.scope("call") as scope:
    ...     sent = tenure.store.put_tree(scope, {"loss": torch.tensor(0.5), "step": 3})
    ...     print(tenure.store.get_tree(sent))
    {'loss': tensor(0.5000), 'step': 3}
    """
    found: dict[Handle, None] = {}
    map_tree(tree, lambda handle: found.setdefault(handle), Handle)
    handles = list(found)
    tensors = dict(zip(handles, fetch(handles, **options), strict=True))
    return map_tree(tree, tensors.__getitem__, Handle)


def free(tree: Any) -> tuple[int, list[tuple[str, str]]]:
    """Asks the owners to free the handles in a nest.

    Returns how many were still there, and the owners that could not be asked, with the reason.
    """
    return free_handles(list(dict.fromkeys(handles_in(tree))))


def handles_in(tree: Any) -> list[Handle]:
    """Those that are stored, in order."""
    found: list[Handle] = []

    def see(handle: Handle) -> Handle:
        if handle.stored:
            found.append(handle)
        return handle

    map_tree(tree, see, Handle)
    return found


class _Mapper:
    def __init__(self, function: Callable[[Any], Any], kind: type) -> None:
        self._function = function
        self._kind = kind
        self._swapped: dict[int, tuple[Any, Any]] = {}  # by identity; holds it, too
        self._inside: set[int] = set()

    def swap(self, node: Any) -> Any:
        is_leaf = isinstance(node, self._kind)
        if not is_leaf and not _is_nest(node):
            return node
        if id(node) not in self._swapped:
            self._swapped[id(node)] = node, self._function(node) if is_leaf else self._nest(node)
        return self._swapped[id(node)][1]

    def _nest(self, node: Any) -> Any:
        if id(node) in self._inside:
            raise InputError(f"a {type(node).__name__} contains itself: there is no end to it")
        self._inside.add(id(node))
        try:
            return self._rebuilt(node)
        finally:
            self._inside.remove(id(node))

    def _rebuilt(self, node: Any) -> Any:
        if isinstance(node, Mapping):
            return _with_items(node, self._changes(dict(node)))
        if isinstance(node, list | tuple):
            changes = self._changes(dict(enumerate(node)))
            values = [changes.get(i, value) for i, value in enumerate(node)]
            return node if not changes else _with_values(node, values)
        names = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]
        return _with_fields(node, self._changes({name: getattr(node, name) for name in names}))

    def _changes(self, parts: dict[Any, Any]) -> dict[Any, Any]:
        swapped = {name: self.swap(part) for name, part in parts.items()}
        return {name: part for name, part in swapped.items() if part is not parts[name]}


def _is_nest(node: Any) -> bool:
    if isinstance(node, Mapping | list | tuple):
        return True
    return dataclasses.is_dataclass(node) and not isinstance(node, type)


def _with_items(node: Mapping[Any, Any], changes: dict[Any, Any]) -> Mapping[Any, Any]:
    if not changes:
        return node
    if not isinstance(node, MutableMapping):
        plain = {**node, **changes}
        return MappingProxyType(plain) if isinstance(node, MappingProxyType) else plain
    new = copy.copy(node)
    for name, part in changes.items():
        new[name] = part
    return new


def _with_values(node: Any, values: list[Any]) -> Any:
    if isinstance(node, list):
        new = copy.copy(node)
        new[:] = values
        return new
    if hasattr(node, "_make"):  # a named tuple
        return type(node)._make(values)
    return type(node)(values)


def _with_fields(node: Any, changes: dict[str, Any]) -> Any:
    if not changes:
        return node
    new = copy.copy(node)
    for name, part in changes.items():
        object.__setattr__(new, name, part)  # also of a frozen one
    return new
