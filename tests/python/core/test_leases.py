"""Leases: what they keep alive, how they end, and which tensors cannot be leased."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import tenure
from probes import assert_ends_well, current_scope, needs_real_frees


def figures() -> tuple[int, int, dict[str, tuple[int, int]]]:
    """All that the ledger says, to compare before and after."""
    ledger = tenure.ledger()
    by_kind = {kind: (row.bytes, row.leases) for kind, row in ledger.by_kind().items()}
    return ledger.bytes, ledger.leases, by_kind


# --- what a lease keeps ----------------------------------------------------------------------


def test_it_keeps_the_storage_alive() -> None:
    x = torch.arange(4.0)
    ref = tenure.StorageRef(x)
    lease = tenure.hold(x, "test")
    del x
    assert ref.alive
    kept = torch.empty(0).set_(lease.storage(), 0, (4,))
    assert kept.tolist() == [0, 1, 2, 3]
    del kept
    lease.release()
    assert not ref.alive


@needs_real_frees
def test_its_end_gives_the_memory_back() -> None:
    assert_ends_well(
        """
        import os, pathlib, torch, tenure

        def resident_bytes():
            pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
            return int(pages) * os.sysconf("SC_PAGE_SIZE")

        lease = tenure.hold(torch.ones(64 * 2**20 // 4), "test")
        held = resident_bytes()
        lease.release()
        assert held - resident_bytes() > 63 * 2**20
        """,
        MIMALLOC_PURGE_DELAY="0",  # torch's allocator on aarch64 keeps what was freed for a while
    )


def test_a_view_keeps_its_base_alive() -> None:
    base = torch.arange(1024.0)
    ref = tenure.StorageRef(base)
    lease = tenure.hold(base[1000:1001], "test")
    del base
    assert ref.alive
    assert lease.nbytes == 4096
    lease.release()
    assert not ref.alive


def test_it_keeps_neither_graph_nor_gradient() -> None:
    x = torch.ones(4, requires_grad=True)
    y = x * 2
    y.retain_grad()
    y.sum().backward()
    marker = threading.Event()  # any object of Python's
    y.grad_fn.metadata["marker"] = marker
    graph, gradient = weakref.ref(marker), tenure.StorageRef(y.grad)
    with tenure.hold(y, "test"):
        del y, marker
        assert graph() is None
        assert not gradient.alive


def test_what_it_says_of_itself() -> None:
    x = torch.zeros(256)
    with tenure.scope("step", 3), tenure.hold(x, "mlp.0", kind="activation") as lease:
        assert (lease.owner, lease.kind, lease.nbytes) == ("mlp.0", "activation", 1024)
        assert (lease.scope, lease.device) == ("step 3", torch.device("cpu"))
        assert lease.site.startswith("tests/python/core/test_leases.py:")
        assert 0 <= lease.age < 60
        assert repr(lease).startswith("<tenure.Lease: activation 'mlp.0' (tests/python/")


def test_the_site_is_the_line_that_calls_hold() -> None:
    lines = []
    with tenure.hold(torch.zeros(1), "test") as lease:
        lines.append(int(lease.site.rsplit(":", 1)[1]))
    assert lines == [test_the_site_is_the_line_that_calls_hold.__code__.co_firstlineno + 2]


def test_an_owner_may_be_given_whole() -> None:
    owner = tenure.Owner("optimizer", "adam", "elsewhere.py:7")
    with tenure.hold(torch.zeros(1), owner) as lease:
        assert (lease.kind, lease.owner, lease.site) == owner


def test_a_scope_may_be_named() -> None:
    with tenure.scope("epoch", on_close="release") as epoch, tenure.scope("step", on_close="raise"):
        lease = tenure.hold(torch.zeros(1), "test", scope=epoch)
        assert lease.scope == "epoch"
    assert not lease.held


# --- how it ends -----------------------------------------------------------------------------


def test_a_with_block_ends_it() -> None:
    with tenure.hold(torch.zeros(4), "test") as lease:
        assert tenure.ledger().bytes == 16
    assert not lease.held
    assert tenure.ledger().bytes == 0


def test_a_with_block_ends_it_when_it_raises() -> None:
    with pytest.raises(ValueError, match="inside"), tenure.hold(torch.zeros(4), "test") as lease:
        raise ValueError("inside")
    assert not lease.held


def test_a_with_block_accepts_a_lease_that_was_released_inside() -> None:
    with tenure.hold(torch.zeros(4), "test") as lease:
        lease.release()
    assert not lease.held


def test_collecting_it_ends_it() -> None:
    lease = tenure.hold(torch.zeros(4), "test")
    assert tenure.ledger().leases == 1
    del lease
    assert tenure.ledger().leases == 0


def test_collecting_it_in_a_cycle_ends_it() -> None:
    class Node:
        pass

    node: Any = Node()
    node.itself, node.lease = node, tenure.hold(torch.zeros(4), "test")
    del node
    assert tenure.ledger().leases == 1
    gc.collect()
    assert tenure.ledger().leases == 0


def test_releasing_twice_is_refused() -> None:
    lease = tenure.hold(torch.zeros(4), "test")
    other = tenure.hold(torch.zeros(4), "other")
    lease.release()
    with pytest.raises(tenure.LeaseError, match=r"was released before.*release a lease once"):
        lease.release()
    assert (other.held, tenure.ledger().leases) == (True, 1)


def test_releasing_after_the_scope_did_is_refused() -> None:
    with tenure.scope("step", on_close="release"):
        lease = tenure.hold(torch.zeros(4), "test")
    with pytest.raises(tenure.LeaseError, match="by a call or by the end of its scope"):
        lease.release()


def test_dropping_it_after_the_scope_released_it() -> None:
    """A slot of the table is used again: a lease that ended must not end its successor."""
    with tenure.scope("step", on_close="release"):
        lease = tenure.hold(torch.zeros(4), "test")
    successor = tenure.hold(torch.zeros(4), "successor")
    del lease
    assert successor.held
    assert tenure.ledger().leases == 1


@pytest.mark.parametrize("name", ["nbytes", "kind", "owner", "site", "scope", "device", "age"])
def test_a_released_lease_says_so(name: str) -> None:
    lease = tenure.hold(torch.zeros(4), "test")
    lease.release()
    with pytest.raises(tenure.LeaseError, match="was released: hold the tensor again"):
        getattr(lease, name)
    assert repr(lease) == "<tenure.Lease: released>"
    with pytest.raises(tenure.LeaseError, match="holds no storage"):
        lease.storage()


def test_another_thread_may_release_it() -> None:
    lease = tenure.hold(torch.zeros(4), "test")
    thread = threading.Thread(target=lease.release)
    thread.start()
    thread.join()
    assert not lease.held
    assert tenure.ledger().leases == 0


def test_of_two_threads_one_releases_it() -> None:
    """Releasing lets the GIL go, so both may be inside it at once."""
    together = threading.Barrier(2, timeout=30)
    outcomes: list[str] = []

    def release_all(leases: list[tenure.Lease]) -> None:
        for lease in leases:
            together.wait()
            try:
                lease.release()
                outcomes.append("released")
            except tenure.LeaseError:
                outcomes.append("refused")

    leases = [tenure.hold(torch.zeros(4), "test") for _ in range(2000)]
    threads = [threading.Thread(target=release_all, args=(leases,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (outcomes.count("released"), outcomes.count("refused")) == (2000, 2000)
    assert tenure.ledger().leases == 0


class Dying:
    """Memory whose end runs `fn`: numpy keeps it alive for as long as the tensor lives."""

    def __init__(self, fn: Callable[[], None]) -> None:
        self.fn = fn
        self.__array_interface__ = np.ones(4, dtype=np.float32).__array_interface__

    def __del__(self) -> None:
        self.fn()


def dying_tensor(fn: Callable[[], None]) -> torch.Tensor:
    owner = Dying(fn)
    buffer = np.ones(4, dtype=np.float32)
    array = np.ndarray.__new__(_Array, 4, np.float32, buffer)
    array.owner = owner
    return torch.from_numpy(array)


class _Array(np.ndarray):
    owner: Dying


def use_everything() -> None:
    with tenure.scope("inside a deleter"):
        tenure.hold(torch.zeros(2), "inside").release()
    tenure.ledger().by_owner()


def end_by_release(lease: tenure.Lease) -> Iterator[None]:
    yield
    lease.release()


def end_by_scope(lease: tenure.Lease) -> Iterator[None]:
    with tenure.scope("step", on_close="release") as scope:
        lease.transfer(scope)
        yield


def end_by_collection(lease: tenure.Lease) -> Iterator[None]:
    yield
    del lease


@pytest.mark.parametrize("end", [end_by_release, end_by_scope, end_by_collection])
def test_the_last_tensor_may_die_in_it_and_use_the_ledger(
    end: Callable[[tenure.Lease], Iterator[None]],
) -> None:
    died: list[str] = []

    def on_death() -> None:
        use_everything()
        died.append("died")

    ending = end(tenure.hold(dying_tensor(on_death), "test"))
    next(ending)
    gc.collect()
    assert not died
    for _ in ending:
        pass
    del ending
    assert died == ["died"]
    assert current_scope() == "process"


# --- transfer --------------------------------------------------------------------------------


def test_transfer_to_an_open_scope() -> None:
    with tenure.scope("epoch", on_close="release") as epoch:
        with tenure.scope("step", on_close="raise"):
            lease = tenure.hold(torch.zeros(4), "test")
            lease.transfer(epoch)
            assert lease.scope == "epoch"
        assert lease.held
    assert not lease.held


def test_transfer_to_the_process() -> None:
    with tenure.scope("step", on_close="raise"):
        lease = tenure.hold(torch.zeros(4), "test")
        lease.transfer(None)
    assert (lease.held, lease.scope) == (True, "process")
    lease.release()


def test_transfer_to_a_closed_scope_is_refused() -> None:
    with tenure.scope("closed") as closed:
        pass
    with tenure.scope("step", on_close="release"):
        lease = tenure.hold(torch.zeros(4), "test")
        with pytest.raises(tenure.ScopeError, match="cannot be transferred to a scope that is not"):
            lease.transfer(closed)
        assert lease.scope == "step"


def test_transfer_of_a_released_lease_is_refused() -> None:
    lease = tenure.hold(torch.zeros(4), "test")
    lease.release()
    with pytest.raises(tenure.LeaseError, match="was released and cannot be transferred"):
        lease.transfer(None)
    assert tenure.ledger().leases == 0


def test_transfer_keeps_the_figures() -> None:
    with tenure.scope("epoch", on_close="release") as epoch, tenure.scope("step"):
        lease = tenure.hold(torch.zeros(4), "test")
        before = figures()
        lease.transfer(epoch)
        assert figures() == before


@pytest.mark.parametrize("target", ["step", 3, object()])
def test_transfer_to_something_else_is_refused(target: object) -> None:
    with tenure.hold(torch.zeros(4), "test") as lease:
        with pytest.raises(tenure.InputError, match="needs a tenure.Scope or None and got"):
            lease.transfer(target)  # type: ignore[arg-type]
        assert lease.scope == "process"


# --- bad input -------------------------------------------------------------------------------


@pytest.fixture
def unchanged() -> Iterator[None]:
    """The ledger after the test is the ledger before it, with a lease in it to compare."""
    with tenure.hold(torch.zeros(4), "beside", kind="optimizer"):
        before = figures()
        yield
        assert figures() == before


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("", "owner name is empty"),
        ("a\nb", "owner name contains a newline"),
        ("a\tb", "control character"),
        ("a\u2028b", "owner name contains a newline"),
        ("a\ud800b", "owner name contains a lone surrogate"),
        ("x" * 10_000, "owner name 'x+…' has 10000 bytes: use at most 256"),
        ("a" + "é" * 200, "has 401 bytes: use at most 256"),
    ],
)
def test_a_bad_name_is_refused(name: str, complaint: str) -> None:
    with pytest.raises(tenure.InputError, match=complaint):
        tenure.hold(torch.zeros(4), name)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("kind", ["weights", "", "Parameter", "a" + "é" * 200])
def test_an_unknown_kind_is_refused(kind: str) -> None:
    with pytest.raises(tenure.InputError, match=r"unknown owner kind '.*': use one of parameter, "):
        tenure.hold(torch.zeros(4), "test", kind=kind)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    ("owner", "complaint"),
    [
        (tenure.Owner(5, "test"), "owner kind must be a str and is of type int"),
        (tenure.Owner("user", 5), "owner name must be a str and is of type int"),
        (tenure.Owner("user", "test", 5), "site of the owner must be a str and is of type int"),
        (tenure.Owner("us\ud800er", "test"), "owner kind contains a lone surrogate"),
    ],
)
def test_an_owner_of_the_wrong_types_is_refused(owner: tenure.Owner, complaint: str) -> None:
    with pytest.raises(tenure.InputError, match=complaint):
        tenure.hold(torch.zeros(4), owner)


@pytest.mark.usefixtures("unchanged")
def test_a_kind_that_is_no_text_is_refused() -> None:
    with pytest.raises(tenure.InputError, match="owner kind must be a str and is of type int"):
        tenure.hold(torch.zeros(4), "test", kind=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [99_999_999, 2**32, -1, 2**70])
def test_an_owner_id_that_was_never_given_is_refused(number: int) -> None:
    with pytest.raises(tenure.InputError, match="no owner has th"):
        tenure.leases().owner_of(number)


@pytest.mark.parametrize("number", [-1, 2**64])
def test_a_scope_id_that_cannot_be_is_refused(number: int) -> None:
    with pytest.raises(tenure.InputError, match="no scope has that id"):
        tenure.leases().scope_of(number)


def test_an_id_that_is_no_integer_is_refused() -> None:
    with pytest.raises(tenure.InputError, match="owner id must be an int and is of type str"):
        tenure.leases().owner_of("a")  # type: ignore[arg-type]
    with pytest.raises(tenure.InputError, match="scope id must be an int and is of type float"):
        tenure.leases().scope_of(1.5)  # type: ignore[arg-type]


def test_a_file_whose_name_is_no_utf8_can_hold() -> None:
    source = "lease = tenure.hold(torch.zeros(1), 'test')"
    found: dict[str, tenure.Lease] = {}
    exec(compile(source, "/tr\udcffin.py", "exec"), {"tenure": tenure, "torch": torch}, found)
    assert found["lease"].site == "/tr?in.py:1"


@pytest.mark.usefixtures("unchanged")
def test_an_owner_that_is_no_owner_is_refused() -> None:
    with pytest.raises(tenure.InputError, match="needs a name or a tenure.Owner and got int"):
        tenure.hold(torch.zeros(4), 3)  # type: ignore[arg-type]


@pytest.mark.usefixtures("unchanged")
def test_a_scope_that_is_no_scope_is_refused() -> None:
    with pytest.raises(tenure.InputError, match="needs a tenure.Scope and got str"):
        tenure.hold(torch.zeros(4), "test", scope="step")  # type: ignore[arg-type]


@pytest.mark.usefixtures("unchanged")
def test_a_closed_scope_is_refused() -> None:
    with tenure.scope("closed") as closed:
        pass
    with pytest.raises(tenure.ScopeError, match="cannot be held in a scope that is not open"):
        tenure.hold(torch.zeros(4), "test", scope=closed)


@pytest.mark.usefixtures("unchanged")
def test_a_scope_that_was_never_opened_is_refused() -> None:
    with pytest.raises(tenure.ScopeError, match="'later' was never opened"):
        tenure.hold(torch.zeros(4), "test", scope=tenure.scope("later"))


def test_a_long_site_keeps_its_end() -> None:
    site = "/very/" + "é" * 200 + "/train.py:41"
    with tenure.hold(torch.zeros(1), tenure.Owner("user", "test", site)) as lease:
        assert lease.site.endswith("/train.py:41")
        assert len(lease.site.encode()) <= 256


def test_a_site_with_a_newline_is_mended() -> None:
    with tenure.hold(torch.zeros(1), tenure.Owner("user", "test", "a\nb.py:1")) as lease:
        assert lease.site == "a?b.py:1"
