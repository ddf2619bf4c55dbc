"""Every fence of an offloaded storage, one test each: see Note [Fences of a saved storage].

A device that is slow where it must not matter: copy streams are held, memory that is freed is
poisoned and given to the next tensor at once. Without the fence that a test names, someone reads
what is not there yet or not there any more.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import tenure
from offloading import side_streams, tell, used
from slow_copies import N, Save, Slow, full, values

Fake = ModuleType

ONE_OR_TWO = pytest.mark.parametrize("streams", [1, 2])
ANY_STREAMS = pytest.mark.parametrize("streams", [0, 1, 2])


class TestOut:
    """A copy to the host."""

    @ONE_OR_TWO
    def test_waits_for_the_content(self, fake: Fake, streams: Any) -> None:
        slow = Slow(fake, streams=streams)
        side = fake.new_stream()
        found: list[Tensor] = []
        with slow.offload:
            with side:
                fake.hold(side)
                late = full(-1)
                late.copy_(full(3), non_blocking=True)
                saved = slow.save(late, use=found.extend)
                del late
            slow.run()
            slow.backward(saved)
        assert values(found[0]) == {3}

    def test_waits_until_the_host_memory_has_been_read(self, fake: Fake) -> None:
        slow = Slow(fake)
        side = fake.new_stream()
        found: list[Tensor] = []
        other = full(5, 8 * N)
        with slow.offload:
            first = slow.save(full(3, 8 * N), use=found.extend)
            slow.run()
            slow.hold()
            slow.backward(first)
            del first  # and its host memory: the copy back from there is still to come
            reading = slow.busy()
            with side:
                second = slow.save(other)
            slow.advance([stream for stream in slow.busy() if stream not in reading])
            slow.run()
        assert values(found[0]) == {3}
        del second

    def test_waits_for_all_readers_of_host_memory_that_was_joined(self, fake: Fake) -> None:
        """Two neighbours become one piece: the one that was given back last was not read last."""
        slow = Slow(fake)
        side = fake.new_stream()
        found: list[Tensor] = []
        other = full(5, 8 * N)
        with slow.offload:
            asked = slow.save(full(3, 4 * N), use=found.extend)
            never_asked = slow.save(full(2, 4 * N))
            slow.run()
            slow.hold()
            slow.backward(asked)
            del asked
            del never_asked
            reading = slow.busy()
            with side:
                second = slow.save(other)
            slow.advance([stream for stream in slow.busy() if stream not in reading])
            slow.run()
        assert values(found[0]) == {3}
        del second

    def test_waits_for_readers_that_an_urgent_one_has_overtaken(self, fake: Fake) -> None:
        """Three neighbours become one piece: the one that was read last was asked for at once."""
        slow = Slow(fake)
        side = fake.new_stream()
        found: list[Tensor] = []
        other = full(5, 8 * N)
        with slow.offload:
            ahead = slow.save(full(2, 4 * N), use=found.extend)
            first = slow.save(full(3, N))
            second = slow.save(full(4, 3 * N))
            slow.run()
            slow.hold()
            slow.backward(first)  # and `ahead` is fetched, behind it
            waiting = slow.busy()
            assert len(waiting) == 2
            urgent = next(stream for stream in waiting if fake.advance(stream))
            slow.advance([urgent])
            slow.backward(second)
            slow.advance([urgent])
            slow.backward(ahead)
            del ahead, first, second
            with side:
                again = slow.save(other)
            slow.advance([stream for stream in slow.busy() if stream not in waiting])
            slow.run()
        assert values(found[0]) == {2}
        del again

    def test_waits_until_host_memory_has_been_written_by_another_stream(self, fake: Fake) -> None:
        """Without streams of its own, copies run on those that compute: here on two."""
        slow = Slow(fake, streams=0)
        side = fake.new_stream()
        found: list[Tensor] = []
        with slow.offload:
            with side:
                first = slow.save(full(5, 8 * N))
                slow.run()
                fake.hold(side)
                del first
                first = slow.save(full(6, 8 * N))
                del first
            second = slow.save(full(3, 8 * N), use=found.extend)
            slow.run()
            fake.release(side)
            slow.backward(second)
        assert values(found[0]) == {3}

    @pytest.mark.parametrize("last", [0, 1])
    def test_waits_for_all_writers_of_host_memory_on_two_streams(
        self, fake: Fake, last: int
    ) -> None:
        """Two neighbours, each with a copy of its own stream to wait for, are given back."""
        slow = Slow(fake, streams=0)
        side = fake.new_stream()
        found: list[Tensor] = []
        with slow.offload:
            with side:
                fake.hold(side)
                saved = [slow.save(full(5, 4 * N))]
            saved.append(slow.save(full(6, 4 * N)))
            del saved[1 - last]
            del saved[0]
            again = slow.save(full(3, 8 * N), use=found.extend)
            torch.accelerator.current_stream().synchronize()
            fake.release(side)
            slow.run()
            slow.backward(again)
        assert values(found[0]) == {3}


class TestGone:
    """A storage is let go."""

    @ONE_OR_TWO
    def test_when_it_has_been_copied(self, fake: Fake, streams: Any) -> None:
        slow = Slow(fake, streams=streams)
        found: list[Tensor] = []
        with slow.offload:
            slow.hold()
            saved = slow.save(full(3), use=found.extend)
            slow.offload.settle()
            others = [full(7) for _ in range(3)]
            slow.run()
            slow.backward(saved)
        assert values(found[0]) == {3}
        assert [values(other) for other in others] == [{7}] * 3

    @ONE_OR_TWO
    def test_when_compute_waits_for_the_copy(self, fake: Fake, streams: Any) -> None:
        fake.set_memory_policy(reuse_freed=True, poison_freed=True)
        found: list[Tensor] = []
        x, grad = torch.ones(1, device="fake", requires_grad=True), torch.ones(1, device="fake")
        offload = tenure.Offload(streams=streams, min_bytes=1)
        with offload:  # the first step: nothing may lag behind
            Save.apply(x, lambda _: None, full(0))
            for stream in side_streams(fake):
                fake.hold(stream)
            before = used()
            saved = Save.apply(x, found.extend, full(3))
            assert used() == before, "it is not let go: this tests nothing"
            other = full(7)
            saved.backward(grad)
            torch.accelerator.synchronize()
        assert values(found[0]) == {3}
        assert values(other) == {7}

    @ONE_OR_TWO
    def test_when_the_stream_that_saved_it_waits_for_the_copy(
        self, fake: Fake, streams: Any
    ) -> None:
        """And not only the stream that saves the next one, for which there is no room."""
        tell(fake)
        slow = Slow(fake, streams=streams)
        side = fake.new_stream()
        found: list[Tensor] = []
        for last in (False, False, False, True):  # two that follow, one measured, one planned
            with slow.offload:
                if last:
                    slow.hold()
                with side:
                    mine = full(3)
                    first = slow.save(mine, use=found.extend)
                ref = tenure.StorageRef(mine)
                del mine
                assert ref.alive or not last
                second = slow.save(full(5))
                assert not (ref.alive and last)
                with side:
                    other = full(7)
                full(0, 40 * N)  # the peak of the step
                slow.run()
                slow.backward(second)
                slow.backward(first)
            assert values(found.pop()) == {3}
            assert values(other) == {7}
            del first, second, other
        assert slow.offload.stats().mode == "planned"

    @ONE_OR_TWO
    def test_when_the_stream_that_reads_it_is_done(self, fake: Fake, streams: Any) -> None:
        """Autograd would have kept it for the stream that saved it."""
        fake.set_memory_policy(reuse_freed=True, poison_freed=True)
        x = torch.ones(1, device="fake", requires_grad=True)
        side = fake.new_stream()
        with tenure.Offload(streams=streams, min_bytes=1):
            mine = full(3)
            with side:
                there = full(0)
                fake.hold(side)
                saved = Save.apply(x, lambda _: None, mine)
                there.copy_(mine, non_blocking=True)
            del mine
            others = [full(7) for _ in range(3)]
            torch.accelerator.synchronize()
        assert values(there) == {3}
        assert [values(other) for other in others] == [{7}] * 3
        del saved


class TestBack:
    """A copy from the host."""

    @ONE_OR_TWO
    def test_waits_for_whoever_had_the_memory_before(self, fake: Fake, streams: Any) -> None:
        slow = Slow(fake, streams=streams)
        side = fake.new_stream()
        found: list[Tensor] = []
        with slow.offload:
            with side:
                saved = slow.save(full(3), use=found.extend)
                slow.run()
                there, before = full(0), full(9)
                fake.hold(side)
                there.copy_(before, non_blocking=True)
                del before
            slow.backward(saved)
            fake.release(side)
            slow.run()
        assert values(there) == {9}
        assert values(found[0]) == {3}

    def test_waits_for_the_copy_to_the_host(self, fake: Fake) -> None:
        """Which is still to come when someone frees the storage that it is from."""
        slow = Slow(fake)
        found: list[Tensor] = []
        with slow.offload:
            slow.hold()
            mine = full(3)
            saved = slow.save(mine, use=found.extend)
            (out,) = slow.busy()
            tenure.release(mine, after=tenure.Fence.record(out))
            slow.backward(saved)
            slow.advance([stream for stream in slow.busy() if stream != out])
            slow.run()
        assert values(found[0]) == {3}

    @ONE_OR_TWO
    def test_is_waited_for_although_nobody_asks_for_it(self, fake: Fake, streams: Any) -> None:
        """Fetched ahead, then its graph goes: the memory is the next tensor's."""
        slow = Slow(fake, streams=streams)
        with slow.offload:
            ahead = slow.save(full(2))
            asked = slow.save(full(3, 2 * N))
            slow.run()
            slow.hold()
            before = used()
            slow.backward(asked)
            assert used() - before >= 4 * N, "it is not fetched: this tests nothing"
            del ahead, asked
            others = [full(9) for _ in range(3)]
            slow.run()
        assert [values(other) for other in others] == [{9}] * 3


