"""Compiled sharded models train as data parallel ones, and release as eager ones do."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import tenure
from ranks import run_ranks
from sharded_models import Net, average_gradients, batch_of, loss_of
from tenure.sharding import backend
from tenure.sharding.compiled import preparing


def compiled(model: nn.Module, compiler: str = "aot_eager", **more: Any) -> Any:
    return torch.compile(model, backend=backend(compiler, **more), fullgraph=True)


def train(rank: int, compiler: str, kind: dict[str, Any], how: dict[str, Any]) -> None:
    """Losses, norms and gradients beside those of data parallel training."""
    torch.manual_seed(0)
    torch.compiler.reset()
    plain = Net(**kind)
    sharded = tenure.shard(copy.deepcopy(plain), **how)
    run = compiled(sharded, compiler)
    ours = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(4):
        batch = batch_of(rank, step)
        losses = []
        for model in (run, plain):
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.item())
        average_gradients(plain)
        if step == 0:
            whole = sharded.tenure.full_gradients()
            for name, parameter in plain.named_parameters():
                if parameter.grad is not None:
                    torch.testing.assert_close(whole[name], parameter.grad, rtol=1e-5, atol=1e-6)
        norms = [float(nn.utils.clip_grad_norm_(m.parameters(), 0.5)) for m in (sharded, plain)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4), (kind, how, step)
        assert norms[0] == pytest.approx(norms[1], rel=1e-4), (kind, how, step)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert sharded.tenure.stats().gathered_bytes == 0
    assert [graph.kind for graph in sharded.tenure.graphs] == ["forward", "backward"]
    assert not any(graph.why for graph in sharded.tenure.graphs)


WAYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"prefetch": 0}),
    ({}, {"reshard_after_forward": False, "prefetch": 2}),
    ({"again": True}, {"units": ["blocks.0", "blocks.2"]}),
    ({"recompute": "plain"}, {"keep_resident": 60}),
]


def all_ways(rank: int, _world: int) -> None:
    for kind, how in WAYS:
        train(rank, "aot_eager", kind, how)
    train(rank, "inductor", {}, {})


def test_it_is_data_parallel_training() -> None:
    run_ranks(all_ways, 2, timeout=300)


def gathers_the_least(_rank: int, _world: int) -> None:
    """Without prefetch no more is gathered than eager modules have; with one, a unit more."""
    peaks = []
    for prefetch in (0, 1):
        model = tenure.shard(Net(), prefetch=prefetch)
        run = compiled(model)
        for step in range(3):
            loss_of(run, batch_of(0, step)).backward()
        peaks.append(model.tenure.stats().peak_gathered_bytes)
    sizes = {unit.name: unit.bytes for unit in model.tenure.stats().units}
    # The ends are tied, so the model's own unit is read first and last.
    assert peaks[0] == sizes["Net"] + sizes["blocks.0"]
    assert peaks[1] <= peaks[0] + sizes["blocks.1"]


def obeys_a_limit(_rank: int, _world: int) -> None:
    """Of `memory`, what is left is less than a unit: nothing is gathered ahead."""
    model = tenure.shard(Net(), prefetch=3)
    loss_of(compiled(model, memory=1 << 20), batch_of(0, 0)).backward()
    alone = tenure.shard(Net(), prefetch=0)
    loss_of(compiled(alone), batch_of(0, 0)).backward()
    assert [g.peak_bytes for g in model.tenure.graphs] == [
        g.peak_bytes for g in alone.tenure.graphs
    ]


def keeps_gradients(rank: int, _world: int) -> None:
    torch.manual_seed(0)
    plain = Net()
    model = tenure.shard(copy.deepcopy(plain))
    run = compiled(model)
    with model.tenure.no_sync():
        loss_of(run, batch_of(rank, 0)).backward()
        assert all(p.grad is None for p in model.parameters())
    loss_of(run, batch_of(rank, 1)).backward()
    for step in range(2):
        loss_of(plain, batch_of(rank, step)).backward()
    average_gradients(plain)
    whole = model.tenure.full_gradients()
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(whole[name], parameter.grad)


class Faulty(Net):
    """Fails in the middle of a pass that is compiled."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = super().forward(x)
        torch._assert_async((h * (0.0 if self.fails else 1.0)).abs().sum() > 0, "as asked")
        return h


def starts_clean_after_faults(rank: int, _world: int) -> None:
    model = tenure.shard(Faulty())
    run = torch.compile(model, backend=backend("aot_eager"))
    for step in range(12):
        model.fails = step % 3 == 1
        if model.fails:
            with pytest.raises(RuntimeError, match="as asked"):
                loss_of(run, batch_of(rank, step))
            continue
        loss = loss_of(run, batch_of(rank, step))
        if step % 3 == 2:
            continue  # forward only
        loss.backward()
        assert model.tenure.stats().gathered_bytes == 0
        model.zero_grad()


