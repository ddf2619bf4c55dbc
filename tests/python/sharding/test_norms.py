"""Norms of gradients and what is not finite in them: those of the whole, whoever asks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import distributed as dist
from torch import nn

import tenure
from ranks import run_ranks
from sharded_models import Net, average_gradients, batch_of, loss_of


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.view(-1) for p in model.parameters() if p.grad is not None]


def norms(rank: int, _world: int) -> None:
    torch.manual_seed(0)
    plain = Net()
    sharded = tenure.shard(copy.deepcopy(plain))
    for model in (sharded, plain):
        loss = loss_of(model, batch_of(rank, 0))
        loss.backward()
    average_gradients(plain)
    for piece, whole in zip(sharded.parameters(), plain.parameters(), strict=True):
        if whole.grad is None or piece.grad is None:
            continue
        for norm in (
            lambda g: g.norm(),
            lambda g: g.norm(2),
            torch.norm,
            lambda g: (g / 4).norm() * 4,
            lambda g: g.detach().clone().norm(),
            lambda g: torch.linalg.vector_norm(g, math.inf),
        ):
            found: Callable[[torch.Tensor], torch.Tensor] = norm
            if whole.grad.numel():
                torch.testing.assert_close(found(piece.grad), found(whole.grad))
    for together in (torch.cat, torch.hstack, nn.utils.parameters_to_vector):
        ours, full = (gradients_of(one) for one in (sharded, plain))
        torch.testing.assert_close(together(ours).norm(), together(full).norm())
    assert torch.equal(copy.deepcopy(ours[0]).norm(), ours[0].norm())
    for kind in (2, math.inf, 1):
        ours = nn.utils.clip_grad_norm_(sharded.parameters(), 1e9, kind)
        full = [p for p in plain.parameters() if p.numel()]  # torch knows no inf norm of nothing
        torch.testing.assert_close(ours, nn.utils.clip_grad_norm_(full, 1e9, kind))
    if rank == 1:
        next(p for p in sharded.parameters() if p.numel()).grad[0] = math.nan
    for kind in (2, math.inf):
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(sharded.parameters(), 1.0, kind, error_if_nonfinite=True)


def norms_over_groups(rank: int, _world: int) -> None:
    """Of two models that different ranks share."""
    alone = [dist.new_group([one]) for one in (0, 1)][rank]
    torch.manual_seed(0)
    plain = nn.ModuleList((nn.Linear(5, 5), nn.Linear(5, 5)))
    sharded = copy.deepcopy(plain)
    tenure.shard(sharded[0])
    tenure.shard(sharded[1], alone)
    for one in (sharded, plain):
        for part in one:
            part(torch.ones(2, 5)).square().sum().backward()
    for order in (lambda p: p, reversed):
        ours, full = (order(list(one.parameters())) for one in (sharded, plain))
        torch.testing.assert_close(
            nn.utils.clip_grad_norm_(ours, 1e9), nn.utils.clip_grad_norm_(full, 1e9)
        )
    next(p for p in sharded[1].parameters()).grad.fill_(math.nan if rank == 1 else 1)
    optimizer = torch.optim.SGD([*sharded[1].parameters(), *sharded[0].parameters()], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2


def all_cases(rank: int, world: int) -> None:
    for case in (norms, norms_over_groups):
        case(rank, world)


def test_on_two_ranks() -> None:
    run_ranks(all_cases, 2)
