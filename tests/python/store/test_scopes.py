"""Scopes, collectors and calls: who owns an object, who may fetch it, and when it goes."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import tenure
from members import Member, RemoteError, until
from store_work import raw, tensor_of
from tenure import _C
from tenure.store import Scope

LARGE = 200_000  # elements: mapped; a small one is copied


@pytest.fixture(scope="module")
def job() -> Iterator[str]:
    """This process is rollout 0."""
    name = f"scopes-{secrets.token_hex(4)}"
    tenure.store.leave()
    tenure.store.join(name, "rollout", 0, lease=3.0)
    yield name
    tenure.store.leave()


@pytest.fixture(scope="module")
def trainers(job: str) -> Iterator[list[Member]]:
    with Member(job, "trainer", 0) as first, Member(job, "trainer", 1) as second:
        yield [first, second]


@pytest.fixture
def step() -> Iterator[Scope]:
    with tenure.store.scope("step") as scope:
        yield scope


def live() -> int:
    return tenure.store.stats()["objects"]


@pytest.mark.parametrize("elements", [4, LARGE])
class TestCollectors:
    def test_the_last_expected_fetch_frees(
        self, trainers: list[Member], step: Scope, elements: int
    ) -> None:
        handle = step.put(tensor_of([elements]), collectors=["trainer:0", "trainer:1"])
        trainers[0].call("get", handle)
        trainers[0].call("get", handle)  # again, and nobody's turn
        assert live() == 1
        assert trainers[1].call("get", handle) == raw(tensor_of([elements]))
        until(lambda: live() == 0)
        with pytest.raises(RemoteError, match="StaleHandle.*fetched"):
            trainers[0].call("get", handle)
        assert step.account.freed["fetched"] == 1

    def test_a_number_of_fetches(self, trainers: list[Member], step: Scope, elements: int) -> None:
        handle = step.put(tensor_of([elements]), collectors=2)
        trainers[0].call("get", handle)
        trainers[1].call("get", handle)
        until(lambda: live() == 0)

    def test_ranks_of_any_role(self, trainers: list[Member], step: Scope, elements: int) -> None:
        handle = step.put(tensor_of([elements]), collectors=[1])
        with pytest.raises(RemoteError, match="AccessRefused.*rank 1"):
            trainers[0].call("get", handle)
        trainers[1].call("get", handle)
        until(lambda: live() == 0)

    def test_any_of_a_role(self, trainers: list[Member], step: Scope, elements: int) -> None:
        handle = step.put(tensor_of([elements]), collectors="trainer")
        with pytest.raises(tenure.AccessRefused, match="any trainer"):
            handle.get()
        trainers[1].call("get", handle)
        until(lambda: live() == 0)

    def test_more_to_come_is_not_the_fetch(
        self, trainers: list[Member], step: Scope, elements: int
    ) -> None:
        handle = step.put(tensor_of([elements]), collectors=["trainer:0"])
        trainers[0].call("get", handle, rows=(0, 1), more=True)
        trainers[0].call("get", handle, rows=(1, 3))
        until(lambda: live() == 0)

    def test_nobody_means_nothing_is_stored(self, job: str, step: Scope, elements: int) -> None:
        for nobody in ([], 0):
            handle = step.put(tensor_of([elements]), collectors=nobody)
            assert not handle.stored
            assert handle.why == "nobody collects it"
            with pytest.raises(tenure.StaleHandle, match="never stored: nobody collects it"):
                handle.get()
        assert live() == 0
        assert job

    def test_a_rank_that_is_no_source_stores_nothing(
        self, job: str, step: Scope, elements: int
    ) -> None:
        handle = step.put(tensor_of([elements]), collectors=["trainer:0"], sources=[4])
        assert (handle.stored, handle.why) == (False, "rank 0 is not one of the sources (4)")
        with tenure.store.scope("eval", sources=[0, 4]) as scope:
            assert scope.put(tensor_of([elements])).stored
        assert live() == 0
        assert job


@pytest.mark.parametrize(
    "collectors",
    [
        *["", ":3", "\ud800", "trainer:", "trainer:x", [-1], -1, True, ["a:b:c"], [1.5], 2**32],
        *[[True], b"x", {"trainer": 0}],
    ],
)
def test_collectors_that_mean_nothing(step: Scope, collectors: Any) -> None:
    with pytest.raises(tenure.InputError):
        step.put(torch.ones(1), collectors=collectors)


def test_closing_frees_and_says_so(trainers: list[Member]) -> None:
    with tenure.store.scope("step", 7) as scope:
        handles = [scope.put(tensor_of([n])) for n in (4, LARGE)]
    account = scope.account
    assert (account.stored, account.freed["closed"], account.live) == (2, 2, 0)
    assert account.stored_bytes == sum(handle.bytes for handle in handles)
    assert account.difference == ""
    [line] = account.lines
    assert line["site"].endswith("test_scopes.py:" + line["site"].split(":")[-1])
    with pytest.raises(RemoteError, match="StaleHandle.*step 7.*when rollout 0 closed the scope"):
        trainers[0].call("get", handles[0])
    with pytest.raises(tenure.InputError, match="step 7 was closed by this process"):
        tenure.store.scope("step", 7)


def test_a_closed_scope_adopts_nothing(job: str) -> None:
    with tenure.store.scope("step") as other, tenure.store.scope("step") as scope:
        handle = other.put(tensor_of([4]))
        scope.close()
        with pytest.raises(tenure.InputError, match="is closed and can adopt nothing"):
            scope.adopt(handle)
    assert job


def test_threads_that_close_one_scope_have_the_same_books(trainers: list[Member]) -> None:
    scope = tenure.store.scope("step", 70)
    scope.adopt(trainers[0].call("put", "step", 70, {"shape": [4]}))
    late = trainers[1].call("put", "step", 71, {"shape": [4]})
    with ThreadPoolExecutor(3) as pool:
        with trainers[0].stopped():
            closing = [pool.submit(scope.close)]
            until(lambda: not scope.put(tensor_of([1])).stored)
            closing.append(pool.submit(scope.close))
            adopting = pool.submit(scope.adopt, late)
            until(lambda: all(one.running() or one.done() for one in [*closing, adopting]))
        first, second = (one.result() for one in closing)
        with pytest.raises(tenure.InputError, match="is closed and can adopt nothing"):
            adopting.result()
    assert first is second
    assert [there["freed"] for there in first.elsewhere] == [1]
    assert late.free()


def test_an_exception_closes_too(job: str) -> None:
    with pytest.raises(ZeroDivisionError), tenure.store.scope("step") as scope:
        scope.put(tensor_of([LARGE]))
        1 / 0  # noqa: B018
    assert live() == 0
    assert job


def test_a_put_that_comes_after_the_close_is_dropped(trainers: list[Member]) -> None:
    """The controller closed the scope while the worker's call was on its way."""
    scope = tenure.store.scope("step", 8)
    first = scope.put(tensor_of([4]))
    told = trainers[0].call("adopt_and_close", "step", 8, [first])
    assert [there["freed"] for there in told.elsewhere] == [1]
    late = scope.put(tensor_of([LARGE]))
    assert not late.stored
    assert "step 8 was closed by trainer 0" in late.why
    assert live() == 0
    assert scope.account.dropped == 1


