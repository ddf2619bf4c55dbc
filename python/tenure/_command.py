"""Whether this process is the `tenure` command, which starts without torch."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

__all__ = ["is_command"]


@functools.cache  # as it was when the package was imported: Python changes argv before it runs
def is_command() -> bool:
    """Whether the program is `tenure` or `python -m tenure`."""
    program = sys.argv[0] if getattr(sys, "argv", None) else ""
    if program == "-m":  # while Python looks for the module that it is to run
        given = sys.orig_argv
        return "-m" in given and given[given.index("-m") + 1 :][:1] == ["tenure"]
    return Path(program).name == "tenure"
