"""Operators of custom libraries, and tensors that are not plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fitting import Job, deep, grads, inside, same_as_plain, tight


def job_with(layer: Callable[[Tensor], Tensor]) -> Job:
    """The layer in the middle of others that can be made again."""
    job = deep()
    front, back = job.model[:8], job.model[8:]  # type: ignore[index]
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    return Job(job.model, lambda n: back(layer(front(x + n))).square().mean())


def define(library: torch.library.Library, name: str) -> None:
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x.exp() * 2, "CPU")

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            with torch._C._AutoDispatchBelowAutograd():
                y = getattr(torch.ops.tenure_fit, name)(x)
            ctx.save_for_backward(y)
            out: Tensor = y
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] * ctx.saved_tensors[0]

    library.impl(name, Doubled.apply, "Autograd")


def test_a_custom_operator_that_was_there_before() -> None:
    with torch.library._scoped_library("tenure_fit", "DEF") as library:
        define(library, "before")
        fit = same_as_plain(lambda: job_with(torch.ops.tenure_fit.before))
        rows = [row for row in fit.plan.rows if row.op == "tenure_fit::before"]
        assert [row.action for row in rows] == ["keep"]


def test_a_custom_operator_that_is_registered_after_the_first_steps() -> None:
    job, fit = tight(deep)
    inside(job, 0, fit)
    with torch.library._scoped_library("tenure_fit", "DEF") as library:
        define(library, "after")
        fit = same_as_plain(lambda: job_with(torch.ops.tenure_fit.after))
        assert [row for row in fit.plan.rows if row.op == "tenure_fit::after"]


def test_a_custom_operator_that_writes_to_its_argument() -> None:
    with torch.library._scoped_library("tenure_fit", "DEF") as library:
        library.define("scale_(Tensor(a!) x) -> ()")

        def scale(x: Tensor) -> None:
            x.detach().numpy()[:] *= 2

        library.impl("scale_", scale, "CPU")

        def layer(x: Tensor) -> Tensor:
            y = x.exp()
            z = y.sin()
            with torch.no_grad():
                torch.ops.tenure_fit.scale_(y)
            return z + y.detach()

        same_as_plain(lambda: job_with(layer))


LAYERS: dict[str, Callable[[Tensor], Tensor]] = {
    "complex": lambda x: torch.view_as_real(torch.complex(x, x.sin()).exp().conj() * 2j).sum(-1),
    "fft": lambda x: torch.fft.ifft(torch.fft.fft(x).mul(0.5)).real.exp(),
    "zero-size": lambda x: torch.cat([x[:0].exp().sin(), x.exp()]),
    "sparse": lambda x: torch.sparse.mm(torch.eye(128).to_sparse(), x.exp()).sin(),
    "meta": lambda x: x.exp() + 0 * torch.ones(3, device="meta").exp().sin().numel(),
    "index": lambda x: x.exp()[:, torch.arange(63, -1, -1)].sin(),
    "index of both": lambda x: x.exp()[torch.arange(128), :][:, torch.arange(64)].sin(),
    "foreach": lambda x: sum(torch._foreach_exp([x, x.sin()]), torch.zeros(())),  # type: ignore[arg-type]
    "vmap": torch.vmap(lambda row: row.exp().sin() * row),
    "jacobian-vector": lambda x: torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1].exp(),
    "inference": lambda x: x.exp() * inferred(),
    "numbers": lambda x: (x.exp() * 2 + 3.5) / (1 + torch.tensor(2.0)) ** 2,
    "scatter": lambda x: x.exp().scatter_add(0, torch.zeros(128, 64, dtype=torch.long), x.sin()),
    "where": lambda x: torch.where(x > 0, x.exp(), x.sin()).sort(dim=0).values,
    "norm": lambda x: nn.functional.normalize(x.exp()) * x.norm(),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(
        x.view(1, 4, 32, 64), x.exp().view(1, 4, 32, 64), x.sin().view(1, 4, 32, 64)
    ).reshape(128, 64),
    "cumsum": lambda x: x.sigmoid().cumsum(0).log().cumprod(1).tanh(),
    "dtype": lambda x: x.double().exp().half().float().sin(),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x.sigmoid(), x.tanh()) @ x.sin(),
}


def inferred() -> Tensor:
    with torch.inference_mode():
        out = torch.full((64,), 0.5).exp()
    return out.clone()


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_layers_of_every_kind(layer: Callable[[Tensor], Tensor]) -> None:
    same_as_plain(lambda: job_with(layer), part=0.25)


def test_a_subclass_is_kept_as_it_is() -> None:
    class Mine(torch.Tensor):
        pass

    same_as_plain(lambda: job_with(lambda x: x.as_subclass(Mine).exp().sin().as_subclass(Tensor)))


def test_a_dispatch_mode_sees_what_it_would_without() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            Counting.calls += 1
            return func(*args, **(kwargs or {}))

    job, fit = tight(deep)
    job.loss(0).backward()
    plain = grads(job.model)
    for n in range(4):
        job.model.zero_grad(set_to_none=True)
        with fit, Counting():
            job.loss(0).backward()
        assert grads(job.model) == plain, n
    assert Counting.calls > 0


def test_inference_inside_the_context() -> None:
    job, fit = tight(deep)
    job.loss(0).backward()
    plain = grads(job.model)
    for n in range(4):
        job.model.zero_grad(set_to_none=True)
        with fit:
            with torch.inference_mode():
                job.loss(5)
            job.loss(0).backward()
        assert grads(job.model) == plain, n
    assert fit.stats().remade_calls > 0
