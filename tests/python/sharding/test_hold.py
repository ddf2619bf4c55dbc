"""A model that is held: gathered once for several forwards and backwards, added up once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import tenure
from ranks import run_ranks
from sharded_models import Net, average_gradients, batch_of, loss_of
from tenure import _C

PARTS = 3

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "kept": ({}, {"reshard_after_forward": False}),
    "some units, one twice": ({"again": True}, {"units": ["blocks.0", "blocks.2"]}),
    "reentrant checkpoints": ({"recompute": "reentrant"}, {}),
    "checkpoints": ({"recompute": "plain"}, {}),
    "small ones stay": ({}, {"keep_resident": 60}),
    "compiled": ({}, {"compiled": True}),
}


def both(kind: dict[str, Any] | None = None, **how: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Net(**(kind or {}))
    return tenure.shard(copy.deepcopy(plain), **how), plain


def run_parts(model: Any, rank: int) -> None:
    for part in range(PARTS):
        loss_of(model, batch_of(rank, part)).backward()


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    """Gradients of the sharded model are the mean of the other's."""
    average_gradients(plain)
    found = model.tenure.full_gradients()
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)
    for one in (model, plain):
        one.zero_grad()


def counts(model: nn.Module) -> list[tuple[int, int]]:
    return [(unit.gathers, unit.reduces) for unit in model.tenure.stats().units if unit.bytes]


def all_ways(rank: int, _world: int) -> None:
    for kind, how in WAYS.values():
        settings = dict(how)
        is_compiled = settings.pop("compiled", False)
        model, plain = both(kind, **settings)
        run: Any = model
        if is_compiled:
            run = torch.compile(model, backend=tenure.sharding.backend("aot_eager"))
        for step in range(1, 3):
            with model.tenure.hold():
                run_parts(run, rank)
            assert model.tenure.stats().gathered_bytes == 0
            assert counts(model) == [(step, step)] * len(counts(model)), (kind, how)
            run_parts(plain, rank)
            assert_same(model, plain)
        run_parts(run, rank)  # and without
        run_parts(plain, rank)
        assert_same(model, plain)


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_are_those_of_the_parts(world: int) -> None:
    run_ranks(all_ways, world, timeout=120)


def interruptions(rank: int, _world: int) -> None:
    meter = _C.HostMeter()
    model, plain = both()
    with model.tenure.hold():
        run_parts(model, rank)
    model.zero_grad()
    level = meter.read()[0]
    for stop in (ValueError, KeyboardInterrupt):
        with pytest.raises(stop), model.tenure.hold():
            run_parts(model, rank)
            raise stop
        assert model.tenure.stats().gathered_bytes == 0
        assert meter.read()[0] <= level
    with pytest.raises(tenure.MutationError, match="pieces of unit"), model.tenure.hold():
        run_parts(model, rank)
        with torch.no_grad():
            next(model.parameters()).add_(0)
    with pytest.raises(tenure.MutationError, match="was written to"), model.tenure.hold():
        run_parts(model, rank)
        with torch.no_grad():
            model.blocks[0].scale.add_(0)
    assert all(piece.grad is None for piece in model.parameters())
    assert meter.read()[0] <= level
    with model.tenure.hold():
        run_parts(model, rank)
    run_parts(plain, rank)
    assert_same(model, plain)


def test_an_exception_gives_it_up() -> None:
    run_ranks(interruptions, 2)


def misuse(rank: int, _world: int) -> None:
    model, plain = both()
    with model.tenure.hold():
        run_parts(model, rank)
        with pytest.raises(tenure.InputError, match="held already"), model.tenure.hold():
            pass
    run_parts(plain, rank)
    assert_same(model, plain)

    def hold(*_: object) -> None:
        with model.tenure.hold():
            pass

    hook = model.blocks[0].register_forward_hook(hold)
    with pytest.raises(tenure.InputError, match="while it runs"):
        loss_of(model, batch_of(rank, 0))
    hook.remove()
    with model.tenure.no_sync(), model.tenure.hold():
        run_parts(model, rank)
    assert all(piece.grad is None for piece in model.parameters())
    with torch.no_grad(), model.tenure.hold():
        loss_of(model, batch_of(rank, 0))
    with model.tenure.hold():
        run_parts(model, rank)
    for _ in range(2):
        run_parts(plain, rank)
    assert_same(model, plain)


def test_what_it_is_used_with() -> None:
    run_ranks(misuse, 2)


def alone(rank: int, _world: int) -> str:
    """Rank 1 does not come to the third hold."""
    model, _ = both(timeout=2.0)
    for _ in range(2):
        with model.tenure.hold():
            run_parts(model, rank)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["over"])
        return ""
    with pytest.raises(tenure.CollectiveError) as raised, model.tenure.hold():
        pass
    store.set("over", "1")
    assert not model.tenure.held
    assert model.tenure.stats().gathered_bytes == 0
    return str(raised.value)


def test_a_rank_that_does_not_come_is_named() -> None:
    said, _ = run_ranks(alone, 2)
    assert "gathering all units to hold them" in said
    assert "rank 1 does not answer" in said
