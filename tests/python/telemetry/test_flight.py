"""The flight recorder in one process."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import tenure
from forks import run_forked
from probes import run_program
from tenure.errors import CollectiveError, InputError
from tenure.inspect.options import job_of
from tenure.telemetry.asking import ask
from tenure.telemetry.flight import FlightRecorder
from tenure.telemetry.rings import rings_of
from tenure.telemetry.shortage import shortage_in


@pytest.fixture(autouse=True)
def _no_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TENURE_TERMINATION_LOG", str(tmp_path / "none"))


def read(path: Path | None) -> dict[str, Any]:
    assert path is not None
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def run(code: str, folder: Path, code_expected: int) -> str:
    """Runs a program with a recorder and returns what it wrote to stderr."""
    start = f"""
        import os, sys, threading, torch, tenure
        from pathlib import Path
        from tenure.telemetry.flight import FlightRecorder
        folder = {str(folder)!r}
        """
    program = textwrap.dedent(start) + textwrap.dedent(code)
    done = run_forked(["-c", program], timeout=120)
    assert done.returncode == code_expected, done.stderr
    return done.stderr


def test_a_dump_says_who_holds_what(tmp_path: Path) -> None:
    kept = [torch.zeros(3 << 20) for _ in range(4)]
    weights = torch.zeros(1 << 18)
    with tenure.hold(weights, "layer", kind="parameter"), FlightRecorder(tmp_path) as recorder:
        found = read(recorder.dump("to look"))
    assert found["headline"] == {"reason": "request", "text": "to look"}
    assert found["whole"]
    assert found["rank"] == 0
    assert found["pid"] == os.getpid()
    assert found["ledger"]["kinds"]["parameter"]["bytes"] >= 1 << 20
    assert {"kind": "parameter", "name": "layer"}.items() <= found["ledger"]["owners"][0].items()
    assert found["host_memory"]["rss_bytes"] > 1 << 20
    assert any("test_a_dump" in frame for frame in found["stacks"][0]["frames"])
    held = {one["text"]: one["bytes"] for one in found["holders"]["held"]}
    assert any(text.startswith("kept") and size >= 48 << 20 for text, size in held.items()), held
    assert len(kept) == 4


def test_an_error_that_was_caught_can_be_told(tmp_path: Path) -> None:
    log = tmp_path / "termination"
    log.touch()
    with FlightRecorder(tmp_path / "run", termination_log=log) as recorder:
        try:
            torch.empty(1 << 55)
        except RuntimeError as error:
            found = read(recorder.failed(error))
    told = found["headline"]
    assert told["reason"] == "memory"
    assert told["asked"] == 1 << 57
    assert told["over"] == told["asked"] - told["free"]
    assert found["trace"][-1].startswith(__file__)
    assert re.match(r"tenure: rank 0 ran out of memory.*: it asked for", log.read_text())
    assert len(log.read_bytes()) <= 4096


def test_a_second_failure_does_not_hide_the_first(tmp_path: Path) -> None:
    with FlightRecorder(tmp_path) as recorder:
        recorder.failed(ValueError("the cause"))
        found = read(recorder.failed(RuntimeError("its consequence")))
        assert found["headline"]["text"] == "ValueError: the cause"
        found = read(recorder.failed(MemoryError("more than a consequence")))
        assert found["headline"]["reason"] == "memory"


def test_a_dump_keeps_the_shortage_that_the_rank_survived(tmp_path: Path) -> None:
    hoard = [torch.zeros(3 << 20) for _ in range(4)]
    with FlightRecorder(tmp_path) as recorder:
        try:
            torch.empty(1 << 55)
        except RuntimeError as error:
            recorder.failed(error)
        (file,) = ask(tmp_path, 60).files
        found = read(file)
        assert found["headline"] == {"reason": "request", "text": "tenure dump"}
        earlier = found["earlier"]
        assert (earlier["headline"]["reason"], earlier["headline"]["asked"]) == ("memory", 1 << 57)
        assert earlier["time"] < found["time"]
        assert any(one["text"].startswith("hoard") for one in earlier["holders"]["held"])
        again = read(recorder.failed(MemoryError("and again")))
        assert again["headline"]["reason"] == "memory"
        assert "earlier" not in again
    assert len(hoard) == 4


@pytest.mark.parametrize(
    ("error", "device", "asked", "free"),
    [
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 1 has a total capacity of "
                "139.81 GiB of which 2.50 GiB is free. Of the allocated memory …"
            ),
            "cuda:1",
            20 << 30,
            5 << 29,
        ),
        (MemoryError("Unable to allocate 1.00 GiB for an array"), "cpu", 1 << 30, ...),
        (MemoryError(), "cpu", None, ...),
    ],
)
def test_errors_of_memory_are_told_from_others(
    error: BaseException, device: str, asked: int | None, free: Any
) -> None:
    found = shortage_in(error)
    assert found is not None
    assert (found.device, found.asked) == (device, asked)
    assert free is ... or found.free == free


def test_the_cause_of_an_error_is_looked_at() -> None:
    with pytest.raises(ValueError, match="no batch") as raised:
        try:
            torch.empty(1 << 55)
        except RuntimeError as error:
            raise ValueError("no batch") from error
    assert shortage_in(raised.value) is not None
    assert shortage_in(ValueError("no batch")) is None


def test_what_another_rank_lacked_is_not_this_ones_shortage() -> None:
    text = "can't allocate memory: you tried to allocate 4096 bytes"
    assert shortage_in(RuntimeError(text)) is not None
    assert shortage_in(CollectiveError(f"rank 1 failed in the backward of stage 1: {text}")) is None


def test_a_signal_does_not_overtake_a_failure_that_is_being_told(tmp_path: Path) -> None:
    """As a launcher sends it to those that are left, while they tell others why they fail."""
    done = run_program(
        """
        import os, signal, threading, time
        from tenure.telemetry.flight import FlightRecorder

        class Slow:  # as a store is on a busy machine
            def __init__(self, flight):
                self.flight = flight

            def tell(self, text):
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
                time.sleep(1.0)
                return self.flight.tell(text)

            def __getattr__(self, name):
                return getattr(self.flight, name)

        recorder = FlightRecorder(os.environ["FOLDER"]).start()
        recorder._flight = Slow(recorder._flight)
        recorder.failed(ValueError("rank 1 ended"))
        time.sleep(60)
        """,
        FOLDER=str(tmp_path),
    )
    assert done.returncode == -signal.SIGTERM
    (file,) = tmp_path.glob("*.flight.json")
    assert read(file)["headline"]["text"] == "ValueError: rank 1 ended"


def test_there_is_one_recorder_a_process(tmp_path: Path) -> None:
    refused = pytest.raises(InputError, match="has a flight recorder already: close that one first")
    with FlightRecorder(tmp_path), refused:
        FlightRecorder(tmp_path).start()
    with FlightRecorder(tmp_path) as recorder:
        recorder.dump("it can be made again")
    with pytest.raises(InputError, match="is not at work"):
        recorder.dump("too late")


def test_what_was_there_is_back_after_close(tmp_path: Path) -> None:
    before = sys.excepthook, threading.excepthook, signal.getsignal(signal.SIGUSR1)
    heard = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: heard.set())
    try:
        with FlightRecorder(tmp_path, signals=[signal.SIGUSR1]) as recorder:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert heard.wait(30)
            assert read(recorder.path)["headline"]["text"] == "SIGUSR1"
        heard.clear()
        recorder.path.unlink()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard.wait(30)
        assert not recorder.path.exists()
    finally:
        signal.signal(signal.SIGUSR1, before[2])
    assert before[:2] == (sys.excepthook, threading.excepthook)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 4, "ranks": 4}, "rank 4 is none of 4"),
        ({"stage": 2, "stages": 2, "ranks": 2}, "stage 2 is none of 2"),
        ({"seconds": 0}, "a signal can wait for 0 to 600 seconds"),
        ({"ranks": 16384, "set_bytes": "1MiB"}, "do not fit into 1MiB"),
        ({"signals": [signal.SIGKILL]}, "leaves no time"),
        ({"signals": [999]}, "there is no signal 999"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FlightRecorder(tmp_path, **given).start()
    assert not list(tmp_path.iterdir())
    with FlightRecorder(tmp_path):  # nothing was left of it
        pass


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write snapshots to .*file/run: "):
        FlightRecorder(tmp_path / "file" / "run").start()


def test_snapshots_stay_under_their_cap_and_say_what_they_left_out(tmp_path: Path) -> None:
    rows = [{"step": step, "host_rss_bytes": step} for step in range(10_000)]
    with FlightRecorder(tmp_path, rows=lambda: rows, file_bytes="64KiB") as recorder:
        found = read(recorder.dump("too much"))
        assert recorder.path.stat().st_size <= 64 << 10
    assert found["samples"] == rows[-1:]
    assert "65,536 bytes" in found["left_out"]["samples"]


@pytest.mark.parametrize(
    ("rank", "extremes", "whole"),
    [
        (0, {}, True),  # the lowest of its stage
        (5, {}, False),
        (5, {"host_rss_bytes": 5}, True),
        (5, {"host_rss_bytes": 6}, False),
    ],
)
def test_who_writes_all_when_somebody_asks(
    tmp_path: Path, rank: int, extremes: dict[str, int], whole: bool
) -> None:
    rows = [{"step": 1}]
    recorder = FlightRecorder(tmp_path, rank, 8, rows=lambda: rows, extremes=lambda: extremes)
    with recorder:
        asked = {"id": "1", "reason": "request", "text": "a test"}
        (tmp_path / "beside").write_text(json.dumps(asked))
        (tmp_path / "beside").rename(tmp_path / "dump.request")
        found: dict[str, Any] = {}
        while found.get("request") != "1" or "pending" in found:
            found = read(recorder.path) if recorder.path.exists() else {}
    assert found["whole"] == whole
    assert ("stacks" in found) == whole
    assert found["samples"] == [{"step": 1}]


def test_a_part_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    with FlightRecorder(tmp_path, rows=lambda: [][0]) as recorder:
        found = read(recorder.dump("anyway"))
    assert found["left_out"] == {"samples": "IndexError: list index out of range"}
    assert found["holders"]


def test_an_uncaught_exception_is_seen_and_written(tmp_path: Path) -> None:
    said = run(
        """
        FlightRecorder(folder).start()
        def train():
            batch = torch.ones(5_000_000)
            raise ValueError("no such layer")
        train()
        """,
        tmp_path,
        1,
    )
    assert "Traceback" in said
    assert "ValueError: no such layer" in said
    (file,) = tmp_path.glob("*.flight.json")
    found = read(file)
    assert found["headline"]["reason"] == "exception"
    assert found["trace"][-1].endswith("in train")
    assert found["holders"]["held"][0]["text"].startswith("batch (local of train")
    assert not list(tmp_path.glob("*.live"))


def test_of_a_thread_too(tmp_path: Path) -> None:
    said = run(
        """
        FlightRecorder(folder).start()
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
        """,
        tmp_path,
        0,
    )
    assert "Exception in thread" in said
    (file,) = tmp_path.glob("*.flight.json")
    assert read(file)["headline"]["text"] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("launcher", ["mp.spawn", "Process"])
def test_of_a_worker_of_multiprocessing_too(tmp_path: Path, launcher: str) -> None:
    """Its exception ends in multiprocessing's own code, where no hook is called."""
    said = run(
        f"""
        import multiprocessing
        from torch.multiprocessing import start_processes
        def train(rank):
            kept = [torch.ones(5_000_000)]
            monitor = tenure.Monitor(sinks=[], every=1, folder=folder)
            monitor.step()
            raise ValueError("no such layer")
        if {launcher!r} == "mp.spawn":
            start_processes(train, nprocs=1, start_method="fork")
        process = multiprocessing.get_context("fork").Process(target=train, args=(0,))
        process.start()
        process.join()
        sys.exit(process.exitcode)
        """,
        tmp_path,
        1,
    )
    assert said.count("rank 0 failed at step 1: ValueError: no such layer") == 1
    (file,) = tmp_path.glob("*.flight.json")
    found = read(file)
    assert found["headline"]["reason"] == "exception"
    assert found["trace"][-1].endswith("in train")
    assert found["holders"]["held"][0]["text"].startswith("kept (local of train")
    (ring,) = rings_of(tmp_path)
    assert (ring.state, ring.closed) == ("failed", "failed: ValueError: no such layer")


