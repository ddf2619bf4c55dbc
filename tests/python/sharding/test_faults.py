"""Whatever a step does, the next one starts clean, and ranks that part ways are told who."""

from __future__ import annotations

import copy
import gc
import os
import random
import signal
import time
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import tenure
from probes import anonymous_bytes
from ranks import run_ranks
from sharded_models import Net, average_gradients, batch_of, loss_of


class DeliberateError(Exception):
    pass


def fail(*_: Any) -> None:
    raise DeliberateError


def one_step(model: Net, optimizer: torch.optim.Optimizer, batch: torch.Tensor, fault: str) -> None:
    block = model.blocks[1]
    if fault == "forward":
        hook = block.down.register_forward_hook(fail)
        with pytest.raises(DeliberateError):
            loss_of(model, batch)
        hook.remove()
    elif fault == "backward":
        hook = block.down.register_full_backward_pre_hook(fail)
        with pytest.raises(DeliberateError):
            loss_of(model, batch).backward()
        hook.remove()
    elif fault == "no backward":
        loss_of(model, batch)
    elif fault == "eval":
        with torch.no_grad():
            loss_of(model, batch)
    elif fault == "inference":
        with torch.inference_mode():
            loss_of(model, batch)
    elif fault == "two forwards":
        (loss_of(model, batch) + loss_of(model, batch)).backward()
    elif fault == "retain_graph":
        loss = loss_of(model, batch)
        loss.backward(retain_graph=True)
        loss.backward()
    elif fault == "generation":
        with torch.no_grad():
            words = batch[:, :1]
            for _ in range(4):
                words = torch.cat([words, model(words)[:, -1:].argmax(-1)], 1)
    elif fault == "inputs":
        x = torch.randn(2, 3, model.embed.embedding_dim, requires_grad=True)
        torch.autograd.grad(model.blocks[0](x).sum(), x)
    else:
        loss_of(model, batch).backward()
        optimizer.step()
    optimizer.zero_grad()


FAULTS = (
    *("none", "forward", "backward", "no backward", "eval", "inference", "two forwards"),
    *("retain_graph", "generation", "inputs"),
)


def each_fault(rank: int, _world: int) -> None:
    """A fault, and then the same step as without it."""
    for fault in FAULTS[1:]:
        torch.manual_seed(0)
        models = [tenure.shard(Net()) for _ in range(2)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        one_step(models[0], optimizers[0], batch_of(rank, 9), fault)
        for model, optimizer in zip(models, optimizers, strict=True):
            with torch.no_grad():
                for p, q in zip(model.parameters(), models[1].parameters(), strict=True):
                    p.copy_(q)
            one_step(model, optimizer, batch_of(rank, 0), "none")
            assert model.tenure.stats().gathered_bytes == 0, fault
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            assert torch.equal(p, q), fault


def test_the_step_after_a_fault_starts_clean() -> None:
    run_ranks(each_fault, 2)


def fails_and_goes_on(model: Net, rank: int, way: str) -> None:
    """A backward that fails in the middle, and another one with no forward between them."""
    left: list[torch.Tensor] = []
    hooks = [one.register_forward_hook(lambda *at: left.append(at[-1])) for one in model.blocks]
    loss = loss_of(model, batch_of(rank, 0))
    other = loss_of(model, batch_of(rank, 1)) if way == "another loss" else loss
    for hook in hooks:
        hook.remove()
    failing = left[1].register_hook(fail)
    with pytest.raises(DeliberateError):
        loss.backward(retain_graph=True)
    failing.remove()
    model.zero_grad()  # a plain model has what came
    if way == "a part":
        (left[0].square().sum() + left[2].detach().sum()).backward()
    else:
        other.backward()


def the_backward_after_one_that_failed(rank: int, _world: int) -> None:
    for way in ("retained", "another loss", "a part", "reentrant", "not reentrant"):
        for resident in (0, 60):
            torch.manual_seed(0)
            plain = Net(recompute=way if "reentrant" in way else "")
            sharded = tenure.shard(copy.deepcopy(plain), keep_resident=resident, timeout=20.0)
            for model in (plain, sharded):
                fails_and_goes_on(model, rank, way)
            assert sharded.tenure.stats().gathered_bytes == 0, way
            average_gradients(plain)
            expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
            found = sharded.tenure.full_gradients()
            assert set(found) == set(expected), way
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, msg=f"{way} {name}")


def test_a_backward_after_one_that_failed_starts_clean() -> None:
    run_ranks(the_backward_after_one_that_failed, 2)


def writes_in_a_backward(rank: int, _world: int) -> None:
    """Autograd tells of it; the next step does not once more."""
    for resident in (0, 60):
        model = tenure.shard(Net(), keep_resident=resident, timeout=20.0)

        def write(*_: Any, model: Net = model) -> None:
            with torch.no_grad():
                model.blocks[1].norm.weight.mul_(1)
                model.blocks[1].up.weight.mul_(1)

        hook = model.blocks[1].down.register_full_backward_pre_hook(write)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss_of(model, batch_of(rank, 0)).backward()
        hook.remove()
        loss_of(model, batch_of(rank, 0)).backward()
        assert model.tenure.stats().gathered_bytes == 0


def test_a_write_in_a_backward_is_told_once() -> None:
    run_ranks(writes_in_a_backward, 2)


