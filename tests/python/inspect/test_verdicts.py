"""Verdicts of many ranks as a person reads them."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

import tenure
from tenure.inspect import coordinates, verdicts


def rank_of(number: int, kind: str, **place: int) -> verdicts.Document:
    """One process's verdict: those that leak hold what they make in a list."""
    suspects = []
    if kind == "leak":
        suspects = [
            {"origin": 1, "bytes": 4_000_000, "per_step": 1e6, "confidence": 1.0, "count": 4}
            | {"since": 2}
        ]
    share = {"name": "held", "per_step": 1e6, "grows": kind == "leak"}
    judged = {
        "verdict": kind,
        "steps": 40,
        "since": 2,
        "per_step": 1e6 if kind == "leak" else 0.0,
        "confidence": 1.0,
        "seconds_per_step": 0.1,
        "total": share,
        "peak": share,
        "shares": [share],
        "suspects": suspects,
        "filling": [],
        "why": "",
    }
    origin = {"op": "aten::mm", "module": "Net", "phase": "forward", "site": "/a/train.py:41 main"}
    path = [
        {"kind": "local", "text": "kept (local of main)"},
        {"kind": "item", "text": f"[{number}]"},
    ]
    path[1]["leak"] = True  # type: ignore[assignment]
    held = {"paths": [path], "frees": 4_000_000, "advice": "do less"}
    process: dict[str, Any] = {"rank": number, "host": "a" if number < 4 else "b", "pid": number}
    process |= {"coordinates": place, "cost": 0.01}
    return verdicts.document(judged, {1: origin}, {1: held}, process)


def job(leaking: set[int]) -> list[verdicts.Document]:
    return [
        rank_of(n, "leak" if n in leaking else "flat", stage=n // 4, dp=n % 4) for n in range(8)
    ]


def test_ranks_that_share_a_suspect_are_one_line() -> None:
    screen = verdicts.first_screen(verdicts.merged(job({0, 1, 2, 3})))
    assert screen.count("made by aten::mm in Net at train.py:41 main") == 1
    assert "at train.py:41 main on ranks 0-3, all stage 0, host a" in screen
    assert "on ranks 0-3 of 8, all stage 0, host a; others flat" in screen
    assert "4.0 MB would have gone with it" in screen


def test_what_all_ranks_share_says_nothing() -> None:
    screen = verdicts.first_screen(verdicts.merged(job(set(range(8)))))
    assert "on ranks 0-7 of 8 ·" in screen


def test_one_rank() -> None:
    screen = verdicts.first_screen(verdicts.merged(job({6})))
    assert "on rank 6 of 8, stage 1, dp 2, host b; others flat" in screen


def counted(number: int, growth: int, **place: int) -> verdicts.Document:
    """The verdict of a process whose bytes were only counted."""
    out = rank_of(number, "growth" if growth else "flat", **place)
    told = {"level": "count", "bytes_per_step": growth, "split": {"held": growth}}
    return {**out, "ranks": [out["ranks"][0] | told]}


def test_counted_ranks_that_grow_as_a_traced_one_are_on_its_line() -> None:
    some = [rank_of(0, "leak", stage=0)]
    some += [counted(n, 1_100_000, stage=0) for n in (1, 2, 3)]
    some += [counted(n, 0, stage=1) for n in (4, 5, 6, 7)]
    verdict = verdicts.merged(some)
    screen = verdicts.first_screen(verdict)
    assert "at train.py:41 main on ranks 0-3, all stage 0, host a" in screen
    assert "seen on rank 0; the other 3 were only counted and grew as much" in screen
    assert "on ranks 0-3 of 8, all stage 0, host a; others flat · 7 ranks only counted" in screen
    assert verdict["counted"] == [{"ranks": [1, 2, 3], "bytes_per_step": 1_100_000, "like": 0}]


def test_a_counted_rank_that_grows_by_itself_has_a_line() -> None:
    some = [rank_of(0, "leak", stage=0), *(counted(n, 0, stage=n // 4) for n in range(1, 7))]
    screen = verdicts.first_screen(verdicts.merged([*some, counted(7, 3_100_000, stage=1)]))
    assert "+3.1 MB/step on rank 7, stage 1" in screen
    assert "only counted: run again with --ranks 7 to see who holds it" in screen


def test_another_rank_is_not_hidden_by_several_suspects_of_one() -> None:
    def holding(number: int, name: str, growth: int) -> dict[str, Any]:
        suspect: dict[str, Any] = rank_of(number, "leak")["suspects"][0]
        path = [{"kind": "local", "text": f"{name} (local of main)", "leak": True}]
        return {**suspect, "rank": number, "holders": [path], "bytes_per_step": growth}

    first, second = rank_of(0, "leak"), rank_of(1, "leak")
    first["suspects"] = [holding(0, name, 9_000_000) for name in ("a", "b", "c", "d")]
    second["suspects"] = [holding(1, "mine", 10_000)]
    screen = verdicts.first_screen(verdicts.merged([first, second]))
    assert "mine (local of main)" in screen
    assert screen.count("held by") == 3


def test_hosts_and_gpus_that_tell_something() -> None:
    some = [rank_of(n, "leak" if n % 2 else "flat", dp=n) for n in range(32)]
    for one in some:
        rank = one["ranks"][0]
        rank["host"], rank["gpu"] = f"node{rank['rank'] // 2:02}", str(rank["rank"] % 2)
    assert (
        "on ranks 1, 3, 5, 7, 9, 11, 13 … 31 (16 ranks) of 32, all GPU 1; others flat"
    ) in verdicts.first_screen(verdicts.merged(some))
    some = [rank_of(n, "leak" if n < 6 else "flat") for n in range(32)]
    for one in some:
        one["ranks"][0]["host"] = f"node{one['ranks'][0]['rank'] // 2:02}"
    assert "on ranks 0-5 of 32, on 3 hosts, node00 … node02" in verdicts.first_screen(
        verdicts.merged(some)
    )


def test_coordinates_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinates, "_given", {})
    tenure.coordinates(stage=2, dp=0)
    assert coordinates.found_coordinates() == {"stage": 2, "dp": 0}
    with pytest.raises(tenure.InputError, match="stage must be a whole number, not str"):
        tenure.coordinates(stage="last")  # type: ignore[arg-type]


def test_coordinates_of_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    def uninitialized() -> int:
        raise AssertionError("data parallel group is not initialized")

    # Megatron does not install here: the functions that it has, under their names.
    state: Any = types.ModuleType("megatron.core.parallel_state")
    state.get_pipeline_model_parallel_rank = lambda: 3
    state.get_tensor_model_parallel_rank = lambda: 1
    state.get_data_parallel_rank = uninitialized
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    monkeypatch.setattr(coordinates, "_given", {})
    assert coordinates.found_coordinates() == {"stage": 3, "tp": 1}
