"""What programs do with a model: interrupt it, freeze parts, look at norms, replace blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import tenure
from ranks import run_ranks
from sharded_models import Net, average_gradients, batch_of, loss_of
from tenure.sharding import backend


def both() -> tuple[Net, Net]:
    torch.manual_seed(0)
    plain = Net()
    return tenure.shard(copy.deepcopy(plain)), plain


def require_same_gradients(sharded: nn.Module, plain: nn.Module) -> None:
    average_gradients(plain)
    whole = sharded.tenure.full_gradients()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert set(whole) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(whole[name], gradient, msg=name)


def step(model: nn.Module, rank: int, number: int) -> float:
    loss = loss_of(model, batch_of(rank, number))
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)
    model.zero_grad()
    return loss.item()


def interrupted(rank: int, _world: int) -> None:
    """Ctrl-C, of which torch tells no hook, and a write that is told of."""
    for fault, kind in ((KeyboardInterrupt, KeyboardInterrupt), (None, tenure.MutationError)):
        sharded, plain = both()

        def fail(module: Any, *_: Any, fault: Any = fault) -> None:
            if fault is not None:
                raise fault
            with torch.no_grad():
                module.weight.mul_(1)

        hook = sharded.blocks[1].up.register_forward_hook(fail)
        with pytest.raises(kind):
            loss_of(sharded, batch_of(rank, 0))
        hook.remove()
        for number in range(3):
            ours = step(sharded, rank, number)
            loss = loss_of(plain, batch_of(rank, number))
            loss.backward()
            average_gradients(plain)
            with torch.no_grad():
                for p in plain.parameters():
                    if p.grad is not None:
                        p.sub_(0.1 * p.grad)
            plain.zero_grad()
            assert ours == pytest.approx(loss.item(), rel=1e-5)
        assert sharded.tenure.stats().gathered_bytes == 0


class Experts(nn.Module):
    """Each rank has its own, of two."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.randn(5, 5) for _ in range(2))
        self.last = nn.Linear(5, 5)
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x @ self.all[self.rank])


def experts(rank: int, _world: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Experts(rank))
    sharded = tenure.shard(copy.deepcopy(plain))
    for model in (sharded, plain):
        model(torch.ones(3, 5)).square().sum().backward()
    for parameter in plain.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    require_same_gradients(sharded, plain)


def frozen_later(rank: int, _world: int) -> None:
    sharded, plain = both()
    for model in (sharded, plain):
        loss_of(model, batch_of(rank, 0)).backward()
        model.zero_grad()
        model.blocks[0].requires_grad_(requires_grad=False)
        model.frozen.requires_grad_(requires_grad=True)
        loss_of(model, batch_of(rank, 1)).backward()
    require_same_gradients(sharded, plain)


def frozen_by_attribute(rank: int, _world: int) -> None:
    """A module's attribute is the whole parameter, of which a program says the same."""
    sharded, plain = both()
    for number in range(3):
        for model in (sharded, plain):
            model.zero_grad()
            model.blocks[1].up.weight.requires_grad = number != 1
            model.frozen.weight.requires_grad_(number != 0)
            loss_of(model, batch_of(rank, number)).backward()
        assert sharded.frozen._parameters["weight"].requires_grad == (number != 0)
        require_same_gradients(sharded, plain)
        assert sharded.frozen.weight.grad is None


def other_parameters(rank: int, _world: int) -> None:
    """Those of a call are not what would be gathered."""
    sharded, plain = both()
    words = batch_of(rank, 0)[:, :-1]
    own = dict(sharded.named_parameters())
    with pytest.raises(tenure.InputError, match="has another tensor in its place"):
        torch.func.functional_call(sharded, {k: v.detach() for k, v in own.items()}, (words,))
    torch.func.functional_call(sharded, own, (words,))
    for model in (sharded, plain):
        loss_of(model, batch_of(rank, 0)).backward()
    require_same_gradients(sharded, plain)


def penalties(rank: int, _world: int) -> None:
    """A loss that reads the parameters themselves; hooks on them, from before and after."""
    torch.manual_seed(0)
    plain = Net()
    plain.blocks[0].up.weight.register_hook(lambda g: g * 0)
    sharded = Net()
    sharded.load_state_dict(plain.state_dict())
    sharded.blocks[0].up.weight.register_hook(lambda g: g * 0)
    tenure.shard(sharded)
    called = []
    piece = next(iter(sharded.parameters()))
    piece.register_post_accumulate_grad_hook(lambda p: called.append(p.grad is not None))
    for model in (sharded, plain):
        decay = sum(p.square().sum() for p in model.parameters())
        (loss_of(model, batch_of(rank, 0)) + 0.1 * decay).backward()
    assert called == [True, True]  # for the penalty, and for the rest
    assert nn.utils.clip_grad_norm_(sharded.parameters(), 1e9).item() > 0
    whole = sharded.tenure.full_gradients()
    average_gradients(plain)
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None and name != "blocks.0.up.weight":  # the hook sees the penalty
            torch.testing.assert_close(whole[name], parameter.grad, msg=name)


class Skipping(Net):
    """Leaves out its second block when asked to."""

    skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for number, block in enumerate(self.blocks):
            h = h if self.skips and number == 1 else block(h)
        return self.head(self.frozen(h))


