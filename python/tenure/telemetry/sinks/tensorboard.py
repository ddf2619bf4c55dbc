"""TensorBoard: scalars, and a picture of which rank is how full."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from tenure.telemetry.figures import Figures
from tenure.telemetry.sinks import heat_map
from tenure.telemetry.sinks.naming import plain
from tenure.telemetry.sinks.sink import Names, need_folder, need_package

__all__ = ["TensorBoard"]


class TensorBoard:
    """Event files, through ``torch.utils.tensorboard``. Shown with ``tensorboard --logdir``.

    Each interval is a scalar for each name, in single precision as TensorBoard has them; one that
    has the rows of all ranks is also the image ``memory/ranks``, and one that broke rules has them
    as the text ``memory/alerts``.
    """

    name = "tensorboard"

    def __init__(self, folder: str | os.PathLike[str], *, names: Names = plain) -> None:
        """Writes to `folder`, which TensorBoard shows as a run.

        Raises:
            InputError: If tensorboard is not installed or the folder cannot be written to.
        """
        need_package("tensorboard", "tensorboard", self.name)
        self._folder = need_folder(Path(folder), f"the sink {self.name}")
        self._names = names
        self._writer: Any = None
        self._summary: Any = None

    def open(self) -> None:
        """Makes the event file."""
        client: Any = importlib.import_module("torch.utils.tensorboard")
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer = client.SummaryWriter(str(self._folder))

    def write(self, figures: Figures) -> None:
        """Adds the interval, and flushes: that is also when the client tells of a full disk."""
        at: dict[str, Any] = {"global_step": figures.step, "walltime": figures.time}
        # One event of all: add_scalar() for each holds the interpreter's lock 8 times as long.
        named = self._names(figures).items()
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in named]
        self._writer.file_writer.add_summary(self._summary(value=values), **at)
        if (picture := heat_map.drawn(figures)) is not None:
            self._writer.add_image("memory/ranks", picture, dataformats="HWC", **at)
        if figures.alerts:
            self._writer.add_text("memory/alerts", "\n\n".join(figures.alerts), **at)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()
