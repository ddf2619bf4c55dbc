"""All that `tenure` offers, from the modules where it is defined.

Imports torch, which takes seconds: the command line starts without it.
"""

from __future__ import annotations

from tenure.clock import on_step, step, steps
from tenure.errors import (
    InputError,
    LeaseError,
    MutationError,
    ReleaseError,
    ScopeError,
    ScopeWarning,
    TenureError,
    UseAfterRelease,
)
from tenure.inspect.explain import Explanation, explain
from tenure.inspect.flat import MemoryGrows, assert_flat
from tenure.inspect.session import Session, watch
from tenure.leases import Lease, Leases, Ledger, Owner, Totals, hold, leases, ledger
from tenure.samples import Sample, refresh_samples, sample
from tenure.scopes import Scope, scope
from tenure.storages import (
    Fence,
    StorageRef,
    is_released,
    refill,
    release,
)

__all__ = [
    "Explanation",
    "Fence",
    "InputError",
    "Lease",
    "LeaseError",
    "Leases",
    "Ledger",
    "MemoryGrows",
    "MutationError",
    "Owner",
    "ReleaseError",
    "Sample",
    "Scope",
    "ScopeError",
    "ScopeWarning",
    "Session",
    "StorageRef",
    "TenureError",
    "Totals",
    "UseAfterRelease",
    "assert_flat",
    "explain",
    "hold",
    "is_released",
    "leases",
    "ledger",
    "on_step",
    "refill",
    "refresh_samples",
    "release",
    "sample",
    "scope",
    "step",
    "steps",
    "watch",
]
