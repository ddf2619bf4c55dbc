"""AReaL's RTensor, with Tenure's store below.

Two ways to it. In code of one's own, another import than ``areal.infra.rpc.rtensor``::

    from tenure.integrations.areal import RTensor

In AReaL itself, whose modules import its own RTensor: ``tenure.integrations.areal.enable()`` in
each process, and that one's tensors travel through the store.

A shard's id is a handle of the store: it says which process has the tensor, so that the address
beside it is only what shards are grouped by. Bytes arrive as they were put, in every dtype; a view
is stored as its own elements, and a later write to the tensor does not change what is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from tenure import store as tensors
from tenure.errors import InputError, ScopeWarning, StaleHandle
from tenure.store import Handle

if TYPE_CHECKING:
    from tenure.store.collectors import Collectors

__all__ = [
    "TESTED",
    "Backend",
    "RTensor",
    "TensorShardInfo",
    "clear_fetch_buffer",
    "disable",
    "enable",
    "fetch",
    "fetch_buffer_stats",
    "flatten_shard_ids",
    "remove",
    "storage_stats",
    "store",
]

TESTED = ("1.0.4",)
"""The versions of areal that this was tested with."""

_MODULE = "areal.infra.rpc.rtensor"
_SCOPE = "areal", "shards"  # owns what no scope was named for

_lock = threading.Lock()
_scope: tuple[weakref.ref[Any], tensors.Scope] | None = None  # in which store: leave() ends that
_named: dict[str, Handle] = {}  # what was stored under a name of the caller's


@dataclass
class TensorShardInfo:
    """Where a tensor is: ``shard_id`` is the text of its handle."""

    shard_id: Any
    node_addr: str


@dataclass
class RTensor:
    """A tensor that some process has. ``data`` is on the meta device until it is fetched."""

    shard: TensorShardInfo
    data: torch.Tensor

    def to_local(self) -> torch.Tensor:
        """The tensor itself, fetched the first time.

        Raises:
            StaleHandle: It was cleared; says by whom and when.
            OwnerLost: The process that had it has ended.
        """
        if self.data.is_meta:
            [self.data] = _fetched([self.shard.shard_id])
        return self.data

    @staticmethod
    def remotize(
        obj: Any,
        node_addr: str,
        *,
        scope: tensors.Scope | tensors.Call | None = None,
        collectors: Collectors = None,
        sources: Iterable[int] | None = None,
    ) -> Any:
        """The same nest of dicts, lists and tuples with every tensor stored, and its RTensor there.

        A dict with an ``attention_mask`` is stored without the columns at its end that no row uses.

        Args:
            obj: The nest.
            node_addr: What the shards are grouped by.
            scope: Owns them: its end frees them, and what consumers have kept of them. By default
                they stay until they are cleared.
            collectors: Who will fetch them, as for ``tenure.store.Scope.put``.
            sources: The ranks whose results are wanted. On others nothing is stored: a rank that is
                no data-parallel head need not ask whether it is one.

        >>> import torch
        >>> from tenure.integrations.areal import RTensor
        >>> sent = RTensor.remotize({"logp": torch.ones(2, 3), "n": 2}, node_addr="worker-0")
        >>> sent["logp"].shape, sent["logp"].device
        (torch.Size([2, 3]), device(type='meta'))
        >>> RTensor.localize(sent)["logp"].sum().item()
        6.0
        >>> RTensor.clear(sent)
        1
        """
        owner = _own_scope() if scope is None else scope

        def put(tensor: torch.Tensor) -> RTensor:
            handle = owner.put(tensor.detach(), collectors=collectors, sources=sources)
            meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            return RTensor(TensorShardInfo(handle.text(), node_addr), meta)

        return _swapped(obj, torch.Tensor, put, trimmed=True)

    @staticmethod
    def localize(obj: Any) -> Any:
        """The same nest with every RTensor's tensor in its place, fetched at once."""
        found = [item for item in _found(obj) if item.data.is_meta]
        ids = list(dict.fromkeys(item.shard.shard_id for item in found))
        local = dict(zip(ids, _fetched(ids), strict=True))
        for item in found:
            item.data = local[item.shard.shard_id]
        return _swapped(obj, RTensor, lambda item: item.data)

    @staticmethod
    def collect_shards(obj: Any) -> dict[str, list[Any]]:
        """The ids of the nest's shards, by the address they were given."""
        shards: dict[str, list[Any]] = {}
        for item in _found(obj):
            shards.setdefault(item.shard.node_addr, []).append(item.shard.shard_id)
        return shards

    @staticmethod
    async def clear_node(node_addr: str, shard_ids: list[Any]) -> None:  # noqa: ARG004  AReaL's
        """Frees these shards at their owners, and here what was fetched of them."""
        await asyncio.to_thread(_cleared, shard_ids)

    @staticmethod
    def clear(obj: Any) -> int:
        """Frees all shards of a nest, wherever they are. Returns how many were still there."""
        return _cleared(flatten_shard_ids(obj))

    @property
    def shape(self) -> torch.Size:
        """Of the tensor."""
        return self.data.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """Meta, until it is fetched."""
        return self.data.device

    @property
    def ndim(self) -> int:
        """Of the tensor."""
        return self.data.ndim


