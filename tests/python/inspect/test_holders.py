"""Ways of holding storages, one by one: what the path says, where its mark is, what is advised."""

from __future__ import annotations

import asyncio
import collections
import contextvars
import functools
import gc
import heapq
import queue
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import leaking
import tenure
from leaking import STEPS, leak, words
from tenure.inspect import holders, suspects, verdicts

line_with = functools.partial(leaking.line_with, __file__)


def consume(_: object) -> None:
    """For values that are of no use."""


def marked(suspect: dict[str, Any]) -> str:
    (hop,) = [hop["text"] for hop in suspect["holders"][0] if hop.get("leak")]
    return str(hop)


def step_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    return loss


def deep() -> nn.Module:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])


def test_losses_whose_graph_was_used_keep_its_nodes() -> None:
    model, losses = deep(), []
    found = leak(lambda _: losses.append(step_of(model)))
    assert found["nodes"] > 10 * STEPS
    assert found["bytes_per_step"] > 5_000
    assert words(found).startswith("losses (")
    assert marked(found).startswith("[")
    assert "detach()" in found["advice"]


def test_graphs_of_another_model_hide_none_that_grow() -> None:
    before, model, losses = deep(), deep(), []
    old = [before(torch.randn(8, 64)).sum() for _ in range(10 * STEPS)]
    found = leak(lambda _: losses.append(step_of(model)))
    assert words(found).startswith("losses ("), found
    assert len(old) == 10 * STEPS


def test_a_sum_of_losses_keeps_the_graphs_of_all_of_them() -> None:
    model, total = deep(), torch.zeros(())

    def body(_: int) -> None:
        nonlocal total
        total = total + step_of(model)

    found = leak(body)
    assert words(found).startswith("total (")
    assert "graph (" in marked(found)
    assert "kept at test_holders.py" in words(found)
    assert "detach()" in found["advice"]


def test_a_sum_that_is_begun_anew_is_no_leak() -> None:
    model, total = deep(), torch.zeros(())
    with tenure.watch(quiet=True) as session:
        for step in range(90):
            total = total + step_of(model) if step % 20 else step_of(model)
            tenure.step()
        verdict = session.verdict()
    assert verdict["verdict"] == "flat", verdict
    assert total.requires_grad


@pytest.mark.parametrize("most", [None, 1_000])
def test_small_storages_without_a_graph_or_with_a_bound_are_no_leak(most: int | None) -> None:
    model, losses = deep(), collections.deque(maxlen=most)
    with tenure.watch(quiet=True) as session:
        for _ in range(60):
            loss = step_of(model)
            losses.append(loss if most else loss.detach())
            tenure.step()
        verdict = session.verdict()
    assert verdict["verdict"] == "flat", verdict
    assert not verdict["suspects"]


KEPT: list[torch.Tensor] = []


def keep(tensor: torch.Tensor) -> None:
    KEPT.append(tensor)


def test_a_variable_of_a_module_is_told_as_its_own_whichever_function_knows_it() -> None:
    in_hand = keep  # whose module's variables are as near as the module itself
    try:
        found = leak(lambda _: in_hand(torch.zeros(4096)))
    finally:
        KEPT.clear()
    assert words(found).startswith("KEPT (global of ")


def remembering(tensor: torch.Tensor) -> None:
    remembering.seen.append(tensor)  # type: ignore[attr-defined]


def test_an_attribute_of_a_function_is_told_with_the_line_that_keeps() -> None:
    remembering.seen = []  # type: ignore[attr-defined]
    try:
        found = leak(lambda _: remembering(torch.zeros(4096)))
    finally:
        del remembering.seen  # type: ignore[attr-defined]
    assert "remembering.seen" in words(found)
    assert "kept at test_holders.py" in marked(found)


def into(store: list[torch.Tensor], tensor: torch.Tensor) -> None:
    store.append(tensor)


def test_an_argument_of_a_partial_is_told_with_its_function() -> None:
    callback = functools.partial(into, [])
    found = leak(lambda _: callback(torch.zeros(4096)))
    assert "an argument of functools.partial(into)" in words(found)


