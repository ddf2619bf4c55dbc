"""Steps that fail: every rank hears of it by name, nothing is left, and the next step is right."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import tenure
from ranks import run_ranks
from tenure import _C


class Failing(torch.autograd.Function):
    """Does nothing, and fails in backward when it is told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stage: Stage) -> torch.Tensor:
        ctx.stage, ctx.microbatch = stage, stage.calls
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.stage.fails == ("B", ctx.microbatch):
            raise ValueError("no backward today")
        return gradient, None


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.fails: tuple[str, int] | None = None
        self.calls = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.fails == ("F", self.calls):
            raise ValueError("no forward today")
        if self.fails == ("W", self.calls):
            hook = self.up.weight.register_hook(_refuse)
            self.hooks = [hook]
        return Failing.apply(self.down(self.up(x).relu()), self)


def _refuse(_gradient: torch.Tensor) -> None:
    raise ValueError("no weights today")


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def writes(rank: int, _ranks: int) -> list[str]:
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)) if rank else nn.Linear(8, 8)
    pipe = tenure.Pipeline(module, "1f1b", 2, loss=mean, timeout=30)
    try:
        pipe.step(torch.randn(4, 8), target=torch.randn(4, 8))
    except (RuntimeError, tenure.CollectiveError) as error:
        return [str(error), *getattr(error, "__notes__", ())]
    return []


def test_a_stage_that_writes_to_what_it_received_is_told_what_to_do() -> None:
    _, said = run_ranks(writes, 2)
    assert any("stage 1 may not write" in one and "x.clone()" in one for one in said), said
    assert said[-1] == "rank 1, in the forward of stage 1 for microbatch 0"


def setting(schedule: str, rank: int, ranks: int) -> tuple[list[Stage], tenure.Pipeline]:
    torch.manual_seed(rank)
    count = len(tenure.pipelining.schedule(schedule, ranks, 8).stages_of(rank))
    stages = [Stage() for _ in range(count)]
    return stages, tenure.Pipeline(stages, schedule, 8, loss=mean, strict=True, timeout=30)


def run(stages: list[Stage], pipe: tenure.Pipeline) -> None:
    for stage in stages:
        stage.calls = -1
        stage.zero_grad()
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, 64, generator=draw), torch.randn(32, 64, generator=draw)
    pipe.step(x, target=y)


def gradients(stages: list[Stage]) -> list[torch.Tensor]:
    return [p.grad.clone() for stage in stages for p in stage.parameters()]


def forget(stages: list[Stage]) -> None:
    for stage in stages:
        stage.zero_grad()
        stage.fails = None
        for hook in stage.__dict__.pop("hooks", ()):
            hook.remove()


def failures(rank: int, ranks: int, schedule: str) -> list[tuple[str, str, str, int]]:
    """Of each case what is said in the step, and in the next, in which nothing fails."""
    meter = _C.HostMeter()
    stages, pipe = setting(schedule, rank, ranks)
    run(stages, pipe)
    right = gradients(stages)
    forget(stages)
    dist.barrier()  # it may keep a tensor of its own
    start = meter.read()[0]
    said = []
    for kind in ("F", "B", "W"):
        for culprit in range(ranks):
            for microbatch in (0, 3, 7):
                if rank == culprit:
                    stages[-1].fails = (kind, microbatch)
                try:
                    run(stages, pipe)
                except (ValueError, tenure.CollectiveError) as error:
                    notes = " ".join(getattr(error, "__notes__", ()))
                    text = f"{type(error).__name__}: {error} {notes}"
                else:
                    text = "nothing"
                forget(stages)
                try:
                    run(stages, pipe)
                    later = "nothing"
                except tenure.CollectiveError as error:
                    later = str(error)
                forget(stages)
                case = f"{kind}{culprit}.{microbatch}"
                said.append((case, text, later, meter.read()[0] - start))
                dist.barrier()
    run(stages, pipe)
    for ours, wanted in zip(gradients(stages), right, strict=True):
        assert torch.equal(ours, wanted)
    assert pipe.stats().failed_steps == sum(text != "nothing" for _, text, _, _ in said)
    return said


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_failure_at_any_action_is_named_everywhere_and_leaves_nothing(schedule: str) -> None:
    found = run_ranks(failures, 2, schedule, timeout=90)
    words = {"F": "no forward today", "B": "no backward today", "W": "no weights today"}
    for rank, said in enumerate(found):
        for case, text, later, left in said:
            kind, culprit, microbatch = case[0], int(case[1]), int(case[3])
            assert left == 0, (rank, case)
            if text == "nothing":  # it was done with its messages before the other one failed
                assert rank != culprit
                assert microbatch == 7
                assert f"in the step before this one rank {culprit} failed in the " in later
                assert words[kind] in later
                continue
            assert later == "nothing", (rank, case)
            assert words[kind] in text, (rank, case, text)
            if rank == culprit:
                assert text.startswith("ValueError")
                assert f"rank {culprit}, in the " in text
            else:
                assert text.startswith("CollectiveError")
                assert f"rank {culprit} failed in the " in text
                assert "of stage" in text
                if kind == "F":
                    assert f"microbatch {microbatch}" in text


