"""Autograd graphs that are alive, counted by the leaves that all of them lead to.

Every graph that a loss has made holds the node that adds up the gradient of a parameter, once for
each use of it. So the number of references to that node tells how many graphs are alive, without
looking at any of them: one or none between the steps of a healthy program, one more with each step
where losses are kept or added up with their graphs. What ``backward()`` frees is what nodes have
saved, not the nodes.

But a program that uses a parameter more than once in a step, as a recurrent cell is for each word,
has as many references with one graph, and ever more of them where its sequences get longer. So
before anyone is accused, the nodes themselves are asked in which steps they were made.
"""

from __future__ import annotations

import bisect
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
_MANY_STEPS = 4  # that nodes come from which are kept


@dataclass(frozen=True)
class Growing:
    """Ever more graphs.

    Attributes:
        leaf: The parameter that most of them lead to; None: it is gone, as when a program ends.
        uses: How many of their nodes lead there, above the fewest that ever did.
        per_step: How many more do so with each step.
        since: The step since which none went.
        made: At the ends of the steps since then, how many nodes their thread had made.
    """

    leaf: torch.Tensor | None
    uses: int
    per_step: float
    since: int
    made: tuple[int, ...]

    def are_kept(self, nodes: Sequence[int]) -> bool:
        """Whether these nodes were made in many steps, as they are where graphs are kept.

        Args:
            nodes: Of each, how many its thread had made before it. Of a thread other than the one
                that ends the steps that says nothing, and they are taken to be.
        """
        elsewhere = self.made[0] == self.made[-1]
        return elsewhere or len({bisect.bisect(self.made, n) for n in nodes}) >= _MANY_STEPS


@dataclass
class _Leaf:
    tensor: weakref.ref[torch.Tensor]
    fewest: int | None = None  # uses; None: not counted yet


class Graphs:
    """How many graphs there were whenever someone counted.

    Each leaf counts from the fewest uses that it had: of a model that nobody trains any more old
    graphs may be left, more of them than have grown since of another.
    """

    def __init__(self) -> None:
        """None were counted yet."""
        self._leaves: list[_Leaf] = []
        self._largest: weakref.ref[torch.Tensor] | None = None
        # Step, uses of the leaf that has most above its fewest, nodes made.
        self._counted: list[tuple[int, int, int]] = []
        self._most_given_back = 0

    def follow(self, parameters: Sequence[torch.Tensor]) -> None:
        """Counts by these from now on."""
        leaves = [p for p in parameters if p.requires_grad and p.is_leaf]
        stride = len(leaves) // _MOST_LEAVES + 1
        known = {id(of): one for one in self._leaves if (of := one.tensor()) is not None}
        self._leaves = [
            known.get(id(leaf)) or _Leaf(weakref.ref(leaf)) for leaf in leaves[::stride]
        ]

    def count(self, step: int) -> None:
        """Counts those that are alive. It is cheap: nothing is looked at but the leaves."""
        alive = [(one, leaf) for one in self._leaves if (leaf := one.tensor()) is not None]
        uses = []
        for (one, _), now in zip(alive, _C.users_of_leaves([of for _, of in alive]), strict=True):
            one.fewest = now if one.fewest is None else min(one.fewest, now)
            uses.append(now - one.fewest)
        most = max(uses, default=0)
        if self._counted and most < _GIVEN_BACK * self._counted[-1][1]:
            self._most_given_back = max(self._most_given_back, self._counted[-1][1])
            self._counted.clear()
        self._counted.append((step, most, _C.nodes_made()))
        if len(self._counted) > _MOST_COUNTED:
            del self._counted[1:-1:2]
        self._largest = weakref.ref(alive[uses.index(most)][1]) if alive else None

    def growing(self) -> Growing | None:
        """Whether there are ever more, beyond any number that was given back."""
        if not self._counted:
            return None
        since = self._counted[0][0]
        step, now, _ = self._counted[-1]
        if step - since < _FEWEST_STEPS or now < max(_FEWEST, 1.5 * self._most_given_back):
            return None
        before, then, _ = next(one for one in self._counted if 2 * one[0] >= since + step)
        pace = (now - then) / (step - before)
        leaf = self._largest() if self._largest is not None else None
        made = tuple(made for _, _, made in self._counted)
        return Growing(leaf, now, pace, since, made) if pace >= _LEAST_PACE else None
