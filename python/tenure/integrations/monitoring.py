"""What a trainer's callback asks of a monitor."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tenure.errors import InputError

__all__ = ["Monitored", "need_monitor"]


@runtime_checkable
class Monitored(Protocol):
    """A `tenure.Monitor`, or what stands for one."""

    def step(self) -> object:
        """A step has ended."""
        ...

    def failed(self, error: BaseException) -> object:
        """Training ends by an error."""
        ...

    def close(self) -> object:
        """Training has ended."""
        ...


def need_monitor(monitor: object) -> None:
    """Raises InputError unless it has what a callback calls."""
    if isinstance(monitor, type) or not isinstance(monitor, Monitored):
        raise InputError(
            f"monitor_callback() takes a tenure.Monitor and not {type(monitor).__name__!r}"
        )
