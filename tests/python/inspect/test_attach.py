"""Attaching to running programs: looks, watching, and that nothing is left of it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from attaching import (
    AT_EASE,
    TRAINING,
    TRAINS,
    Program,
    attach,
    clients,
    running,
    runtime_folder,
)
from tenure.inspect import agent, recordings
from tenure.inspect import attach as client
from tenure.inspect.options import Options

TOKEN = "hunter2-7f3a"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # which a test can give a core
QUIET = {"level": "off", "step hooks": 0, "patched": False}
Watching = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module", autouse=True)
def runtime() -> Iterator[Path]:
    with runtime_folder() as folder:
        yield folder


@pytest.fixture
def watching() -> Iterator[Watching]:
    """Starts clients, which end with the test."""
    with clients() as start:
        yield start


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory, runtime: Path) -> Iterator[Program]:
    """A program that trains, with a token wherever data can be."""
    del runtime
    secret = f"""
import functools
class Refusal(Exception): pass
vault = {{"{TOKEN}-key": torch.zeros(1 << 20)}}
def locked():
    {TOKEN.replace("-", "_")}_is_a_name = 0
    password = "{TOKEN}-local"
    held = torch.zeros(1 << 20)
    try:
        raise Refusal("{TOKEN}-text", held)
    except Refusal as error:
        return error
refusal = locked()
"""
    folder = tmp_path_factory.mktemp("trains")
    text = TRAINS + secret + AT_EASE
    variables = {"SECRET": f"{TOKEN}-variable", **ONE_THREAD}
    with running(folder, text, f"{TOKEN}-argument", **variables) as program:
        yield program


@pytest.fixture
def trains(training: Program) -> Program:
    """The same, when it has noticed that the test before has left."""
    training.state_when(level="off")
    return training


def asked(pid: int, **request: Any) -> client.Request:
    return client.Request(str(pid), **request)


# --- idle --------------------------------------------------------------------------------------

IDLE = """
import os, socket, sys, threading
print(sorted(t.name for t in threading.enumerate()), "torch" in sys.modules, "json" in sys.modules)
files = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
         if os.path.exists(f"/proc/self/fd/{n}")]
