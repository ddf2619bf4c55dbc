"""Leases at the ends of processes: at interpreter exit, in threads that end with it, after fork.

Each program must end with exit code 0 and print nothing to stderr.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import tenure
from probes import assert_ends_well

PREAMBLE = """
import atexit, os, sys, threading
import numpy as np
import tenure, torch
"""


def ends_well(program: str) -> str:
    return assert_ends_well(PREAMBLE + program)


def test_a_global_lease_on_numpys_memory() -> None:
    ends_well("lease = tenure.hold(torch.from_numpy(np.ones(1 << 20)), 'global')")


def test_global_leases_of_all_sorts() -> None:
    ends_well("""
scope = tenure.scope("step", 1)
scope.open()
leases = [
    tenure.hold(torch.zeros(4), "plain"),
    tenure.hold(torch.from_numpy(np.ones(4)), "numpy"),
    tenure.hold(torch.nn.Parameter(torch.ones(4)), "parameter"),
    tenure.hold(torch.frombuffer(bytearray(16), dtype=torch.uint8), "buffer"),
]
cycle = [leases]
cycle.append(cycle)
class Keeper:
    leases = [tenure.hold(torch.from_numpy(np.ones(4)), "class")]
sys.modules["elsewhere"] = Keeper
table, ref, fence = tenure.leases(), tenure.StorageRef(torch.zeros(4)), tenure.Fence()
""")


def test_a_lease_in_a_thread_that_ends_with_the_interpreter() -> None:
    ends_well("""
held = threading.Event()
def run():
    with tenure.scope("thread"):
        lease = tenure.hold(torch.from_numpy(np.ones(1 << 20)), "thread")
        held.set()
        threading.Event().wait()
threading.Thread(target=run, daemon=True).start()
held.wait()
""")


def test_a_lease_released_by_an_atexit_function() -> None:
    output = ends_well("""
lease = tenure.hold(torch.from_numpy(np.ones(4)), "global")
def end():
    lease.release()
    print(tenure.ledger().leases)
atexit.register(end)
""")
    assert output == "0\n"


def test_a_lease_released_while_modules_are_torn_down() -> None:
    """By the time `__del__` runs, the interpreter is finalizing and `tenure` may be half gone."""
    ends_well("""
class Late:
    def __init__(self):
        self.lease = tenure.hold(torch.from_numpy(np.ones(4)), "late")
        self.hold = tenure.hold
        self.tensor = torch.zeros(4)
    def __del__(self):
        self.lease.release()
        self.hold(self.tensor, "later still")
late = Late()
late.itself = late
""")


def test_a_deleter_that_needs_the_interpreter_is_left_alone_after_it() -> None:
    """A reference cycle through C++ that only the process's end would break."""
    ends_well("""
class Array(np.ndarray):
    pass
array = np.ones(4).view(Array)
array.lease = tenure.hold(torch.from_numpy(array), "cycle")
del array
""")


@pytest.mark.parametrize("tensor", ["torch.zeros(4)", "torch.from_numpy(np.ones(4))"])
def test_a_lease_in_a_static_object_of_cpp(tensor: str) -> None:
    """It is destroyed after the interpreter, which numpy's memory would need to be freed."""
    module = importlib.util.find_spec("tenure_static_lease")
    ends_well(f"""
sys.path.append({str(Path(module.origin).parent)!r})
import tenure_static_lease
tenure_static_lease.keep({tensor})
""")


def test_a_child_forked_inside_a_scope() -> None:
    output = ends_well("""
with tenure.scope("step", 3, on_close="raise") as step:
    tensor = torch.ones(256)
    lease = tenure.hold(tensor, "parent")
    child = os.fork()
    if child == 0:
        ok = (tenure.ledger().leases, tenure.ledger().bytes) == (0, 0)
        ok &= not lease.held and tensor.sum().item() == 256
        lease.release()  # the parent's: nothing happens
        try:
            ok &= lease.nbytes < 0
        except tenure.LeaseError as error:
            ok &= "the parent process's" in str(error)
        with tenure.hold(tensor, "child") as own:  # in the table, where the parent's was in its
            ok &= own.scope == "process" and tenure.ledger().bytes == 1024
            ok &= not lease.held
            del lease
            ok &= own.held
        with tenure.scope("own", on_close="raise"):
            with tenure.hold(tensor, "child") as own:
                ok &= own.scope == "own"
        os._exit(0 if ok else 1)
    status = os.waitpid(child, 0)[1]
    print(status, tenure.ledger().leases, tenure.ledger().bytes, lease.scope)
    lease.release()
""")
    assert output == "0 1 1024 step 3\n"


def test_a_forked_child_that_runs_to_its_end() -> None:
    """It unwinds the parent's scope, with the parent's lease in it, and exits as programs do."""
    output = ends_well("""
class InChild(Exception): pass
try:
    with tenure.scope("step", 3, on_close="raise"):
        lease = tenure.hold(torch.from_numpy(np.ones(256)), "parent")
        child = os.fork()
        if child == 0:
            raise InChild
        status = os.waitpid(child, 0)[1]
        print(status, tenure.ledger().leases, lease.held, flush=True)
        lease.release()
except InChild:
    with tenure.hold(torch.zeros(4), "child") as own:
        assert own.scope == "process"
""")
    assert output == "0 1 True\n"


def test_a_forked_child_may_release_and_refill() -> None:
    output = ends_well("""
x = torch.arange(4.0)
tenure.release(x, by="parent")
child = os.fork()
if child == 0:
    tenure.refill(x, torch.ones(4))
    os._exit(0 if x.sum().item() == 4 else 1)
status = os.waitpid(child, 0)[1]
print(status, tenure.is_released(x))
""")
    assert output == "0 True\n"


def test_a_fork_while_threads_use_the_ledger() -> None:
    """No lock may be left taken in the child."""
    output = ends_well("""
stop = threading.Event()
def work():
    while not stop.is_set():
        with tenure.scope("busy", on_close="release"):
            tenure.hold(torch.zeros(4), "busy")
            tenure.ledger().bytes
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
codes = set()
for n in range(30):
    child = os.fork()
    if child == 0:
        import signal
        signal.alarm(20)
        with tenure.scope("child", n, on_close="raise"):
            tenure.hold(torch.zeros(4), f"child {n}").release()
        os._exit(0 if tenure.ledger().leases == 0 else 1)
    codes.add(os.waitpid(child, 0)[1])
stop.set()
for thread in threads: thread.join()
print(codes, tenure.ledger().leases)
""")
    assert output == "{0} 0\n"


class Batches(Dataset[torch.Tensor]):
    """Items made, and leased, in worker processes."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        x = torch.full((4,), float(index))
        with tenure.scope("worker", index, on_close="raise"), tenure.hold(x, "worker") as lease:
            assert lease.scope == f"worker {index}"
            assert tenure.ledger().leases == 1
        return x


def test_data_loader_workers_forked_inside_a_scope() -> None:
    with (
        tenure.scope("epoch", 1, on_close="raise"),
        tenure.hold(torch.zeros(256), "parent") as lease,
    ):
        loader = DataLoader(Batches(), batch_size=2, num_workers=2, multiprocessing_context="fork")
        sums = [batch.sum().item() for batch in loader]
        assert sums == [4, 20, 36, 52]
        assert (tenure.ledger().leases, lease.scope) == (1, "epoch 1")
