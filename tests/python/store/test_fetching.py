"""What is put is what is got, by whatever way it comes."""

from __future__ import annotations

import asyncio
import json
import mmap
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tenure
from members import Member, until
from store_work import raw, tensor_of
from tenure.store import Handle, fetching, joining

DTYPES = [
    "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16",
    "bfloat16", "float32", "float64", "complex32", "complex64", "complex128", "bool",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
SHAPES: list[list[int]] = [[], [0], [3, 0, 2], [1], [5, 3], [300, 257]]
WIRES = [None, "tcp"]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape_comes_bit_for_bit(trainer: Member, dtype: str, wire: Any) -> None:
    tensors = [tensor_of(shape, dtype, seed) for seed, shape in enumerate(SHAPES)]
    with tenure.store.scope("call") as scope:
        handles = [scope.put(tensor) for tensor in tensors]
        assert trainer.call("get_all", handles, wire=wire) == [raw(tensor) for tensor in tensors]
        assert [handle.shape for handle in handles] == [tensor.shape for tensor in tensors]
        assert {handle.dtype for handle in handles} == {tensors[0].dtype}


@pytest.mark.parametrize("wire", WIRES)
def test_views_are_compacted(trainer: Member, wire: Any) -> None:
    base = tensor_of([1000, 1000])
    views = [base[::2, 1:7], base.t(), base[3], base[10:20], torch.ones(1).expand(50, 50)]
    with tenure.store.scope("call") as scope:
        before = tenure.store.stats()["bytes"]
        handles = [scope.put(view) for view in views]
        assert trainer.call("get_all", handles, wire=wire) == [raw(view) for view in views]
        slices = sum(view.numel() * 4 for view in views)
        assert slices <= tenure.store.stats()["bytes"] - before <= slices + 2**20


def test_a_complex_view_is_what_it_shows(trainer: Member) -> None:
    number = torch.tensor([1 + 2j, 3 - 4j])
    with tenure.store.scope("call") as scope:
        handle = scope.put(number.conj())
        assert trainer.call("get", handle) == raw(number.conj().resolve_conj())
        handle = scope.put(number.conj().imag)
        assert trainer.call("get", handle) == raw(torch.tensor([-2.0, 4.0]))


def test_a_view_is_stored_as_its_elements_whatever_its_strides(trainer: Member) -> None:
    base = tensor_of([7, 1500, 1000])
    views = [base.permute(2, 0, 1), base[:, ::3, 1:], base[2:3].expand(3, 1500, 1000), base.flip(1)]
    pairs = torch.view_as_complex(base.unflatten(2, (500, 2))).conj()
    with tenure.store.scope("call") as scope:
        for view in [*views, pairs, pairs.imag]:
            shown = raw(view.resolve_conj().resolve_neg())
            assert trainer.call("get", scope.put(view)) == shown
            assert trainer.call("get", scope.put(view)) == shown  # of what is stored already


def test_there_is_room_before_a_view_is_copied(trainer: Member) -> None:
    """One number that is shown 2^50 times: the kernel would kill who makes them all."""
    with tenure.store.scope("call") as scope:
        with pytest.raises(tenure.BudgetError, match=r"no room for an object of 4\.0 PiB"):
            scope.put(torch.ones(1).expand(2**50))
        assert trainer.call("get", scope.put(torch.ones(1).expand(3))) == raw(torch.ones(3))


@pytest.mark.parametrize("handles", [None, 3, "text", {"a": 1}, [None]])
def test_what_is_no_list_of_handles(handles: Any) -> None:
    with pytest.raises(tenure.InputError, match="a list|Handle is wanted"):
        tenure.store.get_all(handles)


@pytest.mark.parametrize("elements", [10, 1_000_000])
def test_later_writes_to_the_source_change_nothing(trainer: Member, elements: int) -> None:
    source = tensor_of([elements])
    before = raw(source)
    with tenure.store.scope("call") as scope:
        handle = scope.put(source)
        source.zero_()
        assert trainer.call("get", handle) == before


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("columns", [3, 100_000])
def test_rows(trainer: Member, columns: int, wire: Any) -> None:
    tensor = tensor_of([10, columns])
    with tenure.store.scope("call") as scope:
        handle = scope.put(tensor)
        for rows in [(0, 10), (2, 5), (9, 10), (4, 4)]:
            got = trainer.call("get", handle, rows=rows, wire=wire, more=True)
            assert got == raw(tensor[slice(*rows)])
        assert raw(handle.get(rows=slice(-2, None))) == raw(tensor[-2:])
        assert handle.get(rows=slice(20, 30)).shape == (0, columns)
        with pytest.raises(tenure.InputError, match="step of 2"):
            handle.get(rows=slice(0, 4, 2))
        with pytest.raises(tenure.InputError, match="is a single number"):
            scope.put(torch.tensor(1.0)).get(rows=slice(0, 1))


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("elements", [1000, 1_000_000])
def test_a_handle_that_was_changed_on_its_way(trainer: Member, elements: int, wire: Any) -> None:
    sent = trainer.call("put", "step", 6, {"shape": [elements]}, collectors=1)
    size = elements.to_bytes(8, "little")
    coded = sent._handle.encode()
    assert coded.count(size) == 1
    for other in (elements // 2, 2 * elements):
        changed = Handle(
            type(sent._handle).decode(coded.replace(size, other.to_bytes(8, "little")))
        )
        assert changed.shape == (other,)
        with pytest.raises(tenure.InputError, match=r"trainer 0 .* was changed on its way"):
            changed.get(wire=wire)
    assert raw(sent.get(wire=wire)) == raw(tensor_of([elements]))


@pytest.mark.parametrize("device", ["cuda:99", "xpu"])
def test_a_device_that_is_not_there(trainer: Member, device: str) -> None:
    sent = trainer.call("put", "step", 7, {"shape": [4]}, collectors=1)
    fetches = trainer.call("stats")["fetches"]
    with pytest.raises(tenure.InputError) as raised:
        sent.get(device=device)
    assert str(raised.value).startswith(f"nothing can be fetched to the device {device} here (")
    assert str(raised.value).endswith("); leave the device out to fetch to the CPU")
    assert "\n" not in str(raised.value)
    assert trainer.call("stats")["fetches"] == fetches


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("elements", [10, 100_000])
def test_what_could_not_be_delivered_is_not_fetched(
    trainer: Member, elements: int, keep: bool
) -> None:
    sent = trainer.call("put", "step", 7, {"shape": [elements]}, collectors=1)
    joining.current().fetch(**fetching._request([sent], None, keep=keep))  # and was never accepted
    # What is told is told in order: were the first a fetch, it would have gone with this one.
    other = trainer.call("put", "step", 7, {"shape": [1]}, collectors=1)
    before = trainer.call("stats")["objects"]
    other.get()
    until(lambda: trainer.call("stats")["objects"] == before - 1)
    assert raw(sent.get(keep=keep)) == raw(tensor_of([elements]))
    until(lambda: trainer.call("stats")["objects"] == before - 2)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("elements", [10, 100_000])
def test_into_a_tensor_of_ones_own(trainer: Member, elements: int, wire: Any) -> None:
    sent = trainer.call("put", "step", 1, {"shape": [elements, 2]})
    expected = raw(tensor_of([elements, 2]))
    target = torch.zeros(elements, 2)
    view = target[:]
    got = sent.get(into=target, wire=wire)
    assert got is target
    assert raw(view) == expected
    assert target._version == 1  # autograd is told
    columns = torch.zeros(2, elements).t()
    sent.get(into=columns, wire=wire)
    assert raw(columns) == expected


def test_a_target_that_does_not_fit(trainer: Member) -> None:
    sent = trainer.call("put", "step", 2, {"shape": [4, 2]})
    with pytest.raises(tenure.InputError, match="target is of int32 and .* tensor of float32"):
        sent.get(into=torch.zeros(4, 2, dtype=torch.int32))
    with pytest.raises(tenure.InputError, match=r"shape \[3, 2\] .* has \[4, 2\]"):
        sent.get(into=torch.zeros(3, 2))
    with pytest.raises(tenure.InputError, match="is a tensor, not of type list"):
        sent.get(into=[1])
    closed = sent.get(readonly=True)
    for target in (closed, closed.view(2, 4).t()):
        with pytest.raises(tenure.InputError, match="the target is read-only: give another"):
            sent.get(into=target)
    with pytest.raises(tenure.InputError, match="requires grad"):
        sent.get(into=torch.zeros(4, 2, requires_grad=True))
    assert raw(sent.get()) == raw(tensor_of([4, 2]))  # and nothing is lost


def test_a_target_whose_elements_share_memory(trainer: Member) -> None:
    sent = trainer.call("put", "step", 4, {"shape": [4, 2]})
    with pytest.raises(tenure.InputError, match="share memory"):
        sent.get(into=torch.zeros(6).as_strided((4, 2), (1, 1)))
    with pytest.raises(tenure.InputError, match="share memory"):
        sent.get(into=torch.zeros(1, 2).expand(4, 2))
    slices = torch.zeros(8, 6)[::2, 1:5:3]
    sent.get(into=slices)
    assert raw(slices) == raw(tensor_of([4, 2]))


@contextmanager
def interrupted() -> Iterator[None]:
    """By a Ctrl-C soon, which ends what is done here."""
    begun = time.monotonic()
    main = threading.main_thread().ident
    interrupting = threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT])
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    assert time.monotonic() - begun < 10
    interrupting.join()


