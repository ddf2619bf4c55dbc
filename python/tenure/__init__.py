"""One owner of storage lifetime for PyTorch training.

>>> import tenure, torch
>>> with tenure.scope("step", 0):
...     with tenure.hold(torch.zeros(1024), "batch") as lease:
...         print(lease)
<tenure.Lease: user 'batch' (<doctest tenure[1]>:2) in scope 'step 0'>
"""

from typing import TYPE_CHECKING

from tenure import _guard
from tenure._command import is_command

try:
    _guard.check()
except ImportError as error:
    if is_command():
        raise SystemExit(f"tenure: {error}") from None
    raise

from tenure._build import VERSION as __version__
from tenure._paths import cmake_prefix_path

__all__ = [
    "AccessRefused",
    "BudgetError",
    "Census",
    "CollectiveError",
    "Explanation",
    "Fence",
    "Fit",
    "FitPlan",
    "Frontier",
    "InputError",
    "Lease",
    "LeaseError",
    "Leases",
    "Ledger",
    "MemoryAlert",
    "MemoryGrows",
    "Monitor",
    "MutationError",
    "Offload",
    "OffloadStats",
    "Owner",
    "OwnerLost",
    "Pipeline",
    "ReleaseError",
    "Sample",
    "Scope",
    "ScopeError",
    "ScopeWarning",
    "Session",
    "StaleHandle",
    "StorageRef",
    "StoreTimeout",
    "TenureError",
    "Totals",
    "UseAfterRelease",
    "__version__",
    "assert_flat",
    "census",
    "cmake_prefix_path",
    "coordinates",
    "explain",
    "hold",
    "integrations",
    "is_released",
    "leases",
    "ledger",
    "on_step",
    "pipelining",
    "refill",
    "refresh_samples",
    "release",
    "sample",
    "scope",
    "shard",
    "sharding",
    "step",
    "steps",
    "store",
    "telemetry",
    "watch",
]

# At once and not when first used: a process may fork while another thread imports. The command
# line takes what it needs from the modules themselves, for torch takes seconds to import.
if TYPE_CHECKING or not is_command():
    from tenure import integrations, pipelining, sharding, store, telemetry
    from tenure.clock import on_step, step, steps
    from tenure.errors import (
        AccessRefused,
        BudgetError,
        CollectiveError,
        InputError,
        LeaseError,
        MemoryAlert,
        MutationError,
        OwnerLost,
        ReleaseError,
        ScopeError,
        ScopeWarning,
        StaleHandle,
        StoreTimeout,
        TenureError,
        UseAfterRelease,
    )
    from tenure.fit import Fit, FitPlan, Frontier
    from tenure.inspect.census import Census, census
    from tenure.inspect.coordinates import coordinates
    from tenure.inspect.explain import Explanation, explain
    from tenure.inspect.flat import MemoryGrows, assert_flat
    from tenure.inspect.session import Session, watch
    from tenure.leases import Lease, Leases, Ledger, Owner, Totals, hold, leases, ledger
    from tenure.offload import Offload, OffloadStats
    from tenure.pipelining import Pipeline
    from tenure.samples import Sample, refresh_samples, sample
    from tenure.scopes import Scope, scope
    from tenure.sharding import shard
    from tenure.storages import (
        Fence,
        StorageRef,
        is_released,
        refill,
        release,
    )
    from tenure.telemetry import Monitor

# `tenure run` watches a program from when it imports torch, which may have been just now.
globals().pop("when_ready", lambda: None)()
