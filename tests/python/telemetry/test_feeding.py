"""Sinks that are slow, fail or hang, and the program that goes on."""

from __future__ import annotations

import logging
import os
import statistics
import subprocess
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forks import run_forked
from intervals import interval
from tenure.errors import InputError
from tenure.telemetry.feeding import Feeder
from tenure.telemetry.figures import Figures
from tenure.telemetry.sinks import JsonLines

LONG = 20.0  # seconds after which a test gives up


class Sink:
    """Keeps the steps that it got, and does as it is told at each."""

    def __init__(self, name: str = "kept", act: Callable[[Figures], object] = bool) -> None:
        self.name = name
        self.act = act
        self.steps: list[int] = []
        self.calls: list[tuple[str, str]] = []

    def open(self) -> None:
        self.calls.append(("open", threading.current_thread().name))

    def write(self, figures: Figures) -> None:
        self.calls.append(("write", threading.current_thread().name))
        self.act(figures)
        self.steps.append(figures.step)

    def close(self) -> None:
        self.calls.append(("close", threading.current_thread().name))


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a hung sink waits for; opened when the test has ended, for its thread."""
    event = threading.Event()
    yield event
    event.set()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def fails(_: Figures) -> None:
    raise OSError(28, "No space left on device")


def test_each_gets_every_interval_in_order_on_a_thread_of_its_own() -> None:
    sinks = [Sink("a"), Sink("b")]
    feeder = Feeder(sinks)
    for step in range(50):
        feeder.feed(interval(step))
    feeder.close()
    for sink in sinks:
        assert sink.steps == list(range(50))
        assert [call for call, _ in sink.calls] == ["open", *["write"] * 50, "close"]
        assert {thread for _, thread in sink.calls} == {f"tenure-sink-{sink.name}"}
    assert feeder.dropped == 0


def test_one_that_hangs_is_dropped_with_one_warning(
    caplog: pytest.LogCaptureFixture, gate: threading.Event
) -> None:
    hung, well = Sink("hung", lambda _: gate.wait()), Sink("well")
    feeder = Feeder([hung, well], queue=4, patience=0.05)
    fed = 0

    def feed_until_dropped() -> bool:
        nonlocal fed
        feeder.feed(interval(fed))
        fed += 1
        until(lambda: len(well.steps) == fed)
        return feeder.sinks == ("well",)

    until(feed_until_dropped)
    for _ in range(20):
        assert feed_until_dropped()
    began = time.monotonic()
    feeder.close(timeout=LONG)
    assert time.monotonic() - began < LONG / 2, "waited for the hung one"

    assert well.steps == list(range(fed))
    assert feeder.dropped == fed, "the hung one got none"
    (told,) = warnings_of(caplog)
    assert told == (
        "the sink hung is dropped: one call takes longer than 0.05 s. "
        f"Intervals lost: {fed - 20}. Training goes on"
    )


def test_one_that_is_slow_loses_what_finds_its_queue_full(
    caplog: pytest.LogCaptureFixture, gate: threading.Event
) -> None:
    slow = Sink("slow", lambda _: gate.wait())
    feeder = Feeder([slow], queue=4)
    feeder.feed(interval(0))
    until(lambda: len(slow.calls) == 2)  # it is at the first
    for step in range(1, 10):
        feeder.feed(interval(step))
    assert feeder.dropped == 5
    gate.set()
    until(lambda: len(slow.calls) == 6)
    assert warnings_of(caplog) == [
        "the sink slow lost 5 intervals: it is slow, or fails at times. Training goes on"
    ]
    feeder.close()
    assert slow.steps == [0, 1, 2, 3, 4]
    assert len(warnings_of(caplog)) == 1


def test_one_that_fails_three_times_in_a_row_is_dropped_and_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, well = Sink("bad", fails), Sink("well")
    feeder = Feeder([bad, well])
    for step in range(10):
        feeder.feed(interval(step))
    until(lambda: feeder.sinks == ("well",))
    until(lambda: bad.calls[-1][0] == "close")
    feeder.close()
    assert [call for call, _ in bad.calls] == ["open", "write", "write", "write", "close"]
    assert well.steps == list(range(10))
    assert feeder.dropped == 10
    (told,) = warnings_of(caplog)
    assert "bad is dropped: it failed 3 times in a row (OSError: [Errno 28] No space left" in told


def test_one_that_fails_at_times_stays() -> None:
    def act(figures: Figures) -> None:
        if figures.step % 3:
            fails(figures)

    sink = Sink("moody", act)
    feeder = Feeder([sink])
    for step in range(30):
        feeder.feed(interval(step))
    feeder.close()
    assert sink.steps == list(range(0, 30, 3))
    assert feeder.dropped == 20


@pytest.mark.parametrize("error", [RuntimeError("no route to host"), SystemExit(1)])
def test_one_that_cannot_be_opened_is_dropped(
    caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    class Closed(Sink):
        def open(self) -> None:
            raise error

    feeder = Feeder([Closed("closed")])
    until(lambda: feeder.sinks == ())
    feeder.feed(interval())
    feeder.close()
    assert feeder.dropped == 1
    (told,) = warnings_of(caplog)
    assert "the sink closed is dropped: it cannot be opened" in told


def test_closing_ends_in_time_and_counts_what_was_not_written(
    caplog: pytest.LogCaptureFixture, gate: threading.Event
) -> None:
    feeder = Feeder([Sink("hung", lambda _: gate.wait())])
    for step in range(3):
        feeder.feed(interval(step))
    began = time.monotonic()
    feeder.close(timeout=0.1)
    feeder.close(timeout=LONG)
    assert time.monotonic() - began < LONG / 2
    assert feeder.dropped == 3
    (told,) = warnings_of(caplog)
    assert "the sink hung is dropped: it did not end in time" in told


def test_a_forked_child_has_no_sinks(tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    feeder = Feeder([JsonLines(path)])
    feeder.feed(interval(1))
    child = os.fork()
    if child == 0:
        feeder.feed(interval(2))
        feeder.close(timeout=LONG)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    feeder.feed(interval(3))
    feeder.close()
    assert [line[:10] for line in path.read_text().splitlines()] == ['{"step": 1', '{"step": 3']


def test_a_hung_sink_does_not_keep_a_program_from_ending() -> None:
    program = """
        import threading
        from intervals import interval
        from tenure.telemetry.feeding import Feeder
        from tenure.telemetry.sinks import made
        from pathlib import Path
        feeder = Feeder(made(lambda _: threading.Event().wait(), folder=Path(), run_name=""))
        feeder.feed(interval())
        print("trained")
    """
    ended = run(program)
    assert (ended.returncode, ended.stdout.strip()) == (0, "trained"), ended.stderr


def test_feeding_takes_microseconds_whatever_the_sinks_do(gate: threading.Event) -> None:
    sinks = [
        Sink("hung", lambda _: gate.wait()),
        Sink("fails", fails),
        *(Sink(f"well {n}") for n in range(5)),
    ]
    feeder = Feeder(sinks, queue=64, patience=0.01)
    figures, times = interval(), []
    for _ in range(2000):
        began = time.perf_counter()
        feeder.feed(figures)
        times.append(time.perf_counter() - began)
    gate.set()
    feeder.close()
    median = statistics.median(times)
    print(f"feed() with 7 sinks: median {median * 1e6:.1f} µs, longest {max(times) * 1e6:.0f} µs")
    assert median < 500e-6


def test_a_full_disk_drops_its_sinks_and_nothing_else() -> None:
    pytest.importorskip("tensorboard", reason="the sink whose client writes by itself")
    program = """
        import resource, statistics, sys, tempfile, time
        from pathlib import Path
        from intervals import interval
        from tenure.telemetry.feeding import Feeder
        from tenure.telemetry.sinks import made
        got = []
        folder = tempfile.TemporaryDirectory()
        spec = ["jsonl", "tensorboard", lambda figures: got.append(figures.step)]
        feeder = Feeder(made(spec, folder=Path(folder.name), run_name="run"), queue=1000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        times = []
        for step in range(200):
            began = time.perf_counter()
            feeder.feed(interval(step))
            times.append(time.perf_counter() - began)
        while len(feeder.sinks) > 1:
            time.sleep(0.01)
        feeder.close()
        print(got == list(range(200)), feeder.sinks, statistics.median(times) < 0.005)
        lines = (Path(folder.name) / "memory.jsonl").read_bytes()
        print(len(lines) <= 50_000, feeder.dropped > 200)
    """
    ended = run(program)
    assert ended.stdout.split("\n")[:2] == [
        "True ('<lambda>',) True",
        "True True",
    ], ended.stdout + ended.stderr
    assert ended.stderr.count("the sink jsonl is dropped") == 1
    assert ended.stderr.count("the sink tensorboard is dropped") == 1


@pytest.mark.parametrize("wrong", [{"queue": 0}, {"patience": 0.0}, {"patience": float("nan")}])
def test_a_queue_or_a_patience_of_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match="both must be more than 0"):
        Feeder([], **wrong)  # type: ignore[arg-type]


def run(program: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own."""
    folder = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    return run_forked(["-c", textwrap.dedent(program)], env=environment, timeout=120)