def test_ctrl_c_ends_a_wait(trainer: Member) -> None:
    sent = trainer.call("put", "step", 5, {"shape": [1]})
    sent.get(more=True)
    with trainer.stopped(), interrupted():
        sent.get(timeout=30)
    assert raw(sent.get()) == raw(tensor_of([1]))


def test_ctrl_c_ends_a_close_which_can_be_done_again(trainer: Member) -> None:
    sent = trainer.call("put", "step", 8, {"shape": [1]})
    scope = tenure.store.scope("step", 8)
    scope.adopt(sent)
    with trainer.stopped(), interrupted():
        scope.close()
    assert [there["freed"] for there in scope.close().elsewhere] == [1]


@pytest.mark.parametrize("wire", WIRES)
def test_serving_never_takes_pythons_lock(trainer: Member, tmp_path: Path, wire: Any) -> None:
    sent = [trainer.call("put", "step", 9, {"shape": [n]}, collectors=1) for n in (10, 10**6)]
    flag = tmp_path / "flag"
    flag.write_bytes(bytes(2))
    with flag.open("r+b") as file, mmap.mmap(file.fileno(), 2) as shared:
        trainer.start("keep_pythons_lock", str(flag))
        until(lambda: shared[0] == 1)
        try:
            for handle in sent:
                assert raw(handle.get(wire=wire, timeout=10)) == raw(tensor_of(list(handle.shape)))
                handle.free()
        finally:
            shared[1] = 1
        trainer.result()


