"""Offload: what autograd saves rests on the host until backward asks for it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from typing import Literal, Self

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tenure import _C
from tenure._C import OffloadStats
from tenure._inputs import need_size
from tenure.errors import InputError

__all__ = ["Offload", "OffloadStats"]

Streams = Literal[0, 1, 2]
HostFull = Literal["keep", "raise"]


class Entered:
    """What Offload and Fit share: a session, entered every step around forward and backward."""

    def __init__(self, models: tuple[nn.Module, ...], session: _C.OffloadSession) -> None:
        _need_modules(models, type(self).__name__)
        self._models = models
        self._session = session
        self._hooks: saved_tensors_hooks | None = None
        self._seen: list[weakref.ref[torch.Tensor]] = []

    def __enter__(self) -> Self:
        """Begins a step."""
        self._session.never(self._state())
        self._session.begin()
        hooks = saved_tensors_hooks(self._session.pack, _C.OffloadSession.unpack)
        try:
            hooks.__enter__()
        except BaseException:
            self._session.abandon()
            raise
        self._hooks = hooks
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Ends it; one that an exception ended teaches nothing."""
        if self._hooks is None:
            return
        self._hooks.__exit__(None, None, None)
        self._hooks = None
        if error is None:
            self._session.end()
        else:
            self._session.abandon()
        self._look()

    def _state(self) -> list[torch.Tensor]:
        """Parameters and buffers, as they were when the last step ended, if they all live."""
        found = [tensor for ref in self._seen if (tensor := ref()) is not None]
        return found if found and len(found) == len(self._seen) else self._look()

    # To go through a model takes a millisecond. When a step ends the device still computes; when
    # one begins it would wait.
    def _look(self) -> list[torch.Tensor]:
        found = list(_state_of(self._models))
        self._seen = [weakref.ref(tensor) for tensor in found]
        return found

    def stats(self) -> OffloadStats:
        """What the last whole step did."""
        return self._session.stats()

    def settle(self) -> None:
        """Lets go what has been copied to the host by now.

        A thread does the same about every millisecond; call it to look at the device's memory at an
        exact moment.
        """
        self._session.settle()


class Offload(Entered):
    """Moves the activations that autograd saves to host memory, and back for backward.

    Enter it around forward and backward, every step; make it once. All that is saved of one
    storage, whatever views of it, has one copy on the host, and the device's memory returns to the
    allocator when that copy is done. The first steps are measured; from then on copies run ahead
    of need, on streams of their own, and nothing waits for the device.

    Args:
        models: Whose parameters and buffers stay where they are.
        budget: The most that the device may have allocated at once between enter and exit, by
            everything in the process: ``"8GiB"`` or a number of bytes. Only what must go goes then.
            None moves all that can.
        target: ``"host"``: pinned memory, for tensors on the accelerator; does nothing, and says so
            once, where there is none. ``"copy"``: tensors on the CPU to other memory of the CPU, to
            try and test without an accelerator. ``"disk:FOLDER"``: files in that folder.
        host_limit: The most host memory to take.
        host_full: What happens then: ``"keep"`` the rest on the device, or ``"raise"``.
        streams: How many streams copies have for themselves: 2, one each way; 1; or 0, then they
            run between the kernels of the step.
        min_bytes: Smaller storages stay. None: derived from what a copy costs.

    Raises:
        BudgetError: On leaving a measured step that shows that the budget cannot be met; it says
            what the least is.
        InputError: For arguments that mean nothing, and when entered twice.

    Example:
        >>> import tenure, torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
        >>> offload = tenure.Offload(net, target="copy")
        >>> for _ in range(3):
        ...     with offload:
        ...         net(torch.ones(256, 64)).sum().backward()
        >>> offload.stats().moved_out_bytes > 0
        True
    """

    def __init__(
        self,
        *models: nn.Module,
        budget: int | str | None = None,
        target: str = "host",
        host_limit: int | str | None = None,
        host_full: HostFull = "raise",
        streams: Streams = 2,
        min_bytes: int | str | None = None,
    ) -> None:
        """Makes one; nothing happens before it is entered."""
        if host_full not in ("keep", "raise"):
            raise InputError(f'host_full is "keep" or "raise", not {host_full!r}')
        if isinstance(streams, float | bool) or streams not in (0, 1, 2):
            raise InputError(f"streams is 0, 1 or 2, not {streams!r}")
        kind, folder = _target(target)
        session = _C.OffloadSession(
            target=kind,
            folder=folder,
            budget=None if budget is None else need_size(budget, "budget"),
            host_limit=None if host_limit is None else need_size(host_limit, "host_limit"),
            raise_when_full=host_full == "raise",
            streams=streams,
            min_bytes=None if min_bytes is None else need_size(min_bytes, "min_bytes"),
        )
        super().__init__(models, session)
        self._idle = kind == "host" and not torch.accelerator.is_available()

    def __enter__(self) -> Self:
        """Begins a step."""
        if self._idle:
            _say_idle()
            return self
        return super().__enter__()

    def __str__(self) -> str:
        """What the last whole step did, for a person."""
        return str(self.stats())


def _need_modules(given: tuple[object, ...], taker: str) -> None:
    for model in given:
        if not isinstance(model, nn.Module):
            raise InputError(f"{taker}() takes modules and got {type(model).__name__}")


def _target(target: str) -> tuple[str, str]:
    if target in ("host", "copy"):
        return target, ""
    kind, _, folder = target.partition(":") if isinstance(target, str) else ("", "", "")
    if kind == "disk" and folder:
        return kind, folder
    raise InputError(f'target is "host", "copy" or "disk:FOLDER", not {target!r}')


def _state_of(models: tuple[nn.Module, ...]) -> Iterator[torch.Tensor]:
    for model in models:
        yield from model.parameters()
        yield from model.buffers()


_said_idle = False


def _say_idle() -> None:
    global _said_idle
    if not _said_idle:
        _said_idle = True
        warnings.warn(
            "tenure.Offload does nothing here: there is no accelerator. "
            'Give target="copy" to try it on the CPU.',
            stacklevel=3,
        )
