"""Activation offloading and telemetry for the ``Trainer`` of transformers."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any, Unpack

import torch
from torch import nn

from tenure.errors import InputError
from tenure.integrations.monitoring import Monitored, need_monitor
from tenure.integrations.options import OffloadOptions, need_options
from tenure.offload import Offload

__all__ = ["monitor_callback", "offload"]


@contextlib.contextmanager
def offload(trainer: object, **options: Unpack[OffloadOptions]) -> Iterator[Offload]:
    """Every training step of the trainer runs in one Offload, until the block ends.

    A step is forward and backward of one batch, as ``Trainer.training_step`` defines it, so that
    gradient accumulation, gradient checkpointing and mixed precision go on as they do without.
    Evaluation is not touched.

    Args:
        trainer: A ``transformers.Trainer``, or anything that has its ``model`` and its
            ``training_step``.
        options: Those of `tenure.Offload`.

    Yields:
        The Offload, for its ``stats()`` and to print.

    Raises:
        InputError: For a trainer whose activations are offloaded already, or which makes its model
            anew when it trains; and as `tenure.Offload` does.

    Example:
        >>> import tenure, torch
        >>> class Trainer:  # with transformers: trainer = transformers.Trainer(...)
        ...     model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
        ...
        ...     def training_step(self, model, batch):
        ...         loss = model(batch).sum()
        ...         loss.backward()
        ...         return loss.detach()
        ...
        ...     def train(self):
        ...         for _ in range(3):
        ...             self.training_step(self.model, torch.ones(256, 64))
        >>> trainer = Trainer()
        >>> with tenure.integrations.transformers.offload(trainer, target="copy") as offload:
        ...     trainer.train()
        >>> offload.stats().moved_out_bytes > 0
        True
    """
    need_options(options)
    model = _model_of(trainer)
    step = getattr(trainer, "training_step", None)
    if not callable(step):
        raise InputError(f"offload() takes a Trainer, and {_name(trainer)} has no training_step")
    entered = Offload(model, **options)

    @functools.wraps(step)
    def step_inside(*args: Any, **kwargs: Any) -> torch.Tensor:
        with entered:
            return step(*args, **kwargs)  # type: ignore[no-any-return]

    own = vars(trainer).get("training_step")
    trainer.training_step = step_inside  # type: ignore[attr-defined]
    try:
        yield entered
    finally:
        if own is None:
            del trainer.training_step  # type: ignore[attr-defined]
        else:
            trainer.training_step = own  # type: ignore[attr-defined]


def monitor_callback(monitor: Monitored) -> Any:
    """A ``TrainerCallback`` with which the trainer drives a `tenure.Monitor`.

    The monitor steps at each step of the optimizer, whatever the gradient accumulation, and is
    closed when training ends.

    Args:
        monitor: The monitor, not yet closed.

    Raises:
        InputError: If transformers cannot be imported, or for what is no monitor.

    Example:
        >>> import tenure
        >>> monitor = tenure.Monitor(sinks=["console"])  # doctest: +SKIP
        >>> callback = tenure.integrations.transformers.monitor_callback(monitor)  # doctest: +SKIP
        >>> trainer = transformers.Trainer(..., callbacks=[callback])  # doctest: +SKIP
    """
    need_monitor(monitor)
    try:
        base: Any = importlib.import_module("transformers").TrainerCallback
    except ImportError as error:
        raise InputError(
            f"transformers cannot be imported ({error}): pip install transformers"
        ) from error

    class MonitorCallback(base):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            monitor.step()

        def on_train_end(self, *_: object, **__: object) -> None:
            monitor.close()

    return MonitorCallback()


def _model_of(trainer: object) -> nn.Module:
    if getattr(trainer, "model_init", None) is not None:
        raise InputError(
            "this Trainer makes its model anew in train() (model_init), and an Offload must know "
            "whose parameters stay: give the Trainer the model itself"
        )
    # What TRL's trainers enter around a step.
    theirs = getattr(trainer, "maybe_activation_offload_context", None)
    if not isinstance(theirs, contextlib.nullcontext | None):
        raise InputError(
            "this trainer offloads activations already (activation_offloading=True): leave that "
            "out, or leave offload() out and call tenure.integrations.trl.enable() before"
        )
    model = getattr(trainer, "model", None)
    if not isinstance(model, nn.Module):
        raise InputError(f"offload() takes a Trainer, and {_name(trainer)} has no model")
    return model


def _name(trainer: object) -> str:
    return type(trainer).__name__
