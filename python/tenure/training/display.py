"""What a run shows: a bar in a terminal, about ten lines elsewhere; samples and checkpoints."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from tenure import _C
from tenure.inspect.verdicts import shown_path
from tenure.inspect.words import many, plain
from tenure.training.plan import Plan

__all__ = [
    "Display",
    "Terminal",
    "figures",
    "introduction",
    "memory_lines",
    "memory_text",
    "sample_text",
    "speed_text",
]

Report = Mapping[str, Any]
_MOST_LINES = 8


class Terminal(Console):
    """stdout. When nobody reads it any more, or it is full, the run goes on, with its log."""

    def __init__(self, lost: Callable[[str], None] | None = None) -> None:
        """As rich's own, without its colours for numbers and paths.

        Args:
            lost: Called with why stdout cannot be written to, unless its reader has left.
        """
        super().__init__(highlight=False)
        self._lost = lost

    def on_broken_pipe(self) -> None:
        """What rich calls then; its own ends the program."""
        self._leave()

    def _check_buffer(self) -> None:
        """Where rich writes: it looks for broken pipes alone."""
        try:
            super()._check_buffer()
        except OSError as error:
            self._leave()
            if self._lost is not None:
                self._lost(error.strerror or str(error))

    def _leave(self) -> None:
        """Nothing is shown any more, and what is still in buffers goes nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        self.quiet = True


class _Bar(Progress):
    """A bar, and below it a line a rank."""

    ranks: Sequence[Mapping[str, Any]] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        """What rich draws."""
        yield from super().get_renderables()
        if self.ranks:
            told = "\n".join(memory_lines(self.ranks))
            yield Text(told, no_wrap=True, overflow="ellipsis")


