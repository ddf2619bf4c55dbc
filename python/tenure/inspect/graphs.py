"""Autograd graphs that are alive, counted by the leaves that all of them lead to.

Every graph that a loss has made holds the node that adds up the gradient of a parameter, once for
each use of it. So the number of references to that node tells how many graphs are alive, without
looking at any of them: one or none between the steps of a healthy program, one more with each step
where losses are kept or added up with their graphs. What ``backward()`` frees is what nodes have
saved, not the nodes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tenure import _C

__all__ = ["Graphs", "Growing"]

_MOST_LEAVES = 32  # that are asked
_FEWEST = 8  # alive, to be spoken of
_LEAST_PACE = 0.2  # more of them a step
_FEWEST_STEPS = 10  # in which none went
_MOST_COUNTED = 512  # steps that are remembered
_GIVEN_BACK = 0.75  # fewer than this share are left: some went


@dataclass(frozen=True)
class Growing:
    """Ever more graphs.

    Attributes:
        leaf: The parameter that most of them lead to; None: it is gone, as when a program ends.
        uses: How many of their nodes lead there.
        per_step: How many more do so with each step.
        since: The step since which none went.
    """

    leaf: torch.Tensor | None
    uses: int
    per_step: float
    since: int


class Graphs:
    """How many graphs there were whenever someone counted."""

    def __init__(self) -> None:
        """None were counted yet."""
        self._leaves: list[weakref.ref[torch.Tensor]] = []
        self._largest: weakref.ref[torch.Tensor] | None = None
        self._counted: list[tuple[int, int]] = []  # step, uses of the leaf that has most
        self._most_given_back = 0

    def follow(self, parameters: Sequence[torch.Tensor]) -> None:
        """Counts by these from now on."""
        leaves = [p for p in parameters if p.requires_grad and p.is_leaf]
        stride = len(leaves) // _MOST_LEAVES + 1
        self._leaves = [weakref.ref(leaf) for leaf in leaves[::stride]]

    def count(self, step: int) -> None:
        """Counts those that are alive. It is cheap: nothing is looked at but the leaves."""
        alive = [leaf for one in self._leaves if (leaf := one()) is not None]
        uses = _C.users_of_leaves(alive)
        most = max(uses, default=0)
        if self._counted and most < _GIVEN_BACK * self._counted[-1][1]:
            self._most_given_back = max(self._most_given_back, self._counted[-1][1])
            self._counted.clear()
        self._counted.append((step, most))
        if len(self._counted) > _MOST_COUNTED:
            del self._counted[1:-1:2]
        self._largest = weakref.ref(alive[uses.index(most)]) if alive else None

    def growing(self) -> Growing | None:
        """Whether there are ever more, beyond any number that was given back."""
        if not self._counted:
            return None
        since = self._counted[0][0]
        step, now = self._counted[-1]
        if step - since < _FEWEST_STEPS or now < max(_FEWEST, 1.5 * self._most_given_back):
            return None
        before, then = next(one for one in self._counted if 2 * one[0] >= since + step)
        pace = (now - then) / (step - before)
        leaf = self._largest() if self._largest is not None else None
        return Growing(leaf, now, pace, since) if pace >= _LEAST_PACE else None
