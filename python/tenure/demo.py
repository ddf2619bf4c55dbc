"""What `tenure demo` runs: a small real training loop whose storages are leased.

A byte-level GPT learns the sources of Python's own standard library, which every machine has. The
weights and their moving average are leased for the whole run; each step's batch and activations in
a `step` scope that raises if one of them outlives it.
"""

from __future__ import annotations

import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch.nn import functional

from tenure import _C
from tenure._demo_model import TinyGPT
from tenure.leases import Totals, hold, ledger
from tenure.samples import sample
from tenure.scopes import scope

BATCH = 16
CONTEXT = 64

_TOLERANCE = 0.01
"""Growth of the highest RSS that is not a leak: malloc keeps and returns pages as it likes."""
_ENOUGH = 20
"""Steps below which nothing can be said of growth: allocators and caches still settle."""


@dataclass(frozen=True)
class Options:
    """What the command line chose."""

    steps: int
    seed: int
    device: torch.device


@dataclass(frozen=True)
class Step:
    """What one step showed, with what was held when its backward pass began."""

    number: int
    loss: float
    tokens_per_second: float
    held: int
    rss: int


def usable_device(name: str) -> torch.device:
    """The device of that name. Raises ValueError, in a sentence, if nothing can run on it."""
    try:
        device = torch.device(name)
        torch.ones(1, device=device).sum().item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).splitlines()[0].split(". ")[0].removesuffix(".")
        raise ValueError(f"nothing can be trained on {name!r} here: {reason}.") from None
    return device


def corpus() -> bytes:
    """The text to learn: the modules at the top of the standard library, about 5 MB."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(text) <= CONTEXT:
        raise FileNotFoundError(f"there are no sources of the standard library in {folder}")
    return text


def run(options: Options, console: Console | None = None) -> list[Step]:
    """Trains, shows progress, and ends with the ledger's tables and what RSS did."""
    console = console or Console(highlight=False)
    if options.device.type == "cpu":
        # The matrices are small, and OpenMP's barriers spin: on two busy cores a step with two
        # threads took 20 times as long as one with one.
        torch.set_num_threads(1)
    training = Training(options, corpus())
    console.print(
        f"a GPT of {training.parameters:,} parameters learns Python's standard library "
        f"on {options.device}"
    )
    steps: list[Step] = []
    with _progress(console, options.steps) as show:
        for number in range(1, options.steps + 1):
            steps.append(training.step(number))
            show(steps[-1])
    for title, rows in (
        ("held by kind", ledger().by_kind()),
        ("held by owner, in the last step", training.owners_in_last_step),
    ):
        table = _table(title, rows)
        table.box = table.box if console.is_terminal else None
        console.print(table)
    console.print(_learned(steps))
    console.print(flatness([step.rss for step in steps]))
    return steps


