"""What the agent does once someone has attached: one look, or watching until they leave.

All of it runs on the agent's thread but for what needs a safe moment (``moments``).
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tenure import _C
from tenure.inspect import looking, session, verdicts
from tenure.inspect.agent import Agent, AgentError, Line
from tenure.inspect.moments import Job, MainThread, NotNow, at_rest, in_backward
from tenure.inspect.options import Options, say_to
from tenure.inspect.redact import redactor, without_names

__all__ = ["do"]

_ANOTHER_WAY = 0.2  # seconds in which the main thread could have done it, if it were awake
_NEWS = 1.0  # seconds between two of what the client is told at least
_SHARE = 0.01  # of the time may go to judging for the status
_LAST_WORDS = 5.0  # seconds that a program's end waits for the client to be told


def do(agent: Agent, line: Line, asked: dict[str, Any]) -> None:
    """What the client asked for.

    Raises:
        AgentError: It cannot be done.
        EOFError, OSError: The client has left; nothing is watched any more.
    """
    try:
        options = Options.parse(str(asked.get("options", "")))
        patience = float(asked.get("patience", 0.0))
    except (TypeError, ValueError) as error:
        raise AgentError(f"{error}") from None
    errand = _Errand(agent, line, patience)
    if asked["ask"] == "look":
        _look(errand, options)
    else:
        _watch(errand, replace(options, quiet=True, json=""))


class _Errand:
    """One client's."""

    def __init__(self, agent: Agent, line: Line, patience: float) -> None:
        self.agent = agent
        self.line = line
        self._patience = patience
        self._main = MainThread()

    def at_a_safe_moment(self, work: Callable[[], None]) -> float:
        """Has it done and returns the seconds that the program stood still."""
        job = Job(work)

        def other_way(waited: float) -> None:
            if self._main.sleeps() and waited > _ANOTHER_WAY:
                job.run_if_safe()
            if waited > self._patience and job.give_up():
                raise AgentError(self._why_not())

        self._wait(job, other_way)
        return job.seconds

    def on_main_thread(self, work: Callable[[], None], is_ready: Callable[[], bool]) -> None:
        """Has it done there; raises AgentError if that thread sleeps."""
        job = Job(work, is_ready)

        def other_way(waited: float) -> None:
            late = waited > self._patience or (self._main.sleeps() and waited > _ANOTHER_WAY)
            if late and job.give_up():
                raise AgentError(self._why_not())

        self._wait(job, other_way)

    def _wait(self, job: Job, other_way: Callable[[float], None]) -> None:
        began = told = time.monotonic()
        pause = 0.001
        try:
            while not job.done.wait(pause):
                now = time.monotonic()
                job.post()
                other_way(now - began)
                if now - told > _NEWS and not job.is_taken:
                    told = now
                    self.line.send({"waits": self._what_for()})
                self.agent.attend(self.line, 0.0)
                pause = min(0.05, pause * 1.5)
        except (EOFError, OSError):
            while not job.give_up() and not job.done.wait(pause):
                pass
            raise
        if job.error:
            raise AgentError(job.error)

    def _why_not(self) -> str:
        return (
            f"process {self.agent.pid} could not be looked at for {self._patience:g} s: "
            f"{self._what_for()}; try again, or give --timeout more seconds"
        )

    def _what_for(self) -> str:
        if in_backward():
            return "a thread is inside backward(), which changes what a look reads"
        if self._main.sleeps():
            return "its main thread waits for something, and other threads are busy"
        return "its threads are in long calls"


def _look(errand: _Errand, options: Options) -> None:
    found: dict[str, Any] = {}
    seconds = errand.at_a_safe_moment(lambda: found.update(looking.look()))
    errand.agent.took(seconds)
    found["pause"] = round(seconds, 3)
    errand.line.send({"look": found, "written": _for_files(found, options)})


def _for_files(document: dict[str, Any], options: Options) -> Any:
    return without_names(document, redactor(options.redact)) if options.redact else document