def test_a_put_that_comes_when_the_close_is_forgotten(job: str) -> None:
    """The store knows the latest 65,536 that were closed."""
    late = tenure.store.scope("step", "long-ago")
    late.close()
    store = late._store
    for number in range(65_600):
        store.close("other", str(number))
    before = tenure.store.stats()["objects"]
    handle = late.put(torch.ones(3))
    assert (handle.stored, handle.why) == (False, "step long-ago was closed by this process")
    assert not late.call("again").put(torch.ones(3)).stored
    assert tenure.store.stats()["objects"] == before
    assert job


def test_a_retry_replaces_and_a_failure_frees(trainers: list[Member], step: Scope) -> None:
    def attempt(seed: int) -> Any:
        with step.call("logp-3") as call:
            return call.put(tensor_of([LARGE], seed=seed))

    first, second = attempt(1), attempt(2)
    assert live() == 1
    assert trainers[0].call("get", second) == raw(tensor_of([LARGE], seed=2))
    with pytest.raises(RemoteError, match="StaleHandle.*when call logp-3 was begun again"):
        trainers[0].call("get", first)
    with pytest.raises(ZeroDivisionError), step.call("logp-4") as call:
        failed = call.put(tensor_of([LARGE]))
        1 / 0  # noqa: B018
    with pytest.raises(RemoteError, match="StaleHandle.*failed"):
        trainers[0].call("get", failed)
    assert live() == 1
    freed = step.account.freed
    assert (freed["replaced"], freed["failed"]) == (1, 1)


