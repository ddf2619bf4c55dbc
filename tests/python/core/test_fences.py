"""Fences: memory that a device still uses is neither freed nor given to another tensor."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

import tenure

Fake = ModuleType


class TestOnTheCpu:
    def test_a_fence_is_ready_at_once(self) -> None:
        fence = tenure.Fence.record(torch.device("cpu"))
        assert fence.ready()
        fence.wait()

    def test_no_fence_is_ready_too(self) -> None:
        assert tenure.Fence().ready()

    def test_a_lease_released_behind_it_ends_at_once(self) -> None:
        x = torch.zeros(4)
        ref = tenure.StorageRef(x)
        lease = tenure.hold(x, "test")
        del x
        lease.release(after=tenure.Fence.record(torch.device("cpu")))
        assert not ref.alive
        assert tenure.ledger().leases == 0

    def test_a_storage_released_behind_it_is_freed_at_once(self) -> None:
        x = torch.zeros(4)
        tenure.release(x, after=tenure.Fence.record(torch.device("cpu")))
        assert tenure.is_released(x)
        assert tenure.ledger().leases == 0


def used() -> int:
    return torch.accelerator.memory_allocated("fake:0")


class TestLeases:
    def test_it_is_kept_until_the_stream_gets_there(self, fake: Fake) -> None:
        side = fake.new_stream()
        fake.hold(side)
        x = torch.zeros(256, device="fake")
        ref = tenure.StorageRef(x)
        lease = tenure.hold(x, "copy", kind="host_copy")
        del x
        lease.release(after=tenure.Fence.record(side))
        assert not lease.held
        assert (ref.alive, used()) == (True, 1024)
        assert (tenure.ledger().bytes, tenure.ledger().leases) == (1024, 1)
        fake.release(side)
        assert (tenure.ledger().bytes, tenure.ledger().leases) == (0, 0)
        assert (ref.alive, used()) == (False, 0)

    def test_it_leaves_its_scope_at_once(self, fake: Fake) -> None:
        side = fake.new_stream()
        fake.hold(side)
        with tenure.scope("step", 1, on_close="raise"):
            tenure.hold(torch.zeros(4, device="fake"), "copy").release(
                after=tenure.Fence.record(side)
            )
            assert list(tenure.ledger().by_scope()) == ["process"]
        fake.release(side)
        assert tenure.ledger().leases == 0

    def test_a_fence_holds_back_only_what_is_behind_it(self, fake: Fake) -> None:
        slow, quick = fake.new_stream(), fake.new_stream()
        fake.hold(slow)
        for stream, size in ((slow, 4), (quick, 8)):
            tenure.hold(torch.zeros(size, device="fake"), "copy").release(
                after=tenure.Fence.record(stream)
            )
        assert tenure.ledger().bytes == 16
        fake.release(slow)
        assert tenure.ledger().bytes == 0

    def test_one_fence_may_hold_back_several(self, fake: Fake) -> None:
        side = fake.new_stream()
        fake.hold(side)
        fence = tenure.Fence.record(side)
        for _ in range(10):
            tenure.hold(torch.zeros(4, device="fake"), "copy").release(after=fence)
        assert tenure.ledger().leases == 10
        fake.release(side)
        assert tenure.ledger().leases == 0

    def test_a_step_that_closes_sweeps(self, fake: Fake) -> None:
        """Memory goes at the next scope's end, without anyone asking the ledger."""
        side = fake.new_stream()
        fake.hold(side)
        tenure.hold(torch.zeros(256, device="fake"), "copy").release(
            after=tenure.Fence.record(side)
        )
        fake.release(side)
        with tenure.scope("step", 1):
            pass
        assert used() == 0

    def test_releasing_twice_is_refused_while_it_waits(self, fake: Fake) -> None:
        side = fake.new_stream()
        fake.hold(side)
        lease = tenure.hold(torch.zeros(4, device="fake"), "copy")
        lease.release(after=tenure.Fence.record(side))
        with pytest.raises(tenure.LeaseError, match="was released before"):
            lease.release()
        assert tenure.ledger().leases == 1, "it is the fence's now"
        fake.release(side)

    def test_a_copy_gets_what_it_was_to_copy(self, fake: Fake) -> None:
        """Offloading: the copy runs late, and the source's memory is wanted by the next tensor."""
        fake.set_memory_policy(reuse_freed=True)
        host = torch.zeros(64).pin_memory()
        side = fake.new_stream()
        fake.hold(side)

        def offload(*, fenced: bool) -> float:
            x = torch.full((64,), 1.0, device="fake")
            lease = tenure.hold(x, "offload")
            with side:
                host.copy_(x, non_blocking=True)
            del x
            lease.release(after=tenure.Fence.record(side) if fenced else None)
            torch.full((64,), 2.0, device="fake")
            side.synchronize()
            return host[0].item()

        assert offload(fenced=False) == 2, "without a fence the copy must be wrong here"
        assert offload(fenced=True) == 1
        assert tenure.ledger().leases == 0


