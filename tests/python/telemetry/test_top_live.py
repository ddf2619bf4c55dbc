"""`tenure top` beside four real ranks that are killed and started anew: in tmux and in Chromium."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tenure import _C

TENURE = str(Path(sys.executable).with_name("tenure"))
PATIENCE_S = 60.0


def until(ready: Callable[[], Any], otherwise: Callable[[], str] = str) -> Any:
    """Asks again until there is an answer."""
    deadline = time.monotonic() + PATIENCE_S
    while not (answer := ready()):
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.05)
    return answer


class Job:
    """Four ranks, each a process that appends rows to its ring, or that a monitor watches."""

    def __init__(self, folder: Path, name: str = "live_ranks.py") -> None:
        self.folder = folder
        program = Path(__file__).with_name(name)
        self._ranks = subprocess.Popen(
            [sys.executable, program, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, command: str) -> None:
        assert self._ranks.stdin is not None
        assert self._ranks.stdout is not None
        print(command, file=self._ranks.stdin, flush=True)
        assert self._ranks.stdout.readline().startswith("done")

    def end(self) -> None:
        self._ranks.communicate(timeout=PATIENCE_S)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    folder = tmp_path / "run.tenure"
    folder.mkdir()
    started = Job(folder)
    yield started
    started.end()


def test_it_follows_in_a_terminal(job: Job) -> None:
    if shutil.which("tmux") is None:
        pytest.skip("a terminal to look at needs tmux: apt-get install tmux")
    tmux = ["tmux", "-L", f"tenure-top-{os.getpid()}", "-f", os.devnull]

    def screen() -> str:
        shown = [*tmux, "capture-pane", "-p", "-t", "top"]
        return subprocess.run(shown, capture_output=True, text=True, check=True).stdout

    def shows(pattern: str) -> str:
        return until(
            lambda: re.search(pattern, text := screen(), re.MULTILINE) and text,
            lambda: f"no {pattern} on the screen:\n{screen()}",
        )

    program = f"'{TENURE}' top '{job.folder}' --every 0.2; echo status $?; exec cat"
    size = ["-x", "200", "-y", "20"]
    subprocess.run([*tmux, "new-session", "-d", "-s", "top", *size, program], check=True)
    try:
        shows("^no rank has written to .* yet: waiting for a tenure.Monitor there")
        for rank in range(4):
            job.tell(f"start {rank} 0")
        text = shows(r"^rank 3 \(stage 1, node<b>7\) will be out of memory in about")
        assert re.search(r"^4 ranks: 4 running; step ", text, re.MULTILINE)
        row = r"^ +3 +running +1 +trainer +node<b>7 .* \+1.0 MiB .* optimizer 200.0 MiB, "
        assert re.search(row, text, re.MULTILINE)
        before = int(re.search(r"; step [\d,]+ to ([\d,]+)", text)[1])  # type: ignore[index]
        until(lambda: f"step {before:,}" not in screen())
        job.tell("kill 2")
        text = shows(r"^4 ranks: 3 running, 1 died; step ")
        assert re.search(r"^rank 2 \(stage 1, node<b>7\) died after step \d", text)
        assert re.search(r"^ +2 +died ", text, re.MULTILINE)
        job.tell("start 2 1")
        shows(r"^4 ranks: 4 running; step ")
        job.tell("end 0")
        assert re.search(r"^ +0 +ended ", shows("3 running, 1 ended"), re.MULTILINE)
        subprocess.run([*tmux, "resize-window", "-t", "top", "-x", "70", "-y", "9"], check=True)
        text = shows(r"^and 2 more \(the worst first\)")
        assert text.startswith("rank 3 (")  # in three lines, and still there
        subprocess.run([*tmux, "send-keys", "-t", "top", "C-c"], check=True)
        assert "\n4 ranks: 3 running, 1 ended; " in shows(r"^status 0")  # the last table stays
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)


def test_it_follows_a_job_under_monitors(tmp_path: Path) -> None:
    """In a terminal and over HTTP, whoever of them comes and goes."""
    pytest.importorskip("uvicorn", reason="the page needs the extra `web`")
    job = Job(tmp_path, "monitored_ranks.py")
    arguments = [TENURE, "top", str(tmp_path / "run.tenure")]

    def table() -> str:
        return subprocess.run([*arguments, "--once"], capture_output=True, text=True).stdout

    def shows(pattern: str) -> None:
        until(lambda: re.search(pattern, table(), re.MULTILINE), table)

    job.tell("start 0")
    with page_of(tmp_path / "run.tenure") as address:

        def ranks() -> dict[int, dict[str, Any]]:
            """Rows of the page: cells by the titles of their columns, and the curve of memory."""
            with urllib.request.urlopen(f"{address}/ranks.json") as answer:
                page = json.load(answer)
            titles = [column["title"] for column in page["columns"]]
            return {
                row["rank"]: dict(zip(titles, row["cells"], strict=True)) | {"curve": row["curve"]}
                for row in page["ranks"]
            }

        def memory() -> list[int]:
            return [row["curve"][-1][1] for _, row in sorted(ranks().items())]

        shows("^4 ranks: 4 running; step ")
        until(lambda: len(memory()) == 4)
        assert memory().index(max(memory())) == 2
        first = {rank: row["curve"][-1][0] for rank, row in ranks().items()}
        until(lambda: all(row["curve"][-1][0] > first[rank] for rank, row in ranks().items()))
        job.tell("kill 2")
        shows("^4 ranks: 3 running, 1 died; step ")
        until(lambda: ranks()[2]["state"] == "died")
        job.tell("end")
        shows("^4 ranks: 1 died, 3 ended; step ")
        job.tell("start 1")
        shows("^4 ranks: 4 running; step ")
        until(lambda: all(row["state"] == "running" for row in ranks().values()))
        job.tell("end")
        shows("^4 ranks: 4 ended; step ")
    job.end()


@contextmanager
def page_of(folder: Path) -> Iterator[str]:
    """The address of a `tenure top --web` that ends with 0 at Ctrl-C."""
    arguments = ["top", str(folder), "--web", "--port", "0", "--every", "0.2"]
    served = subprocess.Popen([TENURE, *arguments], stdout=subprocess.PIPE, text=True)
    assert served.stdout is not None
    try:
        said = served.stdout.readline()
        yield re.search(r"http://127\.0\.0\.1:\d+", said)[0]  # type: ignore[index]
    finally:
        served.send_signal(signal.SIGINT)
        assert served.wait(timeout=PATIENCE_S) == 0


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (400, "dark")])
def test_a_page_follows(browser: Any, job: Job, width: int, scheme: str) -> None:
    pytest.importorskip("uvicorn", reason="the page needs the extra `web`")
    size = {"width": width, "height": 900}
    context = browser.new_context(viewport=size, color_scheme=scheme)
    context.set_default_timeout(1000 * PATIENCE_S)
    page = context.new_page()
    complaints: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type != "log" else None)
    page.on("request", lambda request: asked.append(request.url))

    def shows(where: str, text: str) -> None:
        page.locator(where).filter(has_text=re.compile(text)).first.wait_for(state="attached")

    with page_of(job.folder) as address:
        page.goto(address)
        shows("#headline", "^no rank has written to .* yet")
        for rank in range(4):
            job.tell(f"start {rank} 0")
        shows("#summary", "^4 ranks: 4 running; step ")
        shows("#headline", r"^rank 3 \(stage 1, node<b>7\) will be out of memory in about ")
        assert page.locator("tbody tr").count() == 4
        assert page.locator("tbody tr svg.small path").count() == 4
        page.locator("tbody tr button").nth(3).press("Enter")  # with the keyboard
        shows("#chosen-name", "^Memory of rank 3$")
        curve = page.locator("#chosen-curve path:not([class])")
        until(lambda: len(curve.get_attribute("d")) > 100)
        assert page.evaluate("document.activeElement.textContent") == "3"
        job.tell("kill 2")
        shows("#headline.bad", r"^rank 2 \(stage 1, node<b>7\) died after step ")
        shows("tbody tr.bad", "died")
        page.select_option("#sort", "growth")
        shows("tbody tr:first-child button", "^3$")
        job.tell("start 2 1")
        shows("#summary", "^4 ranks: 4 running; step ")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 300) == (scheme == "dark")
        assert all(url.startswith((address, "data:")) for url in asked)
        assert complaints == []
    shows("#trouble", "^tenure top does not answer: what is shown is what it last said")
    context.close()


def test_a_page_is_for_this_host(tmp_path: Path) -> None:
    """A name that another site points at loopback gives nothing away."""
    pytest.importorskip("uvicorn", reason="the page needs the extra `web`")
    ring = _C.TelemetryRing(str(tmp_path), host="n", rank=0, ranks=1)
    ring.append(1, {"host_rss_bytes": 1})

    def status(address: str, **headers: str) -> int:
        try:
            with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    with page_of(tmp_path) as address:
        assert status(f"{address}/ranks.json") == 200
        assert status(f"{address}/ranks.json", Host="evil.example") == 400
        assert status(f"{address}/ranks.json?sort=colour") == 400
        assert status(f"{address}/../../etc/passwd") == 404


def test_a_port_in_use(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="the page needs the extra `web`")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = [TENURE, "top", str(tmp_path), "--web", "--port", str(port)]
        done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        f"tenure: cannot listen on port {port} of 127.0.0.1: address already in use: "
        "give another with --port\n"
    )


def test_a_page_without_its_packages(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ImportError('gone', name='uvicorn')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    arguments = [TENURE, "top", str(tmp_path), "--web", "--port", "0"]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr == (
        "tenure: the page needs uvicorn, which is not installed: pip install 'tenure[web]'\n"
    )
