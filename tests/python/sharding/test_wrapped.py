"""What other libraries make of a model, before it is sharded or afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import tenure
from ranks import run_ranks
from sharded_models import Net, average_gradients, batch_of, loss_of
from tenure.sharding import backend


def require_same(model: Any, plain: Any, rank: int) -> None:
    for step in range(2):
        for one in (model, plain):
            loss_of(one, batch_of(rank, step)).backward()
        average_gradients(plain)
        found = model.tenure.full_gradients()
        whole = {name.replace("_orig_mod.", ""): value for name, value in found.items()}
        for name, one in plain.named_parameters():
            if one.grad is not None:
                torch.testing.assert_close(whole[name], one.grad, msg=name)
        model.zero_grad()
        plain.zero_grad()


def wrapped_afterwards(rank: int, _world: int) -> None:
    """On two ranks they would wait for each other, for pieces are of different sizes."""
    plain = Net()
    model = tenure.shard(copy.deepcopy(plain), timeout=20.0)
    for wrap in (nn.DataParallel, nn.parallel.DistributedDataParallel):
        for one in (model, nn.Sequential(model)):
            with pytest.raises(tenure.InputError, match=f"sharded, and {wrap.__name__} has no"):
                wrap(one)
    plain.load_state_dict(model.tenure.full_state_dict())
    require_same(model, plain, rank)
    alike = tenure.shard(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(tenure.InputError, match="FullyShardedDataParallel has no part in it"):
        FullyShardedDataParallel(alike, device_id=torch.device("cpu"))
    nn.parallel.DistributedDataParallel(plain)  # one that has nothing to do with it


def wrapped_before(_rank: int, _world: int) -> None:
    own = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    for model, text in (
        (nn.DataParallel(Net()), "the model is a DataParallel"),
        (nn.Sequential(nn.parallel.DistributedDataParallel(Net())), "0 is a DistributedDataPara"),
        (own, "the model is a FullyShardedDataParallel"),
        (nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.ReLU())), "1 is a ScriptModule"),
    ):
        before = dict(model.named_parameters())
        with pytest.raises(tenure.InputError, match=text):
            tenure.shard(model)
        assert all(one is before[name] for name, one in model.named_parameters())
        assert "tenure" not in model.__dict__


class Empty(Net):
    """A container of nothing, which Python takes for false."""

    def __len__(self) -> int:
        return 0


def without_length(rank: int, _world: int) -> None:
    plain = Empty()
    model: Any = nn.Sequential(copy.deepcopy(plain))
    model = tenure.shard(model, units=[Empty, "0.blocks.1"])
    state = model.tenure.full_state_dict()
    plain.load_state_dict({name.removeprefix("0."): value for name, value in state.items()})
    for one in (model, plain):
        loss_of(one, batch_of(rank, 0)).backward()
    average_gradients(plain)
    whole = model.tenure.full_gradients()
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(whole[f"0.{name}"], parameter.grad, msg=name)
    model[0].late = nn.Parameter(torch.ones(2))
    assert model.tenure.adopt() == ["0.late"]
    assert "what came to unit 0" in str(model.tenure.stats())


def compiled_before(rank: int, _world: int) -> None:
    """All of it, or its blocks in place of which torch puts modules with no forward of a class."""
    for parts in (False, True):
        plain = Net()
        model: Any = copy.deepcopy(plain)
        if parts:
            for number, block in enumerate(model.blocks):
                model.blocks[number] = torch.compile(block, backend=backend("aot_eager"))
        else:
            model = torch.compile(model, backend=backend("aot_eager"))
        model = tenure.shard(model)
        state = model.tenure.full_state_dict()
        plain.load_state_dict({key.replace("_orig_mod.", ""): one for key, one in state.items()})
        require_same(model, plain, rank)
        assert model.tenure.graphs


def set_again(rank: int, _world: int) -> None:
    """As `tie_weights()` of transformers does whenever it is asked for something."""
    plain = Net()
    model: Any = tenure.shard(copy.deepcopy(plain))
    plain.load_state_dict(model.tenure.full_state_dict())
    before = list(model.named_parameters(remove_duplicate=False))
    model.head.weight = model.embed.weight
    model.blocks[0].up.bias = model.blocks[0].up.bias
    after = list(model.named_parameters(remove_duplicate=False))
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(one is other for (_, one), (_, other) in zip(before, after, strict=True))
    require_same(model, plain, rank)
    assert model.tenure.adopt() == []
    model.blocks[0].up.bias = model.blocks[1].up.bias
    with pytest.raises(tenure.InputError, match=r"blocks\.0\.up\.bias came after"):
        model(batch_of(rank, 0))


def all_cases(rank: int, world: int) -> None:
    for case in (wrapped_afterwards, wrapped_before, without_length, compiled_before, set_again):
        case(rank, world)


def test_on_two_ranks() -> None:
    run_ranks(all_cases, 2, timeout=120)