def test_a_worker_that_ends_well_says_nothing(tmp_path: Path) -> None:
    said = run(
        """
        from torch.multiprocessing import start_processes
        def train(rank):
            try:
                raise ValueError("caught")
            except ValueError:
                tenure.Monitor(sinks=[], every=1, folder=folder).step()
            sys.exit(0)
        start_processes(train, nprocs=1, start_method="fork")
        """,
        tmp_path,
        0,
    )
    assert said == ""
    assert not list(tmp_path.glob("*.flight.json"))


def test_a_hook_that_another_put_over_ours_costs_nothing(tmp_path: Path) -> None:
    run(
        """
        FlightRecorder(folder).start()
        sys.excepthook = lambda *_: None
        raise ValueError("not told to the hook")
        """,
        tmp_path,
        1,
    )
    (file,) = tmp_path.glob("*.flight.json")
    assert read(file)["headline"]["text"] == "ValueError: not told to the hook"


def test_a_failure_after_one_that_was_survived_is_written(tmp_path: Path) -> None:
    run(
        """
        recorder = FlightRecorder(folder).start()
        recorder.failed(ValueError("caught"))
        recorder.failed(ValueError("its consequence"))
        tenure.step()
        raise RuntimeError("much later")
        """,
        tmp_path,
        1,
    )
    (file,) = tmp_path.glob("*.flight.json")
    found = read(file)
    assert found["headline"]["text"] == "RuntimeError: much later"
    assert found["trace"]


