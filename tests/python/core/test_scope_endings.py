"""Scopes that end at a bad moment: interrupted, from another task, with others open inside."""

from __future__ import annotations

import asyncio
import copy
import pickle
import random
import signal
from collections.abc import AsyncIterator, Iterator
from types import FrameType

import pytest
import torch

import tenure
from probes import current_scope


class Interrupted(Exception):  # noqa: N818  as KeyboardInterrupt
    pass


@pytest.fixture
def interrupts() -> Iterator[list[bool]]:
    """Alarms raise Interrupted in whatever runs, while its element is true."""
    armed = [False]

    def handler(_: int, __: FrameType | None) -> None:
        if armed[0]:
            raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    yield armed
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_an_interrupt_in_the_middle_of_a_close(interrupts: list[bool]) -> None:
    """A handler runs when the call that closes is done, which takes longest where it is needed."""
    with (
        pytest.raises(Interrupted) as raised,
        tenure.scope("epoch", 1, on_close="release") as epoch,
    ):
        kept = tenure.hold(torch.zeros(4), "epoch's")
        with tenure.scope("step", 1, on_close="release") as step:
            leases = [tenure.hold(torch.empty(1), "step's") for _ in range(50_000)]
            interrupts[0] = True
            signal.setitimer(signal.ITIMER_REAL, 0.002)
        while True:  # had it not come yet
            pass
    interrupts[0] = False
    assert getattr(raised.value, "__notes__", []) == []
    assert (epoch.is_open, step.is_open, kept.held, leases[-1].held) == (False,) * 4
    assert current_scope() == "process"


def test_interrupts_anywhere(interrupts: list[bool]) -> None:
    chance = random.Random(1)
    x = torch.zeros(4)
    for number in range(500):
        outer = tenure.scope("outer", number, on_close="release")
        with pytest.raises(Interrupted), outer:
            kept = tenure.hold(x, "outer's")
            try:
                interrupts[0] = True
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 4e-4))
                while True:
                    with tenure.scope("middle"), tenure.scope("inner", on_close="release"):
                        tenure.hold(x, "inner's").release()
            finally:
                interrupts[0] = False
        assert (outer.is_open, kept.held, current_scope()) == (False, False, "process")
    assert tenure.ledger().leases == 0


async def batches() -> AsyncIterator[int]:
    with tenure.scope("loader"):
        for number in range(3):
            yield number


def test_an_async_generator_that_is_left_early() -> None:
    """asyncio ends it in a task of its own, whose context is not the one it was opened in."""

    async def train() -> list[str]:
        seen = []
        with tenure.scope("epoch", 1, on_close="release"):
            async for _ in batches():
                seen.append(current_scope())
                break
            await asyncio.sleep(0.01)
            seen.append(current_scope())
            lease = tenure.hold(torch.zeros(4), "epoch's")
        assert not lease.held
        return [*seen, current_scope()]

    assert asyncio.run(train()) == ["epoch 1 / loader", "epoch 1", "process"]


def test_a_task_outlives_the_scope_it_was_made_in() -> None:
    async def prefetch() -> tenure.Lease:
        await asyncio.sleep(0.01)
        return tenure.hold(torch.zeros(4), "prefetched")

    async def train() -> None:
        with tenure.scope("epoch", 1, on_close="release"):
            with tenure.scope("step", 1):
                task = asyncio.create_task(prefetch())
            lease = await task
            assert lease.scope == "epoch 1"
        assert not lease.held

    asyncio.run(train())


def test_a_scope_that_another_thread_left_open_moves_up() -> None:
    """Nobody can close it any more, and what failed must end."""
    opened: list[tenure.Scope] = []

    async def train() -> None:
        with tenure.scope("epoch", 1, on_close="release"):
            await asyncio.to_thread(lambda: opened.append(tenure.scope("worker").open()))
            held.append(tenure.hold(torch.zeros(4), "epoch's"))
            held.append(tenure.hold(torch.zeros(4), "worker's", scope=opened[0]))
            raise KeyError

    held: list[tenure.Lease] = []
    with pytest.raises(KeyError), tenure.scope("job") as job:
        with pytest.raises(KeyError) as raised:
            asyncio.run(train())
        assert getattr(raised.value, "__notes__", []) == []
        assert [lease.held for lease in held] == [False, True]
        assert (held[1].scope, current_scope()) == ("job / worker", "job")
        with pytest.raises(tenure.ScopeError, match="still has 1 open scope inside it"):
            job.close()
        raise KeyError
    assert (job.is_open, held[1].scope) == (False, "worker")
    held[1].release()


def test_a_generator_that_is_closed_leaves_another_ones_scope_alone() -> None:
    def stream(name: str) -> Iterator[tenure.Lease]:
        with tenure.scope(name, on_close="release"):
            lease = tenure.hold(torch.zeros(4), name)
            while True:
                yield lease

    first, second = stream("first"), stream("second")
    one, other = next(first), next(second)
    with pytest.raises(tenure.ScopeError, match="'first' was closed while 1 scope inside it"):
        first.close()  # type: ignore[attr-defined]
    assert (one.held, other.held, other.scope) == (False, True, "second")
    second.close()  # type: ignore[attr-defined]
    assert (other.held, current_scope()) == (False, "process")


def test_it_cannot_be_copied() -> None:
    with tenure.scope("epoch", 1) as epoch:
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="'epoch 1' can be neither copied nor pickled"):
                make(epoch)
