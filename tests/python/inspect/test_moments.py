"""When the graph of references may be looked at, and that it may be spoken of later."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from tenure import _C
from tenure.inspect.kinds import marked_tensors
from tenure.inspect.moments import NotNow, at_rest


@contextmanager
def busy_with(work: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    """Another thread does it."""
    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.2)
    try:
        yield
    finally:
        end()
        thread.join()


def looks_within(seconds: float) -> bool:
    until = time.monotonic() + seconds
    while True:
        try:
            with at_rest([]):
                return True
        except NotNow:
            if time.monotonic() > until:
                return False


def test_threads_that_wait_outside_are_at_rest() -> None:
    event, ended = threading.Event(), threading.Event()

    def sleep() -> None:
        while not ended.is_set():
            time.sleep(0.01)

    with busy_with(event.wait, event.set), busy_with(sleep, ended.set):
        assert looks_within(1.0)


def test_a_thread_that_waits_for_the_gil_is_at_rest() -> None:
    ended = threading.Event()

    def spin() -> None:
        while not ended.is_set():
            pass

    with busy_with(spin, ended.set):
        assert looks_within(1.0)


def test_a_thread_that_sleeps_in_a_call_of_torch_is_not_unless_it_sleeps_long() -> None:
    """It may wake in the middle of a look, and go on without the GIL."""
    future: torch.futures.Future[int] = torch.futures.Future()
    with busy_with(future.wait, lambda: future.set_result(1)):
        assert not looks_within(0.5)
        assert looks_within(10.0)


def test_nor_is_one_that_pythons_library_has_called_it_for() -> None:
    """As a pool of threads does with operators."""
    lock = threading.Lock()
    lock.acquire()  # stands for an operator: what it waits for cannot be seen
    with busy_with(lock.acquire, lock.release):
        assert not looks_within(0.5)
        assert looks_within(10.0)


@contextmanager
def freeing_the_gradient_of(weight: torch.Tensor) -> Iterator[None]:
    """Another thread lets go of it: it is freed before its tensor forgets it."""
    memory = np.zeros(64, np.float32)
    weight.grad = torch.from_numpy(memory)
    ended = threading.Event()
    weakref.finalize(memory, ended.wait)
    del memory

    def let_go() -> None:
        weight.grad = None

    with busy_with(let_go, ended.set):
        yield


def test_a_thread_that_lets_go_of_a_gradient_is_not() -> None:
    with freeing_the_gradient_of(torch.zeros(64, requires_grad=True)):
        assert not looks_within(0.5)
    assert looks_within(1.0)


def test_a_gradient_that_another_thread_lets_go_of_is_not_marked() -> None:
    layer = torch.nn.Linear(8, 8, bias=False)
    layer.weight = torch.nn.Parameter(torch.zeros(64))
    other = torch.nn.Linear(8, 8)
    other(torch.ones(8)).sum().backward()
    assert other.weight.grad is not None

    def gradients() -> int:
        return sum(kind == "gradient" for _, kind, _ in marked_tensors())

    with freeing_the_gradient_of(layer.weight):
        assert gradients() == 0
    assert gradients() > 0


def test_what_a_node_saved_is_known_when_backward_has_given_it_up() -> None:
    """Other threads go on while a look is put into words."""
    weight = torch.randn(64, 64, requires_grad=True)
    loss = (torch.randn(64, 64) @ weight).sum()
    product = loss.grad_fn.next_functions[0][0]
    address = product._saved_self.untyped_storage().data_ptr()
    del product
    with _C.References([]) as references:
        loss.backward()
        node = next(node for at, _, node, *_ in references.storages() if at == address)
        _, path, *_ = references.retention(node)
    assert ("autograd", "self") in [(kind, edge) for kind, _, _, edge in path], path