def goes_with_a_gather_under_way(rank: int, _world: int) -> None:
    """What was gathered ahead when a model goes is not in the way of the next collective."""
    for step in range(4):
        model = tenure.shard(Net(), timeout=20.0)
        for _ in range(2):
            loss_of(model, batch_of(rank, 0)).backward()
        if step % 2 == 1:
            with torch.no_grad():
                loss_of(model, batch_of(rank, 0))
        else:
            hook = model.blocks[1].down.register_full_backward_pre_hook(fail)
            with pytest.raises(DeliberateError):
                loss_of(model, batch_of(rank, 0)).backward()
            del hook
        del model
        gc.collect()


def test_a_model_that_goes_leaves_its_group_usable() -> None:
    run_ranks(goes_with_a_gather_under_way, 2)


class Tries(nn.Module):
    """Looks at gradients in its forward, which fails at first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        for fails in (self.fails, False):
            with torch.enable_grad():
                at = x.detach().requires_grad_()
                middle = self.blocks[1](at)
                if fails:
                    middle.register_hook(fail)
                out = self.blocks[2](middle.tanh()).square().sum()
            with suppress(DeliberateError):
                (found,) = torch.autograd.grad(out, at)
        return self.blocks[2](self.blocks[1](x + found))


def backwards_in_a_forward(_rank: int, _world: int) -> None:
    torch.manual_seed(0)
    plain = Tries()
    sharded = tenure.shard(copy.deepcopy(plain), timeout=20.0)
    for step in range(3):
        sharded.fails = step == 1
        for model in (plain, sharded):
            model(torch.ones(2, 8)).sum().backward()
        assert sharded.tenure.stats().gathered_bytes == 0
    average_gradients(plain)
    found = sharded.tenure.full_gradients()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name)


def test_a_backward_that_fails_in_a_forward_leaves_nothing() -> None:
    run_ranks(backwards_in_a_forward, 2)


def transforms(rank: int, _world: int) -> None:
    """While something is left of a backward that has failed."""
    model = tenure.shard(Net(), timeout=20.0)
    hook = model.blocks[1].down.register_full_backward_pre_hook(fail)
    with pytest.raises(DeliberateError):
        loss_of(model, batch_of(rank, 0)).backward()
    hook.remove()
    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(tenure.InputError, match=r"torch\.func transforms"):
            transform(lambda x: model.blocks[0](x).sum())(torch.ones(2, 17))
    loss_of(model, batch_of(rank, 0)).backward()
    assert model.tenure.stats().gathered_bytes == 0


def test_a_transform_is_refused_and_the_step_after_it_is_right() -> None:
    run_ranks(transforms, 2)


def many_steps(rank: int, _world: int) -> list[tuple[int, int]]:
    """Bytes of tensors, and of the process, every 50 steps."""
    torch.manual_seed(0)
    model = tenure.shard(Net(width=33))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = random.Random(0)
    found = []
    for step in range(300):
        one_step(model, optimizer, batch_of(rank, step), draw.choice(FAULTS))
        if step % 50 == 49:
            one_step(model, optimizer, batch_of(rank, step), "none")
            held = tenure.census().nbytes
            found.append((held, anonymous_bytes()))
    return found


def test_bytes_are_flat_over_300_steps_with_faults() -> None:
    for found in run_ranks(many_steps, 2, timeout=240.0):
        held, resident = zip(*found[1:], strict=True)
        assert len(set(held)) == 1, found
        assert resident[-1] - resident[0] < 4 << 20, found


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.skipped: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number not in self.skipped:
                x = block(x)
        return x


def skips(rank: int, _world: int, known: int) -> str:
    model = tenure.shard(Chooses(), timeout=3.0)
    for _ in range(known):
        model(torch.ones(1, 8)).sum().backward()
    model.skipped = {1} if rank == 1 else set()
    begin = time.monotonic()
    with pytest.raises(tenure.CollectiveError) as caught:
        for _ in range(2):
            model(torch.ones(1, 8)).sum().backward()
    assert time.monotonic() - begin < 20
    return str(caught.value)


@pytest.mark.parametrize("known", [0, 3], ids=["first pass", "known order"])
def test_a_unit_that_one_rank_skips_is_named(known: int) -> None:
    told = run_ranks(skips, 2, known)
    assert "rank 1 is gathering unit 'blocks.2' for forward" in told[0], told
    assert "blocks.1" in told[0], told
    assert "rank 0" in told[1], told


def dies_and_tells(rank: int, world: int, pause: float) -> None:
    model = tenure.shard(Net(), timeout=20.0)
    for step in range(2):
        loss_of(model, batch_of(rank, step)).backward()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(pause)
    begin = time.monotonic()
    with pytest.raises(tenure.CollectiveError) as caught:
        for step in range(3):
            loss_of(model, batch_of(rank, step)).backward()
    assert time.monotonic() - begin < 20
    print(caught.value, flush=True)


# After a second the backend knows that the rank has gone, and refuses to begin anything with it.
@pytest.mark.parametrize("pause", [0.0, 1.0], ids=["now", "a while ago"])
def test_a_rank_that_died_is_named(pause: float) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(dies_and_tells, 3, pause, grace=30.0)
    text = str(caught.value)
    assert text.count("rank 2 does not answer") == 2, text
