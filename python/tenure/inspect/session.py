"""Watching this process: from the first step to the verdict at the end."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tenure import _C
from tenure._build import VERSION
from tenure.clock import follow_optimizers
from tenure.errors import InputError, TenureError
from tenure.inspect import constructors, crowd, devices, local, recordings, verdicts
from tenure.inspect.coordinates import found_coordinates, found_gpu, found_rank
from tenure.inspect.inquiry import Inquiry, Suspects
from tenure.inspect.kinds import marked_tensors
from tenure.inspect.modules import name_modules
from tenure.inspect.options import AGENT, VARIABLE, Options, job_of, rank_of, recording_names, say
from tenure.inspect.redact import redactor, without_names
from tenure.inspect.source import library_folders
from tenure.inspect.suspects import in_backward_elsewhere
from tenure.inspect.telling import Turn, conclude, is_at_stake, is_long

__all__ = ["Session", "watch", "watch_from_environment"]

_MIND_COST_AFTER = 60.0  # seconds
_SEARCH_AGAIN = 0.005  # of the time may have gone to coordinates before they are searched again
_FREE_SEARCHES = 8  # of a program that has steps, while none are found
_BEGINNING = 30.0  # seconds
_MAIN_WAITS = 2.0  # seconds without a bytecode of the main thread
_INTERVAL = 0.01  # seconds, at first; later a hundredth of the time so far


class Session:
    """One session of watching; :func:`watch` starts it.

    Use it as a context manager or call :meth:`stop`; without either it ends with the program.

    Attributes:
        options: How this process is watched.
        pid: The process; in a forked child the session does nothing.
        recording: The file that it is recorded in, if it is.
    """

    def __init__(self, options: Options) -> None:
        """Starts watching.

        Raises:
            InputError: The recording cannot be made.
            TenureError: The process is being watched already.
        """
        _install_frames()
        self.options = options
        self._redact = redactor(options.redact)
        self._host = socket.gethostname()
        self.pid = os.getpid()
        self._began = time.monotonic()
        self.recording = self._recording_path()
        first = crowd.at_first(options)
        self._level = first.level
        self._crowd = crowd.Crowd(options) if crowd.chooses(options) else None
        self._watch = self._start(first)
        self._stopped = False
        self._for_files = _for_files(options, self._redact)
        self._inquiry = Inquiry(self._for_files)
        self._rank = rank_of()
        self._coordinates: dict[str, int] = {}
        self._searching, self._searches = 0.0, 0  # seconds and times that it took to find them
        self._considered = False  # whether this rank is traced
        self._asked: float | None = None  # when the main thread was asked to judge
        self._postponed = False  # judging, because of what other threads do
        self._suspected_at = 0
        self._told = ""
        self._turn = Turn(self.recording)
        self._unit = "step"
        self._last_step = 0
        self._steps_seen = 0
        self._judging = threading.Lock()
        try:
            if first.level != "count" and _C.any_tensor():
                self._adopt()
        except BaseException:
            del self._watch  # the exception may keep the rest
            raise
        devices.watch_when_used()
        constructors.watch()
        _C.watch_arenas()
        self._optimizers = follow_optimizers()
        self._steps = _C.on_step(self._step_ended)
        self._timer = threading.Thread(target=self._keep_time, name="tenure-watch", daemon=True)
        self._end_timer = threading.Event()
        self._timer.start()
        atexit.register(self.stop)

    def __enter__(self) -> Session:
        """Nothing happens: it watches already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stops watching."""
        self.stop()
        _resume()

    def _adopt(self) -> None:
        """Makes all storages that are alive known one by one."""
        with _C.References([]) as references:
            references.adopt()

    def _start(self, options: Options) -> _C.Watch:
        """With a recording, or without if the disk is full."""
        about = _about(options, self._redact(self._host))
        if self.recording is not None:
            try:
                path = str(self.recording)
                return _C.Watch(options.level, path, options.cap, about, self._redact)
            except InputError:
                raise
            except TenureError as error:
                say(f"nothing is recorded: {error}")
                self.recording = None
        return _C.Watch(options.level, "", options.cap, about, self._redact)

    def _recording_path(self) -> Path | None:
        if not self.options.out or not _C.can_record():
            return None
        path = local.recording_path(self.options, recording_names(self._redact(self._host)))
        if path.parent != Path(self.options.out) and rank_of() == 0 and not self.options.quiet:
            say(f"recording to {path.parent} on this node, copied to --out at the end")
        return path

    def verdict(self) -> verdicts.Document:
        """The verdict so far, as in the JSON file."""
        judged = self._watch.judge()
        # Those that came up since the last time, while what holds them is there.
        with contextlib.suppress(TenureError):
            if self._look_at_graphs():
                judged = self._watch.judge()
            new = self._inquiry.unseen(judged["suspects"]) if judged["verdict"] == "leak" else []
            if self._look(new):
                judged = self._watch.judge()
        return self._document(judged)

    def _place(self) -> dict[str, int]:
        """Coordinates in the job; what was known before its groups were destroyed stays known."""
        began = time.perf_counter()
        steps = self._unit == "step"
        free = steps and not self._coordinates and self._searches < _FREE_SEARCHES
        if free or self._searching <= _SEARCH_AGAIN * (time.monotonic() - self._began):
            self._coordinates = found_coordinates() or self._coordinates
            self._searching += time.perf_counter() - began
            self._searches += steps
        return self._coordinates

    def _own_rank(self) -> int:
        """As the process group knows it, and once it is destroyed as it was known."""
        found = found_rank()
        self._rank = self._rank if found is None else found
        return self._rank

    def _put_place(self) -> None:
        self._watch.put("rank", str(self._own_rank()))
        self._watch.put("coordinates", json.dumps(self._place(), ensure_ascii=False))
        self._watch.put("gpu", found_gpu())

    def _document(self, judged: dict[str, Any]) -> verdicts.Document:
        origins = {s["origin"]: _origin(s["origin"]) for s in judged["suspects"]}
        process = {
            "rank": self._own_rank(),
            "host": self._host,
            "pid": self.pid,
            "file": self.recording.name if self.recording else "",
            "unit": self._unit,
            "level": self._level,
            "cost": self._watch.cost(),
            "left": _bytes_left(),
            "last": self._last_step,
            "coordinates": self._place(),
            "gpu": found_gpu(),
            "cycles": self._inquiry.cycles,
        }
        return verdicts.document(judged, origins, self._inquiry.holdings, process)

    def stop(self, *, silently: bool = False) -> None:
        """Stops watching and says the verdict; the recording is complete. Again: nothing.

        Args:
            silently: Whether another session goes on in its place, and will say it.
        """
        if self._stopped or os.getpid() != self.pid:
            return
        self._stopped = True
        atexit.unregister(self.stop)
        self._end_timer.set()
        self._timer.join(1.0)
        constructors.unwatch()
        _C.unwatch_arenas()
        self._optimizers.remove()
        self._steps.end()
        devices.unwatch()
        with contextlib.suppress(TenureError):
            name_modules()
        self._mark_kinds()
        verdict = self.verdict()
        if verdict["verdict"] not in {"leak", "growth"}:
            self._withdraw()
        self._put_place()
        self._watch.put("cost", f"{self._watch.cost():.5f}")
        self._watch.put("ended", "yes")
        broken = self._watch.broken()
        del self._watch  # the recording is complete
        if broken:
            say(f"nothing is recorded any more{self._recorded_until()}: {broken}")
        elif self.recording is not None:
            self.recording = local.send(self.recording, self.options)
        self._turn.end()
        if self._crowd is not None:
            self._crowd.end()
        if silently and self.recording is not None:
            return
        conclude(verdict, self._for_files(verdict), self.recording, self.options, broken)

    def _recorded_until(self) -> str:
        """Where a recording ends that ends early, if it has anything at all."""
        last = recordings.last_step_of(self.recording) if self.recording is not None else None
        return f" after {self._unit} {last:,}" if last is not None else ""

    def _step_ended(self, step: int) -> None:
        """Called by the clock on the thread that announced the step, after the row was taken."""
        if self._unit != "step":
            self._unit = "step"
            self._watch.put("unit", "step")
        self._last_step = step
        self._inquiry.count_graphs(step)
        if devices.history is not None:
            devices.history.read()
        self._steps_seen += 1
        if self._steps_seen.bit_count() == 1:  # at each doubling, for a little in all
            self._mark_kinds()
        due = self._watch.due() or self._postponed
        if self._crowd is not None and self._level == "count":
            called = self._crowd.called
            if called or due or not self._considered:
                self._considered = self._consider(called)
        if due:
            self._judge()

    def _mark_kinds(self) -> None:
        """Names modules, and writes down what is a parameter, a gradient, or an optimizer's."""
        if _C.observed_level() == "count":
            return
        began = time.perf_counter()
        try:
            name_modules()
            marked = marked_tensors()
            self._inquiry.follow([tensor for tensor, kind, _ in marked if kind == "parameter"])
            if self.recording is not None:
                self._watch.mark(marked)
        except Exception as error:  # noqa: BLE001  the program goes on, whatever it is made of
            self._watch.note("error", f"kinds of storages: {type(error).__name__}")
        self._watch.spend(time.perf_counter() - began)

    def _keep_time(self) -> None:
        """Gives a program without steps intervals of time in their place."""
        wait = _INTERVAL
        count = 0
        while not self._end_timer.wait(wait):
            if self._unit == "step" and _C.step_now() > 0:
                return
            if count == 0:
                self._unit = "interval"
                self._watch.put("unit", "interval")
            count += 1
            self._last_step = count
            if not self._watch.end_interval(count):  # the clock ticks by now
                return
            if self._watch.due() or self._postponed:
                self._asked = self._asked or time.monotonic()
                _C.call_on_main_thread(self._judge_when_asked)
            if self._asked is not None and time.monotonic() - self._asked > _MAIN_WAITS:
                self._judge_when_asked()  # the main thread waits for something
            wait = max(_INTERVAL, (time.monotonic() - self._began) / 100)

    def _judge_when_asked(self) -> None:
        if self._asked is not None:
            self._asked = None
            self._judge()

    def _judge(self) -> None:
        """Judges, and looks at holders if there is reason to."""
        self._postponed = in_backward_elsewhere()
        if self._stopped or self._postponed or not self._judging.acquire(blocking=False):
            return
        began = time.perf_counter()
        try:
            name_modules()
            verdict = self._watch.judge()
            if self._inquiry.accuse(self._watch, self._last_step, verdict):
                verdict = self._watch.judge()
            if self._look_at_graphs():
                verdict = self._watch.judge()
            if self._look([*verdict["suspects"], *verdict["filling"]]):
                verdict = self._watch.judge()
            elif verdict["verdict"] == "growth" and self._inquiry.has_time():
                self._inquiry.find_foreign()
            self._tell(verdict)
            self._mind_cost()
            self._watch.put("cost", f"{self._watch.cost():.5f}")
            left = _bytes_left()
            self._watch.put("left", str(left) if left is not None else "")
            self._put_place()
            if self._crowd is not None and self._unit == "step" and verdict["seconds_per_step"]:
                self._crowd.leave(self._last_step, crowd.growth_in(verdict), self._place())
        except TenureError as error:
            self._watch.note("error", str(error))
        finally:
            self._judging.release()
            self._watch.spend(time.perf_counter() - began)

    def _look_at_graphs(self) -> bool:
        return self._inquiry.look_at_graphs(self._watch, self._last_step)

    def _look(self, suspects: Suspects) -> bool:
        return self._inquiry.look(self._watch, self._last_step, suspects)

    def _tell(self, judged: dict[str, Any]) -> None:
        """Speaks up once growth has lasted, or at once if memory will not.

        See Note [Speaking while the program runs] in telling.py.
        """
        kind = judged["verdict"]
        if kind not in {"leak", "growth"}:
            self._suspected_at = 0
            self._withdraw()
            return
        self._suspected_at = self._suspected_at or judged["steps"]
        if self.options.quiet or self._told == kind:
            return
        if self._unit == "interval" and time.monotonic() - self._began <= _BEGINNING:
            return  # a program's beginning looks like growth
        twice = judged["steps"] >= 2 * self._suspected_at
        lasted = twice and is_long(judged, self._last_step)
        if not lasted and not is_at_stake(judged, self._last_step, _bytes_left_for(judged)):
            return
        if not self._turn.take(kind):
            return
        self._told = kind
        say(verdicts.first_screen(self._document(judged)))

    def _withdraw(self) -> None:
        """Takes back what was said while the program ran, if anything was."""
        if self._told:
            say(f"the {self._told} reported earlier is not seen any more")
            self._told = ""

    def _consider(self, why: str) -> bool:
        """Goes up to tracing if this rank is the lowest of its stage, or stands out.

        Returns whether that is decided for now; otherwise the next step decides it.
        """
        if not why and not crowd.represents(self._place()):
            return True
        if in_backward_elsewhere():
            return False
        began = time.perf_counter()
        why = why or "it is the lowest rank of its stage"
        self._level = self.options.level
        self._watch.step_up(self._level, self.options.cap)
        with contextlib.suppress(TenureError):
            self._adopt()
        self._watch.spend(time.perf_counter() - began)
        self._watch.put("level", self._level)
        self._watch.note("stepped up", f"{why}: from now on each storage is traced")
        return True

    def _mind_cost(self) -> None:
        """Steps down to counting if watching takes more time or memory than it may."""
        if _C.observed_level() == "count":
            return
        cost, memory = 100 * self._watch.cost(), _C.observer_bytes()
        lasts = time.monotonic() - self._began > _MIND_COST_AFTER
        if memory > self.options.memory:
            took = f"took {memory / 1e6:,.0f} MB"
        elif lasts and cost > self.options.cost:
            took = f"cost {cost:.0f} % of the time"
        else:
            return
        _C.step_down("count")
        text = f"watching {took}, more than it may: from now on bytes are only counted"
        self._watch.note("stepped down", text)
        say(text)


