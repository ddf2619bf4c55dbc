"""A model whose modules got other places after it was sharded: names are those of now."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import tenure
from ranks import run_ranks
from sharded_models import Block, Net, average_gradients, batch_of, loss_of


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model: Any, plain: Any, optimizers: list[torch.optim.Optimizer], rank: int) -> None:
    for one in (model, plain):
        loss_of(one, batch_of(rank, 0)).backward()
    average_gradients(plain)
    whole = model.tenure.full_gradients()
    wanted = {name: one.grad for name, one in plain.named_parameters() if one.grad is not None}
    assert whole.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(whole[name], gradient, msg=name)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def require_same_state(model: Any, plain: Any, ours: Any, theirs: Any) -> None:
    state = model.tenure.full_state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, msg=name)
    moments = model.tenure.full_optimizer_state(ours)["state"]
    for name, one in plain.named_parameters():
        if one in theirs.state:
            wanted = theirs.state[one]["momentum_buffer"]
            torch.testing.assert_close(moments[name]["momentum_buffer"], wanted, msg=name)


def a_block_less_and_one_more(rank: int, _world: int) -> None:
    """The last block gets the number of the second, and a new one the number that it had."""
    torch.manual_seed(0)
    plain: Any = Net()
    model: Any = tenure.shard(copy.deepcopy(plain))
    ours, theirs = sgd(model), sgd(plain)
    step(model, plain, [ours, theirs], rank)
    for one in (model, plain):
        del one.blocks[1]
    step(model, plain, [ours, theirs], rank)
    require_same_state(model, plain, ours, theirs)

    torch.manual_seed(1)
    more = Block(17)
    for one in (model, plain):
        one.blocks.append(copy.deepcopy(more))
    names = model.tenure.adopt()
    assert names[0] == "blocks.2.scale"
    for one, optimizer in ((model, ours), (plain, theirs)):
        optimizer.add_param_group({"params": list(one.blocks[2].parameters()), "lr": 0.05})
    step(model, plain, [ours, theirs], rank)
    require_same_state(model, plain, ours, theirs)

    # It comes back, what is gone included, for the optimizer has it still.
    state = model.tenure.full_optimizer_state(ours)
    gone = [name for group in state["param_groups"] for name in group["params"] if "gone" in name]
    assert gone[0] == "blocks.1.scale (gone)"
    pieces = model.tenure.sharded_optimizer_state(ours)
    step(model, plain, [ours, theirs], rank)
    model.tenure.load_sharded_optimizer_state(ours, pieces)
    model.tenure.load_full_optimizer_state(ours, state if rank == 0 else None)
    found = model.tenure.full_optimizer_state(ours)
    assert found["state"].keys() == state["state"].keys()
    for name, values in state["state"].items():
        assert torch.equal(found["state"][name]["momentum_buffer"], values["momentum_buffer"])


def test_on_two_ranks() -> None:
    run_ranks(a_block_less_and_one_more, 2)
