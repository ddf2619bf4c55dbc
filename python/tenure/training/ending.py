"""The end of a run: each rank's memory against its bound, the verdict, and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tenure import _C
from tenure.errors import TenureError
from tenure.inspect import recordings, verdicts
from tenure.inspect.verdicts import shown_path
from tenure.inspect.words import many, plain
from tenure.report import html
from tenure.training.folder import Folder
from tenure.training.metrics import Log
from tenure.training.plan import Plan

__all__ = ["History", "memory_table", "show"]

_FLATNESS = {"flat": "flat", "leak": "LEAK", "growth": "GROWS", "too-short": "too short to say"}


@dataclass
class History:
    """What of a run is told again at its end."""

    steps: int = 0
    first_loss: float = 0.0
    loss: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    last_step: int = 0
    ranks: list[dict[str, Any]] = field(default_factory=list)  # the most of each figure
    validation: float | None = None
    checkpoint: str = ""

    def stepped(self, report: Mapping[str, Any]) -> None:
        """A step has ended."""
        self.first_loss = self.first_loss if self.steps else report["loss"]
        self.loss = report["loss"]
        self.steps += 1
        self.tokens += report["tokens"]
        self.seconds += report["seconds"]
        self.last_step = report["step"]
        before = self.ranks or [{}] * len(report["ranks"])
        self.ranks = list(map(_most, before, report["ranks"]))

    def text(self) -> str:
        """Loss and speed in a line."""
        if not self.steps:
            return "no step was done"
        speed = self.tokens / max(self.seconds, 1e-9)
        validation = f", {self.validation:.3f} in validation" if self.validation is not None else ""
        return (
            f"loss {self.first_loss:.3f} -> {self.loss:.3f}{validation}, "
            f"{many(self.steps, 'step')}, {speed:,.0f} tokens/s"
        )


def _most(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Of each figure the larger; one that is not known is less than any."""
    out = dict(now)
    for key, value in before.items():
        if isinstance(value, int) and (out[key] is None or value > out[key]):
            out[key] = value
    return out


def show(console: Console, plan: Plan, folder: Folder, history: History) -> None:
    """Prints and logs it all, and writes the page. On rank 0, when all recordings are complete."""
    verdict, missing = _verdict(folder) if plan.observe else (None, "not watched")
    lines = [history.text()]
    if history.last_step < plan.steps:
        lines.append(f"stopped after step {history.last_step}")
    if verdict is not None:
        lines.append(verdicts.first_screen(verdict))
        lines += _page(folder)
    elif plan.observe:
        lines.append(f"there is no verdict: {missing}")
    if history.checkpoint:
        lines.append(f"weights   {shown_path(history.checkpoint)}, which Hugging Face loads")
    lines.append(f"metrics   {shown_path(folder.metrics)}, log {shown_path(folder.log)}")
    table = memory_table(history.ranks, verdict, plan.fit)
    told = _as_text(table)
    log = Log(folder.log)
    log(told)
    if console.is_terminal:
        console.print(table)
    else:
        console.print(Text(told), soft_wrap=True)
    for line in lines:
        log(line)
        console.print(Text(plain(line)), soft_wrap=True)


def memory_table(
    ranks: Sequence[Mapping[str, Any]], verdict: verdicts.Document | None, fit: int = 0
) -> Table:
    """A row a rank: what it held at most, what it was bound to, and whether it stayed flat.

    With `fit`, the budget, also what it held at most in steps that had a plan.
    """
    flat = {one["rank"]: _FLATNESS[one["verdict"]] for one in verdict["ranks"]} if verdict else {}
    table = Table(title="memory, at most of any step")
    table.add_column("rank", justify="right")
    table.add_column("has")
    fitted = ["planned / --fit"] if fit else []
    for name in ["in flight / bound", "activations / bound", *fitted, "allocated", "RSS"]:
        table.add_column(name, justify="right")
    table.add_column("over steps")
    for rank in ranks:
        table.add_row(
            str(rank["rank"]),
            rank["stages"],
            f"{rank['in_flight']} / {rank['in_flight_bound']}",
            f"{_bytes(rank['activations'])} / {_bytes(rank['activations_bound'])}",
            *([f"{_bytes(rank['fitted'])} / {_bytes(fit)}"] if fit else []),
            _bytes(rank["peak"] or None),
            _bytes(rank["rss"]),
            flat.get(rank["rank"], "not watched"),
        )
    return table


def _bytes(size: int | None) -> str:
    return _C.bytes_text(size) if size is not None else "–"


def _as_text(table: Table) -> str:
    plain_console = Console(width=140, no_color=True, force_terminal=False)
    with plain_console.capture() as captured:
        table.box, box = None, table.box
        plain_console.print(table)
    table.box = box
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _verdict(folder: Folder) -> tuple[verdicts.Document | None, str]:
    try:
        return recordings.judge([folder.recordings]), ""
    except TenureError as error:
        return None, str(error)


def _page(folder: Folder) -> list[str]:
    try:
        made = html.report([folder.recordings], folder.report, name=shown_path(folder.path))
    except TenureError as error:
        return [f"there is no report: {error}"]
    return [f"report    {shown_path(made)} ({made.stat().st_size / 1e6:.1f} MB)"]
