"""What stays where it is, and why: parameters, what others hold, what is no plain tensor."""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tenure
from offloading import Context, Keep, batch, blocks, equal, gradients
from probes import assert_ends_well

Fake = ModuleType

PARAMETERS = "parameters and buffers"
NOT_PLAIN = "no plain tensor"
LIVES_ON = "held by others anyway"
IN_BACKWARD = "saved during backward"


def copying(*models: nn.Module, **options: Any) -> tenure.Offload:
    return tenure.Offload(*models, target="copy", min_bytes=1, **options)


class Stateful(nn.Module):
    """A parameter, a frozen one and a buffer, each saved whole and in views of every kind."""

    buffer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.frozen = nn.Parameter(torch.randn(64, 64), requires_grad=False)
        self.register_buffer("buffer", torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        for state in (self.weight, self.frozen, self.buffer):
            views = state, state.t(), state[3:].view(-1), state.detach(), state.data[:, 1:]
            x = Keep.apply(x, [], *views)
        return x


class TestState:
    def test_no_view_of_a_parameter_or_buffer_moves(self) -> None:
        model = Stateful()
        offload = copying(model)
        for _ in range(2):
            with offload:
                model(torch.ones(4, requires_grad=True)).sum().backward()
            stats = offload.stats()
            assert (stats.saved_storages, stats.moved_out_storages) == (0, 0)
            assert {why: count for why, (count, _) in stats.kept.items()} == {PARAMETERS: 3}

    def test_parameters_are_known_without_their_model(self) -> None:
        """A part of the model that was not named, or one that FSDP2 has put together anew."""
        model = Stateful()
        offload = copying()
        with offload:
            x = Keep.apply(torch.ones(4, requires_grad=True), [], model.weight, model.weight.t())
            x = Keep.apply(x, [], model.frozen, model.frozen[3:], nn.Buffer(torch.randn(64)))
            x.sum().backward()
        assert offload.stats().moved_out_storages == 0
        assert offload.stats().kept[PARAMETERS][0] == 3

    def test_parameters_are_looked_up_at_every_step(self) -> None:
        model = Stateful()
        offload = copying(model)
        for _ in range(2):
            with offload:
                model(torch.ones(4, requires_grad=True)).sum().backward()
            model.buffer = torch.randn(64, 64)
        assert offload.stats().moved_out_storages == 0


class TestHeldByOthers:
    def test_what_someone_leases_is_kept_from_the_first_step_on(self) -> None:
        bank = torch.randn(256, 64)
        offload = copying()
        with tenure.hold(bank, "bank", kind="optimizer"), offload:
            Keep.apply(torch.ones(4, requires_grad=True), [], bank).sum().backward()
        assert offload.stats().kept[LIVES_ON] == (1, 256 * 64 * 4)
        assert offload.stats().moved_out_storages == 0

    def test_what_some_steps_have_saved_is_kept_though_every_step_is_of_another_shape(self) -> None:
        bank = torch.randn(256, 64)
        offload = copying()
        moved = []
        for rows in range(1, 7):
            with offload:
                x = Keep.apply(torch.ones(4, requires_grad=True), [], torch.ones(rows, 64), bank)
                x.sum().backward()
            moved.append(offload.stats().moved_out_bytes)
        assert moved[2:] == [rows * 64 * 4 for rows in range(3, 7)]

    def test_an_input_that_the_user_holds_is_kept_once_that_is_known(self) -> None:
        model, x = blocks(), batch()
        plain = gradients(model, x)
        offload = copying(model)
        moved = []
        for _ in range(3):
            assert equal(gradients(model, x, offload), plain)
            moved.append(offload.stats().moved_out_bytes)
        assert offload.stats().kept[LIVES_ON] == (1, x.nbytes)
        assert moved == [moved[0], moved[0] - x.nbytes, moved[0] - x.nbytes]

    def test_on_a_device_it_is_not_copied_back_either(self, fake: Fake) -> None:
        """What someone else holds is there when backward asks for it, in the first step, too."""
        seen: list[Tensor] = []
        offload = tenure.Offload(min_bytes=1)
        held = torch.full((1024,), 3.0, device="fake")
        with offload:
            Keep.apply(
                torch.ones(4, device="fake", requires_grad=True), seen, held
            ).sum().backward()
        stats = offload.stats()
        assert (stats.moved_out_bytes, stats.moved_in_bytes, stats.reused_bytes) == (4096, 0, 4096)
        assert seen[0].tolist() == [3.0] * 1024
        assert fake.waits().forced == 0


class Wrapped(Tensor):
    """A wrapper subclass: its data is in another tensor."""

    content: Tensor

    @staticmethod
    def __new__(cls, content: Tensor) -> Wrapped:
        out = torch.Tensor._make_wrapper_subclass(cls, content.shape, dtype=content.dtype)
        out.content = content
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrapped(x: Any) -> Any:
            return x.content if isinstance(x, Wrapped) else x

        tree_map = torch.utils._pytree.tree_map
        out = func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs or {}))
        return tree_map(lambda x: Wrapped(x) if isinstance(x, Tensor) else x, out)


def wrapped() -> Tensor:
    x = Wrapped(torch.arange(64.0)).requires_grad_()
    ((x * 2).sin() * 3).exp().sum().backward()
    assert isinstance(x.grad, Wrapped)
    return x.grad.content