def test_activations_saved_beside_weights_that_changed_since() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.LayerNorm(64), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []

    def body(_: int) -> None:
        losses.append(model(torch.randn(256, 64)).sum())
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()

    found = leak(body)
    assert "losses" in words(found)
    assert "saved" in words(found)
    assert "detach" in found["advice"]


def test_every_suspect_of_a_deep_graph_is_looked_at() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(12)])
    losses: list[torch.Tensor] = []
    with tenure.watch(quiet=True) as session:
        for _ in range(STEPS):
            losses.append(model(torch.randn(128, 32)).sum())
            tenure.step()
        verdict = session.verdict()
    assert len(verdict["suspects"]) >= 12
    assert all("losses" in words(suspect) for suspect in verdict["suspects"])


def test_checkpointed_losses() -> None:
    layer, losses = nn.Linear(64, 64), []

    def body(_: int) -> None:
        x = torch.randn(256, 64, requires_grad=True)
        losses.append(checkpoint(layer, x * 2, use_reentrant=False).sum())

    assert "losses" in words(leak(body))


def test_sparse_tensors() -> None:
    kept: list[torch.Tensor] = []
    found = leak(lambda _: kept.append(torch.eye(512).to_sparse() * 2))
    assert "kept" in words(found)
    kept.clear()
    found = leak(lambda _: kept.append(torch.eye(512).to_sparse_csr() * 2))
    assert "kept" in words(found)


def test_an_array_of_objects() -> None:
    slots = np.empty(STEPS, dtype=object)

    def body(step: int) -> None:
        slots[step] = torch.randn(5000)

    assert "slots" in words(leak(body))


def test_memory_of_numpys() -> None:
    kept: list[torch.Tensor] = []
    found = leak(lambda _: kept.append(torch.from_numpy(np.zeros(5000))))
    assert "kept" in words(found)
    assert "test_holders.py" in found["site"]
    kept.clear()
    assert "kept" in words(
        leak(lambda _: kept.append(torch.frombuffer(bytearray(40_000), dtype=torch.int8)))
    )


def test_shared_memory() -> None:
    kept: list[torch.Tensor] = []
    found = leak(lambda _: kept.append(torch.randn(5000).share_memory_()))
    assert "kept" in words(found)
    assert "test_holders.py" in found["site"]


def test_memory_of_numpys_that_is_given_back() -> None:
    with tenure.watch(quiet=True) as session:
        for _ in range(STEPS):
            consume(torch.from_numpy(np.zeros(5000)))
            consume(torch.randn(5000).share_memory_())
            tenure.step()
        assert session.verdict()["verdict"] == "flat"
    assert not vars(torch.UntypedStorage).keys() & {"__init__", "_new_shared_fd_cpu"}
    assert not hasattr(torch.from_numpy, "__wrapped__")


def test_what_has_a_bound_is_no_leak_while_it_fills() -> None:
    replay: collections.deque[torch.Tensor] = collections.deque(maxlen=40)
    with tenure.watch(quiet=True) as session:
        for _ in range(30):
            replay.append(torch.randn(50_000))
            tenure.step()
        filling = session.verdict()
        for _ in range(90):
            replay.append(torch.randn(50_000))
            tenure.step()
        full = session.verdict()
    assert filling["verdict"] == "growth"
    assert filling["suspects"] == []
    assert "something that has a bound fills" in filling["ranks"][0]["why"]
    assert "held by replay (local of" in verdicts.first_screen(filling)
    assert full["verdict"] == "flat", full["ranks"]


def test_a_cache_that_has_a_bound_is_no_leak_while_it_fills() -> None:
    @functools.lru_cache(maxsize=40)
    def made(_: int) -> torch.Tensor:
        return torch.randn(50_000)

    with tenure.watch(quiet=True) as session:
        for step in range(30):
            made(step)
            tenure.step()
        filling = session.verdict()
    assert filling["verdict"] == "growth"
    assert filling["suspects"] == []
    screen = verdicts.first_screen(filling)
    assert "lru_cache of test_a_cache" in screen
    assert "out of memory" not in screen


