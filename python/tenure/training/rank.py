"""One rank of a run, from its process groups to its end; `python -m tenure.training.rank PLAN`."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from tenure import _C, clock
from tenure.inspect.coordinates import coordinates
from tenure.inspect.session import watch
from tenure.training import ending, failures
from tenure.training.display import Display, Terminal, figures, introduction, sample_text
from tenure.training.folder import Folder
from tenure.training.groups import Groups, connected
from tenure.training.metrics import Log, Metrics
from tenure.training.plan import Plan
from tenure.training.planning import World, started_world

__all__ = ["Stop", "run", "threads_for"]

_RECORDED = timedelta(minutes=5)


class Stop:
    """Whether someone has asked for an end: by Ctrl-C, which launchers pass on."""

    def __init__(self) -> None:
        """Nobody has. From now on SIGINT asks, and asks in vain for more."""
        self.asked = False
        self._before = signal.signal(signal.SIGINT, self._ask)

    def _ask(self, _signal: int, _frame: object) -> None:
        self.asked = True
        if started_world() is None:  # alone: who asks again means at once
            signal.signal(signal.SIGINT, self._before)

    def end(self) -> None:
        """SIGINT does again what it did before."""
        signal.signal(signal.SIGINT, self._before)


class Listener:
    """What the loop calls on a rank that is not the first: it counts steps."""

    def __init__(self, stop: Stop) -> None:
        """Says nothing."""
        self._stop = stop

    def stepped(self, report: dict[str, Any]) -> bool:
        """A step has ended; whether to go on."""
        clock.step()
        if not math.isfinite(report["loss"]):
            raise failures.DivergedError(
                f"the loss of step {report['step']} is {report['loss']}: try a lower "
                "--learning-rate, or --clip"
            )
        return not self._stop.asked

    def evaluated(self, step: int, loss: float) -> None:
        """An evaluation has ended."""

    def sampled(self, step: int, prompt: list[int], tokens: list[int]) -> None:
        """The model has written something."""

    def saved(self, step: int, path: str) -> None:
        """A checkpoint is whole."""


class Speaker(Listener):
    """What the loop calls on rank 0: shows and writes down what there is."""

    def __init__(self, stop: Stop, plan: Plan, display: Display, folder: Folder) -> None:
        """Makes the files unless they are there."""
        super().__init__(stop)
        self._plan = plan
        self._display = display
        self.metrics = Metrics(folder.metrics)
        self.log = Log(folder.log)
        self._every = max(plan.steps // 100, 1)
        self.history = ending.History()

    def stepped(self, report: dict[str, Any]) -> bool:
        """Shows it, and writes it down."""
        self.history.stepped(report)
        self._display.stepped(report)
        told = {key: value for key, value in report.items() if key not in ("step", "steps")}
        self.metrics.write("step", report["step"], **told)
        if report["step"] % self._every == 0:
            self.log(f"step {report['step']}  {figures(report)}")
        return super().stepped(report)

    def evaluated(self, step: int, loss: float) -> None:
        """Shows it, and writes it down."""
        self.history.validation = loss
        self._display.evaluated(step, loss)
        self.metrics.write("evaluation", step, loss=loss)
        self.log(f"step {step}: validation loss {loss:.4f}")

    def sampled(self, step: int, prompt: list[int], tokens: list[int]) -> None:
        """Shows it, and writes it down."""
        self._display.sampled(step, prompt, tokens)
        text = sample_text(prompt, tokens, self._plan.bytes_as_tokens)
        self.metrics.write("sample", step, prompt=prompt, tokens=tokens, text=text)
        self.log(f"step {step}: a sample\n{text}")

    def saved(self, step: int, path: str) -> None:
        """Shows it, and writes it down."""
        self.history.checkpoint = path
        self._display.saved(step, path)
        self.metrics.write("checkpoint", step, path=path)
        self.log(f"step {step}: checkpoint {path}")


def run(plan: Plan, world: World, failed: Callable[[BaseException], None] | None = None) -> bool:
    """Trains, as this rank's part. All ranks call it.

    Args:
        plan: What to do.
        world: Which rank this is.
        failed: Called first with what ends the run early, before anything is put in order, which
            may wait for other ranks.

    Returns:
        Whether all steps were done; False: it was asked to stop.
    """
    folder = Folder(plan.out)
    device = _own_device(plan, world)
    with ExitStack() as at_end:
        groups = at_end.enter_context(connected(plan, world, device))
        coordinates(stage=world.rank // plan.dp, dp=world.rank % plan.dp)
        session = None
        if plan.observe:
            session = watch(folder.recordings, level=plan.observe, quiet=True)
            at_end.callback(session.stop)
        if failed is not None:
            at_end.push(lambda _kind, error, _trace: failed(error) if error else None)
        trainer = _trainer(plan, device, groups)
        processes = _processes(groups, world)  # from here on all ranks are in step
        stop = Stop()
        at_end.callback(stop.end)
        history = None
        if world.rank == 0:
            history = _speak(trainer, plan, folder, processes, stop)
        else:
            trainer.run(Listener(stop))
        if session is not None:
            session.stop()
        groups.store.set(f"recorded/{world.rank}", "")
        if history is not None:
            _wait_for_recordings(groups, world)
            ending.show(Terminal(), plan, folder, history)
        return not stop.asked


def _speak(
    trainer: _C.Trainer, plan: Plan, folder: Folder, processes: str, stop: Stop
) -> ending.History:
    """Runs it as the rank that shows and writes down what happens."""
    display = Display(plan, Terminal())
    speaker = Speaker(stop, plan, display, folder)
    speaker.metrics.go_on_from(trainer.begin_step)
    speaker.log(introduction(plan, trainer.parameters, trainer.begin_step))
    speaker.log(processes)
    display.begin(trainer.parameters, trainer.begin_step)
    try:
        trainer.run(speaker)
    finally:
        display.end()
        speaker.metrics.close()
    return speaker.history


def _wait_for_recordings(groups: Groups, world: World) -> None:
    """Until all ranks' are complete; of one that is not, the report has what there is."""
    keys = [f"recorded/{rank}" for rank in range(world.ranks)]
    with suppress(RuntimeError):
        groups.store.wait(keys, _RECORDED)


