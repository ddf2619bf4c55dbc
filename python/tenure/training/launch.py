"""Starts the ranks of a run through torch's elastic launcher, and says how they ended."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tenure.training import failures
from tenure.training.attendant import Attendant
from tenure.training.folder import Folder
from tenure.training.plan import Plan
from tenure.training.rank import threads_for
from tenure.training.telling import tell_failure, tell_stopped, write_down

__all__ = ["launch"]

_LOOPBACK = "lo"
# What torch 2.11 does not know and does so by itself: how many seconds ranks have to end a step and
# to save, once they are asked to stop, and which signals are its own. SIGTERM is handled here.
_NEWER: dict[str, Any] = {
    "shutdown_timeout": 30,
    "signals_to_handle": "SIGINT,SIGHUP,SIGQUIT",
}
_KNOWN = {field.name for field in dataclasses.fields(LaunchConfig)}


class _Terminated(SignalException):
    """SIGTERM. To ranks it goes as SIGINT: they end their step and save, as after Ctrl-C."""

    def __init__(self) -> None:
        super().__init__("asked to stop by SIGTERM", signal.SIGINT)


def launch(plan: Plan) -> int:
    """Starts the ranks and waits for them. Returns the exit status of the command."""
    folder = Folder(plan.out)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_for(plan.ranks)))
    if Path("/sys/class/net", _LOOPBACK).exists():  # all ranks are on this machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    logging.disable(logging.CRITICAL)  # what the launcher would say is said below
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=plan.restarts,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder.logs), redirects=Std.ERR),
        **{name: value for name, value in _NEWER.items() if name in _KNOWN},
    )
    # -P: nothing of the current folder is imported by accident.
    command = ("-P", "-m", "tenure.training.rank", str(folder.plan))
    attendant = Attendant(folder.logs)
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        with attendant:
            elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        return _tell_of_ranks(plan, folder, error, attendant.woken)
    except _Terminated:
        return tell_stopped(plan, signal.SIGTERM)
    except SignalException as error:
        return tell_stopped(plan, error.sigval)
    except KeyboardInterrupt:
        return tell_stopped(plan, signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)
        logging.disable(logging.NOTSET)
    folder.tidy()
    return 0


def _terminate(_signal: int, _frame: object) -> None:
    raise _Terminated


def _tell_of_ranks(
    plan: Plan, folder: Folder, error: ChildFailedError, stopped: Collection[int]
) -> int:
    said = failures.read(folder.logs)
    ended = {
        rank: failures.Ended(one.pid, one.exitcode, one.timestamp)
        for rank, one in error.failures.items()
    }
    rank, cause = failures.first_cause(ended, said, stopped)
    for number, failure in sorted(said.items()):
        write_down(plan, f"rank {number} failed:\n{failure.trace}")
    kind = said[rank].kind if rank in said else "own"
    is_stopped = rank in ended and ended[rank].pid in stopped
    return tell_failure(plan, cause, kind, None if is_stopped else rank)