def forward_only(rank: int, ranks: int) -> list[int]:
    meter = _C.HostMeter()
    _, pipe = setting("1f1b", rank, ranks)
    levels = []
    for _ in range(5):
        made = pipe.eval(torch.ones(32, 64))
        assert (made is None) == (rank != ranks - 1)
        if made is not None:
            assert made.shape == (32, 64)
        del made
        levels.append(meter.read()[0])
    return levels


def test_forward_only_steps_leave_nothing() -> None:
    for levels in run_ranks(forward_only, 2):
        assert levels == [levels[0]] * 5


def killed(rank: int, ranks: int, late: float) -> str:
    stages, pipe = setting("1f1b", rank, ranks)
    run(stages, pipe)
    if rank == 1:
        stages[0].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    elif late:
        stages[0].register_forward_hook(lambda *_: time.sleep(late))
    try:
        run(stages, pipe)
    except tenure.CollectiveError as error:
        text = str(error)
    try:
        run(stages, pipe)
    except tenure.CollectiveError as error:
        text += f" | {error}"
    print("SAID", text, flush=True)
    os._exit(0)


@pytest.mark.parametrize("late", [0.0, 0.5])
def test_a_killed_rank_is_named_by_the_others(late: float) -> None:
    """Also by one that asks it for something when it has long been gone."""
    with pytest.raises(AssertionError) as caught:
        run_ranks(killed, 3, late, timeout=60)
    said = [line for line in str(caught.value).splitlines() if "SAID" in line]
    assert len(said) == 2
    for line in said:
        assert "rank 1 ended" in line
        assert "this pipeline cannot go on" in line


def refused(rank: int, ranks: int) -> str:
    stages, pipe = setting("1f1b", rank, ranks)
    try:
        pipe.step(torch.ones(3 if rank == 0 else 32, 64), target=torch.ones(32, 64))
    except (tenure.InputError, tenure.CollectiveError) as error:
        said = str(error)
    run(stages, pipe)
    return said


def test_a_batch_that_cannot_be_split_ends_the_step_everywhere() -> None:
    first, second = run_ranks(refused, 2)
    assert first.startswith("the batch has 3 rows, too few for 8 microbatches")
    assert second.startswith("rank 0 failed at the begin of the step: InputError: the batch has 3")


def without_a_loss(rank: int, _ranks: int) -> tuple[list[str], torch.Tensor | None, list]:
    torch.manual_seed(rank)
    stage, said = Stage(), []
    pipe = tenure.Pipeline(stage, "1f1b", 8, timeout=30)
    for number, settings in enumerate(({"target": torch.ones(32, 64)}, {}, {})):
        try:
            made = pipe.eval(torch.full((32, 64), float(number)), **settings)
            said.append("nothing")
        except (tenure.InputError, tenure.CollectiveError) as error:
            said.append(str(error))
    return said, made, list(stage.parameters())


def test_the_steps_after_an_evaluation_without_a_loss_are_right() -> None:
    """The first rank waits for nobody in an evaluation, and so hears of it in the next one."""
    (first, _, weights), (second, made, more_weights) = run_ranks(without_a_loss, 2)
    assert first[0] == first[2] == second[1] == second[2] == "nothing"
    assert second[0].startswith("there is no loss to be found")
    assert "step before this one rank 1 failed at the begin of the step: InputError" in first[1]
    stages = Stage(), Stage()
    for stage, parameters in zip(stages, (weights, more_weights), strict=True):
        for mine, theirs in zip(stage.parameters(), parameters, strict=True):
            mine.data = theirs
    torch.testing.assert_close(made, stages[1](stages[0](torch.full((32, 64), 2.0))).detach())


