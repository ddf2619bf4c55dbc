"""Kinds: what storages are to programs that use nothing of Tenure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tenure.inspect.kinds import marked_tensors
from tenure.report.lives import Life, opened
from watched import forked_run, tenure_run


def lives_of(folder: Path) -> list[Life]:
    (file,) = [path for path in folder.glob("*.sqlite") if "-0-" in path.name]
    with opened(file) as recorded:
        return list(recorded.lives())


def test_modules_and_optimizers_are_asked() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    loose = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.Adam([*model.parameters(), loose])
    (model(torch.ones(5, 2)).sum() + loose.sum()).backward()
    optimizer.step()
    found = {id(tensor): (kind, name) for tensor, kind, name in marked_tensors()}
    assert found[id(model[0].weight)] == ("parameter", "Sequential.0.weight")
    assert found[id(model[0].weight.grad)] == ("gradient", "Sequential.0.weight.grad")
    assert found[id(model[1].running_mean)] == ("parameter", "Sequential.1.running_mean")
    state = optimizer.state[model[0].weight]
    assert found[id(state["exp_avg"])] == ("optimizer", "Sequential.0.weight.exp_avg")
    assert found[id(loose)][0] == "parameter"
    assert found[id(optimizer.state[loose]["exp_avg"])][1].endswith(".exp_avg")


def test_the_programs_own_keys_are_not_told() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter])
    keys = ("token-0123", 7, ("a", "b"))
    for key in keys:
        optimizer.state[parameter][key] = torch.ones(4)
    found = {id(tensor): name for tensor, _, name in marked_tensors()}
    names = {found[id(optimizer.state[parameter][key])] for key in keys}
    assert {name.rpartition(".")[2] for name in names} == {"state"}


def test_what_torchs_optimizers_keep_has_its_name() -> None:
    kinds = (
        *(torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
        *(torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD),
        *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD, torch.optim.LBFGS),
    )
    for kind in kinds:
        parameter = nn.Parameter(torch.ones(4))
        optimizer = kind([parameter])
        for _ in range(2):
            parameter.grad = torch.ones(4)
            optimizer.step(lambda: torch.ones(()))
        kept = [value for value in optimizer.state[parameter].values() if torch.is_tensor(value)]
        found = {id(tensor): name for tensor, _, name in marked_tensors()}
        assert not [name for name in (found[id(one)] for one in kept) if name.endswith(".state")]


PROGRAM = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(15):
    x = torch.randn(16, 32)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> list[Life]:
    folder = tmp_path_factory.mktemp("kinds")
    (folder / "train.py").write_text(PROGRAM)
    return lives_of(forked_run(["train.py"], folder).folder)


def test_a_step_in_the_middle(lives: list[Life]) -> None:
    """One whose gradients nobody asked for: where they were made and when they died must do."""
    middle = [life for life in lives if life.born_step == 10]
    made = {kind: [one for one in middle if one.kind == kind] for kind in {m.kind for m in middle}}
    assert sorted(life.nbytes for life in made["gradient"]) == [128, 128, 4096, 4096]
    assert {life.origin["op"] for life in made["activation"]} >= {"aten::addmm", "aten::tanh"}
    assert not {life.name for life in middle} - {""}
    assert made["temporary"]


def test_momentum_is_the_optimizers(lives: list[Life]) -> None:
    state = [life for life in lives if life.kind == "optimizer" and life.died is None]
    assert sorted(life.nbytes for life in state) == [128, 128, 4096, 4096]
    assert {life.name for life in state} >= {"Sequential.0.weight.momentum_buffer"}


DDP = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(15):
    model(torch.randn(16, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_buckets_are_for_communication(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DDP)
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    run = tenure_run(launch, tmp_path)
    assert run.code == 0, run.err
    with_steps = []
    for file in run.folder.glob("*.sqlite"):
        with opened(file) as recorded:
            if len(list(recorded.steps())) >= 15 and recorded.meta.get("unit", "step") == "step":
                with_steps.append([one for one in recorded.lives() if one.kind == "communication"])
    assert len(with_steps) == 2
    for buckets in with_steps:
        assert max(life.nbytes for life in buckets) >= 4 * 256 * 256
