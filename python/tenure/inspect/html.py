"""Results as small HTML, for notebooks.

Colours are the notebook's own, so that it reads alike on light and on dark. Names may have anything
in them and are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

__all__ = ["block", "items", "verdict_html"]

_LINE = "1px solid rgba(128,128,128,.4)"
_MOST = 5  # suspects that are shown
_COLOURS = {"leak": "#c62828", "growth": "#b26a00", "flat": "#2e7d32", "too-short": "#777"}


def block(title: str, *parts: str) -> str:
    """A framed block: a title in plain text above parts in HTML."""
    frame = f"border:{_LINE};border-radius:4px;padding:.5em .8em;max-width:60em"
    shown = "".join(parts)
    return f'<div style="{frame}"><div style="font-weight:600">{escape(title)}</div>{shown}</div>'


def items(texts: Iterable[str]) -> str:
    """A list of plain texts; nothing if there are none."""
    lines = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul style="margin:.3em 0;padding-left:1.4em">{lines}</ul>' if lines else ""


def verdict_html(verdict: Mapping[str, Any], screen: str) -> str:
    """A verdict: its first line, the suspects as a table, and the rest of the first screen.

    Args:
        verdict: The document.
        screen: The same as a person reads it in a terminal.
    """
    kind = str(verdict["verdict"])
    first, *rest = screen.splitlines()
    mark = f"display:inline-block;border-left:.5em solid {_COLOURS.get(kind, '#777')}"
    head = f'<div style="{mark};padding-left:.5em;font-weight:600">{escape(first)}</div>'
    frame = f"border:{_LINE};border-radius:4px;padding:.5em .8em"
    suspects = verdict["suspects"][:_MOST]
    body = _table(suspects) if suspects else items(line.strip() for line in rest)
    return f'<div style="{frame}">{head}{body}</div>'


def _table(suspects: Sequence[Mapping[str, Any]]) -> str:
    heads = ("per step", "bytes", "made by", "at", "held by")
    cell = f'style="border-top:{_LINE};padding:.2em .6em;text-align:left;vertical-align:top"'
    rows = [
        (
            f"{suspect['bytes_per_step']:,}",
            f"{suspect['bytes']:,}",
            " in ".join(filter(None, (suspect["op"], suspect["module"]))),
            f"{Path(suspect['site']).name} {suspect.get('function', '')}".strip(),
            _way(suspect),
        )
        for suspect in suspects
    ]
    head = "".join(f"<th {cell}>{escape(text)}</th>" for text in heads)
    body = "".join(
        "<tr>" + "".join(f"<td {cell}>{escape(text)}</td>" for text in row) + "</tr>"
        for row in rows
    )
    table = "border-collapse:collapse;background:transparent;margin-top:.4em"
    return f'<table style="{table}"><tr>{head}</tr>{body}</table>'


def _way(suspect: Mapping[str, Any]) -> str:
    if not suspect["holders"]:
        return "C++ code, or not looked at"
    hops = reversed(suspect["holders"][0])
    return " → ".join(hop["text"] + (" ← grows here" if hop.get("leak") else "") for hop in hops)
