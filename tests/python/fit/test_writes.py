"""Writes to what dropped activations are made of: gradients are right, or an error says why not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import tenure
from fitting import Job, deep, grads, inside, same_as_plain, settle, tight
from offloading import Context


class Written(nn.Module):
    """Saved are others than `y` and `a`, but made of them; `write` gets both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.write: Callable[[Tensor, Tensor], object] = lambda *_: None

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        a = h = self.layers[0](y.exp().sin())
        for n, layer in enumerate(self.layers[1:]):
            h = layer(h.exp().sin())
            if n == 1:
                self.write(y, a)
        return h


def written(write: Callable[..., object], model: type[Written] = Written) -> Job:
    made = model()
    made.write = write
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)) / 8
    return Job(made, lambda n: made(x + n / 8).square().mean())


def gradients(job: Job, context: Context) -> list[bytes]:
    job.model.zero_grad(set_to_none=True)
    inside(job, 0, context)
    out = grads(job.model)
    job.model.zero_grad(set_to_none=True)
    return out


def dropping(
    write: Callable[..., object] = lambda *_: None,
    model: type[Written] = Written,
    part: float = 0.4,
    **options: float,
) -> tuple[Job, tenure.Fit]:
    """A job that has a plan, has proven it, and drops what is made of what may be written to."""
    job, fit = tight(lambda: written(write, model), part=part, **options)
    settle(job, fit)
    job.model.zero_grad(set_to_none=True)
    rows = [row for row in fit.plan.rows if row.op in ("aten::exp", "aten::sin", "aten::add")]
    assert "recompute" in {row.action for row in rows}, fit
    return job, fit


def aside(job: Job) -> Written:
    assert isinstance(job.model, Written)
    return job.model


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "what is held": lambda y, _: y.mul_(2),
    "its data": lambda y, _: y.data.mul_(2),
    "a part of it": lambda y, _: y[:4].zero_(),
    "what is dropped": lambda _, a: a.detach().mul_(2),
    "the data of what is dropped": lambda _, a: a.data.mul_(2),
    "both at once": lambda y, a: torch._foreach_mul_([y, a.data], 2.0),
    "both, one after the other": lambda y, a: (y.mul_(2), a.data.mul_(2)),
    "with out=": lambda y, _: torch.mul(y, 2, out=y),
}


@pytest.mark.filterwarnings("ignore:this step did not follow")
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
@pytest.mark.parametrize("alike", [True, False])
def test_inside_the_context(write: Callable[..., object], alike: bool) -> None:
    """In a step whose plan has no such write, or has one to something else in its place."""
    others = torch.ones(256, 64), torch.ones(256, 64)
    job, fit = dropping(lambda *_: write(*others) if alike else None, part=0.2)
    plain = gradients(job, nullcontext())
    aside(job).write = write
    assert gradients(job, nullcontext()) == plain, "this tests nothing"
    assert gradients(job, fit) == plain
    assert fit.stats().dropped_bytes > 0
    assert (fit.stats().diverged == "") == alike


@pytest.mark.filterwarnings("ignore:this step did not follow")
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("save", [True, False])
def test_what_was_written_to_is_used_again(which: int, save: bool) -> None:
    """Others are made of it, or autograd saves it: with the new content."""

    class Again(Written):
        def forward(self, x: Tensor) -> Tensor:
            y = x.clone()
            a = h = self.layers[0](y.exp().sin())
            for layer in self.layers[1:]:
                h = layer(h.exp().sin())
            self.write(y, a)
            if save:
                return self.layers[2](y) * h * self.layers[2](a)
            return self.layers[2](y.exp().sin() * h * a.exp().sin())

    other = torch.ones(256, 64)
    job, fit = dropping(lambda *_: other.mul_(2), model=Again)
    aside(job).write = lambda *tensors: tensors[which].data.mul_(2)
    plain = gradients(job, nullcontext())
    assert gradients(job, fit) == plain
    assert fit.stats().dropped_bytes > 0


