"""The page: it opens from disk in a real browser, says the verdict, and lets one look."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import textwrap
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tenure.errors import InputError
from tenure.report.data import as_block, collected
from tenure.report.diff import compared, run_of, text_of
from tenure.report.export import export
from tenure.report.html import rendered, report
from tenure.report.lives import Life
from tenure.report.peak import peak_of
from watched import forked_run, tenure_run

TOKEN = "hunter2-0123456789"
LEAK = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 64)
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))

def main():
    secret = {"hunter2-0123456789": "hunter2-0123456789"}
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    outputs = []
    for step in range(40):
        loss = model(torch.randn(32, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        outputs.append(model(torch.randn(32, 64)))
        state = optimizer.state[model.body.weight]
        state["k" + list(secret)[0]] = state.get("k" + list(secret)[0], torch.zeros(100))
    try:
        raise ValueError(list(secret)[0])
    except ValueError as error:
        outputs.append(error)

main()
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    (folder / "train.py").write_text(LEAK)
    run = tenure_run(["train.py", TOKEN], folder, SECRET=TOKEN)
    assert run.verdict["verdict"] == "leak", run.err
    return run.folder


@pytest.fixture(scope="module")
def page_file(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report([recorded], tmp_path_factory.mktemp("page") / "report.html")


class Opened:
    """A page that was opened from disk, and what it asked for and complained of."""

    def __init__(self, browser: Any, file: Path, width: int = 1280, scheme: str = "light") -> None:
        size = {"width": width, "height": 900}
        self.page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._said)
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("#memory-choice label", state="attached")
        self.page.wait_for_function("byId('peak-text').textContent !== ''")

    def _said(self, message: Any) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(message.text)

    def texts(self, selector: str) -> list[str]:
        return [text.strip() for text in self.page.locator(selector).all_inner_texts()]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_it_opens_from_disk(browser: Any, page_file: Path, width: int, scheme: str) -> None:
    opened = Opened(browser, page_file, width, scheme)
    page = opened.page
    assert "LEAK" in page.inner_text("h1").upper()
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # no sideways scrolling
    assert page.locator("#memory-plot svg").count() > 0
    assert page.locator("#peak-plot svg").count() > 0
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 300) == (scheme == "dark")

    suspect = page.locator("#suspects-list details").first
    assert suspect.locator("li.leaks").is_visible()
    suspect.locator("summary").click()
    assert not suspect.locator("li.leaks").is_visible()
    suspect.locator("summary").press("Enter")  # with the keyboard
    assert "outputs (local of main)" in suspect.inner_text()

    modules = "#storages-table tbody tr td:nth-child(3)"
    others = page.locator(modules).filter(has_not_text="Net.head")
    page.fill("#storages-search", "net.head")
    others.first.wait_for(state="detached")
    found = opened.texts(modules)
    assert found
    assert all("Net.head" in module for module in found)
    page.fill("#storages-search", "")
    others.first.wait_for(state="attached")

    numbers = "#storages-table tbody tr td:nth-child(6)"
    page.click("#storages-table th[data-column=born] button")
    up = [int(text) for text in opened.texts(numbers)]
    page.click("#storages-table th[data-column=born] button")
    down = [int(text) for text in opened.texts(numbers)]
    assert up == sorted(up)
    assert down == sorted(down, reverse=True)
    assert up != down
    assert page.get_attribute("th[data-column=born]", "aria-sort") == "descending"

    assert opened.requests == [page_file.as_uri()]
    assert opened.complaints == []


def test_the_words_are_those_of_the_terminal(recorded: Path) -> None:
    data = collected([recorded])
    assert data["verdict"] == "leak"
    assert any("held by outputs (local of main)" in line for line in data["screen"])
    assert "detach" in data["suspects"][0]["advice"]


def test_the_peak_by_kind(recorded: Path) -> None:
    (peak,) = collected([recorded])["peaks"]
    sums: dict[str, int] = {}
    for kind, _, nbytes, _ in peak["tree"]:
        sums[kind] = sums.get(kind, 0) + nbytes
    weights = 4 * (64 * 64 + 64 + 64 * 8 + 8)
    assert sums["parameter"] == weights
    assert sums["gradient"] == weights
    assert abs(sums["optimizer"] - 2 * weights - 400) < 100  # and a counter for each parameter
    assert sums["activation"] > 40 * 4 * 32 * 64
    assert sum(sums.values()) == peak["bytes"]
    modules = {(kind, module) for kind, module, _, _ in peak["tree"]}
    assert {("parameter", "Net.head"), ("gradient", "Net.head"), ("optimizer", "Net.head")} <= (
        modules
    )


def test_the_peak_of_a_program_without_steps(tmp_path: Path) -> None:
    """Its steps are intervals, and the first is recorded under another number than its births."""
    text = """
        import time, torch
        weight = torch.randn(256, 256, requires_grad=True)
        for turn in range(200):
            (torch.randn(64, 256) @ weight).square().mean().backward()
            weight.grad = None
            time.sleep(0.001)
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(text))
    (peak,) = collected([forked_run(["train.py"], tmp_path).folder])["peaks"]
    unknown = sum(nbytes for _, module, nbytes, _ in peak["tree"] if module == "not recorded")
    assert peak["bytes"] > 2 * 4 * 256 * 256
    assert unknown < peak["bytes"] / 10


