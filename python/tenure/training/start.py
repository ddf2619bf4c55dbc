"""`tenure train` after its flags are read: checks the job, then runs, joins or starts ranks."""

from __future__ import annotations

import signal

import torch
import typer

from tenure.errors import InputError
from tenure.training import failures, rank
from tenure.training.flags import Flags
from tenure.training.folder import Folder
from tenure.training.metrics import Log
from tenure.training.plan import Plan
from tenure.training.planning import World, plan_of, started_world
from tenure.training.telling import tell_failure, tell_stopped

__all__ = ["train"]


def train(flags: Flags) -> None:
    """Runs the command.

    Raises:
        InputError: The job cannot run; nothing was written or started.
        typer.Exit: It has run and did not end well.
    """
    world = started_world()
    speaks = world is None or world.rank == 0
    try:
        plan = plan_of(flags, world)
        folder = Folder(plan.out)
        if speaks:
            folder.check(plan, overwrite=flags.overwrite)
        plan.job(torch.device("cpu")).check(plan.ranks)
        if speaks:
            folder.claim(plan, overwrite=flags.overwrite)
    except InputError:
        if speaks:
            raise
        raise typer.Exit(2) from None  # rank 0 says it
    if world is None and plan.ranks > 1:
        from tenure.training.launch import launch

        code = launch(plan)
    else:
        code = _run_here(plan, world)
    if code:
        raise typer.Exit(code)


def _run_here(plan: Plan, world: World | None) -> int:
    """Runs this process's rank: the only one, or one of those that a launcher has started."""
    folder = Folder(plan.out)
    try:
        done = rank.run(plan, world or World())
    except KeyboardInterrupt:
        return tell_stopped(plan, signal.SIGINT)
    except Exception as error:  # noqa: BLE001  said in a line, and the rest is in the log
        failure = failures.Failure.of(error)
        Log(folder.log)(failure.trace)
        number = f"rank {world.rank} failed: " if world and failure.kind != "input" else ""
        return tell_failure(plan, number + failure.text, is_input=failure.kind == "input")
    folder.tidy()
    return 0 if done else tell_stopped(plan, signal.SIGINT)
