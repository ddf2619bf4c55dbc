"""The end of an Offload and of the program, with copies still under way."""

from __future__ import annotations

import os
import sys

import pytest

from probes import assert_ends_well

# Tensors whose storages Python has seen: the last one to let go of such a storage needs the GIL.
COPIES_UNDER_WAY = """
import atexit, torch, tenure
import fake_accelerator as fake
from offloading import Keep, side_streams

x = torch.ones(4, device="fake", requires_grad=True)
offload = tenure.Offload(min_bytes=1)
with offload:
    Keep.apply(x, [], torch.zeros(8192, device="fake")).sum().backward()
with offload:
    held = side_streams(fake)
    for stream in held:
        fake.hold(stream)
    saved = [torch.zeros(4096, device="fake") for _ in range(4)]
    for tensor in saved:
        tensor.untyped_storage()
    loss = Keep.apply(x, [], *saved)
    del saved, tensor


def let_the_device_go_on():
    for stream in held:
        fake.release(stream)

"""


def end(program: str) -> str:
    path = os.pathsep.join(sys.path)
    return assert_ends_well(COPIES_UNDER_WAY + program, PYTHONPATH=path)


@pytest.mark.parametrize("last", ["loss", "offload"])
def test_an_offload_ends_while_its_thread_lets_go(last: str) -> None:
    first = "offload" if last == "loss" else "loss"
    said = end(f"""
import sys

del {first}
sys.setswitchinterval(100)  # nobody gets the GIL unless it is given
let_the_device_go_on()
del {last}
sys.setswitchinterval(0.005)
print("ended")
""")
    assert said == "ended\n"


def test_a_program_ends_while_a_thread_lets_go() -> None:
    assert end("atexit.register(let_the_device_go_on); print('ended')") == "ended\n"


def test_a_program_ends_while_the_device_is_behind() -> None:
    assert end("print('ended')") == "ended\n"
