"""What several units are given keeps none of them: a backward holds the one that it runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tenure
from ranks import run_ranks
from sharded_models import average_gradients
from tenure import _C

WIDTH = 16
BLOCKS = 6


class Probe(torch.autograd.Function):
    """Looks, in backward, at which blocks have memory."""

    look: Callable[[], None] = staticmethod(lambda: None)

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Probe.look()
        return gradient


class Kept:
    """A cache as programs have them: tensors in a list of an object, which pytree does not know."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []


class Block(nn.Module):
    """Reads what it is given beside `x`, if it is given anything."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.beside = nn.Linear(width, width, bias=False)
        self.unused = nn.Linear(width, width)

    def forward(
        self, x: torch.Tensor, given: torch.Tensor | None = None, kept: Kept | None = None
    ) -> torch.Tensor:
        y = torch.tanh(self.mix(Probe.apply(x)))
        if given is not None:
            y = y + self.beside(given)
        if kept is not None:
            kept.made.append(self.beside(x))
            y = y * kept.made[-1]
        return x + Probe.apply(y)


class Blocks(nn.Module):
    """All that is trained is in blocks."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))


class Conditioned(Blocks):
    """All blocks read one tensor, which the first one has made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = given = self.blocks[0](x)
        for block in self.blocks[1:]:
            h = block(h, given)
        return h


class ConditionedOutside(Blocks):
    """All blocks read one tensor that no unit has made, and pass it on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, given = x, x.exp()
        for block in self.blocks:
            h = block(h, given=given)
        return h


class Skips(Blocks):
    """The second half reads what the first half has made, the last first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down = [x]
        for block in self.blocks[: BLOCKS // 2]:
            down.append(block(down[-1]))
        h = down[-1]
        for block, given in zip(self.blocks[BLOCKS // 2 :], reversed(down), strict=False):
            h = block(h, given)
        return h


class Cached(Blocks):
    """All blocks are given a cache with what all before them have left there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = Kept()
        for block in self.blocks:
            x = block(x, kept=kept)
        return x


class LeavesInCache(Blocks):
    """What blocks have left in a cache is in the loss as well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = Kept()
        for block in self.blocks:
            x = block(x, kept=kept)
        return x + torch.stack(kept.made).sum(0)


class InPlace(Blocks):
    """Blocks begin with a write into what they are given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, given = x * 1, x.exp()
        for block in self.blocks:
            h = block(h.tanh_(), given)
        return h


class Recomputed(Blocks):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, given = x, x.exp()
        for block in self.blocks:
            h = checkpoint(block, h, given, use_reentrant=self.reentrant)
        return h


class RecomputedReentrant(Recomputed):
    reentrant = True


class Frozen(ConditionedOutside):
    """Weights that get no gradients, as under an adapter."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        for block in self.blocks:
            block.mix.requires_grad_(requires_grad=False)
            block.beside.requires_grad_(requires_grad=False)


KINDS = (
    *(Conditioned, ConditionedOutside, Skips, Cached, LeavesInCache, InPlace),
    *(Recomputed, RecomputedReentrant, Frozen),
)


def with_memory(model: Blocks) -> int:
    """Blocks whose parameters have memory just now, whatever Tenure says of it."""
    return sum(
        any(p.untyped_storage().nbytes() and not tenure.is_released(p) for p in whole_of(block))
        for block in model.blocks
    )


def whole_of(block: nn.Module) -> list[torch.Tensor]:
    return [block.mix.weight, block.beside.weight, block.unused.weight]


def backwards(model: nn.Module) -> list[torch.Tensor | None]:
    """All ways through a graph; gradients of the input."""
    x = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH).requires_grad_()
    model(x).square().sum().backward()
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    loss = model(x).square().sum()
    if not isinstance(model, RecomputedReentrant):  # which torch refuses there
        torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    return [x.grad]


def each_kind(rank: int, _world: int, prefetch: int) -> None:
    for kind in KINDS:
        torch.manual_seed(rank)
        plain = kind()
        sharded = tenure.shard(copy.deepcopy(plain), prefetch=prefetch)
        plain.load_state_dict(sharded.tenure.full_state_dict())
        found: list[int] = []
        Probe.look = lambda model=sharded, found=found: found.append(with_memory(model))
        ours = backwards(sharded)
        assert found, kind
        assert max(found) <= 1 + prefetch, (kind, found)
        assert with_memory(sharded) == 0, kind
        assert sharded.tenure.stats().gathered_bytes == 0, kind
        Probe.look = lambda: None
        theirs = backwards(plain)
        assert all(map(torch.equal, ours, theirs)), kind
        average_gradients(plain)
        whole = sharded.tenure.full_gradients()
        expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
        assert set(whole) == set(expected), kind
        for name, gradient in expected.items():
            torch.testing.assert_close(whole[name], gradient, msg=f"{kind} {name}")


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_backward_has_one_unit_and_what_is_ahead(prefetch: int) -> None:
    run_ranks(each_kind, 2, prefetch)


def weighed(_rank: int, _world: int) -> float:
    """The most that a backward has beside what there was before it, in units."""
    meter = _C.HostMeter()
    model = tenure.shard(Conditioned(256), prefetch=0)
    unit = max(unit.bytes for unit in model.tenure.stats().units)
    for _ in range(2):
        loss = model(torch.ones(1, 256)).square().sum()
        before = meter.read()[0]
        loss.backward()
        peak = meter.read()[1] - before
        model.zero_grad()
    return peak / unit


def test_the_allocator_says_so_too() -> None:
    # One unit, its gradients and those of the unit before, which are being added up, and pieces.
    for units in run_ranks(weighed, 2):
        assert units < 4


def llama(rank: int, _world: int) -> None:
    """Its layers are all given the cache of all, and the same position embeddings."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=BLOCKS,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=16,
    )
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config)
    assert plain.config.use_cache
    sharded = tenure.shard(copy.deepcopy(plain), prefetch=0)
    found: list[int] = []
    layers = sharded.model.layers

    def look(*_: object) -> None:
        found.append(sum(not tenure.is_released(one.mlp.up_proj.weight) for one in layers))

    for layer in layers:
        layer.mlp.register_full_backward_hook(look)
    words = torch.arange(10).view(1, 10) % 16 + rank
    for model in (sharded, plain):
        model(input_ids=words, labels=words).loss.backward()
    assert len(found) == BLOCKS
    assert max(found) == 1, found
    average_gradients(plain)
    whole = sharded.tenure.full_gradients()
    for name, parameter in plain.named_parameters():
        assert torch.equal(whole[name], parameter.grad), name


def test_a_llama_with_its_cache() -> None:
    pytest.importorskip("transformers")
    run_ranks(llama, 2, timeout=120)