def skipped_after_no_sync(rank: int, _world: int) -> None:
    torch.manual_seed(0)
    plain = Skipping()
    sharded = tenure.shard(copy.deepcopy(plain))
    with sharded.tenure.no_sync():
        loss_of(sharded, batch_of(rank, 0)).backward()
    loss_of(plain, batch_of(rank, 0)).backward()
    for model in (sharded, plain):
        model.skips = True
        loss_of(model, batch_of(rank, 1)).backward()
    require_same_gradients(sharded, plain)


def fails_after_no_sync(rank: int, _world: int) -> None:
    """In no_sync() or after it; a plain model keeps what came of a backward that failed."""
    for inside in (True, False):
        sharded, plain = both()

        def fail(*_: Any) -> None:
            raise KeyError

        def run(model: Net, number: int) -> None:
            loss_of(model, batch_of(rank, number)).backward()

        with sharded.tenure.no_sync():
            run(sharded, 0)
        run(plain, 0)
        for model in (sharded, plain):
            hook = model.blocks[1].down.register_full_backward_pre_hook(fail)
            before = {p: p.grad.clone() for p in plain.parameters() if p.grad is not None}
            with pytest.raises(KeyError), ExitStack() as around:
                if inside and model is sharded:
                    around.enter_context(sharded.tenure.no_sync())
                run(model, 1)
            hook.remove()
        if not inside:
            for parameter, gradient in before.items():
                parameter.grad = gradient
        for model in (sharded, plain):
            run(model, 2)
        require_same_gradients(sharded, plain)


def forgets_no_sync(rank: int, _world: int) -> None:
    sharded, plain = both()
    with sharded.tenure.no_sync():
        loss_of(sharded, batch_of(rank, 0)).backward()
    sharded.tenure.drop_unsynced()
    for model in (sharded, plain):
        loss_of(model, batch_of(rank, 1)).backward()
    require_same_gradients(sharded, plain)


def low_sums(_rank: int, _world: int) -> None:
    model = tenure.shard(nn.Sequential(nn.Linear(4, 4, bias=False).half()))
    (model(torch.ones(1, 4).half()) * 30000).sum().backward()
    for gradient in model.tenure.full_gradients().values():
        assert torch.all(gradient == 30000)


@dataclass
class State:
    """What a block takes and gives."""

    x: torch.Tensor
    extra: int = 0


class Wrapped(nn.Module):
    """Its tensors are in objects."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)
        self.mix.weight.requires_grad_(requires_grad=False)

    def forward(self, state: State) -> State:
        return State(torch.tanh(self.mix(state.x)), state.extra + 1)


class Chain(nn.Module):
    """Wrapped blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Wrapped() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = State(self.first(x))
        for block in self.blocks:
            state = block(state)
        return state.x


def objects(_rank: int, _world: int) -> None:
    torch.manual_seed(0)
    plain = Chain()
    sharded = tenure.shard(copy.deepcopy(plain))
    for model in (sharded, plain):
        model(torch.ones(2, 6)).square().sum().backward()
    require_same_gradients(sharded, plain)


def refused(rank: int, _world: int) -> None:
    sharded, plain = both()
    loss = loss_of(sharded, batch_of(rank, 0))
    with torch.no_grad():
        for p in sharded.parameters():
            p.mul_(0.9)
    with pytest.raises(tenure.MutationError, match="between a forward and its backward"):
        loss.backward()
    early = torch.optim.SGD(plain.parameters(), lr=0.1)
    tenure.shard(plain)
    with pytest.raises(tenure.InputError, match="before tenure.shard"):
        early.step()
    loss_of(plain, batch_of(rank, 0)).backward()
    full = [p for p in plain.parameters() if p.numel()]
    with pytest.raises(tenure.InputError, match="element by element"):
        type("Mine", (torch.optim.Adafactor,), {})(full).step()
    with pytest.raises(tenure.InputError, match="cannot be copied or pickled"):
        copy.deepcopy(plain)
    plain.blocks[0] = copy.deepcopy(Net().blocks[0])
    with pytest.raises(tenure.InputError, match="adopt"):
        loss_of(plain, batch_of(rank, 0))
    plain.tenure.adopt()
    loss_of(plain, batch_of(rank, 0)).backward()


def compiled_parts(rank: int, _world: int) -> None:
    """Blocks of one class, and a block that a graph breaks in."""
    sharded, plain = both()
    way = backend("aot_eager")
    for block in sharded.blocks:
        block.compile(backend=way)
    for model in (sharded, plain):
        loss_of(model, batch_of(rank, 0)).backward()
    require_same_gradients(sharded, plain)
    torch.compiler.reset()
    sharded, plain = both()
    for model in (sharded, plain):
        model.blocks[1].up.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    run = torch.compile(sharded, backend=way)
    for model in (run, plain):
        loss_of(model, batch_of(rank, 0)).backward()
    require_same_gradients(sharded, plain)


@pytest.mark.parametrize(
    "cases",
    [
        (interrupted, experts, frozen_later, frozen_by_attribute, penalties),
        (skipped_after_no_sync, fails_after_no_sync, forgets_no_sync, low_sums, objects),
        (refused, other_parameters, compiled_parts),
    ],
    ids=["values", "sums", "errors"],
)
def test_on_two_ranks(cases: tuple[Callable[..., None], ...]) -> None:
    """In few runs, for a rank takes seconds to start."""
    run_ranks(all_of, 2, [case.__name__ for case in cases], timeout=120)


def all_of(rank: int, world: int, names: list[str]) -> None:
    for name in names:
        globals()[name](rank, world)
