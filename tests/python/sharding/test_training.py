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
from sharded_models import Net, average_gradients, batch_of, loss_of

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
    for case in (gradients, accumulate, low_precision, not_finite, resident):
        case(rank, world)
