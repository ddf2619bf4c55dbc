"""What Tenure raises. One hierarchy, the same in C++ and in Python.

>>> import tenure, torch
>>> try:
...     tenure.hold(torch.empty(3, device="meta"), "batch")
... except tenure.LeaseError as error:
...     print(error)
this tensor cannot be leased: it is on the meta device and has no data
"""

from __future__ import annotations

__all__ = [
    "AccessRefused",
    "BudgetError",
    "CollectiveError",
    "InputError",
    "LeaseError",
    "MemoryAlert",
    "MutationError",
    "OwnerLost",
    "ReleaseError",
    "ScopeError",
    "ScopeWarning",
    "StaleHandle",
    "StoreTimeout",
    "TenureError",
    "UseAfterRelease",
]


class TenureError(RuntimeError):
    """Base of all that Tenure raises on its own account."""


class UseAfterRelease(TenureError):  # noqa: N818  the name under which ATen's errors begin, too
    """A released storage was used by one of Tenure's own calls.

    A read by PyTorch itself arrives as a plain RuntimeError whose text begins with
    ``UseAfterRelease:``, because ATen raises it.
    """


class ReleaseError(TenureError):
    """A storage that cannot be released or refilled."""


class ScopeError(TenureError):
    """A scope closed out of order, twice, by another thread, or with leases left in it."""


class LeaseError(TenureError):
    """A tensor that cannot be leased, or a lease used after its release."""


class MutationError(TenureError):
    """A storage was written to while someone relied on its content."""


class BudgetError(TenureError):
    """A limit on memory that cannot be kept; the message says what the least is."""


class CollectiveError(TenureError):
    """Ranks that work together did not: one ended, hangs, or does something else."""


class InputError(TenureError, ValueError):
    """An argument that cannot mean anything."""


class MemoryAlert(TenureError):  # noqa: N818  it is a run that is stopped on purpose
    """A monitor's rule whose action is to stop the run is broken."""


class StaleHandle(TenureError):  # noqa: N818  it is the handle that is stale
    """A handle whose object is gone; the message says who freed it, when and why."""


class OwnerLost(TenureError):  # noqa: N818  it is the owner that is lost
    """The process that owns a stored object is gone, or another one has taken its place."""


class StoreTimeout(TenureError, TimeoutError):  # noqa: N818  as TimeoutError is said in full
    """A process of the store did not answer in time."""


class AccessRefused(TenureError, PermissionError):  # noqa: N818  it says what happened
    """Not let in: another job, user or secret, or not one of an object's collectors."""


class ScopeWarning(UserWarning):
    """A scope with ``on_close="report"`` closed with leases left in it."""