def test_a_full_deque_of_things_that_get_larger_leaks() -> None:
    last: collections.deque[list[torch.Tensor]] = collections.deque(maxlen=2)
    last.append([])

    def body(_: int) -> None:
        last.append([*last[-1], torch.randn(5000)])

    assert "last" in words(leak(body))


def test_a_queue_names_the_line_that_puts() -> None:
    waiting: queue.Queue[torch.Tensor] = queue.Queue()
    found = leak(lambda _: waiting.put(torch.randn(5000)))
    assert "waiting" in words(found)
    assert "kept at test_holders.py" in words(found)


def test_a_context_variable() -> None:
    trace: contextvars.ContextVar[tuple[torch.Tensor, ...]] = contextvars.ContextVar("trace")
    trace.set(())

    def body(_: int) -> None:
        trace.set((*trace.get(), torch.randn(5000)))

    assert "trace (context variable)" in words(leak(body))
    trace.set(())


def test_what_cxx_holds_is_said_so() -> None:
    futures: list[torch.futures.Future[torch.Tensor]] = []

    def body(_: int) -> None:
        futures.append(torch.futures.Future())
        futures[-1].set_result(torch.randn(5000))

    found = leak(body)
    assert marked(found) == suspects._OUTSIDE
    assert found["advice"] == ""


