"""Schedules as drawings: in the terminal, as a picture, and what cannot be drawn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tenure import pipelining
from tenure.cli import app

SVG = "{http://www.w3.org/2000/svg}"
WORDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


def show(*arguments: str | Path, columns: int = 100) -> Result:
    environment = {"COLUMNS": str(columns), "FORCE_COLOR": None, "TTY_COMPATIBLE": None}
    return CliRunner().invoke(app, ["pipeline", "show", *map(str, arguments)], env=environment)


def shown(*arguments: str | Path, columns: int = 100) -> list[str]:
    done = show(*arguments, columns=columns)
    assert done.exit_code == 0, done.stderr
    return done.stdout.splitlines()


def rows_of(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("rank ") and "stages" not in line]


def test_the_program_draws_a_schedule() -> None:
    program = Path(sys.executable).with_name("tenure")
    sizes = ["--schedule", "zb-h1", "--ranks", "2", "--microbatches", "3"]
    done = subprocess.run(
        [program, "pipeline", "show", *sizes, "--bytes", "120MiB,40MiB"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "60"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "zb-h1: 2 ranks, 3 microbatches, time 10\n"
        "\n"
        "rank 0  F0 F1    I0 W0 F2 I1 W1 I2 W2\n"
        "rank 1     F0 I0 F1 I1 W0 F2 I2 W1 W2\n"
        "\n"
        "F forward  I backward of inputs  W backward of weights\n"
        "\n"
        "rank  stages  in flight  weights wait      bytes  bubble\n"
        "   0       0          2             0  240.0 MiB   10.0%\n"
        "   1       1          2             1  160.0 MiB   10.0%\n"
    )


def test_without_arguments_it_is_1f1b() -> None:
    assert shown() == shown("--schedule", "1f1b", "--ranks", "4", "--microbatches", "8")


def test_an_action_is_as_wide_as_it_takes() -> None:
    costs = ["--input-backward", "2", "--weight-backward", "1", "--message", "1"]
    assert rows_of(shown("--ranks", "2", "--microbatches", "2", *costs)) == [
        "rank 0  F0 F1                B0------    B1------",
        "rank 1        F0 B0------ F1 B1------",
    ]


def test_kinds_and_stages_have_colours_of_their_own() -> None:
    sizes = ["--schedule", "zb-v", "--ranks", "1", "--microbatches", "2"]
    colours = {"FORCE_COLOR": "1", "NO_COLOR": None, "TERM": "xterm", "COLORTERM": "truecolor"}
    done = CliRunner().invoke(app, ["pipeline", "show", *sizes], env=colours, color=True)
    cells = re.findall(r"\x1b\[([\d;]+)m([FIWfiw])\d", done.stdout)
    assert len(set(cells)) == len({letter for _, letter in cells}) == 6
    assert len({colour for colour, _ in cells}) == 6


def test_later_stages_of_a_rank_are_lower_case() -> None:
    lines = shown("--schedule", "zb-v", "--ranks", "2", "--microbatches", "4")
    assert rows_of(lines)[1].startswith("rank 1     F0 f0 F1 f1 i0 w0")
    assert "lower case: not the rank's first stage" in lines


def test_a_narrow_terminal_has_letters() -> None:
    lines = shown(columns=60)
    assert rows_of(lines)[0] == "rank 0  FFFF      B-FB-FB-FB-FB- B- B- B-"
    assert "without the numbers of microbatches: 74 columns or --svg FILE show all" in lines
    assert "without" not in "".join(shown(columns=74))


def test_what_does_not_fit_is_cut_and_the_table_stays() -> None:
    lines = shown("--microbatches", "100", columns=60)
    rows = rows_of(lines)
    assert rows[0].startswith("rank 0  F0- F1- F2- F3- ")
    assert [(len(row), row[-1]) for row in rows] == [(60, ">")] * 4
    assert "cut at time 13 of 309: 935 columns or --svg FILE show all" in lines
    assert lines[-1].split() == ["3", "3", "1", "0", "2.9%"]


def test_of_many_ranks_the_ends_are_drawn_and_all_are_counted() -> None:
    lines = shown("--ranks", "1000", "--microbatches", "1000", "--bytes", "1MiB")
    drawn = [row.split()[1] for row in rows_of(lines)]
    assert drawn == ["0", "1", "2", "3", "996", "997", "998", "999"]
    assert "... 992 ranks ..." in lines
    least, most = (line.split() for line in lines[-2:])
    assert least[:5] == ["least", "1", "0", "1.0", "MiB"]
    assert most[:5] == ["most", "1,000", "0", "1000.0", "MiB"]


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1", "zb-v"])
def test_a_picture_has_a_rectangle_for_each_action(name: str, tmp_path: Path) -> None:
    out = tmp_path / "it.svg"
    assert f"written to {out}" in shown("--schedule", name, "--svg", out)
    schedule = pipelining.schedule(name, ranks=4, microbatches=8)
    picture = ET.parse(out).getroot()
    assert [one.findtext(f"{SVG}title") for one in picture.iter(f"{SVG}rect")] == [
        f"stage {span.action.stage}, {WORDS[span.action.kind]} of microbatch "
        f"{span.action.microbatch}, {span.begin:g} to {span.end:g}"
        for row in schedule.timeline().spans.values()
        for span in row
    ]
    assert list(tmp_path.iterdir()) == [out]


def test_a_picture_says_what_a_row_comes_to(tmp_path: Path) -> None:
    out = tmp_path / "it.svg"
    shown("--schedule", "zb-h1", "--bytes", "120MiB,40MiB", "--svg", out)
    texts = [one.text for one in ET.parse(out).getroot().iter(f"{SVG}text")]
    assert "bubble 11.1%, 4 in flight, 480.0 MiB" in texts
    assert "bubble 11.1%, 4 in flight (3 waiting for weights), 240.0 MiB" in texts


def test_a_name_with_markup_in_it_is_text(tmp_path: Path) -> None:
    schedule, out = tmp_path / "[red]<a&b>.csv", tmp_path / "it.svg"
    schedule.write_text("0F0,0B0\n")
    assert shown("--schedule", schedule, "--svg", out)[0].startswith("[red]<a&b>: 1 rank")
    title = ET.parse(out).getroot().findtext(f"{SVG}title")
    assert title == "[red]<a&b>: 1 rank, 1 microbatch, time 3"


def test_a_schedule_goes_to_a_file_and_comes_back(tmp_path: Path) -> None:
    out = tmp_path / "zb-v.csv"
    by_name = shown("--schedule", "zb-v", "--ranks", "2", "--microbatches", "5", "--csv", out)
    assert [*shown("--schedule", out), f"written to {out}"] == by_name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--schedule", "nope"], "there is no schedule 'nope': take one of gpipe, 1f1b"),
        (["--schedule", "gone.csv"], "cannot read gone.csv: No such file or directory"),
        (["--chunks", "2"], "schedule '1f1b' has 1 stage a rank, not 2"),
        (["--schedule", "dualpipev", "--microbatches", "2"], "needs as many microbatches as"),
        (["--ranks", "1000000"], "are too many to draw: at most 16,384 ranks"),
        (["--microbatches", "100000000"], "100,000,000 microbatches are too many to draw"),
        (["--bytes", "12x"], "'12x' is no number of bytes"),
        (["--bytes", "3,2,1"], "--bytes takes one size or two"),
        (["--bytes", "1,2"], "write the larger size first"),
        (["--bytes", "8000000TiB"], "is more than 2**63 bytes"),
        (["--forward", "0"], "--forward is a number from 0.000001 to 1000000, not 0"),
        (["--weight-backward", "nan"], "--weight-backward is a number from"),
        (["--message", "-1"], "--message is 0 or a number from"),
        (["--svg", "/nowhere/it.svg"], "cannot write /nowhere/it.svg: No such file"),
        (["--svg", "/"], "cannot write /: it is a folder"),
        (["--svg", "it", "--csv", "it"], "--svg and --csv are both it"),
        (["--microbatches", "30000", "--svg", "it"], "is more than viewers open"),
    ],
)
def test_what_cannot_be_drawn(arguments: list[str], said: str) -> None:
    done = show(*arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ("0F0,0B0\n1F0,1X0\n", [], "row 1, cell 1: '1X0' is no action"),
        ("0F0,3F0\n2F0,1F0\n", [], "the schedule is a deadlock: rank 0, cell 1 (3F0)"),
        ("", [], "there is no action in it"),
        ("\udcff", [], "it is no text"),
        ("0F0,0B0\n", ["--ranks", "2"], "has 1 ranks, not 2: leave --ranks out"),
        ("0F0,0B0\n", ["--chunks", "1"], "--chunks is for schedules by name"),
    ],
)
def test_a_file_that_cannot_be_drawn(
    text: str, arguments: list[str], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.csv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    done = show("--schedule", path, *arguments)
    assert done.exit_code == 2
    assert f"{path}" in done.stderr
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_the_file_that_is_read_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,,0B0\n")
    done = show("--schedule", path, "--csv", path)
    assert done.exit_code == 2
    assert "it is the schedule: give --csv another file" in done.stderr
    assert path.read_text() == "0F0,,0B0\n"
