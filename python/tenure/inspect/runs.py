"""Which recordings are of one run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Head", "by_run"]


@dataclass(frozen=True)
class Head:
    """What a recording says of its process, and when that began and was last seen."""

    path: Path
    meta: dict[str, str]
    began: float
    end: float


def by_run(heads: Iterable[Head]) -> list[list[Head]]:
    """Recordings by the run that they are of, the latest last.

    Those of one run say so, unless each was started by a `tenure run` of its own, as torchrun can
    do: but then they are different ranks of one job, and their times overlap. Where no `tenure run`
    started them, as with `tenure env`, their times alone tell, and the job if there is one.
    """
    runs: list[_Run] = []
    for head in sorted(heads, key=lambda head: head.began):
        same = [run for run in runs if run.has(head)]
        joined = same[0] if same else _Run()
        for other in same[1:]:
            joined.add(*other.heads)
        joined.add(head)
        runs = [run for run in runs if run not in same] + [joined]
    return [sorted(run.heads, key=lambda head: head.path) for run in runs]


class _Run:
    """Recordings of one run, as far as they are known."""

    def __init__(self) -> None:
        self.heads: list[Head] = []
        self._end = float("-inf")
        self._names: set[str] = set()
        self._ranks: dict[str, set[str]] = {}  # of each job

    def add(self, *heads: Head) -> None:
        for head in heads:
            self.heads.append(head)
            self._end = max(self._end, head.end)
            self._names.add(_name(head))
            self._ranks.setdefault(_job(head), set()).add(_rank(head))

    def has(self, head: Head) -> bool:
        """Whether this one, which began after all others, is of the same run."""
        name, job = _name(head), _job(head)
        if name and name in self._names:
            return True
        if head.began > self._end:
            return False
        if name and "" not in self._names:
            return bool(self._ranks.get(job, set()) - {_rank(head)})
        return not job or job in self._ranks or "" in self._ranks


def _name(head: Head) -> str:
    return head.meta.get("run") or ""


def _job(head: Head) -> str:
    return head.meta.get("job") or ""


def _rank(head: Head) -> str:
    return head.meta.get("rank") or ""
