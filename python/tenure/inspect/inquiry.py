"""Finding out who holds what a verdict names, while the program runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tenure import _C
from tenure.inspect.evidence import Evidence
from tenure.inspect.graphs import Graphs
from tenure.inspect.suspects import NODE_BYTES, Holding, are_kept, joined, look, look_at_graphs

__all__ = ["Inquiry"]

_MOST_CYCLES = 16  # kinds that are written down
_MOST_SUSPECTS = 32  # whose holders are looked at
_LOOK_AGAIN = 0.1  # of the time may have gone to looking before it is done again

Suspects = Sequence[dict[str, Any]]  # as the extension's ``judge`` returns them


class Inquiry:
    """What looking at holders has shown so far.

    Its functions must be called where no other thread changes the autograd graph: on the training
    thread between steps. They write down what they find in the recording of the watch they are
    given, and say whether it makes a difference to the verdict.

    Attributes:
        holdings: What held the storages of an origin when someone last looked, by origin.
        cycles: Kinds of cycles that nothing held then.
    """

    def __init__(self, for_files: Callable[[Any], Any]) -> None:
        """Begins.

        Args:
            for_files: Makes of what was found what files may say.
        """
        self.holdings: dict[int, dict[str, Any]] = {}
        self.cycles: list[dict[str, Any]] = []
        self._for_files = for_files
        self._looked_at: dict[int, int] = {}  # origin: bytes when it was last looked at
        self._doubted: set[int] = set()
        self._evidence = Evidence()
        self._graphs = Graphs()
        self._graphs_looked_at = 0  # nodes when they were last looked at
        self._began = time.monotonic()
        self._looking = 0.0  # seconds that looking took

    def unseen(self, suspects: Suspects) -> Suspects:
        """Those of them that were never looked at."""
        return [s for s in suspects if s["origin"] not in self._looked_at]

    def has_time(self) -> bool:
        """Whether looking has not taken too much of the time yet to be done again."""
        return self._looking <= _LOOK_AGAIN * (time.monotonic() - self._began)

    def find_foreign(self) -> None:
        """Counts storages whose memory is not torch's: they may be what grows."""
        began = time.perf_counter()
        with _C.References([]) as references:
            references.find_foreign()
        self._looking += time.perf_counter() - began

    def follow(self, parameters: Sequence[torch.Tensor]) -> None:
        """Graphs that are alive are counted by these from now on."""
        self._graphs.follow(parameters)

    def count_graphs(self, step: int) -> None:
        """At the end of a step; any thread may."""
        self._graphs.count(step)

    def look_at_graphs(self, watch: _C.Watch, step: int) -> bool:
        """Writes down who holds autograd graphs, if there are ever more of them."""
        growing = self._graphs.growing()
        known = self._evidence
        if growing is None:
            self._graphs_looked_at = 0
            gone, known.graphs = known.graphs, {}
            if gone:
                known.put(watch)
            return bool(gone)
        again = self._graphs_looked_at > 0
        doubled = growing.uses >= 2 * self._graphs_looked_at
        if growing.leaf is None or not doubled or (again and not self.has_time()):
            return False
        self._graphs_looked_at = growing.uses
        began = time.perf_counter()
        found = look_at_graphs(growing)
        self._looking += time.perf_counter() - began
        if found is None:
            return False
        origin, uses, holding = found
        nbytes = NODE_BYTES * holding.nodes
        per_step = growing.per_step * nbytes / uses
        known.graphs = {origin: (per_step, nbytes, growing.since)}
        self._looked_at[origin] = nbytes
        self._write(watch, step, origin, holding, (per_step, nbytes, uses))
        self._learn_bounds({origin: holding})
        known.put(watch)
        return True

    def look(self, watch: _C.Watch, step: int, suspects: Suspects) -> bool:
        """Writes down who holds suspects that are new, or have doubled since."""
        wanted = [
            s
            for s in suspects[:_MOST_SUSPECTS]
            if s["bytes"] >= 2 * self._looked_at.get(s["origin"], 0)
        ]
        again = all(s["origin"] in self._looked_at for s in wanted)
        if not wanted or (again and not self.has_time()):
            return False
        began = time.perf_counter()
        found, cycles = look([s["origin"] for s in wanted], step)
        self.cycles = [cycle.as_json() for cycle in cycles[:_MOST_CYCLES]]
        watch.put("cycles", self._text(self.cycles))
        self._looking += time.perf_counter() - began
        for suspect in wanted:
            origin = suspect["origin"]
            self._looked_at[origin] = max(1, suspect["bytes"])
            if origin in found:
                figures = (suspect["per_step"], suspect["bytes"], suspect["count"])
                self._write(watch, step, origin, found[origin], figures)
        changed = self._learn_bounds(found)
        if changed:
            self._evidence.put(watch)
        return changed

    def _write(
        self,
        watch: _C.Watch,
        step: int,
        origin: int,
        holding: Holding,
        figures: tuple[float, int, int],
    ) -> None:
        """Keeps who holds an origin's storages, with bytes a step, bytes and how many they are."""
        self.holdings[origin] = holding.as_json()
        watch.add_holding(step, origin, *figures, self._text(self.holdings[origin]))

    def accuse(self, watch: _C.Watch, step: int, judged: dict[str, Any]) -> bool:
        """Whether what grows along with the inputs is kept from step to step, and so a leak."""
        doubtful = judged["doubtful"][:_MOST_SUSPECTS]
        wanted = [origin for origin in doubtful if origin not in self._doubted]
        if not wanted:
            return False
        self._doubted.update(wanted)
        guilty = {*are_kept(wanted, step), *joined(judged["leading"])}
        self._evidence.accused.update(guilty)
        self._evidence.put(watch)
        return bool(guilty)

    def _learn_bounds(self, found: dict[int, Holding]) -> bool:
        """Keeps which of these have a bound. Returns whether that is anything new."""
        before = self._evidence.bounded
        bounded = {origin for origin in found if found[origin].bounded}
        self._evidence.bounded = (before - found.keys()) | bounded
        return self._evidence.bounded != before

    def _text(self, told: Any) -> str:
        return json.dumps(self._for_files(told), ensure_ascii=False)
