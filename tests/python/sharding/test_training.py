"""Sharded training is data parallel training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import tenure
from ranks import run_ranks
from sharded_models import GPT, Net, average_gradients, batch_of, loss_of

STEPS = 6
Figures = list[tuple[float, float, float, float]]


def train(rank: int, world: int, kind: dict[str, Any], how: dict[str, Any]) -> Figures:
    """Losses and norms of both, step by step."""
    torch.manual_seed(0)
    plain = Net(**kind)
    sharded = tenure.shard(copy.deepcopy(plain), **how)
    ours = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    found = []
    for step in range(STEPS):
        batch = batch_of(rank, step)
        losses = []
        for model in (sharded, plain):
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.item())
        average_gradients(plain)
        norms = [float(nn.utils.clip_grad_norm_(m.parameters(), 0.5)) for m in (sharded, plain)]
        found.append((*losses, *norms))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert sharded.tenure.stats().gathered_bytes == 0
    kept, whole = (sum(p.numel() for p in model.parameters()) for model in (sharded, plain))
    assert kept * (world - 1) <= whole
    return found


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "no prefetch": ({}, {"prefetch": 0}),
    "kept": ({}, {"reshard_after_forward": False, "prefetch": 2}),
    "some units, one twice": ({"again": True}, {"units": ["blocks.0", "blocks.2"]}),
    "reentrant checkpoints": ({"recompute": "reentrant"}, {}),
    "checkpoints": ({"recompute": "plain"}, {}),
    "small ones stay": ({}, {"keep_resident": 60, "prefetch": 2}),
    "small ones stay, checkpoints": ({"recompute": "reentrant"}, {"keep_resident": 60}),
}


def train_all_ways(rank: int, world: int) -> dict[str, Figures]:
    return {name: train(rank, world, *way) for name, way in WAYS.items()}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_it_is_data_parallel_training(world: int) -> None:
    for rank in run_ranks(train_all_ways, world):
        for name, figures in rank.items():
            for ours, theirs, norm, other in figures:
                # The norm that clips is added up in another order, so all after the first step
                # may differ by rounding.
                assert ours == pytest.approx(theirs, rel=1e-5), name
                assert norm == pytest.approx(other, rel=1e-5), name


def curves(rank: int, _world: int) -> list[list[float]]:
    """Fifty losses of a GPT: plain data parallel, sharded, sharded and compiled."""
    torch.manual_seed(0)
    plain = GPT()
    found = []
    for kind in ("plain", "sharded", "compiled"):
        model = copy.deepcopy(plain)
        if kind != "plain":
            tenure.shard(model)
        run = model
        if kind == "compiled":
            run = torch.compile(model, backend=tenure.sharding.backend("aot_eager"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for step in range(50):
            loss = loss_of(run, batch_of(rank, step % 5))
            loss.backward()
            if kind == "plain":
                average_gradients(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    return found


def test_the_loss_curves_of_a_gpt_match() -> None:
    for plain, *others in run_ranks(curves, 2, timeout=120):
        assert plain[-1] < 0.5 * plain[0]
        for losses in others:
            assert losses == pytest.approx(plain, rel=1e-4)


def train_replicas(rank: int, _world: int) -> Figures:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return train(rank, 2, {}, {"group": mesh})


def test_replicas_of_shards() -> None:
    for figures in run_ranks(train_replicas, 4):
        for ours, theirs, norm, other in figures:
            assert ours == pytest.approx(theirs, rel=1e-5)
            assert norm == pytest.approx(other, rel=1e-5)


def resident(rank: int, _world: int) -> None:
    """Small parameters are gathered once a step, and are gone when backward is over."""
    model = tenure.shard(Net(), keep_resident=60)
    for step in range(3):
        loss = loss_of(model, batch_of(rank, step))
        assert model.blocks[0].scale.item() == 0.5
        loss.backward()
        with pytest.raises(RuntimeError, match="UseAfterRelease.*small parameters"):
            model.blocks[0].scale.item()
    units = {unit.name: unit.gathers for unit in model.tenure.stats().units}
    assert units["small parameters"] == 3
    assert units["blocks.1"] == 6
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.25)
    loss_of(model, batch_of(rank, 0))
    assert model.blocks[0].scale.item() == 0.25


def adopts(rank: int, _world: int) -> None:
    """Parameters that come later are sharded when asked for, and not before."""
    model = tenure.shard(Net())
    loss_of(model, batch_of(rank, 0)).backward()
    model.zero_grad()
    block = model.blocks[1]
    block.register_forward_hook(lambda block, _x, y: y * block.late.sum() + block.extra(y))
    torch.manual_seed(rank)
    block.late = nn.Parameter(torch.randn(7))
    block.extra = nn.Linear(17, 17)
    with pytest.raises(tenure.InputError, match=r"blocks\.1\.late, .* call model.tenure.adopt"):
        loss_of(model, batch_of(rank, 0))
    names = ["blocks.1.late", "blocks.1.extra.weight", "blocks.1.extra.bias"]
    assert model.tenure.adopt() == names
    assert model.tenure.adopt() == []
    whole = model.tenure.full_state_dict()
    assert set(names) <= set(whole)
    plain = Net()
    other = plain.blocks[1]
    other.register_forward_hook(lambda block, _x, y: y * block.late.sum() + block.extra(y))
    other.late, other.extra = nn.Parameter(torch.randn(7)), nn.Linear(17, 17)
    plain.load_state_dict(whole)
    for both in (model, plain):
        loss_of(both, batch_of(rank, 0)).backward()
    average_gradients(plain)
    found = model.tenure.full_gradients()
    for name in names:
        torch.testing.assert_close(found[name], plain.get_parameter(name).grad)
    model.blocks[0].up.bias = model.blocks[2].up.bias
    with pytest.raises(tenure.InputError, match="tie parameters before"):
        model.tenure.adopt()


def stays_where_it_is(_rank: int, _world: int) -> None:
    model = tenure.shard(Net())
    assert model.to("cpu").float() is model
    for move in (model.double, lambda: model.to(torch.bfloat16), model.blocks[0].half):
        with pytest.raises(tenure.InputError, match="before tenure.shard"):
            move()
    loss_of(model, batch_of(0, 0)).backward()


def gradients(rank: int, _world: int) -> None:
    """To the bit, for a sum of two has one order."""
    torch.manual_seed(0)
    plain = Net()
    sharded = tenure.shard(copy.deepcopy(plain))
    for model in (sharded, plain):
        loss_of(model, batch_of(rank, 0)).backward()
    average_gradients(plain)
    whole = sharded.tenure.full_gradients()
    for name, parameter in plain.named_parameters():
        if parameter.grad is None:
            assert name not in whole
        else:
            assert torch.equal(whole[name], parameter.grad), name


def accumulate(rank: int, _world: int) -> None:
    torch.manual_seed(0)
    plain = Net()
    sharded = tenure.shard(copy.deepcopy(plain))
    for step in range(3):
        loss_of(plain, batch_of(rank, step)).backward()
    average_gradients(plain)
    for step in range(3):
        loss_of(sharded, batch_of(rank, step)).backward()
    each_time = sharded.tenure.full_gradients()
    moved = sharded.tenure.stats().reduced_bytes
    sharded.zero_grad()
    with sharded.tenure.no_sync():
        for step in range(2):
            loss_of(sharded, batch_of(rank, step)).backward()
            assert all(p.grad is None for p in sharded.parameters())
    loss_of(sharded, batch_of(rank, 2)).backward()
    assert moved >= sharded.tenure.stats().reduced_bytes
    at_the_end = sharded.tenure.full_gradients()
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(each_time[name], parameter.grad)
            torch.testing.assert_close(at_the_end[name], parameter.grad)


def low_precision(rank: int, _world: int) -> None:
    torch.manual_seed(0)
    sharded = tenure.shard(Net(), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    seen = []
    sharded.blocks[0].up.register_forward_hook(lambda m, _i, _o: seen.append(m.weight.dtype))
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = loss_of(sharded, batch_of(rank, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert set(seen) == {torch.bfloat16}
    assert all(p.dtype == torch.float32 for p in sharded.parameters())
    assert losses[-1] < 0.7 * losses[0], losses


def not_finite(rank: int, _world: int) -> None:
    torch.manual_seed(0)
    sharded = tenure.shard(Net())
    loss = loss_of(sharded, batch_of(rank, 0))
    (loss * (float("inf") if rank == 1 else 1.0)).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(sharded.parameters(), 1.0, error_if_nonfinite=True)
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
    scaler.scale(torch.ones(()))
    before = [p.detach().clone() for p in sharded.parameters()]
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, sharded.parameters(), strict=True))


def test_gradients_on_two_ranks() -> None:
    """In one run, for a rank takes seconds to start."""
    run_ranks(all_cases, 2)


def all_cases(rank: int, world: int) -> None:
    for case in (
        gradients,
        accumulate,
        low_precision,
        not_finite,
        resident,
        adopts,
        stays_where_it_is,
    ):
        case(rank, world)
