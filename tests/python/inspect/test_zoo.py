"""Every program of the zoo, by name: bugs are explained, twins and healthy programs are flat."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from watched import ZOO, Batch, Marks, Nursery, Run

BUGS = sorted(path.stem for path in ZOO.glob("*.py"))
HEALTHY = sorted(path.stem for path in (ZOO / "healthy").glob("*.py"))
GROWTH = {
    "malloc_leak": "other host heap",
    "numpy_leak": "other host heap",
    "kept_records": "other host heap",
    "dataloader_child": "child processes",
    "fragmentation": "allocator",
    "longer_sequences": "peak",
}


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Batch]:
    """What is about the memory of a process that starts as any other."""
    found = Batch(tmp_path_factory.mktemp("zoo"))
    for name in sorted(GROWTH):
        found.start(str(ZOO / "growth" / f"{name}.py"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def bugs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    nursery = Nursery(tmp_path_factory.mktemp("bugs"))
    for name in BUGS:
        nursery.add(ZOO / f"{name}.py", in_haste=False)
    return dict(zip(BUGS, nursery.run(), strict=True))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The twins and the healthy programs."""
    nursery = Nursery(tmp_path_factory.mktemp("sound"))
    for name in BUGS:
        nursery.add(ZOO / f"{name}.py", "--fixed")
    for name in HEALTHY:
        nursery.add(ZOO / "healthy" / f"{name}.py")
    return dict(zip([*BUGS, *HEALTHY], nursery.run(), strict=True))


def test_the_zoo_is_not_empty() -> None:
    assert len(BUGS) >= 18
    assert {"finetune", "gan", "replay"} <= set(HEALTHY)
    assert {path.stem for path in (ZOO / "growth").glob("*.py")} == set(GROWTH)


@pytest.mark.parametrize("name", BUGS)
def test_the_bug_is_explained(bugs: dict[str, Run], name: str) -> None:
    run, marks = bugs[name], Marks.of(ZOO / f"{name}.py")
    assert run.code == 0, run.err
    assert run.verdict["verdict"] == "leak", run.err
    suspect = run.first
    way = suspect["holders"][0]
    words = " → ".join(hop["text"] for hop in way)
    assert any(f"{line} " in f"{suspect['site']} " for line in marks.born), suspect["site"]
    assert marks.holder in words
    assert any(re.search(rf"{line}\b", words) for line in marks.kept), words
    assert any(hop.get("leak") for hop in way), words
    assert suspect["cycle"] == marks.cycle, words
    assert "LEAK" in run.err


@pytest.mark.parametrize("name", BUGS)
def test_the_twin_is_flat(sound: dict[str, Run], name: str) -> None:
    run = sound[name]
    assert run.code == 0, run.err
    assert run.verdict["verdict"] == "flat", run.err
    assert "LEAK" not in run.err


@pytest.mark.parametrize("name", HEALTHY)
def test_the_healthy_program_is_flat(sound: dict[str, Run], name: str) -> None:
    run = sound[name]
    assert run.code == 0, run.err
    assert run.verdict["verdict"] == "flat", run.err
    assert "LEAK" not in run.err


@pytest.mark.parametrize("name", sorted(GROWTH))
def test_growth_that_no_storage_explains(batch: Batch, name: str) -> None:
    run = batch.result(str(ZOO / "growth" / f"{name}.py"))
    assert run.code == 0, run.err
    assert run.verdict["verdict"] == "growth", run.err
    rank = run.verdict["ranks"][0]
    place = GROWTH[name]
    if place == "peak":
        assert rank["peak"] > 0
        assert "larger inputs" in rank["why"]
    else:
        split = {part: size for part, size in rank["split"].items() if part != "unexplained"}
        assert max(split, key=lambda part: split[part]) == place, rank["split"]


def test_each_bug_has_marks() -> None:
    for name in BUGS:
        marks = Marks.of(Path(ZOO / f"{name}.py"))
        assert marks.born
        assert marks.kept
