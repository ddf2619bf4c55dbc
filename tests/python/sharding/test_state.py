"""What is saved of a sharded model is the model, and comes back on any number of ranks."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import tenure
from ranks import run_ranks
from sharded_models import Net, average_gradients, batch_of, loss_of
from tenure.sharding.pieces import StatePiece, boxes_of

safetensors = pytest.importorskip("safetensors.torch")


class Model(Net):
    """With a parameter that is never used, one of three dimensions, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(3, 5, 7))
        self.norm = nn.BatchNorm1d(4)


def make(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """The same batch on all ranks, so that any number of them does the same."""
    losses = []
    for step in steps:
        loss = loss_of(model, batch_of(0, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert type(ours[name]) is torch.Tensor
        assert torch.equal(ours[name], tensor), name


# --- the boxes of a range ----------------------------------------------------------------------


def elements(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[int]:
    flat = torch.arange(math.prod(shape)).view(shape)
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        flat = flat.narrow(dim, offset, size)
    return flat.flatten().tolist()


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (1, 5), (2, 1, 3), (2, 3, 2, 2)])
def test_a_range_is_a_few_boxes(shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    for begin, end in itertools.combinations(range(size + 1), 2):
        boxes = boxes_of(shape, begin, end)
        found = [one for box in boxes for one in elements(shape, box.offsets, box.sizes)]
        assert found == list(range(begin, end))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


# --- on two ranks ------------------------------------------------------------------------------


def pieces(rank: int, _world: int, folder: Path) -> None:
    plain = make(0)
    model = tenure.shard(copy.deepcopy(plain))
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    parameters = dict(plain.named_parameters(remove_duplicate=False))
    for name, value in state.items():
        assert isinstance(value, StatePiece) == (name in parameters), name
        assert value.shape == plain.state_dict()[name].shape
        if name in parameters:
            assert torch.equal(value.local, value.place.cut(parameters[name]))
    part = model.blocks[1].state_dict()
    assert part["up.weight"].place.name == "blocks.1.up.weight"

    # They come back on the same layout, through files as well.
    torch.save(state, folder / f"pieces-{rank}")
    other = tenure.shard(make(1))
    other.load_state_dict(torch.load(folder / f"pieces-{rank}"))
    other.blocks[1].load_state_dict(copy.deepcopy(part))
    assert_same(other.tenure.full_state_dict(), plain.state_dict())

    # They are not taken for the whole.
    with pytest.raises(RuntimeError, match="of embed.weight of shape .*full_state_dict"):
        make(1).load_state_dict(state)
    with pytest.raises(tenure.InputError, match="full_state_dict"):
        state["embed.weight"] + 1
    with pytest.raises(tenure.InputError, match=r"of mix of shape .*full_state_dict"):
        safetensors.save_file(state, folder / "pieces.safetensors")
    dist.barrier()
    with pytest.raises(tenure.InputError, match="embed.weight in the state has elements"):
        other.load_state_dict(torch.load(folder / f"pieces-{1 - rank}"))
    assert_same(other.tenure.full_state_dict(), plain.state_dict())


def whole(rank: int, _world: int, folder: Path) -> None:
    plain = make(0)
    full = plain.state_dict()
    model = tenure.shard(make(1))
    before = model.tenure.full_state_dict()
    with pytest.raises(tenure.InputError, match=r"size mismatch for head.weight.*\[2\]"):
        model.load_state_dict({**full, "head.weight": torch.zeros(2)})
    with pytest.raises(tenure.InputError, match="size mismatch for up.bias"):
        model.blocks[0].load_state_dict({**plain.blocks[0].state_dict(), "up.bias": torch.zeros(2)})
    with pytest.raises(tenure.InputError, match="leave out assign"):
        model.load_state_dict(full, assign=True)
    with pytest.raises(tenure.InputError, match="state has no mix, embed.weight"):
        model.tenure.load_full_state_dict({"x": torch.zeros(2)} if rank == 0 else None)
    with pytest.raises(tenure.InputError, match="model has no x"):
        model.tenure.load_full_state_dict({**full, "x": torch.zeros(2)} if rank == 0 else None)
    with pytest.raises(tenure.InputError, match=r"mix has shape \(2,\) .* \(3, 5, 7\)"):
        model.tenure.load_full_state_dict({**full, "mix": torch.zeros(2)} if rank == 0 else None)
    assert_same(model.tenure.full_state_dict(), before)

    with pytest.raises(RuntimeError, match='Unexpected key.*"x"'):
        model.load_state_dict({**full, "x": torch.zeros(2)})
    without = {name: value for name, value in full.items() if name != "mix"}
    with pytest.raises(RuntimeError, match='Missing key.*"mix"'):
        model.load_state_dict(without)
    assert model.load_state_dict(without, strict=False).missing_keys == ["mix"]
    model.load_state_dict(full)
    assert_same(model.tenure.full_state_dict(), full)

    other = tenure.shard(make(2))
    other.tenure.load_full_state_dict(full if rank == 0 else {"mix": full["norm.bias"]})
    found = other.tenure.full_state_dict(rank0_only=True)
    if rank == 0:
        assert_same(found, full)
        safetensors.save_file(found, folder / "file.safetensors")
    else:
        assert found == {}
    assert loss_of(other, batch_of(0, 0)).item() == loss_of(plain, batch_of(0, 0)).item()


def assert_same_optimizer(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for name, values in theirs["state"].items():
        assert ours["state"][name].keys() == values.keys()
        for key, value in values.items():
            assert torch.equal(ours["state"][name][key], value), (name, key)


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of a plain model's optimizer."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [
        {**group, "params": [names[one] for one in group["params"]]}
        for group in optimizer.param_groups
    ]
    state = {names[one]: values for one, values in optimizer.state.items() if values}
    return {"state": state, "param_groups": groups}


def optimizers(rank: int, _world: int, _folder: Path) -> None:
    plain = make(0)
    model = tenure.shard(copy.deepcopy(plain))
    for kind, how in (
        (torch.optim.AdamW, {"lr": 1e-2}),
        (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
        (torch.optim.SGD, {"lr": 1e-2}),
        (torch.optim.NAdam, {}),
    ):
        ours, theirs = (kind(one.parameters(), **how) for one in (model, plain))
        # Nothing has happened yet.
        assert model.tenure.full_optimizer_state(ours)["state"] == {}
        model.tenure.load_full_optimizer_state(ours, model.tenure.full_optimizer_state(ours))
        for one, optimizer in ((model, ours), (plain, theirs)):
            loss_of(one, batch_of(rank, 0)).backward()
            if one is plain:
                average_gradients(plain)
            optimizer.step()
            optimizer.zero_grad()
        wanted = by_name(plain, theirs)
        state = model.tenure.full_optimizer_state(ours)
        assert "frozen.weight" not in state["state"]
        assert_same_optimizer(state, wanted)
        only = model.tenure.full_optimizer_state(ours, rank0_only=True)
        assert bool(only) == (rank == 0)

        for fresh in (kind(model.parameters(), **how), ours):
            model.tenure.load_full_optimizer_state(fresh, wanted if rank == 0 else {"x": {}})
            assert_same_optimizer(model.tenure.full_optimizer_state(fresh), wanted)
            train(model, fresh, range(1))
            train(plain, theirs, range(0))
        model.load_state_dict(plain.state_dict())


def fresh_optimizer(rank: int, _world: int, _folder: Path) -> None:
    """To be loaded into, a state is there before the first step, and nothing has changed."""
    model = tenure.shard(make(0))
    before = model.tenure.full_state_dict()
    optimizer = adamw(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = model.tenure.sharded_optimizer_state(optimizer)
    trainable = [name for name, one in model.named_parameters() if one.requires_grad]
    assert sorted(state["state"]) == sorted(trainable)
    assert state["state"]["mix"]["exp_avg"].shape == (3, 5, 7)
    assert all(values["step"] == 0 for values in state["state"].values())
    assert not optimizer.state
    assert all(one.grad is None for one in model.parameters())
    assert_same(model.tenure.full_state_dict(), before)
    model.tenure.load_sharded_optimizer_state(optimizer, state)
    other = tenure.shard(make(0))
    assert train(model, optimizer, range(3)) == train(other, adamw(other), range(3))

    # A state that only one rank has must not make it wait for the other.
    if rank == 0:
        piece = dict(model.named_parameters())["mix"]
        optimizer.state[piece] = {"exp_avg": torch.ones(piece.numel()), "other": 1}
    exp_avg = model.tenure.full_optimizer_state(optimizer)["state"]["mix"]["exp_avg"]
    assert exp_avg.shape == (3, 5, 7)


def wrong_optimizers(rank: int, _world: int, _folder: Path) -> None:
    model, other = tenure.shard(make(0)), make(0)
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    state = model.tenure.full_optimizer_state(optimizer)
    pieces_of = model.tenure.sharded_optimizer_state(optimizer)
    for call in (model.tenure.full_optimizer_state, model.tenure.sharded_optimizer_state):
        with pytest.raises(tenure.InputError, match="not of this model.*model.parameters()"):
            call(adamw(other))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"state": {"x": {}}, "param_groups": state["param_groups"]}, "no parameter x"),
        ({"state": {}, "param_groups": []}, "other parameters than"),
        ({"state": {}}, "param_groups"),
    ]
    for wrong, text in cases:
        with pytest.raises(tenure.InputError, match=text):
            model.tenure.load_full_optimizer_state(optimizer, wrong if rank == 0 else None)
        with pytest.raises(tenure.InputError, match=text):
            model.tenure.load_sharded_optimizer_state(optimizer, wrong)
    shape = {**state, "state": {"embed.weight": {"exp_avg": torch.zeros(3)}}}
    with pytest.raises(tenure.InputError, match=r"exp_avg of embed.weight has shape \(3,\)"):
        model.tenure.load_full_optimizer_state(optimizer, shape)
    with pytest.raises(tenure.InputError, match="load_full_optimizer_state"):
        model.tenure.load_sharded_optimizer_state(optimizer, shape)
    swapped = {"embed.weight": {"exp_avg": pieces_of["state"]["blocks.0.up.weight"]["exp_avg"]}}
    with pytest.raises(tenure.InputError, match="has elements"):
        model.tenure.load_sharded_optimizer_state(optimizer, {**state, "state": swapped})
    assert_same_optimizer(model.tenure.full_optimizer_state(optimizer), state)


def all_cases(rank: int, world: int, folder: Path) -> None:
    for case in (pieces, whole, optimizers, fresh_optimizer, wrong_optimizers):
        case(rank, world, folder)


def test_state_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(all_cases, 2, tmp_path)


# --- from one number of ranks to another -------------------------------------------------------

SAVED = 3
STEPS = 7


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "optimizer": model.tenure.sharded_optimizer_state(optimizer),
    }


def resumed(
    folder: Path, group: dist.ProcessGroup | None = None
) -> tuple[Any, torch.optim.Optimizer]:
    from torch.distributed import checkpoint as dcp  # takes seconds: not for all tests

    model = tenure.shard(make(5), group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder, process_group=group)
    model.load_state_dict(state["model"])
    model.tenure.load_sharded_optimizer_state(optimizer, state["optimizer"])
    return model, optimizer


def begin(rank: int, _world: int, folder: Path) -> list[list[float]]:
    """Losses of the rest of the run: plain, sharded, and resumed in three ways."""
    from torch.distributed import checkpoint as dcp

    plain = make(0)
    model = tenure.shard(copy.deepcopy(plain))
    ours, theirs = adamw(model), adamw(plain)
    train(model, ours, range(SAVED))
    train(plain, theirs, range(SAVED))
    dcp.save(state_of(model, ours), checkpoint_id=folder / "sharded")
    later = dcp.async_save(state_of(model, ours), checkpoint_id=folder / "async")
    later.result()
    full = model.tenure.full_state_dict()
    if rank == 0:
        safetensors.save_file(full, folder / "file.safetensors")
        torch.save(full, folder / "full")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if rank == 0:
            dcp.save(plain.state_dict(), checkpoint_id=folder / "plain", no_dist=True)
            torch.save(plain.state_dict(), folder / "plain-full")
        dist.barrier()
        # A plain model reads what sharded ones have written.
        other = make(6)
        read = other.state_dict()
        dcp.load({"model": read}, checkpoint_id=folder / "sharded", no_dist=True)
    assert_same(other.state_dict(), full)
    rest = range(SAVED, STEPS)
    again = train(*resumed(folder / "sharded"), rest)
    also = train(*resumed(folder / "async"), rest)
    alone = dist.new_group([rank], use_local_synchronization=True)
    on_one = resume(rank, 1, folder, alone)
    return [train(plain, theirs, rest), train(model, ours, rest), again, also, on_one]


def resume(
    _rank: int, _world: int, folder: Path, group: dist.ProcessGroup | None = None
) -> list[float]:
    from torch.distributed import checkpoint as dcp

    full = torch.load(folder / "full")
    model, optimizer = resumed(folder / "sharded", group)
    assert_same(model.tenure.full_state_dict(), full)
    other = tenure.shard(make(6), group)
    other.load_state_dict(safetensors.load_file(folder / "file.safetensors"))
    assert_same(other.tenure.full_state_dict(), full)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder / "plain", process_group=group)
    assert_same(other.tenure.full_state_dict(), torch.load(folder / "plain-full"))
    return train(model, optimizer, range(SAVED, STEPS))


def test_a_run_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    plain, sharded, again, also, on_one = run_ranks(begin, 2, tmp_path)[0]
    assert sharded == pytest.approx(plain, rel=1e-5)
    assert again == sharded
    assert also == sharded
    assert on_one == pytest.approx(plain, rel=1e-5)
    for on_three in run_ranks(resume, 3, tmp_path):
        assert on_three == pytest.approx(plain, rel=1e-5)