def test_the_peak_of_a_step_that_makes_nothing() -> None:
    origin = dict.fromkeys(("op", "module", "phase", "site", "forward_site"), "")
    told = [(1, 100, 0, None), (2, 50, 1, 9), (3, 7, 2, 3)]  # id, bytes, born and died in step
    lives = [
        Life(number, nbytes, "cpu", born, died, born, died, origin, "other", "")
        for number, nbytes, born, died in told
    ]
    peak = peak_of(lives, 5, 4, 150)
    assert [life.number for life in peak.lives] == [1, 2]
    assert peak.unknown == 0


def test_no_secret_is_in_it(page_file: Path) -> None:
    assert TOKEN not in page_file.read_text()
    assert page_file.stat().st_mode & 0o077 == 0


def test_no_secret_is_in_any_file(recorded: Path, tmp_path: Path) -> None:
    (source,) = recorded.glob("*.sqlite")
    written = [
        source,
        *export([recorded], "csv", tmp_path / "tables", None),
        *export([recorded], "trace", tmp_path / "trace.json", None),
        *export([recorded], "snapshot", tmp_path / "snapshot.pickle", None),
    ]
    for file in written:
        assert TOKEN.encode() not in file.read_bytes(), file
    assert b"Net.body.weight.state" in source.read_bytes()
    run = run_of([recorded], "run")
    smaller = replace(run, parts={by: Counter() for by in run.parts})
    told = text_of(smaller, run) + json.dumps(compared(smaller, run))
    assert "optimizer" in told
    assert TOKEN not in told


LINK = "<a href='https://evil/x'>link</a>"
HTML = f"</script><img src=x onerror=\"document.title='run'\"><b>bold</b>{LINK}"


def test_names_with_html_are_only_names(browser: Any, recorded: Path, tmp_path: Path) -> None:
    data = collected([recorded])
    text = json.dumps(data).replace("Net.head", json.dumps(HTML)[1:-1])
    spoilt = json.loads(text.replace("outputs (local", json.dumps(f"{HTML} (local")[1:-1]))
    spoilt["name"] = HTML
    spoilt["ranks"][0]["host"] = HTML
    spoilt["environment"].append((HTML, HTML))
    spoilt["suspects"][0]["cycle"] = True
    file = tmp_path / "page.html"
    file.write_text(rendered(spoilt))
    opened = Opened(browser, file)
    assert HTML in opened.page.inner_text("#environment")
    assert HTML in opened.page.inner_text("#suspects")
    assert opened.page.locator("img").count() == 0
    assert opened.page.locator("main b").count() == 0
    drawn = opened.page.locator("#peak-plot g.slice", has_text=LINK)
    assert drawn.count() > 0  # the name as it is
    drawn.first.hover()
    assert LINK in opened.page.locator("#peak-plot .hoverlayer").text_content()
    assert opened.page.locator("main a").count() == 0
    assert opened.page.title() != "run"
    assert opened.complaints == []


def test_a_cycle_is_drawn_as_one(browser: Any, recorded: Path, tmp_path: Path) -> None:
    data = collected([recorded])
    data["suspects"][0]["cycle"] = True
    data["cycles"] = [{"rank": 0, "text": "a → b → c", "bytes": 9, "count": 1, "collectable": True}]
    file = tmp_path / "page.html"
    file.write_text(rendered(data))
    opened = Opened(browser, file)
    drawn = opened.page.locator("#cycles-list svg.cycle")
    assert drawn.locator("circle").count() == 3
    assert drawn.get_attribute("aria-label") == "cycle: a → b → c → and back"
    hops = len(data["suspects"][0]["paths"][0])
    assert opened.page.locator("#suspects-list svg.cycle").first.locator("circle").count() == hops


def copy_to_ranks(recorded: Path, folder: Path, many: int) -> None:
    """Recordings of a job in which every rank holds more than the one before it."""
    (source,) = recorded.glob("*.sqlite")
    for rank in range(many):
        copy = folder / f"host-{rank}-{1000 + rank}-0.sqlite"
        shutil.copy(source, copy)
        with sqlite3.connect(copy) as connection:
            connection.execute("UPDATE meta SET value=? WHERE key='rank'", [str(rank)])
            connection.execute("UPDATE meta SET value=? WHERE key='pid'", [str(1000 + rank)])
            connection.execute("UPDATE steps SET held=held*?, peak=peak*?", [1 + rank] * 2)


