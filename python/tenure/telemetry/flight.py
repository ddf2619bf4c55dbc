"""The flight recorder: when a job dies of memory, the evidence does not die with it."""

from __future__ import annotations

import atexit
import json
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tenure import _C, _inputs, clock
from tenure.errors import InputError
from tenure.inspect.files import whole as whole_file
from tenure.inspect.options import say
from tenure.telemetry import snapshot
from tenure.telemetry.headline import headline, top_holder
from tenure.telemetry.presence import FLIGHT, LIVE, REQUEST, this_process
from tenure.telemetry.shortage import Shortage, shortage_in, shortage_of_device
from tenure.telemetry.triggers import Hooks, observe_cuda, uncaught

__all__ = ["SCHEMA", "FlightRecorder", "may_record"]

SCHEMA = 1
_TOGETHER = 60.0  # seconds within which one failure explains the next
_RESERVE = 32 << 20  # bytes of address space, given back when a limit on that is reached
_ROW = 8 << 10  # bytes of a snapshot that is a row
_SET = 256 << 20  # bytes of all ranks' snapshots
_TERMINATION_LOG = "/dev/termination-log"
_MOST_LAST_WORDS = 4096  # bytes: Kubernetes shows no more
_OUTLIERS = (
    "device_allocated_bytes",
    "device_reserved_bytes",
    "device_headroom_bytes",
    "host_rss_bytes",
    "host_headroom_bytes",
)

_current: FlightRecorder | None = None
_started = 0  # recorders, in this process: as many on all ranks

Document = dict[str, Any]


def may_record() -> bool:
    """Whether this process has no recorder at work."""
    return _current is None or not _current._is_here()


