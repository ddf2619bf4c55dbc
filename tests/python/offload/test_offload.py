"""One copy on the host serves all that is saved of a storage, and the device lets all of it go."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import tenure
from offloading import Context, Keep, batch, blocks, equal, gradients, side_streams, used

Fake = ModuleType

SIZE = 64 * 1024


class OnBoth:
    """Tests that run on the CPU with target="copy", and on the fake device with 0, 1, 2 streams."""

    device: str
    options: dict[str, Any]

    def offload(self, *models: torch.nn.Module, **options: Any) -> tenure.Offload:
        return tenure.Offload(*models, **(self.options | options))

    def leaf(self) -> Tensor:
        return torch.ones(4, device=self.device, requires_grad=True)

    def activation(self, nbytes: int = SIZE) -> Tensor:
        """Of bytes that differ, in a storage of its own that nobody else holds."""
        numbers = torch.arange(nbytes // 2, dtype=torch.int16).view(torch.uint8)
        return numbers.to(self.device, copy=True)

    def at_an_address_given_back(self, value: float) -> Tensor:
        return torch.full((SIZE // 4,), value, device=self.device)

    def test_views_of_any_type_and_offset_share_one_copy(self) -> None:
        seen: list[Tensor] = []
        offload = self.offload()
        with offload:
            base = self.activation()
            views = [
                base,
                base[2048:].view(torch.int32),
                base[10:].view(torch.int16)[::2],
                base.view(torch.int64)[192:].view(8, -1)[:, 1:].t(),
                base.view(torch.complex64)[5:2000].conj(),
            ]
            expected = [view.cpu().clone() for view in views]
            loss = Keep.apply(self.leaf(), seen, *views).sum()
            del base, views
            loss.backward()
        stats = offload.stats()
        assert (stats.saved_storages, stats.moved_out_storages) == (1, 1)
        assert (stats.moved_out_bytes, stats.most_host_bytes) == (SIZE, SIZE)
        assert stats.moved_in_bytes == SIZE
        for found, view in zip(seen, expected, strict=True):
            assert (found.dtype, found.is_conj()) == (view.dtype, view.is_conj())
            assert torch.equal(found, view)

    def test_a_view_of_a_small_part_moves_that_part_alone(self) -> None:
        seen: list[Tensor] = []
        offload = self.offload()
        with offload:
            base = self.activation(1 << 20)
            part = base[5001:7001]
            expected = part.cpu().clone()
            loss = Keep.apply(self.leaf(), seen, part).sum()
            del base, part
            loss.backward()
        assert 2000 <= offload.stats().moved_out_bytes < 2000 + 512
        assert torch.equal(seen[0], expected)

    @pytest.mark.parametrize("budget", [None, "5MiB", "16MiB"])
    def test_small_parts_count_as_one_storage_and_share_its_fate(self, budget: str | None) -> None:
        offload = tenure.Offload(target="copy", min_bytes=1, budget=budget)
        for _ in range(4):
            base = torch.arange(1 << 20, dtype=torch.float32)
            x = torch.ones(1, requires_grad=True)
            with offload:
                for i in range(9):
                    x = Keep.apply(x, [], base[i * 50_000 : (i + 1) * 50_000])
                del base
                x.sum().backward()
        stats = offload.stats()
        assert (stats.saved_storages, stats.saved_bytes) == (1, 4 << 20)
        moved = stats.moved_out_bytes
        assert moved == 0 if budget else 9 * 50_000 * 4 <= moved < 4 << 20

    def test_parts_that_overlap_are_not_moved_over_and_over(self) -> None:
        seen: list[Tensor] = []
        offload = self.offload()
        with offload:
            base = self.activation()
            parts = base.unfold(0, SIZE // 32, SIZE // 128)
            expected = [part.cpu().clone() for part in parts]
            loss = Keep.apply(self.leaf(), seen, *parts).sum()
            del base, parts
            loss.backward()
        assert offload.stats().moved_out_bytes <= 2 * SIZE
        assert equal(seen, expected)

    def test_a_storage_saved_at_two_versions_has_two_copies(self) -> None:
        offload = self.offload()
        with offload:
            base = self.activation().view(torch.int16)
            before: list[Tensor] = []
            after: list[Tensor] = []
            first = Keep.apply(self.leaf(), before, base)
            base.add_(1)
            expected = base.cpu().clone()
            second = Keep.apply(self.leaf(), after, base)
            del base
            second.sum().backward()
            with pytest.raises(tenure.MutationError):
                first.sum().backward()
        assert offload.stats().moved_out_storages == 2
        assert torch.equal(after[0], expected)
        assert before == []

    def test_the_next_storage_at_the_same_address_is_another_one(self) -> None:
        """Seed 002: an allocator gives freed memory to the next tensor of that size."""
        seen: list[Tensor] = []
        offload = self.offload()
        addresses = set()
        with offload:
            x = self.leaf()
            for value in range(50):
                saved = self.at_an_address_given_back(value)
                addresses.add(saved.data_ptr())
                x = Keep.apply(x, seen, saved)
                del saved
                offload.settle()
            x.sum().backward()
        assert len(addresses) < 50, "the allocator did not reuse memory: this tests nothing"
        assert offload.stats().moved_out_storages == 50
        assert [found[0].item() for found in seen] == list(range(49, -1, -1))
        assert all((found == found[0]).all() for found in seen)

    def test_gradients_are_those_of_plain_training(self) -> None:
        model, x = blocks(device=self.device), batch(device=self.device)
        plain = gradients(model, x)
        offload = self.offload(model)
        for _ in range(5):
            assert equal(gradients(model, x, offload), plain)
        assert offload.stats().mode == "planned"
        assert offload.stats().moved_out_bytes > 0


class TestOnTheCpu(OnBoth):
    device = "cpu"
    options: ClassVar[dict[str, Any]] = {"target": "copy", "min_bytes": 1}
    memory = bytearray(SIZE)

    def at_an_address_given_back(self, value: float) -> Tensor:
        """In memory of ours: glibc may cut what was freed to pieces before it is asked again."""
        return torch.frombuffer(self.memory, dtype=torch.float32).fill_(value)


@pytest.mark.usefixtures("fake")
class TestOnADevice(OnBoth):
    device = "fake"

    @pytest.fixture(autouse=True, params=[0, 1, 2], ids=lambda n: f"{n} streams")
    def _streams(self, request: pytest.FixtureRequest, fake: Fake) -> None:
        fake.set_memory_policy(reuse_freed=True)
        self.options = {"streams": request.param, "min_bytes": 1}

    def test_the_device_has_none_of_it_after_forward(self) -> None:
        seen: list[Tensor] = []
        offload = self.offload()
        for _ in range(3):
            x = self.leaf()
            before = used()
            with offload:
                base = self.activation()
                views = [base, base[512:].view(torch.float32), base.view(torch.float64)[7:]]
                loss = Keep.apply(x, seen, *views).sum()
                assert used() - before >= SIZE
                del base, views
                offload.settle()
                assert used() - before < SIZE
                assert offload.stats().host_bytes == SIZE
                loss.backward()
            assert offload.stats().host_bytes == 0
            del loss, x

    def test_a_forward_leaves_only_what_it_returns(self, fake: Fake) -> None:
        model, x = blocks(device="fake"), batch(device="fake")
        plain = gradients(model, x)
        offload = self.offload(model)
        for _ in range(4):
            model.zero_grad()
            before = used()
            with offload:
                y = model(x).square()
                torch.accelerator.synchronize()
                offload.settle()
                assert used() - before == y.nbytes
                y.sum().backward()
            del y
            assert equal([p.grad.cpu() for p in model.parameters() if p.grad is not None], plain)
        del fake

    def test_memory_returns_while_the_program_is_idle(self, fake: Fake) -> None:
        """Nobody calls: a thread of Offload's own lets go of what has been copied."""
        offload = self.offload()
        with offload:
            Keep.apply(self.leaf(), [], self.activation()).sum().backward()
        with offload:
            base = self.activation(2 * SIZE)  # no plan is for this: the step does not wait for it
            ref = tenure.StorageRef(base)
            for stream in side_streams(fake):
                fake.hold(stream)
            loss = Keep.apply(self.leaf(), [], base).sum()
            del base
            for stream in side_streams(fake):
                fake.release(stream)
            deadline = time.monotonic() + 10
            while ref.alive:
                assert time.monotonic() < deadline
            loss.backward()

    def test_two_devices_in_one_step(self) -> None:
        def gradients_of(context: Context) -> list[Tensor]:
            a = torch.full((64, 64), 0.5, device="fake:0", requires_grad=True)
            b = torch.full((64, 64), 0.5, device="fake:1", requires_grad=True)
            with context:
                ((a * 2).sin().to("fake:1") * b).cos().sum().backward()
            return [tensor.grad.cpu() for tensor in (a, b) if tensor.grad is not None]

        plain = gradients_of(nullcontext())
        offload = self.offload()
        for _ in range(4):
            assert equal(gradients_of(offload), plain)
        assert offload.stats().moved_out_storages == 3
        assert offload.stats().mode == "planned"