class TestUse:
    """A node of backward that asks."""

    @ONE_OR_TWO
    def test_waits_for_the_copy_from_the_host(self, fake: Fake, streams: Any) -> None:
        slow = Slow(fake, streams=streams)
        found: list[Tensor] = []
        with slow.offload:
            ahead = slow.save(full(2), use=lambda saved: found.append(saved[0] * 1))
            asked = slow.save(full(3), use=lambda saved: found.append(saved[0] * 1))
            slow.run()
            slow.hold()
            slow.backward(asked)
            slow.backward(ahead)
        assert [values(tensor) for tensor in found] == [{3}, {2}]

    @ONE_OR_TWO
    def test_waits_on_its_own_stream(self, fake: Fake, streams: Any) -> None:
        """Two nodes on two streams saved one storage; it is fetched for the first one's."""
        slow = Slow(fake, streams=streams)
        side = fake.new_stream()
        found: list[Tensor] = []
        with slow.offload:
            both = full(3)
            first = slow.save(both)
            with side:
                second = slow.save(both, use=lambda saved: found.append(saved[0] * 1))
            del both
            slow.run()
            slow.hold()
            slow.backward(second)
            slow.run()
        assert values(found[0]) == {3}
        del first

    @ANY_STREAMS
    def test_keeps_the_memory_from_the_next_tensor(self, fake: Fake, streams: Any) -> None:
        """Of the stream that it was fetched for, while another one still reads it."""
        slow = Slow(fake, streams=streams)
        side = fake.new_stream()
        there = full(0)
        with slow.offload:
            both = full(3)
            first = slow.save(both)
            with side:
                second = slow.save(both, use=lambda saved: there.copy_(saved[0], non_blocking=True))
            del both
            slow.run()
            fake.hold(side)
            slow.backward(second)
            del first, second
            others = [full(9) for _ in range(3)]
            fake.release(side)
            slow.run()
        assert values(there) == {3}
        del others