def jagged() -> Tensor:
    w = torch.ones(4, 4, requires_grad=True)
    parts = [torch.arange(12.0).view(3, 4), torch.arange(20.0).view(5, 4)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged)
    (x @ w).sin().values().sum().backward()
    return grad_of(w)


def nested() -> Tensor:
    w = torch.ones(4, 4, requires_grad=True)
    x = torch.nested.nested_tensor([torch.arange(12.0).view(3, 4), torch.arange(8.0).view(2, 4)])
    torch.nested.to_padded_tensor(nn.functional.linear(x, w).sin(), 0.0).sum().backward()
    return grad_of(w)


def sparse() -> Tensor:
    """Saved as what an op made, and as a leaf that takes a gradient."""
    w = torch.ones(8, 8, requires_grad=True)
    leaf = torch.eye(8).to_sparse().requires_grad_()
    torch.sparse.mm(leaf, torch.sparse.mm((w * 2).to_sparse(), w).sin()).sum().backward()
    return grad_of(w)


def mkldnn() -> Tensor:
    w = torch.ones(1, 2, 4, 4, requires_grad=True)
    (torch.relu((w * 2).to_mkldnn()).to_dense() * w).sum().backward()
    return grad_of(w)


def grad_of(w: Tensor) -> Tensor:
    assert w.grad is not None
    return w.grad


class TestNotPlain:
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    @pytest.mark.parametrize("job", [wrapped, jagged, nested, sparse, mkldnn])
    def test_it_passes_through_and_is_counted(self, job: Any) -> None:
        plain = job()
        offload = copying()
        for _ in range(2):
            with offload:
                ours = job()
            assert torch.equal(ours, plain)
            count, nbytes = offload.stats().kept[NOT_PLAIN]
            assert count > 0
            assert nbytes == 0, "it has no storage of its own"

    def test_saved_during_backward_it_passes_through_too(self) -> None:
        class SparseInBackward(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                del ctx
                return x * 2

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Tensor:
                del ctx
                with torch.enable_grad():
                    w = torch.ones(8, 8, requires_grad=True)
                    loss = torch.sparse.mm(torch.eye(8).to_sparse(), w * 2).sin().sum()
                (extra,) = torch.autograd.grad(loss, w)
                return grads[0] + extra

        def job(context: Context) -> Tensor:
            x = torch.ones(8, 8, requires_grad=True)
            with context:
                SparseInBackward.apply(x).sum().backward()
            return grad_of(x)

        offload = copying()
        assert torch.equal(job(offload), job(nullcontext()))
        kept = offload.stats().kept
        assert set(kept) == {NOT_PLAIN, IN_BACKWARD}

    def test_tensors_without_bytes(self) -> None:
        w = torch.ones(3, requires_grad=True)
        offload = copying()
        with offload:
            (torch.empty(0, 3) * w).sin().sum().backward()
        assert grad_of(w).tolist() == [0.0] * 3
        assert offload.stats().moved_out_storages == 0


def test_small_storages_are_kept_unless_asked_for() -> None:
    def saved_small(**options: Any) -> tenure.OffloadStats:
        offload = tenure.Offload(target="copy", **options)
        with offload:
            w = torch.ones(64, requires_grad=True)
            (w * 2).sin().sum().backward()
        return offload.stats()

    assert saved_small().kept["too small to pay"] == (1, 256)
    assert saved_small().moved_out_bytes == 0
    assert saved_small(min_bytes=256).moved_out_bytes == 256
    assert saved_small(min_bytes="1KiB").moved_out_bytes == 0


def test_tensors_on_another_device_stay_there(fake: Fake) -> None:
    del fake
    offload = tenure.Offload(min_bytes=1)
    with offload:
        w = torch.ones(64, requires_grad=True)
        (w * 2).sin().sum().backward()
    assert offload.stats().kept == {"on another device": (1, 256)}


def test_without_an_accelerator_it_does_nothing_and_says_so_once() -> None:
    assert_ends_well("""
        import torch, tenure, warnings

        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
        offload = tenure.Offload(model)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(3):
                with offload:
                    model(torch.ones(256, 64)).sum().backward()
            with tenure.Offload(model, budget="1GiB"):
                pass
        assert len(said) == 1, said
        assert "does nothing here: there is no accelerator" in str(said[0].message)
        assert said[0].filename == "<string>"
        stats = offload.stats()
        assert (stats.steps, stats.saved_bytes) == (0, 0)
    """)


class Tagged(Tensor):
    """A class of Python's alone: nothing of it is known in C++."""

    scale: float


class UseTagged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        tagged = (x.detach() * 2).as_subclass(Tagged)
        tagged.scale = 7.0
        ctx.save_for_backward(tagged)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (tagged,) = ctx.saved_tensors
        return gradient * tagged.as_subclass(Tensor) * tagged.scale


def test_a_class_of_python_alone_comes_back_as_it_was() -> None:
    x = torch.ones(64, 64, requires_grad=True)
    offload = copying()
    with offload:
        UseTagged.apply(x * 1).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((64, 64), 14.0))
    assert offload.stats().kept[NOT_PLAIN][0] == 1