print(sum(f.startswith("socket:") for f in files))
sys.stdout.flush()
sys.stdin.read()
"""


def test_the_idle_agent_is_a_thread_and_a_socket(tmp_path: Path, runtime: Path) -> None:
    (tmp_path / "idle.py").write_text(IDLE)
    shell = f'eval "$({sys.executable} -m tenure env --agent)" && exec {sys.executable} idle.py'
    with subprocess.Popen(
        ["sh", "-c", shell], cwd=tmp_path, stdin=-1, stdout=-1, stderr=-1, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "['MainThread', 'tenure-agent'] False False\n"
        assert program.stdout.readline() == "1\n"
        path = agent.socket_in(runtime / "tenure", program.pid)
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        refused = attach(program.pid, "--once")
        assert refused.returncode == 2
        assert "has not imported torch" in refused.stderr
        out, err = program.communicate("")
    assert (out, err, program.returncode) == ("", "", 0)
    assert not path.exists()


def test_run_with_an_agent_says_how_to_attach(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("import sys, os; print(os.environ['TENURE'], sys.argv)")
    ended = subprocess.run(
        [sys.executable, "-m", "tenure", "run", "--agent", "idle.py", "--lr", "3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.stdout == "agent ['idle.py', '--lr', '3']\n"
    assert "`tenure attach " in ended.stderr
    assert not (tmp_path / "run.tenure").exists()


# --- a look ------------------------------------------------------------------------------------


def test_a_look_says_who_holds_what(trains: Program, tmp_path: Path) -> None:
    file = tmp_path / "look.json"
    ended = attach(trains.pid, "--once", "--json", file)
    assert ended.returncode == 0, ended.stderr
    said = ended.stderr.splitlines()
    assert "will stand still for about" in said[0]
    assert "not known: which lines and steps made what is alive now" in said[1]
    assert "stood still for" in said[-1]
    assert "shelf (global of train.py), 4 storages" in ended.stdout
    assert "% of it explained" in ended.stdout
    look = json.loads(file.read_text())
    held = {h["text"].split(" ")[0]: h for h in look["held"]}
    assert (held["shelf"]["bytes"], held["shelf"]["count"]) == (4 << 20, 4)
    assert held["vault"]["bytes"] == 4 << 20
    assert held["shelf"]["path"][1]["text"].startswith("[")
    assert look["explained"] > 0.95
    sizes = [h["bytes"] for h in look["held"]]
    assert sizes == sorted(sizes, reverse=True)
    assert file.stat().st_mode & 0o077 == 0


def test_a_look_that_cannot_be_written_is_shown(trains: Program, tmp_path: Path) -> None:
    full = tmp_path / "full"
    try:
        os.mknod(full, 0o600 | stat.S_IFCHR, os.makedev(1, 7))  # as /dev/full
        full.open("wb").close()
    except OSError:
        pytest.skip("a device that is full needs root")
    ended = attach(trains.pid, "--once", "--json", full)
    assert ended.returncode == 2
    assert "shelf (global of train.py), 4 storages" in ended.stdout
    assert f"cannot write {full}: " in ended.stderr
    assert full.is_char_device()


def test_no_file_has_the_programs_data(trains: Program, tmp_path: Path) -> None:
    """Not of its variables, arguments, keys, locals and exceptions; names may be there."""
    attach(trains.pid, "--once", "--json", tmp_path / "look.json")
    ended = attach(
        trains.pid, "--steps", 30, "--level", "deep", "--out", tmp_path / "run.tenure", "--json",
        tmp_path / "verdict.json",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".json", ".sqlite"}
    for path in files:
        assert TOKEN.encode() not in path.read_bytes(), path


def test_redacted_a_look_has_no_names(trains: Program, tmp_path: Path) -> None:
    ended = attach(trains.pid, "--once", "--redact", "--json", tmp_path / "look.json")
    assert "shelf" in ended.stdout
    text = (tmp_path / "look.json").read_text()
    assert "shelf" not in text
    assert "vault" not in text


MILLION = """
import time, torch
class Thing:
    def __init__(self, n):
        self.n, self.of = n, [n]
things = [Thing(i) for i in range(500_000)]  # each with a list
weights = torch.zeros(1 << 20)
print("ready", flush=True)
longest = 0.0
while True:
    began = time.thread_time()  # of which other programs on this machine take nothing
    time.sleep(0.001)
    if time.thread_time() - began > longest:
        longest = time.thread_time() - began
        open("longest", "w").write(str(longest))
"""


def test_a_million_objects_take_less_than_three_seconds(tmp_path: Path) -> None:
    with running(tmp_path, MILLION) as program:
        ended = attach(program.pid, "--once", "--json", tmp_path / "look.json")
        assert ended.returncode == 0, ended.stderr
        look = json.loads((tmp_path / "look.json").read_text())
        longest = float((tmp_path / "longest").read_text())
        expected = float(ended.stderr.split("for about ")[1].split(" s")[0])
        assert look["objects"] > 1_000_000
        assert 0.1 < longest <= 3.0
        assert longest / 4 < expected < longest * 4, (expected, longest, look["pause"])
        again = attach(program.pid, "--once")  # by now the agent knows how long it takes
        expected = float(again.stderr.split("for about ")[1].split(" s")[0])
        assert expected == pytest.approx(look["pause"], rel=0.2, abs=0.1)


SLEEPS = """
import threading, time, torch
shelf = torch.zeros(1 << 20)
print("ready", flush=True)
threading.Event().wait({wait})
"""


def test_a_main_thread_that_waits_is_looked_at(tmp_path: Path) -> None:
    with running(tmp_path, SLEEPS.format(wait="")) as program:
        ended = attach(program.pid, "--once")
        assert ended.returncode == 0, ended.stderr
        assert "shelf (global of train.py)" in ended.stdout


BACKWARD = """
import os, time, torch
class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        print("ready", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.01)
        return grad * 2
