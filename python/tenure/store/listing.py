"""What `tenure store` prints."""

from __future__ import annotations

import json as json_text
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tenure import _C
from tenure.errors import OwnerLost, TenureError
from tenure.inspect.words import plain
from tenure.store import joining
from tenure.store.keeper import ROLE, Keeper
from tenure.telemetry.words import bytes_text

_MOST_ASKED = 32  # at once: those that do not answer are waited for together


@dataclass(frozen=True)
class Server:
    """A process of a job that answers."""

    job: str
    socket: str
    told: dict[str, Any]

    @property
    def name(self) -> str:
        """Role and rank."""
        owner = self.told["owner"]
        return f"{owner['role']} {owner['rank']}"


def show_objects(job: str | None, scope: str | None, most: int, *, json: bool) -> int:
    """Prints the objects of all processes that answer. Returns the exit status."""
    rows: list[dict[str, Any]] = []
    try:
        servers, silent = _servers(job)
    except TenureError as error:
        return _refuse(error)
    for asking, server in servers:
        whose = {"owner": server.name, "job": server.job}
        try:
            rows.extend([whose | row for row in _objects(asking, server)])
        except OwnerLost:  # it has ended since it answered
            continue
        except TenureError as error:
            silent.append(str(error))
    if scope is not None:
        rows = [row for row in rows if _scope_text(row) == scope]
    rows.sort(key=lambda row: -row["bytes"])
    if json:
        print(json_text.dumps({"objects": rows[:most], "count": len(rows), "silent": silent}))
        return 0
    if not servers:
        return _say_nobody(job, silent)
    total = sum(row["bytes"] for row in rows)
    print(f"{len(rows)} objects, {bytes_text(total)}, in {len(servers)} processes")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("BYTES", "OWNER", "SCOPE", "PUT AT", "TENSOR", "LIES IN", "WAITS FOR"):
        table.add_column(heading, justify="right" if heading == "BYTES" else "left")
    for row in rows[:most]:
        waiting = ", ".join(row["waiting"][:3]) or "the scope's end"
        more = row["waiting_for"] - 3
        table.add_row(
            bytes_text(row["bytes"]),
            plain(row["owner"]),
            plain(_scope_text(row) + (f" ({row['call']})" if row["call"] else "")),
            plain(row["site"]),
            f"{row['dtype']} {row['shape']}",
            row["place"],
            plain(waiting + (f" and {more} more" if more > 0 else "")),
        )
    _print(table)
    if len(rows) > most:
        print(f"and {len(rows) - most} more: --most {len(rows)} shows all")
    return _say_silent(silent)


def show_stats(job: str | None, *, json: bool) -> int:
    """Prints a line for each process that answers. Returns the exit status."""
    try:
        servers, silent = _servers(job)
    except TenureError as error:
        return _refuse(error)
    if json:
        told = [server.told for _, server in servers]
        print(json_text.dumps({"processes": told, "silent": silent}))
        return 0
    if not servers:
        return _say_nobody(job, silent)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("OWNER")
    for heading in ("OBJECTS", "BYTES", "ON DISK", "STILL MAPPED", "FETCHED", "REFUSED", "SCOPES"):
        table.add_column(heading, justify="right")
    table.add_column("JOB")
    for _, server in servers:
        objects, served = server.told["objects"], server.told["server"]
        refused = sum(count for name, count in served.items() if name.startswith("refused_"))
        table.add_row(
            plain(server.name),
            f"{objects['objects']:,}",
            bytes_text(objects["bytes"]),
            bytes_text(objects["spilled_bytes"]),
            bytes_text(objects["mapped_bytes"]),
            bytes_text(objects["fetched_bytes"]),
            f"{refused + served['dropped_protocol'] + served['dropped_slow']:,}",
            f"{objects['scopes']:,}",
            plain(server.job),
        )
    _print(table)
    for _, server in servers:
        for mapped in server.told["still_mapped"]:
            by, since = mapped["by"], time.localtime(mapped["since_ms"] / 1000)
            print(
                plain(
                    f"{by['role']} {by['rank']} still maps {bytes_text(mapped['bytes'])} that "
                    f"{server.name} freed, since {time.strftime('%H:%M:%S', since)}"
                )
            )
    return _say_silent(silent)


