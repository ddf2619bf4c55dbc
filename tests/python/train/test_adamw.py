"""AdamW against torch.optim.AdamW(fused=True): the same kernel must give the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tenure import InputError
from tenure._C import TrainAdamW, train_read_safetensors, train_write_safetensors

Named = list[tuple[str, torch.Tensor]]


def parameters() -> Named:
    torch.manual_seed(0)
    shapes = {"matrix": (37, 19), "bias": (19,), "cube": (3, 4, 5), "norm": (7,)}
    return [(name, torch.randn(shape).requires_grad_()) for name, shape in shapes.items()]


def set_gradients(named: Named, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for name, value in named:
        gradient = torch.randn(value.shape, generator=generator)
        value.grad = None if name == "bias" and step == 2 else gradient


def run(optimizer: TrainAdamW, named: Named, steps: range) -> None:
    for step in steps:
        set_gradients(named, step)
        optimizer.step(1e-2 / (step + 1))


def assert_equal(actual: Named, expected: Named) -> None:
    assert [name for name, _ in actual] == [name for name, _ in expected]
    for (name, a), (_, b) in zip(actual, expected, strict=True):
        assert torch.equal(a, b), name


def test_it_is_torchs_bit_for_bit() -> None:
    ours, theirs = parameters(), parameters()
    run(TrainAdamW(ours, beta1=0.8, beta2=0.9, eps=1e-7, weight_decay=0.3), ours, range(5))
    decayed = [value for _, value in theirs if value.dim() >= 2]
    plain = [value for _, value in theirs if value.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0}],
        betas=(0.8, 0.9),
        eps=1e-7,
        fused=True,
    )
    for step in range(5):
        set_gradients(theirs, step)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        optimizer.step()
    assert_equal(ours, theirs)


def test_a_restored_optimizer_goes_on_as_the_unbroken_one(tmp_path: Path) -> None:
    named = parameters()
    unbroken = TrainAdamW(named)
    run(unbroken, named, range(3))
    copies = [(name, value.detach().clone().requires_grad_()) for name, value in named]
    train_write_safetensors(str(tmp_path / "state"), unbroken.state(), {})
    run(unbroken, named, range(3, 6))

    restored = TrainAdamW(copies)
    restored.load_state(list(train_read_safetensors(str(tmp_path / "state"))[0].items()))
    run(restored, copies, range(3, 6))
    assert_equal(copies, named)
    assert_equal(restored.state(), unbroken.state())


def test_zero_grad_drops_gradients() -> None:
    named = parameters()
    set_gradients(named, 0)
    TrainAdamW(named).zero_grad()
    assert all(value.grad is None for _, value in named)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"exp_avg.norm": None}, 'state has no "exp_avg.norm"'),
        ({"exp_avg.other": torch.zeros(1)}, 'state "exp_avg.other" belongs to no parameter'),
        ({"step.norm": torch.zeros(2)}, 'state "step.norm" is .2., and the parameter needs ..'),
    ],
)
def test_a_state_of_something_else_is_refused(
    change: dict[str, torch.Tensor | None], complaint: str
) -> None:
    named = parameters()
    optimizer = TrainAdamW(named)
    run(optimizer, named, range(2))
    state = {name: torch.zeros_like(value) for name, value in optimizer.state()}
    changed = [(name, value) for name, value in (state | change).items() if value is not None]
    before = [(name, value.clone()) for name, value in optimizer.state()]
    with pytest.raises(InputError, match=complaint):
        optimizer.load_state(changed)
    assert_equal(optimizer.state(), before)
