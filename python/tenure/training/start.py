"""`tenure train` after its flags are read: checks the job, then runs, joins or starts ranks."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import typer
from torch._C._distributed_c10d import Store

from tenure.errors import CollectiveError
from tenure.inspect.options import say
from tenure.training import failures, rank
from tenure.training.changes import changes
from tenure.training.flags import Flags
from tenure.training.folder import Folder
from tenure.training.meeting import Meeting
from tenure.training.metrics import Log
from tenure.training.plan import Plan
from tenure.training.planning import World, plan_of, started_world
from tenure.training.telling import tell_failure, tell_stopped, write_down

__all__ = ["train"]


def train(flags: Flags) -> None:
    """Runs the command.

    Raises:
        InputError: The job cannot run; nothing was written or started.
        typer.Exit: It has run and did not end well.
    """
    world = started_world()
    speaks = world is None or world.rank == 0
    meeting = Meeting(world, flags)
    with ExitStack() as at_end:
        try:
            with meeting.together("flags"):
                plan = plan_of(flags, world)
                folder = Folder(plan.out)
                if speaks:
                    folder.check(plan, overwrite=flags.overwrite)
                plan.job(torch.device("cpu")).check(plan.ranks)
            with meeting.together("folder"):
                if speaks:
                    changed = _changed(plan, folder)
                    at_end.enter_context(folder.claim(plan, overwrite=flags.overwrite))
                    _remark(changed, folder)
        except CollectiveError as error:
            say(str(error))
            raise typer.Exit(1) from None
        code = _run(plan, world, meeting.store)
    if code:
        raise typer.Exit(code)


def _changed(plan: Plan, folder: Folder) -> str:
    """What is other than in the run that goes on."""
    before = folder.before() if plan.resume and folder.newest() is not None else None
    return changes(before, plan) if before is not None else ""


def _remark(text: str, folder: Folder) -> None:
    if text:
        Log(folder.log)(text)
        say(text)


def _run(plan: Plan, world: World | None, store: Store | None) -> int:
    """Returns the exit status of the command."""
    if world is not None or plan.ranks == 1:
        return _run_here(plan, world, store)
    from tenure.training.launch import launch

    return launch(plan)


def _run_here(plan: Plan, world: World | None, store: Store | None) -> int:
    """Runs this process's rank: the only one, or one of those that a launcher has started."""
    folder = Folder(plan.out)
    try:
        with _terminable(world):
            asked = rank.run(plan, world or World(), store=store)
    except KeyboardInterrupt:
        return tell_stopped(plan, signal.SIGINT)
    except _Terminated:
        return tell_stopped(plan, signal.SIGTERM)
    except Exception as error:  # noqa: BLE001  said in a line, and the rest is in the log
        failure = failures.Failure.of(error)
        write_down(plan, failure.trace)
        number = f"rank {world.rank} failed: " if world and failure.kind != "input" else ""
        return tell_failure(plan, number + failure.text, failure.kind, world.rank if world else 0)
    if world is None or world.rank == 0:  # others would find that it is going
        folder.tidy()
    return tell_stopped(plan, asked) if asked else 0


class _Terminated(BaseException):
    """What SIGTERM is where KeyboardInterrupt is SIGINT."""


@contextmanager
def _terminable(world: World | None) -> Iterator[None]:
    """SIGTERM raises, so that it can be told of. Not among other ranks: see :class:`rank.Stop`."""

    def terminate(_signal: int, _frame: object) -> None:
        raise _Terminated

    if world is not None:
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