@pytest.mark.parametrize("wire", WIRES)
def test_ten_thousand_at_once(trainer: Member, wire: Any) -> None:
    handles = trainer.call("put_many", "step", 30, 10_000, 8)
    tensors = tenure.store.get_all(handles, wire=wire)
    assert [tensor[7].item() for tensor in tensors] == list(range(10_000))


def test_a_handle_is_plain_data(trainer: Member) -> None:
    sent = trainer.call("put", "step", 40, {"shape": [3], "dtype": "bfloat16"})
    for copy in (
        pickle.loads(pickle.dumps(sent)),
        Handle.from_json(json.loads(json.dumps(sent.to_json()))),
        Handle.from_text(sent.text()),
    ):
        assert copy == sent
        assert hash(copy) == hash(sent)
        assert raw(copy.get()) == raw(tensor_of([3], "bfloat16"))
    assert str(sent) == "6 B bfloat16 [3] of trainer 0 in step 40"
    assert (sent.owner.role, sent.owner.rank, sent.scope) == ("trainer", 0, ("step", "40"))


@pytest.mark.parametrize(
    "text", ["", "tenure1:", "tenure1:AAAA", "tenure2:AAAA", "x" * 10_000, "tenure1:é"]
)
def test_a_text_that_is_no_handle(text: str) -> None:
    with pytest.raises(tenure.InputError):
        Handle.from_text(text)


