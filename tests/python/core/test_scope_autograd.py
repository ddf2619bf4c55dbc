"""A lease taken during a backward pass belongs to the scope in which backward() was called.

On the CPU autograd runs on the thread that calls it; on a device, on a thread of the device.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tenure
from probes import current_scope


class See(torch.autograd.Function):
    """Doubles its input; backward notes which scope it runs in."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[str]) -> torch.Tensor:
        ctx.seen = seen
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.seen.append(current_scope())
        return grads[0] * 2, None


class Backward:
    device: str

    def leaf(self) -> torch.Tensor:
        return torch.ones(4, device=self.device, requires_grad=True)

    def seeing(self, seen: list[str]) -> torch.Tensor:
        """A loss whose backward notes, in a tensor hook, which scope it runs in."""
        y = self.leaf() * 2
        y.register_hook(lambda _: seen.append(current_scope()))
        return y.sum()

    def test_tensor_hook(self) -> None:
        seen: list[str] = []
        with tenure.scope("forward"):
            loss = self.seeing(seen)
        with tenure.scope("step", 7):
            loss.backward()
        assert seen == ["step 7"]

    def test_a_lease_of_the_hook_is_released_by_the_scope(self) -> None:
        leases: list[tenure.Lease] = []
        y = self.leaf() * 2
        y.register_hook(lambda grad: leases.append(tenure.hold(grad, "hook", kind="gradient")))
        with tenure.scope("step", 1, on_close="release") as step:
            y.square().sum().backward()
            assert leases[0].held
        assert not leases[0].held
        assert (step.report.leases, step.report.bytes) == (1, 16)

    def test_post_accumulate_grad_hook(self) -> None:
        seen: list[str] = []
        x = self.leaf()
        x.register_post_accumulate_grad_hook(lambda _: seen.append(current_scope()))
        with tenure.scope("step", 7):
            (x * 2).sum().backward()
        assert seen == ["step 7"]

    def test_function_backward(self) -> None:
        seen: list[str] = []
        y = See.apply(self.leaf(), seen)
        with tenure.scope("step", 7):
            y.sum().backward()
        assert seen == ["step 7"]

    def test_final_callback(self) -> None:
        seen: list[str] = []
        y = self.leaf() * 2
        y.register_hook(
            lambda _: torch.autograd.Variable._execution_engine.queue_callback(
                lambda: seen.append(current_scope())
            )
        )
        with tenure.scope("step", 7):
            y.sum().backward()
        assert seen == ["step 7"]

    def test_unpacking_a_saved_tensor(self) -> None:
        seen: list[str] = []

        def unpack(x: torch.Tensor) -> torch.Tensor:
            seen.append(current_scope())
            return x

        with tenure.scope("forward"), torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            loss = self.leaf().exp().sum()
        with tenure.scope("step", 7):
            loss.backward()
        assert seen == ["step 7"]

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_checkpoint_recomputes_in_the_scope_of_backward(self, use_reentrant: bool) -> None:
        seen: list[str] = []

        def block(x: torch.Tensor) -> torch.Tensor:
            seen.append(current_scope())
            return x.exp()

        with tenure.scope("forward"):
            loss = checkpoint(block, self.leaf(), use_reentrant=use_reentrant).sum()
        with tenure.scope("step", 7):
            loss.backward()
        assert seen == ["forward", "step 7"]

    def test_checkpoint_runs_backward_hooks_in_the_scope_of_backward(self) -> None:
        """Reentrant checkpointing calls backward() inside backward."""
        seen: list[str] = []

        def block(x: torch.Tensor) -> torch.Tensor:
            return See.apply(x, seen)

        with tenure.scope("forward"):
            loss = checkpoint(block, self.leaf(), use_reentrant=True).sum()
        with tenure.scope("step", 7):
            loss.backward()
        assert seen == ["step 7"]

    def test_the_innermost_scope_counts(self) -> None:
        seen: list[str] = []
        loss = self.seeing(seen)
        with tenure.scope("epoch", 1), tenure.scope("step", 2), tenure.scope("backward"):
            loss.backward()
        assert seen == ["epoch 1 / step 2 / backward"]

    def test_backward_outside_of_scopes_is_in_none(self) -> None:
        seen: list[str] = []
        with tenure.scope("forward"):
            loss = self.seeing(seen)
        loss.backward()
        assert seen == ["process"]

    def test_each_backward_has_its_scope(self) -> None:
        seen: list[str] = []
        loss = self.seeing(seen)
        for step in range(3):
            with tenure.scope("step", step):
                loss.backward(retain_graph=True)
        assert seen == ["step 0", "step 1", "step 2"]

    def test_a_scope_opened_in_a_hook(self) -> None:
        seen: list[str] = []

        def hook(_: torch.Tensor) -> None:
            with tenure.scope("hook"):
                seen.append(current_scope())
            seen.append(current_scope())

        y = self.leaf() * 2
        y.register_hook(hook)
        with tenure.scope("step", 7):
            y.sum().backward()
        assert seen == ["step 7 / hook", "step 7"]

    def test_a_hook_that_raises_leaves_scopes_as_they_were(self) -> None:
        def hook(_: torch.Tensor) -> None:
            with tenure.scope("hook"):
                raise ValueError("in the hook")

        y = self.leaf() * 2
        y.register_hook(hook)
        seen: list[str] = []
        with tenure.scope("step", 7):
            with pytest.raises(ValueError, match="in the hook"):
                y.sum().backward()
            self.seeing(seen).backward()
            assert current_scope() == "step 7"
        assert seen == ["step 7"]

    def test_reentrant_backward_has_the_scope_it_was_called_in(self) -> None:
        seen: list[str] = []

        def hook(_: torch.Tensor) -> None:
            with torch.enable_grad():
                inner = self.seeing(seen)
            inner.backward(retain_graph=True)
            with tenure.scope("inner"):
                inner.backward()
            seen.append(current_scope())

        y = self.leaf() * 2
        y.register_hook(hook)
        with tenure.scope("step", 7):
            y.sum().backward()
        assert seen == ["step 7", "step 7 / inner", "step 7"]

    def test_backward_deep_inside_itself(self) -> None:
        """Beyond a depth of 60 the engine goes on in a pool of threads."""
        seen: list[str] = []
        depth = 70

        def nested(left: int) -> torch.Tensor:
            y = self.leaf() * 2

            def hook(_: torch.Tensor) -> None:
                if left == 0:
                    seen.append(current_scope())
                else:
                    with torch.enable_grad():
                        nested(left - 1).backward()

            y.register_hook(hook)
            return y.sum()

        with tenure.scope("step", 7):
            nested(depth).backward()
        assert seen == ["step 7"]

    def test_threads_that_call_backward_have_their_own(self) -> None:
        both_inside = threading.Barrier(2, timeout=30)
        seen: dict[str, list[str]] = {"a": [], "b": []}

        def run(name: str) -> None:
            with tenure.scope(name):
                both_inside.wait()
                for _ in range(20):
                    self.seeing(seen[name]).backward()
                both_inside.wait()

        threads = [threading.Thread(target=run, args=(name,)) for name in seen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == {"a": ["a"] * 20, "b": ["b"] * 20}

    def test_a_thread_without_a_scope_that_calls_backward(self) -> None:
        seen: list[str] = []
        with tenure.scope("step"):
            thread = threading.Thread(target=lambda: self.seeing(seen).backward())
            thread.start()
            thread.join()
        assert seen == ["process"]

    def test_interleaved_tasks_that_call_backward(self) -> None:
        seen: dict[str, list[str]] = {"a": [], "b": [], "none": []}

        async def work(name: str, turn: asyncio.Barrier) -> None:
            for step in range(3):
                with tenure.scope(name, step):
                    await turn.wait()
                    self.seeing(seen[name]).backward()
                    await turn.wait()
                    self.seeing(seen[name]).backward()

        async def without(turn: asyncio.Barrier) -> None:
            for _ in range(6):
                await turn.wait()
                self.seeing(seen["none"]).backward()

        async def main() -> None:
            turn = asyncio.Barrier(3)
            await asyncio.gather(work("a", turn), work("b", turn), without(turn))

        asyncio.run(main())
        assert seen["a"] == [f"a {step}" for step in (0, 0, 1, 1, 2, 2)]
        assert seen["b"] == [f"b {step}" for step in (0, 0, 1, 1, 2, 2)]
        assert seen["none"] == ["process"] * 6

    def test_backward_in_a_copied_context(self) -> None:
        seen: list[str] = []
        with tenure.scope("outer"):
            context = contextvars.copy_context()
            with tenure.scope("inner"):
                context.run(lambda: self.seeing(seen).backward())
                self.seeing(seen).backward()
        assert seen == ["outer", "outer / inner"]

    def test_a_context_that_outlived_its_scope(self) -> None:
        seen: list[str] = []
        with tenure.scope("step"):
            context = contextvars.copy_context()
        with tenure.scope("next"):
            context.run(lambda: self.seeing(seen).backward())
        assert seen == ["process"]


class TestOnTheCpu(Backward):
    device = "cpu"


@pytest.mark.usefixtures("fake")
class TestOnADevice(Backward):
    device = "fake"

    def test_the_hook_is_on_another_thread(self) -> None:
        """What makes these tests worth running: see that they test what they say."""
        threads: list[int] = []
        y = self.leaf() * 2
        y.register_hook(lambda _: threads.append(threading.get_native_id()))
        y.sum().backward()
        assert threads
        assert threading.get_native_id() not in threads

    def test_two_devices_in_one_backward(self) -> None:
        seen: list[str] = []
        a, b = self.seeing(seen), self.seeing(seen).to("fake:1")
        b = b * 2
        b.register_hook(lambda _: seen.append(current_scope()))
        with tenure.scope("step", 7):
            (a.to("fake:1") + b).backward()
        assert seen == ["step 7"] * 3
