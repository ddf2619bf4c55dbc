"""What a look at holders tells of origins, for whoever judges their numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from tenure import _C

__all__ = ["Evidence", "Given"]

KeptGraphs = tuple[float, int, int]  # bytes a step, bytes, since which step
Given = tuple[set[int], set[int], dict[int, KeptGraphs]]


@dataclass
class Evidence:
    """What is known of origins beyond their numbers.

    Attributes:
        accused: Those whose one growing storage is kept from step to step.
        bounded: Those held by a container that has a bound and is not full.
        graphs: Autograd graphs that are kept, by the origin of the storages that head them.
    """

    accused: set[int] = field(default_factory=set)
    bounded: set[int] = field(default_factory=set)
    graphs: dict[int, KeptGraphs] = field(default_factory=dict)

    @classmethod
    def of(cls, meta: Mapping[str, str]) -> Evidence:
        """As a recording has it. Raises TypeError or ValueError for what is damaged."""
        graphs = json.loads(meta.get("graphs", "{}"))
        return cls(
            set(json.loads(meta.get("accused", "[]"))),
            set(json.loads(meta.get("bounded", "[]"))),
            {int(o): (float(pace), int(size), int(at)) for o, (pace, size, at) in graphs.items()},
        )

    def given(self) -> Given:
        """As the extension takes it."""
        return self.accused, self.bounded, self.graphs

    def put(self, watch: _C.Watch) -> None:
        """Makes it known to those who judge now, and to those who will read the recording."""
        watch.set_evidence(self.given())
        watch.put("accused", json.dumps(sorted(self.accused)))
        watch.put("bounded", json.dumps(sorted(self.bounded)))
        watch.put("graphs", json.dumps(self.graphs))
