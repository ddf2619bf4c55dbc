"""Where figures go: the loggers that people have, each with its own client.

>>> import tenure
>>> monitor = tenure.Monitor(sinks=["console", Prometheus(port=9500)])  # doctest: +SKIP

A name makes a sink with what suits most; the classes take options. Clients are imported when a
sink is opened, on a thread of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

from tenure.errors import InputError
from tenure.telemetry.figures import Figures
from tenure.telemetry.sinks.comet import Comet
from tenure.telemetry.sinks.console import Console
from tenure.telemetry.sinks.jsonl import JsonLines
from tenure.telemetry.sinks.mlflow import MLflow
from tenure.telemetry.sinks.naming import plain
from tenure.telemetry.sinks.prometheus import Prometheus
from tenure.telemetry.sinks.sink import Names, Sink
from tenure.telemetry.sinks.tensorboard import TensorBoard
from tenure.telemetry.sinks.wandb import WandB

__all__ = [
    "NAMES",
    "Comet",
    "Console",
    "JsonLines",
    "MLflow",
    "Names",
    "Prometheus",
    "Sink",
    "Spec",
    "TensorBoard",
    "WandB",
    "made",
    "plain",
]

NAMES = ("console", "tensorboard", "wandb", "mlflow", "comet", "prometheus", "jsonl")

Spec = str | Sink | Callable[[Figures], None]
"""One sink as users give it: a name, a sink, or a function that is called with each interval."""


def made(
    spec: Spec | Sequence[Spec],
    *,
    folder: Path,
    run_name: str,
    names: Names | None = None,
) -> list[Sink]:
    """The sinks that `spec` asks for.

    Args:
        spec: One or several, see `Spec`.
        folder: Where those that are given by name keep their files. Made where needed.
        run_name: What loggers call the run.
        names: What loggers that are given by name call the figures; None for `plain`.

    Raises:
        InputError: For a name that is not known, a package that is not installed, a folder that
            cannot be written to, a port that is in use.
    """
    specs = [spec] if isinstance(spec, str) or not isinstance(spec, Sequence) else spec
    found: list[Sink] = []
    try:
        for one in specs:
            found.append(_sink(one, folder, run_name, names))  # noqa: PERF401  see below
    except InputError:
        for one, sink in zip(specs, found, strict=False):
            if isinstance(one, str):  # a port that is held already
                sink.close()
        raise
    return found


class _Called:
    """A user's function as a sink."""

    def __init__(self, function: Callable[[Figures], None]) -> None:
        self.name = str(getattr(function, "__name__", type(function).__name__))
        self._function = function

    def open(self) -> None: ...

    def write(self, figures: Figures) -> None:
        """Gives it figures of its own, which it may change."""
        self._function(copy.deepcopy(figures))

    def close(self) -> None: ...


def _sink(spec: Spec, folder: Path, run_name: str, names: Names | None) -> Sink:
    if isinstance(spec, str):
        return _named(spec, folder, run_name, names)
    if isinstance(spec, type):
        raise InputError(f"the sink {spec.__name__} is a class: give one of it, {spec.__name__}()")
    if isinstance(spec, Sink):
        return spec
    if callable(spec):
        return _Called(spec)
    raise InputError(
        f"a sink is one of {', '.join(NAMES)}, a function, or an object with name, open(), "
        f"write() and close(), and not a {type(spec).__name__}"
    )


def _named(name: str, folder: Path, run_name: str, names: Names | None) -> Sink:
    label = run_name.replace("/", "-") or "run"
    named = plain if names is None else names
    makers: dict[str, Callable[[], Sink]] = {
        "console": Console,
        "tensorboard": lambda: TensorBoard(folder / "tensorboard" / label, names=named),
        "wandb": lambda: WandB(folder, run_name=run_name, names=named),
        "mlflow": lambda: MLflow(folder=folder / "mlflow", run_name=run_name, names=named),
        "comet": lambda: Comet(folder / "comet", run_name=run_name, names=named),
        "prometheus": lambda: Prometheus(run_name=run_name),
        "jsonl": lambda: JsonLines(folder / "memory.jsonl", names=names),
    }
    if name not in makers:
        raise InputError(f"there is no sink {name!r}: there are {', '.join(NAMES)}")
    return makers[name]()
