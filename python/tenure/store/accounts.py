"""The books of a scope, when it closed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from tenure.telemetry.words import bytes_text

Owner: TypeAlias = tuple[str, int, int]  # role, rank, incarnation


@dataclass(frozen=True)
class Closed:
    """What was stored in a scope and what became of it, here and at the owners of what it adopted.

    ``stored`` is ``freed`` by all its reasons plus ``live``, which is 0 once it closed; where that
    is not so, ``difference`` says in which process, call and line.
    """

    scope: str
    stored: int = 0
    stored_bytes: int = 0
    freed: dict[str, int] = field(default_factory=dict)
    freed_bytes: dict[str, int] = field(default_factory=dict)
    live: int = 0
    dropped: int = 0  #: puts that came after the close
    lines: list[dict[str, Any]] = field(default_factory=list)  #: the same by call and site
    still_mapped: list[str] = field(default_factory=list)
    elsewhere: list[dict[str, Any]] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)  #: owners that were not asked
    gone: list[str] = field(default_factory=list)  #: owners that have ended, and all they had
    difference: str = ""

    def since(self, now: Closed) -> Closed:
        """The same books, with what has changed here since the close."""
        mapped = [*now.still_mapped, *_mapped_elsewhere(self.elsewhere)]
        return replace(self, dropped=now.dropped, still_mapped=mapped)

    def __str__(self) -> str:
        """One line."""
        reasons = [f"{count} {reason}" for reason, count in self.freed.items() if count]
        text = f"{self.scope}: {self.stored} stored ({bytes_text(self.stored_bytes)})"
        if reasons:
            text += f", freed: {', '.join(reasons)}"
        for there in self.elsewhere:
            role, rank, _ = there["owner"]
            text += f"; {role} {rank} freed {there['freed']} ({bytes_text(there['bytes'])})"
        if self.still_mapped:
            text += f"; still mapped: {', '.join(self.still_mapped)}"
        if self.unreached:
            text += f"; not reached: {', '.join(self.unreached)}"
        if self.gone:
            text += f"; gone: {', '.join(self.gone)}"
        return text + (f"; {self.difference}" if self.difference else "")


def closed_of(scope: str, owner: Owner, told: Mapping[str, Any]) -> Closed:
    """From what the store of this owner says of it."""
    total = told["total"]
    elsewhere = told.get("elsewhere", [])
    unreached = told.get("unreached", [])
    differences = [(owner, told["difference"])]
    differences += [(there["owner"], there["difference"]) for there in elsewhere]
    return Closed(
        scope=scope,
        stored=total["stored"],
        stored_bytes=total["stored_bytes"],
        freed=total["freed"],
        freed_bytes=total["freed_bytes"],
        live=total["live"],
        dropped=told["dropped"],
        lines=told["lines"],
        still_mapped=[
            *(mapped_text(mapped) for mapped in told["still_mapped"]),
            *_mapped_elsewhere(elsewhere),
        ],
        elsewhere=elsewhere,
        unreached=[_owner_text(owner, why) for owner, why, how in unreached if how != "gone"],
        gone=[_owner_text(owner, why) for owner, why, how in unreached if how == "gone"],
        difference="; ".join(f"{who[0]} {who[1]}: {what}" for who, what in differences if what),
    )


def _owner_text(owner: Owner, why: str) -> str:
    role, rank, _ = owner
    return f"{role} {rank} ({why})"


def _mapped_elsewhere(elsewhere: list[dict[str, Any]]) -> list[str]:
    return [text for there in elsewhere for text in there["still_mapped"]]


def mapped_text(mapped: Mapping[str, Any]) -> str:
    """``trainer 3 since 14:03:22: 64.0 MiB``."""
    role, rank, _ = mapped["by"]
    since = time.strftime("%H:%M:%S", time.localtime(mapped["since_ms"] / 1000))
    return f"{role} {rank} since {since}: {bytes_text(mapped['bytes'])}"