class FlightRecorder:
    """Writes a snapshot of this rank when the job fails, is ended, or somebody asks.

    It goes off on an exception that nothing caught, on CUDA's memory having run out, on SIGTERM, on
    ``tenure dump`` and when any other rank's recorder goes off. The rank that failed writes all it
    knows, and so do one rank a stage and the ranks whose memory is highest; the others write a row.
    ``tenure report FOLDER`` shows the set.

    Signals are taken by a thread of C++'s, so that a snapshot is written also while every thread of
    Python's is inside a collective; then they take the course they would have taken.

    Example:
        >>> import pathlib, tempfile
        >>> from tenure.telemetry.flight import FlightRecorder
        >>> with tempfile.TemporaryDirectory() as folder, FlightRecorder(folder) as recorder:
        ...     written = recorder.dump("to see what is in it")
        ...     print(written.name.endswith("-0.flight.json"))
        True
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int = 0,
        ranks: int = 1,
        stage: int = 0,
        stages: int = 1,
        *,
        store: Any = None,
        rows: Callable[[], Sequence[Mapping[str, Any]]] | None = None,
        extremes: Callable[[], Mapping[str, int]] | None = None,
        leads: bool | None = None,
        signals: Iterable[int] = (signal.SIGTERM,),
        seconds: float = 10.0,
        file_bytes: int | str = "8MiB",
        set_bytes: int | str | None = None,
        termination_log: str | os.PathLike[str] | None = None,
        quiet: bool = False,
        ending: Callable[[str], None] | None = None,
    ) -> None:
        """Nothing happens until :meth:`start`, or a ``with`` block.

        Args:
            folder: Where snapshots go; all ranks' the same.
            rank: This one.
            ranks: How many there are.
            stage: The pipeline stage that this rank is of.
            stages: How many there are.
            store: The job's c10d store, which is cloned. None: ranks hear of each other through
                the folder alone.
            rows: Gives the last samples of this rank.
            extremes: Gives, by a figure's name, the rank that has most of it, or least left.
            leads: Whether this rank speaks for its stage; default: if it is the lowest of it, where
                stages are blocks of ranks, or every so many-th rank.
            signals: Those before which a snapshot is written.
            seconds: How long a signal waits for that at most.
            file_bytes: What a snapshot may take.
            set_bytes: What all ranks' snapshots together may take; default: 256 MiB, or 16 KiB a
                rank.
            termination_log: Where the container's last words go; default: the file that
                Kubernetes gives, if there is one.
            quiet: Whether nothing is said on stderr of what this rank has written.
            ending: Called first with what this rank ends of, in a line. Must not raise.

        Raises:
            InputError: What was given cannot mean anything.
        """
        self._rank, self._ranks = _within(rank, ranks, "rank")
        stage, stages = _within(stage, stages, "stage")
        self._folder = Path(folder).absolute()  # the program may go elsewhere
        self._store, self._rows, self._extremes = store, rows, extremes
        self._leads = rank in (stage, stage * (ranks // stages)) if leads is None else leads
        self._signals = [_signal(one) for one in signals]
        if not 0 < seconds <= 600:
            raise InputError(f"a signal can wait for 0 to 600 seconds, not {seconds}")
        self._seconds = seconds
        most = max(_SET, 2 * ranks * _ROW) if set_bytes is None else set_bytes
        self._cap = min(
            _inputs.need_size(file_bytes, "file_bytes"),
            # Those that write all they know: stages' leaders, outliers, and the one that failed.
            (_inputs.need_size(most, "set_bytes") - ranks * _ROW) // (stages + len(_OUTLIERS) + 1),
        )
        if self._cap < _ROW:
            raise InputError(
                f"snapshots of {ranks:,} ranks do not fit into {most} with {file_bytes} each: "
                "give set_bytes or file_bytes more"
            )
        self._termination_log = Path(
            termination_log or os.environ.get("TENURE_TERMINATION_LOG") or _TERMINATION_LOG
        )
        self._quiet = quiet
        self._ending = ending
        self._me = this_process(rank, ranks, stage, stages)
        self._flight: _C.Flight | None = None
        self._hooks: Hooks | None = None
        self._reserve: mmap.mmap | None = None
        self._thread: threading.Thread | None = None
        self._writing = threading.Lock()
        # Failure: when, whether it is of memory, own or told, and the steps until then.
        self._last: tuple[float, str, int] | None = None
        self._short: tuple[float, Shortage, Document] | None = None  # CUDA's, when it was

    @property
    def path(self) -> Path:
        """The file of this rank's snapshot."""
        return self._me.file(self._folder, FLIGHT)

    def start(self) -> Self:
        """Begins. Ends at :meth:`close`, or when the interpreter does.

        Raises:
            InputError: Another recorder of this process is at work, or the folder cannot be used.
        """
        global _current, _started
        if not may_record():
            raise InputError("this process has a flight recorder already: close that one first")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._me.write(self._folder)
        except OSError as error:
            raise InputError(
                f"cannot write snapshots to {self._folder}: {error.strerror}: give another folder"
            ) from None
        try:
            flight = self._threads(f"tenure/flight/{self._me.attempt}.{_started}")
        except BaseException:
            self._me.file(self._folder, LIVE).unlink(missing_ok=True)
            raise
        _started += 1
        self._flight = flight
        self._reserve = mmap.mmap(-1, _RESERVE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._thread = threading.Thread(
            target=self._serve, args=(flight,), name="tenure-flight", daemon=True
        )
        self._thread.start()
        self._hooks = Hooks(self.failed)
        observe_cuda(self._ran_short)
        atexit.register(self.end)
        _current = self
        return self

    def _threads(self, prefix: str) -> _C.Flight:
        flight = _C.Flight(str(self.path), json.dumps({"schema": SCHEMA, **self._me.as_json()}))
        flight.watch(
            self._store,
            str(self._folder / REQUEST),
            prefix,
            self._rank,
            self._ranks,
            json.dumps({"reason": "told", "text": ""}),
        )
        flight.take_signals(
            {int(one): json.dumps(_of_signal(one)) for one in self._signals}, self._seconds
        )
        return flight

    def dump(self, reason: str) -> Path:
        """Writes this rank's snapshot now and asks all others for theirs.

        Args:
            reason: Why, as the snapshots will say.

        Returns:
            The file, which is this rank's alone.
        """
        told = self._told("request", reason)
        self._need_flight().tell(json.dumps(told))
        with self._turn():
            self._write({"reason": "request", "text": reason}, whole=True)
            self._last = None
        return self.path

    def failed(self, error: BaseException) -> Path | None:
        """Says that this rank has failed, for an exception that was caught. Never raises.

        Returns:
            The file, or None if there is none.
        """
        if not self._is_here():
            return None
        with self._never_in_the_way():
            shortage = self._shortage(error)
            kind = "own" if shortage is None else "memory"
            told = {"text": snapshot.sentence(error), "fatal": True}
            if shortage is None:
                told["reason"] = "exception"
            else:
                told |= {"reason": "memory", **shortage.as_json()}
            self._fail(kind, told, error)
        return self.path if self.path.exists() else None

    def close(self) -> None:
        """Ends it, in about a second. What was there before has signals and exceptions again."""
        global _current
        if not self._is_here():
            return
        assert self._flight is not None
        assert self._hooks is not None
        assert self._thread is not None
        atexit.unregister(self.end)
        self._hooks.remove()
        observe_cuda(None)
        self._wait_for_turn()
        self._flight.close()
        self._thread.join()
        self._flight = None
        self._drop_reserve()
        self._me.file(self._folder, LIVE).unlink(missing_ok=True)
        _current = None

    def end(self) -> None:
        """Closes it where the process ends; of what, it may not have been told."""
        error = uncaught()
        if isinstance(error, Exception):  # whoever put a hook over ours may not have called it
            self.failed(error)
        self.close()

    def __enter__(self) -> Self:
        """Starts it."""
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes it; what is raised through it counts as failed."""
        if isinstance(error, Exception):
            self.failed(error)
        self.close()

    def _is_here(self) -> bool:
        """Whether it is at work, and this is its process and no child."""
        return self._flight is not None and self._me.pid == os.getpid()

    def _need_flight(self) -> _C.Flight:
        if self._flight is None or not self._is_here():
            raise InputError("this flight recorder is not at work: call start() in this process")
        return self._flight

    # What comes from outside, on a thread of its own.

    def _serve(self, flight: _C.Flight) -> None:
        while (request := flight.next()) is not None:
            number, signal_number, text = request
            try:
                with self._never_in_the_way():
                    if signal_number:
                        self._fail("own", _of_signal(signal.Signals(signal_number)))
                    else:
                        self._hear(text)
            finally:
                flight.done(number)

    def _hear(self, text: str) -> None:
        """Another rank has failed, or somebody asks."""
        told = _parsed(text)
        failure = told.get("reason") != "request"
        if failure and (self._is_explained("told") or not self._is_of_this_job(told)):
            return
        with self._turn():
            if failure:
                self._mark("told")
                said = {"reason": "told", "text": _said(told)}
            else:
                said = {"reason": "request", "text": str(told.get("text", ""))}
                self._last = None  # what explains others is not there any more but in brief
            self._write(said, whole=self._speaks(), after=told if failure else None, of=told)
            if failure:
                self._last_words(f"stopped after {_said(told)}")

    def _is_of_this_job(self, told: Document) -> bool:
        """Another one may have the same folder. Some launchers give their job no name."""
        jobs = {told.get("job") or "", self._me.job} - {""}
        return len(jobs) < 2

    # What happens here.

    def _fail(self, kind: str, told: Document, error: BaseException | None = None) -> None:
        if self._ending is not None:
            by = "ended by " if told["reason"] == "signal" else ""
            self._ending(by + told["text"])
        # A signal takes its course when it has had its turn: what explains it is written by then.
        with self._turn():
            if self._is_explained(kind):
                return
            flight = self._need_flight()
            self._mark(kind)
            self._drop_reserve()
            first = flight.tell(json.dumps(self._told(told["reason"], told["text"])))
            is_whole = first or kind == "memory" or self._speaks()
            document = self._write(told, whole=is_whole, error=error)
            self._remember(document)
            said = headline(document)
            held = top_holder(document)
            said += f"; {held}" if held else ""
            self._last_words(said)
            if not self._quiet:
                say(f"{said}\nsee: tenure report {self._folder}")

    def _ran_short(self, device: int, asked: int, free: int) -> None:
        """CUDA's allocator gives up; the program may yet go on. Storages are as they were."""
        now = time.monotonic()
        if not self._is_here() or (self._short and now - self._short[0] < _TOGETHER):
            return
        with self._never_in_the_way():
            shortage = shortage_of_device(f"cuda:{device}", asked, free)
            self._short = (now, shortage, {})
            told = {"reason": "memory", "text": "", "fatal": False, **shortage.as_json()}
            with self._turn():
                self._short = (now, shortage, self._write(told, whole=True))
                self._remember(self._short[2])

    def _shortage(self, error: BaseException) -> Shortage | None:
        shortage = shortage_in(error)
        if shortage is None or shortage.device == "cpu" or self._short is None:
            return shortage
        when, observed, _ = self._short
        return observed if time.monotonic() - when < _TOGETHER else shortage

    def _is_explained(self, kind: str) -> bool:
        """Whether what was written a moment ago is the cause of this, and better evidence."""
        if self._last is None or time.monotonic() - self._last[0] > _TOGETHER:
            return False
        _, last, step = self._last
        if last != "told" and clock.steps() > step:
            return False  # that was survived
        return not (kind == "memory" and last != "memory")

    def _mark(self, kind: str) -> None:
        self._last = (time.monotonic(), kind, clock.steps())
        self._need_flight().keep()

    def _remember(self, document: Document) -> None:
        """What it survives, if the program goes on, is in the snapshots that take its place."""
        self._need_flight().remember(json.dumps(snapshot.brief(document)))

    def _told(self, reason: str, text: str) -> Document:
        """What other ranks are told."""
        who = {"rank": self._rank, "pid": self._me.pid, "host": self._me.host, "job": self._me.job}
        return {"reason": reason, "text": text, **who, "time": time.time()}

    def _speaks(self) -> bool:
        """Whether this rank writes all it knows when another one failed."""
        extremes = self._extremes() if self._extremes is not None else {}
        return self._leads or any(extremes.get(name) == self._rank for name in _OUTLIERS)

    def _write(
        self,
        told: Document,
        *,
        whole: bool,
        error: BaseException | None = None,
        after: Document | None = None,
        of: Document | None = None,
    ) -> Document:
        """Writes the snapshot, first what is quick to know."""
        deadline = time.monotonic() + self._seconds * 0.8
        document: Document = json.loads(self._need_flight().row(json.dumps(told)))
        document["whole"] = whole
        if told["reason"] in ("memory", "exception"):
            document.pop("earlier", None)  # it is about the same, or tells more
        if after is not None:
            document["after"] = after
        if of is not None and "id" in of:
            document["request"] = of["id"]
        if error is not None:
            document["trace"] = snapshot.frames_of(error.__traceback__)
        if not whole:
            if self._rows is not None:
                document["samples"] = [dict(row) for row in self._rows()[-1:]]
            self._put(document)
            return document
        snapshot.add_quick(document, self._rows)
        self._put({**document, "pending": ["holders"]})
        if self._short and self._short[2].get("holders") and told["reason"] == "memory":
            document["holders"] = self._short[2]["holders"]
        else:
            snapshot.add_holders(document, deadline)
        self._put(document)
        return document

    def _put(self, document: Document) -> None:
        text = snapshot.fitted(document, self._cap if document["whole"] else _ROW)
        with whole_file(self.path) as file:
            file.write(text)

    def _last_words(self, text: str) -> None:
        """Tells Kubernetes, which shows them with the container's end."""
        if self._termination_log.is_file():
            words = f"tenure: {text}\n".encode()[:_MOST_LAST_WORDS].decode(errors="ignore")
            with suppress(OSError):
                self._termination_log.write_text(words)

    def _drop_reserve(self) -> None:
        if self._reserve is not None:
            self._reserve.close()
            self._reserve = None

    @contextmanager
    def _never_in_the_way(self) -> Any:
        try:
            yield
        except Exception as error:  # noqa: BLE001  the program's own failure is what matters
            say(f"flight recorder: a snapshot is missing or in part: {snapshot.sentence(error)}")

    @contextmanager
    def _turn(self) -> Any:
        """One snapshot at a time."""
        if not self._wait_for_turn(keep=True):
            raise TimeoutError("another snapshot takes too long")
        try:
            yield
        finally:
            self._writing.release()

    def _wait_for_turn(self, *, keep: bool = False) -> bool:
        """Waits in short turns: who writes may wait for this thread to come to a safe moment."""
        deadline = time.monotonic() + self._seconds
        while not self._writing.acquire(timeout=0.02):
            if time.monotonic() > deadline:
                return False
        if not keep:
            self._writing.release()
        return True


def _signal(number: int) -> signal.Signals:
    try:
        return signal.Signals(number)
    except ValueError:
        raise InputError(f"there is no signal {number!r}: give signal.SIGTERM, say") from None


def _of_signal(one: signal.Signals) -> Document:
    return {"reason": "signal", "text": one.name, "fatal": True}


def _parsed(text: str) -> Document:
    """What was told; a file that a person wrote may say anything."""
    try:
        told = json.loads(text)
    except ValueError:
        told = None
    return told if isinstance(told, dict) else {"reason": "request", "text": text.strip()[:200]}


def _said(told: Mapping[str, Any]) -> str:
    return f"rank {told.get('rank')}: {told.get('text')}"


def _within(number: int, count: int, what: str) -> tuple[int, int]:
    _inputs.need_integer(number, what)
    _inputs.need_integer(count, f"the number of {what}s")
    if not 0 <= number < count:
        raise InputError(f"{what} {number} is none of {count}")
    return number, count
