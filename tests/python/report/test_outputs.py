"""Where results are written: what is there already is not lost, and refusals are one sentence."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from watched import forked_run, tenure_here

PROGRAM = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    (folder / "train.py").write_text(PROGRAM)
    return forked_run(["train.py"], folder).folder


COMMANDS = [("report",), ("export", "--as", "trace"), ("export", "--as", "snapshot")]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_link_is_followed(recorded: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    ended = tenure_here(*command, recorded, "--out", link)
    assert ended.returncode == 0, ended.stderr
    assert link.is_symlink()
    assert target.read_bytes() != b"before"


def test_a_pipe_is_written_to(recorded: Path, tmp_path: Path) -> None:
    pipe, came = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: came.append(pipe.read_text()), daemon=True)
    reader.start()
    ended = tenure_here("export", recorded, "--as", "trace", "--out", pipe)
    assert ended.returncode == 0, ended.stderr
    assert pipe.is_fifo()
    reader.join(10)
    assert came[0].startswith('{"displayTimeUnit"')


@pytest.mark.parametrize("out", ["", "."])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_is_refused(
    recorded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    out: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = tenure_here(*command, recorded, "--out", out)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "tenure: cannot write .: it is a folder: give the name of a file\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_recording_is_not_replaced(recorded: Path, command: tuple[str, ...]) -> None:
    (file,) = recorded.glob("*.sqlite")
    before = file.read_bytes()
    ended = tenure_here(*command, recorded, "--out", file)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "is a recording that is read: give another file" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert file.read_bytes() == before


def test_only_its_owner_may_read_a_verdict(recorded: Path) -> None:
    assert (recorded.parent / "verdict.json").stat().st_mode & 0o077 == 0
