"""Between its last use and its next gather a unit has no bytes, whoever holds names for it."""

from __future__ import annotations

import copy
import gc
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import tenure
from ranks import run_ranks
from sharded_models import Net, average_gradients, batch_of, loss_of
from tenure import _C


def aliases_of(model: Net) -> dict[str, torch.Tensor]:
    """All kinds of names for parameters of one block, taken while it is gathered."""
    kept: dict[str, torch.Tensor] = {}

    def keep(block: Any, args: Any) -> None:
        weight = block.up.weight
        kept["parameter"] = weight
        kept["view"] = weight.view(-1)
        kept["transposed"] = weight.T
        kept["chunk"] = weight.chunk(3)[1]
        kept["detached"] = weight.detach()
        kept["saved"] = (args[0][0] @ weight.T).grad_fn._saved_mat2
        kept["scalar"] = block.scale

    model.blocks[1].register_forward_pre_hook(keep)
    return kept


def released(rank: int, _world: int) -> None:
    """Every alias of a released unit says whose it was."""
    model = tenure.shard(Net(), prefetch=0)
    kept = aliases_of(model)
    inside = []
    model.blocks[1].down.register_forward_hook(
        lambda *_: inside.append(all(not tenure.is_released(t) for t in kept.values()))
    )
    loss = loss_of(model, batch_of(rank, 0))
    assert inside == [True]
    for moment in ("forward", "backward"):
        for name, alias in kept.items():
            assert tenure.is_released(alias), (moment, name)
            assert alias.untyped_storage()._cdata
            with pytest.raises(RuntimeError, match="UseAfterRelease") as caught:
                alias.sum()
            text = str(caught.value)
            assert re.search(r"blocks\.1.*up\.weight", text), text
            assert f"the end of the {moment} of unit 'blocks.1'" in text, text
        if moment == "forward":
            loss.backward()
    assert model.tenure.stats().gathered_bytes == 0


def counted(rank: int, _world: int) -> list[tuple[int, int, int]]:
    found = []
    for prefetch in (0, 1):
        model = tenure.shard(Net(), prefetch=prefetch)
        for step in range(3):
            loss_of(model, batch_of(rank, step)).backward()
        loss_of(model, batch_of(rank, 0))
        stats = model.tenure.stats()
        unit = max(u.bytes for u in stats.units)
        found.append((stats.peak_gathered_bytes, stats.peak_needed_bytes, unit))
    return found


def test_no_more_is_gathered_than_is_used_but_for_one_unit_ahead() -> None:
    for without, with_one in run_ranks(counted, 2):
        peak, needed, unit = without
        assert peak == needed
        peak, needed, unit = with_one
        assert needed < peak <= needed + unit


class Empty(nn.Module):
    """A parameter without elements, whose gradient comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()


class Padded(torch.autograd.Function):
    """The gradient of its weight is a view of a little more."""

    @staticmethod
    def forward(_ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        more = gradient.new_empty(gradient.numel() + 1)
        return more[1:].view_as(gradient).copy_(gradient)


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * Padded.apply(self.weight).sum()


def weighed(_rank: int, _world: int) -> list[float]:
    """The most that a step has beside pieces, in units; its activations are next to nothing."""
    meter = _C.HostMeter()
    width, layers = 256, 4
    found = []
    for last in (nn.Identity, Empty, Views):
        linear = (nn.Linear(width, width, bias=False) for _ in range(layers))
        model = tenure.shard(nn.Sequential(nn.Sequential(*linear, last())))
        for _ in range(3):
            before = meter.read()[0]
            model(torch.ones(1, width)).sum().backward()
            peak = meter.read()[1] - before
            model.zero_grad()
        found.append(peak / (4 * width * width * layers))
    return found


def test_gradients_are_put_together_when_their_unit_has_gone() -> None:
    for rank in run_ranks(weighed, 2):
        for units in rank:
            assert 2 <= units < 2.1  # of a gradient more there is nothing


class HalfSquare(torch.autograd.Function):
    """Its gradient is the parameter itself."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return 0.5 * (weight * weight).sum()

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> torch.Tensor:
        (weight,) = ctx.saved_tensors
        return weight.view(-1)


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(64.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return HalfSquare.apply(self.weight) + 0 * x.sum()


def own_memory(_rank: int, _world: int) -> None:
    model = tenure.shard(nn.Sequential(Squared()))
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1)).backward()
        assert torch.equal(model.tenure.full_gradients()["0.weight"], torch.arange(64.0))


