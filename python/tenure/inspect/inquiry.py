"""Finding out who holds what a verdict names, while the program runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from tenure import _C
from tenure.inspect.evidence import Evidence
from tenure.inspect.suspects import NODE_BYTES, Holding, are_kept, joined, look

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

    def look(self, watch: _C.Watch, step: int, suspects: Suspects, light: Suspects) -> bool:
        """Writes down who holds suspects that are new, or have doubled since.

        Those that have few bytes are only written down if they turn out to keep more alive.
        """
        wanted = [
            s
            for s in (*suspects[:_MOST_SUSPECTS], *light)
            if s["bytes"] >= 2 * self._looked_at.get(s["origin"], 0)
        ]
        again = all(s["origin"] in self._looked_at for s in wanted)
        if not wanted or (again and not self.has_time()):
            return False
        began = time.perf_counter()
        few = {s["origin"] for s in light} | self._evidence.carried.keys()
        found, cycles = look([s["origin"] for s in wanted], step, few)
        self.cycles = [cycle.as_json() for cycle in cycles[:_MOST_CYCLES]]
        watch.put("cycles", self._text(self.cycles))
        self._looking += time.perf_counter() - began
        for suspect in wanted:
            origin = suspect["origin"]
            self._looked_at[origin] = max(1, suspect["bytes"])
            if origin not in found or (suspect in light and not found[origin].nodes):
                continue
            self.holdings[origin] = found[origin].as_json()
            watch.add_holding(
                step,
                origin,
                suspect["per_step"],
                suspect["bytes"],
                suspect["count"],
                self._text(self.holdings[origin]),
            )
        return self._learn(watch, found)

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

    def _learn(self, watch: _C.Watch, found: dict[int, Holding]) -> bool:
        """Keeps what a look shows beyond names."""
        known = self._evidence
        before = (known.bounded, known.carried)
        bounded = {origin for origin in found if found[origin].bounded}
        carried = {o: NODE_BYTES * held.nodes for o, held in found.items() if held.nodes}
        kept = {o: value for o, value in known.carried.items() if o not in found}
        known.bounded, known.carried = (known.bounded - found.keys()) | bounded, kept | carried
        if (known.bounded, known.carried) == before:
            return False
        known.put(watch)
        return True

    def _text(self, told: Any) -> str:
        return json.dumps(self._for_files(told), ensure_ascii=False)
