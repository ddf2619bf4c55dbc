"""Leases: the references that Tenure holds, and the ledger that adds them up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from tenure import _C, _inputs, _site
from tenure._C import Lease, Totals
from tenure.errors import InputError
from tenure.scopes import Scope
from tenure.storages import need_tensor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Lease", "Leases", "Ledger", "Owner", "Totals", "hold", "leases", "ledger"]


class Owner(NamedTuple):
    """Who keeps a storage alive, and why."""

    kind: str
    name: str
    site: str = ""

    def __str__(self) -> str:
        """``activation 'layers.3.mlp' (train.py:41)``."""
        return f"{self.kind} '{self.name}'" + (f" ({self.site})" if self.site else "")


def hold(
    tensor: torch.Tensor, owner: str | Owner, *, kind: str = "user", scope: Scope | None = None
) -> Lease:
    """Keeps a tensor's storage alive until the lease is released.

    It holds the storage and nothing else of the tensor: neither its autograd graph nor its
    gradient. Shared storage counts once, however many leases hold it.

    Args:
        tensor: Any dense tensor with data.
        owner: Who holds it, as reports will say. A name, or an :class:`Owner` with its own kind.
        kind: What the storage is to its owner: ``parameter``, ``gradient``, ``optimizer``,
            ``activation``, ``host_copy``, ``receive_buffer``, ``communication``,
            ``stored_object``, ``workspace`` or ``user``.
        scope: The scope that the lease belongs to, if not the current one.

    Returns:
        The lease. Release it with ``release()``, use it as a `with` block, or let it go: when it is
        collected it releases itself.

    Example:
        >>> import tenure, torch
        >>> batch = torch.zeros(256)
        >>> with tenure.hold(batch, "loader", kind="activation") as lease:
        ...     print(lease.kind, lease.owner, lease.nbytes, lease.scope)
        activation loader 1024 process
        >>> lease.held
        False
    """
    need_tensor(tensor, "hold")
    if isinstance(owner, str):
        owner = Owner(kind, owner)
    if not isinstance(owner, Owner):
        raise InputError(
            f"tenure.hold() needs a name or a tenure.Owner and got {type(owner).__name__}"
        )
    if scope is not None and not isinstance(scope, Scope):
        raise InputError(f"tenure.hold() needs a tenure.Scope and got {type(scope).__name__}")
    _inputs.need_text(owner.kind, "owner kind")
    _inputs.need_text(owner.name, "owner name")
    _inputs.need_text(owner.site, "site of the owner")
    site = owner.site or _site.caller()
    return _C.hold(tensor, owner.kind, owner.name, site, None if scope is None else scope.id)


@dataclass(frozen=True)
class _Row:
    """One lease of a :class:`Leases` table."""

    storage: int
    bytes: int
    owner: Owner
    scope: str
    device: str
    age: float


class Leases:
    """All leases at one moment, as columns: entry i of each describes lease i.

    The arrays are read-only views of memory that C++ filled: a million leases are no million
    Python objects. Iterate, or call :meth:`rows`, where there are few.
    """

    def __init__(self, snapshot: _C.Snapshot) -> None:
        """Use :func:`leases`."""
        self._snapshot = snapshot

    def __len__(self) -> int:
        """How many leases there are."""
        return len(self._snapshot)

    @property
    def storage(self) -> npt.NDArray[np.uint64]:
        """Ids of the storages. Leases on one storage share an id; no id is used again."""
        return self._snapshot.storage

    @property
    def bytes(self) -> npt.NDArray[np.uint64]:
        """Bytes that the storages had at that moment; 0 while a storage's data is released."""
        return self._snapshot.bytes

    @property
    def owner(self) -> npt.NDArray[np.uint32]:
        """Ids of the owners, for :meth:`owner_of`."""
        return self._snapshot.owner

    @property
    def scope(self) -> npt.NDArray[np.uint64]:
        """Ids of the scopes, for :meth:`scope_of`."""
        return self._snapshot.scope

    @property
    def device(self) -> npt.NDArray[np.uint16]:
        """Devices: the type in the high byte, the index in the low one."""
        return self._snapshot.device

    @property
    def age(self) -> npt.NDArray[np.float64]:
        """Seconds since each lease was taken."""
        return self._snapshot.age

    @staticmethod
    def owner_of(owner_id: int) -> Owner:
        """The owner of that id."""
        number = _inputs.need_integer(owner_id, "owner id")
        if not 0 <= number < 2**32:
            raise InputError("no owner has that id: use one of the `owner` column")
        return Owner(*_C.owner_of(number))

    @staticmethod
    def scope_of(scope_id: int) -> str:
        """The path of the scope with that id: ``epoch 1 / step 12``."""
        number = _inputs.need_integer(scope_id, "scope id")
        if not 0 <= number < 2**64:
            raise InputError("no scope has that id: use one of the `scope` column")
        return _C.scope_path(number)

    def by_owner(self) -> dict[Owner, Totals]:
        """Bytes and leases of each owner, largest first. A storage counts once for an owner."""
        return {self.owner_of(owner): totals for owner, totals in self._snapshot.by_owner()}

    def by_scope(self) -> dict[str, Totals]:
        """Bytes and leases of each scope, largest first. A storage counts once for a scope."""
        return dict(self._snapshot.by_scope())

    def rows(self) -> Iterator[_Row]:
        """The leases one by one."""
        columns = zip(
            self.storage.tolist(),
            self.bytes.tolist(),
            self.owner.tolist(),
            self.scope.tolist(),
            self.device.tolist(),
            self.age.tolist(),
            strict=True,
        )
        for storage, size, owner, scope, device, age in columns:
            yield _Row(
                storage,
                size,
                self.owner_of(owner),
                self.scope_of(scope),
                _C.device_from_tag(device),
                age,
            )

    def __iter__(self) -> Iterator[_Row]:
        """As :meth:`rows`."""
        return self.rows()

    def __repr__(self) -> str:
        """Says how many there are."""
        return f"<tenure.Leases: {len(self)} leases, {self._snapshot.bytes_once()} bytes>"


