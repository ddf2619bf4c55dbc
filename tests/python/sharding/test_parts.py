"""Parts of a sharded model that a program calls without the model, as generation does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tenure
from ranks import run_ranks
from sharded_models import WORDS, Block, average_gradients, batch_of


class Encoder(nn.Module):
    """Its blocks are units, its norm is in the model's; it may call itself, and fail."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.fails: type[BaseException] | None = None

    def forward(self, x: torch.Tensor, again: int = 0) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        if self.fails is not None:
            raise self.fails
        out: torch.Tensor = self.norm(self(x, again - 1) if again else x)
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 17)
        self.encoder = Encoder(17)
        self.inner = nn.Sequential(nn.Linear(17, 17), nn.GELU())
        self.head = nn.Linear(17, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def encode(self, x: torch.Tensor, again: int = 0) -> Any:
        return self.encoder(self.embed(x), again)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.inner(self.encode(x)))


def both() -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = Model()
    return tenure.shard(copy.deepcopy(plain)), plain


def require_same(model: Any, plain: Any, way: Any) -> None:
    """Of a loss: value, gradients, and nothing is left."""
    losses = [way(one).square().mean() for one in (model, plain)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    average_gradients(plain)
    whole = model.tenure.full_gradients()
    for name, parameter in plain.named_parameters():
        if parameter.grad is None:
            assert name not in whole, name
        else:
            torch.testing.assert_close(whole[name], parameter.grad, msg=name)
    model.zero_grad()
    plain.zero_grad()
    assert model.tenure.stats().gathered_bytes == 0


def alone(rank: int, _world: int) -> None:
    model, plain = both()
    for step in range(2):
        x = batch_of(rank, step)
        require_same(model, plain, lambda one, x=x: one.encode(x))
        require_same(model, plain, lambda one, x=x: one.head(one.encode(x, again=2)))
        require_same(model, plain, lambda one, x=x: one(x))
        with torch.no_grad():
            assert torch.equal(model.encode(x), plain.encode(x))
            assert torch.equal(model.embed(x), plain.embed(x))
    require_same(model, plain, lambda one: one(x))
    view = model.encoder.norm.weight.view(-1)
    with pytest.raises(RuntimeError, match=r"UseAfterRelease.*encoder\.norm\.weight"):
        view.sum()


def in_checkpoints(rank: int, _world: int) -> None:
    """One is computed again when the backward has not come to anything else of its unit."""
    model, plain = both()
    for reentrant in (False, True):
        for step in range(2):
            x = batch_of(rank, step)

            def way(one: Any, x: torch.Tensor = x, reentrant: bool = reentrant) -> Any:
                h = one.embed(x)
                return checkpoint(one.encoder, h, use_reentrant=reentrant).tanh()

            require_same(model, plain, way)


def in_hooks(rank: int, _world: int) -> None:
    """A hook that comes later reads before the release; what is inside others is the model's."""
    model, plain = both()
    for one in (model, plain):
        norm = one.encoder.norm
        one.encoder.register_forward_hook(
            lambda _module, _args, out, norm=norm: out * norm.weight.sum()
        )
    require_same(model, plain, lambda one: one.encode(batch_of(rank, 0)))
    require_same(model, plain, lambda one: one(batch_of(rank, 0)))


def that_fail(rank: int, _world: int) -> None:
    model, plain = both()
    x = batch_of(rank, 0)
    for fault in (ValueError, KeyboardInterrupt):
        for call in (lambda: model.encode(x), lambda: model(x), lambda: model.encode(x, again=1)):
            model.encoder.fails = fault
            with pytest.raises(fault):
                call()
            model.encoder.fails = None
            require_same(model, plain, lambda one: one.encode(x))
            require_same(model, plain, lambda one: one(x))


def held(rank: int, _world: int) -> None:
    model, plain = both()
    x = batch_of(rank, 0)
    with model.tenure.hold():
        assert torch.equal(model.encode(x), plain.encode(x))
    require_same(model, plain, lambda one: one.encode(x))


def adopted(rank: int, _world: int) -> None:
    model, plain = both()
    plain.extra = nn.Sequential(nn.LayerNorm(17))
    model.extra = copy.deepcopy(plain.extra)
    model.tenure.adopt()
    require_same(model, plain, lambda one: one.extra(one.encode(batch_of(rank, 0))))


def all_cases(rank: int, world: int) -> None:
    for case in (alone, in_checkpoints, in_hooks, that_fail, held, adopted):
        case(rank, world)


def test_on_two_ranks() -> None:
    run_ranks(all_cases, 2)
