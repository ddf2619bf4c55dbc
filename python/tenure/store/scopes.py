"""Scopes own what is put in them."""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn.parameter import is_lazy

from tenure import _C
from tenure._inputs import need_integer, need_text
from tenure._site import caller_outside
from tenure.errors import InputError, ScopeError, ScopeWarning, TenureError
from tenure.store import collectors as who
from tenure.store import joining, trees
from tenure.store.accounts import Closed, closed_of
from tenure.store.handles import Handle
from tenure.store.keeper import give

if TYPE_CHECKING:
    from tenure.store.collectors import Collectors

T = TypeVar("T")

_numbers = itertools.count()
_closed_here: OrderedDict[tuple[str, str, int], None] = OrderedDict()
_MOST_REMEMBERED = 65_536


class Scope:
    """Owns the objects that are put in it, in this process and in all that name it alike.

    Leaving the ``with`` block closes it, also by an exception: what this process put in it is
    freed, those who keep tensors of it here or elsewhere are told, and what is put in it later
    (a call that was still on its way) is not stored. See ``tenure.store.scope``.
    """

    def __init__(self, kind: str, key: int | str | None, sources: Iterable[int] | None) -> None:
        """See ``tenure.store.scope``."""
        need_text(kind, "a scope's kind")
        self._joined = weakref.ref(joining.current())  # a scope does not keep a store from ending
        if key is None:
            key = f"{self._store.owner[2]:x}-{next(_numbers)}"  # numbers are remembered as runs
        self.kind = kind
        self.key = _key_text(key)
        self._sources = _ranks(sources)
        self._closed: Closed | None = None
        self._closing = threading.RLock()  # a thread that closes, too, waits for the books
        if (*self._name(), self._store.owner[2]) in _closed_here:
            raise InputError(
                f"the scope {self} was closed by this process: give another key, or none for a "
                "new one each time"
            )

    @property
    def _store(self) -> _C.Store:
        store = self._joined()
        if store is None:
            raise InputError(f"the store that the scope {self} was opened in has been left")
        return store

    def _name(self) -> tuple[str, str]:
        return self.kind, self.key

    def __str__(self) -> str:
        """``step 168``."""
        return f"{self.kind} {self.key}"

    def __repr__(self) -> str:
        """Its name, and whether it is closed."""
        return f"<tenure.store.Scope: {self}{'' if self._closed is None else ' (closed)'}>"

    @property
    def account(self) -> Closed:
        """What was stored in it here and what became of it: so far, or when it closed.

        What was dropped after that, and who still has something of it mapped here, is as of now.
        """
        if self._closed is not None and self._joined() is None:
            return self._closed
        store = self._store
        now = closed_of(str(self), store.owner, store.account(*self._name()))
        return now if self._closed is None else self._closed.since(now)

    def put(
        self,
        tensor: torch.Tensor,
        *,
        collectors: Collectors = None,
        sources: Iterable[int] | None = None,
        keeper: bool = False,
    ) -> Handle:
        """Stores the tensor as it is now, and says by whom it may be fetched.

        Args:
            tensor: Of any device and strides. Later writes to it change nothing that is stored.
            collectors: None: any process of the job, until the scope closes. Otherwise the fetches
                that are expected, after the last of which the object goes: a number of them, or one
                each by a rank (``3``), by any of a role (``"trainer"``) or by one of it
                (``"trainer:3"``). An empty list: nobody, and nothing is stored.
            sources: The ranks whose results are wanted, of those that put them; by default those of
                the scope. In other ranks nothing is stored, and the handle says so.
            keeper: Give it to the host's keeper (``tenure store serve``), so that it is there when
                this process has ended.

        Raises:
            InputError: A tensor without bytes (sparse, meta), collectors that cannot be any.
            BudgetError: There is no room for it.
            OwnerLost: There is no keeper.
        """
        site = caller_outside()
        if not keeper or self._is_no_source(sources):
            return self._put(tensor, collectors, sources, ("", None), site)
        _need_tensor(tensor)

        def put_for_keeper(listed: who.Listed | None, count: int | None) -> _C.StoreHandle:
            return self._store.put(*self._name(), tensor, listed, count, "", None, site)

        kept = give(self._store, put_for_keeper, collectors, site)
        try:
            return self.adopt(kept)
        except InputError:  # closed meanwhile: it comes too late, as any other put
            kept.free()
            return self._put(tensor, collectors, sources, ("", None), site)

    def _put(
        self,
        tensor: torch.Tensor,
        collectors: Collectors,
        sources: Iterable[int] | None,
        call: tuple[str, int | None],
        site: str,
    ) -> Handle:
        _need_tensor(tensor)
        listed, count = who.parse(collectors)
        if why := self._is_no_source(sources):
            return Handle(self._store.unstored(*self._name(), tensor, why))
        handle = Handle(self._store.put(*self._name(), tensor, listed, count, *call, site))
        if self._closed is None or not handle.stored:
            return handle
        # Closed so long ago that the store knows it no longer: nobody would close it again.
        handle.free()
        why = f"{self} was closed by this process"
        return Handle(self._store.unstored(*self._name(), tensor, why))

    def _is_no_source(self, sources: Iterable[int] | None) -> str:
        """Why nothing that this process puts is wanted. Empty: it is."""
        wanted = self._sources if sources is None else _ranks(sources)
        _, rank, _ = self._store.owner
        if wanted is None or rank in wanted:
            return ""
        which = ", ".join(map(str, sorted(wanted))) or "none"
        return f"rank {rank} is not one of the sources ({which})"

    def call(self, key: int | str) -> Call:
        """A call that puts results: a retry under the same key replaces what it put before.

        >>> import tenure, torch
        >>> with tenure.store.scope("step") as step:
        ...     for attempt in range(2):
        ...         with step.call("compute_logp-17") as call:
        ...             handle = call.put(torch.ones(3))
        ...     print(step.account.live)
        1
        """
        return Call(self, _key_text(key))

    def adopt(self, tree: T) -> T:
        """Closing the scope will free these handles, too, at their owners. Returns the tree."""
        handles = trees.handles_in(tree)
        with self._closing:
            if self._closed is not None:
                raise InputError(f"the scope {self} is closed and can adopt nothing: use free()")
            self._store.adopt(*self._name(), [handle._handle for handle in handles])
        return tree

    def close(self) -> Closed:
        """Frees what it owns, and returns the books. Again: what they were.

        Raises:
            ScopeError: The books do not balance: stored is not freed plus live. Names the process,
                the call and the line.
        """
        with self._closing:
            return self._close() if self._closed is None else self._closed

    def _close(self) -> Closed:
        if self._joined() is None:  # with which all went that it owned
            self._closed = Closed(scope=str(self))
            return self._closed
        store = self._store
        self._closed = closed_of(str(self), store.owner, store.close(*self._name()))
        _closed_here[(*self._name(), store.owner[2])] = None
        if len(_closed_here) > _MOST_REMEMBERED:
            _closed_here.popitem(last=False)
        if self._closed.unreached:
            warnings.warn(
                f"the scope {self} is closed, but not at {', '.join(self._closed.unreached)}",
                ScopeWarning,
                stacklevel=4,
            )
        if self._closed.difference:
            raise ScopeError(f"the books of the scope {self} are wrong: {self._closed.difference}")
        return self._closed

    def __enter__(self) -> Scope:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes it."""
        if error is None:
            self.close()
            return
        try:
            self.close()
        except TenureError as second:  # the first one is what the user must see
            error.add_note(f"and the scope {self} could not be closed: {second}")


class Call:
    """A call within a scope. An exception that leaves it frees what it put."""

    def __init__(self, scope: Scope, key: str) -> None:
        """See ``Scope.call``."""
        self._scope = scope
        self.key = key
        self._attempt = scope._store.begin_call(*scope._name(), key)

    def put(
        self,
        tensor: torch.Tensor,
        *,
        collectors: Collectors = None,
        sources: Iterable[int] | None = None,
    ) -> Handle:
        """As ``Scope.put``."""
        call = self.key, self._attempt
        return self._scope._put(tensor, collectors, sources, call, caller_outside())

    def fail(self) -> None:
        """Frees what it put."""
        self._scope._store.fail_call(*self._scope._name(), self.key, self._attempt)

    def __enter__(self) -> Call:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Frees what it put, after an exception."""
        if error is not None:
            self.fail()


