"""Watched programs keep their output and exit status; what ends them is recorded up to then."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from forks import run_forked
from tenure.inspect import recordings
from watched import ROOT, Run, forked_run, tenure_run

LOOP = """
import sys, torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for step in range(40):
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    {body}
print("done")
{end}
"""


# Without an optimizer, for which torch imports as much again.
STEPS = """
import sys, torch, tenure
for step in range(40):
    torch.randn(8, 64).square().mean()
    tenure.step()
print("done")
{end}
"""


def watched(folder: Path, end: str = "", **env: str) -> Run:
    (folder / "train.py").write_text(STEPS.format(end=end))
    return tenure_run(["train.py"], folder, **env)


def forked(folder: Path, body: str, end: str = "", level: str = "trace") -> Run:
    """Where it does not matter how the process starts and ends."""
    (folder / "train.py").write_text(LOOP.format(body=body, end=end))
    return forked_run(["train.py"], folder, level=level)


def rows_of(folder: Path, query: str) -> list[tuple[object, ...]]:
    (file,) = folder.glob("*.sqlite")
    with sqlite3.connect(file) as connection:
        return connection.execute(query).fetchall()


def test_output_and_status_are_the_programs_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP.format(body="pass", end="sys.exit(3)"))
    run = tenure_run(["train.py"], tmp_path)
    assert (run.code, run.out) == (3, "done\n")
    assert run.verdict["verdict"] == "flat"
    assert run.verdict["steps"] == 40
    # What was there before the first step is known.
    held = rows_of(run.folder, "SELECT held FROM steps ORDER BY step")
    assert held[-1][0] >= 4 * (64 * 64 + 64)


def test_what_is_made_before_the_first_step_is_of_that_step(tmp_path: Path) -> None:
    """Until steps are announced, intervals are counted, whose numbers are others."""
    run = forked(tmp_path, "if step == 0: import time; time.sleep(1)")
    assert rows_of(run.folder, "SELECT max(step) FROM steps") == [(39,)]
    late = "SELECT count(*) FROM storages WHERE born_step > 39 OR died_step < born_step"
    assert rows_of(run.folder, late) == [(0,)]


def test_asking_whether_torch_is_there_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(
        "import importlib.util\n"
        "assert importlib.util.find_spec('torch').name == 'torch'\n"
        "import runpy\nrunpy.run_path('train.py', run_name='__main__')\n"
    )
    (tmp_path / "train.py").write_text(LOOP.format(body="pass", end=""))
    run = tenure_run(["asks.py"], tmp_path)
    assert (run.code, run.out) == (0, "done\n")
    assert run.verdict["steps"] == 40


def test_an_empty_entry_of_the_path_stays(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("answer = 42")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "job.py").write_text("import torch, beside; print(beside.answer)")
    run = tenure_run(["sub/job.py"], tmp_path, PYTHONPATH=f"{tmp_path / 'none'}:")
    assert (run.code, run.out) == (0, "42\n")


def test_an_exception_ends_the_program_as_it_would(tmp_path: Path) -> None:
    run = watched(tmp_path, end="raise KeyError('gone')")
    assert run.code == 1
    assert "KeyError: 'gone'" in run.err
    assert run.verdict["steps"] == 40
    assert rows_of(run.folder, "SELECT value FROM meta WHERE key='ended'") == [("yes",)]


INTERRUPT = """
import os, signal, time
os.kill(os.getpid(), signal.SIGINT)
time.sleep({seconds})
print("goes on")
"""


def test_ctrl_c_ends_the_program_as_it_would(tmp_path: Path) -> None:
    run = watched(tmp_path, end=INTERRUPT.format(seconds=10))
    assert (run.code, run.out) == (-signal.SIGINT, "done\n")
    assert run.verdict["steps"] == 40


def test_ctrl_c_that_was_ignored_from_the_start_stays_so(tmp_path: Path) -> None:
    """As in the background of a script, or below one that has trapped it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run = watched(tmp_path, end=INTERRUPT.format(seconds=0))
    finally:
        signal.signal(signal.SIGINT, before)
    assert (run.code, run.out) == (0, "done\ngoes on\n")
    assert run.verdict["steps"] == 40


