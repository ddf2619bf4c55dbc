"""torch.profiler works in every nesting order with scopes.

Both keep an entry on one stack of torch (ThreadLocalDebugInfo), and the profiler throws when its
own is not on top. Each case runs on a fresh thread, where nothing was pushed before.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import tenure
from probes import current_scope

# s, t: open a scope; S, T: close it. p: start the profiler; P: stop it.
ORDERS = ["psSP", "psPS", "spPS", "spSP", "pstTSP", "spPtpPTS", "pPspPS", "sSpPsS", "psSPpsSP"]


def on_a_fresh_thread(fn: Callable[[], None]) -> None:
    failures: list[str] = []

    def run() -> None:
        try:
            fn()
        except BaseException:  # noqa: BLE001  shown by the assertion below
            failures.append(traceback.format_exc())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failures, failures[0]


class Profiled:
    device: str

    def seen_in_backward(self) -> str:
        seen: list[str] = []
        y = torch.ones(4, device=self.device, requires_grad=True) * 2
        y.register_hook(lambda _: seen.append(current_scope()))
        y.sum().backward()
        return seen[0]

    def check(self, scopes: list[tenure.Scope]) -> None:
        expected = " / ".join(scope.name for scope in scopes) or "process"
        assert (current_scope(), self.seen_in_backward()) == (expected, expected)

    def walk(self, order: str) -> int:
        """Walks through `order`; returns how many ops the profilers saw."""
        scopes: list[tenure.Scope] = []
        profilers: list[profile] = []
        ops = 0
        for letter in order:
            if letter in "st":
                scopes.append(tenure.scope(letter).open())
            elif letter in "ST":
                scopes.pop().close()
            elif letter == "p":
                profilers.append(profile(activities=[ProfilerActivity.CPU]))
                profilers[-1].start()
            else:
                self.check(scopes)
                profilers[-1].stop()
                ops += sum(event.name == "aten::mul" for event in profilers.pop().events())
            self.check(scopes)
        return ops

    @pytest.mark.parametrize("order", ORDERS)
    def test_nesting(self, order: str) -> None:
        def walk() -> None:
            assert self.walk(order) >= order.count("p")

        on_a_fresh_thread(walk)

    def test_profiler_started_by_a_hook_of_backward(self) -> None:
        def run() -> None:
            seen: list[str] = []

            def hook(_: torch.Tensor) -> None:
                with profile(activities=[ProfilerActivity.CPU]), tenure.scope("hook"):
                    seen.append(current_scope())
                seen.append(current_scope())

            y = torch.ones(4, device=self.device, requires_grad=True) * 2
            y.register_hook(hook)
            with tenure.scope("step", 1):
                y.sum().backward()
            assert seen == ["step 1 / hook", "step 1"]

        on_a_fresh_thread(run)

    def test_profiler_around_a_loop_of_steps(self) -> None:
        def run() -> None:
            schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
            with profile(activities=[ProfilerActivity.CPU], schedule=schedule) as profiler:
                for step in range(6):
                    with tenure.scope("step", step):
                        assert self.seen_in_backward() == f"step {step}"
                    profiler.step()

        on_a_fresh_thread(run)


class TestOnTheCpu(Profiled):
    device = "cpu"


@pytest.mark.usefixtures("fake")
class TestOnADevice(Profiled):
    device = "fake"
