"""How a process is to be watched, and how its children learn of it: the variable ``TENURE``.

Imports nothing of torch: launchers need it before the program starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from tenure.errors import InputError
from tenure.inspect.words import plain

__all__ = [
    "AGENT",
    "LEVELS",
    "SUMMARY",
    "VARIABLE",
    "Options",
    "environment",
    "idle_environment",
    "job_of",
    "make_folder",
    "parse_ranks",
    "rank_of",
    "recording_names",
    "say",
    "say_to",
    "world_of",
]

VARIABLE = "TENURE"
AGENT = "agent"  # its value where a process is not watched, but can be attached to
SUMMARY = 256_000  # bytes that the recording of a rank may take that is only counted
LEVELS = ("count", "trace", "deep")
STARTUP = Path(__file__).parent / "startup"


@dataclass(frozen=True)
class Options:
    """How to watch.

    Attributes:
        out: Folder for the recordings, one file a process; empty: none.
        json: File for the verdict at the end; empty: none.
        level: ``count``, ``trace`` or ``deep``.
        cap: Bytes that a recording may grow to before its oldest detail is thinned.
        quiet: Whether nothing is said on stderr.
        cost: Share of the time, in percent, above which the watching steps down to ``count``.
        memory: Bytes that the watching itself may take before it does so.
        redact: Key under which names in files are hashed; empty: they are not.
        local: Folder of this node in which recordings are written until the process ends; empty:
            none, unless `out` is on a network file system.
        ranks: Ranks that are watched at `level`, the others being counted: ``0,8-15`` or ``all``;
            empty: all, and of more than `many` those that :mod:`tenure.inspect.crowd` chooses.
        many: Processes of a job above which not all are traced.
        run: What the processes that one `tenure run` started have in common; empty: not known.
        starter: The process that `tenure run` became; 0: none.
    """

    out: str = ""
    json: str = ""
    level: str = "trace"
    cap: int = 256 << 20
    quiet: bool = False
    cost: float = 20.0
    memory: int = 512 << 20
    redact: str = ""
    local: str = ""
    ranks: str = ""
    many: int = 16
    run: str = ""
    starter: int = 0

    def text(self) -> str:
        """As the value of ``TENURE``: ``level=trace&out=/data/run.tenure``."""
        default = Options()
        told = {
            f.name: int(value) if isinstance(value, bool) else value
            for f in fields(self)
            if (value := getattr(self, f.name)) != getattr(default, f.name)
        }
        return urlencode({"level": self.level, **told})

    @classmethod
    def parse(cls, text: str) -> Options:
        """Reads what :meth:`text` wrote; raises ValueError with a sentence."""
        if text == AGENT:
            return cls()
        given = dict(parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text)))
        unknown = set(given) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"{VARIABLE} has an unknown setting '{sorted(unknown)[0]}'")
        if given.get("level", "trace") not in LEVELS:
            raise ValueError(f"{VARIABLE} has an unknown level: use {', '.join(LEVELS)}")
        try:
            return cls(
                out=given.get("out", ""),
                json=given.get("json", ""),
                level=given.get("level", "trace"),
                cap=int(given.get("cap", cls.cap)),
                quiet=given.get("quiet", "0") == "1",
                cost=float(given.get("cost", cls.cost)),
                memory=int(given.get("memory", cls.memory)),
                redact=given.get("redact", ""),
                local=given.get("local", ""),
                ranks=given.get("ranks", ""),
                many=int(given.get("many", cls.many)),
                run=given.get("run", ""),
                starter=int(given.get("starter", 0)),
            )
        except ValueError:
            raise ValueError(f"{VARIABLE} has a setting that should be a number") from None


def parse_ranks(text: str) -> set[int] | None:
    """``0,8-15`` as numbers; None for ``all``. Raises InputError with a sentence."""
    if text.strip() == "all":
        return None
    out: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,8})(?:-(\d{1,8}))?", part.strip(), re.ASCII)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise InputError(f"'{text}' names no ranks: write 0,8-15 or all")
        out.update(range(first, last + 1))
    return out


def make_folder(folder: Path) -> None:
    """Makes the folder for recordings unless it is there; raises InputError with a sentence."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot write recordings to {folder}: {error.strerror}: give --out another folder"
        ) from None


def environment(options: Options, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that make a process and its children be watched."""
    return _with_hook(options.text(), given)


def idle_environment(given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that give a process and its children an idle agent, and no more."""
    return _with_hook(AGENT, given)


def _with_hook(value: str, given: Mapping[str, str]) -> dict[str, str]:
    there = given.get("PYTHONPATH", "")
    # An empty entry among others is the current folder and stays.
    others = [path for path in there.split(os.pathsep) if path != str(STARTUP)] if there else []
    return {
        VARIABLE: value,
        "PYTHONPATH": os.pathsep.join([str(STARTUP), *others]),
    }


def rank_of(given: Mapping[str, str] = os.environ) -> int:
    """The rank that the launcher gave this process, or 0."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        if given.get(name, "").isdigit():
            return int(given[name])
    return 0


def world_of(given: Mapping[str, str] = os.environ) -> int:
    """How many processes the launcher started, or 1."""
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"):
        if given.get(name, "").isdigit():
            return max(1, int(given[name]))
    return 1


def job_of(given: Mapping[str, str] = os.environ) -> str:
    """What the processes that one launcher started have in common, as a hash; empty: no launcher.

    No address is part of it: ranks may write that of one host in different ways.
    """
    told = [given.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT")]
    if not any(told):  # a step of Slurm's may be a part of what torch connects
        names = ("SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
        told = [given.get(name, "") for name in names]
    told.append(given.get("SLURM_HET_JOB_ID", "") or given.get("SLURM_JOB_ID", ""))
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16] if any(told) else ""


def recording_names(host: str, given: Mapping[str, str] = os.environ) -> Iterator[str]:
    """``{host}-{rank}-{pid}-{attempt}.sqlite``, and more in case that one is taken."""
    host = host.replace("/", "_") or "host"
    attempt = given.get("TORCHELASTIC_RESTART_COUNT", "")
    for number in count(int(attempt) if attempt.isdigit() else 0):
        yield f"{host}-{rank_of(given)}-{os.getpid()}-{number}.sqlite"


_hearer: Callable[[str], None] | None = None


def say_to(hearer: Callable[[str], None] | None) -> None:
    """From now on :func:`say` tells this one instead of stderr; None: stderr again."""
    global _hearer
    _hearer = hearer


def say(text: str) -> None:
    """One message of Tenure's on stderr, which may be closed by now."""
    if _hearer is not None:
        _hearer(text)
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):
        told = "\n".join(f"tenure: {line}" for line in plain(text).splitlines())
        print(told, file=sys.stderr, flush=True)