def scope(
    kind: str, key: int | str | None = None, *, sources: Iterable[int] | None = None
) -> Scope:
    """A scope that owns what is put in it, for a ``with`` block.

    Args:
        kind: What ends when it closes: ``"step"``, ``"eval"``, ``"call"``, or a name of one's own.
        key: Which one. The same kind and key mean the same scope in every process of the job, and a
            scope closes once. None: a new one, of this process alone.
        sources: The ranks whose results are wanted, for all that is put in it.

    >>> import tenure, torch
    >>> with tenure.store.scope("step", 168, sources=[1]) as step:  # this is rank 0
    ...     handle = step.put(torch.ones(1000), collectors=[0, 4])
    >>> handle.stored, handle.why
    (False, 'rank 0 is not one of the sources (1)')
    """
    return Scope(kind, key, sources)


def close(kind: str, key: int | str) -> Closed:
    """Closes a scope by its name, from wherever one is: see ``Scope.close``."""
    if key is None:
        raise InputError("a scope that is closed by its name has a key")
    return Scope(kind, key, None).close()


def _key_text(key: Any) -> str:
    if isinstance(key, str):
        need_text(key, "a key")
        return key
    return str(need_integer(key, "a key"))


def _need_tensor(tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"a tensor is stored, not a {type(tensor).__name__}: see put_tree")
    if is_lazy(tensor):
        raise InputError("this parameter cannot be stored: it has no data until its module runs")


def _ranks(sources: object) -> frozenset[int] | None:
    if sources is None:
        return None
    if isinstance(sources, str) or not isinstance(sources, Iterable):
        raise InputError("sources are ranks: give a list of them, or None for all")
    return frozenset(need_integer(rank, "a source") for rank in sources)
