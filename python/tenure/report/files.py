"""Files that are there when they are complete, and not before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["whole"]


@contextmanager
def whole(path: Path, mode: str = "w") -> Iterator[Any]:
    """A file to write, put in its place at the end; its owner alone may read it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.touch(0o600)
        with beside.open(mode) as file:
            yield file
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
