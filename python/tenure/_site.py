"""Where in the user's program a call was made."""

from __future__ import annotations

import functools
import os
import sys

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep  # noqa: PTH100, PTH120  at each import


def caller() -> str:
    """``file:line`` of whoever called the function that calls this."""
    frame = sys._getframe(2)
    return f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno}"


def caller_outside() -> str:
    """``file:line`` of the nearest call that is not made by this package itself."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno}"


@functools.lru_cache(maxsize=4096)
def _shown(filename: str) -> str:
    """The file as a person would name it: from the working directory, where it lies below it."""
    try:
        shown = os.path.relpath(filename)
    except (OSError, ValueError):  # the working directory is gone
        shown = filename
    if shown.startswith(".."):
        shown = filename
    return shown.encode(errors="replace").decode()  # a file's name need not be UTF-8