def _own_device(plan: Plan, world: World) -> torch.device:
    if plan.device == "cpu":
        torch.set_num_threads(threads_for(world.local_ranks))
        return torch.device("cpu")
    device = torch.device(plan.device, world.local_rank)
    torch.cuda.set_device(device)
    return device


def threads_for(ranks_here: int) -> int:
    """Threads of a rank on the CPU: its share of the cores, unless OMP_NUM_THREADS says it."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    if said.isdigit() and int(said) > 0:
        return int(said)
    return max(1, len(os.sched_getaffinity(0)) // ranks_here)


def _trainer(plan: Plan, device: torch.device, groups: Groups) -> _C.Trainer:
    return _C.Trainer(
        plan.job(device),
        pipe_up=groups.up,
        pipe_down=groups.down,
        pipe_side=groups.side,
        data_group=groups.data,
        data_side=groups.data_side,
        world_side=groups.world,
        store=groups.store,
    )


def _processes(groups: Groups, world: World) -> str:
    """A line a rank: where it runs. All ranks call it."""
    mine = f"rank {world.rank}: pid {os.getpid()} on {socket.gethostname()}"
    lines: list[str | None] = [None] * world.ranks
    dist.all_gather_object(lines, mine, group=groups.world)
    return "\n".join(str(line) for line in lines)


def _main(arguments: Sequence[str]) -> None:
    """A rank that `tenure train` has started: says how it ended in a file, and nothing itself."""
    _die_with(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once, also while it waits for other ranks
    plan = Plan.parse(Path(arguments[0]).read_text())
    world = started_world() or World()
    failures.forget(Folder(plan.out).logs, world.rank)
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if again != "0":
        plan = replace(plan, resume=True)
        if world.rank == 0:
            told = f"a rank has failed: all start again, {again} of at most {plan.restarts} times"
            Log(Folder(plan.out).log)(told)
            Display(plan, Terminal()).say(told)

    def leave(error: BaseException) -> None:
        failure = failures.Failure.of(error)
        failures.leave(Folder(plan.out).logs, world.rank, failure)
        sys.stdout.flush()
        os._exit(2 if failure.kind == "input" else 1)

    try:
        run(plan, world, leave)
    except Exception as error:  # noqa: BLE001  whatever it is, the parent is to know
        leave(error)


def _die_with(parent: int) -> None:
    """Has the kernel end this process when its parent goes, also by SIGKILL."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    _main(sys.argv[1:])
