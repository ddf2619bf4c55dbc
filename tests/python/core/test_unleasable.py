"""Tensors without a storage of their own: each call refuses them, says why, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tenure


class Wrapper(torch.Tensor):
    """A wrapper subclass, made as DTensor and others are: it has a size and no data."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def fake_tensor() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(4)


def opaque() -> torch.Tensor:
    return torch.ones(4, 4).to_mkldnn()


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)


MAKERS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "meta": (lambda: torch.empty(4, device="meta"), "on the meta device and has no data"),
    "coo": (lambda: torch.eye(4).to_sparse(), r"sparse.*indices\(\) and values\(\)"),
    "csr": (lambda: torch.eye(4).to_sparse_csr(), "sparse"),
    "quantized": (quantized, r"quantized: use its int_repr\(\)"),
    "opaque": (opaque, "no storage of its own"),
    "jagged": (jagged, r"several storages: use its .*values\(\)"),
    "nested": (nested, r"several shapes: use its values\(\)"),
    "fake": (fake_tensor, "without data of its own"),
    "wrapper": (lambda: Wrapper(torch.ones(4)), "without data of its own"),
    "zero tensor": (lambda: torch._efficientzerotensor(4), "has no data"),
}
CALLS: dict[str, Callable[[torch.Tensor], object]] = {
    "hold": lambda x: tenure.hold(x, "test"),
    "StorageRef": tenure.StorageRef,
    "explain": tenure.explain,
    "release": tenure.release,
    "refill": tenure.refill,
    "refill from": lambda x: tenure.refill(released(), x),
    "is_released": tenure.is_released,
}


def released() -> torch.Tensor:
    x = torch.zeros(4)
    tenure.release(x)
    return x


@pytest.fixture
def ledger_stays() -> Iterator[None]:
    def figures() -> tuple[int, int]:
        return tenure.ledger().bytes, tenure.ledger().leases

    with tenure.hold(torch.zeros(1000), "beside"):
        before = figures()
        yield
        assert figures() == before


@pytest.mark.usefixtures("ledger_stays")
@pytest.mark.filterwarnings("ignore")  # torch's own, about sparse, nested and quantized tensors
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("maker", MAKERS)
def test_it_is_refused(maker: str, call: str) -> None:
    make, why = MAKERS[maker]
    with pytest.raises(tenure.LeaseError, match=why):
        CALLS[call](make())


TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], object]] = {
    "vmap": lambda fn: torch.vmap(fn)(torch.ones(3, 4)),
    "grad": lambda fn: torch.func.grad(lambda x: fn(x).sum())(torch.ones(4)),
    "functionalize": lambda fn: torch.func.functionalize(fn)(torch.ones(4)),
    "make_fx": lambda fn: make_fx(fn, tracing_mode="symbolic")(torch.ones(4)),
    "make_fx fake": lambda fn: make_fx(fn, tracing_mode="fake")(torch.ones(4)),
}


@pytest.mark.usefixtures("ledger_stays")
@pytest.mark.parametrize("call", ["hold", "StorageRef", "explain", "release", "is_released"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_it_is_refused_inside_a_transform(transform: str, call: str) -> None:
    errors: list[tenure.LeaseError] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(tenure.LeaseError, match="this tensor cannot be") as raised:
            CALLS[call](x)
        errors.append(raised.value)
        return x * 2

    TRANSFORMS[transform](fn)
    assert errors


@pytest.mark.usefixtures("ledger_stays")
@pytest.mark.parametrize("thing", [None, 3, "x", [1.0], object()])
@pytest.mark.parametrize("call", ["hold", "explain", "release", "refill", "is_released"])
def test_what_is_no_tensor_is_refused(thing: Any, call: str) -> None:
    with pytest.raises(tenure.InputError, match=rf"tenure.{call}\(\) needs a torch.Tensor and got"):
        CALLS[call](thing)


def test_the_tensor_inside_can_be_held() -> None:
    wrapper = Wrapper(torch.ones(4))
    with tenure.hold(wrapper.inner, "test") as lease:
        assert lease.nbytes == 16


def test_subclasses_with_data_can_be_held() -> None:
    with tenure.hold(torch.nn.Parameter(torch.ones(4)), "test") as lease:
        assert lease.nbytes == 16


def test_a_released_tensor_can_be_held() -> None:
    with tenure.hold(released(), "test") as lease:
        assert lease.nbytes == 0
