"""Fit: each saved activation is kept, moved to the host or made again, whatever is cheapest."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle

from tenure import _C
from tenure._C import FitPlan, OffloadStats
from tenure._inputs import need_size
from tenure.errors import InputError
from tenure.offload import Entered

__all__ = ["Fit", "FitPlan", "Frontier", "FrontierPoint"]

Streams = Literal[0, 1, 2]
_WORDS = {"recompute": "made again", "offload": "moved to the host", "keep": "kept"}
_MOST_ROWS = 12


class Fit(Entered):
    """Makes a step fit into a budget, in the least time.

    Enter it around forward and backward, every step; make it once, for any eager model. The first
    step is profiled: which operator made what autograd saves, of what, how long it took, and
    whether it gives the same bits again. From that it plans: cheap things are dropped and made
    again in backward, what the bus can carry beside the computation rests on the host, the rest
    stays. The second step follows the plan and compares all that it makes again with what it was;
    what differs is kept from then on. On a GPU it also tells how long operators take where they
    stand, from which the plan is made once more, for the third step to prove.

    Gradients are those of plain PyTorch, bit for bit where the same kernels run. Never made again
    are random operators, those that do more than make their outputs, what is written to in place,
    and what did not prove the same.

    Args:
        models: Whose parameters and buffers stay where they are, and whose modules the plan names.
        budget: The most that the device may have allocated at once between enter and exit, by
            everything in the process: ``"6GiB"`` or a number of bytes. On the CPU, the tensors that
            were made since this object was.
        host_limit: The most host memory to take.
        streams: How many streams copies have for themselves: 2, one each way; 1; or 0.
        move: Whether anything may be moved to the host; on the CPU nothing is.
        audit: The part of what is made again that is compared with what it was, every step: finds
            writes that PyTorch does not see.

    Raises:
        BudgetError: On leaving a profiled step that shows that the budget cannot be met; it says
            what the least is.
        MutationError: In backward, when an audit finds that something was made of other bits.
        InputError: For arguments that mean nothing, and when one is entered inside another.

    Example:
        >>> import tenure, torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Tanh())
        >>> fit = tenure.Fit(net, budget="300kB")
        >>> for _ in range(3):
        ...     with fit:
        ...         net(torch.ones(256, 64)).sum().backward()
        >>> fit.stats().dropped_bytes > 0
        True
    """

    def __init__(
        self,
        *models: nn.Module,
        budget: int | str,
        host_limit: int | str | None = None,
        streams: Streams = 2,
        move: bool = True,
        audit: float = 0.001,
    ) -> None:
        """Makes one; nothing happens before it is entered."""
        if isinstance(streams, float | bool) or streams not in (0, 1, 2):
            raise InputError(f"streams is 0, 1 or 2, not {streams!r}")
        if isinstance(audit, bool) or not isinstance(audit, int | float) or not 0 <= audit <= 1:
            raise InputError(f"audit is a part from 0 to 1, not {audit!r}")
        on_device = torch.accelerator.is_available()
        session = _C.OffloadSession(
            target="host" if on_device else "copy",
            folder="",
            budget=need_size(budget, "budget"),
            host_limit=None if host_limit is None else need_size(host_limit, "host_limit"),
            raise_when_full=False,
            streams=streams,
            min_bytes=None,
            recompute=True,
            moves=move and on_device,
            audit=float(audit),
        )
        super().__init__(models, session)
        self._naming: _Naming | None = None
        self._warned: set[str] = set()

    def __enter__(self) -> Self:
        """Begins a step."""
        super().__enter__()
        if self._session.measuring:
            self._naming = _Naming(self._models)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Ends it; one that an exception ended teaches nothing."""
        if self._naming is not None:
            self._naming.end()
        self._naming = None
        super().__exit__(kind, error, trace)
        if error is None:
            stats = self.stats()
            self._say_diverged(stats.diverged)
            self._say_risen(stats)

    @property
    def plan(self) -> FitPlan:
        """What is done with what, by module and operator; no rows before the first whole step."""
        return self._session.fitted()

    def frontier(self, points: int = 12) -> Frontier:
        """What other budgets would cost: of the step that was profiled last.

        Raises:
            InputError: Where there is no plan: before a whole step, forward and backward, has run,
                for a model that saves nothing, and below the least budget; and for no points.
        """
        if isinstance(points, bool) or not isinstance(points, int) or points < 1:
            raise InputError(f"a frontier has one point or more, not {points!r}")
        found = self._session.frontier(points)
        if not found:
            raise InputError(f"there is no frontier: {_no_plan(self.stats(), self.plan)}")
        return Frontier(
            [FrontierPoint(p.peak, p.seconds, p.kept, p.moved, p.recomputed) for p in found]
        )

    def __str__(self) -> str:
        """What is kept, moved and made again, and what was promised and measured."""
        return "\n".join(_lines(self.stats(), self.plan))

    def _say_diverged(self, why: str) -> None:
        kind = re.sub(r"\d+", "#", why)
        if why and kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(
                f"this step did not follow its plan ({why}): nothing more of it was dropped. "
                "Steps like it are profiled when they come again.",
                stacklevel=3,
            )

    def _say_risen(self, stats: OffloadStats) -> None:
        if stats.risen > 0 and "risen" not in self._warned:
            self._warned.add("risen")
            warnings.warn(
                f"what is allocated when a step begins grows from step to step, by "
                f"{_size(stats.risen)} since the step that was profiled: of the budget of "
                f"{_size(stats.budget)} ever less is left for activations. If nothing is meant to "
                "grow, `tenure run` on the program names who keeps what (a list of losses, say).",
                stacklevel=3,
            )