def keep(job: str | None, cap: str, spill: str, listen: str) -> int:
    """Runs a keeper until it is told to end. Returns the exit status."""
    try:
        joining.leave()
        joining.join(
            job,
            ROLE,
            0,
            listen=listen,
            cap=cap or None,
            when_full="spill" if spill else "refuse",
            spill_folder=spill or None,
        )
        keeper = Keeper()
    except TenureError as error:
        return _refuse(error)
    address, port = joining.current().address
    where = f" and on {address}:{port}" if port else "; set TENURE_STORE_SECRET_FILE for others"
    print(plain(f"keeping for the job '{joining.current().job}' on this host{where}"), flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    ended = signal.sigwait({signal.SIGINT, signal.SIGTERM})
    keeper.close()
    left = joining.stats()
    joining.leave()
    if left["objects"]:
        held = f"{left['objects']} objects ({bytes_text(left['bytes'])})"
        print(f"ended; {held} that nobody had fetched are gone")
    return 0 if ended == signal.SIGINT else 128 + signal.SIGTERM


def _servers(job: str | None) -> tuple[list[tuple[_C.Store, Server]], list[str]]:
    """The processes that answer, each with a member to ask it by; and what the others lack."""
    found: list[tuple[_C.Store, Server]] = []
    silent: list[str] = []
    named = job if job is not None else os.environ.get("TENURE_STORE_JOB") or None
    for folder in _folders(named):
        name = (folder / "job").read_text() if (folder / "job").exists() else named
        if name is None or not (sockets := _C.store_sockets(name)):
            continue
        asking = joining.visitor(name)
        with ThreadPoolExecutor(min(_MOST_ASKED, len(sockets))) as pool:
            answers = [(socket, pool.submit(asking.ask_stats, socket)) for socket in sockets]
        for socket, answer in answers:
            try:
                told = json_text.loads(answer.result())
            except OwnerLost:  # killed: a store that joins removes what it left
                continue
            except TenureError as error:
                silent.append(str(error))
                continue
            if told["owner"]["incarnation"] != str(asking.owner[2]):
                found.append((asking, Server(name, socket, told)))
    found.sort(
        key=lambda one: (one[1].job, one[1].told["owner"]["role"], one[1].told["owner"]["rank"])
    )
    return found, silent


def _folders(job: str | None) -> list[Path]:
    if job is not None:
        return [Path(_C.store_folder(job))]
    return sorted(
        path for path in Path(_C.store_folder("default")).parent.iterdir() if path.is_dir()
    )


def _objects(asking: _C.Store, server: Server) -> Iterator[dict[str, Any]]:
    following = 0
    while True:
        text, following = asking.ask_list(server.socket, following, 1000)
        yield from json_text.loads(text)["objects"]
        if not following:
            return


def _scope_text(row: dict[str, Any]) -> str:
    return f"{row['scope']['kind']} {row['scope']['id']}"


def _print(table: Table) -> None:
    width = None if sys.stdout.isatty() else 200
    Console(width=width, highlight=False, markup=False).print(table)


def _refuse(error: TenureError) -> int:
    print(plain(f"tenure: {error}"), file=sys.stderr)
    return 2


def _say_nobody(job: str | None, silent: list[str]) -> int:
    if silent:
        return _say_silent(silent)
    of = f" of the job '{job}'" if job is not None else ""
    print(plain(f"no process{of} on this host has a store: one has once it puts or fetches"))
    return _say_silent(silent)


def _say_silent(silent: list[str]) -> int:
    for text in silent:
        print(plain(f"tenure: {text}"), file=sys.stderr)
    return 1 if silent else 0
