"""Refuses arguments that cannot mean anything, in one sentence, before C++ sees them."""

from __future__ import annotations

import operator

from tenure.errors import InputError

_UNITS = {
    "": 1,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "t": 1e12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
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


def parse_bytes(text: str) -> int:
    """``12GiB``, ``500 MB`` or plain bytes; raises InputError with a sentence."""
    cleaned = text.strip().lower().removesuffix("b").strip()
    number = cleaned.rstrip("kmgti ")
    unit = cleaned[len(number) :].strip()
    try:
        size = int(float(number) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        size = -1
    if size < 0:
        raise InputError(f"'{text}' is no number of bytes: write 12GiB, 500MB or 1048576")
    return size


def need_size(value: object, what: str) -> int:
    """Bytes from a number or from ``12GiB``; raises InputError, naming `what`."""
    if isinstance(value, bool):
        raise InputError(f"{what} is a number of bytes, not {value}")
    size = parse_bytes(value) if isinstance(value, str) else need_integer(value, what)
    if size <= 0:
        raise InputError(f"{what} must be more than 0 bytes and is {value!r}")
    if size >= 2**63:
        raise InputError(f"{what} must be less than 2**63 bytes and is {value!r}")
    return size