shelf = torch.zeros(1 << 20)
Slow.apply(torch.zeros(10, requires_grad=True)).sum().backward()
time.sleep(60)
"""


def test_a_look_waits_for_the_end_of_backward(tmp_path: Path, watching: Watching) -> None:
    with running(tmp_path, BACKWARD) as program:
        client = watching(program, "--once", "--timeout", "60")
        assert client.stderr is not None
        said = iter(client.stderr.readline, "")
        assert any("waiting: a thread is inside backward()" in line for line in said)
        assert client.poll() is None
        (tmp_path / "go").touch()
        out, err = client.communicate(timeout=60)
        assert client.returncode == 0, err
        assert "shelf (global of train.py)" in out


THREAD = (
    TRAINS
    + """
def loop():
    while True:
        step()
trainer = threading.Thread(target=loop)
trainer.start()
trainer.join()
"""
)


def test_a_program_that_trains_on_another_thread(tmp_path: Path) -> None:
    """Its operators run without the GIL while the main thread sleeps: a look must wait for them."""
    with running(tmp_path, THREAD) as program:
        assert client.once(asked(program.pid)) == 0
        assert client.watch(asked(program.pid, steps=20)) == 0
        program.steps_go_on(20)
        assert (tmp_path / "stderr").read_text() == ""


# --- watching ----------------------------------------------------------------------------------


def test_a_leak_is_found_in_a_running_program(tmp_path: Path) -> None:
    with running(tmp_path, TRAINING, "leak") as program:
        program.steps_go_on(20)
        file, out = tmp_path / "verdict.json", tmp_path / "run.tenure"
        ended = attach(program.pid, "--steps", 60, "--json", file, "--out", out)
        assert ended.returncode == 1, ended.stderr
        assert ended.stdout.startswith("LEAK +")
        assert "kept (global of train.py)" in ended.stdout
        assert "watching since now" in ended.stderr
        verdict = json.loads(file.read_text())
        assert (verdict["schema"], verdict["verdict"]) == (1, "leak")
        line = 1 + next(i for i, text in enumerate(TRAINING.splitlines()) if "append" in text)
        assert verdict["suspects"][0]["site"].endswith(f"train.py:{line}"), verdict["suspects"][0]
        assert recordings.judge([out])["verdict"] == "leak"
        assert {key: program.state()[key] for key in QUIET} == QUIET
        assert (tmp_path / "stderr").read_text() == ""


def quick(times: Sequence[float]) -> float:
    """A step of these that little held up."""
    return sorted(times)[len(times) // 10]


def as_fast_as(twin: Program, program: Program) -> bool:
    """Whether it is, in any of a few seconds on one core: another may be slower all the time."""
    core = min(os.sched_getaffinity(program.pid))
    for one in twin, program:
        os.sched_setaffinity(one.pid, {core})
    for _ in range(5):
        alone = len(twin.step_times())
        mine = quick(program.steps_go_on(300))
        if mine < 1.15 * quick(twin.step_times()[alone:]):
            return True
    return False


TIMES = int(os.environ.get("TENURE_ATTACH_TIMES", "30"))  # `make soak` does 100


def test_many_times_under_load(trains: Program, tmp_path: Path) -> None:
    (trains.folder / "in haste").touch()
    trains.steps_go_on(50)
    before = trains.state()
    for number in range(TIMES):
        if number % 10 == 0:
            assert client.once(asked(trains.pid)) == 0, number
        else:
            level = "trace" if number % 10 == 1 else "count"  # which takes no look, and less time
            request = asked(trains.pid, options=Options(level=level), steps=1)
            assert client.watch(request) in {0, 3}, number
    # The agent may still be closing what the last client used.
    after = trains.state_when(threads=before["threads"], files=before["files"])
    assert {key: after[key] for key in QUIET} == QUIET
    assert after["python threads"] == before["python threads"]
    with running(tmp_path, TRAINS + AT_EASE, **ONE_THREAD) as twin:
        (tmp_path / "in haste").touch()
        twin.steps_go_on(50)
        assert as_fast_as(twin, trains)
    assert (trains.folder / "stderr").read_text() == ""
    (trains.folder / "in haste").unlink()


def test_ctrl_c_detaches_and_gives_the_verdict(trains: Program, watching: Watching) -> None:
    client = watching(trains, start_new_session=True)
    trains.state_when(level="trace")
    trains.steps_go_on(30)
    client.send_signal(signal.SIGINT)
    out, err = client.communicate(timeout=30)
    assert client.returncode == 0, err
    assert "FLAT over" in out
    assert "detaching" in err
    assert {key: trains.state()[key] for key in QUIET} == QUIET


def test_a_client_that_is_killed_has_detached(trains: Program, watching: Watching) -> None:
    client = watching(trains)
    trains.state_when(level="trace")
    client.kill()
    client.communicate()
    found = trains.state_when(level="off")
    assert {key: found[key] for key in QUIET} == QUIET


def test_two_clients_at_once(trains: Program, watching: Watching) -> None:
    first = watching(trains)
    trains.state_when(level="trace")
    second = attach(trains.pid, "--once")
    assert second.returncode == 2
    assert f"is attached to by process {first.pid} already" in second.stderr
    first.kill()
    trains.state_when(level="off")


ENDS = (
    TRAINS
    + """