class Bank(nn.Module):
    """Grows by concatenation."""

    bank: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(0, 512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.bank = torch.cat([self.bank, x.detach()])
        return x


def test_one_storage_that_gets_larger_is_marked_at_its_name() -> None:
    model = Bank()
    found = leak(lambda _: consume(model(torch.randn(8, 512))))
    assert marked(found).startswith(".bank of Bank")
    assert "test_holders.py:" in marked(found)


def test_what_is_read_in_each_step_and_grows_is_no_larger_input() -> None:
    model = Bank()
    weight = torch.randn(512, 512, requires_grad=True)

    def body(_: int) -> None:
        model(torch.randn(64, 512))
        (model.bank @ weight).square().sum().backward()

    assert ".bank of Bank" in words(leak(body))


class Node:
    """Of a list."""

    def __init__(self, following: Node | None) -> None:
        self.following, self.data = following, torch.randn(5000)


def test_chains_are_made_short() -> None:
    head: list[Node | None] = [None]

    def body(_: int) -> None:
        head[0] = Node(head[0])

    found = leak(body)
    text = words(found)
    assert len(text) < 300
    assert "following of Node" in text
    assert "(×" in text


def test_an_endless_closure_is_told_from_a_list_in_one() -> None:
    def collector() -> Callable[[torch.Tensor], None]:
        seen: list[torch.Tensor] = []
        return lambda x: seen.append(x)

    collect = collector()
    found = leak(lambda _: collect(torch.randn(5000)))
    assert "seen (closure of" in words(found)
    assert "close over" not in found["advice"]
    functions: list[Callable[[], torch.Tensor]] = []

    def body(_: int) -> None:
        tensor = torch.randn(5000)
        functions.append(lambda: tensor)

    assert "close over" in leak(body)["advice"]


def test_advice_on_a_cache_without_bound() -> None:
    @functools.cache
    def made(_: int) -> torch.Tensor:
        return torch.randn(5000)

    assert "give lru_cache a maxsize" in leak(lambda step: consume(made(step)))["advice"]


def test_advice_on_a_full_cache_of_things_that_get_larger() -> None:
    @functools.lru_cache(maxsize=2)
    def made(step: int) -> list[torch.Tensor]:
        return [*(made(step - 1) if step else []), torch.randn(5000)]

    assert "lower the cache's maxsize" in leak(lambda step: consume(made(step)))["advice"]


def test_hooks_that_pile_up() -> None:
    layer = nn.Linear(8, 8)

    def body(_: int) -> None:
        extra = torch.randn(5000)
        layer.register_forward_hook(lambda *_: print(extra.shape) if extra is None else None)

    assert "handle.remove()" in leak(body)["advice"]


class Tree:
    """A child knows its parent."""

    def __init__(self, parent: Tree | None = None) -> None:
        self.parent, self.children, self.data = parent, [], torch.randn(5000)  # type: ignore[var-annotated]
        if parent is not None:
            parent.children.append(self)


@pytest.fixture
def _no_collections() -> Iterator[None]:
    import gc

    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collections")
def test_a_cycle_has_one_mark_and_the_way_out() -> None:
    found = leak(lambda _: consume(Tree(Tree())))
    assert found["cycle"]
    assert marked(found)
    assert ".data of Tree" in words(found)


def test_a_notebooks_or_a_modules_globals_by_name() -> None:
    source = (
        "import torch, tenure\nkept = []\n"
        f"for _ in range({STEPS}):\n    kept.append(torch.randn(5000))\n    tenure.step()\n"
    )
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    with tenure.watch(quiet=True) as session:
        exec(compile(source, "cell", "exec"), space)
        verdict = session.verdict()
    assert "kept (global of __main__)" in words(verdict["suspects"][0])


def test_compiled_functions() -> None:
    layer = nn.Linear(64, 64)
    fast = torch.compile(lambda x: layer(x).relu(), backend="aot_eager")
    kept: list[torch.Tensor] = []
    found = leak(lambda _: kept.append(fast(torch.randn(64, 64))))
    assert "kept" in words(found)
    assert "test_holders.py" in found["site"]


def test_collapsing() -> None:
    hops = [holders.Hop("local", "a")]
    hops += [holders.Hop("attribute", ".next of N"), holders.Hop("item", "[3]")] * 4
    hops += [holders.Hop("tensor", "tensor")] * 2
    said = [hop.text for hop in holders.collapsed(hops)]
    assert said == ["a", ".next of N", "[3] (×4)", "tensor", "tensor"]


def test_a_variable_is_named_rather_than_what_the_frame_is_in_the_middle_of() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.history: list[torch.Tensor] = []

        def step(self) -> torch.Tensor:
            tenure.step()
            return torch.randn(5000)

        def fit(self) -> dict[str, Any]:
            with tenure.watch(quiet=True) as session:
                for _ in range(30):
                    self.history.append(self.step())
                return session.verdict()

    trainer = Trainer()
    (suspect, *_) = trainer.fit()["suspects"]
    assert ".history of" in words(suspect)
    assert "in use by" not in words(suspect)
    assert "kept at test_holders.py" in words(suspect)


def test_what_refers_to_itself_is_a_cycle() -> None:
    class Node:
        def __init__(self) -> None:
            self.value, self.me = torch.randn(5000), self

    gc.disable()
    try:
        found = leak(lambda _: consume(Node()))
        assert found["cycle"]
        assert ".me of" in words(found)
        assert "gc.collect()" in found["advice"]
    finally:
        gc.enable()


def test_a_heap_names_the_line_that_pushes() -> None:
    worst: list[tuple[int, torch.Tensor]] = []
    found = leak(lambda step: heapq.heappush(worst, (step, torch.randn(5000))))
    assert "kept at test_holders.py" in words(found)


audits: set[asyncio.Task[None]] = set()


def test_a_set_of_tasks_is_named_though_each_task_leads_there() -> None:
    async def audit(kept: torch.Tensor, gate: asyncio.Event) -> None:
        await gate.wait()
        consume(kept)

    async def train() -> dict[str, Any]:
        gate = asyncio.Event()
        with tenure.watch(quiet=True) as session:
            for _ in range(STEPS):
                task = asyncio.create_task(audit(torch.randn(5000), gate))
                audits.add(task)
                task.add_done_callback(audits.discard)
                await asyncio.sleep(0)
                tenure.step()
            verdict = session.verdict()
        gate.set()
        await asyncio.gather(*audits)
        return verdict

    suspect = asyncio.run(train())["suspects"][0]
    assert words(suspect).startswith("audits (global of ")
    assert f"(kept at {line_with('audits.add(')})" in marked(suspect)


def test_an_optimizer_whose_groups_pile_up_names_the_line_that_adds_them() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())

    def body(_: int) -> None:
        weight = nn.Parameter(torch.zeros(4000))
        optimizer.add_param_group({"params": [weight]})
        (model(torch.randn(8, 8)).sum() + weight.sum()).backward()
        optimizer.step()

    suspect = leak(body)
    assert line_with("optimizer.add_param_group(") in marked(suspect), words(suspect)
