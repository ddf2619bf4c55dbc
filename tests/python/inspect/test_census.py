"""Everything alive by its holder: variables, cycles, C++; and what would go with what."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tenure
from tenure import _C
from tenure.inspect import holders


@pytest.fixture(autouse=True)
def _no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_what_a_variable_holds() -> None:
    cache = [torch.zeros(1 << 18) for _ in range(3)]
    found = tenure.census()
    (held,) = [h for h in found.held if h.holder.startswith("cache (local of test_what")]
    assert (held.nbytes, held.count) == (3 << 20, 3)
    assert "3.1 MB  cache (local of" in str(found)
    assert found.nbytes >= found.rooted >= len(cache) << 20


SHARED: list[torch.Tensor] = []


def test_what_a_module_holds_is_not_the_function_that_knows_it() -> None:
    own = torch.zeros(1 << 17)

    def uses() -> tuple[torch.Tensor, list[torch.Tensor]]:
        return own, SHARED

    def profile(function: Callable[[], object]) -> tenure.Census:
        function()
        return tenure.census()

    SHARED.append(torch.zeros(1 << 18))
    try:
        held = {h.holder: h.nbytes for h in profile(uses).held}
        paths = tenure.explain(SHARED[0]).paths
    finally:
        SHARED.clear()
    (shared,) = [size for holder, size in held.items() if holder.startswith("SHARED (global of")]
    assert shared == 1 << 20
    (path,) = paths
    assert path.startswith("SHARED (global of")
    # What the function closes over stays apart.
    mine = [size for holder, size in held.items() if "own (local of" in holder]
    assert mine == [1 << 19]


def test_all_bytes_are_in_one_of_the_sums() -> None:
    kept = torch.zeros(1000)
    with tenure.watch(quiet=True):
        made = torch.zeros(5000)
        found = tenure.census()
    assert found.nbytes == found.rooted + found.in_cycles + found.residue
    assert found.rooted >= 4 * (kept.numel() + made.numel())


def test_what_only_cxx_holds_is_residue() -> None:
    with tenure.watch(quiet=True):
        before = tenure.census().residue
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(torch.zeros(1 << 20))
        assert tenure.census().residue - before == 4 << 20
    assert "held from C++ code alone" in str(tenure.census())
    del future


class Kept(torch.autograd.Function):
    """Keeps its output on ctx."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.out = x * 2
        return ctx.out  # type: ignore[no-any-return]

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class KeptView(Kept):
    """Keeps a view of its output on ctx."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = x * 2
        ctx.out = out[:2]
        return out


def hook_on_itself() -> torch.Tensor:
    out = nn.Linear(64, 64)(torch.randn(32, 64)).relu()
    out.register_hook(lambda grad: grad * out.norm())
    out.sum().backward()
    return out


def hook_on_a_leaf() -> torch.Tensor:
    leaf = torch.randn(1000, requires_grad=True)
    leaf.register_hook(lambda grad: grad * leaf)
    return leaf


def hook_after_accumulation() -> torch.Tensor:
    leaf = torch.randn(1000, requires_grad=True)
    leaf.register_post_accumulate_grad_hook(lambda _: print(leaf.sum()))
    return leaf


def hook_on_a_node() -> torch.Tensor:
    out = torch.randn(1000, requires_grad=True) * 2
    assert out.grad_fn is not None
    out.grad_fn.register_hook(lambda *_: print(out))
    return out


def attributes() -> torch.Tensor:
    first, second = torch.randn(1000), torch.randn(1000)
    first.other, second.other = second, first  # type: ignore[attr-defined]
    return first


def through_ctx(function: type[torch.autograd.Function]) -> torch.Tensor:
    out: torch.Tensor = function.apply(torch.randn(1000, requires_grad=True))  # type: ignore[no-untyped-call]
    out.sum().backward()
    return out


CYCLES: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "attributes": (attributes, ".other of a tensor"),
    "ctx": (lambda: through_ctx(Kept), "Kept ctx"),
    "ctx_view": (lambda: through_ctx(KeptView), "KeptView ctx"),
    "hook_after_accumulation": (hook_after_accumulation, "tensor's hooks"),
    "hook_on_a_leaf": (hook_on_a_leaf, "tensor's hooks"),
    "hook_on_a_node": (hook_on_a_node, "MulBackward0 hook"),
    "hook_on_itself": (hook_on_itself, "closure of hook_on_itself"),
}


@pytest.mark.parametrize("name", CYCLES)
def test_a_cycle_and_whether_the_collector_frees_it(name: str) -> None:
    make, words = CYCLES[name]
    known = {cycle.path for cycle in tenure.census().cycles}
    alive = weakref.ref(make())
    (cycle,) = [c for c in tenure.census().cycles if c.path not in known]
    assert words in cycle.path
    assert cycle.nbytes >= 4000
    assert cycle.count == 1
    # What it says is what the collector does.
    gc.collect()
    assert cycle.collectable == (alive() is None)


def test_cycles_of_a_kind_are_one() -> None:
    gc.collect()
    for _ in range(5):
        attributes()
    (cycle,) = [c for c in tenure.census().cycles if ".other of a tensor" in c.path]
    assert (cycle.count, cycle.nbytes) == (5, 5 * 8000)


class Holder:
    """Something with an attribute."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_what_a_storage_would_go_with() -> None:
    owner = {"first": Holder(torch.zeros(1 << 16)), "second": Holder(torch.zeros(1 << 17))}
    found = tenure.explain(owner["first"].tensor)
    names = dict(found.frees)
    (all_of_it,) = [size for text, size in names.items() if text.startswith("owner")]
    (one,) = [size for text, size in names.items() if text.startswith(".tensor of Holder")]
    assert (all_of_it, one) == ((1 << 18) + (1 << 19), 1 << 18)
    assert "would go with owner (local of" in str(found)


def test_what_is_held_twice_goes_with_neither() -> None:
    owner = Holder(torch.zeros(1 << 16))
    other = [owner.tensor]
    found = tenure.explain(other[0])
    assert found.frees == []


def test_the_graph_of_a_chain_that_is_long() -> None:
    hidden = torch.zeros(4, requires_grad=True)
    for _ in range(20_000):
        hidden = hidden * 1.0001
    with _C.References(holders.own_objects()) as references:
        assert references.size > 20_000
        node = references.node_of(hidden)
        assert node is not None
        assert references.gone_with(node)
    with pytest.raises(RuntimeError, match="inside a with statement"):
        _ = references.size


def test_threads_that_run_meanwhile_take_nothing_away() -> None:
    """What was found is said in Python, between whose bytecodes other threads let things go."""
    newest: dict[int, Any] = {}
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            weights = torch.ones(8, requires_grad=True)
            newest[threading.get_ident()] = [weights * factor for factor in range(3)]

    interval = sys.getswitchinterval()
    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        sys.setswitchinterval(1e-5)
        end = time.monotonic() + 3
        while time.monotonic() < end:
            for tensors in list(newest.values()):
                assert "held by" in str(tenure.explain(tensors[2]))
            assert tenure.census().nbytes > 0
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        for thread in threads:
            thread.join()


def test_what_was_released_is_not_alive() -> None:
    x = torch.zeros(1 << 20)
    before = tenure.census().nbytes
    tenure.release(x)
    assert before - tenure.census().nbytes >= x.numel() * 4
