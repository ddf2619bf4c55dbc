"""Schedules as data: what each rank does, in order, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tenure import _C
from tenure.errors import InputError
from tenure.pipelining.promises import Bound

__all__ = ["Action", "Schedule", "Span", "Timeline", "schedule", "schedule_names"]


@dataclass(frozen=True)
class Action:
    """One thing that a rank does: F, B, or the halves of B: I for inputs and W for weights."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        """As in a CSV file: ``2F0``."""
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Span:
    """An action, and when it runs."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When ranks do what."""

    spans: dict[int, list[Span]]
    """By rank."""
    bubbles: list[float]
    """By rank: the part of the time in which it has nothing to do."""
    length: float


class Schedule:
    """What each rank of a pipeline does, in order.

    Make one with :func:`schedule`.
    """

    def __init__(self, data: _C.Schedule) -> None:
        """Made by :func:`schedule`."""
        self.data = data

    @property
    def name(self) -> str:
        """What it is called."""
        return self.data.name

    @property
    def ranks(self) -> int:
        """How many ranks it is for."""
        return self.data.ranks

    @property
    def stages(self) -> int:
        """How many stages the model has."""
        return self.data.stages

    @property
    def microbatches(self) -> int:
        """How many microbatches a step has."""
        return self.data.microbatches

    @cached_property
    def rank_of_stage(self) -> list[int]:
        """By stage."""
        return self.data.rank_of_stage

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank has, in the order of the model."""
        return self.data.stages_of(rank)

    def actions(self, rank: int) -> list[Action]:
        """What a rank does, in order."""
        return [Action(*one) for one in self.data.actions(rank)]

    def bound(self, rank: int) -> Bound:
        """How many microbatches a rank has in flight, at most."""
        whole, waiting = self.data.in_flight(rank)
        return Bound(rank, whole + waiting, waiting)

    def peak_bytes(self, rank: int, bytes: list[tuple[int, int]]) -> int:  # noqa: A002
        """The most bytes in flight on a rank.

        Args:
            rank: Of the pipeline.
            bytes: For each of the rank's stages what one microbatch takes after its forward, and
                what of that is left while its weights wait.
        """
        if len(bytes) != len(self.stages_of(rank)):
            raise InputError(
                f"rank {rank} has {len(self.stages_of(rank))} stages, not {len(bytes)}"
            )
        return self.data.peak_bytes(rank, bytes)

    def timeline(
        self,
        forward: float = 1,
        input_backward: float = 1,
        weight_backward: float = 1,
        message: float = 0,
        ranks: Sequence[int] | None = None,
    ) -> Timeline:
        """When each action runs, if each takes as long as said and nobody waits but for others.

        Args:
            forward: What a forward takes, in any unit.
            input_backward: What the first half of a backward takes.
            weight_backward: What the second half takes.
            message: What it takes until another rank has a tensor.
            ranks: Of which ranks the spans are wanted; by default of all.
        """
        wanted = list(range(self.ranks)) if ranks is None else list(ranks)
        costs = forward, input_backward, weight_backward, message
        spans, bubbles, length = self.data.timeline(*costs, wanted)
        rows = {
            rank: [Span(one, *times) for one, times in zip(self.actions(rank), row, strict=True)]
            for rank, row in zip(wanted, spans, strict=True)
        }
        return Timeline(rows, bubbles, length)

    def csv(self) -> str:
        """As :mod:`torch.distributed.pipelining` reads it: a row a rank, a cell an action."""
        return self.data.csv()


def schedule_names() -> list[str]:
    """The schedules that :func:`schedule` knows by name."""
    return _C.schedule_names()


def schedule(
    name: str | Path, ranks: int, microbatches: int, chunks: int | None = None
) -> Schedule:
    """A schedule by its name, or from a CSV file of one.

    Args:
        name: One of :func:`schedule_names`, a name that :mod:`torch.distributed.pipelining` has for
            one, or the path of a CSV file, which must end in ``.csv``.
        ranks: How many ranks the pipeline has.
        microbatches: How many microbatches a step has.
        chunks: How many stages each rank has; by default what is usual for the schedule.

    Raises:
        InputError: There is no such schedule, it cannot have these sizes, or the file has a
            schedule that cannot run; the text names the cell.

    Example:
        >>> from tenure import pipelining
        >>> print(pipelining.schedule("1f1b", ranks=2, microbatches=3).csv(), end="")
        0F0,0F1,0B0,0F2,0B1,0B2
        1F0,1B0,1F1,1B1,1F2,1B2
    """
    for what, size in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if size is None and what == "chunks":
            continue
        if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < 1 << 20:
            raise InputError(f"{what} is a whole number from 1 on, not {size!r}")
    if not str(name).lower().endswith(".csv"):
        return Schedule(_C.make_schedule(str(name), ranks, microbatches, chunks or 0))
    path = Path(name)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise InputError(f"the schedule {path} cannot be read: {why}") from None
    try:
        found = Schedule(_C.schedule_from_csv(text, path.stem))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if (found.ranks, found.microbatches) != (ranks, microbatches):
        raise InputError(
            f"{path} is a schedule of {found.ranks} ranks and {found.microbatches} microbatches, "
            f"not of {ranks} and {microbatches}"
        )
    if chunks is not None and found.stages != ranks * chunks:
        raise InputError(
            f"{path} is a schedule of {found.stages} stages, not of {chunks} on each rank"
        )
    return found