def flatten_shard_ids(obj: Any) -> list[Any]:
    """The ids of all shards of a nest."""
    return [shard for shards in RTensor.collect_shards(obj).values() for shard in shards]


def clear_fetch_buffer(shard_ids: Iterable[Any] | None = None) -> int:
    """Lets go of what this process has fetched of these shards; None: of all. Returns how many.

    What is on its way when this is called is not kept either. Shards of a scope need no such call:
    the store lets go of them when it closes. Nor do those that are cleared, wherever that is done.
    """
    store = tensors.joining.current()
    if shard_ids is None:
        return store.forget_scope(*_SCOPE)
    handles = []
    for shard in shard_ids:
        with contextlib.suppress(InputError):  # no shard of ours
            handles.append(_handle(shard)._handle)
    return store.forget(handles)


def fetch_buffer_stats() -> dict[str, int]:
    """How many fetched tensors this process keeps until they are cleared."""
    return {"num_entries": tensors.joining.current().kept_of(*_SCOPE)}


def storage_stats() -> dict[str, int]:
    """What this process has stored: tensors, and the bytes that the system would get back."""
    found = tensors.stats()
    return {"num_tensors": found["objects"], "total_bytes": found["bytes"]}


def store(shard_id: str, tensor: torch.Tensor) -> None:
    """Stores a tensor here under a name of one's own, in the place of what had it before."""
    handle = _own_scope().put(tensor.detach())
    with _lock:
        before = _named.get(shard_id)
        _named[shard_id] = handle
    if before is not None and before != handle:
        before.free()


def fetch(shard_id: str) -> torch.Tensor:
    """The tensor of a shard. Raises KeyError if there is none."""
    try:
        return _handle(shard_id).get()
    except (InputError, StaleHandle) as error:
        raise KeyError(f"Shard {shard_id} is not in the store: {error}") from error


def remove(shard_id: str) -> int:
    """Frees a shard. Returns 1, or 0 if there is none."""
    try:
        return min(1, _cleared([shard_id]))
    except InputError:
        return 0


class Backend:
    """What AReaL's own RTensor asks for tensors, when `enable` was called."""

    def store(self, tensor: torch.Tensor) -> str:
        """Stores it, and returns the id of its shard."""
        return _own_scope().put(tensor.detach()).text()

    def fetch(self, shards: list[Any]) -> list[torch.Tensor]:
        """The tensors of these shards, in one fetch."""
        return tensors.get_all(_handle(shard.shard_id) for shard in shards)

    async def delete(self, node_addr: str, shard_ids: list[Any]) -> None:  # noqa: ARG002  AReaL's
        """Frees these shards at their owners."""
        await asyncio.to_thread(_cleared, shard_ids)


