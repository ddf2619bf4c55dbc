"""Where ranks that something else has started meet before they begin: all of them, or none."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta

import typer
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import DistError
from torch.distributed.rendezvous import rendezvous

from tenure.errors import CollectiveError, InputError
from tenure.training.flags import Flags
from tenure.training.planning import World

__all__ = ["Meeting", "store_of"]

_TIMEOUT = 300.0
_DAY = 86_400.0
_HEARD = timedelta(seconds=5)  # in which others have read why nobody begins


def store_of(world: World, timeout: timedelta) -> Store:
    """Of all ranks. One attempt of elastic ranks does not see what an earlier one left in it."""
    if world.ranks == 1:
        return HashStore()
    shared, _, _ = next(rendezvous("env://", world.rank, world.ranks, timeout=timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"tenure.train/{attempt}", shared)


class Meeting:
    """Of ranks that a launcher has started, each with flags of its own.

    Attributes:
        store: Of all ranks, once they have met.
    """

    def __init__(self, world: World | None, flags: Flags) -> None:
        """Waits for nobody. Without others, or where to find them, there is nothing to wait for."""
        self.store: Store | None = None
        self._world = world
        self._flags = flags
        seconds = flags.timeout if 0 < flags.timeout <= _DAY else _TIMEOUT
        self._timeout = timedelta(seconds=seconds)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """What is done in it is done by all ranks, or they end with the same InputError.

        The first rank of each machine says it; the others end with its exit status.

        Raises:
            InputError: This rank's own, that of another one, or the ranks have other flags.
            CollectiveError: A rank did not come.
        """
        own: InputError | None = None
        try:
            yield
        except InputError as error:
            own = error
        told = str(own) if own is not None else ""
        if self._meets():
            told = self._exchanged(what, told)
        if not told:
            return
        if self._world is not None and self._world.local_rank != 0:
            raise typer.Exit(2)
        raise InputError(told)

    def _meets(self) -> bool:
        is_one = self._world is None or self._world.ranks == 1
        return not is_one and bool(os.environ.get("MASTER_ADDR"))

    def _exchanged(self, what: str, error: str) -> str:
        """Why no rank goes on; empty: all do. The same on all ranks."""
        assert self._world is not None
        seconds = self._timeout.total_seconds()
        try:
            if self.store is None:
                self.store = store_of(self._world, self._timeout)
                self.store.set_timeout(self._timeout)
            mine = json.dumps({"flags": asdict(self._flags), "error": error})
            self.store.set(f"{what}/{self._world.rank}", mine)
            return self._judged(what) if self._world.rank == 0 else self._heard(what)
        except (DistError, ValueError) as failed:  # the latter for an address that is none
            raise CollectiveError(
                f"rank {self._world.rank} has not heard from the others within {seconds:.0f} s: "
                f"{str(failed).splitlines()[0]}"
            ) from failed

    def _heard(self, what: str) -> str:
        assert self.store is not None
        assert self._world is not None
        told = self.store.get(f"{what}/told").decode()
        self.store.set(f"{what}/heard/{self._world.rank}", "")
        return told

    def _judged(self, what: str) -> str:
        """On rank 0, which tells the others."""
        assert self.store is not None
        assert self._world is not None
        said = [json.loads(self._said(what, rank)) for rank in range(self._world.ranks)]
        told = _difference([one["flags"] for one in said]) or _first_error(said)
        self.store.set(f"{what}/told", told)
        if told:  # the store may end with this process
            with suppress(DistError):
                keys = [f"{what}/heard/{rank}" for rank in range(1, self._world.ranks)]
                self.store.wait(keys, _HEARD)
        return told

    def _said(self, what: str, rank: int) -> bytes:
        assert self.store is not None
        try:
            return self.store.get(f"{what}/{rank}")
        except DistError:
            raise CollectiveError(
                f"rank {rank} did not begin within {self._timeout.total_seconds():.0f} s"
            ) from None


def _first_error(said: Sequence[Mapping[str, str]]) -> str:
    for rank, one in enumerate(said):
        if one["error"]:
            return one["error"] if rank == 0 else f"rank {rank}: {one['error']}"
    return ""


def _difference(said: Sequence[Mapping[str, object]]) -> str:
    """The flags in which the first rank that is not as rank 0 is not, in a sentence."""
    others = [rank for rank, flags in enumerate(said) if flags != said[0]]
    if not others:
        return ""
    mine, theirs = said[others[0]], said[0]
    names = [name for name in theirs if mine[name] != theirs[name]]
    more = f" ({len(others) - 1} more have others, too)" if len(others) > 1 else ""
    return (
        f"rank {others[0]} was given {_as_typed(mine, names)}, and rank 0 "
        f"{_as_typed(theirs, names)}{more}: give all ranks the same flags"
    )


def _as_typed(flags: Mapping[str, object], names: Sequence[str]) -> str:
    return " ".join(_flag(name, flags[name]) for name in names)


def _flag(name: str, value: object) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    if value is None or value == "":
        return f"no --{flag}"
    return f"--{flag} {shlex.quote(str(value))}"
