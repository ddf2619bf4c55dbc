"""Handle: a tensor that another process has, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tenure import _C
from tenure._inputs import need_text
from tenure.errors import AccessRefused, InputError, StoreTimeout
from tenure.store import fetching, joining

if TYPE_CHECKING:
    from tenure.store.fetching import Wire


class Owner(NamedTuple):
    """The process that an object lies in."""

    role: str
    rank: int


class Handle:
    """Says what a stored tensor is and who has it; keeps nothing alive.

    It travels through any RPC: pickled, as text, or as JSON. Two handles are equal if they are of
    the same object.

    >>> import json, tenure, torch
    >>> with tenure.store.scope("call") as scope:
    ...     handle = scope.put(torch.ones(2, dtype=torch.bfloat16))
    ...     sent = json.dumps(handle.to_json())
    ...     print(tenure.store.Handle.from_json(json.loads(sent)).get())
    tensor([1., 1.], dtype=torch.bfloat16)
    """

    __slots__ = ("_handle",)

    def __init__(self, handle: _C.StoreHandle) -> None:
        """Not for users: handles come from ``put`` and from what another process sent."""
        if not isinstance(handle, _C.StoreHandle):
            raise InputError("a handle comes from put(), from_text() or from_json()")
        self._handle = handle

    @property
    def job(self) -> str:
        """The job that it can be fetched in."""
        return self._handle.job

    @property
    def owner(self) -> Owner:
        """The process that has it: role and rank."""
        role, rank, _ = self._handle.owner
        return Owner(role, rank)

    @property
    def scope(self) -> tuple[str, str]:
        """Kind and key of the scope that owns it."""
        return self._handle.scope

    @property
    def bytes(self) -> int:
        """Of its elements."""
        return self._handle.bytes

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor that a fetch gives."""
        found: torch.dtype = getattr(torch, self._handle.dtype)
        return found

    @property
    def shape(self) -> torch.Size:
        """Of the tensor that a fetch gives."""
        return torch.Size(self._handle.shape)

    @property
    def stored(self) -> bool:
        """Whether there is anything to fetch."""
        return self._handle.stored

    @property
    def why(self) -> str:
        """Why nothing is stored: nobody collects it, it is no source's, its scope was closed."""
        return self._handle.why

    def get(
        self,
        rows: slice | None = None,
        *,
        into: torch.Tensor | None = None,
        device: torch.device | str | None = None,
        readonly: bool = False,
        more: bool = False,
        keep: bool = False,
        timeout: float | None = None,
        wire: Wire | None = None,
    ) -> torch.Tensor:
        """Fetches the tensor.

        On the owner's host a large one is mapped, which takes microseconds: it is read when it is
        used, and a write to it stays this process's own. Small ones, and those of other hosts, are
        copied.

        Args:
            rows: Only these of the first dimension.
            into: A tensor of the same dtype and shape to fetch into.
            device: Where the tensor shall be, if not on the CPU.
            readonly: Writes to the tensor raise. Some of torch's neighbours (numpy, DLPack, pickle)
                cannot read such a tensor. Not with ``into``, ``keep`` or another device.
            more: More of it will be fetched: this is not yet the fetch that was expected.
            keep: Keep it here until its scope closes; until then a fetch that says so gets the same
                tensor again.
            timeout: Seconds; by default those of ``join``.
            wire: ``"tcp"`` to take the network in any case.

        Raises:
            StaleHandle: It is gone; says who freed it, when and why.
            OwnerLost: Its owner is.
            StoreTimeout: Its owner does not answer.
            AccessRefused: It is for others.
            InputError: Rows or target do not fit, or there is no such device.
        """
        targets = [] if into is None else [into]
        options = {"device": device, "readonly": readonly, "more": more, "keep": keep}
        [tensor] = fetching.fetch([self], rows, into=targets, timeout=timeout, wire=wire, **options)
        return tensor

    async def get_async(
        self, rows: slice | None = None, *, into: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """As ``get``, without holding up the event loop.

        One that is cancelled has fetched nothing: it is not the fetch that was expected. A target
        may still be written to until the timeout.
        """
        targets = [] if into is None else [into]
        [tensor] = await fetching.fetch_async([self], rows, into=targets, **options)
        return tensor

    def free(self) -> bool:
        """Asks the owner to free it now. Returns whether it was still there.

        Raises:
            StoreTimeout: Its owner does not answer, and may have it still.
            AccessRefused: It is of another job.
        """
        freed, unreached = joining.current().free([self._handle])
        for _, why, how in unreached:
            if how == "foreign":
                raise AccessRefused(f"{self} {why}")
            if how != "gone":
                raise StoreTimeout(f"{self} could not be freed: {why}")
        return freed == 1

    def text(self) -> str:
        """One word of printable characters, from which ``from_text`` makes the handle again."""
        return self._handle.text()

    @classmethod
    def from_text(cls, text: str) -> Handle:
        """What ``text`` wrote. Raises InputError for anything else."""
        need_text(text, "a handle's text")
        return cls(_C.StoreHandle.from_text(text))

    def to_json(self) -> dict[str, Any]:
        """For ``json.dumps``. Only ``handle`` is read again; the rest is for people."""
        return {"handle": self.text(), "is": str(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Handle:
        """What ``to_json`` wrote. Raises InputError for anything else."""
        if not isinstance(data, Mapping) or "handle" not in data:
            raise InputError("a handle's JSON is an object with a 'handle' in it")
        return cls.from_text(data["handle"])

    def __eq__(self, other: object) -> bool:
        """Of the same object."""
        return isinstance(other, Handle) and self._handle == other._handle

    def __hash__(self) -> int:
        """By the object."""
        return hash(self._handle)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as bytes that hold no code."""
        return _decoded, (self._handle.encode(),)

    def __str__(self) -> str:
        """What it is, whose, and of which scope."""
        return str(self._handle)

    def __repr__(self) -> str:
        """The same in angle brackets."""
        return f"<tenure.store.Handle: {self}>"


def _decoded(encoded: bytes) -> Handle:
    return Handle(_C.StoreHandle.decode(encoded))
