"""Writes to what a forward has computed with, before its backward: an error, as in torch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import tenure
from ranks import run_ranks
from sharded_models import Net, average_gradients, batch_of, loss_of
from tenure.sharding import backend

EARLY = "between a forward and its backward"


def write(model: nn.Module) -> None:
    with torch.no_grad():
        for piece in model.parameters():
            piece.mul_(0.5)


def with_other_values(rank: int, _world: int) -> None:
    """Whatever runs between the write and the backward."""
    between: tuple[Callable[[nn.Module], object], ...] = (
        lambda _model: None,
        lambda model: loss_of(model, batch_of(rank, 1)),
        lambda model: loss_of(model, batch_of(rank, 1)).backward(),
        lambda model: model.blocks[0](torch.ones(2, 17)),
        hold,
    )
    for run in between:
        model = tenure.shard(Net())
        loss = loss_of(model, batch_of(rank, 0))
        write(model)
        run(model)
        with pytest.raises(tenure.MutationError, match=EARLY):
            loss.backward()
        after(model, rank)


def hold(model: nn.Module) -> None:
    with model.tenure.hold():
        loss_of(model, batch_of(0, 1))


def after(model: nn.Module, rank: int) -> None:
    """All is as it should be again."""
    model.zero_grad()
    plain = Net()
    plain.load_state_dict(model.tenure.full_state_dict())
    for one in (model, plain):
        loss_of(one, batch_of(rank, 2)).backward()
    average_gradients(plain)
    whole = model.tenure.full_gradients()
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(whole[name], parameter.grad), name


def in_compiled_graphs(rank: int, _world: int) -> None:
    """There autograd finds that what it had saved before the last forward was written to."""
    model = tenure.shard(Net())
    run = torch.compile(lambda x: model(x), backend=backend("aot_eager"), fullgraph=True)
    for second, text in ((False, EARLY), (True, "modified by an inplace operation")):
        loss = loss_of(run, batch_of(rank, 0))
        write(model)
        if second:
            loss_of(run, batch_of(rank, 1))
        with pytest.raises(RuntimeError, match=text):
            loss.backward()
    after(model, rank)


def hooks_of_others(rank: int, _world: int) -> None:
    """Under hooks that pack what is saved, autograd looks at no versions."""
    model = tenure.shard(Net())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        loss = loss_of(model, batch_of(rank, 0))
        write(model)
        loss_of(model, batch_of(rank, 1))
    with pytest.raises(tenure.MutationError, match=EARLY):
        loss.backward()


def to_other_memory(rank: int, _world: int) -> None:
    """What a piece is given by `.data =` would not be gathered."""
    model = tenure.shard(Net())
    piece = model.blocks[1]._parameters["scale" if rank == 0 else "none"]
    for other in (
        lambda old: old + 1,
        lambda old: old.double(),
        lambda old: torch.cat([old, old, torch.ones(1)]),
    ):
        before = piece.data
        piece.data = other(before)
        if piece.numel() == 0:
            piece.data = torch.ones(1)  # there is nothing that could be another
        with pytest.raises(tenure.InputError, match=r"blocks\.1\.(scale|none): .*copy_"):
            loss_of(model, batch_of(rank, 0))
        with pytest.raises(tenure.InputError, match="copy_"), model.tenure.hold():
            pass
        piece.data = before
        loss_of(model, batch_of(rank, 0)).backward()
    vector = torch.full((sum(p.numel() for p in model.parameters()),), 0.5)
    nn.utils.vector_to_parameters(vector, model.parameters())
    with pytest.raises(tenure.InputError, match="copy_"):
        loss_of(model, batch_of(rank, 0))


def all_cases(rank: int, world: int) -> None:
    for case in (with_other_values, in_compiled_graphs, hooks_of_others, to_other_memory):
        case(rank, world)


def test_on_two_ranks() -> None:
    """In one run, for a rank takes seconds to start."""
    run_ranks(all_cases, 2, timeout=120)


def same_values(_rank: int, _world: int) -> None:
    """A forward of other values and its backward are no error, whatever was before."""
    torch.manual_seed(0)
    plain = Net()
    model = tenure.shard(copy.deepcopy(plain))
    for one in (model, plain):
        loss_of(one, batch_of(0, 0))
        write(one)
        loss_of(one, batch_of(0, 1)).backward()
    whole = model.tenure.full_gradients()
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(whole[name], parameter.grad), name


def test_a_forward_without_a_backward_is_forgotten() -> None:
    run_ranks(same_values, 1)
