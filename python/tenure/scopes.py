"""Scopes: named stretches of the program, at whose end what was leased in them must be gone."""

from __future__ import annotations

import contextvars
import threading
import warnings
from types import TracebackType
from typing import Literal, Self

import torch  # noqa: F401  the extension needs its libraries loaded

from tenure import _C
from tenure._inputs import need_count, need_text
from tenure.errors import ScopeError, ScopeWarning

__all__ = ["OnClose", "Scope", "scope"]

OnClose = Literal["report", "release", "raise"]

_PROCESS = 0
_current: contextvars.ContextVar[int] = contextvars.ContextVar("tenure_scope", default=_PROCESS)
_C.set_scope_variable(_current)
_open: dict[int, Scope] = {}


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
        self._thread = 0
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
        need_text(self._name, "scope name")
        need_count(self._count, "scope counter")
        need_text(self._on_close, "on_close")
        self._id = _C.open_scope(self._name, self._count, self._on_close)
        self._process = _C.fork_generation()
        self._thread = threading.get_ident()
        self._outer = _current.get()
        _open[self._id] = self
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
        return self._close(stacklevel=3)

    def _close(self, *, stacklevel: int) -> _C.ScopeReport | None:
        if self._is_of_the_parent_process():
            return None
        if self.is_open:
            self._require_own_thread()
            self._require_innermost()
        report = self._end(exception=False)
        if report and not report.released:
            warnings.warn(str(report), ScopeWarning, stacklevel=stacklevel)
        return report

    def _unwind(self) -> None:
        """Closes it because of an exception, after what was left open inside it in this context."""
        if self._is_of_the_parent_process() or not self.is_open:
            return
        self._require_own_thread()
        for inner in self._left_open_inside():
            inner._end(exception=True)
        self._require_innermost()
        self._end(exception=True)

    def _end(self, *, exception: bool) -> _C.ScopeReport:
        self.report = _C.close_scope(self.id, exception)
        _open.pop(self.id, None)
        _current.set(self._outer)
        _C.scope_changed()
        if self._name == "step":
            alone = not exception and not self.report.raises
            tell_clock = _C.tell_clock if alone else _C.tell_clock_while_raising
            tell_clock(self._name, self._count)
        if self.report.raises:
            raise ScopeError(str(self.report))
        return self.report

    def _is_of_the_parent_process(self) -> bool:
        if self._id is None or self._process == _C.fork_generation():
            return False
        _current.set(_PROCESS)  # a forked child: the scope and its leases are the parent's
        return True

    def _require_own_thread(self) -> None:
        here = threading.get_ident()
        if here != self._thread:
            raise ScopeError(
                f"scope '{self.name}' was opened by {_thread_text(self._thread)} and "
                f"{_thread_text(here)} tried to close it: close it where it was opened"
            )

    def _require_innermost(self) -> None:
        if _current.get() != self._id:
            raise ScopeError(
                f"scope '{self.name}' is not the innermost scope here, "
                f"'{_C.scope_path(_current.get())}' is: close scopes where they were opened and in "
                "reverse order, as `with` blocks do"
            )

    def _left_open_inside(self) -> list[Scope]:
        """The scopes between this one and the current one, innermost first."""
        inside: list[Scope] = []
        at = _current.get()
        while at != self._id:
            if at not in _open:
                return []  # the current scope lies elsewhere
            inside.append(_open[at])
            at = inside[-1]._outer
        return inside

    def __enter__(self) -> Self:
        """Opens it."""
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes it. When an exception ends it, nothing is raised or warned about on top.

        Scopes that were opened inside it and are still open end with it then, innermost first.
        Where it cannot be closed, the exception gets a note that says why.
        """
        if error is None:
            self._close(stacklevel=3)
            return
        try:
            self._unwind()
        except ScopeError as refused:
            if isinstance(error, GeneratorExit):
                raise  # nothing failed before this, and nobody would see a note
            error.add_note(f"tenure: {refused}")

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
