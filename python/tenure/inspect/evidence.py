"""What a look at holders tells of origins, for whoever judges their numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from tenure import _C

__all__ = ["Evidence", "Given"]

Given = tuple[set[int], set[int], dict[int, float]]  # accused, bounded, carried


@dataclass
class Evidence:
    """What is known of origins beyond their numbers.

    Attributes:
        accused: Those whose one growing storage is kept from step to step.
        bounded: Those held by a container that has a bound and is not full.
        carried: Bytes that each storage of an origin keeps alive beside its own.
    """

    accused: set[int] = field(default_factory=set)
    bounded: set[int] = field(default_factory=set)
    carried: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, meta: Mapping[str, str]) -> Evidence:
        """As a recording has it. Raises TypeError or ValueError for what is damaged."""
        carried = json.loads(meta.get("carried", "{}"))
        return cls(
            set(json.loads(meta.get("accused", "[]"))),
            set(json.loads(meta.get("bounded", "[]"))),
            {int(origin): float(nbytes) for origin, nbytes in carried.items()},
        )

    def given(self) -> Given:
        """As the extension takes it."""
        return self.accused, self.bounded, self.carried

    def put(self, watch: _C.Watch) -> None:
        """Makes it known to those who judge now, and to those who will read the recording."""
        watch.set_evidence(self.given())
        watch.put("accused", json.dumps(sorted(self.accused)))
        watch.put("bounded", json.dumps(sorted(self.bounded)))
        watch.put("carried", json.dumps(self.carried))
