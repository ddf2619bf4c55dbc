"""Every schedule on real ranks: gradients as those of the whole model, memory as promised."""

from __future__ import annotations

import os
import threading
import time
from functools import cache

import pytest
import torch
from torch import nn

import tenure
from ranks import run_ranks

SCHEDULES = ["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v", "dualpipev"]
MICROBATCHES = 8
STEPS = int(os.environ.get("TENURE_PIPELINE_STEPS", "12"))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def blocks(count: int, width: int = 16) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block(width) for _ in range(count)]


def batch(rows: int = 16, width: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(rows, width, generator=draw), torch.randn(rows, width, generator=draw)


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, target)


def own(rank: int, ranks: int, name: str, microbatches: int) -> tuple[list[nn.Module], list[int]]:
    schedule = tenure.pipelining.schedule(name, ranks, microbatches)
    numbers = schedule.stages_of(rank)
    model = blocks(schedule.stages)
    return [model[number] for number in numbers], numbers


def trained(rank: int, ranks: int, name: str, microbatches: int, steps: int):
    stages, numbers = own(rank, ranks, name, microbatches)
    pipe = tenure.Pipeline(stages, name, microbatches, loss=mean, strict=True, timeout=30)
    optimizer = torch.optim.SGD([p for s in stages for p in s.parameters()], lr=0.1)
    x, y = batch()
    losses, gradients = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = pipe.step(x, target=y)
        losses.append(loss.item() if loss is not None else None)
        if step == 0:
            gradients = {
                n: [p.grad.clone() for p in s.parameters()]
                for n, s in zip(numbers, stages, strict=True)
            }
        optimizer.step()
    bound, stats = pipe.bound(), pipe.stats()
    assert stats.in_flight == bound.in_flight
    assert stats.peak_bytes <= bound.bytes + 2**16
    return losses, gradients


def all_trained(rank: int, ranks: int) -> dict[str, tuple[list[float | None], dict[int, list]]]:
    """Every schedule, one after the other: starting ranks takes longer than training them."""
    return {name: trained(rank, ranks, name, MICROBATCHES, STEPS) for name in SCHEDULES}


@cache
def results(ranks: int) -> list[dict[str, tuple[list[float | None], dict[int, list]]]]:
    return run_ranks(all_trained, ranks, timeout=120)


def whole(stages: int, microbatches: int, steps: int) -> tuple[list[float], dict[int, list]]:
    """The same microbatches through the unsplit model, one after the other."""
    model = nn.Sequential(*blocks(stages))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch()
    losses, gradients = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for one, target in zip(
            x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True
        ):
            loss = mean(model(one), target)
            part = len(one) / len(x)
            loss.backward(torch.tensor(part))
            total = total + loss.detach() * part
        losses.append(total.item())
        if step == 0:
            gradients = {i: [p.grad.clone() for p in s.parameters()] for i, s in enumerate(model)}
        optimizer.step()
    return losses, gradients


def all_wholes(_rank: int, _ranks: int) -> dict[int, tuple[list[float], dict[int, list]]]:
    return {stages: whole(stages, MICROBATCHES, STEPS) for stages in (2, 4, 8)}


@cache
def wholes() -> dict[int, tuple[list[float], dict[int, list]]]:
    """In a process as that of a rank: kernels may round otherwise where there are more threads."""
    return run_ranks(all_wholes, 1)[0]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_and_losses_are_those_of_the_whole_model(name: str, ranks: int) -> None:
    stages = tenure.pipelining.schedule(name, ranks, MICROBATCHES).stages
    losses, gradients = wholes()[stages]
    found = {n: g for result in results(ranks) for n, g in result[name][1].items()}
    assert sorted(found) == list(range(stages))
    # looped-bfs takes microbatches last to first, and so adds their gradients in another order.
    exact = name != "looped-bfs"
    for number, wanted in gradients.items():
        for ours, theirs in zip(found[number], wanted, strict=True):
            torch.testing.assert_close(
                ours, theirs, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-7
            )
    told = [result[name][0] for result in results(ranks) if result[name][0][0] is not None]
    assert len(told) == 1
    torch.testing.assert_close(
        told[0], losses, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6
    )


def with_loss_of(rank: int, ranks: int, shape: tuple[int, ...]) -> tuple[float | None, list]:
    stages, _ = own(rank, ranks, "zb-h1", MICROBATCHES)
    x, y = batch()
    pipe = tenure.Pipeline(
        stages, "zb-h1", MICROBATCHES, loss=lambda o, t: mean(o, t).reshape(shape), timeout=30
    )
    loss = pipe.step(x, target=y)
    assert loss is None or loss.shape == ()
    return loss and loss.item(), [p.grad for stage in stages for p in stage.parameters()]


def test_a_loss_of_one_element_is_a_number_whatever_its_shape() -> None:
    numbers, ones = run_ranks(with_loss_of, 2, ()), run_ranks(with_loss_of, 2, (1, 1))
    for (loss, gradients), (other_loss, other_gradients) in zip(numbers, ones, strict=True):
        assert loss == other_loss
        assert all(map(torch.equal, gradients, other_gradients))


