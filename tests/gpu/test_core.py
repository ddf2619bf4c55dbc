"""Core on a real GPU: what tests/python/core shows on the CPU and on the fake accelerator."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

import tenure

MIB = 1 << 20
# Long enough that a kernel launched after it has not run when the host asks.
CYCLES = 200_000_000


def allocated() -> int:
    return torch.cuda.memory_allocated()


def current_scope() -> str:
    with tenure.hold(torch.empty(1), "probe") as lease:
        return lease.scope


def test_no_reference_ever_equals_another_storages_over_a_million_reuses(cuda: torch.device):
    sizes = [1, 100, 513, 4096, 70_000, 3 * MIB]
    window: list[tenure.StorageRef] = []
    seen = set()
    repeated = 0
    for i in range(1_000_000):
        x = torch.empty(sizes[i % len(sizes)], dtype=torch.uint8, device=cuda)
        ref = tenure.StorageRef(x)
        address = x.data_ptr()
        repeated += address in seen
        seen.add(address)
        assert ref not in window
        window.append(ref)
        if len(window) > 16:
            window.pop(0)
        del x
        assert not ref.alive
    assert len(set(window)) == len(window)
    assert repeated > 900_000, "the allocator did not reuse addresses: the test shows nothing"


def test_release_frees_device_memory_whatever_aliases_exist(cuda: torch.device):
    before = allocated()
    x = torch.ones(64 * MIB // 4, device=cuda)
    aliases = [x[10:], x.view(1024, -1).T, x.detach(), x.view(torch.int32), *x.chunk(3)]
    assert allocated() - before == 64 * MIB
    tenure.release(x, by="test")
    assert allocated() == before
    for alias in [x, *aliases]:
        with pytest.raises(RuntimeError, match=r"^UseAfterRelease: storage .* released by 'test'"):
            alias.sum()
        with pytest.raises(RuntimeError, match="^UseAfterRelease"):
            alias.cpu()
    versions = [alias._version for alias in aliases]
    tenure.refill(x, torch.full_like(torch.empty(64 * MIB // 4, device=cuda), 2.0))
    assert [alias._version for alias in aliases] == versions
    assert aliases[0].sum().item() == 2.0 * (64 * MIB // 4 - 10)


def test_backward_through_a_refilled_saved_tensor_is_bit_equal(cuda: torch.device):
    torch.manual_seed(0)
    w = torch.randn(256, 256, device=cuda, requires_grad=True)
    x = torch.randn(256, 256, device=cuda)

    def gradient(*, released: bool) -> torch.Tensor:
        w.grad = None
        h = x @ w
        y = (h * h).sum()
        if released:
            content = h.detach().clone()
            tenure.release(h)
            with pytest.raises(RuntimeError, match="UseAfterRelease"):
                torch.autograd.grad(y, w, retain_graph=True)
            tenure.refill(h, content)
        y.backward()
        return w.grad

    plain = gradient(released=False).clone()
    assert torch.equal(plain, gradient(released=True))


def test_refill_refuses_another_device(cuda: torch.device):
    x = torch.ones(8, device=cuda)
    tenure.release(x)
    with pytest.raises(tenure.ReleaseError, match="move the content to cuda"):
        tenure.refill(x, torch.ones(8))
    assert tenure.is_released(x)
    tenure.refill(x, torch.ones(8, device=cuda))


def test_a_fence_is_ready_when_the_stream_gets_there(cuda: torch.device):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        fence = tenure.Fence.record(cuda)  # the current stream of the device
    assert not fence.ready()
    fence.wait()
    assert fence.ready()


def test_a_stream_that_waits_for_a_fence_reads_what_was_written(cuda: torch.device):
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.zeros(MIB, device=cuda)
    torch.cuda.synchronize()
    with torch.cuda.stream(writer):
        torch.cuda._sleep(CYCLES)
        x.fill_(1.0)
        fence = tenure.Fence.record(writer)
    fence.wait(reader)
    with torch.cuda.stream(reader):
        total = x.sum()
    reader.synchronize()
    assert total.item() == MIB


def test_a_lease_released_after_a_fence_keeps_its_memory_until_then(cuda: torch.device):
    before = allocated()
    stream = torch.cuda.Stream()
    x = torch.empty(32 * MIB, dtype=torch.uint8, device=cuda)
    lease = tenure.hold(x, "copy source", kind="activation")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        fence = tenure.Fence.record(stream)
    del x
    lease.release(after=fence)
    assert not lease.held
    assert allocated() - before == 32 * MIB
    assert tenure.ledger().by_kind()["activation"].bytes == 32 * MIB
    fence.wait()
    assert tenure.ledger().bytes == 0
    assert allocated() == before


@pytest.mark.parametrize("fenced", [True, False])
def test_only_a_fence_keeps_released_memory_from_a_reader_on_another_stream(
    cuda: torch.device, fenced: bool
):
    """Without the fence the allocator hands the block out again while the other stream reads it."""
    stream = torch.cuda.Stream()
    elements = 8 * MIB
    x = torch.ones(elements, device=cuda)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        total = x.sum(dtype=torch.float64)
        fence = tenure.Fence.record(stream)
    tenure.release(x, after=fence if fenced else None)
    thief = torch.full((elements,), 7.0, device=cuda)  # on the main stream, at once
    torch.cuda.synchronize()
    assert tenure.ledger().bytes == 0
    assert thief[0].item() == 7.0
    assert (total.item() == elements) == fenced


def test_a_lease_taken_in_backward_belongs_to_the_scope_of_its_caller(cuda: torch.device):
    found: dict[str, str] = {}
    threads: set[int] = set()

    def hook(grad: torch.Tensor) -> None:
        with tenure.hold(grad, "gradient", kind="gradient") as lease:
            found["scope"] = lease.scope
        threads.add(threading.get_ident())

    w = torch.randn(16, device=cuda, requires_grad=True)
    w.register_hook(hook)
    with tenure.scope("step", 3):
        (w * w).sum().backward()
    assert found["scope"] == "step 3"
    assert threading.get_ident() not in threads, "backward did not run on a device thread"


def test_interleaved_tasks_find_their_own_scope_in_backward(cuda: torch.device):
    found: dict[int, set[str]] = {0: set(), 1: set()}

    async def train(task: int, turn: asyncio.Barrier) -> None:
        w = torch.randn(16, device=cuda, requires_grad=True)
        w.register_hook(lambda _: found[task].add(current_scope()))
        with tenure.scope("task", task):
            for _ in range(20):
                await turn.wait()
                (w * w).sum().backward()

    async def main() -> None:
        turn = asyncio.Barrier(2)
        await asyncio.gather(train(0, turn), train(1, turn))

    asyncio.run(main())
    assert found == {0: {"task 0"}, 1: {"task 1"}}


def test_device_memory_is_flat_over_steps_that_raise(cuda: torch.device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256)
    ).to(cuda)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(number: int) -> None:
        with tenure.scope("step", number, on_close="release"):
            h = model[0](torch.randn(64, 256, device=cuda))
            tenure.hold(h, "hidden", kind="activation")
            if number % 7 == 3:
                raise ValueError("in forward")
            model[2](model[1](h)).square().mean().backward()
            if number % 11 == 5:
                raise ValueError("before the optimizer")
            optimizer.step()
            optimizer.zero_grad()

    used = []
    for number in range(300):
        try:
            step(number)
        except ValueError:
            optimizer.zero_grad()
        if number >= 20:
            used.append(allocated())
    assert max(used) == min(used)
    assert tenure.ledger().leases == 0


def test_a_copy_from_pinned_memory_is_fenced(cuda: torch.device):
    host = torch.ones(32 * MIB, dtype=torch.uint8, pin_memory=True)
    copies = torch.cuda.Stream()
    with torch.cuda.stream(copies):
        torch.cuda._sleep(CYCLES)
        x = host.to(cuda, non_blocking=True)
    lease = tenure.hold(host, "upload", kind="host_copy")
    lease.release(after=tenure.Fence.record(copies))
    assert tenure.ledger().by_kind()["host_copy"].bytes == 32 * MIB
    copies.synchronize()
    assert tenure.ledger().bytes == 0
    assert x.sum().item() == 32 * MIB
