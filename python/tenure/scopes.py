"""Scopes: named stretches of the program, at whose end what was leased in them must be gone."""

from __future__ import annotations

import contextvars
import threading
import warnings
from typing import Literal, Self

import torch  # noqa: F401  the extension needs its libraries loaded

from tenure import _C, _inputs
from tenure.errors import ScopeError, ScopeWarning

__all__ = ["OnClose", "Scope", "scope"]

OnClose = Literal["report", "release", "raise"]

_current: contextvars.ContextVar[Scope | None] = contextvars.ContextVar(
    "tenure_scope", default=None
)
_C.set_scope_variable(_current)


class Scope(_C.ScopeBase):
    """One scope. Made by :func:`scope`; a `with` block opens and closes it.

    The current scope follows :mod:`contextvars`: each asyncio task has its own, and threads start
    without one. Where a task outlives the scope it was made in, the nearest scope around that is
    its own. A lease taken by autograd on one of its own threads belongs to the scope in which
    ``backward()`` was called.

    Attributes:
        report: After it closed, what was still leased in it; empty (false) if nothing was.
    """

    report: _C.ScopeReport | None

    def __init__(self, name: str, count: int | None, on_close: OnClose) -> None:
        """Use :func:`scope`."""
        super().__init__()
        self._name = name
        self._count = count
        self._on_close = on_close
        self.report = None

    @property
    def name(self) -> str:
        """Name and counter, as reports show them."""
        return self._name if self._count is None else f"{self._name} {self._count}"

    @property
    def id(self) -> int:
        """A number that no other scope has or will have. Raises ScopeError before it is opened."""
        if self._id is None:
            raise ScopeError(f"scope '{self.name}' was never opened: use it as a `with` block")
        return self._id

    def open(self) -> Self:
        """Opens it inside the current scope. A `with` block does this."""
        return self.__enter__()

    def close(self) -> _C.ScopeReport | None:
        """Closes it. A `with` block does this.

        Returns:
            What was still leased in it, as ``report``.

        Raises:
            ScopeError: It is not open, is not the innermost scope here, or was opened by another
                thread: then nothing changes. Or it closed, and leases were left in it under
                ``on_close="raise"``.
        """
        return self._closed(self._close(), stacklevel=3)

    def _checked(self) -> tuple[str, int | None, OnClose]:
        """What it is opened with."""
        if self._id is not None:
            raise ScopeError(
                f"scope '{self.name}' was opened before: make a new one with tenure.scope() "
                "each time"
            )
        _inputs.need_text(self._name, "scope name")
        _inputs.need_count(self._count, "scope counter")
        _inputs.need_text(self._on_close, "on_close")
        return self._name, self._count, self._on_close

    def _closed(self, report: _C.ScopeReport | None, stacklevel: int) -> _C.ScopeReport | None:
        """Says what there is to say of it; None is a forked child's."""
        if report is None:
            return None
        self.report = report
        if self._name == "step":
            tell_clock = _C.tell_clock_while_raising if report.raises else _C.tell_clock
            tell_clock(self._name, self._count)
        if report.raises:
            raise ScopeError(str(report))
        if report and not report.released:
            warnings.warn(str(report), ScopeWarning, stacklevel=stacklevel)
        return report

    def _unwound(self, report: _C.ScopeReport) -> None:
        """The same where an exception has ended it."""
        self.report = report
        if self._name == "step":
            _C.tell_clock_while_raising(self._name, self._count)

    def __reduce__(self) -> str:
        """Raises: it is a stretch of this process's time."""
        raise TypeError(f"scope '{self.name}' can be neither copied nor pickled: open another one")

    def __repr__(self) -> str:
        """Shows name and state."""
        state = "open" if self.is_open else "closed" if self._id is not None else "not opened"
        return f"<tenure.Scope '{self.name}', {state}>"


def _thread_text(ident: int) -> str:
    names = [thread.name for thread in threading.enumerate() if thread.ident == ident]
    return f"thread '{names[0]}'" if names else f"thread {ident}"


def scope(name: str, count: int | None = None, *, on_close: OnClose = "report") -> Scope:
    """A scope, to be used as a `with` block.

    A scope named ``step`` also advances Tenure's clock when it closes, unless it lies inside
    another one. See :func:`tenure.step` for who else does, and whose numbers count.

    Args:
        name: What it is: ``step``, ``microbatch``, ``eval``, or your own word. Kept forever, so
            put what changes into `count`.
        count: Which one it is.
        on_close: What closing does with leases that are still in it. ``report`` warns and moves
            them to the enclosing scope; ``release`` releases them; ``raise`` raises ScopeError, or
            releases them when the scope ends because of an exception. An exception also ends the
            scopes that are still open inside, innermost first.

    Example:
        >>> import tenure, torch
        >>> with tenure.scope("step", 12, on_close="release") as step:
        ...     lease = tenure.hold(torch.zeros(1024), "batch")
        ...     print(lease.scope)
        step 12
        >>> print(lease.held, step.report.leases, step.report.bytes)
        False 1 4096
    """
    return Scope(name, count, on_close)
