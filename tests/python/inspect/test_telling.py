"""What is said while a program runs: of growth that lasts, or when memory will not."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tenure
from tenure.inspect import session, verdicts
from tenure.inspect.telling import is_at_stake, is_long

Body = Callable[[int], None]


def said_meanwhile(
    body: Body, steps: int, capsys: pytest.CaptureFixture[str]
) -> tuple[str, verdicts.Document]:
    """What stderr says until the last step has ended, and the verdict then."""
    capsys.readouterr()
    with tenure.watch() as watching:
        for step in range(steps):
            body(step)
            tenure.step()
        said = capsys.readouterr().err
        return said, watching.verdict()


def replay_buffer() -> Body:
    kept: list[torch.Tensor] = []

    def body(_: int) -> None:
        kept.append(torch.randn(50_000))
        if len(kept) > 50:
            kept.pop(0)

    return body


def capped_cache() -> Body:
    kept: collections.OrderedDict[int, torch.Tensor] = collections.OrderedDict()

    def body(step: int) -> None:
        kept[step] = torch.randn(50_000)
        if len(kept) > 40:
            kept.popitem(last=False)

    return body


def outputs_of_an_epoch() -> Body:
    kept: list[torch.Tensor] = []

    def body(step: int) -> None:
        if step % 45 == 0:
            kept.clear()
        kept.append(torch.randn(50_000))

    return body


def leak() -> Body:
    kept: list[torch.Tensor] = []
    return lambda _: kept.append(torch.randn(5000))


@pytest.mark.parametrize(
    ("made", "steps"), [(replay_buffer, 150), (capped_cache, 150), (outputs_of_an_epoch, 135)]
)
def test_what_fills_and_is_emptied_again_is_not_spoken_of(
    made: Callable[[], Body], steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    said, verdict = said_meanwhile(made(), steps, capsys)
    assert said == ""
    assert verdict["verdict"] == "flat"


def test_a_leak_that_lasts_is_told_of_while_the_program_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said, _ = said_meanwhile(leak(), 130, capsys)
    assert said.count("LEAK") == 1
    assert "kept" in said


def test_a_leak_is_told_of_at_once_where_memory_is_at_stake(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_bytes_left", lambda: 500_000)
    said, _ = said_meanwhile(leak(), 20, capsys)
    assert "LEAK" in said
    assert "kept" in said


def test_what_was_said_is_taken_back_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[torch.Tensor] = []
    with tenure.watch(quiet=False):
        for step in range(140):
            kept.append(torch.randn(5000))
            if step == 138:
                kept.clear()  # too late for a look before the end
            tenure.step()
    said = capsys.readouterr().err
    assert said.count("LEAK") == 1
    assert said.index("LEAK") < said.index("the leak reported earlier is not seen any more")
    assert "FLAT over 140 steps" in said


def test_who_holds_it_is_recorded_before_anything_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    body = leak()
    with tenure.watch(tmp_path, quiet=False) as watching:
        for step in range(30):
            body(step)
            tenure.step()
        assert capsys.readouterr().err == ""
        assert "kept" in str(watching._inquiry.holdings)


def test_storages_on_a_device_may_grow_until_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    gauge = {name: SimpleNamespace(current=at) for name, at in (("reserved", 70), ("active", 50))}
    driver, allocator = SimpleNamespace(free=10), SimpleNamespace(**gauge)
    device = SimpleNamespace(device=torch.device("cuda:0"), driver=driver, allocator=allocator)
    monkeypatch.setattr(session._C, "sample", lambda: SimpleNamespace(devices=[device]))
    monkeypatch.setattr(session, "_bytes_left", lambda: 5)
    places = {1: "cuda:0", 2: "cpu", 3: "cuda:1"}
    monkeypatch.setattr(session, "_origin", lambda number: {"device": places[number]})

    def left(*origins: int) -> int | None:
        return session._bytes_left_for({"suspects": [{"origin": one} for one in origins]})

    assert (left(1), left(2), left(1, 2), left(3), left()) == (30, 5, 5, None, 5)


def judged(since: int, per_step: float, os: float = 0.0) -> dict[str, object]:
    total = {"per_step": os, "grows": os > 0}
    return {"since": since, "per_step": per_step, "total": total}


def test_growth_is_long_from_when_it_began() -> None:
    assert not is_long(judged(1000, 1e6), 1099)
    assert is_long(judged(1000, 1e6), 1100)


def test_memory_is_at_stake_after_a_quarter_of_the_way() -> None:
    assert is_at_stake(judged(1000, 1e9), 1025, 75 * 10**9)
    assert not is_at_stake(judged(1000, 1e9), 1024, 76 * 10**9)
    assert is_at_stake(judged(1000, 1e6, os=1e9), 1025, 75 * 10**9)
    assert is_at_stake(judged(1000, 1e6), 1010, 0)
    assert not is_at_stake(judged(1000, 1e9), 1025, None)