class Training:
    """The loop's state: model, optimizer, averaged weights, and the leases on them."""

    def __init__(self, options: Options, text: bytes) -> None:
        """Builds the model and leases its weights; nothing of a step is held yet."""
        torch.manual_seed(options.seed)
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._device = options.device
        self._model = TinyGPT(context=CONTEXT).to(options.device)
        self._weights = list(self._model.parameters())
        self._optimizer = torch.optim.AdamW(self._weights, lr=2e-3)
        self._average = [weight.detach().clone() for weight in self._weights]
        self._leases = [hold(weight, "model", kind="parameter") for weight in self._weights]
        self._leases += [hold(copy, "average", kind="optimizer") for copy in self._average]
        self._leases_of_step = ExitStack()
        for name, block in self._model.named_blocks():
            block.register_forward_hook(_holder(name, self._leases_of_step))
        self.parameters = sum(weight.numel() for weight in self._weights)
        self.owners_in_last_step: dict[str, Totals] = {}

    def step(self, number: int) -> Step:
        """One optimizer step, in a scope of its own."""
        begin = time.perf_counter()
        with scope("step", number, on_close="raise"):
            with self._leases_of_step:
                loss = self._loss()
                held = ledger().bytes
                self.owners_in_last_step = {
                    f"{owner.kind} '{owner.name}'": totals
                    for owner, totals in ledger().by_owner().items()
                }
                loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._follow_weights()
        value = loss.item()
        speed = BATCH * CONTEXT / (time.perf_counter() - begin)
        return Step(number, value, speed, held, sample().process.rss)

    def _loss(self) -> torch.Tensor:
        starts = torch.randint(len(self._text) - CONTEXT, (BATCH, 1))
        rows = self._text[starts + torch.arange(CONTEXT + 1)]
        batch = rows.to(self._device, torch.int64)
        self._leases_of_step.enter_context(hold(batch, "batch"))
        logits = self._model(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    @torch.no_grad()
    def _follow_weights(self) -> None:
        for copy, weight in zip(self._average, self._weights, strict=True):
            copy.lerp_(weight, 0.01)


def _holder(name: str, leases: ExitStack) -> Callable[[object, object, torch.Tensor], None]:
    """A forward hook that leases a module's output."""

    def hold_output(_module: object, _inputs: object, output: torch.Tensor) -> None:
        leases.enter_context(hold(output, name, kind="activation"))

    return hold_output


@contextmanager
def _progress(console: Console, steps: int) -> Iterator[Callable[[Step], None]]:
    """A bar in a terminal; elsewhere about ten lines."""
    if not console.is_terminal:
        every = max(steps // 10, 1)
        yield (
            lambda step: (
                console.print(f"step {step.number}/{steps}  {_figures(step)}")
                if step.number % every == 0
                else None
            )
        )
        return
    columns = ("step", MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=steps)
        yield lambda step: progress.update(task, advance=1, description=_figures(step))


def _figures(step: Step) -> str:
    return (
        f"loss {step.loss:.2f}  {step.tokens_per_second:,.0f} tokens/s  "
        f"held {_C.bytes_text(step.held)}  RSS {_C.bytes_text(step.rss)}"
    )


def _table(title: str, rows: Mapping[str, Totals]) -> Table:
    """What is held now, and for kinds the most that was held at once."""
    peaks = any(totals.peak for totals in rows.values())
    table = Table("", "bytes", "leases", *(["peak"] if peaks else []), title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, totals in rows.items():
        if totals.leases or totals.peak:
            peak = [_C.bytes_text(totals.peak)] if peaks else []
            table.add_row(name, _C.bytes_text(totals.bytes), f"{totals.leases:,}", *peak)
    return table


def _learned(steps: Sequence[Step]) -> str:
    speed = statistics.median(step.tokens_per_second for step in steps)
    return (
        f"loss {steps[0].loss:.3f} -> {steps[-1].loss:.3f} in {len(steps)} steps, "
        f"{speed:,.0f} tokens/s"
    )


def flatness(rss: Sequence[int]) -> str:
    """Says in a line whether RSS, measured after each step, grew in the second half of the run.

    It compares the highest values of the third and the last quarter. What is leaked stays, so it
    raises them; what malloc returns to the system and takes again, some MiB here, does not.

    Example:
        >>> from tenure.demo import flatness
        >>> flatness([300 << 20] * 40)
        'RSS stayed flat over the second half: at most 300.0 MiB, then at most 300.0 MiB'
        >>> flatness([(300 + step) << 20 for step in range(40)])
        'RSS grew over the second half: at most 329.0 MiB, then at most 339.0 MiB'
    """
    if len(rss) < _ENOUGH:
        return f"RSS ended at {_C.bytes_text(rss[-1])}: too few steps to say whether it is flat"
    quarter = len(rss) // 4
    before = max(rss[-2 * quarter : -quarter])
    after = max(rss[-quarter:])
    verdict = "grew" if after > before * (1 + _TOLERANCE) else "stayed flat"
    figures = f"at most {_C.bytes_text(before)}, then at most {_C.bytes_text(after)}"
    return f"RSS {verdict} over the second half: {figures}"