while not os.path.exists("stop"):
    step()
"""
)


def test_the_program_ends_while_it_is_watched(tmp_path: Path, watching: Watching) -> None:
    with running(tmp_path, ENDS) as program:
        client = watching(program)
        program.state_when(level="trace")
        program.steps_go_on(40)
        (tmp_path / "stop").touch()
        out, err = client.communicate(timeout=30)
        assert program.process.wait(30) == 0
        assert client.returncode == 0, err
        assert "the program ended while it was watched" in err
        assert "FLAT over" in out
        assert (tmp_path / "stderr").read_text() == ""


def test_the_program_is_killed_while_it_is_watched(
    tmp_path: Path, runtime: Path, watching: Watching
) -> None:
    with running(tmp_path, TRAINING) as program:
        client = watching(program)
        program.state_when(level="trace")
        program.process.kill()
        program.process.wait()
        _, err = client.communicate(timeout=30)
        assert client.returncode == 2
        assert "was killed or ended meanwhile: there is no verdict" in err
        assert "Traceback" not in err
        # What it left behind is found, and told.
        path = agent.socket_in(runtime / "tenure", program.pid)
        assert path.exists()
        stale = attach(program.pid)
        assert stale.returncode == 2
        assert "has ended; the socket that its agent left behind was removed" in stale.stderr
        assert not path.exists()


WATCHES = (
    TRAINS
    + """
import tenure
while not os.path.exists("go"):
    step()
with tenure.watch(quiet=True) as session:
    for _ in range(30):
        step()
    while os.path.exists("go"):
        step()
    print(session.verdict()["verdict"], flush=True)
while True:
    step()
"""
)


def test_a_program_that_watches_itself_takes_over(tmp_path: Path, watching: Watching) -> None:
    with running(tmp_path, WATCHES) as program:
        client = watching(program)
        program.state_when(level="trace")
        program.steps_go_on(40)
        (tmp_path / "go").touch()
        _, err = client.communicate(timeout=30)
        assert "the program watches itself from now on while it was watched" in err
        assert client.returncode in {0, 3}
        program.state_when(level="trace")
        refused = attach(program.pid)
        assert refused.returncode == 2
        assert "is being watched already" in refused.stderr
        assert attach(program.pid, "--once").returncode == 0
        (tmp_path / "go").unlink()
        assert program.process.stdout is not None
        assert program.process.stdout.readline() == "flat\n", (tmp_path / "stderr").read_text()


def test_options_of_a_watched_program_are_no_obstacle() -> None:
    assert Options.parse("agent") == Options()
