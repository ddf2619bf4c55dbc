"""What a pipeline promises of its memory, and what it measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from tenure import _C

__all__ = ["Bound", "PipelineStats"]


@dataclass(frozen=True)
class Bound:
    """The most that one rank has in flight if it keeps to its schedule."""

    rank: int
    in_flight: int
    """Microbatches, counted for each of the rank's stages."""
    waiting: int
    """Of these, at that moment: those of which only the weights' gradients are missing."""
    bytes: int | None = None
    """What they take, once a strict step has shown what one takes."""
    microbatch_bytes: list[tuple[int, int]] = field(default_factory=list)
    """By stage: what one microbatch takes after its forward, and while its weights wait."""
    receives: int = 0
    """Messages asked for ahead, at most."""
    sends: int = 0
    """Messages under way to one peer in one direction, at most."""

    def __str__(self) -> str:
        """On one line."""
        size = f", {_C.bytes_text(self.bytes)}" if self.bytes is not None else ""
        wait = f" ({self.waiting} waiting for weights)" if self.waiting else ""
        return f"rank {self.rank}: at most {self.in_flight} microbatches in flight{wait}{size}"


@dataclass(frozen=True)
class PipelineStats:
    """What one rank measured; what is of a step is of the last one."""

    rank: int
    steps: int
    failed_steps: int
    in_flight: int
    waiting: int
    peak_bytes: int | None
    """Strict: the most between two actions above what there was at the begin, gradients apart."""
    highest_bytes: int | None
    """Strict: the same at any moment."""
    messages: int
    changed_messages: int
    """Messages whose shapes or dtypes were not those of the last one of their kind."""
    sent_bytes: int
    waited_seconds: float
    receive_buffer_bytes: int

    def __str__(self) -> str:
        """On one line."""
        peak = f", {_C.bytes_text(self.peak_bytes)}" if self.peak_bytes is not None else ""
        return (
            f"rank {self.rank}: {self.in_flight} microbatches in flight{peak}; "
            f"receive buffers {_C.bytes_text(self.receive_buffer_bytes)}; "
            f"waited {self.waited_seconds:.3f} s in {self.steps} steps"
        )