def test_an_attempt_that_was_overtaken_stores_nothing(job: str, step: Scope) -> None:
    first = step.call("logp-5")
    second = step.call("logp-5")
    late = first.put(tensor_of([4]))
    assert (late.stored, "begun again" in late.why) == (False, True)
    kept = second.put(tensor_of([4], seed=1))
    first.fail()  # is not the second's
    assert raw(kept.get()) == raw(tensor_of([4], seed=1))
    second.fail()
    assert not second.put(tensor_of([4])).stored
    assert live() == 0
    assert job


def test_a_collector_that_was_killed_loses_its_claim(job: str, step: Scope) -> None:
    with Member(job, "trainer", 7) as doomed:
        handle = step.put(tensor_of([LARGE]), collectors=["trainer:7", "rollout:0"])
        other = step.put(tensor_of([LARGE]), collectors=["trainer:7"])
        by_rank = step.put(tensor_of([LARGE]), collectors=[7])
        doomed.call("get_and_hold", handle, "held", more=True)
        doomed.kill()
    assert raw(handle.get()) == raw(tensor_of([LARGE]))
    until(lambda: live() == 0)  # after its lease
    assert step.account.freed["expired"] == 3
    assert tenure.store.stats()["still_mapped_bytes"] == 0
    assert not other.free()
    assert not by_rank.free()


def test_a_collector_that_is_there_keeps_its_claim(job: str, trainers: list[Member]) -> None:
    with Member(job, "owner", 0, lease=2.0) as owner:
        handle = owner.call("put", "step", 0, {"shape": [LARGE]}, collectors=["trainer:0"])
        trainers[0].call("get", handle, more=True)
        end = time.monotonic() + 4.5  # two leases, each of which the trainer renews
        while time.monotonic() < end:
            assert owner.call("stats")["expired"] == 0
        assert trainers[0].call("get", handle) == raw(tensor_of([LARGE]))


def test_a_controller_closes_everywhere(trainers: list[Member]) -> None:
    handles = [trainer.call("put", "step", 9, {"shape": [LARGE]}) for trainer in trainers]
    other = trainers[0].call("put", "eval", 9, {"shape": [LARGE]})
    with tenure.store.scope("step", 9) as scope:
        assert scope.adopt({"results": handles, "eval": other})["eval"] is other
        for handle in handles:
            handle.get(keep=True)
        assert tenure.store.stats()["kept_bytes"] == 8 * LARGE
    assert [trainer.call("stats")["objects"] for trainer in trainers] == [0, 0]
    assert tenure.store.stats()["kept_bytes"] == 0


def test_an_owner_that_is_gone_does_not_hold_up_a_close(job: str) -> None:
    with Member(job, "rollout", 8) as gone:
        handle = gone.call("put", "step", 10, {"shape": [4]})
        gone.kill()
    scope = tenure.store.scope("step", 10)
    scope.adopt([handle])
    [gone] = scope.close().gone
    assert gone.startswith("rollout 8 (")
    assert "; gone: rollout 8" in str(scope.account)
    freed, [(owner, why)] = tenure.store.free([handle])
    assert (freed, owner) == (0, "rollout 8")
    assert why