class Display:
    """Speaks for all ranks, on rank 0."""

    def __init__(self, plan: Plan, console: Console) -> None:
        """Shows nothing yet."""
        self._plan = plan
        self._console = console
        self._every = max(plan.steps // 10, 1)
        self._bar: _Bar | None = None

    def begin(self, parameters: int, begin_step: int) -> None:
        """Says what is trained, and starts the bar."""
        self.say(introduction(self._plan, parameters, begin_step))
        if not self._console.is_terminal:
            return
        columns = (
            "step",
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.description}"),
        )
        self._bar = _Bar(*columns, console=self._console)
        self._task = self._bar.add_task("", total=self._plan.steps, completed=begin_step)
        self._bar.start()

    def end(self) -> None:
        """Leaves the bar as it is."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, text: str) -> None:
        """A line or more of its own."""
        self._console.print(Text(plain(text)), soft_wrap=True)

    def stepped(self, report: Report) -> None:
        """A step has ended."""
        step, steps = report["step"], report["steps"]
        if self._bar is not None:
            self._bar.ranks = report["ranks"]
            self._bar.update(self._task, completed=step, description=speed_text(report))
        elif step == 1 or step % self._every == 0 or step == steps:
            self.say(f"step {step}/{steps}  {figures(report)}")

    def evaluated(self, step: int, loss: float) -> None:
        """An evaluation has ended."""
        self.say(f"step {step}: validation loss {loss:.3f}")

    def sampled(self, step: int, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """The model has written something."""
        told = sample_text(prompt, tokens, self._plan.bytes_as_tokens)
        self.say(f"step {step}: a sample\n" + "\n".join(f"  | {line}" for line in told.split("\n")))

    def saved(self, step: int, path: str) -> None:
        """A checkpoint is whole."""
        self.say(f"step {step}: checkpoint {shown_path(path)}")


def introduction(plan: Plan, parameters: int, begin_step: int) -> str:
    """What is trained, on what and how."""
    kind = f"{plan.model} {plan.size}" if not plan.size.endswith(".json") else "the model"
    stdlib = plan.data == sysconfig.get_path("stdlib")
    learns = "Python's standard library" if stdlib else shown_path(plan.data)
    lines = [f"{kind}, {parameters:,} parameters, learns {learns} on {_ranks_text(plan)}"]
    lines.append(
        f"{plan.steps} steps of {plan.rows * plan.dp} × {plan.length} tokens"
        f" in {many(plan.microbatches, 'microbatch').replace('batchs', 'batches')}"
        + (f", schedule {plan.schedule}" if plan.pp > 1 else "")
        + (f", each made to fit into {_C.bytes_text(plan.fit)}" if plan.fit else "")
        + (f", from step {begin_step} on" if begin_step else "")
    )
    if plan.resume and not begin_step:
        lines.append(f"there is no checkpoint yet in {shown_path(plan.out)}: from the beginning")
    return "\n".join(lines)


def _ranks_text(plan: Plan) -> str:
    if plan.ranks == 1:
        return plan.device
    parts = [f"pipeline of {plan.pp}"] if plan.pp > 1 else []
    parts += [f"{plan.dp} data ranks"] if plan.dp > 1 else []
    parts += ["sharded"] if plan.zero == 3 else []
    return f"{plan.ranks} ranks of {plan.device} ({', '.join(parts)})"


def figures(report: Report) -> str:
    """Loss, speed, and the rank that is nearest to its bound."""
    return f"{speed_text(report)}  {memory_text(report['ranks'])}"


def speed_text(report: Report) -> str:
    """Loss and speed."""
    speed = report["tokens"] / max(report["seconds"], 1e-9)
    return f"loss {report['loss']:.3f}  {speed:,.0f} tokens/s"


def memory_text(ranks: Sequence[Mapping[str, Any]]) -> str:
    """What the rank nearest to its bound has, and the bound; without one, the largest RSS."""
    nearest = max(ranks, key=_nearness)
    told = _activations_text(nearest)
    if not told:
        told = f"{_in_flight_text(nearest)}, RSS {_C.bytes_text(nearest['rss'])}"
    return f"{told} (rank {nearest['rank']})"


def memory_lines(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line a rank: what it has, and its bound; of many ranks, those that are nearest to it."""
    nearest = sorted(ranks, key=_nearness, reverse=True)[:_MOST_LINES]
    lines = []
    for rank in sorted(nearest, key=lambda one: one["rank"]):
        rss = f"RSS {_C.bytes_text(rank['rss'])}"
        parts = [_in_flight_text(rank), _activations_text(rank), rss]
        lines.append(f"  rank {rank['rank']}  " + "  ".join(filter(None, parts)))
    if left := len(ranks) - len(nearest):
        lines.append(f"  and {left:,} more, further from their bounds")
    return lines


def _nearness(rank: Mapping[str, Any]) -> tuple[float, int]:
    """To its bound; among ranks of which it is not known, the size."""
    is_known = rank["activations"] is not None and rank["activations_bound"]
    return rank["activations"] / rank["activations_bound"] if is_known else -1.0, rank["rss"]


def _activations_text(rank: Mapping[str, Any]) -> str:
    if rank["activations"] is None or not rank["activations_bound"]:
        return ""
    has, bound = (_C.bytes_text(rank[key]) for key in ("activations", "activations_bound"))
    return f"activations {has} of {bound}"


def _in_flight_text(rank: Mapping[str, Any]) -> str:
    return f"in flight {rank['in_flight']} of {rank['in_flight_bound']}"


def sample_text(prompt: Sequence[int], tokens: Sequence[int], bytes_as_tokens: bool) -> str:
    """Tokens as text where they are bytes, else as numbers."""
    if bytes_as_tokens:
        return _decoded(prompt) + _decoded(tokens)
    shown = " ".join(map(str, tokens))
    return f"{shown}\n(numbers of tokens: --data has no tokenizer beside it)"


def _decoded(tokens: Sequence[int]) -> str:
    """What is no byte, or no UTF-8, as �."""
    text = bytes(token if token < 256 else 0xFF for token in tokens)
    return text.decode("utf-8", errors="replace").replace("\t", "    ")
