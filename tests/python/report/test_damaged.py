"""Damaged recordings: one sentence each, and what others of the run say is not lost."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from tenure.report.html import report
from watched import forked_run, tenure_here

PROGRAM = """
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
COMMANDS = [("check",), ("why",), ("report",), ("export", "--as", "csv")]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    (folder / "train.py").write_text(PROGRAM)
    (file,) = forked_run(["train.py"], folder).folder.glob("*.sqlite")
    return file


def check_that_each_says_one_sentence(file: Path, said: str = "is damaged or no recording") -> None:
    for command in COMMANDS:
        out = ("--out", file.with_name("out")) if len(command) > 1 or command == ("report",) else ()
        ended = tenure_here(*command, file, *out)
        assert (ended.returncode, ended.stdout) == (2, ""), command
        assert said in ended.stderr
        assert len(ended.stderr.splitlines()) == 1
        assert not file.with_name("out").exists()


@pytest.mark.parametrize("missing", [1, 200, 1000])
def test_one_without_its_last_bytes(sound: Path, tmp_path: Path, missing: int) -> None:
    cut = tmp_path / "cut.sqlite"
    cut.write_bytes(sound.read_bytes()[:-missing])
    check_that_each_says_one_sentence(cut, "bytes are there")


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE steps SET peak=NULL WHERE step=7",
        "UPDATE steps SET seconds='soon' WHERE step=7",
        "UPDATE steps SET rss='much' WHERE step=7",
        "UPDATE storages SET born_step=NULL WHERE id=(SELECT max(id) FROM storages)",
        "UPDATE storages SET bytes='many' WHERE id=(SELECT max(id) FROM storages)",
        "UPDATE meta SET value='-1' WHERE key='schema'",
        "UPDATE meta SET value='' WHERE key='schema'",
        "UPDATE meta SET value=NULL WHERE key='began'",
        "DELETE FROM meta WHERE key='schema'",
    ],
)
def test_one_with_something_else_in_it(sound: Path, tmp_path: Path, change: str) -> None:
    file = changed(sound, tmp_path / "changed.sqlite", change)
    check_that_each_says_one_sentence(file)


@pytest.mark.parametrize(("key", "value"), [("coordinates", "[]"), ("cycles", "3")])
def test_what_a_verdict_needs_is_something_else(
    sound: Path, tmp_path: Path, key: str, value: str
) -> None:
    change = f"INSERT OR REPLACE INTO meta VALUES('{key}', '{value}')"
    file = changed(sound, tmp_path / "changed.sqlite", change)
    for command in ("check", "why", "report"):
        ended = tenure_here(command, file)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert f"is damaged or no recording: its {key} cannot be read" in ended.stderr
        assert len(ended.stderr.splitlines()) == 1


def changed(source: Path, copy: Path, sql: str) -> Path:
    shutil.copy(source, copy)
    with sqlite3.connect(copy) as connection:
        connection.execute(sql)
    return copy


def test_one_damaged_rank_does_not_hide_the_others(sound: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.tenure"
    run.mkdir()
    shutil.copy(sound, run / "r0.sqlite")
    other = "UPDATE meta SET value = CASE key WHEN 'rank' THEN '1' ELSE '4242' END"
    file = changed(sound, run / "r1.sqlite", f"{other} WHERE key IN ('rank', 'pid')")
    content = bytearray(file.read_bytes())
    begin, end = 4 * len(content) // 10, 6 * len(content) // 10
    content[begin:end] = bytes(end - begin)
    file.write_bytes(content)

    alone = tenure_here("check", run / "r0.sqlite")
    checked = tenure_here("check", run)
    assert checked.returncode == alone.returncode
    assert f"left out: {file} is damaged" in checked.stdout
    page = report([run], tmp_path / "page.html")
    assert "r1.sqlite is damaged" in page.read_text()
    exported = tenure_here("export", run, "--as", "csv", "--out", tmp_path / "tables")
    assert exported.returncode == 0
    assert f"{file} is damaged" in exported.stderr
    assert len(exported.stderr.splitlines()) == 1
