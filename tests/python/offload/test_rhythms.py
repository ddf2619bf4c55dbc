"""Steps that are not all alike: loops in one block, kinds in turn, a first one unlike the rest."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, islice
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import tenure
from offloading import MIB, Keep, blocks, drop_graphs, equal, grads_of, peak_of, tell

Fake = ModuleType
LIVES_ON = "held by others anyway"


@pytest.mark.parametrize("budget", [None, "200KiB", "1MiB", "64MiB"])
def test_a_loop_in_one_block(budget: str | None) -> None:
    """The last output of a round lives until the next round has one, long after it was needed."""

    def steps(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        for i in range(4):
            x = torch.randn(64, 64, generator=torch.Generator().manual_seed(i))
            out = model(x)
            out.square().mean().backward()
        return grads_of(model)

    model = blocks()
    plain = steps(model)
    offload = tenure.Offload(model, target="copy", budget=budget, min_bytes=1)
    for _ in range(4):
        with offload:
            ours = steps(model)
        assert equal(ours, plain)


def saving(offload: tenure.Offload, sizes: list[int], device: str = "cpu") -> Callable[[], None]:
    """A step that saves tensors of so many MiB."""

    def step() -> None:
        x = torch.ones(1, device=device, requires_grad=True)
        y = x
        with offload:
            for size in sizes:
                y = Keep.apply(y, [], torch.ones(size * MIB // 4, device=device))
            y.sum().backward()

    return step


def test_kinds_in_turn_have_a_plan_each() -> None:
    offload = tenure.Offload(target="copy", min_bytes=1)
    modes = []
    for sizes in islice(cycle([[1, 1], [1, 2], [1, 2, 1]]), 15):
        saving(offload, sizes)()
        modes.append(offload.stats().mode)
    assert modes[9:] == ["planned"] * 6, "each was measured when it had come twice"


def test_kinds_in_turn_stay_within_the_budget(fake: Fake) -> None:
    """They begin alike, and only one of them could keep what both save first."""
    tell(fake)
    small, large = [1] * 8, [1] * 7 + [4] * 4
    offload = tenure.Offload(budget=9 * MIB, min_bytes=1)
    peaks = []
    for sizes in islice(cycle([small, large]), 20):
        peaks.append(peak_of(saving(offload, sizes, "fake")))
        torch.accelerator.synchronize()
        drop_graphs()
    assert offload.stats().mode == "planned"
    assert max(peaks[8:]) <= 9 * MIB


def test_who_held_activations_in_the_first_step_alone_is_forgotten() -> None:
    model = blocks(layers=4)
    offload = tenure.Offload(model, target="copy", min_bytes=1)
    looked_at: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _module, _args, out: looked_at.append(out))
        for layer in model
    ]
    for _ in range(4):
        with offload:
            model(torch.randn(32, 64)).square().sum().backward()
        for hook in hooks:
            hook.remove()
        looked_at.clear()
    stats = offload.stats()
    assert stats.mode == "planned"
    assert stats.moved_out_bytes > 0.8 * stats.saved_bytes, stats.kept


def test_who_never_lets_go_is_not_asked_at_every_step() -> None:
    model = blocks(layers=4)
    batches = torch.randn(32, 64)
    offload = tenure.Offload(model, target="copy", min_bytes=1)
    modes = []
    for _ in range(12):
        with offload:
            model(batches).square().sum().backward()
        modes.append(offload.stats().mode)
    assert modes == ["measuring"] + ["planned"] * 11
    assert LIVES_ON in offload.stats().kept


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after"])
def test_what_forward_has_let_go_moves_wherever_backward_is(inside: bool) -> None:
    weight = torch.zeros(512, 64, requires_grad=True)
    offload = tenure.Offload(target="copy", min_bytes=1)
    for _ in range(4):
        with offload:
            x: Tensor = weight
            for _ in range(4):
                x = (x * 1.5).exp()
            loss = (x * 2).sum()
            del x
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        del loss
    assert offload.stats().moved_out_bytes == 4 * 512 * 64 * 4
    assert offload.stats().kept == {}