def test_a_weight_that_is_averaged_between_forward_and_backward() -> None:
    """PyTorch refuses to use it, but what was made of it is still needed."""

    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.scale = nn.Parameter(torch.randn(64))
            self.register_buffer("teacher", torch.randn(64))
            self.teacher: Tensor
            self.net = deep(3).model

        def forward(self, x: Tensor) -> Tensor:
            return self.net((x * self.teacher).exp().sin() * self.scale)

    def make() -> Job:
        model = Averaged()
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)) / 8
        return Job(model, lambda n: model(x + n / 8).square().mean())

    def run(job: Job, n: int, context: Context) -> None:
        with context:
            loss = job.loss(n)
            model = job.model
            assert isinstance(model, Averaged)
            model.teacher.lerp_(model.scale.detach(), 0.1)
            loss.backward()

    same_as_plain(make, run=run)


def test_an_optimizer_step_inside_the_context() -> None:
    def run(job: Job, n: int, context: Context) -> None:
        with context:
            job.loss(n).backward()
            with torch.no_grad():
                torch._foreach_mul_(list(job.model.parameters()), 0.99)

    same_as_plain(lambda: written(lambda *_: None), run=run, part=0.4)


def test_after_the_context_and_before_backward() -> None:
    """There only the version counter sees it: an error, or gradients that it does not change."""
    job, fit = dropping()
    plain = gradients(job, nullcontext())
    kept: list[Tensor] = []
    aside(job).write = lambda y, _: kept.append(y)
    with fit:
        loss = job.loss(0)
    kept[0].mul_(2)
    said = ""
    try:
        loss.backward()
    except tenure.MutationError as error:
        said = str(error)
    assert "modified by an inplace operation" in said or grads(job.model) == plain


class Shifted(Written):
    """Each layer's input is made of one tensor that autograd does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(256, 64) / 8)
        self.shift: Tensor

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.relu() + self.shift)
        return x


@pytest.mark.parametrize("how", ["numpy", "data"])
def test_what_no_counter_sees_is_found_by_an_audit_and_held_from_then_on(how: str) -> None:
    job, fit = dropping(model=Shifted, part=0.6, audit=1.0)
    plain = gradients(job, nullcontext())
    shift = job.model.get_buffer("shift")
    with fit:
        loss = job.loss(0)
    (shift.numpy() if how == "numpy" else shift.data)[:] *= 2
    with pytest.raises(tenure.MutationError, match=r"aten::\w+ in \w+(\.\d)? gave something else"):
        loss.backward()
    del loss
    shift.data[:] /= 2
    for _ in range(4):
        assert gradients(job, fit) == plain
    assert fit.plan.denied != []
    assert all(name in str(fit) for name in fit.plan.denied)


class TwoShifts(Written):
    """What its layers are given is made of two tensors in turn."""

    def forward(self, x: Tensor, *shifts: Tensor) -> Tensor:
        for n, layer in enumerate(self.layers):
            x = layer(x.relu() + shifts[n % 2])
        self.write(*shifts[1:])
        return x


@pytest.mark.parametrize("how", ["data", "plain"])
def test_two_tensors_of_the_profile_are_one_that_is_written_to(how: str) -> None:
    one, two, other = (torch.randn(256, 64) for _ in range(3))
    shifts: list[Tensor] = [one, two]

    def make() -> Job:
        model = TwoShifts()
        model.write = lambda *_: other.mul_(2)
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
        return Job(model, lambda _: model(x, *shifts).square().mean())

    job, fit = tight(make, part=0.3, audit=0.0)
    settle(job, fit)
    shifts[:] = [one, one]
    plain = gradients(job, nullcontext())
    aside(job).write = lambda y: (y.data if how == "data" else y).mul_(2)
    assert gradients(job, fit) == plain
    assert fit.stats().dropped_bytes > 0
    assert fit.stats().diverged == ""


@pytest.mark.parametrize("saved", ["alone", "and what is made of it"])
def test_the_data_of_what_is_saved_and_dropped(saved: str) -> None:
    """Autograd sees it, as it shares the memory."""

    class Sines(Written):
        def forward(self, x: Tensor) -> Tensor:
            for n, layer in enumerate(self.layers):
                h = layer(x).exp()
                x = h.sin() if saved == "alone" else h.sin().exp().sin()
                if n == 2:
                    self.write(h, h)
            return x

    other = torch.ones(256, 64)
    job, fit = dropping(lambda *_: other.mul_(2), model=Sines, part=0.1, audit=0.0)
    same = gradients(job, nullcontext())
    aside(job).write = lambda h, _: h.data.mul_(2)
    plain = gradients(job, nullcontext())
    assert plain != same
    assert gradients(job, fit) == plain
    assert fit.stats().diverged == ""
    assert fit.stats().remade_calls > 0
