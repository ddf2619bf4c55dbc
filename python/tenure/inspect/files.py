"""Files that are there when they are complete, and not before."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tenure.errors import InputError

__all__ = ["whole"]


@contextmanager
def whole(path: Path, mode: str = "w", inputs: Iterable[Path] = ()) -> Iterator[Any]:
    """A file to write, put in its place at the end; its owner alone may read it.

    What is a link is followed, and a device or a pipe is written to as it is.

    Args:
        path: The file.
        mode: As of `open`.
        inputs: Files that it is made from, which it may not replace.

    Raises:
        InputError: It is a folder, or one of the inputs.
        OSError: It cannot be written.
    """
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder: give the name of a file")
    if path.exists() and any(path.samefile(one) for one in inputs if one.exists()):
        raise InputError(f"cannot write {path}: it is a recording that is read: give another file")
    if path.exists() and not path.is_file():
        with path.open(mode) as file:
            yield file
        return
    target = path.resolve()
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.touch(0o600)
        with beside.open(mode) as file:
            yield file
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
