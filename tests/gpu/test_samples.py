"""Samples on a real accelerator: true, and without a trace before the program uses it.

Each case runs in a process of its own, because a process initialises CUDA once.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

IN_CHILD = """
import os, torch, tenure
def exit_code_in_child(body):
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except BaseException as error:
            print(error, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def run(program: str) -> None:
    command = [sys.executable, "-c", IN_CHILD + textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_sample_initialises_nothing() -> None:
    """Not even cuInit: a child forked afterwards can still use CUDA."""
    run("""
        assert tenure.sample().devices == []
        assert tenure.sample().pinned is None
        assert not torch.cuda.is_initialized()
        def use():
            assert torch.ones(4, device="cuda").sum().item() == 4
            assert len(tenure.sample().devices) == 1
        assert exit_code_in_child(use) == 0
    """)


def test_figures_are_those_of_torch() -> None:
    run("""
        block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
        pinned = torch.empty(16 << 20, dtype=torch.uint8, pin_memory=True)
        now, stats = tenure.sample(), torch.cuda.memory_stats()
        (device,) = now.devices
        assert device.device == block.device
        for name in ("allocated", "active", "reserved"):
            gauge = getattr(device.allocator, name)
            assert gauge.current == stats[f"{name}_bytes.all.current"]
            assert gauge.peak == stats[f"{name}_bytes.all.peak"]
        assert device.allocator.inactive.current == stats["inactive_split_bytes.all.current"]
        assert device.driver.total == torch.cuda.mem_get_info()[1]
        assert now.pinned.active == pinned.nbytes
    """)


def test_a_capture_is_not_disturbed() -> None:
    run("""
        x = torch.ones(64, 64, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x + x
            assert len(tenure.sample().devices) == 1
        graph.replay()
        assert y.sum().item() == 2 * 64 * 64
    """)


def test_a_child_forked_after_initialisation_sees_no_device() -> None:
    run("""
        block = torch.ones(4, device="cuda")
        def look():
            now = tenure.sample()
            assert now.devices == [] and now.pinned is None, now
            assert now.process.rss > 0
        assert exit_code_in_child(look) == 0
        assert len(tenure.sample().devices) == 1
    """)
