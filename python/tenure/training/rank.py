"""One rank of a run, from its process groups to its end; `python -m tenure.training.rank PLAN`."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import Store

from tenure import _C
from tenure.inspect.coordinates import coordinates
from tenure.inspect.options import say
from tenure.inspect.session import watch
from tenure.inspect.verdicts import shown_path
from tenure.telemetry.monitor import Monitor
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
    """Whether someone has asked for an end: by Ctrl-C, which launchers pass on.

    A rank that is alone can be asked by SIGTERM too. Among others it cannot: launchers send that to
    those that are left when one has failed, and these wait for it and cannot end their step.

    Attributes:
        asked: The signal that asked; None: none has.
    """

    def __init__(self) -> None:
        """Nobody has. From now on these signals ask, and ask in vain for more."""
        self.asked: signal.Signals | None = None
        self._alone = started_world() is None
        numbers = (signal.SIGINT, signal.SIGTERM) if self._alone else (signal.SIGINT,)
        self._before = {number: signal.signal(number, self._ask) for number in numbers}

    def _ask(self, number: int, _frame: object) -> None:
        self.asked = signal.Signals(number)
        if self._alone:  # who asks again means at once
            self.end()

    def end(self) -> None:
        """The signals do again what they did before."""
        for number, before in self._before.items():
            signal.signal(number, before)


class Listener:
    """What the loop calls on a rank that is not the first: it counts steps."""

    def __init__(self, stop: Stop, monitor: Monitor) -> None:
        """Says nothing."""
        self._stop = stop
        self._monitor = monitor

    def stepped(self, report: dict[str, Any]) -> bool:
        """A step has ended; whether to go on."""
        self._monitor.step()
        _require_finite("loss", report["step"], report["loss"])
        return self._stop.asked is None

    def evaluated(self, step: int, loss: float) -> None:
        """An evaluation has ended: before the step is saved."""
        _require_finite("validation loss", step, loss)

    def sampled(self, step: int, prompt: list[int], tokens: list[int]) -> None:
        """The model has written something."""

    def saved(self, step: int, path: str) -> None:
        """A checkpoint is whole."""


def _require_finite(what: str, step: int, loss: float) -> None:
    if not math.isfinite(loss):
        raise failures.DivergedError(
            f"the {what} of step {step} is {loss}: try a lower --learning-rate, or --clip"
        )


class Speaker(Listener):
    """What the loop calls on rank 0: shows and writes down what there is."""

    def __init__(
        self,
        stop: Stop,
        monitor: Monitor,
        alerts: deque[str],
        plan: Plan,
        display: Display,
        folder: Folder,
    ) -> None:
        """Makes the files unless they are there."""
        super().__init__(stop, monitor)
        self._alerts = alerts
        self._plan = plan
        self.display = display
        self.metrics = Metrics(folder.metrics)
        self.log = Log(folder.log)
        self._every = max(plan.steps // 100, 1)
        self.history = ending.History()

    def stepped(self, report: dict[str, Any]) -> bool:
        """Shows it, and writes it down."""
        self.history.stepped(report)
        self.display.stepped(report)
        told = {key: value for key, value in report.items() if key not in ("step", "steps")}
        self.metrics.write("step", report["step"], **told)
        if report["step"] % self._every == 0:
            self.log(f"step {report['step']}  {figures(report)}")
        while self._alerts:
            alert = f"alert: {self._alerts.popleft()}"
            self.display.say(alert)
            self.log(alert)
        return super().stepped(report)

    def evaluated(self, step: int, loss: float) -> None:
        """Shows it, and writes it down."""
        self.history.validation = loss
        self.display.evaluated(step, loss)
        self.metrics.write("evaluation", step, loss=loss)
        self.log(f"step {step}: validation loss {loss:.4f}")
        super().evaluated(step, loss)

    def sampled(self, step: int, prompt: list[int], tokens: list[int]) -> None:
        """Shows it, and writes it down."""
        self.display.sampled(step, prompt, tokens)
        text = sample_text(prompt, tokens, self._plan.bytes_as_tokens)
        self.metrics.write("sample", step, prompt=prompt, tokens=tokens, text=text)
        self.log(f"step {step}: a sample\n{text}")

    def saved(self, step: int, path: str) -> None:
        """Shows it, and writes it down."""
        self.history.checkpoint = path
        self.display.saved(step, path)
        self.metrics.write("checkpoint", step, path=path)
        self.log(f"step {step}: checkpoint {path}")


def run(
    plan: Plan,
    world: World,
    failed: Callable[[BaseException], None] | None = None,
    remark: Callable[[str], None] = say,
    store: Store | None = None,
) -> signal.Signals | None:
    """Trains, as this rank's part. All ranks call it.

    Args:
        plan: What to do.
        world: Which rank this is.
        failed: Called first with what ends the run early, before anything is put in order, which
            may wait for other ranks.
        remark: Called with what the user is to know besides, in one line, while it goes on.
        store: Where all ranks have met; None: they have not.

    Returns:
        None: all steps were done. Else the signal that asked it to stop.
    """
    folder = Folder(plan.out)
    device = _own_device(plan, world)
    with ExitStack() as at_end:
        groups = at_end.enter_context(connected(plan, world, device, store))
        coordinates(stage=world.rank // plan.dp, dp=world.rank % plan.dp)
        alerts: deque[str] = deque()
        monitor = _monitor(plan, folder, alerts)
        at_end.callback(monitor.close)
        session = None
        if plan.observe:
            session = watch(folder.recordings, level=plan.observe, quiet=True)
            at_end.callback(session.stop)
        at_end.push(lambda _kind, error, _trace: _fail(monitor, failed, error))
        trainer = _trainer(plan, device, groups)
        processes = _processes(groups, world)  # from here on all ranks are in step
        stop = Stop()
        at_end.callback(stop.end)
        history = None
        terminal = Terminal(lambda why: remark(_lost_text(folder, why)))
        if world.rank == 0:
            speaker = Speaker(stop, monitor, alerts, plan, Display(plan, terminal), folder)
            history = _speak(trainer, speaker, plan, processes)
        else:
            trainer.run(Listener(stop, monitor))
        if session is not None:
            session.stop()
        groups.store.set(f"recorded/{world.rank}", "")
        if history is not None:
            _wait_for_recordings(groups, world)
            ending.show(terminal, plan, folder, history)
        return stop.asked


def _monitor(plan: Plan, folder: Folder, alerts: deque[str]) -> Monitor:
    """For `tenure top`, loggers, alerts and what ranks held when one failed."""
    return Monitor(
        sinks=list(plan.sinks),
        every=1 if plan.steps < 1000 else 10,
        alerts=[(rule, lambda broken: alerts.append(broken.text)) for rule in plan.alerts],
        folder=folder.memory,
        flight_recorder="quiet",  # the run says itself how it ended
        timeout=plan.timeout,
    )


def _fail(
    monitor: Monitor, failed: Callable[[BaseException], None] | None, error: BaseException | None
) -> None:
    """What ends the run early is written down and told."""
    if isinstance(error, Exception) and failures.is_of_the_run(failures.Failure.of(error).kind):
        monitor.failed(error)
    if error is not None and failed is not None:
        failed(error)


def _speak(trainer: _C.Trainer, speaker: Speaker, plan: Plan, processes: str) -> ending.History:
    """Runs it as the rank that shows and writes down what happens."""
    display = speaker.display
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


def _lost_text(folder: Folder, why: str) -> str:
    told = f"stdout cannot be written to ({why}): the run goes on, and what it would say is in "
    told += shown_path(folder.log)
    Log(folder.log)(told)
    return told


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

    def remark(text: str) -> None:
        failures.leave_remark(Folder(plan.out).logs, world.rank, text)

    try:
        run(plan, world, leave, remark)
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
