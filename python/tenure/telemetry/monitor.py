"""Monitor: the rank whose memory peaks, in every logger, for the price of one collective."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from torch import distributed as dist

from tenure import _C, clock
from tenure.errors import InputError, MemoryAlert
from tenure.inspect.coordinates import found_coordinates
from tenure.telemetry import sinks as all_sinks
from tenure.telemetry import triggers
from tenure.telemetry.alerts import Alert, AlertSpec, Watch, alerts_of
from tenure.telemetry.calling import Caller
from tenure.telemetry.compat import names_like
from tenure.telemetry.feeding import Feeder
from tenure.telemetry.figures import Figure, Figures
from tenure.telemetry.flight import FlightRecorder, may_record
from tenure.telemetry.keys import KEYS
from tenure.telemetry.meeting import Meeting, meet
from tenure.telemetry.presence import this_process
from tenure.telemetry.rings import FAILED
from tenure.telemetry.sinks.sink import need_folder
from tenure.telemetry.snapshot import sentence

__all__ = ["Monitor"]

_log = logging.getLogger("tenure.telemetry")
_TIMEOUT = 60.0
_OTHERS, _SINKS = 5.0, 30.0  # seconds for which a rank that ends waits for them
_LOOK = 1.0  # seconds after which the telling thread sees whether it is to end


class Monitor:
    """Says every few steps which rank has most memory and which has least left.

    All ranks make one and call :meth:`step`; what they have is reduced by one collective on a group
    of the monitor's own, off the training thread, and one rank writes it to the sinks. Without
    process groups it tells the same of this process.

    Args:
        group: The ranks; None: all. Figures name them as the job does, not as the group.
        sinks: Where figures go, on the rank that writes: names among ``console``, ``jsonl``,
            ``tensorboard``, ``wandb``, ``mlflow``, ``comet`` and ``prometheus``, objects of
            :mod:`tenure.telemetry.sinks` with options of their own, or functions that take a
            :class:`Figures`.
        every: Steps of an interval.
        alerts: Rules such as ``"headroom < 5%"``, each alone (it is logged) or with what to do:
            ``("growth > 1 MB/step for 50 steps", "stop")``. See :class:`tenure.telemetry.Alert`.
        folder: For files of sinks, for each rank's last figures, which ``tenure top`` shows, and
            for what a run leaves behind when it dies.
        writer: The rank of the group that writes. Which one makes no difference to what is told.
        stage: Of the pipeline; None: as :func:`tenure.coordinates` says, or a mesh, or Megatron.
        compat: ``"megatron-bridge"``: its names, units and rounding, for dashboards that exist.
        flight_recorder: Whether every rank writes down what it holds when one of them fails;
            ``"quiet"``: and says nothing of it on stderr. A process has one; see
            :class:`tenure.telemetry.FlightRecorder`.
        run_name: What loggers call the run; that of the working directory if it is empty.
        timeout: Seconds to wait for the other ranks when it is made.

    Raises:
        InputError: For an unknown sink, a rule that does not parse, a folder that cannot be
            written, a port in use; on all ranks if they were not made in the same way.
        CollectiveError: A rank has made none in time.

    Example:
        >>> import tenure
        >>> seen = []
        >>> with tenure.Monitor(sinks=[seen.append], every=1) as monitor:
        ...     monitor.step()
        >>> seen[0].world["host_rss_bytes"].rank
        0
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        sinks: all_sinks.Spec | Sequence[all_sinks.Spec] = ("console",),
        every: int = 10,
        *,
        alerts: Sequence[AlertSpec] | AlertSpec = (),
        folder: str | Path = "run.tenure",
        writer: int = 0,
        stage: int | None = None,
        compat: str | None = None,
        flight_recorder: bool | Literal["quiet"] = True,
        run_name: str = "",
        timeout: float = _TIMEOUT,
        _node: str | None = None,
    ) -> None:
        """Waits until all ranks have made theirs."""
        stage = found_coordinates().get("stage", 0) if stage is None else stage
        wait = timeout if _is_time(timeout) else _TIMEOUT
        grouped = dist.is_available() and dist.is_initialized()
        writes = False
        made: list[all_sinks.Sink] = []
        rules: list[Alert] = []
        failure = ""
        try:
            _need_number(every, 1, "every is a number of steps, 1 or more")
            _need_number(stage, 0, "stage is a number, 0 or more")
            _need_number(writer, 0, "writer is a rank of the group")
            _need(_is_time(timeout), "timeout is a number of seconds", timeout)
            records = flight_recorder in (True, False, "quiet")
            _need(records, "flight_recorder is True, False or 'quiet'", flight_recorder)
            _need(isinstance(folder, str | os.PathLike), "folder is a path", folder)
            rules = alerts_of(alerts)
            folder = need_folder(Path(folder).absolute(), "the monitor")
            names = None if compat is None else names_like(compat)
            writes = writer == (dist.get_rank(group) if grouped else 0)
            if writes:
                made = all_sinks.made(
                    sinks, folder=folder, run_name=run_name or Path.cwd().name, names=names
                )
        except InputError as error:
            failure = str(error)  # the others wait for this rank: they are to know, too
        except Exception as error:  # noqa: BLE001  of whatever kind
            failure = f"{type(error).__name__}: {error}"
        try:
            meeting = meet(
                group,
                settings={
                    "every": str(every),
                    "writer": str(writer),
                    "alerts": [one.text() for one in rules],
                },
                stage=0 if failure else stage,
                node=_node,
                failure=failure,
                timeout=wait,
            )
            _need_writer(writer, meeting.ranks)
        except BaseException:
            _give_back(made, sinks)
            raise
        self._grouped = meeting.ranks > 1
        self._stops = any(rule.action == "stop" for rule in rules)
        self._intervals = 0
        reads = writes or any(rule.action != "log" for rule in rules)
        ring = self._ring = _ring(folder, meeting, stage)
        self._monitor = _monitor(meeting, every, stage, reads, writes, ring)
        meeting.groups.clear()  # they end with the monitor, and others see that they do
        triggers.watch_worker()
        self._telling = _Telling(self._monitor, meeting, made, rules, writes)
        self._recorder = (
            self._record(folder, meeting, stage, quiet=flight_recorder == "quiet")
            if flight_recorder and may_record()
            else None
        )
        self._end = weakref.finalize(self, _end, self._monitor, self._telling, ring, self._recorder)
        if reads:
            self._telling.start()

    def _record(
        self, folder: str | Path, meeting: Meeting, stage: int, *, quiet: bool
    ) -> FlightRecorder:
        monitor = self._monitor
        return FlightRecorder(
            folder,
            meeting.job_rank,
            meeting.job_ranks,
            stage,
            meeting.stages,
            store=meeting.job_store,  # the whole job fails, not a group of it
            rows=monitor.recent,
            extremes=lambda: {
                name: meeting.members[rank] for name, rank in monitor.extremes().items()
            },
            leads=meeting.leads,
            quiet=quiet,
            ending=functools.partial(_failed_of, self._ring),
        ).start()

    def step(self) -> None:
        """A training step has ended. Takes some microseconds, at every `every`-th tens of them.

        Raises:
            MemoryAlert: A rule whose action is ``stop`` is broken, at the same step on every rank.
            InputError: It is closed, or called from another thread than before, or the process
                groups are gone.
        """
        if self._grouped and not dist.is_initialized():
            raise InputError(
                "the process group was destroyed under this monitor: call monitor.close() before "
                "destroy_process_group()"
            )
        if self._monitor.step():
            self._intervals += 1
            if self._stops and self._intervals > 1:
                self._telling.stop_if_broken(self._intervals - 1)

    @property
    def latest(self) -> Figures | None:
        """The last interval that is known on this rank, if it writes."""
        return self._telling.latest

    @property
    def collectives(self) -> int:
        """How many collectives it has issued on this rank."""
        return self._monitor.collectives

    @property
    def dropped(self) -> int:
        """Intervals that sinks did not get: they were too slow, or failed."""
        return self._telling.feeder.dropped

    def failed(self, error: BaseException) -> None:
        """Training ends by this error: what all ranks hold is written down, if they record it.

        An error that nothing catches is seen without this, and one that leaves a ``with`` block.
        """
        self._telling.failure = sentence(error)
        _failed_of(self._ring, self._telling.failure)
        if self._recorder is not None:
            self._recorder.failed(error)

    def close(self, timeout: float | None = None) -> None:
        """Waits for what is under way and ends. A second call does nothing.

        Args:
            timeout: Seconds to wait at most for other ranks, and for sinks; None: 5 and 30.
        """
        if (end := self._end.detach()) is not None:
            _, _, (monitor, telling, ring, recorder), _ = end
            _end(monitor, telling, ring, recorder, timeout, at_exit=False)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes it. What an error leaves behind is written down first."""
        if isinstance(error, Exception):
            self.failed(error)
        self.close()

    def __repr__(self) -> str:
        """What it knows, on a line."""
        now = self.latest
        if now is None:
            return "<tenure.Monitor>"
        return f"<tenure.Monitor: step {now.step}, rank {now.peak_rank} of {now.ranks} has most>"


def _need(holds: bool, what: str, value: object) -> None:
    if not holds:
        raise InputError(f"{what}, not {value!r}")


def _need_number(value: object, least: int, what: str) -> None:
    _need(isinstance(value, int) and not isinstance(value, bool) and value >= least, what, value)


def _need_writer(writer: int, ranks: int) -> None:
    if writer >= ranks:
        raise InputError(f"there is no rank {writer} to write: there are {ranks}")


def _give_back(made: list[all_sinks.Sink], given: object) -> None:
    """What was made of names: a port, say, is free for the next monitor."""
    own = given if isinstance(given, list | tuple) else [given]
    for sink in made:
        if not any(sink is one for one in own):
            with suppress(Exception):
                sink.close()


def _is_time(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 < value < threading.TIMEOUT_MAX


def _ring(folder: str | Path, meeting: Meeting, stage: int) -> _C.TelemetryRing:
    me = this_process(meeting.job_rank, meeting.job_ranks, stage, meeting.stages)
    return _C.TelemetryRing(
        str(folder),
        host=me.host,
        rank=me.rank,
        ranks=me.ranks,
        stage=me.stage,
        stages=me.stages,
        role=os.environ.get("ROLE_NAME", ""),
        attempt=me.attempt,
    )


def _failed_of(ring: _C.TelemetryRing, why: str) -> None:
    ring.note(f"{FAILED}{why}")  # the process may not live to close it, or may yet go on


def _monitor(
    meeting: Meeting,
    every: int,
    stage: int,
    reads: bool,
    writes: bool,
    ring: _C.TelemetryRing,
) -> _C.TelemetryMonitor:
    return _C.TelemetryMonitor(
        every=every,
        who=clock.new_announcer(),
        rank=meeting.rank,
        ranks=meeting.ranks,
        stage=stage,
        stages=meeting.stages,
        reads=reads,
        rows_every=10,
        reads_rows=writes,
        groups=meeting.groups,
        levels=meeting.levels,
        store=meeting.store,
        ring=ring,
    )


def _end(
    monitor: _C.TelemetryMonitor,
    telling: _Telling,
    ring: _C.TelemetryRing,
    recorder: FlightRecorder | None,
    timeout: float | None = None,
    *,
    at_exit: bool = True,
) -> None:
    try:
        monitor.close(_OTHERS if timeout is None else timeout)
        telling.end(_SINKS if timeout is None else timeout)
    finally:
        failure = telling.failure or (triggers.ends_of() if at_exit else "")
        ring.close(f"{FAILED}{failure}" if failure else "ended")
        if recorder is not None:
            (recorder.end if at_exit else recorder.close)()


class _Telling:
    """Takes intervals from C++, holds them against the rules, and feeds sinks and functions."""

    def __init__(
        self,
        monitor: _C.TelemetryMonitor,
        meeting: Meeting,
        sinks: list[all_sinks.Sink],
        alerts: list[Alert],
        writes: bool,
    ) -> None:
        self.feeder = Feeder(sinks)
        self.latest: Figures | None = None
        self.failure = ""  # of which training ended
        self._monitor = monitor
        self._meeting = meeting
        self._watch = Watch(alerts)
        self._writes = writes
        # The console sink prints what is wrong itself.
        self._logs = writes and not any(isinstance(sink, all_sinks.Console) for sink in sinks)
        self._callers = {id(one): Caller(one.action) for one in alerts if callable(one.action)}
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._done = 0  # intervals
        self._stop: tuple[int, str] | None = None  # in which interval, and why
        self._over = False
        self._said: set[str] = set()  # what is said once

    def start(self) -> None:
        # A daemon: finalizers, which end it in order, run only after all other threads have ended.
        self._thread = threading.Thread(target=self._run, name="tenure-telling", daemon=True)
        self._thread.start()

    def end(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        if self._thread is not None:
            self._thread.join(timeout)
        for caller in self._callers.values():
            caller.end()
        self.feeder.close(timeout)
        for caller in self._callers.values():
            caller.wait(max(0.0, deadline - time.monotonic()))

    def stop_if_broken(self, interval: int) -> None:
        """Raises what `interval` asks for. All ranks know that interval by the next one's end."""
        with self._changed:
            self._changed.wait_for(lambda: self._done >= interval or self._over)
            if self._stop is not None and self._stop[0] <= interval:
                raise MemoryAlert(self._stop[1])

    def _run(self) -> None:
        try:
            while not self._monitor.over:
                self._tell_next()
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _tell_next(self) -> None:
        known, told = self._monitor.known, None
        try:
            told = self._monitor.next(_LOOK)
            if told is not None:
                self._tell(told)
        except Exception as error:  # noqa: BLE001  of memory, say; the next one may be told
            with suppress(Exception):
                self._say("untold", "an interval could not be told: %s", sentence(error))
            if told is None:
                return
        # None came in time: one that is known by now and was not told never will be.
        self._know(known if told is None else told.number)

    def _know(self, interval: int, stop: str = "") -> None:
        with self._changed:
            if stop and self._stop is None:
                self._stop = interval, stop
            if interval > self._done:
                self._done = interval
                self._changed.notify_all()

    def _tell(self, told: _C.Told) -> None:
        figures = self._figures(told)
        self._say_what_is_missing(told, figures)
        broken = self._watch.look(figures)
        figures = replace(figures, alerts=tuple(what.text for _, what in broken))
        # First: training may wait for it. Ranks that are not together would not stop together.
        stops = [what.text for alert, what in broken if alert.action == "stop" and not told.lost]
        self._know(told.number, stops[0] if stops else "")
        self.latest = figures
        self.feeder.feed(figures)
        for alert, what in broken:
            if callable(alert.action):
                self._callers[id(alert)].call(what)
            elif alert.action == "stop" and told.lost:
                _log.warning("%s; nothing is stopped: the ranks are not together", what.text)
            elif alert.action == "log" and self._logs:
                _log.warning("%s", what.text)

    def _say(self, which: str, text: str, *values: object, level: int = logging.WARNING) -> None:
        if which not in self._said:
            self._said.add(which)
            _log.log(level, text, *values)

    def _say_what_is_missing(self, told: _C.Told, figures: Figures) -> None:
        if told.lost:
            self._say(
                "lost",
                "the monitors are not together any more, from here on each tells of its "
                "own rank: %s",
                told.lost,
            )
        elif told.rowless:
            self._say(
                "rowless",
                "the job's store failed: figures of single ranks are not told any more, highest "
                "and lowest ones are: %s",
                told.rowless,
            )
        elif self._writes and not figures.peak_row:
            self._say(
                "no row",
                "rank %d does not show its figures: highest and lowest ones are told without; it "
                "is late, or has lost the job's store",
                figures.peak_rank,
            )
        if self._writes and not self._monitor.knows_peaks:
            self._say(
                "peaks",
                "device peaks within an interval are known only where they are new highest "
                "ones: this build has no trace of the device's allocator",
            )
        if self._writes:
            self._say(
                "host peaks",
                "peaks of resident memory within an interval are told only where they are new "
                "highest ones: the kernel knows those since the start",
                level=logging.INFO,
            )

    def _figures(self, told: _C.Told) -> Figures:
        members = self._meeting.members
        world, *stages = (
            {name: Figure(value, members[rank]) for name, (value, rank) in slot.items()}
            for slot in told.slots
        )
        return Figures(
            step=told.step,
            time=told.time,
            rank=self._meeting.job_rank,
            ranks=self._meeting.ranks,
            keys=tuple(KEYS.values()),
            world=world,
            stages=dict(enumerate(stages)),
            peak_rank=members[told.peak_rank],
            peak_row=told.peak_row,
            # None at most intervals. A rank that has lost the store shows no row.
            rows={rank: row for rank, row in zip(members, told.rows, strict=False) if row},
            dropped=self.feeder.dropped + told.missed,
        )
