"""Wrong input gets one sentence, and the model is as it was."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import tenure
from ranks import run_ranks
from sharded_models import Net


@pytest.fixture
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_there_must_be_a_group() -> None:
    with pytest.raises(tenure.InputError, match="init_process_group"):
        tenure.shard(Net())


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"units": [nn.Conv2d]}, "no module of the model is Conv2d; it has Embedding"),
        ({"units": ["blocks.9"]}, "'blocks.9'"),
        ({"units": lambda _name, _module: False}, "chose no module"),
        ({"units": []}, "units: there is none"),
        ({"units": iter(())}, "units: there is none"),
        ({"prefetch": -1}, "prefetch"),
        ({"prefetch_bytes": -1}, "prefetch_bytes"),
        ({"timeout": 0}, "timeout"),
        ({"param_dtype": torch.int8}, "param_dtype"),
        ({"reduce_dtype": "float"}, "reduce_dtype"),
        ({"group": "world"}, "group"),
    ],
)
def test_wrong_settings(how: dict[str, Any], text: str) -> None:
    model = Net()
    before = dict(model.named_parameters())
    with pytest.raises(tenure.InputError, match=text):
        tenure.shard(model, **how)
    unchanged(model, before)


def unchanged(model: nn.Module, before: dict[str, nn.Parameter]) -> None:
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert "tenure" not in model.__dict__


def test_models_that_cannot_be_sharded() -> None:
    run_ranks(refused, 1)


def refused(_rank: int, _world: int) -> None:
    meta = nn.Linear(2, 2, device="meta")
    with pytest.raises(tenure.InputError, match="weight is on the meta device"):
        tenure.shard(meta)
    with pytest.raises(tenure.InputError, match="no parameters"):
        tenure.shard(nn.ReLU())
    with pytest.raises(tenure.InputError, match="0.weight has no shape yet"):
        tenure.shard(nn.Sequential(nn.LazyLinear(2)))
    sparse = nn.Sequential(nn.Linear(2, 2))
    sparse[0].weight = nn.Parameter(torch.eye(2).to_sparse())
    with pytest.raises(tenure.InputError, match=r"0.weight is a sparse tensor \(torch.sparse_coo"):
        tenure.shard(sparse)
    with torch.inference_mode():
        model = nn.Linear(2, 2)
        before = dict(model.named_parameters())
        with pytest.raises(tenure.InputError, match="do it outside"):
            tenure.shard(model)
    with pytest.raises(tenure.InputError, match=r"weight was made in torch\.inference_mode"):
        tenure.shard(model)
    unchanged(model, before)
    model = tenure.shard(Net())
    model.late = nn.LazyLinear(2)
    with pytest.raises(tenure.InputError, match="late.weight has no shape yet"):
        model.tenure.adopt()
    del model.late
    with pytest.raises(tenure.InputError, match="sharded already"):
        tenure.shard(model)
    with pytest.raises(tenure.InputError, match="sharded already"):
        tenure.shard(nn.Sequential(model))
    from torch.distributed.tensor import distribute_module

    spread = distribute_module(nn.Linear(2, 2), init_device_mesh("cpu", (1,)))
    with pytest.raises(tenure.InputError, match="weight is a DTensor"):
        tenure.shard(spread)


def differs(rank: int, _world: int) -> None:
    model = Net(width=17 if rank == 0 else 19)
    before = dict(model.named_parameters())
    with pytest.raises(tenure.InputError, match="rank 1 are not those of rank 0"):
        tenure.shard(model)
    unchanged(model, before)
    with pytest.raises(tenure.InputError, match="rank 1 are not those of rank 0"):
        tenure.shard(Net(), prefetch=rank)


def test_ranks_must_have_the_same_model() -> None:
    run_ranks(differs, 2)


def one_refuses(rank: int, _world: int) -> None:
    """The others hear why, at once, and go on."""
    model = nn.Sequential(nn.Embedding(5, 3, sparse=rank == 1))
    before = dict(model.named_parameters())
    said = "0.weight has sparse gradients"
    said = said if rank == 1 else f"rank 1 cannot take part: {said}"
    begin = time.monotonic()
    with pytest.raises(tenure.InputError, match=said):
        tenure.shard(model)
    unchanged(model, before)
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(tenure.InputError, match="prefetch is a whole number"):
        tenure.shard(model, prefetch=-1 if rank == 0 else 1)
    tenure.shard(model)
    model[0].late = nn.Parameter(torch.eye(3).to_sparse() if rank == 1 else torch.eye(3))
    with pytest.raises(tenure.InputError, match="0.late is a sparse tensor"):
        model.tenure.adopt()
    model[0].late = nn.Parameter(torch.eye(3))
    assert model.tenure.adopt() == ["0.late"]
    assert time.monotonic() - begin < 20


def test_what_one_rank_refuses_all_hear_of() -> None:
    run_ranks(one_refuses, 2)


class Unreadable(torch.Tensor):
    """What reads it fails, as where there is no memory for a copy."""

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        if func is not torch.ops.aten.detach.default:
            raise RuntimeError("no memory for a copy")
        with torch._C._DisableTorchDispatch():
            return torch.Tensor._make_subclass(cls, func(*args, **(kwargs or {})))


def unreadable() -> nn.Parameter:
    return nn.Parameter(torch.Tensor._make_subclass(Unreadable, torch.eye(3)))


class Odd(nn.Module):
    """Its last block cannot be taken over, for one parameter cannot be read."""

    def __init__(self, *, odd: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        if odd:
            self.blocks[2].weight = unreadable()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:2]:
            x = block(x)
        return x


def fails_halfway(rank: int, _world: int) -> None:
    x = torch.ones(1, 3)
    for everywhere in (True, False):
        model = Odd(odd=everywhere or rank == 1)
        before = dict(model.named_parameters())
        values = model(x)
        begin = time.monotonic()
        with pytest.raises((RuntimeError, tenure.CollectiveError)) as caught:
            tenure.shard(model)
        assert time.monotonic() - begin < 20
        if rank == 0 and not everywhere:
            assert "another rank could not take over unit 'blocks.2'" in str(caught.value)
        else:
            assert "no memory for a copy" in str(caught.value)
        unchanged(model, before)
        assert torch.equal(model(x), values)
        model.blocks[2] = nn.Linear(3, 3)
        tenure.shard(model)
        model(x).sum().backward()


def fails_to_adopt(rank: int, _world: int) -> None:
    model = tenure.shard(Odd(odd=False))
    model.blocks[0].late = nn.Parameter(torch.ones(3))
    model.blocks[1].late = unreadable() if rank == 1 else nn.Parameter(torch.eye(3))
    with pytest.raises((RuntimeError, tenure.CollectiveError)):
        model.tenure.adopt()
    assert "late" not in model.blocks[0].__dict__
    model.blocks[1].late = nn.Parameter(torch.eye(3))
    assert model.tenure.adopt() == ["blocks.0.late", "blocks.1.late"]
    with model.tenure.hold():
        model(torch.ones(1, 3)).sum().backward()
    assert model.tenure.full_gradients().keys() == {
        f"blocks.{number}.{name}" for number in (0, 1) for name in ("weight", "bias")
    }


def halfway(rank: int, world: int) -> None:
    fails_halfway(rank, world)
    fails_to_adopt(rank, world)


def test_a_model_that_fails_halfway_is_as_it_was() -> None:
    run_ranks(halfway, 2)


def moved(_rank: int, _world: int) -> None:
    model = tenure.shard(nn.Sequential(nn.Linear(3, 3)))
    for change in (model.half, model.share_memory, lambda: model._apply(torch.clone)):
        with pytest.raises(tenure.InputError, match="weight of Linear is sharded and cannot be"):
            change()
    values = [piece.detach().clone() for piece in model.parameters()]
    model.to("cpu", torch.float32)._apply(lambda one: one.mul_(2))
    assert all(map(torch.equal, model.parameters(), (2 * one for one in values)))
    model(torch.ones(3)).sum().backward()


def test_pieces_stay_where_they_are() -> None:
    run_ranks(moved, 1)


def elsewhere(rank: int, _world: int) -> None:
    group = dist.new_group([0])
    if rank == 1:
        with pytest.raises(tenure.InputError, match="this rank is not in the group"):
            tenure.shard(Net(), group)
    else:
        tenure.shard(Net(), group)


def test_a_rank_outside_the_group() -> None:
    run_ranks(elsewhere, 2)


def in_other_groups(rank: int, world: int) -> None:
    """Some ranks are in more groups than others, and one model has fewer ranks."""
    some = dist.new_group([0, world - 1])
    if rank in (0, world - 1):
        part = tenure.shard(nn.Linear(3, 3), some, timeout=20.0)
        part(torch.ones(3)).sum().backward()
    model = tenure.shard(nn.Linear(3, 3), timeout=20.0)
    model(torch.ones(3)).sum().backward()
    assert set(model.tenure.full_gradients()) == {"weight", "bias"}


def test_some_ranks_are_in_more_groups() -> None:
    run_ranks(in_other_groups, 3)


def comes_later(rank: int, _world: int) -> None:
    model = nn.Linear(3, 3)
    if rank == 0:
        with pytest.raises(tenure.CollectiveError, match="rank 1 did not come within 2 s"):
            tenure.shard(model, timeout=2.0)
    dist.barrier()
    tenure.shard(model, timeout=20.0)
    model(torch.ones(3)).sum().backward()


def test_a_rank_that_does_not_shard_is_named() -> None:
    run_ranks(comes_later, 2)


def in_another_torch(rank: int, _world: int) -> None:
    """Which makes groups in another way inside."""
    from torch.distributed import distributed_c10d as c10d

    made = c10d._new_process_group_helper

    def helper(*given: Any, **named: Any) -> Any:
        return made(*given, **named)

    c10d._new_process_group_helper = helper
    model = tenure.shard(nn.Linear(3, 3), timeout=20.0)
    model(torch.ones(3)).sum().backward()
    if rank == 0:
        with pytest.raises(tenure.CollectiveError, match="cannot connect the ranks within 2 s"):
            tenure.shard(nn.Linear(3, 3), timeout=2.0)
    dist.barrier()


def test_a_torch_with_other_names_inside() -> None:
    run_ranks(in_another_torch, 2)
