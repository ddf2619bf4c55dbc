"""One owner of storage lifetime for PyTorch training.

>>> import tenure, torch
>>> with tenure.scope("step", 0):
...     with tenure.hold(torch.zeros(1024), "batch") as lease:
...         print(lease)
<tenure.Lease: user 'batch' (<doctest tenure[1]>:2) in scope 'step 0'>
"""

import importlib
from typing import TYPE_CHECKING, Any

from tenure import _guard

_guard.check()

from tenure._build import VERSION as __version__  # noqa: E402
from tenure._command import is_command  # noqa: E402
from tenure._paths import cmake_prefix_path  # noqa: E402

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

if TYPE_CHECKING or not is_command():
    # At once and not when first used: a process may fork while another thread imports.
    from tenure._api import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """The command line needs little of this, and torch takes seconds to import."""
        if name not in __all__:
            raise AttributeError(f"module 'tenure' has no attribute '{name}'")
        api = importlib.import_module("tenure._api")
        globals().update({offered: getattr(api, offered) for offered in api.__all__})
        return globals()[name]
