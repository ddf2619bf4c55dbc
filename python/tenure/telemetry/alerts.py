"""Alerts: rules about figures, and what happens when one is broken."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from tenure.errors import InputError
from tenure.telemetry.figures import Figure, Figures
from tenure.telemetry.keys import KEYS
from tenure.telemetry.words import value_text

__all__ = ["Alert", "AlertSpec", "Broken", "Watch", "alerts_of"]

Action = Literal["log", "stop"] | Callable[["Broken"], None]

_COMPARE = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
# What people say, and the figures that are meant: of those that there are, the first that breaks
# the rule counts.
_SHORT = {
    "headroom": ("device_headroom", "host_headroom"),
    "growth": ("device_growth_bytes_per_step", "host_growth_bytes_per_step"),
    "allocated": ("device_allocated_bytes",),
    "reserved": ("device_reserved_bytes",),
    "peak": ("device_allocated_peak_bytes",),
    "fragmentation": ("device_fragmentation",),
    "retries": ("device_retries",),
    "ooms": ("device_ooms",),
    "rss": ("host_rss_bytes",),
    "pss": ("host_pss_bytes",),
    "swap": ("host_swap_bytes",),
    "pinned": ("host_pinned_bytes",),
    "steps_left": ("steps_left",),
}
_BYTES = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
}
_RULE = re.compile(
    r"\s*(?P<name>\w+)\s*(?P<sign><=|>=|<|>)\s*(?P<number>-?\d+(\.\d+)?)\s*"
    r"(?P<unit>%|[A-Za-z]*)(?P<rate>/step)?(\s+for\s+(?P<steps>\d+)\s+steps?)?\s*"
)


@dataclass(frozen=True)
class Broken:
    """A rule that does not hold any more."""

    rule: str
    text: str  # "headroom is 3.1 % on rank 2, below 5 %"
    key: str
    figure: Figure
    step: int


@dataclass(frozen=True)
class Alert:
    """A rule and what to do when it is broken.

    Args:
        rule: ``NAME < NUMBER`` or with ``<=``, ``>``, ``>=``: ``headroom < 5%``,
            ``growth > 1 MB/step for 50 steps``, ``rss > 40 GiB``, or any key by its name.
        action: ``"log"`` warns on the rank that writes; ``"stop"`` raises MemoryAlert from
            ``monitor.step()`` at the same step on every rank; a function is called on every rank,
            on a thread of its own.

    Raises:
        InputError: For a rule that does not parse.
    """

    rule: str
    action: Action = "log"
    keys: tuple[str, ...] = field(init=False, repr=False)
    limit: float = field(init=False, repr=False)
    sign: str = field(init=False, repr=False)
    steps: int = field(init=False, repr=False)
    said: str = field(init=False, repr=False)  # the limit as it was written

    def __post_init__(self) -> None:
        """Reads the rule."""
        if self.action not in ("log", "stop") and not callable(self.action):
            raise InputError(
                f"an alert's action is 'log', 'stop' or a function, not {self.action!r}"
            )
        found = _RULE.fullmatch(self.rule) if isinstance(self.rule, str) else None
        if found is None:
            raise InputError(
                f"{self.rule!r} is no alert rule: write 'headroom < 5%' or "
                "'growth > 1 MB/step for 50 steps'"
            )
        keys, limit = _meant(self.rule, found["name"], float(found["number"]), found["unit"])
        if (found["rate"] is not None) != keys[0].endswith("_per_step"):
            raise InputError(
                f"{self.rule!r} is no alert rule: growth is in bytes/step, and nothing else is"
            )
        said = f"{found['number']}{' ' if found['unit'] else ''}{found['unit']}"
        for name, value in (
            ("keys", keys),
            ("limit", limit),
            ("sign", found["sign"]),
            ("steps", int(found["steps"] or 0)),
            ("said", said + (found["rate"] or "")),
        ):
            object.__setattr__(self, name, value)

    def text(self) -> str:
        """The rule and what it does, for other ranks to compare."""
        return f"{self.rule}: {self.action if isinstance(self.action, str) else 'call'}"

    def is_unknown_in(self, figures: Figures) -> bool:
        """Whether this interval says nothing of what the rule is about."""
        told = any(key in figures.world for key in self.keys)
        return not told and not self.keys[0].startswith("steps_left")  # not told: no end in sight

    def broken_by(self, figures: Figures) -> tuple[str, Figure] | None:
        """The first figure that breaks the rule at this interval."""
        for key in self.keys:
            figure = figures.world.get(key)
            if figure is not None and _COMPARE[self.sign](figure.value, self.limit):
                return key, figure
        return None


AlertSpec = str | tuple[str, Action] | Alert


def alerts_of(given: Sequence[AlertSpec] | AlertSpec) -> list[Alert]:
    """Rules as users write them. Raises InputError for one that is none."""
    one_alone = isinstance(given, str | Alert) or (
        isinstance(given, tuple)
        and len(given) == 2
        and (given[1] in ("log", "stop") or callable(given[1]))
    )
    if not one_alone and not isinstance(given, list | tuple):
        raise InputError(f"alerts is a rule such as 'headroom < 5%', or several, not {given!r}")
    several = cast("Sequence[AlertSpec]", [given] if one_alone else given)
    return [_alert(one) for one in several]


def _alert(given: AlertSpec) -> Alert:
    if isinstance(given, Alert):
        return given
    if isinstance(given, tuple) and len(given) == 2:
        return Alert(*given)
    return Alert(given)  # which says so, if it is none


class Watch:
    """Holds figures against rules. A rule speaks when it comes to be broken, not while it is."""

    def __init__(self, alerts: Sequence[Alert]) -> None:
        """Nothing is broken yet."""
        self._alerts = alerts
        self._since: list[int | None] = [None] * len(alerts)
        self._said = [False] * len(alerts)

    def look(self, figures: Figures) -> list[tuple[Alert, Broken]]:
        """The rules that are broken from now on."""
        out = []
        step = figures.world["step"].value if "step" in figures.world else figures.step  # of all
        for at, alert in enumerate(self._alerts):
            if alert.is_unknown_in(figures):
                continue  # it is as it was
            found = alert.broken_by(figures)
            if found is None:
                self._since[at], self._said[at] = None, False
                continue
            since = self._since[at]
            if since is None:
                since = self._since[at] = step
            if not self._said[at] and step - since >= alert.steps:
                self._said[at] = True
                out.append((alert, _told(alert, *found, step)))
        return out


def _meant(rule: str, name: str, number: float, unit: str) -> tuple[tuple[str, ...], float]:
    """The keys that a name means, and the limit in their unit."""
    names = _SHORT.get(name, (name,))
    if unit == "%":
        keys = tuple(f"{one.removesuffix('_permille')}_permille" for one in names)
        limit = number * 10
    else:
        if unit not in _BYTES:
            raise InputError(
                f"{rule!r} is no alert rule: {unit!r} is no unit; there are %, B, KB, MB, GB, TB, "
                "KiB, MiB, GiB and TiB"
            )
        keys = tuple(one if one in KEYS else f"{one}_bytes" for one in names)
        limit = number * _BYTES[unit]
    if any(key not in KEYS for key in keys):
        if unit != "%" and all(f"{one}_permille" in KEYS for one in names):
            raise InputError(f"{rule!r} is no alert rule: {name} is in %, as in '{name} > 20%'")
        raise InputError(
            f"{rule!r} is no alert rule: there is no figure {name!r}"
            f"{' in %' if unit == '%' else ''}; there are {', '.join(_SHORT)}, and the keys that "
            "docs/telemetry.md lists"
        )
    if unit == "%" and not 0 <= number <= 100:
        raise InputError(f"{rule!r} is no alert rule: what is in % is from 0 to 100")
    measured = KEYS[keys[0]].unit
    if unit not in ("", "%") and not measured.startswith("bytes"):
        raise InputError(
            f"{rule!r} is no alert rule: {name} is not in {unit}, it is "
            f"{'a number' if measured == 'count' else f'in {measured}'}"
        )
    return keys, limit


def _told(alert: Alert, key: str, figure: Figure, step: int) -> Broken:
    how = "below" if alert.sign.startswith("<") else "above"
    lasting = f" for {alert.steps} steps" if alert.steps else ""
    text = (
        f"{key} is {value_text(key, figure.value)} on rank {figure.rank}, "
        f"{how} {alert.said}{lasting} (step {step})"
    )
    return Broken(alert.rule, text, key, figure, step)
