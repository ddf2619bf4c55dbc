"""The command `tenure train`. Imports no torch: `tenure --help` needs it too."""

from __future__ import annotations

import inspect
import os
import signal
import typing
from typing import Any

import typer
from typer.core import TyperCommand

from tenure.training.flags import Flags

__all__ = ["SETTINGS", "TrainCommand", "train"]

SETTINGS: dict[str, Any] = {
    # --learning_rate is --learning-rate: llm.c and InfiniTrain write it so.
    "token_normalize_func": lambda name: name.replace("_", "-"),
    "max_content_width": 100,
}

_BEFORE_TORCH = {
    # Threads that wait for others sleep: on cores that other programs use too, spinning made a
    # step many times as long.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


class TrainCommand(TyperCommand):
    """A command whose options are shown under headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes a section a heading, in the order of the options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if record is not None:
                heading = getattr(option, "rich_help_panel", None) or "Other"
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def train(**given: Any) -> None:
    """Train a GPT-2 or a Llama, and show that its memory stays within bounds.

    It ends with the memory of each rank against its bound, whether it stayed flat, and a page of
    who held it. A flag's second name is what llm.c or InfiniTrain calls it; write it with _ or
    with -. Their flags that are not listed here are not known.

      tenure train

      tenure train --ranks 2 --pp 2 --schedule zb-h1 --data book.txt --steps 500

      tenure train --resume --steps 1000
    """
    for name, value in _BEFORE_TORCH.items():
        os.environ.setdefault(name, value)
    try:
        from tenure.training import start

        start.train(Flags(**given))
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


def _signature() -> inspect.Signature:
    """Flags are written down once: the command takes what their class takes."""
    hints = typing.get_type_hints(Flags, include_extras=True)
    own = inspect.signature(Flags).parameters.values()
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature([p.replace(annotation=hints[p.name], kind=kind) for p in own])


train.__signature__ = _signature()  # type: ignore[attr-defined]
