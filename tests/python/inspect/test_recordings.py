"""Recordings that are no recordings; the queries of docs/recording.md; `why` and `check`."""

from __future__ import annotations

import re
import sqlite3
import subprocess
from pathlib import Path

import pytest

from forks import run_forked
from watched import ROOT, ZOO, forked_run, tenure_here


@pytest.fixture(scope="module")
def leaky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = forked_run([str(ZOO / "metric_state.py")], tmp_path_factory.mktemp("leaky"))
    assert run.verdict["verdict"] == "leak"
    return run.folder


def tenure(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_forked(["-m", "tenure", *arguments])


QUERIES = re.findall(r"```sql\n(.*?)```", (ROOT / "docs/recording.md").read_text(), re.DOTALL)


def test_there_are_ten_queries() -> None:
    assert len(QUERIES) == 10


@pytest.mark.parametrize("number", range(10))
def test_the_query_answers(leaky: Path, number: int) -> None:
    (file,) = leaky.glob("*.sqlite")
    with sqlite3.connect(file) as connection:
        assert connection.execute(QUERIES[number]).fetchall()


def test_every_column_is_documented(leaky: Path) -> None:
    (file,) = leaky.glob("*.sqlite")
    text = (ROOT / "docs/recording.md").read_text()
    with sqlite3.connect(file) as connection:
        tables = [r[0] for r in connection.execute("SELECT name FROM sqlite_master WHERE sql > ''")]
        columns = {
            row[1] for table in tables for row in connection.execute(f"PRAGMA table_info({table})")
        }
    assert {column for column in columns if f"`{column}`" not in text} == set()


def test_why_tells_the_path(leaky: Path) -> None:
    ended = tenure("why", leaky)
    assert ended.returncode == 0
    assert tenure_here("why", leaky).stdout == ended.stdout
    assert ".predictions of F1" in ended.stdout
    storage = re.search(r"^ +storages (\d+)", ended.stdout, re.MULTILINE)
    assert storage
    assert "alive at the end" in tenure_here("why", leaky, storage[1]).stdout
    for number in (10**9, 10**20):  # SQLite has no number as large as the second
        missing = tenure_here("why", leaky, number)
        assert (missing.returncode, missing.stdout) == (2, "")
        assert f"no recording has a storage {number}" in missing.stderr


def test_check_says_it_with_its_exit_code(leaky: Path, tmp_path: Path) -> None:
    assert tenure("check", leaky).returncode == 1
    fixed = forked_run([str(ZOO / "kept_batches.py"), "--fixed"], tmp_path)
    assert tenure_here("check", fixed.folder).returncode == 0
    over = tenure_here("check", fixed.folder, "--peak", "1KiB")
    assert over.returncode == 1
    assert "peak" in over.stdout
    assert tenure_here("check", fixed.folder, "--peak", "1TiB").returncode == 0
    short = tmp_path / "short"
    short.mkdir()
    run = forked_run([str(ZOO / "kept_batches.py"), "--steps", "5"], short)
    assert tenure_here("check", run.folder).returncode == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no recording"),
        (b"hello", "is no recording"),
        (b"SQLite format 3\x00" + bytes(50), "damaged or no recording"),
        (None, "does not exist"),
    ],
)
def test_what_is_no_recording(tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "x.sqlite"
    if content is not None:
        file.write_bytes(content)
    for command in ("check", "why"):
        ended = tenure_here(command, file)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert said in ended.stderr
        assert "Traceback" not in ended.stderr


def test_truncated_foreign_and_newer_recordings(leaky: Path, tmp_path: Path) -> None:
    (file,) = leaky.glob("*.sqlite")
    cut = tmp_path / "cut.sqlite"
    cut.write_bytes(file.read_bytes()[:5000])
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE songs(title)")
    newer = tmp_path / "newer.sqlite"
    newer.write_bytes(file.read_bytes())
    with sqlite3.connect(newer) as connection:
        connection.execute("UPDATE meta SET value='99' WHERE key='schema'")
    for path, said in ((cut, "damaged"), (foreign, "no recording"), (newer, "newer Tenure")):
        ended = tenure_here("check", path)
        assert ended.returncode == 2, path
        assert said in ended.stderr
        assert "Traceback" not in ended.stderr
