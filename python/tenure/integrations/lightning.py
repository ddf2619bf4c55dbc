"""Telemetry for the ``Trainer`` of Lightning."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from tenure.errors import InputError
from tenure.integrations.monitoring import Monitored, need_monitor

__all__ = ["monitor_callback"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def monitor_callback(monitor: Monitored) -> Any:
    """A ``Callback`` with which the trainer drives a `tenure.Monitor`.

    The monitor steps after each batch at which an optimizer stepped, so once for several that are
    accumulated, and is closed when training ends, also by an exception.

    Args:
        monitor: The monitor, not yet closed.

    Raises:
        InputError: If Lightning cannot be imported, or for what is no monitor.

    Example:
        >>> import tenure
        >>> monitor = tenure.Monitor(sinks=["console"])  # doctest: +SKIP
        >>> callback = tenure.integrations.lightning.monitor_callback(monitor)  # doctest: +SKIP
        >>> trainer = lightning.Trainer(..., callbacks=[callback])  # doctest: +SKIP
    """
    need_monitor(monitor)

    class MonitorCallback(_base()):  # type: ignore[misc]
        steps: int | None = None

        def on_train_start(self, trainer: Any, *_: object) -> None:
            self.steps = trainer.global_step

        def on_train_batch_end(self, trainer: Any, *_: object) -> None:
            if trainer.global_step != self.steps:
                self.steps = trainer.global_step
                monitor.step()

        def on_train_end(self, *_: object) -> None:
            monitor.close()

        def on_exception(self, _trainer: object, _module: object, error: BaseException) -> None:
            if not isinstance(error, KeyboardInterrupt):  # its SIGTERM is a SystemExit
                monitor.failed(error)
            monitor.close()

    return MonitorCallback()


def _base() -> Any:
    """Of the package that the program uses: its trainer does not know the other's callbacks."""
    used = [name for name in _PACKAGES if name in sys.modules]
    for name in used or _PACKAGES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return importlib.import_module(name).Callback
    raise InputError("Lightning is not installed: pip install lightning")