@dataclass(frozen=True)
class FrontierPoint:
    """The least peak for the time it costs: no other is both lower and quicker."""

    peak: int
    seconds: float  # beyond a step that keeps everything
    kept: int  # bytes
    moved: int
    recomputed: int


@dataclass(frozen=True)
class Frontier:
    """Budgets and what they cost. ``print`` it, or ``save`` it as a page with a plot."""

    points: list[FrontierPoint]

    def __str__(self) -> str:
        """A table with a bar for the time."""
        longest = max(point.seconds for point in self.points) or 1.0
        names = ("budget", "slower by", "kept", "moved", "made again")
        lines = ["{:>10}  {:>10}  {:>10} {:>10} {:>10}".format(*names)]
        for point in self.points:
            bar = "█" * round(24 * point.seconds / longest)
            lines.append(
                f"{_size(point.peak):>10}  {point.seconds * 1e3:>7.1f} ms  {_size(point.kept):>10}"
                f" {_size(point.moved):>10} {_size(point.recomputed):>10}  {bar}"
            )
        return "\n".join(lines)

    def save(self, path: str | Path) -> Path:
        """Writes a page of its own with the plot, and returns its path."""
        try:
            from plotly import graph_objects
        except ImportError:
            raise InputError("a plot needs plotly: pip install 'plotly>=6'") from None
        figure = graph_objects.Figure(
            graph_objects.Scatter(
                x=[point.peak / 2**30 for point in self.points],
                y=[point.seconds * 1e3 for point in self.points],
                mode="lines+markers",
            )
        )
        figure.update_layout(
            title="Tenure: what a budget costs",
            xaxis_title="peak, GiB",
            yaxis_title="a step is slower by, ms",
        )
        try:
            figure.write_html(str(path), include_plotlyjs=True)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from None
        return Path(path)


class _Naming:
    """While it lasts, what runs on this thread is in the name of the innermost module."""

    def __init__(self, models: tuple[nn.Module, ...]) -> None:
        names = {
            module: name or type(module).__name__
            for model in models
            for name, module in model.named_modules()
        }
        self._outer: list[str] = []

        def enter(module: nn.Module, _args: object) -> None:
            if not torch.compiler.is_compiling() and module in names:
                self._outer.append(_C.enter_module(names[module]))

        def leave(module: nn.Module, _args: object, _result: object) -> None:
            if not torch.compiler.is_compiling() and module in names and self._outer:
                _C.enter_module(self._outer.pop())

        after: Callable[..., RemovableHandle] = modules.register_module_forward_hook
        before = modules.register_module_forward_pre_hook(enter)
        self._hooks = [before, after(leave, always_call=True)]

    def end(self) -> None:
        """Also of modules that Ctrl-C ended, of which no hook hears."""
        for hook in self._hooks:
            hook.remove()
        if self._outer:
            _C.enter_module(self._outer[0])
        self._outer.clear()


def _lines(stats: OffloadStats, plan: FitPlan) -> list[str]:
    lines = [f"Fit: {stats.steps} steps, the last one {stats.mode}"]
    if not plan.rows:
        return [*lines, f"  {_no_plan(stats, plan)}"]
    lines.append(
        f"  peak {_size(stats.peak)} measured, {_size(plan.promised)} promised, of a budget of "
        f"{_size(stats.budget)}; the least is {_size(plan.least)}"
    )
    lines.append(
        f"  a step is slower by {(plan.recompute_seconds + plan.exposed_seconds) * 1e3:.1f} ms: "
        f"{plan.recompute_seconds * 1e3:.1f} to make things again, "
        f"{plan.exposed_seconds * 1e3:.1f} waiting for copies"
    )
    for action, words in _WORDS.items():
        lines.extend(_rows(plan, action, words))
    lines.extend(f"  held because it did not prove the same: {name}" for name in plan.denied)
    if stats.diverged:
        lines.append(f"  the last step did not follow its plan: {stats.diverged}")
    return lines


def _no_plan(stats: OffloadStats, plan: FitPlan) -> str:
    """Why there is none, and what to do."""
    if plan.saves_nothing:
        return "nothing is planned: autograd saved nothing in the last step that could go"
    if plan.least > 0:
        return (
            f"no plan meets the budget of {_size(stats.budget)}, the least is {_size(plan.least)}: "
            'for what budgets cost, run one step with budget="1TiB"'
        )
    return "nothing is planned yet: run forward and backward inside it once"


def _rows(plan: FitPlan, action: str, words: str) -> list[str]:
    """Layers that are alike on one line."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in plan.rows:
        if row.action == action:
            name = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", row.module)
            total = found.setdefault((name, row.op), [0, 0, 0])
            for i, value in enumerate((row.count, row.bytes, row.seconds)):
                total[i] += value
    if not found:
        return []
    everything = sum(total[1] for total in found.values())
    lines = [f"  {words}: {_size(everything)}"]
    ordered = sorted(found.items(), key=lambda item: -item[1][1])
    for (name, op), (count, size, seconds) in ordered[:_MOST_ROWS]:
        cost = f"{seconds * 1e3:>8.2f} ms" if action == "recompute" else ""
        what = op or "not seen being made"
        line = f"    {_size(size):>10} in {count:>4.0f}  {what:<28} {name:<32}{cost}"
        lines.append(line.rstrip())
    if len(ordered) > _MOST_ROWS:
        rest = sum(total[1] for _, total in ordered[_MOST_ROWS:])
        lines.append(f"    {_size(rest):>10} in {len(ordered) - _MOST_ROWS} more kinds")
    return lines


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
