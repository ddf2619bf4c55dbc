"""One side of an arm of bench/store.py: a process that puts, or one that gets, and times itself.

The bench starts it in the peer's own environment and calls its methods over a Unix socket. Only
`Tenure` needs Tenure.
"""

from __future__ import annotations

import gc
import mmap
import os
import socket
import statistics
import threading
import time
import traceback
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch

AWAKE = 0.05  # seconds of quick fetches
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def made(nbytes: int, dtype: str) -> torch.Tensor:
    """Values of which no two pages are equal.

    Pages of its own: torch's allocator keeps those that are dropped, and they would be counted.
    """
    tensor = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=DTYPES[dtype]).fill_(1.5)
    tensor[::512] = torch.arange(len(tensor[::512]), dtype=DTYPES[dtype])
    return tensor


def bits(tensors: list[torch.Tensor]) -> int:
    """A sum that every bit has a part in."""
    return sum(int(tensor.view(torch.int64).sum()) for tensor in tensors)


def rollup(figure: str, pid: int | str = "self") -> int:
    """Bytes of a process as smaps_rollup has them."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == figure:
            return 1024 * int(rest.split()[0])
    return 0


def gave_way() -> int:
    """How often this thread went to sleep: in a busy loop of Python, only to give the GIL away."""
    for line in Path("/proc/thread-self/status").read_text().splitlines():
        if line.startswith("voluntary_ctxt_switches"):
            return int(line.split()[1])
    raise RuntimeError("/proc/thread-self/status counts no switches")


class Side:
    """What the bench calls; an arm says how to store, to release and to fetch."""

    def __init__(self, role: str, number: int, setting: Any) -> None:
        self._held: list[torch.Tensor] = []
        self.begin(role, number, setting)

    def begin(self, role: str, number: int, setting: Any) -> None:
        raise NotImplementedError

    def about(self) -> dict[str, Any]:
        """The version that is measured, and what a consumer has to know."""
        raise NotImplementedError

    def end(self) -> None:
        """The bench has hung up."""

    def store(self, key: str, tensors: list[torch.Tensor]) -> Any:
        """Gives a token that travels to consumers."""
        raise NotImplementedError

    def release(self, key: str) -> None:
        raise NotImplementedError

    def prepare(self, token: Any) -> Any:
        """What fetch() takes; not part of the time."""
        return token

    def fetch(self, ticket: Any) -> list[torch.Tensor]:
        raise NotImplementedError

    def put(
        self, key: str, count: int, nbytes: int, dtype: str, warm: bool = False
    ) -> dict[str, Any]:
        """With `warm`, as much memory was taken and given back just before."""
        tensors = [made(nbytes, dtype)]
        tensors += [tensors[0].clone() for _ in range(count - 1)]
        expected = bits(tensors)
        if warm:
            made(nbytes, dtype)
        cpu, begin = time.process_time(), time.perf_counter()
        token = self.store(key, tensors)
        took, used = time.perf_counter() - begin, time.process_time() - cpu
        return {"seconds": took, "cpu": used, "token": token, "bits": expected}

    def get(self, token: Any, expected: int) -> dict[str, float]:
        """Seconds to have it, and of CPU; to have it and read all of it; to read it again.

        A fetch that is quick is repeated, or the time would be that of waking up.
        """
        ticket = self.prepare(token)
        gc.collect()
        times: list[float] = []
        used: list[float] = []
        tensors: list[torch.Tensor] = []
        until = time.perf_counter() + AWAKE
        while not times or (time.perf_counter() < until and len(times) < 50):
            tensors.clear()
            cpu, begin = time.process_time(), time.perf_counter()
            tensors = self.fetch(ticket)
            times.append(time.perf_counter() - begin)
            used.append(time.process_time() - cpu)
        begin = time.perf_counter()
        found = bits(tensors)
        read = time.perf_counter()
        bits(tensors)
        again = time.perf_counter()
        if found != expected:
            raise ValueError("what was fetched is not what was put")
        return {
            "seconds": statistics.median(times),
            "cpu": statistics.median(used),
            "with_read": times[-1] + read - begin,
            "warm_read": again - read,
        }

    def hold(self, token: Any) -> None:
        self._held += self.fetch(self.prepare(token))
        bits(self._held)

    def drop(self) -> None:
        self._held.clear()

    def fetch_for(self, token: Any, seconds: float) -> int:
        """Fetches again and again, and says how often."""
        until, times = time.perf_counter() + seconds, 0
        while time.perf_counter() < until:
            self.fetch(self.prepare(token))
            times += 1
        return times

    def loop(self, seconds: float) -> dict[str, float]:
        """A loop in Python: CPU time of an iteration, and how often it gave way."""
        until, done, x = time.perf_counter() + seconds, 0, 0
        slept, cpu = gave_way(), time.thread_time()
        while time.perf_counter() < until:
            for i in range(10_000):
                x += i * i
            done += 10_000
        return {"cpu": (time.thread_time() - cpu) / done, "gave_way": gave_way() - slept}


class Tenure(Side):
    def begin(self, role: str, number: int, setting: Any) -> None:
        import tenure

        self._store = tenure.store
        self._version = tenure.__version__
        self._wire = (setting or {}).get("wire")
        self._scopes: dict[str, Any] = {}
        self._numbers = 0
        tenure.store.join(job="bench", role=role, rank=number)

    def about(self) -> dict[str, Any]:
        return {"version": f"tenure {self._version}"}

    def store(self, key: str, tensors: list[torch.Tensor]) -> Any:
        self._numbers += 1
        scope = self._scopes[key] = self._store.scope("bench", self._numbers)
        scope.__enter__()
        return [scope.put(tensor) for tensor in tensors]

    def end(self) -> None:
        self._store.leave()

    def release(self, key: str) -> None:
        self._scopes.pop(key).__exit__(None, None, None)

    def keep_many(self, count: int, nbytes: int) -> dict[str, float]:
        """Bytes beyond the payload of each of many small objects; with their handles, too."""
        source = made(nbytes, "fp32")
        with self._store.scope("many") as scope:
            scope.put(source)
            gc.collect()
            before, begin = rollup("Rss"), time.perf_counter()
            for number in range(count):
                scope.put(source.fill_(number))
            took = time.perf_counter() - begin
            without = rollup("Rss") - before
            handles = [scope.put(source.fill_(-1.0 - number)) for number in range(count // 10)]
            more = (rollup("Rss") - before - without) / len(handles)
        each = without / count - nbytes
        return {"seconds": took / count, "without": each, "with_handles": more - nbytes}

    def fetch(self, ticket: Any) -> list[torch.Tensor]:
        if len(ticket) == 1:
            return [ticket[0].get(wire=self._wire)]
        return list(self._store.get_all(ticket, wire=self._wire))


class Write(Side):
    """The floor of a put: the same bytes written into a new memory file."""

    def begin(self, role: str, number: int, setting: Any) -> None:  # noqa: ARG002  a side's signature
        self._files: list[int] = []

    def about(self) -> dict[str, Any]:
        return {"version": ""}

    def store(self, key: str, tensors: list[torch.Tensor]) -> Any:
        for tensor in tensors:
            file = os.memfd_create(key)
            self._files.append(file)
            rest = memoryview(tensor.view(torch.uint8).numpy())
            while rest:
                rest = rest[os.write(file, rest) :]


class Socket(Side):
    """The floor: the same bytes through one blocking socket into a new tensor."""

    def begin(self, role: str, number: int, setting: Any) -> None:  # noqa: ARG002  a side's signature
        self._kept: dict[str, list[torch.Tensor]] = {}
        if role == "producer":
            self._listening = socket.create_server(("127.0.0.1", 0))
            threading.Thread(target=self._accept, daemon=True).start()
        else:
            self._socket = socket.create_connection(tuple(setting["address"]))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def about(self) -> dict[str, Any]:
        address = self._listening.getsockname() if hasattr(self, "_listening") else None
        return {"version": "", "setting": {"address": address}}

    def _accept(self) -> None:
        while True:
            link, _ = self._listening.accept()
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        while asked := link.recv(16, socket.MSG_WAITALL):
            for tensor in self._kept[asked.decode().strip()]:
                link.sendall(tensor.view(torch.uint8).numpy())

    def store(self, key: str, tensors: list[torch.Tensor]) -> Any:
        self._kept[key] = tensors
        return key, len(tensors), len(tensors[0]), tensors[0].dtype

    def release(self, key: str) -> None:
        del self._kept[key]

    def fetch(self, ticket: Any) -> list[torch.Tensor]:
        key, count, length, dtype = ticket
        self._socket.sendall(key.ljust(16).encode())
        tensors = [torch.empty(length, dtype=dtype) for _ in range(count)]
        for tensor in tensors:
            rest = memoryview(tensor.view(torch.uint8).numpy())
            while rest:
                rest = rest[self._socket.recv_into(rest) :]
        return tensors


def reason(error: Exception) -> str:
    """In a line: a peer's own text may be a whole traceback of another process."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def sides() -> dict[str, type[Side]]:
    import store_peers

    return {"Tenure": Tenure, "Socket": Socket, "Write": Write, **store_peers.SIDES}


def obey(address: str, kind: str, role: str, number: int, setting: Any) -> None:
    """Does what the bench at that address says, until it hangs up."""
    torch.set_num_threads(1)
    with Client(address, family="AF_UNIX") as link:
        try:
            side = sides()[kind](role, number, setting)
            link.send(("done", side.about() | {"pid": os.getpid()}))
        except Exception as error:  # noqa: BLE001  the bench says why the arm is missing
            traceback.print_exc()
            link.send(("failed", reason(error)))
            return
        while True:
            try:
                method, args = link.recv()
            except (EOFError, ConnectionError):
                side.end()
                return
            try:
                link.send(("done", getattr(side, method)(*args)))
            except Exception as error:  # noqa: BLE001  the bench says why the arm is missing
                traceback.print_exc()
                link.send(("failed", reason(error)))
