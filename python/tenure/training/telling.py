"""What is said on stderr when a run does not end well: one line, and how to go on."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress

from tenure.errors import InputError
from tenure.inspect.options import say
from tenure.inspect.verdicts import shown_path
from tenure.report import flights
from tenure.telemetry.headline import top_holder
from tenure.training.failures import is_of_the_run
from tenure.training.folder import Folder
from tenure.training.metrics import Log
from tenure.training.plan import Plan

__all__ = ["how_to_go_on", "show_cursor", "tell_failure", "tell_stopped", "write_down"]


def tell_failure(plan: Plan, cause: str, kind: str, rank: int | None) -> int:
    """Says it, writes it into the log, and returns the exit status of the command.

    Args:
        plan: What the run was told.
        cause: In one line.
        kind: As of :class:`~tenure.training.failures.Failure`.
        rank: The one that began it; None: nothing that it left behind would say more.
    """
    show_cursor()
    told = cause.rstrip(".")
    if kind == "all":  # the same command would do the same again
        step = _newest_step(plan)
        told += f"; with --resume that goes on from step {step}" if step is not None else ""
    elif kind != "input":
        told += f"; {how_to_go_on(plan)}"
    if rank is not None and is_of_the_run(kind):
        told += _evidence(plan, rank)
    write_down(plan, told)
    say(told)
    return 2 if kind == "input" else 1


def _evidence(plan: Plan, rank: int) -> str:
    """What the rank held that ran out of memory, or the last that is known of one that was killed.

    Lines to follow the first; nothing, if it was neither.
    """
    left = flights.find([plan.out])
    if not left or left[0].who.rank != rank:
        return ""
    if left[0].reason != "memory" and not left[0].speechless:
        return ""
    lines = [flights.title(left), top_holder(left[0].document)]
    lines.append(f"see: tenure report {shown_path(plan.out)}")
    return "".join(f"\n{line}" for line in lines if line)


def tell_stopped(plan: Plan, number: int) -> int:
    """Says by which signal it was stopped; returns the exit status of the command."""
    show_cursor()
    told = f"stopped by {signal.Signals(number).name}; {how_to_go_on(plan)}"
    write_down(plan, told)
    say(told)
    return 128 + number


def write_down(plan: Plan, text: str) -> None:
    """In the log, if it can be: the disk may be what failed."""
    with suppress(OSError):
        Log(Folder(plan.out).log)(text)


def how_to_go_on(plan: Plan) -> str:
    """From which step a run would go on."""
    step = _newest_step(plan)
    if step is None:
        return "no checkpoint was made yet, --save-every makes them more often"
    same = "the same command" if plan.resume else "the same command with --resume"
    return f"{same} goes on from step {step}"


def _newest_step(plan: Plan) -> int | None:
    with suppress(InputError):
        return Folder(plan.out).newest_step()
    return None


def show_cursor() -> None:
    """After a rank that had hidden it, for its bar, and was ended."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h\n")
        sys.stdout.flush()