def test_a_gradient_in_the_units_own_memory_is_copied_while_that_is_there() -> None:
    run_ranks(own_memory, 2)


def written(rank: int, _world: int) -> None:
    """A write into a gathered parameter is seen."""
    model = tenure.shard(Net())

    def write(block: Any, _args: Any) -> None:
        with torch.no_grad():
            block.up.weight.mul_(0.5)

    hook = model.blocks[2].register_forward_pre_hook(write)
    with pytest.raises(tenure.MutationError, match=r"blocks\.2\.up\.weight.*write to the pieces"):
        loss_of(model, batch_of(rank, 0))
    hook.remove()
    loss_of(model, batch_of(rank, 0)).backward()
    assert model.tenure.stats().gathered_bytes == 0


def in_an_array(rank: int, _world: int) -> None:
    """Memory that numpy has stays, is right and is counted; the rest comes and goes as before."""
    torch.manual_seed(0)
    plain = Net()
    model = tenure.shard(copy.deepcopy(plain))
    plain.load_state_dict(model.tenure.full_state_dict())
    kept = []

    def export(block: Any, _args: Any) -> None:
        kept.append(block.up.weight.detach().numpy())

    hook = model.blocks[1].register_forward_pre_hook(export)
    loss_of(model, batch_of(rank, 0)).backward()
    hook.remove()
    model.zero_grad()
    with pytest.warns(UserWarning, match=r"'blocks\.1' stays gathered: .*numpy\(\).*clone"):
        loss_of(model, batch_of(rank, 0))
    with torch.no_grad():
        for one in (model, plain):
            for parameter in one.parameters():
                parameter.mul_(0.5)
    [stays] = [unit.bytes for unit in model.tenure.stats().units if unit.name == "blocks.1"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is told once
        for _ in range(2):
            for one in (model, plain):
                one.zero_grad()
                loss_of(one, batch_of(rank, 1)).backward()
            assert model.tenure.stats().gathered_bytes == stays
    assert (kept[0] == plain.blocks[1].up.weight.detach().numpy()).all()
    assert tenure.is_released(model.blocks[2].up.weight)
    average_gradients(plain)
    whole = model.tenure.full_gradients()
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(whole[name], parameter.grad), name


def outside(_rank: int, _world: int) -> None:
    """A parameter that is read outside its unit says so."""
    model = tenure.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.raises(RuntimeError, match=r"UseAfterRelease.*0\.weight"):
        torch.nn.functional.linear(torch.zeros(1, 4), model[0].weight)
    model[0](torch.zeros(1, 4))  # a unit on its own is gathered


def gone(rank: int, _world: int) -> None:
    """All goes with the model, and Python's collector is not needed for it."""
    gc.collect()
    gc.disable()
    before = tenure.ledger().bytes
    model = tenure.shard(Net())
    loss_of(model, batch_of(rank, 0)).backward()
    assert tenure.ledger().bytes > before
    del model
    assert tenure.ledger().bytes == before
    gc.enable()


def all_cases(rank: int, world: int) -> None:
    for case in (released, written, in_an_array, outside, gone):
        case(rank, world)


def test_released_parameters_on_two_ranks() -> None:
    """In one run, for a rank takes seconds to start."""
    run_ranks(all_cases, 2)
