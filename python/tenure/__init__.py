"""One owner of storage lifetime for PyTorch training.

>>> import tenure, torch
>>> with tenure.scope("step", 0):
...     with tenure.hold(torch.zeros(1024), "batch") as lease:
...         print(lease)
<tenure.Lease: user 'batch' (<doctest tenure[1]>:2) in scope 'step 0'>
"""

from tenure import _guard

_guard.check()

import torch as _torch  # noqa: E402, F401  the extension needs torch's libraries loaded

from tenure._build import VERSION as __version__  # noqa: E402
from tenure._paths import cmake_prefix_path  # noqa: E402
from tenure.clock import on_step, step, steps  # noqa: E402
from tenure.errors import (  # noqa: E402
    InputError,
    LeaseError,
    MutationError,
    ReleaseError,
    ScopeError,
    ScopeWarning,
    TenureError,
    UseAfterRelease,
)
from tenure.inspect.explain import Explanation, explain  # noqa: E402
from tenure.inspect.flat import MemoryGrows, assert_flat  # noqa: E402
from tenure.inspect.session import Session, watch  # noqa: E402
from tenure.leases import Lease, Leases, Ledger, Owner, Totals, hold, leases, ledger  # noqa: E402
from tenure.samples import Sample, refresh_samples, sample  # noqa: E402
from tenure.scopes import Scope, scope  # noqa: E402
from tenure.storages import (  # noqa: E402
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
    "__version__",
    "assert_flat",
    "cmake_prefix_path",
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