def test_a_handle_of_another_job_holds_up_no_other(trainers: list[Member]) -> None:
    kinds = "step", "eval"
    with Member("another-job", "worker", 3) as stranger:
        foreign = [stranger.call("put", kind, 12, {"shape": [4]}) for kind in kinds]
        ours = [trainers[0].call("put", kind, 12, {"shape": [LARGE]}) for kind in kinds]
        scope = tenure.store.scope("step", 12)
        scope.adopt([foreign, ours])
        with pytest.warns(tenure.ScopeWarning, match="worker 3 .belongs to job another-job"):
            scope.close()
        assert trainers[0].call("stats")["objects"] == 0
        assert tenure.store.close("step", 13).unreached == []  # nothing there is asked for again

        other = trainers[0].call("put", "step", 14, {"shape": [4]})
        freed, told = tenure.store.free([foreign, other])
        assert freed == 1
        assert {owner for owner, _ in told} == {"worker 3"}
        with pytest.raises(tenure.AccessRefused, match="belongs to job another-job"):
            foreign[0].free()
        assert stranger.call("stats")["objects"] == 2


def test_an_owner_that_does_not_answer_has_freed_nothing(trainers: list[Member]) -> None:
    handle = trainers[1].call("put", "step", 15, {"shape": [4]})
    impatient = Member(handle.job, "impatient", 0, timeout=0.3)
    told = pytest.raises(RemoteError, match="StoreTimeout.*could not be freed.*trainer 1")
    with impatient, trainers[1].stopped(), told:
        impatient.call("free", handle)
    assert handle.free()
    assert not handle.free()


def test_books_that_do_not_balance_are_named(
    trainers: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    close = _C.Store.close

    def wrong(store: _C.Store, kind: str, key: str) -> dict[str, Any]:
        told = close(store, kind, key)
        told["difference"] = "call logp at train.py:41: stored 2 (8 B), freed 1 (4 B), live 0 (0 B)"
        told["elsewhere"][0]["difference"] = "no call at eval.py:7: stored 1 (4 B), freed 0 (0 B)"
        return told

    monkeypatch.setattr(_C.Store, "close", wrong)
    scope = tenure.store.scope("step", 11)
    scope.adopt(trainers[1].call("put", "step", 11, {"shape": [4]}))
    says = "books of the scope step 11 are wrong: rollout 0: call logp at train.py:41: .*"
    with pytest.raises(tenure.ScopeError, match=f"{says}; trainer 1: no call at eval.py:7: "):
        scope.close()


def test_threads_that_put_while_the_scope_closes(job: str) -> None:
    for round_ in range(20):
        scope = tenure.store.scope("race", f"{job}-{round_}")
        handles: list[Any] = []
        start = threading.Barrier(3)

        def work(scope: Scope = scope, handles: list[Any] = handles, start: Any = start) -> None:
            start.wait()
            handles.extend(scope.put(torch.ones(5)) for _ in range(50))

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        start.wait()
        account = scope.close()
        for thread in threads:
            thread.join()
        assert live() == 0
        assert account.difference == ""
        dropped = sum(not handle.stored for handle in handles)
        assert scope.account.dropped == dropped


def test_the_cap(job: str) -> None:
    with Member(job, "capped", 0, cap="10MB") as capped:
        kept = capped.call("put", "step", 0, {"shape": [2_000_000]})
        with pytest.raises(RemoteError, match="BudgetError.*(cap|limit)"):
            capped.call("put", "step", 0, {"shape": [1_000_000]})
        assert raw(kept.get()) == raw(tensor_of([2_000_000]))
        capped.call("close", "step", 0)
        assert capped.call("put", "step", 1, {"shape": [2_000_000]}).stored


def test_spilling(job: str, tmp_path: Any) -> None:
    options = {"cap": "10MB", "when_full": "spill", "spill_folder": str(tmp_path)}
    with Member(job, "spilling", 0, **options) as spilling:
        handles = [
            spilling.call("put", "step", 0, {"shape": [2_000_000], "seed": seed})
            for seed in range(5)
        ]
        stats = spilling.call("stats")
        assert stats["bytes"] <= 10_000_000
        assert 0 <= stats["spilled_bytes"] - 4 * 8_000_000 < 2**16  # whole blocks
        for seed, handle in enumerate(handles):
            assert raw(handle.get()) == raw(tensor_of([2_000_000], seed=seed))
        spilling.call("close", "step", 0)
        assert spilling.call("stats")["spilled_bytes"] == 0
        assert list(tmp_path.iterdir()) == []
