"""The fake accelerator from Python: delays are real, and torch takes it for a device.

Its parts are tested in C++ (tests/cpp/fake_accelerator); here is what Python tests rely on.
"""

from __future__ import annotations

import threading
from types import ModuleType

import pytest
import torch
from torch.utils.checkpoint import checkpoint

Fake = ModuleType


def pinned(*values: float) -> torch.Tensor:
    return torch.tensor(values).pin_memory()


def test_torch_finds_the_device(fake: Fake) -> None:
    assert torch.accelerator.current_accelerator() == torch.device("fake")
    assert torch.accelerator.device_count() == fake.device_count() == 2
    assert torch.zeros(2, device="fake:1").device == torch.device("fake", 1)


def test_read_without_fence_is_stale(fake: Fake) -> None:
    x = torch.zeros(2, device="fake")
    side = torch.Stream(device="fake")
    fake.hold(side)
    with side:
        x.copy_(pinned(1, 2), non_blocking=True)
    assert x.tolist() == [0, 0]
    assert fake.pending(side) == 1
    fake.release(side)
    assert x.tolist() == [1, 2]


def test_read_behind_fence_is_right(fake: Fake) -> None:
    x = torch.zeros(2, device="fake")
    side = fake.new_stream()
    fake.hold(side)
    with side:
        x.copy_(pinned(1, 2), non_blocking=True)
    event = side.record_event()
    assert not event.query()
    torch.accelerator.current_stream().wait_event(event)
    assert x.tolist() == [1, 2]
    assert event.query()
    assert fake.held(side)


def test_events_reorder(fake: Fake) -> None:
    a, b = fake.new_stream(), fake.new_stream()
    fake.hold(a)
    fake.hold(b)
    first, second = a.record_event(), b.record_event()
    assert fake.advance(b) == 1
    assert (first.query(), second.query()) == (False, True)
    first.synchronize()
    assert first.query()


def test_offload_without_fence_copies_the_next_tensor(fake: Fake) -> None:
    fake.set_memory_policy(reuse_freed=True)
    host = torch.zeros(64).pin_memory()
    side = fake.new_stream()
    fake.hold(side)

    def offload(*, record: bool) -> float:
        x = torch.full((64,), 1.0, device="fake")
        with side:
            host.copy_(x, non_blocking=True)
        if record:
            x.record_stream(side)
        del x
        torch.full((64,), 2.0, device="fake")
        side.synchronize()
        return host[0].item()

    assert offload(record=False) == 2
    assert offload(record=True) == 1


def test_freed_memory_is_poisoned(fake: Fake) -> None:
    fake.set_memory_policy(poison_freed=True)
    host = torch.zeros(8, dtype=torch.uint8).pin_memory()
    side = fake.new_stream()
    fake.hold(side)
    x = torch.ones(8, dtype=torch.uint8, device="fake")
    with side:
        host.copy_(x, non_blocking=True)
    del x
    fake.release(side)
    assert host.tolist() == [fake.POISON] * 8


@pytest.mark.usefixtures("fake")
def test_allocator_figures_are_exact() -> None:
    before = torch.accelerator.memory_allocated()
    x = torch.empty(1000, device="fake")
    y = x + 1
    assert torch.accelerator.memory_allocated() - before == 8000
    del y
    assert torch.accelerator.memory_allocated() - before == 4000
    assert torch.accelerator.max_memory_allocated() - before == 8000
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() - before == 4000


@pytest.mark.usefixtures("fake")
def test_storage_resize_keeps_what_fits_and_frees_the_rest() -> None:
    before = torch.accelerator.memory_allocated()
    x = torch.arange(4, device="fake")
    x.untyped_storage().resize_(64)
    assert x.tolist() == [0, 1, 2, 3]
    assert torch.accelerator.memory_allocated() - before == 64
    x.untyped_storage().resize_(0)
    assert torch.accelerator.memory_allocated() - before == 0


def test_limit_raises_torchs_own_error(fake: Fake) -> None:
    fake.set_memory_policy(device_bytes=1024)
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 2048 bytes"):
        torch.empty(512, device="fake")


def test_memset_kernel_is_delayed(fake: Fake) -> None:
    x = torch.zeros(4, dtype=torch.uint8, device="fake")
    side = fake.new_stream()
    fake.hold(side)
    with side:
        fake.launch_memset(x, 7)
    assert x.tolist() == [0] * 4
    fake.release(side)
    assert x.tolist() == [7] * 4


def test_shuffle_lets_streams_lag_until_something_waits(fake: Fake) -> None:
    stale = 0
    for seed in range(50):
        fake.shuffle(seed)
        x = torch.zeros(1, device="fake")
        side = fake.new_stream()
        with side:
            x.copy_(pinned(1), non_blocking=True)
        stale += x.item() == 0
        torch.accelerator.current_stream().wait_event(side.record_event())
        assert x.item() == 1
        fake.run_in_order()
    assert 0 < stale < 50


def test_waits_are_counted(fake: Fake) -> None:
    side = fake.new_stream()
    fake.hold(side)
    side.record_event()
    assert (fake.waits().host, fake.waits().forced) == (0, 0)
    side.synchronize()
    assert (fake.waits().host, fake.waits().forced) == (1, 1)


@pytest.mark.usefixtures("fake")
def test_backward_runs_on_a_device_thread() -> None:
    threads: list[int] = []
    x = torch.ones(2, device="fake", requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: threads.append(threading.get_native_id()))
    y.sum().backward()
    assert len(threads) == 1
    assert threads[0] != threading.get_native_id()


def train(device: str) -> list[torch.Tensor]:
    """Two steps of a small transformer block, with what real models use."""
    torch.manual_seed(0)
    embed = torch.nn.Embedding(11, 16)
    block = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    head = torch.nn.Linear(16, 11)
    model = torch.nn.ModuleList([embed, block, head]).to(device)
    # A large eps: the gradient of the keys' bias is rounding noise, which Adam would blow up.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    tokens = torch.arange(10).view(2, 5).to(device)
    for _ in range(2):
        hidden = checkpoint(block, embed(tokens), use_reentrant=False)
        loss = torch.nn.functional.cross_entropy(head(hidden).flatten(0, 1), tokens.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.usefixtures("fake")
def test_training_gives_what_the_cpu_gives() -> None:
    for on_fake, on_cpu in zip(train("fake"), train("cpu"), strict=True):
        torch.testing.assert_close(on_fake, on_cpu)


def test_reset_makes_the_device_as_new(fake: Fake) -> None:
    side = fake.new_stream()
    fake.shuffle(1)
    fake.hold(side)
    fake.set_memory_policy(poison_freed=True, reuse_freed=True, device_bytes=1 << 20)
    event = side.record_event()
    side.synchronize()
    last = side.record_event()
    fake.reset()
    assert event.query()
    assert last.query()
    assert not fake.held(side)
    assert (fake.waits().host, fake.waits().forced) == (0, 0)
    torch.empty(1 << 20, device="fake")
    assert torch.accelerator.memory_reserved() == torch.accelerator.memory_allocated()


def test_other_tests_do_not_see_it() -> None:
    """Without the fixture a test is in a process that has no accelerator but its own."""
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is None or accelerator.type != "fake"
