"""Comet, offline where there is no API key."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from tenure.telemetry.figures import Figures
from tenure.telemetry.sinks.naming import plain
from tenure.telemetry.sinks.sink import Names, need_folder, need_package

__all__ = ["Comet"]


class Comet:
    """An experiment of Comet: the one that the program has already begun, else one of its own.

    Its own is offline (``comet upload FOLDER/….zip`` sends it) unless Comet finds an API key in
    its settings. Which it is the first interval decides: a program may make its monitor before its
    experiment. Its own has Tenure's figures alone: what Comet reads by itself of the code, the
    terminal and the machine is off.
    """

    name = "comet"

    def __init__(
        self,
        folder: str | os.PathLike[str] = ".cometml-runs",
        *,
        project: str | None = None,
        run_name: str | None = None,
        names: Names = plain,
    ) -> None:
        """Keeps an offline experiment's archive in `folder`.

        Args:
            folder: For the archive.
            project: As Comet has it; None for ``COMET_PROJECT_NAME`` or Comet's own.
            run_name: What Comet shows.
            names: What figures are called.

        Raises:
            InputError: If comet_ml is not installed or the folder cannot be written to.
        """
        need_package("comet_ml", "comet_ml", self.name)
        self._folder = need_folder(Path(folder), f"the sink {self.name}")
        self._project = project
        self._run_name = run_name
        self._names = names
        self._experiment: Any = None
        self._is_ours = False

    def open(self) -> None:
        """Imports the client."""
        importlib.import_module("comet_ml")

    def write(self, figures: Figures) -> None:
        """Logs the interval."""
        if self._experiment is None:
            self._begin()
        self._experiment.log_metrics(dict(self._names(figures)), step=figures.step)

    def close(self) -> None:
        """Ends the experiment, if it is ours."""
        if self._experiment is not None and self._is_ours:
            self._experiment.end()
        self._experiment = None

    def _begin(self) -> None:
        """Joins the program's experiment or begins one."""
        client: Any = importlib.import_module("comet_ml")
        self._experiment = client.get_running_experiment()
        if self._experiment is not None:
            return
        nothing: dict[str, Any] = {
            "project_name": self._project,
            "log_code": False,
            "log_graph": False,
            "parse_args": False,
            "auto_param_logging": False,
            "auto_metric_logging": False,
            "auto_output_logging": False,
            "log_env_details": False,
            "log_git_metadata": False,
            "log_git_patch": False,
            "display_summary_level": 0,
        }
        self._is_ours = True
        if client.get_config("comet.api_key"):
            self._experiment = client.Experiment(**nothing)
        else:
            self._experiment = client.OfflineExperiment(
                offline_directory=str(self._folder), **nothing
            )
        if self._run_name is not None:
            self._experiment.set_name(self._run_name)
