"""What a process has fetched and keeps until it is told to let go."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch


class Filling:
    """A fetch that is under way: what it adds stays its own if it is cleared meanwhile."""

    def __init__(self, buffer: Buffer) -> None:
        """Of one call of `Buffer.filling`."""
        self._buffer = buffer
        self._own: dict[Any, torch.Tensor] = {}
        self.cleared: set[Any] = set()
        self.all_cleared = False

    def __contains__(self, shard: Any) -> bool:
        """Whether it need not be fetched."""
        return self._buffer.take(shard, self._own)

    def __getitem__(self, shard: Any) -> torch.Tensor:
        """What was found or added."""
        return self._own[shard]

    def add(self, arrived: dict[Any, torch.Tensor]) -> None:
        """Keeps them for others, too, but for what was cleared since the fetch began."""
        self._own.update(arrived)
        self._buffer.keep(self, arrived)


class Buffer:
    """Tensors by the id of their shard. All methods from any thread."""

    def __init__(self) -> None:
        """Empty."""
        self._lock = threading.Lock()
        self._kept: dict[Any, torch.Tensor] = {}
        self._fillings: list[Filling] = []

    def __len__(self) -> int:
        """How many it keeps."""
        with self._lock:
            return len(self._kept)

    @contextlib.contextmanager
    def filling(self) -> Iterator[Filling]:
        """Around a fetch: a clearing that comes before its end wins."""
        filling = Filling(self)
        with self._lock:
            self._fillings.append(filling)
        try:
            yield filling
        finally:
            with self._lock:
                self._fillings.remove(filling)

    def take(self, shard: Any, into: dict[Any, torch.Tensor]) -> bool:
        """Puts what it keeps of the shard there. Returns whether it does."""
        with self._lock:
            if shard in self._kept:
                into[shard] = self._kept[shard]
                return True
            return False

    def keep(self, filling: Filling, arrived: dict[Any, torch.Tensor]) -> None:
        """Keeps what was not cleared while it was fetched."""
        with self._lock:
            if not filling.all_cleared:
                self._kept.update(
                    {shard: t for shard, t in arrived.items() if shard not in filling.cleared}
                )

    def drop(self, shards: Iterable[Any] | None) -> int:
        """Lets go of these, or of all. Returns how many there were."""
        with self._lock:
            for filling in self._fillings:
                filling.all_cleared |= shards is None
            if shards is None:
                found, self._kept = len(self._kept), {}
                return found
            shards = list(shards)
            for filling in self._fillings:
                filling.cleared.update(shards)
            return sum(self._kept.pop(shard, None) is not None for shard in shards)
