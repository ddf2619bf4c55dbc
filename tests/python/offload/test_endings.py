"""The end of an Offload and of the program, with copies still under way."""

from __future__ import annotations

import os
import sys

from probes import assert_ends_well

# Tensors whose storages Python has seen: the last one to let go of such a storage needs the GIL.
COPIES_UNDER_WAY = """
import atexit, sys, torch, tenure
import fake_accelerator as fake
from offloading import Keep, drop_graphs, side_streams


def copies_under_way():
    x = torch.ones(4, device="fake", requires_grad=True)
    offload = tenure.Offload(min_bytes=1)
    with offload:
        Keep.apply(x, [], torch.zeros(8192, device="fake")).sum().backward()
    drop_graphs()
    with offload:
        for stream in side_streams(fake):
            fake.hold(stream)
        saved = [torch.zeros(4096, device="fake") for _ in range(4)]
        for tensor in saved:
            tensor.untyped_storage()
        return offload, Keep.apply(x, [], *saved)


def let_the_device_go_on():
    for stream in side_streams(fake):
        fake.release(stream)

"""


def end(program: str) -> str:
    path = os.pathsep.join(sys.path)
    return assert_ends_well(COPIES_UNDER_WAY + program, PYTHONPATH=path)


def test_an_offload_ends_while_its_thread_lets_go() -> None:
    """Whichever goes last, the Offload or the graph, has the thread to wait for."""
    said = end("""
for last in ("offload", "graph"):
    offload, graph = copies_under_way()
    if last == "offload":
        del graph
    else:
        del offload
    sys.setswitchinterval(100)  # nobody gets the GIL unless it is given
    let_the_device_go_on()
    offload = graph = None
    sys.setswitchinterval(0.005)
    print(last)
""")
    assert said == "offload\ngraph\n"


def test_a_program_ends_while_a_thread_lets_go() -> None:
    said = end("""
offload, graph = copies_under_way()
atexit.register(let_the_device_go_on)
print("ended")
""")
    assert said == "ended\n"