def runs_in_parts(rank: int, _world: int) -> None:
    """Blocks that are compiled one by one, in a model that is not; and a graph that breaks."""
    torch.manual_seed(0)
    plain = Net()
    model = tenure.shard(copy.deepcopy(plain))
    for block in model.blocks:
        block.compile(backend=backend("aot_eager"))
    for both in (model, plain):
        loss_of(both, batch_of(rank, 0)).backward()
    average_gradients(plain)
    whole = model.tenure.full_gradients()
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(whole[name], parameter.grad)
    assert len(model.tenure.graphs) >= 2


class Broken(nn.Module):
    """A graph breaks in it, and so in whatever compiles it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        torch._dynamo.graph_break()
        return x + self.down(h.relu())


def goes_where_it_breaks(rank: int, _world: int) -> None:
    """A unit that a graph breaks in is gone when backward has come through it."""
    model = tenure.shard(nn.Sequential(*(Broken() for _ in range(3))), prefetch=0)
    plain = nn.Sequential(*(Broken() for _ in range(3)))
    plain.load_state_dict(model.tenure.full_state_dict())
    run = torch.compile(model, backend=backend("aot_eager"))
    for _ in range(3):
        for one, way in ((model, run), (plain, plain)):
            one.zero_grad()
            way(torch.full((2, 8), 1.0 + rank)).square().sum().backward()
    assert model.tenure.stats().peak_gathered_bytes == max(
        unit.bytes for unit in model.tenure.stats().units
    )
    average_gradients(plain)
    whole = model.tenure.full_gradients()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(whole[name], parameter.grad, msg=name)


def evaluates(rank: int, _world: int) -> None:
    model = tenure.shard(Net())
    run = compiled(model)
    with torch.no_grad():
        first = run(batch_of(rank, 0))
        second = run(batch_of(rank, 0))
    assert torch.equal(first, second)
    assert torch.equal(first, model(batch_of(rank, 0)))
    assert [graph.kind for graph in model.tenure.graphs] == ["forward"]
    view = model.blocks[0].up.weight.T
    with pytest.raises(RuntimeError, match=r"UseAfterRelease.*blocks\.0"):
        view.sum().item()


def lets_the_model_go(_rank: int, _world: int) -> None:
    model = tenure.shard(Net())
    run = compiled(model)
    loss_of(run, batch_of(0, 0)).backward()
    gone = weakref.ref(model.tenure)
    del model, run
    torch.compiler.reset()
    gc.collect()
    assert gone() is None


def says_why_not(rank: int, _world: int) -> None:
    """A graph that is not proven runs with all its units gathered."""
    torch.manual_seed(0)
    plain = Net()
    model = tenure.shard(copy.deepcopy(plain))
    told: list[str] = []
    logger = logging.getLogger("tenure.sharding")
    listener = logging.Handler()
    listener.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(listener)
    prove, preparing.prove = preparing.prove, lambda *_: ["node x reads unit 0 before its wait"]
    try:
        loss = loss_of(compiled(model), batch_of(rank, 0))
        loss.backward()
    finally:
        preparing.prove = prove
        logger.removeHandler(listener)
    assert loss.item() == pytest.approx(loss_of(plain, batch_of(rank, 0)).item())
    assert [graph.why for graph in model.tenure.graphs] == [
        ("node x reads unit 0 before its wait",)
    ] * 2
    assert "a forward graph has all its units gathered while it runs: node x" in told[0]
    assert model.tenure.stats().gathered_bytes == 0


def refuses(_rank: int, _world: int) -> None:
    for wrong in ({"compiler": "cudagraphs"}, {"memory": 0}):
        with pytest.raises(tenure.InputError):
            backend(**wrong)  # type: ignore[arg-type]
    model = tenure.shard(Net())
    for how in ({"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}):
        run = torch.compile(model, backend=backend("inductor"), **how)
        with pytest.raises(Exception, match="CUDA graphs replay fixed addresses"):
            run(batch_of(0, 0))

    def writes(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            model.blocks[0].up.weight.mul_(2)
        return model(x)

    with pytest.raises(Exception, match="the graph writes to a parameter"):
        torch.compile(writes, backend=backend("aot_eager"), fullgraph=True)(batch_of(0, 0))


def test_in_one_run() -> None:
    """For a rank takes seconds to start."""
    run_ranks(all_cases, 2, timeout=300)


def all_cases(rank: int, world: int) -> None:
    for case in (
        gathers_the_least,
        obeys_a_limit,
        keeps_gradients,
        starts_clean_after_faults,
        runs_in_parts,
        goes_where_it_breaks,
        evaluates,
        lets_the_model_go,
        says_why_not,
        refuses,
    ):
        torch.compiler.reset()
        case(rank, world)
