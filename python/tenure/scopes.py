"""Scopes: named stretches of the program, at whose end what was leased in them must be gone."""

from __future__ import annotations

import contextvars
import warnings
from types import TracebackType
from typing import Literal, Self

import torch  # noqa: F401  the extension needs its libraries loaded

from tenure import _C
from tenure.errors import ScopeError, ScopeWarning

__all__ = ["OnClose", "Scope", "scope"]

OnClose = Literal["report", "release", "raise"]

_PROCESS = 0
_current: contextvars.ContextVar[int] = contextvars.ContextVar("tenure_scope", default=_PROCESS)
_C.set_scope_variable(_current)


class Scope:
    """One scope. Made by :func:`scope`; a `with` block opens and closes it.

    The current scope follows :mod:`contextvars`: each asyncio task has its own, and threads start
    without one. A lease taken by autograd on one of its own threads belongs to the scope in which
    ``backward()`` was called.

    Attributes:
        report: After it closed, what was still leased in it; empty (false) if nothing was.
    """

    report: _C.ScopeReport | None

    def __init__(self, name: str, count: int | None, on_close: OnClose) -> None:
        """Use :func:`scope`."""
        self._name = name
        self._count = count
        self._on_close = on_close
        self._id: int | None = None
        self._outer = _PROCESS
        self._process = 0
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

    @property
    def is_open(self) -> bool:
        """Whether leases can be taken in it."""
        return self._id is not None and _C.scope_is_open(self._id)

    def open(self) -> Self:
        """Opens it inside the current scope. A `with` block does this."""
        if self._id is not None:
            raise ScopeError(
                f"scope '{self.name}' was opened before: make a new one with tenure.scope() "
                "each time"
            )
        self._id = _C.open_scope(self._name, self._count, self._on_close)
        self._process = _C.fork_generation()
        self._outer = _current.get()
        _current.set(self._id)
        _C.scope_changed()
        return self

    def close(self) -> _C.ScopeReport | None:
        """Closes it. A `with` block does this.

        Returns:
            What was still leased in it, as ``report``.

        Raises:
            ScopeError: It is not open, is not the innermost scope here, or was opened by another
                thread: then nothing changes. Or it closed, and leases were left in it under
                ``on_close="raise"``.
        """
        return self._close(exception=False, stacklevel=3)

    def _close(self, *, exception: bool, stacklevel: int) -> _C.ScopeReport | None:
        if self._id is not None and self._process != _C.fork_generation():
            _current.set(_PROCESS)  # a forked child: the scope and its leases are the parent's
            return None
        if self.is_open and _current.get() != self._id:
            raise ScopeError(
                f"scope '{self.name}' is not the innermost scope here, "
                f"'{_C.scope_path(_current.get())}' is: close scopes where they were opened and in "
                "reverse order, as `with` blocks do"
            )
        self.report = _C.close_scope(self.id, exception)
        _current.set(self._outer)
        _C.scope_changed()
        if self._name == "step":
            _C.tell_clock(self._name, self._count)
        if self.report.raises:
            raise ScopeError(str(self.report))
        if self.report and not self.report.released and not exception:
            warnings.warn(str(self.report), ScopeWarning, stacklevel=stacklevel)
        return self.report

    def __enter__(self) -> Self:
        """Opens it."""
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes it. When an exception ends it, nothing is raised or warned about on top."""
        self._close(exception=error is not None, stacklevel=3)

    def __repr__(self) -> str:
        """Shows name and state."""
        state = "open" if self.is_open else "closed" if self._id is not None else "not opened"
        return f"<tenure.Scope '{self.name}', {state}>"


def scope(name: str, count: int | None = None, *, on_close: OnClose = "report") -> Scope:
    """A scope, to be used as a `with` block.

    A scope named ``step`` also advances Tenure's clock when it closes.

    Args:
        name: What it is: ``step``, ``microbatch``, ``eval``, or your own word. Kept forever, so
            put what changes into `count`.
        count: Which one it is.
        on_close: What closing does with leases that are still in it. ``report`` warns and moves
            them to the enclosing scope; ``release`` releases them; ``raise`` raises ScopeError, or
            releases them when the scope ends because of an exception.

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
