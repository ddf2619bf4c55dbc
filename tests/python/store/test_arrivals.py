"""A fetched tensor: whose memory it is, what it is when it is put again, how long it is kept."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import tenure
from members import Member, RemoteError, until
from store_work import raw, tensor_of

WIRES = [None, "tcp"]


def test_a_large_one_is_mapped_and_a_write_stays_ones_own(trainer: Member) -> None:
    tensor = tensor_of([4_000_000], "int32")
    with tenure.store.scope("call") as scope:
        trainer.call("hold_and_sum", scope.put(tensor + 1), "other")  # brings in torch's code, too
        trainer.call("let_go", "other")
        handle = scope.put(tensor)
        here = handle.get()
        assert torch.equal(here, tensor)
        before = trainer.call("pss")
        assert trainer.call("hold_and_sum", handle, "mine") == tensor.sum().item()
        assert trainer.call("pss") - before < 0.7 * handle.bytes  # shared with this process
        del here
        assert trainer.call("add_in_place", "mine") == raw(tensor + 1)
        assert raw(handle.get()) == raw(tensor)
        trainer.call("let_go", "mine")


def test_a_small_one_is_the_consumers_own(trainer: Member) -> None:
    tensor = tensor_of([4], "int32")
    with tenure.store.scope("call") as scope:
        handle = scope.put(tensor)
        trainer.call("get_and_hold", handle, "small")
        assert trainer.call("add_in_place", "small") == raw(tensor + 1)
        assert raw(handle.get()) == raw(tensor)


@pytest.mark.parametrize("elements", [10, 100_000])
def test_read_only_means_that_writes_raise(trainer: Member, elements: int) -> None:
    sent = trainer.call("put", "step", 3, {"shape": [elements]})
    tensor = sent.get(readonly=True)
    with pytest.raises(RuntimeError):
        tensor.add_(1)
    assert raw(tensor.clone()) == raw(tensor_of([elements]))


def test_a_mapped_tensor_outlives_its_scope_and_is_reported(trainer: Member) -> None:
    tensor = tensor_of([500_000])
    with tenure.store.scope("step", 17) as scope:
        handle = scope.put(tensor)
        trainer.call("get_and_hold", handle, "late")
    [mapped] = scope.account.still_mapped
    assert mapped.startswith("trainer 0 since ")
    assert tenure.store.stats()["still_mapped_bytes"] == handle.bytes
    with pytest.raises(RemoteError) as raised:
        trainer.call("get", handle)
    assert raised.value.kind == "StaleHandle"
    assert "step 17" in raised.value.text
    assert "rollout 0" in raised.value.text
    trainer.call("let_go", "late")
    until(lambda: tenure.store.stats()["still_mapped_bytes"] == 0)
    assert scope.account.still_mapped == []


@pytest.mark.parametrize("wire", WIRES)
def test_what_is_put_again_unchanged_keeps_its_handle(trainer: Member, wire: Any) -> None:
    for elements in (10, 500_000):
        sent = trainer.call("put", "step", 20, {"shape": [elements]})
        scope = tenure.store.scope("step", 20)
        tensor = sent.get(wire=wire)
        assert scope.put(tensor) == sent
        assert scope.put(tensor.view(2, -1)) != sent
        assert scope.put(tensor.view(torch.int32)) != sent
        tensor.numpy()[0] = 7  # torch does not see it
        again = scope.put(tensor)
        assert again != sent
        assert raw(again.get()) == raw(tensor)
        other = tenure.store.scope("step", 21)
        assert other.put(sent.get(wire=wire)) != sent  # which would go with step 20


@pytest.mark.parametrize("wire", WIRES)
def test_an_owner_that_does_not_answer_is_not_waited_for(trainer: Member, wire: Any) -> None:
    job = trainer.call("put", "step", 23, {"shape": [1]}).job
    with Member(job, "silent", 0) as silent, tenure.store.scope("call") as scope:
        sent = [silent.call("put", scope.kind, scope.key, {"shape": [n]}) for n in (10, 500_000)]
        tensors = [handle.get(wire=wire) for handle in sent]
        with silent.stopped():
            begun = time.monotonic()
            again = [scope.put(tensor) for _ in range(20) for tensor in tensors]
            assert time.monotonic() - begun < 5  # of a timeout of 30, forty times
        for handle, tensor in zip(again[:2], tensors, strict=True):
            assert handle not in sent
            assert raw(handle.get()) == raw(tensor)


def test_one_that_was_given_other_memory_is_not_what_came(trainer: Member) -> None:
    sent = trainer.call("put", "step", 22, {"shape": [500_000]})
    scope = tenure.store.scope("step", 22)
    tensor = sent.get()
    tensor.share_memory_()  # its storage has other memory from here on, and the same version
    tensor.numpy()[:] = 7
    again = scope.put(tensor)
    assert again != sent
    assert raw(again.get()) == raw(tensor)


def test_a_tensor_that_is_put_twice_is_stored_once(trainer: Member) -> None:
    tensor = tensor_of([1_000_000])
    with tenure.store.scope("call") as scope:
        before = tenure.store.stats()["bytes"]
        first, second = scope.put(tensor), scope.put(tensor)
        assert first != second
        assert tenure.store.stats()["bytes"] - before < 1.1 * first.bytes
        tensor.numpy()[0] = 5
        third = scope.put(tensor)
        assert trainer.call("get", third) == raw(tensor)
        assert trainer.call("get", first) != raw(tensor)
        first.free()
        assert trainer.call("get", second) != raw(tensor)


@pytest.mark.parametrize("side", [5, 1000])
@pytest.mark.parametrize("inference", [False, True])
def test_elements_that_are_put_twice_are_stored_once(
    trainer: Member, side: int, inference: bool
) -> None:
    with tenure.store.scope("call") as scope, torch.inference_mode(inference):
        tensor = torch.randn(side, side)
        same = [tensor, tensor.view(-1), tensor[:], tensor.view(torch.int32)]
        for views in same, [tensor.t(), tensor.t()], [tensor[1:], tensor[1:].flatten()]:
            shared = tenure.store.stats()["shared"]
            handles = [scope.put(view) for view in views]
            assert tenure.store.stats()["shared"] - shared == len(views) - 1
            assert len(set(handles)) == len(views)
            handles[0].free()  # the others do not go with it
            for handle, view in zip(handles[1:], views[1:], strict=True):
                assert handle.shape == view.shape
                assert trainer.call("get", handle) == raw(view)
        tensor.numpy()[-1, -1] = 5
        changed = scope.put(tensor)
        assert trainer.call("get", changed) == raw(tensor)
        assert trainer.call("get", handles[1]) != raw(tensor[1:])


def test_the_rows_of_a_batch_are_stored_once_and_each_by_itself(trainer: Member) -> None:
    batch = torch.randn(2000, 3)
    with tenure.store.scope("call") as scope:
        before = tenure.store.stats()["bytes"]
        handles = [scope.put(row) for _ in range(2) for row in batch]
        assert tenure.store.stats()["bytes"] - before < 2000 * 64 + 2**16
        got = trainer.call("get_all", handles)
        assert got == 2 * [raw(row) for row in batch]


def test_keeping_is_until_the_scope_closes(trainer: Member) -> None:
    tensor = tensor_of([100_000])
    with tenure.store.scope("step", 50) as scope:
        handle = scope.put(tensor)
        assert trainer.call("get", handle, keep=True, wire="tcp") == raw(tensor)
        assert trainer.call("kept_bytes") == handle.bytes
        sent = tenure.store.stats()["sent_bytes"]
        assert trainer.call("get", handle, keep=True, wire="tcp") == raw(tensor)
        assert tenure.store.stats()["sent_bytes"] - sent < handle.bytes
    until(lambda: trainer.call("kept_bytes") == 0)


def test_what_is_freed_is_not_kept(trainer: Member) -> None:
    sent = trainer.call("put", "step", 51, {"shape": [100]})
    sent.get(keep=True)
    assert sent.free()
    with pytest.raises(tenure.StaleHandle):
        sent.get(keep=True)


def test_what_its_owner_frees_is_not_kept(trainer: Member) -> None:
    with tenure.store.scope("step", 52) as scope:
        freed, stays = (scope.put(tensor_of([100_000], seed=seed)) for seed in (0, 1))
        for handle in freed, stays:
            trainer.call("get", handle, keep=True, wire="tcp")
        assert trainer.call("kept_bytes") == freed.bytes + stays.bytes
        assert freed.free()
        until(lambda: trainer.call("kept_bytes") == stays.bytes)


def test_what_a_later_attempt_replaces_is_not_kept(trainer: Member) -> None:
    with tenure.store.scope("step", 53) as scope:
        with scope.call("logp") as call:
            first = call.put(tensor_of([100_000]))
        trainer.call("get", first, keep=True, wire="tcp")
        assert trainer.call("kept_bytes") == first.bytes
        with scope.call("logp"):
            until(lambda: trainer.call("kept_bytes") == 0)
