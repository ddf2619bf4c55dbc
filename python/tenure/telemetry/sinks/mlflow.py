"""MLflow: a tracking server, or a store of its own."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

from tenure.errors import InputError
from tenure.telemetry.compat import megatron_bridge, megatron_bridge_in_mlflow
from tenure.telemetry.figures import Figures
from tenure.telemetry.sinks.naming import plain
from tenure.telemetry.sinks.sink import Names, need_folder, need_package

__all__ = ["MLflow"]

_BATCH = 1000  # metrics, the most that MLflow takes at once


class MLflow:
    """A run in MLflow, at the server given, at ``MLFLOW_TRACKING_URI``, or in a local store.

    The local store is an SQLite file, shown by ``mlflow ui --backend-store-uri``; MLflow takes
    some 15 seconds to make one. ``mlflow-skinny`` has none, and needs a server.

    It goes through ``MlflowClient``, so that the program's own active run and its tracking URI are
    left alone. ``run_id`` or ``MLFLOW_RUN_ID`` add the figures to a run that is there; that run is
    left open.
    """

    name = "mlflow"

    def __init__(
        self,
        uri: str | None = None,
        *,
        folder: str | os.PathLike[str] = "mlflow",
        experiment: str = "tenure",
        run_name: str | None = None,
        run_id: str | None = None,
        names: Names = plain,
    ) -> None:
        """Says where, and in which run.

        Args:
            uri: Of the tracking server or store, ``http://127.0.0.1:5000``.
            folder: Of the local store, where there is no other.
            experiment: The experiment's name; ``MLFLOW_EXPERIMENT_NAME`` comes first.
            run_name: What MLflow shows.
            run_id: A run that is there.
            names: What figures are called.

        Raises:
            InputError: If mlflow is not installed, is ``mlflow-skinny`` without a server, or the
                local store cannot be written to.
        """
        need_package("mlflow", "mlflow", self.name)
        self._uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or self._local(Path(folder))
        self._experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment
        self._run_name = run_name
        self._run_id = run_id or os.environ.get("MLFLOW_RUN_ID")
        self._is_ours = self._run_id is None
        self._names = megatron_bridge_in_mlflow if names is megatron_bridge else names
        self._client: Any = None
        self._metric: Any = None

    @property
    def uri(self) -> str:
        """Of the server or the store."""
        return self._uri

    def open(self) -> None:
        """Finds the experiment and begins a run."""
        client: Any = importlib.import_module("mlflow")
        self._metric = client.entities.Metric
        self._client = client.MlflowClient(tracking_uri=self._uri)
        if self._is_ours:
            run = self._client.create_run(self._experiment_id(), run_name=self._run_name)
            self._run_id = run.info.run_id

    def write(self, figures: Figures) -> None:
        """Logs the interval."""
        when = round(figures.time * 1000)
        metrics = [
            self._metric(name, value, when, figures.step)
            for name, value in self._names(figures).items()
        ]
        for first in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._run_id, metrics[first : first + _BATCH], synchronous=True)

    def close(self) -> None:
        """Ends the run, if it is ours."""
        if self._client is not None and self._is_ours and self._run_id is not None:
            self._client.set_terminated(self._run_id)
        self._client = None

    def _local(self, folder: Path) -> str:
        if importlib.util.find_spec("sqlalchemy") is None:
            raise InputError(
                "mlflow-skinny keeps nothing by itself: set MLFLOW_TRACKING_URI to a server, or "
                "pip install mlflow"
            )
        folder = need_folder(folder, f"the sink {self.name}").resolve()
        if any(c in str(folder) for c in "?#%"):
            raise InputError(f"the sink mlflow cannot name {folder} in a URI: give it another one")
        return f"sqlite:///{folder}/mlflow.db"

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        if found is not None:
            return str(found.experiment_id)
        # Not where MLflow would put it: beside the program, whatever its store.
        is_local = self._uri.startswith("sqlite:///")
        folder = Path(self._uri.removeprefix("sqlite:///")).parent / "artifacts"
        place = folder.as_uri() if is_local else None
        return str(self._client.create_experiment(self._experiment, artifact_location=place))
