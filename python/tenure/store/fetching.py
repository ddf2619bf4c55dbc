"""Many handles in one fetch, and fetching beside an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from tenure.errors import InputError
from tenure.store import joining

if TYPE_CHECKING:
    from tenure import _C
    from tenure.store.handles import Handle

Wire: TypeAlias = Literal["tcp"]


def get_all(
    handles: Iterable[Handle],
    *,
    device: torch.device | str | None = None,
    readonly: bool = False,
    keep: bool = False,
    timeout: float | None = None,
    wire: Wire | None = None,
) -> list[torch.Tensor]:
    """Fetches many tensors: one request to each owner, all owners at once.

    All or nothing: the first that fails raises, as ``Handle.get`` would. See there for the
    arguments.

    >>> import tenure, torch
    >>> with tenure.store.scope("call") as scope:
    ...     handles = [scope.put(torch.tensor([float(i)])) for i in range(3)]
    ...     print(torch.cat(tenure.store.get_all(handles)))
    tensor([0., 1., 2.])
    """
    wanted = _listed(handles)
    return fetch(wanted, device=device, readonly=readonly, keep=keep, timeout=timeout, wire=wire)


async def get_all_async(
    handles: Iterable[Handle],
    *,
    device: torch.device | str | None = None,
    readonly: bool = False,
    keep: bool = False,
    timeout: float | None = None,
    wire: Wire | None = None,
) -> list[torch.Tensor]:
    """As ``get_all``, without holding up the event loop.

    One that is cancelled has fetched nothing: it is not the fetch that was expected.
    """
    wanted = _listed(handles)
    return await fetch_async(
        wanted, device=device, readonly=readonly, keep=keep, timeout=timeout, wire=wire
    )


def fetch(
    handles: Sequence[Handle], rows: slice | None = None, **options: Any
) -> list[torch.Tensor]:
    """As ``get_all``; `rows`, ``into`` and ``more`` as for ``Handle.get``."""
    return joining.current().get_all(**_request(handles, rows, **options))


async def fetch_async(
    handles: Sequence[Handle], rows: slice | None = None, **options: Any
) -> list[torch.Tensor]:
    """The same, in a thread: the wait is C++'s and holds no lock of Python's.

    A thread cannot be cancelled, and what comes of it when its task was cancelled is nobody's. So
    it is the task that says, without another wait, that it has the tensors.
    """

    def begin() -> _C.StoreFetch:
        return joining.current().fetch(**_request(handles, rows, **options))

    fetched = await asyncio.to_thread(begin)
    return fetched.accept()


def _request(
    handles: Sequence[Handle],
    rows: slice | None,
    *,
    into: Sequence[torch.Tensor] = (),
    device: torch.device | str | None = None,
    readonly: bool = False,
    more: bool = False,
    keep: bool = False,
    timeout: float | None = None,
    wire: Wire | None = None,
) -> dict[str, Any]:
    """What the store is asked, if it means something."""
    if wire not in (None, "tcp"):
        raise InputError(f"wire is None or 'tcp', not {wire!r}")
    for name, flag in ("readonly", readonly), ("more", more), ("keep", keep):
        if not isinstance(flag, bool):
            raise InputError(f"{name} is True or False, not of type {type(flag).__name__}")
    for target in into:
        if not isinstance(target, torch.Tensor):
            raise InputError(f"a target is a tensor, not of type {type(target).__name__}")
    return {
        "handles": [handle._handle for handle in handles],
        "rows": _rows(rows, handles),
        "into": list(into),
        "device": None if device is None else _device(device),
        "readonly": readonly,
        "more": more,
        "keep": keep,
        "tcp": wire == "tcp",
        "timeout_ms": None if timeout is None else joining.milliseconds(timeout, "the timeout"),
    }


def _device(named: torch.device | str) -> torch.device:
    try:
        device = torch.device(named)
    except (RuntimeError, TypeError):
        raise InputError(f"a device is 'cpu' or 'cuda:1', say, and not {named!r}") from None
    if device.type == "meta":
        raise InputError("the meta device has no memory to fetch into")
    return device


def free_handles(handles: Sequence[Handle]) -> tuple[int, list[tuple[str, str]]]:
    """How many were still there, and the owners that could not be asked with the reason."""
    freed, unreached = joining.current().free([handle._handle for handle in handles])
    return freed, [(f"{role} {rank}", why) for (role, rank, _), why, _ in unreached]


def _listed(handles: object) -> list[Handle]:
    from tenure.store.handles import Handle

    if not isinstance(handles, Iterable):
        raise InputError(f"handles are a list, not of type {type(handles).__name__}")
    listed = list(handles)
    for handle in listed:
        if not isinstance(handle, Handle):
            raise InputError(f"a tenure.store.Handle is wanted, not a {type(handle).__name__}")
    return listed


def _rows(rows: slice | None, handles: Sequence[Handle]) -> tuple[int, int | None]:
    """First and number, as Python understands a slice of that length."""
    if rows is None:
        return 0, None
    [handle] = handles
    if not isinstance(rows, slice):
        raise InputError(f"rows are a slice, not of type {type(rows).__name__}")
    if not handle.shape:
        raise InputError(f"{handle} has no rows: it is a single number")
    start, stop, step = rows.indices(handle.shape[0])
    if step != 1:
        raise InputError(f"rows must follow each other, and the slice has a step of {step}")
    return start, max(0, stop - start)
