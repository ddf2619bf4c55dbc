"""The store of this process: joined once, by a call or by the first use."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from tenure import _C
from tenure._inputs import need_integer, need_size, need_text
from tenure.errors import InputError

_lock = threading.Lock()
_current: _C.Store | None = None
_left: str | None = None  # what this process was, once it has left
_inherited: list[_C.Store] = []  # of the process that this one was forked from; never ended here


def join(
    job: str | None = None,
    role: str | None = None,
    rank: int | None = None,
    *,
    listen: str | None = "",
    advertise: str | None = None,
    secret_file: str | os.PathLike[str] | None = None,
    cap: int | str | None = None,
    when_full: Literal["refuse", "spill"] = "refuse",
    spill_folder: str | os.PathLike[str] | None = None,
    lease: float = 30.0,
    timeout: float = 30.0,
    tls: Sequence[str | os.PathLike[str]] | None = None,
) -> None:
    """Makes this process a member of a job's store.

    A process that never calls it joins with the defaults when it first puts or fetches; one that
    has left joins again by this call alone.

    Args:
        job: Processes of one job fetch from each other. By default torchrun's run, else
            ``TENURE_STORE_JOB``, else one job for this user's processes on this host.
        role: What the process is in the job (``"trainer"``); ``TENURE_STORE_ROLE``, torchrun's
            role, or ``"default"``.
        rank: Which of its role; ``TENURE_STORE_RANK``, torchrun's rank, or 0.
        listen: Where processes of other hosts come in, over TCP: needs a secret, without which
            only this host's do. By default what ``TENURE_STORE_LISTEN`` says, else loopback with
            any port (``"127.0.0.1:0"``); None: not at all.
        advertise: The address that handles carry, where it is not the one listened on. By default
            what ``TENURE_STORE_ADVERTISE`` says.
        secret_file: A file that only its owner can read, with the job's secret in it. By default
            the file that ``TENURE_STORE_SECRET_FILE`` names, or ``TENURE_STORE_SECRET`` itself.
        cap: Most bytes to have in memory (``"8GiB"``). The control group's and the machine's
            limits always hold.
        when_full: ``"refuse"`` raises BudgetError, ``"spill"`` moves the oldest objects to disk.
        spill_folder: Where to; the folder for temporary files by default.
        lease: Seconds after which a consumer that has gone loses its claims.
        timeout: Seconds that a fetch may take, unless it says otherwise.
        tls: TCP with TLS: the files (PEM) of a certificate, of its key, and of the authority that
            signed those of all processes. By default those that ``TENURE_STORE_TLS`` names, with
            commas between.

    Raises:
        InputError: It is a member already, or an argument cannot mean anything.

    >>> import tenure
    >>> tenure.store.leave()
    >>> tenure.store.join("my-job", "trainer", 0, cap="1GiB")
    >>> tenure.store.stats()["objects"]
    0
    >>> tenure.store.leave()
    """
    global _current, _left
    with _lock:
        if _current is not None:
            name, number, _ = _current.owner
            raise InputError(
                f"this process is {name} {number} of the job '{_current.job}' already: call "
                "tenure.store.leave() first"
            )
        _current = _join(
            job,
            role,
            rank,
            listen=listen,
            advertise=advertise,
            secret_file=secret_file,
            cap=cap,
            when_full=when_full,
            spill_folder=spill_folder,
            lease=lease,
            timeout=timeout,
            tls=tls,
        )
        _left = None


def leave() -> None:
    """Ends this process's store: what it owned is freed, and fetching it raises OwnerLost.

    Tensors that were fetched stay. Whatever uses the store after that raises, until join() is
    called again. Called at the interpreter's exit; without a store it does nothing.
    """
    global _current, _left
    with _lock:
        if _current is not None:
            name, number, _ = _current.owner
            _left = f"{name} {number} of the job '{_current.job}'"
        _current = None


def current() -> _C.Store:
    """The store of this process, joined with the defaults if it never was.

    Raises:
        InputError: It has left.
    """
    global _current
    store = _current
    if store is not None:
        return store
    with _lock:
        if _current is None:
            if _left is not None:
                raise InputError(
                    f"this process has left the store, in which it was {_left}: call "
                    "tenure.store.join() first"
                )
            _current = _join(None, None, None)
        return _current


def visitor(job: str) -> _C.Store:
    """A member of a job that is there to ask the others of this host, which answer at once."""
    return _join(job, "visitor", 0, listen=None, timeout=5.0)


def stats() -> dict[str, int]:
    """Figures of this process's store, by name: what it holds, served, refused.

    Bytes are those that the system would get back: objects that share their content count once.
    """
    return current().stats()


def objects() -> Iterator[dict[str, Any]]:
    """What this process owns: scope, site, dtype, shape, bytes, place, who has yet to fetch it."""
    rows, following = current().list(0, 1000)
    yield from rows
    while following:
        rows, following = current().list(following, 1000)
        yield from rows


def still_mapped() -> list[dict[str, Any]]:
    """Freed objects that consumers still have mapped: by whom, since when, how much."""
    return current().still_mapped()


def job_name(job: str | None = None) -> str:
    """The job that is meant when none is named."""
    if job is None:
        job = os.environ.get("TENURE_STORE_JOB") or None
    if job is None and "TORCHELASTIC_RUN_ID" in os.environ:
        run = os.environ["TORCHELASTIC_RUN_ID"]
        master = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        job = f"{run}@{master[0]}:{master[1]}"
    return "default" if job is None else job


def _join(
    job: str | None,
    role: str | None,
    rank: int | None,
    *,
    listen: str | None = "",
    advertise: str | None = None,
    secret_file: str | os.PathLike[str] | None = None,
    cap: int | str | None = None,
    when_full: str = "refuse",
    spill_folder: str | os.PathLike[str] | None = None,
    lease: float = 30.0,
    timeout: float = 30.0,
    tls: Sequence[str | os.PathLike[str]] | None = None,
) -> _C.Store:
    job = job_name(job)
    need_text(job, "a job's name")
    if role is None:
        role = os.environ.get("TENURE_STORE_ROLE") or os.environ.get("ROLE_NAME") or "default"
    need_text(role, "a role")
    if when_full not in ("refuse", "spill"):
        raise InputError(f"when_full is 'refuse' or 'spill', not {when_full!r}")
    if listen == "":
        listen = os.environ.get("TENURE_STORE_LISTEN") or "127.0.0.1:0"
    if listen is not None:
        need_text(listen, "an address to listen on")
        advertise = advertise or os.environ.get("TENURE_STORE_ADVERTISE")
    if advertise:
        need_text(advertise, "an address to advertise")
    secret_file = secret_file or os.environ.get("TENURE_STORE_SECRET_FILE", "")
    return _C.Store(
        job=job,
        role=role,
        rank=_rank(rank),
        listen=listen,
        advertise=advertise or "",
        secret=os.environ.get("TENURE_STORE_SECRET", ""),
        secret_file=_path(secret_file, "the secret's file"),
        cap=0 if cap is None else need_size(cap, "the cap"),
        when_full=when_full,
        spill_folder="" if spill_folder is None else _path(spill_folder, "the folder to spill to"),
        lease_ms=milliseconds(lease, "the lease"),
        timeout_ms=milliseconds(timeout, "the timeout"),
        tls=_tls_files(tls),
    )


def _tls_files(tls: Sequence[str | os.PathLike[str]] | None) -> tuple[str, str, str] | None:
    if tls is None and (named := os.environ.get("TENURE_STORE_TLS")):
        tls = named.split(",")
    if tls is None:
        return None
    if isinstance(tls, str) or not isinstance(tls, Sequence) or len(tls) != 3:
        raise InputError("tls is three files: a certificate, its key, and the authority")
    certificate, key, authority = (_path(file, "a file of tls") for file in tls)
    return certificate, key, authority


def _path(path: str | os.PathLike[str], what: str) -> str:
    named = path.__fspath__() if isinstance(path, os.PathLike) else path
    need_text(named, what)
    return named


def _rank(rank: int | None) -> int:
    given: object = rank
    if rank is None:
        given = os.environ.get("TENURE_STORE_RANK") or os.environ.get("RANK") or "0"
        if not (given.isascii() and given.isdigit()):
            raise InputError(f"the rank in the environment is '{given}', which is no number")
        given = int(given)
    number = need_integer(given, "the rank")
    if not 0 <= number < 2**31:
        raise InputError(f"the rank must be from 0 to {2**31 - 1} and is {number}")
    return number


def milliseconds(seconds: float, what: str) -> int:
    """Raises InputError, naming `what`, unless it is a time that can be waited for."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        raise InputError(f"{what} is a number of seconds, not of type {type(seconds).__name__}")
    if not 0 < seconds <= 1e6:
        raise InputError(f"{what} must be more than 0 and at most 1e6 seconds and is {seconds}")
    return max(1, int(1000 * seconds))


def _forget() -> None:
    """In a forked child: the store is the parent's."""
    global _current, _left, _lock
    _lock = threading.Lock()
    _left = None
    if _current is not None:
        _inherited.append(_current)
        _current = None


atexit.register(leave)
os.register_at_fork(after_in_child=_forget)