def test_a_leak_names_list_and_line(tmp_path: Path) -> None:
    run = forked(tmp_path, "kept.append(model(torch.randn(8, 64)))")
    assert run.verdict["verdict"] == "leak"
    assert "kept (global of train.py)" in run.first["holders"][0][-1]["text"]  # the root is last
    words = str(run.first["holders"][0])
    assert "train.py:10" in words
    assert run.first["site"].endswith("train.py:10")
    assert run.first["function"] == "<module>"
    assert "detach" in run.first["advice"]
    assert "LEAK" in run.err
    assert "← grows here" in run.err


@pytest.mark.parametrize("level", ["count", "trace", "deep"])
def test_levels(tmp_path: Path, level: str) -> None:
    run = forked(tmp_path, "kept.append(torch.randn(1000))", level=level)
    assert run.code == 0
    assert run.verdict["verdict"] == ("growth" if level == "count" else "leak")
    stacks = rows_of(run.folder, "SELECT count(*) FROM origins WHERE stack LIKE '%train.py:10%'")
    assert (stacks[0][0] != 0) == (level == "deep")


def test_growth_of_one_storage_is_a_leak(tmp_path: Path) -> None:
    body = "log = torch.cat([log, torch.randn(5000)]) if step else torch.randn(5000)"
    run = forked(tmp_path, body)
    assert run.verdict["verdict"] == "leak", run.err
    assert "log (global of train.py)" in str(run.first["holders"])


def test_a_forked_child_is_not_watched(tmp_path: Path) -> None:
    body = """
    if step == 20:
        import os
        child = os.fork()
        if child == 0:
            for _ in range(50): kept.append(torch.randn(1000))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """
    run = forked(tmp_path, textwrap.indent(textwrap.dedent(body), "    ").strip())
    assert (run.code, run.verdict["verdict"]) == (0, "flat"), run.err


def test_inference_autocast_threads_and_errors_in_a_step(tmp_path: Path) -> None:
    body = """
    import threading
    with torch.inference_mode(): model(torch.randn(8, 64))
    with torch.autocast("cpu", dtype=torch.bfloat16): model(torch.randn(8, 64))
    thread = threading.Thread(target=lambda: torch.randn(100) @ torch.randn(100, 10))
    thread.start(); thread.join()
    try: torch.randn(3) @ torch.randn(4)
    except RuntimeError: pass
    """
    run = forked(tmp_path, textwrap.indent(textwrap.dedent(body), "    ").strip())
    assert (run.code, run.verdict["verdict"]) == (0, "flat"), run.err