class Ledger:
    """Who holds what, added up. Made by :func:`ledger`; always shows the present.

    Figures are exact whenever no call is in flight on another thread, and a consistent cut
    otherwise. Of a storage that PyTorch resized (``resize_``) while it is leased, totals count the
    size it had until it is leased again or :func:`leases` is called.
    """

    @property
    def bytes(self) -> int:
        """Bytes that Tenure keeps alive. Shared storage counts once."""
        return _C.totals().all.bytes

    @property
    def leases(self) -> int:
        """How many leases there are."""
        return _C.totals().all.leases

    @property
    def peak(self) -> int:
        """Most bytes since the interval began."""
        return _C.totals().all.peak

    def by_kind(self) -> dict[str, Totals]:
        """Bytes, leases and peak of each kind of owner."""
        return _C.totals().by_kind

    def by_owner(self) -> dict[Owner, Totals]:
        """Bytes and leases of each owner, largest first."""
        return leases().by_owner()

    def by_scope(self) -> dict[str, Totals]:
        """Bytes and leases of each scope, largest first."""
        return leases().by_scope()

    def snapshot(self) -> Leases:
        """All leases now, as columns."""
        return leases()

    def start_interval(self) -> dict[str, Totals]:
        """Starts the peaks anew.

        Returns:
            The totals of each kind, and of ``all``, with the peaks of the interval that ended.
        """
        ended = _C.start_interval()
        return {"all": ended.all, **ended.by_kind}

    def __str__(self) -> str:
        """A table by kind, for terminals."""
        totals = _C.totals()
        lines = [f"{'kind':<16}{'bytes':>16}{'leases':>10}{'peak':>16}"]
        lines += [
            f"{kind:<16}{row.bytes:>16,}{row.leases:>10,}{row.peak:>16,}"
            for kind, row in totals.by_kind.items()
            if row.peak or row.leases
        ]
        every = totals.all
        lines.append(f"{'all':<16}{every.bytes:>16,}{every.leases:>10,}{every.peak:>16,}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """Says how much is held."""
        every = _C.totals().all
        return f"<tenure.Ledger: {every.leases} leases, {every.bytes} bytes, peak {every.peak}>"


def leases() -> Leases:
    """All leases now.

    Example:
        >>> import tenure, torch
        >>> held = [tenure.hold(torch.zeros(256), "cache") for _ in range(3)]
        >>> table = tenure.leases()
        >>> print(len(table), table.bytes.sum())
        3 3072
        >>> held.clear()
    """
    return Leases(_C.snapshot())


def ledger() -> Ledger:
    """The ledger of this process.

    Example:
        >>> import tenure, torch
        >>> weights = torch.zeros(1024)
        >>> a, b = tenure.hold(weights, "model"), tenure.hold(weights.view(32, 32), "view of it")
        >>> tenure.ledger().bytes, tenure.ledger().leases
        (4096, 2)
        >>> del a, b
        >>> tenure.ledger().bytes
        0
    """
    return Ledger()
