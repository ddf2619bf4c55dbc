"""Weights & Biases, offline unless the environment says otherwise."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from tenure.telemetry.figures import Figures
from tenure.telemetry.sinks.naming import plain
from tenure.telemetry.sinks.sink import Names, need_folder, need_package

__all__ = ["WandB"]

_STEP = "tenure_step"


class WandB:
    """A run of W&B: the one that the program has already begun, else one of its own.

    Its own run is offline (``wandb sync FOLDER/wandb/offline-run-…`` sends it) unless ``mode``,
    ``WANDB_MODE`` or ``WANDB_API_KEY`` say otherwise. It has Tenure's figures alone: W&B's own
    readings of the machine and of the terminal are off.

    Which it is the first interval decides: a program may make its monitor before its run.

    In a run of the program's, each interval is a row of its own, and the figures are drawn over
    ``tenure_step``: the run's own count of steps belongs to the program.
    """

    name = "wandb"

    def __init__(
        self,
        folder: str | os.PathLike[str] = ".",
        *,
        project: str = "tenure",
        run_name: str | None = None,
        mode: str | None = None,
        names: Names = plain,
    ) -> None:
        """Keeps its files in ``FOLDER/wandb``.

        Args:
            folder: Where W&B keeps its files.
            project: As W&B has it; ``WANDB_PROJECT`` comes first.
            run_name: What W&B shows.
            mode: ``online`` or ``offline``, whatever the environment says.
            names: What figures are called.

        Raises:
            InputError: If wandb is not installed or the folder cannot be written to.
        """
        need_package("wandb", "wandb", self.name)
        self._folder = need_folder(Path(folder), f"the sink {self.name}")
        self._project = os.environ.get("WANDB_PROJECT") or project
        self._run_name = run_name
        self._mode = mode or os.environ.get("WANDB_MODE")
        if self._mode is None:
            self._mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        self._names = names
        self._run: Any = None
        self._is_ours = False
        self._drawn: set[str] = set()

    def open(self) -> None:
        """Imports the client."""
        importlib.import_module("wandb")

    def write(self, figures: Figures) -> None:
        """Logs the interval."""
        if self._run is None:
            self._begin()
        row = dict(self._names(figures))
        if self._is_ours:
            self._run.log(row, step=figures.step)
            return
        for name in row.keys() - self._drawn:
            self._run.define_metric(name, step_metric=_STEP)
            self._drawn.add(name)
        self._run.log({_STEP: figures.step, **row})

    def close(self) -> None:
        """Ends the run, if it is ours."""
        if self._run is not None and self._is_ours:
            self._run.finish()
        self._run = None

    # Not before there is something to write: a run of ours would be what the program's own call of
    # wandb.init() returns.
    def _begin(self) -> None:
        """Joins the program's run or begins one."""
        client: Any = importlib.import_module("wandb")
        self._run = client.run
        if self._run is not None:
            self._run.define_metric(_STEP, hidden=True)
            return
        self._is_ours = True
        self._run = client.init(
            project=self._project,
            name=self._run_name,
            dir=str(self._folder),
            mode=self._mode,
            settings=client.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True
            ),
        )