def test_beside_an_event_loop(trainer: Member) -> None:
    sent = [trainer.call("put", "step", 41, {"shape": [3], "seed": seed}) for seed in range(4)]

    async def fetch() -> list[bytes]:
        one, many = await asyncio.gather(sent[0].get_async(), tenure.store.get_all_async(sent[1:]))
        return [raw(one), *map(raw, many)]

    assert asyncio.run(fetch()) == [raw(tensor_of([3], seed=seed)) for seed in range(4)]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("elements", [3, 100_000])
def test_one_that_is_cancelled_has_fetched_nothing(
    trainer: Member, elements: int, keep: bool
) -> None:
    sent = trainer.call("put", "step", 42, {"shape": [elements]}, collectors=1)
    before = trainer.call("stats")

    async def give_up() -> None:
        with trainer.stopped():
            fetching = [
                asyncio.create_task(sent.get_async(keep=keep)),
                asyncio.create_task(tenure.store.get_all_async([sent], keep=keep)),
            ]
            await asyncio.sleep(0)  # they begin, and wait for an answer
            for task in fetching:
                task.cancel()
            assert all(
                isinstance(one, asyncio.CancelledError)
                for one in await asyncio.gather(*fetching, return_exceptions=True)
            )

    asyncio.run(give_up())  # and its threads have ended
    assert trainer.call("stats")["fetches"] == before["fetches"] + 2
    # What is told is told in order: were one of them a fetch, it would have gone with this one.
    trainer.call("put", "step", 42, {"shape": [1]}, collectors=1).get()
    until(lambda: trainer.call("stats")["objects"] <= before["objects"])
    assert raw(sent.get(keep=keep)) == raw(tensor_of([elements]))
    until(lambda: trainer.call("stats")["objects"] == before["objects"] - 1)


def test_an_owner_that_is_gone_is_named(trainer: Member) -> None:
    job = trainer.call("put", "step", 60, {"shape": [1]}).job
    with Member(job, "rollout", 9) as other:
        small, large = (other.call("put", "step", 1, {"shape": [n]}) for n in (1, 100_000))
        kept = large.get()
        other.kill()
        for handle in (small, large):
            for wire in WIRES:
                with pytest.raises(tenure.OwnerLost, match="rollout 9"):
                    handle.get(wire=wire)
        assert raw(kept) == raw(tensor_of([100_000]))


def test_an_owner_that_does_not_answer(trainer: Member) -> None:
    sent = trainer.call("put", "step", 61, {"shape": [1]})
    with trainer.stopped():
        begun = time.monotonic()
        with pytest.raises(tenure.StoreTimeout, match="trainer 0"):
            sent.get(timeout=0.5)
        assert time.monotonic() - begun < 5
    assert raw(sent.get()) == raw(tensor_of([1]))


@pytest.mark.usefixtures("trainer")
def test_a_handle_of_another_job() -> None:
    with Member("another-job", "trainer", 0) as stranger:
        sent = stranger.call("put", "step", 1, {"shape": [1]})
        with pytest.raises(tenure.AccessRefused, match="belongs to job another-job"):
            sent.get()


def cut_short() -> torch.Tensor:
    tensor = torch.ones(10)
    tensor.untyped_storage().resize_(16)
    return tensor


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.empty(3, device="meta"), "meta"),
        (torch.eye(3).to_sparse(), "sparse"),
        (cut_short(), "beyond its storage, which has 16 B of 40 B"),
        (torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8), "quantized"),
        (torch.nn.UninitializedParameter(), "no data until its module runs"),
        ("text", "a tensor is stored, not a str"),
    ],
)
def test_what_has_no_bytes_is_refused(tensor: Any, says: str) -> None:
    with tenure.store.scope("call") as scope, pytest.raises(tenure.InputError, match=says):
        scope.put(tensor)


@pytest.mark.parametrize(
    "call",
    [
        {"timeout": 0},
        {"timeout": -1},
        {"wire": "udp"},
        {"keep": True, "readonly": True},
        {"into": torch.zeros(1), "readonly": True},
        {"device": "cuda", "readonly": True},
        {"device": "meta"},
        {"device": "nowhere"},
        {"device": []},
        {"readonly": "yes"},
        {"keep": 2},
    ],
)
def test_options_that_mean_nothing(trainer: Member, call: dict[str, Any]) -> None:
    sent = trainer.call("put", "step", 62, {"shape": [1]})
    with pytest.raises(tenure.InputError):
        sent.get(**call)