def test_a_broken_recorder_does_not_hide_the_programs_error(tmp_path: Path) -> None:
    said = run(
        """
        import shutil
        FlightRecorder(folder).start()
        shutil.rmtree(folder)
        raise ValueError("the program's own")
        """,
        tmp_path / "run",
        1,
    )
    assert "flight recorder: a snapshot is missing" in said
    assert "\nValueError: the program's own\n" in said


def test_a_program_that_ends_well_leaves_and_says_nothing(tmp_path: Path) -> None:
    said = run("FlightRecorder(folder).start()", tmp_path, 0)
    assert said == ""
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_leaves_its_parents_files_alone(tmp_path: Path) -> None:
    said = run(
        """
        import signal
        recorder = FlightRecorder(folder).start()
        def die():
            os.kill(os.getpid(), signal.SIGTERM)
        for end in (die, lambda: recorder.failed(OSError())):
            child = os.fork()
            if child == 0:
                end()
                recorder.close()
                os._exit(3)
            os.waitpid(child, 0)
        print(sorted(path.suffix for path in Path(folder).iterdir()), file=sys.stderr)
        """,
        tmp_path,
        0,
    )
    assert said.splitlines()[-1] == "['.live']"


def test_snapshots_of_a_hundred_thousand_ranks_have_room(tmp_path: Path) -> None:
    with FlightRecorder(tmp_path, rank=0, ranks=100_000) as recorder:
        assert recorder.dump("to look").stat().st_size > 1000


def test_another_job_in_the_folder_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "ours")
    failure = {"reason": "exception", "rank": 3}
    with FlightRecorder(tmp_path, rank=0, ranks=4) as recorder:
        recorder._hear(json.dumps({**failure, "text": "theirs", "job": "another"}))
        assert not recorder.path.exists()
        recorder._hear(json.dumps({**failure, "text": "ours", "job": job_of()}))
        assert read(recorder.path)["headline"] == {"reason": "told", "text": "rank 3: ours"}
