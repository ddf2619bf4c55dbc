"""Options of `tenure run`: names hashed, recordings on the node first, budgets."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from forks import run_forked
from tenure.inspect import local, recordings
from tenure.inspect.options import Options
from watched import ROOT, ZOO, tenure_run

SECRET = """
import torch, tenure

class SecretModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden_layer = torch.nn.Linear(64, 64)
    def forward(self, x):
        return self.hidden_layer(x).relu()

def confidential_loop():
    private_model = SecretModel()

    hush_list = []
    for _ in range(40):
        private_model(torch.randn(8, 64)).square().mean().backward()
        tenure.step()
        hush_list.append(private_model(torch.randn(64, 64)))

confidential_loop()
"""
NAMES = ["SecretModel", "hidden_layer", "confidential", "private_model", "hush_list", "classified"]


def test_redacted_files_have_no_name_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "classified.py").write_text(SECRET)
    run = tenure_run(["classified.py"], tmp_path, "--redact", "--level", "deep")
    assert run.verdict["verdict"] == "leak", run.err
    files = [*run.folder.iterdir(), tmp_path / "verdict.json"]
    host = os.uname().nodename
    for file in files:
        text = file.read_bytes()
        assert not [name for name in [*NAMES, str(tmp_path)] if name.encode() in text]
        assert len(host) < 4 or host not in file.name
    # The shape is there: operator, line number, kind of path, what grows.
    assert run.first["op"].startswith("aten::")
    assert run.first["site"].endswith(".py:18")
    assert run.first["function"].startswith("x")
    words = " → ".join(hop["text"] for hop in run.first["holders"][0])
    assert "(local of x" in words
    assert "Backward0 saved" in words
    # The terminal is the user's own.
    assert "hush_list (local of confidential_loop)" in run.err


def test_two_ranks_hash_alike(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(SECRET)
    (tmp_path / "main.py").write_text(
        "import subprocess, sys\n"
        "for _ in range(2): subprocess.run([sys.executable, 'work.py'], check=True)\n"
    )
    run = tenure_run(["main.py"], tmp_path, "--redact")
    sites = set()
    for file in run.folder.glob("*.sqlite"):
        with sqlite3.connect(file) as connection:
            found = connection.execute("SELECT site FROM origins WHERE site LIKE '%:18 %'")
            sites |= {row[0] for row in found}
    assert len(sites) == 1


def test_local_first_and_copied_at_the_end(tmp_path: Path) -> None:
    run = tenure_run(
        [str(ZOO / "kept_batches.py")], tmp_path, "--local-dir", str(tmp_path / "node")
    )
    assert run.code == 0
    (file,) = run.folder.glob("*.sqlite")
    assert file.stat().st_mode & 0o077 == 0
    assert recordings.judge([run.folder])["verdict"] == "leak"
    assert f"recording to {tmp_path}/node/" in run.err
    assert not list((tmp_path / "node").rglob("*.sqlite*"))


def test_killed_a_local_recording_is_found_on_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    node = tmp_path / f"tenure-{os.getuid()}"
    program = "import torch, tenure, os, time\nfor _ in range(20): tenure.step()\n"
    (tmp_path / "job.py").write_text(program + f"time.sleep(1)\nos.kill(0, {signal.SIGKILL:d})\n")
    command = [sys.executable, "-m", "tenure", "run", "--local-dir", node, "job.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, start_new_session=True)
    assert ended.returncode == -signal.SIGKILL
    assert not list((tmp_path / "run.tenure").iterdir())
    assert recordings.judge([tmp_path / "run.tenure"])["steps"] == 20


MOUNTS = """\
22 1 254:1 / / rw,relatime - ext4 /dev/root rw
30 22 0:25 / /dev/shm rw - tmpfs tmpfs rw
41 22 0:40 / /data rw,relatime - nfs4 server:/export rw
42 41 254:2 / /data/scratch rw - xfs /dev/nvme0n1 rw
43 22 0:41 / /mnt/big\\040share rw - lustre mgs@tcp:/fs rw
44 22 0:42 / /cloud rw - fuse.gcsfuse bucket rw
45 22 8:1 / /usb rw - fuseblk /dev/sda1 rw
"""


@pytest.mark.parametrize(
    ("path", "network"),
    [
        ("/home/me/run.tenure", False),
        ("/data/run.tenure", True),
        ("/data", True),
        ("/database/run.tenure", False),
        ("/data/scratch/run.tenure", False),
        ("/mnt/big share/run.tenure", True),
        ("/cloud/a/b", True),
        ("/usb/a", False),
    ],
)
def test_network_file_systems(path: str, network: bool) -> None:
    assert local.on_network(Path(path), MOUNTS) == network


def test_this_machines_own_disk_is_local(tmp_path: Path) -> None:
    assert not local.on_network(tmp_path)


LOOP = """
import torch, tenure
kept = []
for step in range(40):
    kept.append([torch.empty(1) for _ in range(500)])
    tenure.step()
"""


def test_above_its_memory_it_steps_down(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(LOOP)
    run = tenure_run(["job.py"], tmp_path, "--max-memory", "1MB")
    assert run.code == 0
    assert "more than it may: from now on bytes are only counted" in run.err
    (file,) = run.folder.glob("*.sqlite")
    with sqlite3.connect(file) as connection:
        notes = connection.execute("SELECT text FROM notes WHERE kind='stepped down'").fetchall()
        assert len(notes) == 1
        # Bytes are still counted to the end.
        held = connection.execute("SELECT held FROM steps ORDER BY step").fetchall()
    assert held[-1][0] > held[-5][0] > held[0][0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-memory", "lots"], "'lots' is no number of bytes"),
        (["--max-cost", "-1"], "greater than or equal to 0"),
        (["--local-dir", "/proc/nothing"], "cannot write recordings to"),
    ],
)
def test_bad_options_are_one_sentence(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "job.py").write_text("import torch; print('ran')")
    ended = run_forked(["-m", "tenure", "run", *arguments, "job.py"], cwd=tmp_path)
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_options_travel_in_the_variable() -> None:
    given = Options(out="/a b/c", json="/v", level="deep", quiet=True, redact="k", local="/l")
    assert Options.parse(given.text()) == given
    with pytest.raises(ValueError, match="should be a number"):
        Options.parse("cap=big")


def test_env_passes_the_key_on(tmp_path: Path) -> None:
    done = run_forked(["-m", "tenure", "env", "--redact", "--as", "json"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    out = done.stdout
    options = Options.parse(json.loads(out)["env_vars"]["TENURE"])
    assert len(options.redact) == 32
    assert str(ROOT) in json.loads(out)["env_vars"]["PYTHONPATH"]