_session: Session | None = None  # the one that `tenure run` began
_interrupted = False  # by one of the program's own
_frames_installed = False


def watch(
    out: str | os.PathLike[str] | None = None,
    *,
    level: str = "trace",
    json: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> Session:
    """Watches this process from now on: for notebooks, and programs that start it themselves.

    Args:
        out: Folder for the recording; default: that of `tenure run`, or none, and the verdict is
            made from memory.
        level: ``count``, ``trace`` or ``deep``, from the cheapest to the most told.
        json: File for the verdict at the end.
        quiet: Says nothing on stderr.

    Example:
        >>> import tenure, torch
        >>> with tenure.watch(quiet=True) as session:
        ...     model = torch.nn.Linear(256, 256)
        ...     optimizer, kept = torch.optim.SGD(model.parameters()), []
        ...     for _ in range(40):
        ...         loss = model(torch.randn(64, 256)).square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...         kept.append(model(torch.randn(64, 256)))
        ...     verdict = session.verdict()
        >>> verdict["verdict"]
        'leak'
    """
    _give_way()
    asked = replace(_from_environment(), level=level, quiet=quiet)
    if out is not None:
        asked = replace(asked, out=os.fspath(out))
    if json is not None:
        asked = replace(asked, json=os.fspath(json))
    return Session(asked)


def watch_apart() -> Session:
    """Watches this process for a while, for the caller alone: nothing is said or recorded.

    What `tenure run` began goes on when the session is left.
    """
    _give_way()
    return Session(Options(quiet=True))


def _give_way() -> None:
    """Interrupts the watching that `tenure run` began: its recording is complete so far."""
    global _session, _interrupted
    if _session is None or os.getpid() != _session.pid:
        return
    _session.stop(silently=True)
    _session = None
    _interrupted = True


def _resume() -> None:
    """Goes on with it, in another recording of the same run."""
    global _interrupted
    if _interrupted:
        _interrupted = False
        watch_from_environment()


def stand_in(session: Session | None) -> None:
    """Makes this the one that gives way when the program watches itself; None: it has ended."""
    global _session
    _session = session


def _from_environment() -> Options:
    return Options.parse(os.environ.get(VARIABLE, ""))


def watch_from_environment() -> None:
    """Watches this process as the variable ``TENURE`` says; the start-up hook calls it."""
    global _session
    if _session is None and os.environ.get(VARIABLE, AGENT) not in {"", AGENT}:
        _session = Session(_from_environment())


def _install_frames() -> None:
    global _frames_installed
    if _frames_installed:
        return
    _frames_installed = True
    _C.install_frames(
        f"{Path(torch.__file__).parent}/",
        list(library_folders()),
        nn.Module._wrapped_call_impl.__code__,
    )


def _about(options: Options, host: str) -> list[tuple[str, str]]:
    """What a recording says of its process. No argument, path or variable that may be secret."""
    allowed = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "SLURM_JOB_ID")
    return [
        ("rank", str(rank_of())),
        ("host", host),
        ("pid", str(os.getpid())),
        ("began", datetime.now(UTC).isoformat(timespec="milliseconds")),
        ("began_ns", str(time.monotonic_ns())),
        ("run", options.run),
        ("job", job_of()),
        ("level", options.level),
        ("tenure", VERSION),
        ("torch", torch.__version__),
        ("python", platform.python_version()),
        ("machine", platform.machine()),
        *((f"env {name}", os.environ[name]) for name in allowed if name in os.environ),
    ]