@pytest.mark.parametrize("many", [1, 3, 16])
def test_the_peak_is_marked(browser: Any, recorded: Path, tmp_path: Path, many: int) -> None:
    copy_to_ranks(recorded, tmp_path, many)
    data = collected([tmp_path])
    opened = Opened(browser, report([tmp_path], tmp_path / "page.html"))
    (mark,) = opened.page.evaluate("byId('memory-plot').layout.annotations")
    top = data["ranks"][-1]
    assert (mark["x"], mark["y"]) == (top["peak_step"], top["peak"])
    shown = opened.page.locator("#memory-plot .annotation").text_content()
    assert re.fullmatch(r"peak [\d.]+ [kM]B" + (f", rank {many - 1}" if many > 1 else ""), shown)
    for name in ("held by storages", "most held in the step"):
        opened.page.get_by_label(name).uncheck()
    # Its curve is not shown, once the plot has been drawn anew.
    opened.page.locator("#memory-plot .annotation").wait_for(state="detached")


def test_plots_and_tables_have_names(browser: Any, page_file: Path) -> None:
    page = Opened(browser, page_file).page
    memory = page.get_by_role("img", name=re.compile(r"^Memory over steps: LEAK \+"))
    assert memory.get_attribute("id") == "memory-plot"
    peak = page.get_by_role("img", name=re.compile(r"^What the peak was made of .* were alive in"))
    assert peak.get_attribute("id") == "peak-plot"
    unfolded = page.locator("details:not([open]) > summary")
    while unfolded.count() > 0:
        unfolded.first.click()
    regions = page.get_by_role("region", name=re.compile("."))
    assert page.locator("[tabindex='0']").count() > 3
    assert page.locator("[tabindex='0']").count() == (
        page.locator("[tabindex='0']").and_(regions).count()
    )
    assert page.get_by_role("region", name="Where they were made, suspect 1").count() == 1


def test_the_split_by_module_is_a_table_too(browser: Any, recorded: Path, tmp_path: Path) -> None:
    data = collected([recorded])
    opened = Opened(browser, report([recorded], tmp_path / "page.html"))
    table = opened.page.locator("#peak-modules")
    assert not table.is_visible()
    opened.page.locator("#peak-split").press("Enter")  # with the keyboard
    assert table.is_visible()
    columns = [opened.texts(f"#peak-modules td:nth-child({at})") for at in (1, 2)]
    shown = list(zip(*columns, strict=True))
    assert shown == [(kind, module or "–") for kind, module, _, _ in data["peaks"][0]["tree"]]
    assert ("parameter", "Net.head") in shown


def test_many_ranks_are_a_band_and_those_that_stand_out(
    browser: Any, recorded: Path, tmp_path: Path
) -> None:
    copy_to_ranks(recorded, tmp_path, 16)
    data = collected([tmp_path])
    bands = data["memory"]["bands"]
    middle = bands["held"]["middle"]
    assert len(data["ranks"]) == 16
    assert bands["held"]["low"][-1] < middle[-1] < bands["held"]["high"][-1]
    assert 15 in [curve["rank"] for curve in data["memory"]["curves"]]
    assert len(data["memory"]["curves"]) < 16
    file = tmp_path / "page.html"
    file.write_text(rendered(data))
    opened = Opened(browser, file)
    assert "16 ranks" in opened.page.inner_text("#memory-text")
    assert opened.complaints == []


def test_counted_only(tmp_path: Path, browser: Any) -> None:
    (tmp_path / "train.py").write_text(LEAK)
    run = forked_run(["train.py"], tmp_path, level="count")
    opened = Opened(browser, report([run.folder], tmp_path / "page.html"))
    assert "--level trace" in opened.page.inner_text("#peak-text")
    assert opened.complaints == []


def test_a_block_cannot_be_left() -> None:
    assert as_block({"a": "</script>\u2028"}) == '{"a":"\\u003c/script\\u003e\\u2028"}'


def test_bad_input(tmp_path: Path, recorded: Path) -> None:
    with pytest.raises(InputError, match="has no recordings"):
        report([tmp_path], tmp_path / "page.html")
    with pytest.raises(InputError, match="cannot write .*: give --out another file"):
        report([recorded], tmp_path / "missing" / "page.html")
    half = tmp_path / "half.sqlite"
    (source,) = recorded.glob("*.sqlite")
    half.write_bytes(source.read_bytes()[: source.stat().st_size // 2])
    with pytest.raises(InputError, match="half.sqlite is damaged"):
        report([half], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_no_steps(tmp_path: Path, recorded: Path) -> None:
    (source,) = recorded.glob("*.sqlite")
    copy = tmp_path / source.name
    shutil.copy(source, copy)
    with sqlite3.connect(copy) as connection:
        connection.executescript("DELETE FROM steps; DELETE FROM cuts;")
    data = collected([copy])
    assert data["verdict"] == "too-short"
    assert "are needed" in data["screen"][0]
    assert rendered(data)