class Forms(nn.Module):
    """Returns rows, a number and nothing."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return 2 * x, x.sum(), None


def evaluated(rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor, None] | None:
    stage = Forms() if rank == ranks - 1 else nn.Identity()
    return tenure.Pipeline(stage, "1f1b", 4, timeout=30).eval(batch()[0])


def test_an_evaluation_gives_all_that_the_last_stage_returns() -> None:
    nothing_elsewhere, (rows, numbers, nothing) = run_ranks(evaluated, 2)
    x, _ = batch()
    assert nothing_elsewhere is None
    assert torch.equal(rows, 2 * x)
    assert torch.equal(numbers, torch.stack([part.sum() for part in x.tensor_split(4)]))
    assert nothing is None


def traced(rank: int, ranks: int, hooked: bool) -> list[str]:
    """What a rank did in its last backward, in order: products, and messages sent."""
    stages, _ = own(rank, ranks, "1f1b", 4)
    if hooked:
        stages[0].register_full_backward_hook(lambda *_: None)
    pipe = tenure.Pipeline(stages, "1f1b", 4, loss=mean, timeout=30)
    x, y = batch()
    pipe.step(x, target=y)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pipe.step(x, target=y)
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name in ("aten::mm", "c10d::send")]


@pytest.mark.parametrize("hooked", [False, True])
def test_a_gradient_leaves_before_the_weights_products_unless_somebody_looks_on(
    hooked: bool,
) -> None:
    _, last = run_ranks(traced, 2, hooked)
    sends = [place for place, name in enumerate(last) if name == "c10d::send"]
    assert len(sends) == 4
    assert (last[sends[-1] :].count("aten::mm") > 0) is not hooked


def others_turns(rank: int, ranks: int) -> int:
    """How often another thread of this rank runs while the rank waits half a second for rank 0."""
    stages, _ = own(rank, ranks, "1f1b", 4)
    pipe = tenure.Pipeline(stages, "1f1b", 4, loss=mean, timeout=30)
    x, y = batch()
    pipe.step(x, target=y)
    if rank == 0:
        stages[0].register_forward_pre_hook(lambda *_: time.sleep(0.5))
    turns, done = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.wait(0.001):
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    pipe.step(x, target=y)
    done.set()
    thread.join()
    return turns


def test_a_rank_that_waits_leaves_python_to_others() -> None:
    _, turns = run_ranks(others_turns, 2)
    assert turns > 100


ROWS = 10  # in four microbatches: 3, 3, 2, 2


def scaled(output: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (output * scale).square().mean()


def by_row(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target.reshape(len(output), -1).mean(1, keepdim=True)).square().mean()


UNEVEN = {
    "a number": (scaled, torch.tensor(0.5)),
    "as many rows": (by_row, torch.arange(10.0)),
}


def uneven(rank: int, ranks: int, case: str, names: list[str]) -> list[tuple[list, float | None]]:
    """Gradients by stage, and the loss in training and in evaluation."""
    loss, target = UNEVEN[case]
    found = []
    for name in names:
        stages, numbers = own(rank, ranks, name, 4)
        pipe = tenure.Pipeline(stages, name, 4, loss=loss, strict=True, timeout=30)
        x, _ = batch(ROWS)
        told = pipe.step(x, target=target)
        assert pipe.eval(x, target=target) == told
        gradients = {
            n: [p.grad for p in s.parameters()] for n, s in zip(numbers, stages, strict=True)
        }
        found.append((gradients, None if told is None else told.item()))
    return found


@pytest.mark.parametrize("case", UNEVEN)
@pytest.mark.parametrize(("ranks", "names"), [(1, ["1f1b"]), (2, ["1f1b", "zb-h1", "zb-v"])])
def test_uneven_microbatches_count_by_their_rows(case: str, ranks: int, names: list[str]) -> None:
    """Whatever the target is: of the batch only the first rank knows."""
    loss_fn, target = UNEVEN[case]
    results = run_ranks(uneven, ranks, case, names)
    for i, name in enumerate(names):
        model = nn.Sequential(*blocks(tenure.pipelining.schedule(name, ranks, 4).stages))
        wanted = loss_fn(model(batch(ROWS)[0]), target)
        wanted.backward()
        for gradients, told in (result[i] for result in results):
            assert told is None or told == pytest.approx(wanted.item(), rel=1e-6)
            for number, own_gradients in gradients.items():
                for ours, theirs in zip(own_gradients, model[number].parameters(), strict=True):
                    torch.testing.assert_close(ours, theirs.grad, rtol=1e-5, atol=1e-7)


def of_other_rows(rank: int, ranks: int, rows: int) -> str:
    stages, _ = own(rank, ranks, "1f1b", 4)
    pipe = tenure.Pipeline(stages, "1f1b", 4, loss=by_row, timeout=30)
    x, _ = batch(ROWS)
    try:
        pipe.step(x, target=torch.zeros(rows))
    except (tenure.InputError, tenure.CollectiveError) as error:
        return str(error)
    return "nothing"


def test_a_target_that_is_split_otherwise_than_the_batch_is_refused() -> None:
    said = (
        "the target has 7 rows and the batch 10, so that microbatch 0 has 2 of the target's and 3"
    )
    first, last = run_ranks(of_other_rows, 2, 7)
    assert said in first
    assert last.startswith(said)
    assert run_ranks(of_other_rows, 1, 7)[0].startswith(said)
