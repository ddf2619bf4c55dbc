"""Two runs side by side: what grew is named, and a baseline fails what is worse."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from forks import run_forked
from tenure.report.diff import compared, over_baseline, run_of, text_of
from watched import forked_run, tenure_here

PROGRAM = """
import sys, torch
from torch import nn
batch, keep = int(sys.argv[1]), sys.argv[2] == "keep"
model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for step in range(30):
    loss = model(torch.randn(batch, 128)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if keep:
        kept.append(torch.randn(64, 128))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = {}
    for name, batch, keep in [("main", 64, "no"), ("large", 2048, "no"), ("leaks", 64, "keep")]:
        folder = tmp_path_factory.mktemp(name)
        (folder / "train.py").write_text(PROGRAM)
        out[name] = forked_run(["train.py", str(batch), keep], folder).folder
    return out


def test_a_larger_batch_is_activations(runs: dict[str, Path]) -> None:
    before, after = run_of([runs["main"]], "main"), run_of([runs["large"]], "large")
    change = compared(before, after)
    assert change["peak"] > 1984 * 128 * 4
    kinds = {row["name"]: row["after"] - row["before"] for row in change["kind"]}
    assert max(kinds, key=lambda name: kinds[name]) in {"activation", "temporary"}
    assert "parameter" not in kinds
    assert any("Sequential" in row["name"] for row in change["module"][:3])
    assert "train.py:" in change["site"][0]["name"]
    assert change["after"]["verdict"] == "flat"


def test_a_leak_is_a_slope(runs: dict[str, Path]) -> None:
    text = text_of(run_of([runs["main"]], "main"), run_of([runs["leaks"]], "leaks"))
    assert "(flat → leak)" in text
    assert "train.py:14" in text


def test_a_run_is_as_large_as_itself(runs: dict[str, Path]) -> None:
    run = run_of([runs["main"]], "main")
    assert "nothing grew" in text_of(run, run)
    assert over_baseline(run, run, 0) == ""


def test_what_was_only_counted_says_so(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    counted = forked_run(["train.py", "64", "no"], tmp_path, level="count").folder
    text = text_of(run_of([runs["main"]], "main"), run_of([counted], "counted"))
    assert "was only counted: record with --level trace" in text
    assert text.startswith("peak ")


def changed(source: Path, copy: Path, *changes: str) -> Path:
    (file,) = source.glob("*.sqlite")
    shutil.copy(file, copy)
    with sqlite3.connect(copy) as connection:
        connection.executescript(";".join(changes))
    return copy


def test_the_rank_of_the_tables_is_said(runs: dict[str, Path], tmp_path: Path) -> None:
    for rank, times, level in ((1, 1, "trace"), (3, 2, "trace"), (5, 9, "count")):
        changed(
            runs["main"],
            tmp_path / f"r{rank}.sqlite",
            f"UPDATE steps SET peak = peak * {times}",
            f"UPDATE meta SET value='{level}' WHERE key='level'",
            f"UPDATE meta SET value='{rank}' WHERE key IN ('rank', 'pid')",
        )
    before, after = run_of([runs["main"]], "main"), run_of([tmp_path], "after")
    text = text_of(before, after)
    assert "peaks  of rank 0 → rank 5" in text
    assert "tables of rank 0 → rank 3" in text
    told = compared(before, after)["after"]
    assert (told["rank"], told["traced"]) == (5, 3)
    assert "rank" not in text_of(before, before)


def test_what_is_left_out_is_said(runs: dict[str, Path], tmp_path: Path) -> None:
    changed(runs["main"], tmp_path / "good.sqlite")
    first = "UPDATE meta SET value='2001-01-01T00:00:00.000+00:00' WHERE key='began'"
    other = "UPDATE meta SET value='another' WHERE key='run'"
    changed(runs["main"], tmp_path / "first.sqlite", first, other)
    (tmp_path / "bad.sqlite").write_text("hello")
    said = [
        "tenure: 1 recording of earlier runs left out: name the files to see them",
        f"tenure: left out: {tmp_path / 'bad.sqlite'} is no recording: `tenure run` makes them",
    ]
    for arguments in (
        ("diff", runs["main"], tmp_path),
        ("diff", tmp_path, runs["main"], "--json"),
        ("check", runs["main"], "--baseline", tmp_path),
    ):
        ended = tenure_here(*arguments)
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr.splitlines() == said


def test_a_terminal_is_given_no_escapes(runs: dict[str, Path], tmp_path: Path) -> None:
    spoilt = changed(
        runs["leaks"],
        tmp_path / "spoilt.sqlite",
        "UPDATE origins SET site = 'a' || char(27) || '[31mred.py:7 f', forward_site = NULL",
        "UPDATE origins SET op = 'o' || char(155) || '31m', module = 'm' || char(13)",
        "UPDATE kinds SET name = 'n' || char(27) || '[2J.weight'",
        "UPDATE holdings SET path = replace(path, 'kept', 'kept\\u001b[2J')",
    )
    (storage,) = sqlite3.connect(spoilt).execute("SELECT max(id) FROM storages").fetchone()
    for arguments in (
        ("check", spoilt),
        ("check", spoilt, "--baseline", runs["main"]),
        ("why", spoilt),
        ("why", spoilt, storage),
        ("diff", runs["main"], spoilt),
        ("check", tmp_path / "\x1b[2J.sqlite"),
    ):
        ended = tenure_here(*arguments)
        told = ended.stdout + ended.stderr
        assert "�" in told, arguments
        assert all(char.isprintable() or char == "\n" for char in told), arguments


def test_commands(runs: dict[str, Path], tmp_path: Path) -> None:
    command = ["-m", "tenure", "diff", runs["main"], runs["large"], "--json"]
    shown = run_forked(command, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["peak"] > 0
    good = tenure_here("check", runs["main"], "--baseline", runs["main"])
    assert good.returncode == 0, good.stdout + good.stderr
    worse = tenure_here("check", runs["large"], "--baseline", runs["main"])
    assert worse.returncode == 1
    assert "peak over that of" in worse.stdout
    assert "most of it" in worse.stdout
    tolerance = ("--tolerance", "100000")
    forgiven = tenure_here("check", runs["large"], "--baseline", runs["main"], *tolerance)
    assert forgiven.returncode == 0
    missing = tenure_here("diff", runs["main"], tmp_path / "nothing")
    assert missing.returncode == 2
    assert missing.stderr.startswith("tenure: ")
    assert len(missing.stderr.splitlines()) == 1
