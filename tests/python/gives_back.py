"""An environment in which malloc gives back what is freed.

By default glibc's keeps up to 64 MB for later once something of that size was freed: nobody holds
it, and a test that counts a process's bytes would take it for held. On aarch64 torch brings an
allocator of its own, which keeps less.
"""

from __future__ import annotations

__all__ = ["GIVES_BACK"]

GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