def detached(_rank: int, _ranks: int) -> tuple[str, bool]:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mean(output, target).detach()

    stage = Stage()
    pipe = tenure.Pipeline(stage, "1f1b", 8, loss=loss, timeout=30)
    try:
        pipe.step(torch.ones(32, 64), target=torch.ones(32, 64))
    except (tenure.InputError, tenure.CollectiveError) as error:
        said = f"{type(error).__name__}: {error}"
    return said, pipe.eval(torch.ones(32, 64), target=torch.ones(32, 64)) is not None


def test_a_loss_that_trains_nothing_is_refused_in_training_only() -> None:
    (first, first_evaluates), (second, second_evaluates) = run_ranks(detached, 2)
    assert first.startswith("CollectiveError: rank 1 failed in the forward of stage 1")
    assert second.startswith("InputError: the loss of a microbatch has no gradient")
    assert (first_evaluates, second_evaluates) == (False, True)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "stages": ({"stage": [Stage(), Stage()]}, "schedule '1f1b' has 1 stage a rank, not 2"),
    "nothing": ({"stage": []}, "stage is a module or a list of modules, not []"),
    "loss": ({"loss": 3}, "loss is a function of an output and a target, not 3"),
    "schedule": ({"schedule": "2f2b"}, "there is no schedule '2f2b'"),
    "timeout": ({"timeout": -1}, "timeout is a number of seconds up to a day, not -1"),
    "seconds": ({"timeout": "10"}, "timeout is a number of seconds up to a day, not '10'"),
    "stage": ({"stage": None}, "stage is a module or a list of modules, not None"),
    "function": ({"stage": len}, "stage is a module or a list of modules, not <built-in"),
    "strict": ({"strict": "yes"}, "strict is True or False, not 'yes'"),
}


def wrong_on_one(rank: int, _ranks: int, culprit: int) -> dict[str, tuple[str, float]]:
    said = {}
    for name, (wrong, _) in WRONG.items():
        right = {"stage": Stage(), "schedule": "1f1b", "loss": mean, "timeout": 30}
        begin = time.monotonic()
        try:
            tenure.Pipeline(**(right | wrong if rank == culprit else right), microbatches=8)
        except (tenure.InputError, tenure.CollectiveError) as error:
            said[name] = f"{type(error).__name__}: {error}", time.monotonic() - begin
    pipe = tenure.Pipeline(Stage(), "1f1b", 8, loss=mean, timeout=30)
    pipe.step(torch.ones(32, 64), target=torch.ones(32, 64))
    return said


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_with_a_wrong_argument_is_named_at_once_by_the_others(culprit: int) -> None:
    """And the ranks can make another pipeline then."""
    for rank, said in enumerate(run_ranks(wrong_on_one, 3, culprit)):
        for name, (_, words) in WRONG.items():
            text, seconds = said[name]
            told = f"the pipeline cannot be made: it failed on rank {culprit}: InputError: {words}"
            own = f"InputError: {words}"
            assert text.startswith(own if rank == culprit else f"CollectiveError: {told}")
            assert seconds < 10


def forked(_rank: int, _ranks: int) -> int:
    """How a child ends that forgets the pipeline of its parent, which goes on with it."""
    pipe = tenure.Pipeline(nn.Linear(8, 8), "1f1b", 4, loss=mean, timeout=30)
    x = torch.randn(16, 8)
    pipe.step(x, target=x)
    child = os.fork()
    if child == 0:
        del pipe
        os._exit(7)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        ended = os.waitpid(child, 0)
    pipe.step(x, target=x)
    return os.waitstatus_to_exitcode(ended[1])


def test_a_forked_child_may_end_with_the_pipeline_of_its_parent() -> None:
    assert run_ranks(forked, 2) == [7, 7]


def in_other_groups(rank: int, _ranks: int) -> None:
    dist.new_group([0])
    if rank == 0:
        with pytest.raises(tenure.CollectiveError, match="rank 1 did not come within 2 s"):
            tenure.Pipeline(Stage(), "1f1b", 8, loss=mean, timeout=2)
    dist.barrier()
    pipe = tenure.Pipeline(Stage(), "1f1b", 8, loss=mean, timeout=30)
    pipe.step(torch.ones(32, 64), target=torch.ones(32, 64))


