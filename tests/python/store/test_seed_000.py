"""Seed 000: results that nobody will ever fetch, in a job of 2 x 2 x 2 ranks, and what goes wrong.

Every rank returns its result; only those of the data-parallel heads (0 and 4) are collected. In
AReaL the other ranks stored theirs all the same: 411 MB a step. Here faults are injected, too, and
what is measured is what the kernel says of all processes.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

import tenure
from members import Member, RemoteError
from store_work import raw, tensor_of
from tenure.store import Closed, Handle

RANKS = 8
HEADS = [0, 4]
STEPS = int(os.environ.get("TENURE_STORE_STEPS", "160"))
RESULT = {"shape": [256, 1024]}  # 1 MiB
LATE_S = 3.0  # how long the controller waits for an owner that is stopped


class Job:
    """A controller, which is this process, eight workers and a consumer that can be replaced."""

    def __init__(self, stack: ExitStack) -> None:
        self.name = f"seed-{secrets.token_hex(4)}"
        tenure.store.leave()
        tenure.store.join(self.name, "controller", 0, timeout=LATE_S)
        stack.callback(tenure.store.leave)
        self.stack = stack
        self.workers = [
            stack.enter_context(Member(self.name, "worker", rank, lease=10.0))
            for rank in range(RANKS)
        ]
        self.replace_consumer()

    def replace_consumer(self) -> None:
        self.consumer = self.stack.enter_context(Member(self.name, "consumer", 0))

    def call_all(self, step: int, **options: Any) -> list[Handle]:
        """As a controller calls them: all at once, and all answer."""
        for rank, worker in enumerate(self.workers):
            worker.start(
                "put",
                "step",
                step,
                RESULT | {"seed": 10 * step + rank},
                call="compute",
                collectors=["consumer"],
                sources=HEADS,
                fails=options.get("fails") == rank,
            )
        handles = []
        for worker in self.workers:
            with suppress(RemoteError):  # "the call failed"
                handles.append(worker.result())
        return handles

    def memory(self) -> list[int]:
        ctypes.CDLL(None).malloc_trim(0)  # as GIVES_BACK does in the others
        processes = [os.getpid(), *(one.pid for one in [*self.workers, self.consumer])]
        return [_bytes_of(process) for process in processes]


def _bytes_of(process: int) -> int:
    """Its own memory, its share of what is shared in memory, and the memory files it has open.

    Of files that are mapped, torch's libraries above all, the share depends on who else maps them.
    """
    wanted = "Pss_Anon:", "Pss_Shmem:"
    lines = [
        line.split() for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    ]
    mapped = sum(int(line[1]) * 1024 for line in lines if line[0] in wanted)
    opened = 0
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):
            if str(descriptor.readlink()).startswith("/memfd:"):
                opened += descriptor.stat().st_blocks * 512
    return mapped + opened


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(stack)


def finish(step: int, handles: list[Handle]) -> Closed:
    """The controller ends the step everywhere."""
    with tenure.store.scope("step", step) as scope:
        scope.adopt(handles)
    return scope.account


def least(samples: list[list[int]]) -> int:
    """Each process at its lowest: what the allocator has in hand comes and goes."""
    return sum(map(min, zip(*samples, strict=True)))


def held(job: Job) -> list[int]:
    return [worker.call("stats")["bytes"] for worker in job.workers]


def test_ranks_that_nobody_collects_from_store_nothing(job: Job) -> None:
    for step in range(3):
        handles = job.call_all(step)
        assert [handle.stored for handle in handles] == [rank in HEADS for rank in range(RANKS)]
        assert [rank for rank, size in enumerate(held(job)) if size] == HEADS
        assert job.consumer.call("get_all", [handles[rank] for rank in HEADS]) == [
            raw(tensor_of(RESULT["shape"], seed=10 * step + rank)) for rank in HEADS
        ]
        finish(step, handles)
    assert held(job) == [0] * RANKS
    assert all(worker.call("stats")["put_bytes"] == 0 for worker in job.workers[1:4])


def test_memory_stays_flat_whatever_fails(job: Job) -> None:
    """Each fault comes again and again, is named when it comes, and costs nothing that stays."""
    named = dict.fromkeys(
        ["retry", "sibling", "eval", "race", "lost delete", "killed consumer", "discarded"], 0
    )
    first: list[list[int]] = []
    last: list[list[int]] = []
    for step in range(100, 100 + STEPS):
        fault = step % 20
        handles = job.call_all(step, fails=4 if fault == 3 else None)
        heads = [handle for handle in handles if handle.stored]
        if fault == 1:  # the answer was lost: the controller calls again
            again = job.call_all(step)
            with pytest.raises(RemoteError, match="StaleHandle.*when call compute was begun again"):
                job.consumer.call("get", heads[0])
            heads = [handle for handle in again if handle.stored]
            named["retry"] += 1
        elif fault == 3:  # rank 4 raised: what its siblings stored nobody will fetch
            assert len(handles) == RANKS - 1
            named["sibling"] += 1
        if fault == 5:  # results of an evaluation, of which nobody wants to know
            tested = [
                job.workers[rank].call("put", "eval", step, RESULT | {"seed": step})
                for rank in HEADS
            ]
            with tenure.store.scope("eval", step) as evaluation:
                evaluation.adopt(tested)
            assert sum(there["freed"] for there in evaluation.account.elsewhere) == 2
            named["eval"] += 1
        if fault == 7 and step < 130:  # few: starting another one takes seconds
            job.consumer.call("get_and_hold", heads[0], "held", more=True)
            job.consumer.kill()
            assert job.workers[HEADS[0]].call("waited_for") == ["any consumer"]
            job.replace_consumer()
            named["killed consumer"] += 1
        elif fault == 9:
            named["discarded"] += 1  # nobody fetches
        elif fault != 3:
            expected = [
                raw(tensor_of(RESULT["shape"], seed=10 * step + handle.owner.rank))
                for handle in heads
            ]
            assert job.consumer.call("get_all", heads) == expected
        if step % 40 == 11:  # the owner does not hear the delete
            named["lost delete"] += _lose_a_delete(job, step, heads)
        else:
            account = finish(step, [*handles, *heads])
            assert account.unreached == []
            assert account.difference == ""
        if fault == 3:
            assert freed(job, step) == {0: {"closed": 1}, 4: {"failed": 1}}
        elif fault == 9:
            assert freed(job, step) == {rank: {"closed": 1} for rank in HEADS}
        if fault == 13:  # an insert that was on its way when the step was cleared
            late = job.workers[0].call("put", "step", step, RESULT)
            assert not late.stored
            assert f"step {step} was closed by controller 0" in late.why
            named["race"] += 1
        done = (step - 100) / STEPS
        if step % 5 == 0 and (0.25 <= done < 0.5 or done >= 0.75):
            (first if done < 0.5 else last).append(job.memory())
    assert all(named.values()), named
    assert held(job) == [0] * RANKS
    for worker in job.workers:
        figures = worker.call("stats")
        assert (figures["objects"], figures["still_mapped_bytes"]) == (0, 0)
    assert least(last) - least(first) < 6 * 2**20  # a head's results of six steps would be more


def freed(job: Job, step: int) -> dict[int, dict[str, int]]:
    """What became of the heads' results, in the books of each."""
    return {
        rank: {
            reason: count
            for reason, count in job.workers[rank].call("account", "step", step).freed.items()
            if count
        }
        for rank in HEADS
    }


def _lose_a_delete(job: Job, step: int, heads: list[Handle]) -> int:
    with job.workers[HEADS[0]].stopped(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        account = finish(step, heads)
    assert any("not at worker 0" in str(warning.message) for warning in told)
    assert any(text.startswith("worker 0 ") for text in account.unreached)
    return 1