def test_an_existing_sitecustomize_still_runs(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import sys; sys.was_here = True\n")
    run = watched(tmp_path, end="assert sys.was_here", PYTHONPATH=str(other))
    assert run.code == 0, run.err
    assert run.verdict["steps"] == 40


def test_a_sitecustomize_that_imports_torch(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import torch\n")
    run = watched(tmp_path, PYTHONPATH=str(other))
    assert run.code == 0, run.err
    assert run.verdict["steps"] == 40


def test_spawned_children_are_watched_too(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(LOOP.format(body="kept.append(torch.randn(1000))", end=""))
    (tmp_path / "main.py").write_text(
        "import multiprocessing, runpy\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    child = context.Process(target=runpy.run_path, args=('work.py',))\n"
        "    child.start(); child.join()\n"
    )
    run = tenure_run(["main.py"], tmp_path)
    assert run.code == 0, run.err
    assert recordings.judge([run.folder])["verdict"] == "leak"


def test_a_program_without_torch_is_left_alone_and_told(tmp_path: Path) -> None:
    run = tenure_run(["-c", "print('no torch here')"], tmp_path)
    assert (run.code, run.out) == (0, "no torch here\n")
    assert run.err == (
        "tenure: nothing was watched: neither the program nor a child of it imported torch\n"
    )
    assert list(run.folder.iterdir()) == []
    assert tenure_run(["-c", "print('no torch here')"], tmp_path, "--quiet").err == ""


def test_module_and_command_forms(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(STEPS.format(end=""))
    assert tenure_run(["-m", "job"], tmp_path).verdict["steps"] == 40
    again = tmp_path / "again"
    again.mkdir()
    (again / "job.py").write_text((tmp_path / "job.py").read_text())
    assert tenure_run([sys.executable, "job.py"], again).verdict["steps"] == 40


def test_no_secret_is_recorded(tmp_path: Path) -> None:
    token = "hunter2-3f9c1e"
    body = f"""
    secret = "{token}"
    kept.append({{secret: torch.randn(1000), "error": ValueError(secret)}})
    """
    script = tmp_path / "train.py"
    script.write_text(
        LOOP.format(body=textwrap.indent(textwrap.dedent(body), "    ").strip(), end="")
    )
    run = tenure_run(["train.py", f"--token={token}"], tmp_path, "--level", "deep", API_KEY=token)
    assert run.verdict["verdict"] == "leak", run.err
    for file in run.folder.iterdir():
        assert token.encode() not in file.read_bytes()
        assert file.stat().st_mode & 0o077 == 0
    assert token not in str(run.verdict)
    assert token not in run.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nope.py"], "there is no script nope.py"),
        (["-m"], "-m needs the name of a module"),
        ([], "what is to be run?"),
        (["no-such-program"], "no script, and no program"),
        (["--out", "/dev/null/x", "job.py"], "cannot write recordings"),
        (
            ["--json", "/nowhere/v.json", "job.py"],
            "cannot write /nowhere/v.json: give --json a file",
        ),
        (["--json", ".", "job.py"], "cannot write .: it is a folder: give --json a file"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "job.py").write_text("print('ran')")
    ended = run_forked(["-m", "tenure", "run", *arguments], cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_script_that_fails_to_import_fails_as_it_would(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import torch, nothing_like_this\n")
    run = tenure_run(["job.py"], tmp_path)
    assert run.code == 1
    assert "ModuleNotFoundError" in run.err


LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000))"


def test_a_disk_that_is_full_from_the_start(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{LIMIT}\n" + STEPS.format(end=""))
    run = tenure_run(["train.py"], tmp_path)
    assert (run.code, run.out) == (0, "done\n"), run.err
    assert "nothing is recorded: " in run.err
    assert "FLAT" in run.err  # judged from memory


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    run = forked(tmp_path, f"if step == 20: {LIMIT}", "import time; time.sleep(0.6)")
    assert (run.code, run.out) == (0, "done\n"), run.err
    assert "nothing is recorded any more" in run.err


def test_a_recording_that_ends_early_is_not_called_one_of_the_run(tmp_path: Path) -> None:
    pause = "import time; time.sleep(1)"
    limit = LIMIT.replace("30000", "40000")  # SQLite needs 32 KiB to read what is there
    body = f"kept.append(torch.randn(5000))\n    if step == 20: {pause}; {limit}"
    run = forked(tmp_path, body, pause)
    assert "LEAK" in run.err
    assert re.search(r"nothing is recorded any more after step (19|20): .*disk", run.err), run.err
    assert "recorded in" not in run.err


def test_off_leaves_nothing_behind() -> None:
    program = f"""
    import sys, torch
    sys.path.insert(0, {str(ROOT / "python")!r})
    import tenure
    from torch.optim import optimizer
    before = len(optimizer._global_optimizer_post_hooks)
    with tenure.watch(quiet=True):
        deep = torch.randn(10)
        assert len(optimizer._global_optimizer_post_hooks) == before + 1
    assert len(optimizer._global_optimizer_post_hooks) == before
    assert "__init__" not in vars(torch.UntypedStorage)
    import threading
    assert [t.name for t in threading.enumerate()] == ["MainThread"]
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_leak_in_a_thread_that_the_main_thread_waits_for(tmp_path: Path) -> None:
    """No bytecode of the main thread runs, and no steps are announced."""
    (tmp_path / "serve.py").write_text(
        textwrap.dedent(
            """
            import threading, time, torch
            class Server:
                def __init__(self):
                    self.served = []
                def serve(self):
                    end = time.monotonic() + 8
                    while time.monotonic() < end:
                        self.served.append(torch.randn(20_000))
                        time.sleep(0.01)
            thread = threading.Thread(target=Server().serve)
            thread.start()
            thread.join()
            """
        )
    )
    run = forked_run(["serve.py"], tmp_path)
    assert run.code == 0, run.err
    assert run.verdict["verdict"] == "leak", run.err
    assert ".served of Server" in str(run.first["holders"])


def own_memory_group() -> Path | None:
    """A memory group for a test alone, if one can be made here."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        above = Path("/sys/fs/cgroup") / ("memory" if "memory" in controllers else "")
        group = above / name.strip("/") / f"tenure-{os.getpid()}"
        if "memory" in controllers or not controllers:
            with contextlib.suppress(OSError):
                group.mkdir()
                if (group / "memory.stat").exists():
                    return group
                group.rmdir()
    return None


def test_files_in_memory_are_growth(tmp_path: Path) -> None:
    group = own_memory_group()
    if group is None:
        pytest.skip("no memory group of one's own can be made here")
    shm = Path("/dev/shm") / f"tenure-{os.getpid()}"
    shm.mkdir()
    (tmp_path / "train.py").write_text(
        LOOP.replace("range(40)", "range(120)").format(
            body="import time; time.sleep(0.12); "
            f"open(f'{shm}/{{step}}', 'wb').write(bytes(1 << 20))",
            end="",
        )
    )
    script = tmp_path / "all.sh"
    script.write_text(f"echo $$ > {group}/cgroup.procs\nexec {sys.executable} train.py\n")
    try:
        run = tenure_run(["sh", script.name], tmp_path)
    finally:
        shutil.rmtree(shm)
        group.rmdir()
    assert run.code == 0, run.err
    assert run.verdict["verdict"] == "growth", run.err
    split = run.verdict["split"]
    assert split["files in memory"] == pytest.approx(1 << 20, rel=0.2), run.err
    assert max(split, key=lambda part: split[part]) == "files in memory"


@pytest.mark.parametrize("start", [tenure_run, forked_run], ids=["first", "after torch.compile"])
def test_as_tensor_keeps_the_default_device_and_is_seen(
    tmp_path: Path, start: Callable[[list[str], Path], Run]
) -> None:
    """Also by what was imported before it was watched, and compiles it."""
    (tmp_path / "job.py").write_text(
        "import numpy, torch\n"
        "model = torch.nn.Linear(64, 64)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "add = torch.compile(lambda x, y: x + torch.as_tensor(y), fullgraph=True, "
        "backend='eager')\n"
        "kept = []\n"
        "for step in range(40):\n"
        "    x = torch.as_tensor(numpy.ones((250, 64), dtype='float32'))\n"
        "    add(model(x), 2.0).mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    kept.append(x)\n"
        "with torch.device('meta'):\n"
        "    print(torch.as_tensor([1.0]).device, torch.asarray([1.0]).device)\n"
    )
    run = start(["job.py"], tmp_path)
    assert run.out.split() == ["meta", "meta"], run.err
    assert run.verdict["verdict"] == "leak", run.err
    assert run.first["site"].endswith("job.py:7")
    assert any("kept" in hop["text"] for hop in run.first["holders"][0])


def test_a_program_that_imports_tenure_before_torch(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import tenure\n" + LOOP.format(body="pass", end=""))
    run = tenure_run(["job.py"], tmp_path)
    assert run.code == 0, run.err
    assert "not watched" not in run.err
    assert run.verdict["steps"] > 0
