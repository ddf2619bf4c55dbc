"""Loops that leak, watched in this process, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tenure
from tenure.inspect import verdicts

STEPS = 16
Body = Callable[[int], None]


def leak(body: Body) -> dict[str, Any]:
    """The first suspect of a loop with this body."""
    with tenure.watch(quiet=True) as session:
        for step in range(STEPS):
            body(step)
            tenure.step()
        verdict = session.verdict()
    assert verdict["verdict"] == "leak", verdict["ranks"]
    suspect: dict[str, Any] = verdict["suspects"][0]
    return suspect


def words(suspect: dict[str, Any]) -> str:
    """The path from the root."""
    return " → ".join(hop["text"] for hop in verdicts.path_from_root(suspect))


def line_with(file: str, text: str) -> str:
    """The first line of a file that begins with a text."""
    lines = Path(file).read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if line.strip().startswith(text))
    return f"{Path(file).name}:{number}"