class TestStorages:
    def test_memory_stays_until_the_stream_gets_there(self, fake: Fake) -> None:
        side = fake.new_stream()
        fake.hold(side)
        x = torch.zeros(256, device="fake")
        tenure.release(x, by="offload", after=tenure.Fence.record(side))
        assert tenure.is_released(x)
        assert used() == 1024
        (owner, totals), *rest = tenure.ledger().by_owner().items()
        assert (owner.kind, owner.name, totals.bytes, rest) == ("workspace", "offload", 1024, [])
        assert owner.site.startswith("tests/python/core/test_fences.py:")
        fake.release(side)
        assert (tenure.ledger().bytes, used()) == (0, 0)

    def test_readers_raise_at_once(self, fake: Fake) -> None:
        side = fake.new_stream()
        fake.hold(side)
        x = torch.zeros(4, device="fake")
        view = x[1:]
        tenure.release(x, after=tenure.Fence.record(side))
        with pytest.raises(RuntimeError, match="UseAfterRelease"):
            view.sum()
        fake.release(side)
        assert tenure.ledger().leases == 0

    def test_it_may_be_refilled_while_the_old_memory_waits(self, fake: Fake) -> None:
        side = fake.new_stream()
        fake.hold(side)
        x = torch.zeros(256, device="fake")
        tenure.release(x, after=tenure.Fence.record(side))
        tenure.refill(x, torch.ones(256, device="fake"))
        assert x.sum().item() == 256
        assert used() == 2048
        fake.release(side)
        assert (tenure.ledger().bytes, used()) == (0, 1024)

    @pytest.mark.parametrize("policy", ["reuse_freed", "poison_freed"])
    def test_a_copy_gets_what_it_was_to_copy(self, fake: Fake, policy: str) -> None:
        fake.set_memory_policy(**{policy: True})
        host = torch.zeros(64, dtype=torch.uint8).pin_memory()
        side = fake.new_stream()
        fake.hold(side)

        def offload(*, fenced: bool) -> int:
            x = torch.full((64,), 1, dtype=torch.uint8, device="fake")
            with side:
                host.copy_(x, non_blocking=True)
            if fenced:
                tenure.release(x, after=tenure.Fence.record(side))
            else:
                tenure.release(x)
            other = torch.full((64,), 2, dtype=torch.uint8, device="fake")
            side.synchronize()
            del other
            return int(host[0])

        wrong = {"reuse_freed": 2, "poison_freed": fake.POISON}[policy]
        assert offload(fenced=False) == wrong, "without a fence the copy must be wrong here"
        assert offload(fenced=True) == 1
        assert tenure.ledger().leases == 0

    def test_it_may_die_while_its_old_memory_waits(self, fake: Fake) -> None:
        side = fake.new_stream()
        fake.hold(side)
        x = torch.zeros(256, device="fake")
        tenure.release(x, after=tenure.Fence.record(side))
        del x
        assert (tenure.ledger().bytes, used()) == (1024, 1024)
        fake.release(side)
        assert (tenure.ledger().bytes, used()) == (0, 0)


class TestFence:
    def test_it_follows_its_stream(self, fake: Fake) -> None:
        side = fake.new_stream()
        fake.hold(side)
        fence = tenure.Fence.record(side)
        assert not fence.ready()
        fake.advance(side)
        assert fence.ready()

    def test_of_a_device_it_is_on_the_current_stream(self, fake: Fake) -> None:
        side = fake.new_stream()
        fake.hold(side)
        with side:
            fence = tenure.Fence.record(torch.device("fake:0"))
        assert not fence.ready()
        fake.release(side)
        assert fence.ready()

    def test_the_host_waits(self, fake: Fake) -> None:
        side = fake.new_stream()
        fake.hold(side)
        fence = tenure.Fence.record(side)
        fence.wait()
        assert fence.ready()
        assert fake.waits().host == 1

    def test_a_stream_waits_and_the_host_does_not(self, fake: Fake) -> None:
        x = torch.zeros(4, device="fake")
        side = fake.new_stream()
        fake.hold(side)
        with side:
            x.copy_(torch.ones(4).pin_memory(), non_blocking=True)
        fence = tenure.Fence.record(side)
        fence.wait(torch.accelerator.current_stream())
        assert fake.waits().host == 0
        assert x.tolist() == [1] * 4
