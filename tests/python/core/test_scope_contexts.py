"""The current scope follows contextvars: asyncio tasks interleave, contexts are copied."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Awaitable, Callable

import pytest
import torch

import tenure
from probes import current_scope


async def take_turns(*tasks: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]) -> None:
    """Runs tasks so that each `await turn()` in one lets all others run up to theirs."""
    barrier = asyncio.Barrier(len(tasks))

    async def turn() -> None:
        await barrier.wait()

    await asyncio.wait_for(asyncio.gather(*(task(turn) for task in tasks)), timeout=30)


def test_holds_of_interleaved_tasks_land_in_their_own_scopes() -> None:
    leases: dict[str, list[tenure.Lease]] = {"a": [], "b": []}

    def worker(name: str) -> Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]:
        async def work(turn: Callable[[], Awaitable[None]]) -> None:
            for step in range(3):
                with tenure.scope(name, step, on_close="release") as scope:
                    await turn()
                    leases[name].append(tenure.hold(torch.zeros(4), name))
                    await turn()
                    leases[name].append(tenure.hold(torch.zeros(4), name))
                    assert [row.scope for row in leases[name][-2:]] == [f"{name} {step}"] * 2
                    await turn()
                assert (scope.report.leases, scope.report.bytes) == (2, 32)

        return work

    asyncio.run(take_turns(worker("a"), worker("b")))
    assert not any(lease.held for of_one in leases.values() for lease in of_one)


def test_tasks_close_in_any_order() -> None:
    """Scopes of different tasks are no ancestors of each other, so neither must close first."""

    async def first_in_first_out(turn: Callable[[], Awaitable[None]]) -> None:
        with tenure.scope("early"):
            await turn()
        await turn()

    async def last_out(turn: Callable[[], Awaitable[None]]) -> None:
        with tenure.scope("late"):
            await turn()
            await turn()
            assert current_scope() == "late"

    asyncio.run(take_turns(first_in_first_out, last_out))


def test_a_task_without_a_scope_is_in_none() -> None:
    seen: list[str] = []

    async def inside(turn: Callable[[], Awaitable[None]]) -> None:
        with tenure.scope("inside"):
            await turn()
            await turn()

    async def outside(turn: Callable[[], Awaitable[None]]) -> None:
        await turn()
        seen.append(current_scope())
        await turn()

    asyncio.run(take_turns(inside, outside))
    assert seen == ["process"]


def test_a_task_starts_in_the_scope_that_started_it() -> None:
    async def child() -> str:
        with tenure.scope("child"):
            await asyncio.sleep(0)
            return current_scope()

    async def parent() -> list[str]:
        with tenure.scope("step", 1):
            return await asyncio.gather(child(), child())

    assert asyncio.run(parent()) == ["step 1 / child"] * 2


def test_a_task_that_outlives_its_scope_falls_back_to_the_process() -> None:
    async def late(closed: asyncio.Event) -> str:
        await closed.wait()
        return current_scope()

    async def main() -> str:
        closed = asyncio.Event()
        with tenure.scope("step", 1):
            task = asyncio.create_task(late(closed))
            await asyncio.sleep(0)
        closed.set()
        return await task

    assert asyncio.run(main()) == "process"


def test_a_scope_with_an_open_child_in_another_task_cannot_close() -> None:
    async def child(opened: asyncio.Event, may_end: asyncio.Event) -> str:
        with tenure.scope("child"):
            opened.set()
            await may_end.wait()
            return current_scope()

    async def main() -> None:
        opened, may_end = asyncio.Event(), asyncio.Event()
        step = tenure.scope("step", 1)
        step.open()
        task = asyncio.create_task(child(opened, may_end))
        await opened.wait()
        with pytest.raises(tenure.ScopeError, match="'step 1' still has 1 open scope inside it"):
            step.close()
        assert current_scope() == "step 1"
        may_end.set()
        assert await task == "step 1 / child"
        step.close()

    asyncio.run(main())


def test_cancelling_a_task_closes_its_scope() -> None:
    async def forever(opened: asyncio.Event, leases: list[tenure.Lease]) -> None:
        with tenure.scope("forever", on_close="release"):
            leases.append(tenure.hold(torch.zeros(4), "task"))
            opened.set()
            await asyncio.Event().wait()

    async def main() -> bool:
        opened, leases = asyncio.Event(), []
        task = asyncio.create_task(forever(opened, leases))
        await opened.wait()
        assert leases[0].held
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return leases[0].held

    assert asyncio.run(main()) is False


def test_to_thread_carries_the_scope_but_cannot_close_it() -> None:
    async def main() -> tuple[str, str]:
        with tenure.scope("step", 1) as scope:
            seen = await asyncio.to_thread(current_scope)
            with pytest.raises(tenure.ScopeError, match="'step 1' was opened by thread"):
                await asyncio.to_thread(scope.close)
            return seen, current_scope()

    assert asyncio.run(main()) == ("step 1", "step 1")


def test_a_copied_context_keeps_the_scope_it_was_copied_in() -> None:
    with tenure.scope("outer"):
        context = contextvars.copy_context()
        with tenure.scope("inner"):
            assert context.run(current_scope) == "outer"
            assert current_scope() == "outer / inner"


def test_a_copied_context_is_not_changed_by_scopes_opened_later() -> None:
    context = contextvars.copy_context()
    with tenure.scope("step"):
        assert context.run(current_scope) == "process"


def test_a_scope_opened_in_a_context_stays_there() -> None:
    context = contextvars.copy_context()
    scope = tenure.scope("kept")
    context.run(scope.open)
    assert current_scope() == "process"
    assert context.run(current_scope) == "kept"
    with pytest.raises(tenure.ScopeError, match="'kept' is not the innermost scope here"):
        scope.close()
    assert context.run(current_scope) == "kept"
    context.run(scope.close)
    assert context.run(current_scope) == "process"


def test_a_context_that_outlives_its_scope_falls_back_to_the_process() -> None:
    with tenure.scope("step"):
        context = contextvars.copy_context()
    assert context.run(current_scope) == "process"
    with tenure.scope("next"):
        assert context.run(current_scope) == "process"


def test_a_thread_may_run_in_a_copied_context() -> None:
    with tenure.scope("step", 5), concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(current_scope).result() == "process"
        assert pool.submit(contextvars.copy_context().run, current_scope).result() == "step 5"
        assert pool.submit(current_scope).result() == "process"


def test_event_loops_on_two_threads_do_not_mix() -> None:
    both = threading.Barrier(2, timeout=30)
    seen: list[str] = []

    async def main(name: str) -> None:
        with tenure.scope(name):
            for _ in range(50):
                both.wait()
                await asyncio.sleep(0)
                seen.append(current_scope() == name)

    threads = [threading.Thread(target=asyncio.run, args=(main(name),)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 100
