"""What Fit adds to an operator on the CPU, in nanoseconds: bench/fit.py --cost.

Chains of operators on small tensors that need no gradient, so that nothing is saved on the way; the
last of a chain is, and is dropped. In plan: the budget is the least, and every call of every chain
is written down. Outside: the budget is one that nothing exceeds, and no call is. A chain is long,
for what saves its end (functions of Python's) leaves the caches cold for the first operators of the
next one; views, which nobody sees, tell how much of that is left. The arms take turns; the figure
is the median over rounds of the difference to plain in the same round, of time in which the thread
had a core.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import tables
import torch

import tenure

ELEMENTS = 256  # 1 KiB: smaller ones are kept without a plan
IN_PLAN, OUTSIDE = 2000.0, 500.0  # bars, ns an operator
ROUNDS, CHAINS = 30, 12
VISIT = 4  # steps of an arm in a row, of which the quickest counts: the others warm its caches
Op = Callable[[torch.Tensor], torch.Tensor]

KINDS: dict[str, list[Op]] = {
    "x + 1": [lambda x: x + 1] * 48,
    "x * x": [lambda x: x * x] * 48,
    "silu(x)": [torch.nn.functional.silu] * 48,
    "a view": [lambda x: x.view(16, 16), lambda x: x.t(), lambda x: x.t(), lambda x: x.view(256)]
    * 12,
    "in turn": [
        lambda x: x + 1,
        lambda x: x.view(16, 16),
        torch.nn.functional.silu,
        lambda x: x * x,
        lambda x: x.view(256),
        torch.tanh,
    ]
    * 8,
}


class Chains:
    """A step of which the chains alone are timed."""

    def __init__(self, ops: list[Op]) -> None:
        self._ops = ops
        self.inputs = [torch.rand(ELEMENTS) for _ in range(CHAINS)]
        self.weight = torch.ones(ELEMENTS, requires_grad=True)

    def run(self, context: contextlib.AbstractContextManager[object]) -> float:
        """Seconds of this thread's own time an operator: the median of the chains."""
        took = []
        with context:
            products = []
            for x in self.inputs:
                begin = time.thread_time()
                for op in self._ops:
                    x = op(x)
                took.append(time.thread_time() - begin)
                # A copy, for a chain of views alone ends in what is held anyway.
                products.append(self.weight * x.clone())
            torch.stack(products).sum().backward()
        self.weight.grad = None
        return statistics.median(took) / len(self._ops)


@dataclass
class Cost:
    plain: list[float] = field(default_factory=list)
    inside: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)
    recorded: int = 0
    calls: int = 0

    def added(self, to: list[float]) -> float:
        return 1e9 * statistics.median(a - b for a, b in zip(to, self.plain, strict=True))


def planned(chains: Chains, budget: int | str) -> tenure.Fit:
    """A Fit of the chains that follows its plan, and whose proof is over."""
    fit = tenure.Fit(budget=budget, audit=0)
    for _ in range(6):
        chains.run(fit)
    if fit.stats().mode != "planned":
        raise RuntimeError(f"no plan is followed: {fit.stats().mode} {fit.stats().diverged}")
    return fit


def tightest(chains: Chains) -> tenure.Fit:
    """One that drops all that can be: at the least budget, which differs a little by profile."""
    budget = 1
    for _ in range(8):
        try:
            return planned(chains, budget)
        except tenure.BudgetError as error:
            words = str(error).split()
            budget = int(1.01 * int(words[words.index("bytes,") - 1]))
    raise RuntimeError("the least budget is another one in every profile")


def measured(ops: list[Op], rounds: int) -> Cost:
    chains = Chains(ops)
    tight, wide = tightest(chains), planned(chains, "1TiB")
    cost = Cost(recorded=tight.stats().remade_calls, calls=(len(ops) + 1) * CHAINS)
    arms: list[tuple[list[float], contextlib.AbstractContextManager[object]]] = [
        (cost.plain, contextlib.nullcontext()),
        (cost.inside, tight),
        (cost.outside, wide),
    ]
    for number in range(rounds):
        at = number % len(arms)
        for into, context in arms[at:] + arms[:at]:
            into.append(min(chains.run(context) for _ in range(VISIT)))
    return cost


def show(rounds: int = ROUNDS) -> bool:
    """Whether all bars hold."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    table = tables.Table(
        "fit-cost",
        ["operator", "plain ns", "in plan +ns", "bar", "", "outside +ns", "bar", "", "recorded"],
    )
    holds = []
    for name, ops in KINDS.items():
        cost = measured(ops, rounds)
        inside, outside = cost.added(cost.inside), cost.added(cost.outside)
        held = inside <= IN_PLAN, outside <= OUTSIDE
        holds += held
        words = ["holds" if each else "MISSED" for each in held]
        plain = 1e9 * statistics.median(cost.plain)
        table.add(
            [
                name,
                f"{plain:.0f}",
                f"{inside:.0f}",
                f"{IN_PLAN:.0f}",
                words[0],
                f"{outside:.0f}",
                f"{OUTSIDE:.0f}",
                words[1],
                f"{cost.recorded} of {cost.calls}",
            ],
            name=name,
            plain=plain,
            in_plan=inside,
            outside=outside,
            recorded=cost.recorded,
            calls=cost.calls,
            rounds=rounds,
        )
    table.show()
    print(f"{sum(holds)} of {len(holds)} bars hold\n", flush=True)
    torch.set_num_threads(threads)
    return all(holds)