def _for_files(options: Options, redact: _C.Redactor) -> Callable[[Any], Any]:
    """What files may say, which is less than the terminal if names are to be hashed there."""
    return lambda told: without_names(told, redact) if options.redact else told


def _origin(number: int) -> dict[str, Any]:
    origin = _C.origin(number)
    return {**origin, "device": _C.device_from_tag(origin["device"])}


def _bytes_left() -> int | None:
    """How far this process may grow before something kills it."""
    process = _C.sample().process
    left = [process.host_available]
    if process.cgroup is not None:
        left.append(process.cgroup.headroom)
    return min((value for value in left if value is not None), default=None)


def _bytes_left_for(judged: dict[str, Any]) -> int | None:
    """How far what grows may do so: storages on a device until that is full."""
    places = {_origin(suspect["origin"])["device"] for suspect in judged["suspects"]}
    left = [
        device.driver.free + (_unused_in(device.allocator) if device.allocator else 0)
        for device in _C.sample().devices
        if device.driver is not None and (not places or str(device.device) in places)
    ]
    if not places or any(place.startswith("cpu") for place in places):
        on_host = _bytes_left()
        left += [on_host] if on_host is not None else []
    return min(left, default=None)


def _unused_in(allocator: _C.AllocatorSample) -> int:
    """What torch took from the driver and has in no tensor."""
    return max(0, allocator.reserved.current - allocator.active.current)