def enable() -> None:
    """From now on AReaL's own RTensor stores in, and fetches from, Tenure's store in this process.

    Call it in every process of the job, before the first tensor is stored: shards of both kinds
    cannot be told apart. Which tensors are kept after a fetch is still AReaL's to decide.

    Raises:
        InputError: If areal is not installed, or is one whose tensors are not where they were.

    >>> import tenure
    >>> tenure.integrations.areal.enable()  # doctest: +SKIP
    """
    _module().set_backend(Backend())


def disable() -> None:
    """AReaL's own choice again, for what is stored from now on."""
    _module().set_backend(None)


def _module() -> ModuleType:
    try:
        found = importlib.import_module(_MODULE)
    except ImportError as error:
        raise InputError(
            f"areal cannot be imported ({error}): pip install areal. Tested with "
            f"{' and '.join(TESTED)}"
        ) from error
    if not callable(getattr(found, "set_backend", None)):
        raise InputError(f"{_MODULE} has no set_backend: tested with {' and '.join(TESTED)}")
    return found


def _own_scope() -> tensors.Scope:
    """One for all processes: a shard that is fetched and stored again is the same shard."""
    global _scope
    joined = tensors.joining.current()
    with _lock:
        if _scope is None or _scope[0]() is not joined:
            _scope = weakref.ref(joined), tensors.scope(*_SCOPE)
            _named.clear()
        return _scope[1]


def _handle(shard_id: Any) -> Handle:
    with _lock:
        if (named := _named.get(shard_id)) is not None:
            return named
    return Handle.from_text(shard_id)


def _fetched(shard_ids: list[Any]) -> list[torch.Tensor]:
    """In one fetch, but for what is here, which is kept until it is cleared by whomever."""
    handles = [_handle(shard) for shard in shard_ids]
    wanted = list(dict.fromkeys(handles))
    local = dict(zip(wanted, tensors.get_all(wanted, keep=True), strict=True))
    return [local[handle] for handle in handles]


def _cleared(shard_ids: list[Any]) -> int:
    handles = [_handle(shard) for shard in shard_ids]
    with _lock:
        for shard in shard_ids:
            _named.pop(shard, None)
    freed, unreached = tensors.free(handles)
    for owner, why in unreached:
        warnings.warn(f"shards of {owner} were not cleared: {why}", ScopeWarning, stacklevel=3)
    return freed


def _found(obj: Any) -> list[RTensor]:
    found: list[RTensor] = []

    def see(item: RTensor) -> RTensor:
        found.append(item)
        return item

    _swapped(obj, RTensor, see)
    return found


def _swapped(obj: Any, kind: type, function: Callable[[Any], Any], *, trimmed: bool = False) -> Any:
    """RTensor's nests: dicts, lists and tuples. All else is as it was."""
    if isinstance(obj, kind):
        return function(obj)
    if isinstance(obj, dict):
        parts = _without_padding(obj) if trimmed else obj
        return {
            name: _swapped(part, kind, function, trimmed=trimmed) for name, part in parts.items()
        }
    if isinstance(obj, list | tuple):
        values = [_swapped(part, kind, function, trimmed=trimmed) for part in obj]
        if isinstance(obj, list):
            return values
        return obj._make(values) if hasattr(obj, "_make") else tuple(values)
    return obj


def _without_padding(batch: dict[Any, Any]) -> dict[Any, Any]:
    """Without the last columns, where no row of the attention mask has any token."""
    mask = batch.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.ndim < 2 or mask.numel() == 0:
        return batch
    rows, columns = mask.shape[0], mask.flatten(end_dim=-2).any(0).nonzero()
    used = int(columns[-1]) + 1 if len(columns) else 0
    if used == mask.shape[-1]:
        return batch

    def trim(part: Any) -> Any:
        fits = isinstance(part, torch.Tensor) and part.ndim >= 2 and part.shape[0] == rows
        return part[..., :used] if fits else part

    return {name: trim(part) for name, part in batch.items()}