class _Session(session.Session):
    """Watching for a client: it says nothing, and may be ended by any thread at any time.

    So what it does at the ends of steps excludes its end, and the other way round. The main thread
    may be asked to end it between two bytecodes of just that: then it has to be asked again.
    """

    def __init__(self, options: Options) -> None:
        self._ending = threading.RLock()
        self._busy = threading.Lock()
        self._judged_at = 0.0
        self._judging_took = 0.0
        self.heard = True  # the client is there
        self.why_ended = ""
        self.told = threading.Event()  # the client has the verdict
        self.last: verdicts.Document = {}
        try:
            super().__init__(options)
        except NotNow:
            if self.recording is not None:
                self.recording.unlink(missing_ok=True)
            raise

    @property
    def stopped(self) -> bool:
        return self._stopped

    def _adopt(self) -> None:
        with at_rest([]) as references:
            references.adopt()

    def verdict(self) -> verdicts.Document:
        """With a look at new suspects, unless nobody is there to hear of them."""
        if self.heard:
            self.last = super().verdict()
        else:
            self.last = self._document(self._watch.judge())
        return self.last

    def stop(self, *, silently: bool = True) -> None:
        """Whoever comes second waits until it is over. It never speaks for other ranks."""
        del silently
        with self._ending, self._busy:
            try:
                super().stop(silently=True)
            except BaseException:
                self.__dict__.pop("_watch", None)  # whatever happened, nothing is watched now
                raise

    def is_free(self) -> bool:
        """Whether this thread may end it now, rather than be in the middle of something."""
        return not self._busy.locked()

    def _step_ended(self, step: int) -> None:
        self._unless_busy(lambda: super(_Session, self)._step_ended(step))

    def _judge_when_asked(self) -> None:
        self._unless_busy(super()._judge_when_asked)

    def _unless_busy(self, work: Callable[[], None]) -> None:
        if not self._busy.acquire(blocking=False):
            return
        try:
            if not self._stopped:
                work()
        finally:
            self._busy.release()

    def stop_unheard(self) -> None:
        """From any thread at any time: nothing is looked at."""
        self.heard = False
        self.stop()

    def status(self) -> dict[str, Any] | None:
        """How it stands, or None if it is over, or was asked for a moment ago."""
        now = time.monotonic()
        if now - self._judged_at < max(_NEWS, self._judging_took / _SHARE):
            return None
        with self._ending:
            if self._stopped:
                return None
            judged = self._watch.judge()
            cost = self._watch.cost()
        self._judged_at = time.monotonic()
        self._judging_took = self._judged_at - now
        return {
            "steps": judged["steps"],
            "last": self._last_step,
            "unit": self._unit,
            "held": _C.held_bytes(),
            "verdict": judged["verdict"],
            "bytes_per_step": round(judged["per_step"]),
            "cost": round(cost, 4),
        }

    def end_with_program(self) -> None:
        if os.getpid() != self.pid:
            return
        self.why_ended = "the program ended"
        self.stop()
        self.told.wait(_LAST_WORDS)


def _watch(errand: _Errand, options: Options) -> None:
    if _C.observed_level() != "off":
        pid = errand.agent.pid
        raise AgentError(
            f"process {pid} is being watched already: `tenure attach {pid} --once` takes a look "
            "all the same, and `tenure why RUN` reads what it records"
        )
    said: deque[str] = deque()
    started: list[_Session] = []
    say_to(said.append)
    try:
        seconds = errand.at_a_safe_moment(lambda: started.append(_Session(options)))
        watching = started[0]
        atexit.register(watching.end_with_program)
        session.stand_in(watching)
        recording = str(watching.recording or "")
        errand.line.send({"watching": {"pause": round(seconds, 3), "recording": recording}})
        _until_detached(errand, watching, said)
        _stop(errand, watching)
        _tell_rest(errand, said)
        errand.line.send(
            {
                "verdict": watching.last,
                "written": _for_files(watching.last, options),
                "recording": str(watching.recording or ""),
                "ended": watching.why_ended,
            }
        )
    finally:
        for watching in started:
            watching.stop_unheard()
            atexit.unregister(watching.end_with_program)
            session.stand_in(None)
            watching.told.set()
        say_to(None)


def _until_detached(errand: _Errand, watching: _Session, said: deque[str]) -> None:
    while not watching.stopped:
        message = errand.agent.hear(errand.line, 0.1)
        if message is not None and message.get("ask") == "detach":
            return
        _tell_rest(errand, said)
        status = watching.status()
        if status is not None:
            errand.line.send({"status": status})
    watching.why_ended = watching.why_ended or "the program watches itself from now on"


def _tell_rest(errand: _Errand, said: deque[str]) -> None:
    while said:
        errand.line.send({"said": said.popleft()})


def _stop(errand: _Errand, watching: _Session) -> None:
    """With a look at what is suspected, if the main thread can take it."""
    if watching.stopped:
        watching.stop()  # it is over once this returns
        return
    try:
        errand.on_main_thread(watching.stop, watching.is_free)
    except AgentError:
        watching.stop_unheard()
