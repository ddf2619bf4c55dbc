"""What a Fit says of itself: its plan by module and operator, its frontier, its leases."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tenure
from fitting import budget_at, deep, inside, probe


def after(steps: int, part: float = 0.4) -> tuple[tenure.Fit, list[tuple[str, str, int]]]:
    """And the leases between forward and backward of one more: name, site, bytes."""
    budget = budget_at(probe(deep()), part)
    job = deep()
    fit = tenure.Fit(job.model, budget=budget)
    for n in range(steps):
        job.model.zero_grad(set_to_none=True)
        inside(job, n, fit)
    job.model.zero_grad(set_to_none=True)
    with fit:
        loss = job.loss(0)
        rows = [(row.owner.name, row.owner.site, row.bytes) for row in tenure.leases()]
        loss.backward()
    return fit, rows


def test_before_the_first_step() -> None:
    assert "nothing is planned yet" in str(tenure.Fit(budget="1GiB"))


def test_the_plan_in_words() -> None:
    fit, _ = after(4)
    said = str(fit)
    assert re.search(r"Fit: 5 steps, the last one planned", said)
    assert re.search(r"peak .* measured, .* promised, of a budget of .*; the least is", said)
    assert re.search(r"made again: .*B\n", said)
    assert re.search(r"kept: .*B\n", said)
    assert re.search(r"B in +\d+  aten::\w+ +\*", said), "by operator and module"
    assert re.search(r"a step is slower by [\d.]+ ms", said)


def test_rows_are_of_modules_and_operators() -> None:
    fit, _ = after(2)
    made = {(row.op, row.module) for row in fit.plan.rows}
    assert {("aten::silu", "1"), ("aten::native_layer_norm", "2"), ("aten::gelu", "3")} <= made
    dropped = [row for row in fit.plan.rows if row.action == "recompute"]
    assert sum(row.bytes for row in dropped) == fit.stats().dropped_bytes
    assert all(row.seconds > 0 for row in dropped)


def test_what_is_measured_is_what_was_promised() -> None:
    fit, _ = after(4)
    assert fit.stats().peak == pytest.approx(fit.plan.promised, rel=0.02)


def test_a_frontier_goes_from_all_kept_down_to_the_least() -> None:
    frontier = probe(deep())
    peaks = [point.peak for point in frontier.points]
    assert peaks == sorted(peaks, reverse=True)
    seconds = [point.seconds for point in frontier.points]
    assert seconds == sorted(seconds)
    assert seconds[0] == frontier.points[0].recomputed == 0
    assert frontier.points[-1].recomputed > 0
    table = str(frontier).splitlines()
    assert table[0].split() == ["budget", "slower", "by", "kept", "moved", "made", "again"]
    assert len(table) == len(peaks) + 1


def test_a_frontier_is_saved_as_a_page(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = probe(deep()).save(tmp_path / "frontier.html")
    text = page.read_text()
    assert "what a budget costs" in text
    assert "<html" in text


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    with pytest.raises(tenure.InputError, match="cannot write"):
        probe(deep()).save(tmp_path / "nowhere" / "frontier.html")


def test_what_is_held_is_leased_under_its_operator_and_module() -> None:
    _, rows = after(4)
    names = {name for name, _, _ in rows}
    assert any(re.match(r".*aten::\w+ in \d+", name) for name in names), names
