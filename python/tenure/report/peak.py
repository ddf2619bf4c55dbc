"""What was alive when a process held the most."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tenure.report.lives import Life, in_order

__all__ = ["Peak", "module_of", "peak_of", "tree_of"]

_MOST_NODES = 400


@dataclass(frozen=True)
class Peak:
    """The moment of the most bytes.

    Attributes:
        step: The step that it lies in.
        nbytes: Bytes alive then, as they were counted.
        lives: Whose they were, so far as they are in the recording.
        unknown: Bytes of others.
    """

    step: int
    nbytes: int
    lives: list[Life]
    unknown: int


def peak_of(lives: Iterable[Life], step: int, before: int, counted: int) -> Peak:
    """What was alive at the highest moment of a step.

    Of storages whose lives were thinned from the recording, or lost, only their bytes are known.

    Args:
        lives: All of the process.
        step: The step.
        before: The one that was recorded before it: what was made between counts as made in it.
        counted: The most bytes in it, which were counted as they came and went.
    """
    there = [life for life in lives if life.born_step <= step]
    alive = max(_at_the_end_of(before, there), _at_a_birth_after(before, there), key=_bytes_of)
    most = _bytes_of(alive)
    return Peak(step, max(most, counted), alive, max(0, counted - most))


def _at_the_end_of(step: int, lives: Iterable[Life]) -> list[Life]:
    """What a step left: the peak of the next, if that makes nothing."""
    return [
        life
        for life in lives
        if life.born_step <= step and (life.died_step is None or life.died_step > step)
    ]


def _at_a_birth_after(step: int, lives: Iterable[Life]) -> list[Life]:
    """What was alive at the highest moment at which something was made after a step."""
    now = most = at = 0
    events = in_order(lives)
    for number, (_, born, life) in enumerate(events, 1):
        now += life.nbytes if born else -life.nbytes
        if now > most and life.born_step > step:
            most, at = now, number
    alive: dict[int, Life] = {}
    for _, born, life in events[:at]:
        if born:
            alive[life.number] = life
        else:
            del alive[life.number]
    return list(alive.values())


def _bytes_of(lives: Iterable[Life]) -> int:
    return sum(life.nbytes for life in lives)


def tree_of(peak: Peak) -> list[tuple[str, str, int, int]]:
    """Bytes by kind and module, the most first: kind, module, bytes, count.

    What a parameter's module is follows from its name; what no module made has an empty one.
    """
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    if peak.unknown:
        sums["other", "not recorded"] = (peak.unknown, 0)
    for life in peak.lives:
        key = (life.kind, module_of(life))
        nbytes, count = sums.get(key, (0, 0))
        sums[key] = (nbytes + life.nbytes, count + 1)
    rows = sorted(((*key, *value) for key, value in sums.items()), key=lambda row: -row[2])
    rest: dict[str, tuple[int, int]] = {}
    for kind, _, nbytes, count in rows[_MOST_NODES:]:
        before = rest.get(kind, (0, 0))
        rest[kind] = (before[0] + nbytes, before[1] + count)
    return rows[:_MOST_NODES] + [(kind, "smaller ones", *value) for kind, value in rest.items()]


def module_of(life: Life) -> str:
    """``Net.head`` for ``Net.head.weight``, its ``.grad`` and an optimizer's ``.exp_avg`` of it."""
    belongs = life.kind == "optimizer" or life.name.endswith(".grad")
    parameter = life.name.rpartition(".")[0] if belongs else life.name
    return parameter.rpartition(".")[0] or life.origin["module"]