def test_a_pipeline_of_ranks_of_which_some_are_in_more_groups() -> None:
    """And one of ranks that did not all come leaves the next as it would have been."""
    run_ranks(in_other_groups, 2)


class Breaking(torch.Tensor):
    """Ctrl-C arrives while it is split."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "split" in getattr(function, "__name__", ""):
            raise KeyboardInterrupt
        return super().__torch_function__(function, types, args, kwargs or {})


def stopped_before_it_began(rank: int, _ranks: int) -> str:
    pipe = tenure.Pipeline(Stage(), "1f1b", 8, loss=mean, timeout=30)
    x = torch.ones(32, 64)
    try:
        pipe.step(x.as_subclass(Breaking) if rank == 0 else x, target=x)
    except (KeyboardInterrupt, tenure.CollectiveError) as error:
        said = f"{type(error).__name__}: {error}"
    pipe.step(x, target=x)
    return said


def test_ctrl_c_before_the_first_action_is_heard_of_by_all() -> None:
    own, others = run_ranks(stopped_before_it_began, 2)
    assert own == "KeyboardInterrupt: "
    assert others.startswith("CollectiveError: rank 0 failed at the begin of the step: Keyboard")


class Nested(Stage):
    pipe: tenure.Pipeline | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pipe is not None:
            self.pipe.eval(x)
        return super().forward(x)


def within_itself(rank: int, _ranks: int) -> str:
    stage = Nested()
    pipe = tenure.Pipeline(stage, "1f1b", 8, loss=mean, timeout=30)
    x = torch.ones(32, 64)
    stage.pipe = pipe if rank == 0 else None
    with pytest.raises((tenure.InputError, tenure.CollectiveError)) as error:
        pipe.step(x, target=x)
    stage.pipe = None
    pipe.step(x, target=x)
    return str(error.value)


def test_a_pipeline_cannot_step_within_its_own_step() -> None:
    own, others = run_ranks(within_itself, 2)
    assert own.startswith("this pipeline is in the middle of a step: call step() and eval() one")
    assert others.startswith("rank 0 failed in the forward of stage 0 for microbatch 0: InputError")


def otherwise(rank: int, _ranks: int) -> str:
    pipe = tenure.Pipeline(Stage(), "1f1b", 8, loss=mean, timeout=2)
    x = torch.ones(32, 64)
    pipe.step(x, target=x)
    with pytest.raises(tenure.CollectiveError) as error:
        pipe.eval(x) if rank else pipe.step(x, target=x)
    return str(error.value)


def test_ranks_of_which_one_evaluates_are_told() -> None:
    _, said = run_ranks(otherwise, 2)
    assert said.startswith(
        "rank 0 trains in step 2 and rank 1 evaluates in step 2: call step() and"
    )


NOT_SENT = {
    "sparse": (lambda x: x.to_sparse(), "it is sparse and has several storages"),
    "sparse rows": (lambda x: x.to_sparse_csr(), "it is sparse and has several storages"),
    "nested": (
        lambda x: torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged),
        "it is nested and has several storages",
    ),
    "quantized": (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), "it is quantized"),
    "opaque": (lambda x: x.to_mkldnn(), "it has no storage of its own"),
}


class Sending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.case = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.layer(x)
        return NOT_SENT[self.case][0](made.detach()) if self.case else made


def not_sent(rank: int, _ranks: int) -> dict[str, str]:
    stage = Stage() if rank else Sending()
    pipe = tenure.Pipeline(stage, "1f1b", 8, loss=mean, timeout=30)
    x = torch.ones(32, 64)
    said = {}
    for case in NOT_SENT:
        stage.case = case
        with pytest.raises((tenure.InputError, tenure.CollectiveError)) as error:
            pipe.step(x, target=x)
        said[case] = str(error.value)
        stage.case = ""
        pipe.step(x, target=x)
    return said


def test_tensors_that_cannot_be_sent_are_refused_before_anybody_waits_for_them() -> None:
    own, others = run_ranks(not_sent, 2)
    for case, (_, words) in NOT_SENT.items():
        assert own[case].startswith("the output of stage 0 for microbatch 0 cannot be sent: ")
        assert words in own[case]
        assert others[case].startswith("rank 0 failed in the forward of stage 0 for microbatch 0: ")
