"""What is said on stderr when a run does not end well: one line, and how to go on."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress

from tenure.errors import InputError
from tenure.inspect.options import say
from tenure.training.folder import Folder
from tenure.training.metrics import Log
from tenure.training.plan import Plan

__all__ = ["how_to_go_on", "show_cursor", "tell_failure", "tell_stopped"]


def tell_failure(plan: Plan, cause: str, *, is_input: bool) -> int:
    """Says it, writes it into the log, and returns the exit status of the command."""
    show_cursor()
    cause = cause.rstrip(".")
    told = cause if is_input else f"{cause}; {how_to_go_on(plan)}"
    with suppress(OSError):  # the disk may be what failed
        Log(Folder(plan.out).log)(told)
    say(told)
    return 2 if is_input else 1


def tell_stopped(plan: Plan, number: int) -> int:
    """Says by which signal it was stopped; returns the exit status of the command."""
    show_cursor()
    told = f"stopped by {signal.Signals(number).name}; {how_to_go_on(plan)}"
    with suppress(OSError):
        Log(Folder(plan.out).log)(told)
    say(told)
    return 128 + number


def how_to_go_on(plan: Plan) -> str:
    """From which step a run would go on."""
    step = None
    with suppress(InputError):
        step = Folder(plan.out).newest_step()
    if step is None:
        return "no checkpoint was made yet, --save-every makes them more often"
    same = "the same command" if plan.resume else "the same command with --resume"
    return f"{same} goes on from step {step}"


def show_cursor() -> None:
    """After a rank that had hidden it, for its bar, and was ended."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h\n")
        sys.stdout.flush()
