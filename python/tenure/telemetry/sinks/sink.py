"""What a sink is, and what is asked of one before training starts."""

from __future__ import annotations

import importlib.util
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from tenure.errors import InputError
from tenure.telemetry.figures import Figures

__all__ = ["Names", "Sink", "need_folder", "need_package"]

Names = Callable[[Figures], Mapping[str, int | float]]
"""What a logger is given of an interval: figures by the names that its dashboards know."""


@runtime_checkable
class Sink(Protocol):
    """Where the figures of each interval go.

    A sink's methods are called by one thread of its own, one after the other, never by the thread
    that trains: they may be slow, and they may raise. Its constructor is called before training
    starts, and refuses with InputError what could not work.
    """

    @property
    def name(self) -> str:
        """For messages, ``jsonl``."""
        ...

    def open(self) -> None:
        """Before the first write. The place to import a client, which may take seconds."""
        ...

    def write(self, figures: Figures) -> None:
        """One interval. What an exception says is told if the sink is dropped for it."""
        ...

    def close(self) -> None:
        """After the last write, also where `open` or a write has failed."""
        ...


def need_package(module: str, package: str, sink: str) -> None:
    """Raises InputError unless `module` is installed; it is not imported, which takes long."""
    if sys.modules.get(module) is not None or importlib.util.find_spec(module) is not None:
        return
    raise InputError(
        f"the sink {sink} needs {package}, which is not installed: run "
        f"{shlex.quote(sys.executable)} -m pip install {package}"
    )


def need_folder(folder: Path, who: str) -> Path:
    """Makes the folder where it is not there; raises InputError unless files can be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"{who} cannot write to {folder} ({error.strerror}): give it another folder"
        ) from None
    return folder
