"""What tests ask: which scope is current, what the system counts, how another process ends."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import tenure
from forks import run_forked

# Python 3.12 warns of any fork in a process with threads, which some tests are about.
QUIET = "import warnings; warnings.filterwarnings('ignore', 'This process', DeprecationWarning)\n"

_PAGE = os.sysconf("SC_PAGE_SIZE")

# ASan keeps freed memory for a while, so what the system counts says nothing about frees.
needs_real_frees = pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="ASan keeps freed memory"
)


def current_scope() -> str:
    """The scope that a lease taken now would belong to."""
    with tenure.hold(torch.empty(1), "probe") as lease:
        return lease.scope


def resident_bytes() -> int:
    """Physical memory of this process, as the kernel counts it, after garbage is gone."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def anonymous_bytes() -> int:
    """The same without what files have mapped, and when malloc has given back what nobody holds.

    For what is watched over many steps: libraries come in page by page, and a heap gets holes.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def run_program(
    source: str, *, timeout: float = 60.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a Python program of its own, from its text.

    Forked, unless variables are given: an allocator, say, hears of them when a process starts.
    """
    program = ["-c", QUIET + textwrap.dedent(source)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    if variables.keys() <= {"PYTHONPATH"}:
        return run_forked(program, timeout=timeout, env=environment)
    return subprocess.run(
        [sys.executable, *program], capture_output=True, text=True, timeout=timeout, env=environment
    )


def assert_ends_well(source: str, *, timeout: float = 60.0, **variables: str) -> str:
    """Runs a program that must end with exit code 0 and complain about nothing; its output."""
    ended = run_program(source, timeout=timeout, **variables)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout + ended.stderr
    return ended.stdout
