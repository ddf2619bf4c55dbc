"""What goes between stages: any dtype, several tensors or none, other shapes at any time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tenure
from ranks import run_ranks


class Front(nn.Module):
    """Makes what a case says of its input."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        a, b = self.first(x), self.second(x)
        return {
            "one": a,
            "two": (a, b),
            "integers": (a, x.argmax(dim=1)),
            "unused": (a, b),
            "none": (a, None, b),
            "bfloat16": a.to(torch.bfloat16),
            "complex": torch.complex(a, b),
            "mask": (a, a.detach() > 0, torch.tensor(3.0)),
            "empty": (a, a[:0]),
            "transposed": a.t(),
            "detached": a.detach(),
            "alias": (a, a),
            # Microbatches of two rows are above the size of what goes as one with its header.
            "large": a.repeat(1, 10_000),
        }[self.case]


class Back(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.last = nn.Linear(4, 4)

    def forward(self, *given: Any) -> torch.Tensor:
        a = given[0]
        if self.case in ("two", "alias"):
            a = a * given[1]
        if self.case == "none":
            assert given[1] is None
            a = a + given[2]
        if self.case == "integers":
            assert given[1].dtype == torch.int64
            a = a * given[1].unsqueeze(1)
        if self.case == "mask":
            assert given[1].dtype == torch.bool
            a = a * given[1] * given[2]
        if self.case == "empty":
            assert given[1].shape[0] == 0
            a = a + given[1].sum()
        if self.case == "complex":
            a = a.real * a.imag
        if self.case == "transposed":
            a = a.t()
        if self.case == "large":
            a = a.unflatten(1, (10_000, 4)).mean(dim=1)
        return self.last(a.float())


CASES = [
    *("one", "two", "integers", "unused", "none", "bfloat16", "complex", "mask", "empty"),
    *("transposed", "detached", "alias", "large"),
]


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def stages(case: str) -> list[nn.Module]:
    torch.manual_seed(3)
    return [Front(case), Back(case)]


def data(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 4, generator=draw), torch.randn(rows, 4, generator=draw)


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad.clone() if p.grad is not None else None for p in module.parameters()]


def every_case(rank: int, _ranks: int, schedule: str) -> dict[str, Any]:
    out = {}
    for case in CASES:
        module = stages(case)[rank]
        pipe = tenure.Pipeline(module, schedule, 4, loss=mean, strict=True, timeout=30)
        for rows in (8, 8, 6, 8):  # 6 rows are microbatches of 2, 2, 1 and 1
            module.zero_grad()
            x, y = data(rows)
            pipe.step(x, target=y)
            out[f"{case}-{rows}"] = gradients(module)
        assert pipe.stats().changed_messages > 0
        before = pipe.stats().changed_messages
        pipe.step(*data(8)[:1], target=data(8)[1])
        assert pipe.stats().changed_messages == before
    return out


def every_whole(_rank: int, _ranks: int) -> dict[str, list[list[torch.Tensor | None]]]:
    """Without a pipeline, in a process as that of a rank: other threads may round otherwise."""
    out = {}
    for case in CASES:
        for rows in (8, 6):
            front, back = stages(case)
            x, y = data(rows)
            for one, target in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
                made = front(one)
                loss = mean(back(*(made if isinstance(made, tuple) else (made,))), target)
                loss.backward(torch.tensor(len(one) / rows))
            out[f"{case}-{rows}"] = [gradients(front), gradients(back)]
    return out


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_every_kind_of_message(schedule: str) -> None:
    found = run_ranks(every_case, 2, schedule, timeout=60)
    [wanted] = run_ranks(every_whole, 1)
    for name, of_stages in wanted.items():
        # What was transposed arrives contiguous: another product, other rounding.
        close = 1e-6 if name.startswith("transposed") else 0
        for rank, of_stage in enumerate(of_stages):
            for ours, theirs in zip(found[rank][name], of_stage, strict=True):
                assert (ours is None) == (theirs is None), name
                if ours is not None:
                    torch.testing.assert_close(ours, theirs, rtol=close, atol=close, msg=name)


class Passing(nn.Module):
    """Hands its mask on as it came."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + self.layer(x) * mask, mask


def mean_of_first(output: tuple[torch.Tensor, ...], target: torch.Tensor) -> torch.Tensor:
    return mean(output[0], target)


def passing(stages: int) -> list[nn.Module]:
    torch.manual_seed(5)
    return [Passing() for _ in range(stages)]


def masked() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, y = data(16)
    return x, (x > 0).float(), y


def pass_on_everywhere(rank: int, ranks: int) -> dict[str, list[Any]]:
    out = {}
    for name in tenure.pipelining.schedule_names():
        plan = tenure.pipelining.schedule(name, ranks, 8)
        all_of_them = passing(plan.stages)
        own = [all_of_them[number] for number in plan.stages_of(rank)]
        pipe = tenure.Pipeline(own, plan, 8, loss=mean_of_first, strict=True, timeout=20)
        x, mask, y = masked()
        results = [pipe.eval(x, mask)]
        for _ in range(2):
            for stage in own:
                stage.zero_grad()
            pipe.step(x, mask, target=y)
        results += [pipe.eval(x, mask), pipe.eval(x, mask, target=y)]
        out[name] = [
            results,
            {number: gradients(all_of_them[number]) for number in plan.stages_of(rank)},
        ]
    return out


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_a_stage_hands_on_unchanged_arrives(ranks: int) -> None:
    """Also in evaluations, where nobody waits for a gradient, and on the same rank."""
    found = run_ranks(pass_on_everywhere, ranks, timeout=90)
    x, mask, y = masked()
    for name in tenure.pipelining.schedule_names():
        plan = tenure.pipelining.schedule(name, ranks, 8)
        whole = nn.ModuleList(passing(plan.stages))
        made = x
        for stage in whole:
            made, _ = stage(made, mask)
        mean(made, y).backward()
        last = next(r for r in range(ranks) if plan.stages - 1 in plan.stages_of(r))
        first_time, later, loss = found[last][name][0]
        for output, same in (first_time, later):
            torch.testing.assert_close(output, made.detach())
            assert torch.equal(same, mask)
        torch.testing.assert_close(loss, mean(made, y).detach())
        for result in found:
            for number, ours in result[name][1].items():
                torch.testing.assert_close(ours, gradients(whole[number]), msg=f"{name} {number}")
