"""The sentence with which a snapshot begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tenure.inspect.words import many, size

__all__ = ["headline", "top_holder"]

Document = Mapping[str, Any]


def headline(document: Document) -> str:
    """What happened to the rank, in a sentence without its full stop."""
    told = document.get("headline", {})
    who = f"rank {document.get('rank', '?')}"
    at = f" at step {document['step']:,}" if document.get("step") else ""
    reason, text = told.get("reason"), told.get("text", "")
    went_on = "" if told.get("fatal", reason != "memory") else ", and went on"
    if reason == "memory":
        return f"{who} ran out of memory{at}{_shortage(told)}{went_on}"
    if reason == "signal":
        return f"{who} was {'sent' if went_on else 'ended by'} {text}{at}{went_on}"
    if reason == "exception":
        return f"{who} failed{at}: {text}{went_on}"
    if reason == "told":
        return f"{who} stopped{at} after {text or 'another rank'}"
    return f"{who} was asked for a snapshot{at}" + (f": {text}" if text else "")


def top_holder(document: Document) -> str:
    """What held most memory, with the line that put it there; empty if that is not known."""
    held = document.get("holders", {}).get("held", [])
    if held:
        first = held[0]
        site = f", kept at {first['site']}" if first.get("site") else ""
        count = many(first["count"], "storage")
        return f"{first['text']} held {size(first['bytes'])} in {count}{site}"
    owners = document.get("ledger", {}).get("owners", [])
    if owners:
        first = owners[0]
        site = f", {first['site']}" if first.get("site") else ""
        count = many(first["leases"], "lease")
        return f"{first['kind']} '{first['name']}' held {size(first['bytes'])} in {count}{site}"
    return ""


def _shortage(told: Document) -> str:
    asked, free, over = told.get("asked"), told.get("free"), told.get("over")
    device = told.get("device", "cpu")
    if asked is None:
        return f" on {device}"
    text = f": it asked for {size(asked)} on {device}"
    if over is not None:
        return f"{text}, {size(over)} more than the {size(free or 0)} that {told['limit']} left"
    if free is not None:
        return f"{text}; {size(free)} of {told['limit']} was free, but not in one piece"
    return text
