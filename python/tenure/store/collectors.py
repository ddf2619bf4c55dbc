"""Who may fetch, as users write it and as the store takes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from tenure._inputs import need_integer, need_text
from tenure.errors import InputError

#: None: anyone, until the scope closes. A number: that many fetches. Otherwise one fetch each by a
#: rank (``3``), a role (``"trainer"``: any of them) or both (``"trainer:3"``).
Collectors: TypeAlias = "int | str | Iterable[int | str] | None"

Listed: TypeAlias = list[tuple[str, int | None]]


def parse(collectors: Collectors) -> tuple[Listed | None, int | None]:
    """The list of expected fetches, or their number; neither for anyone."""
    if collectors is None:
        return None, None
    if isinstance(collectors, str):
        return [_one(collectors)], None
    if isinstance(collectors, bool | bytes | bytearray | Mapping):
        raise InputError(f"collectors are ranks, roles or a number of fetches, not {collectors!r}")
    if isinstance(collectors, Iterable):
        return [_one(one) for one in collectors], None
    return None, _in_range(need_integer(collectors, "the number of fetches"), "of fetches", 2**32)


def _one(collector: object) -> tuple[str, int | None]:
    if isinstance(collector, bool):
        raise InputError(f"a collector is a rank or a role, not {collector}")
    if not isinstance(collector, str):
        return "", _in_range(need_integer(collector, "a collector's rank"), "of a rank", 2**31)
    need_text(collector, "a collector")
    role, colon, rank = collector.partition(":")
    if not role or (colon and not (rank.isascii() and rank.isdigit())):
        raise InputError(
            f"'{collector}' is no collector: write a rank (3), a role ('trainer') or both "
            "('trainer:3')"
        )
    return role, _in_range(int(rank), "of a rank", 2**31) if colon else None


def _in_range(number: int, what: str, end: int) -> int:
    if not 0 <= number < end:
        raise InputError(f"the number {what} must be from 0 to {end - 1} and is {number}")
    return number
