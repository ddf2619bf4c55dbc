"""Refuses arguments that cannot mean anything, in one sentence, before C++ sees them."""

from __future__ import annotations

import operator

from tenure.errors import InputError

_INT64 = range(-(2**63), 2**63)


def need_text(value: object, what: str) -> None:
    """Raises InputError, naming `what`, unless it is text that C++ can take."""
    if not isinstance(value, str):
        raise InputError(f"{what} must be a str and is of type {type(value).__name__}")
    if value.isascii():
        return
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(
            f"{what} contains a lone surrogate, which is no character: use one printable line"
        ) from None


def need_count(value: object, what: str) -> None:
    """Raises InputError, naming `what`, unless it is None or an integer of 64 bits."""
    if value is not None and need_integer(value, what) not in _INT64:
        raise InputError(f"{what} does not fit into 64 bits: use one from -2**63 to 2**63 - 1")


def need_integer(value: object, what: str) -> int:
    """Raises InputError, naming `what`, unless it is an integer; numpy's are, too."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(f"{what} must be an int and is of type {type(value).__name__}") from None
