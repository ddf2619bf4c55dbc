"""The store beside a real accelerator: tensors from it and to it, through pinned memory."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
import torch

import tenure

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

MIB = 1 << 20


@pytest.fixture(autouse=True)
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TENURE_STORE_SECRET", secrets.token_hex(16))
    tenure.store.leave()
    tenure.store.join(f"gpu-{secrets.token_hex(4)}", "trainer", 0)
    yield
    tenure.store.leave()


@pytest.mark.parametrize("wire", [None, "tcp"])
@pytest.mark.parametrize("elements", [0, 1, 1000, 5 * MIB + 3, 40 * MIB])
def test_there_and_back(elements: int, wire: str | None) -> None:
    tensor = torch.randn(elements, device="cuda").to(torch.bfloat16)
    with tenure.store.scope("step") as scope:
        handle = scope.put(tensor)
        back = handle.get(device="cuda", wire=wire)
        assert back.device == tensor.device
        assert torch.equal(back, tensor)
        assert torch.equal(handle.get(wire=wire), tensor.cpu())


def test_views_and_targets() -> None:
    base = torch.randn(512, 512, device="cuda")
    with tenure.store.scope("step") as scope:
        handle = scope.put(base.t()[::2])
        assert torch.equal(handle.get(), base.t()[::2].cpu())
        target = torch.zeros(256, 512, device="cuda")
        assert handle.get(into=target) is target
        assert torch.equal(target, base.t()[::2])
        rows = handle.get(rows=slice(3, 7), device="cuda")
        assert torch.equal(rows, base.t()[::2][3:7])


def test_what_is_still_being_computed_is_waited_for() -> None:
    """The tensor is put while its kernels are queued on a stream of the user's."""
    stream = torch.cuda.Stream()
    with tenure.store.scope("step") as scope:
        for _ in range(5):
            with torch.cuda.stream(stream):
                value = torch.ones(2048, 2048, device="cuda")
                for _ in range(50):
                    value = value @ torch.full_like(value, 1 / 2048)
                handle = scope.put(value)
            assert torch.equal(handle.get(), torch.ones(2048, 2048))
            with torch.cuda.stream(stream):
                doubled = handle.get(device="cuda") * 2
            stream.synchronize()
            assert torch.equal(doubled.cpu(), torch.full((2048, 2048), 2.0))


def test_memory_stays_flat() -> None:
    def step(number: int) -> None:
        with tenure.store.scope("flat", number) as scope:
            handle = scope.put(torch.ones(4 * MIB, device="cuda"))
            handle.get(device="cuda")

    for number in range(5):
        step(number)
    torch.cuda.synchronize()
    device = torch.cuda.memory_allocated()
    pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    for number in range(5, 100):
        step(number)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == device
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] <= pinned
