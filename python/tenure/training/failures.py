"""How ranks end when they do not end well: what each leaves behind, and which of them began it."""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tenure.errors import CollectiveError, InputError, TenureError
from tenure.inspect.files import whole
from tenure.inspect.words import plain

__all__ = [
    "DivergedError",
    "Ended",
    "Failure",
    "first_cause",
    "forget",
    "is_of_the_run",
    "leave",
    "leave_remark",
    "read",
    "sentence_of",
    "take_remarks",
]

_TOGETHER = 2.0  # seconds within which ranks end of the same cause


class DivergedError(TenureError):
    """The loss is no number any more."""


@dataclass(frozen=True)
class Failure:
    """What a rank says of itself before it ends.

    Attributes:
        text: One line.
        kind: ``input``: it was told what cannot be; ``all``: it happened to every rank; ``own``: to
            this one; ``other``: another rank failed.
        trace: The traceback.
        time: When, in seconds of the epoch.
    """

    text: str
    kind: str
    trace: str
    time: float

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """From what was raised."""
        kind = "input" if isinstance(error, InputError) else "own"
        kind = "all" if isinstance(error, DivergedError) else kind
        kind = "other" if isinstance(error, CollectiveError) else kind
        trace = "".join(traceback.format_exception(error))
        return cls(sentence_of(error), kind, trace, time.time())


@dataclass(frozen=True)
class Ended:
    """A rank that has failed, as its parent sees it: by a code, or by a signal, which is < 0."""

    pid: int
    code: int
    time: float


def is_of_the_run(kind: str) -> bool:
    """Whether the job could have gone well: what ranks hold is of interest."""
    return kind in ("own", "other")


def sentence_of(error: BaseException) -> str:
    """An exception in one line; its type, if it is none of ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = plain(lines[0]) if lines else ""
    if type(error).__module__.startswith("tenure"):
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def leave(folder: Path, rank: int, failure: Failure) -> None:
    """Writes down for the parent how this rank failed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{rank}.json").write_text(json.dumps(asdict(failure)))


def forget(folder: Path, rank: int) -> None:
    """Removes what an earlier attempt of the rank has left."""
    (folder / f"rank-{rank}.json").unlink(missing_ok=True)


def read(folder: Path) -> dict[int, Failure]:
    """What ranks have left, by rank."""
    out = {}
    for path in folder.glob("rank-*.json"):
        try:
            out[int(path.stem.removeprefix("rank-"))] = Failure(**json.loads(path.read_text()))
        except (ValueError, TypeError):  # killed while it wrote
            continue
    return out


def leave_remark(folder: Path, rank: int, text: str) -> None:
    """Leaves a line for the parent to say while the run goes on: a rank's stderr is a file."""
    with whole(folder / f"remark-{rank}.txt") as file:
        file.write(text)


def take_remarks(folder: Path) -> list[str]:
    """What ranks have left to be said, and not again."""
    out = []
    for path in sorted(folder.glob("remark-*.txt")):
        out.append(path.read_text())
        path.unlink()
    return out


def first_cause(
    ended: Mapping[int, Ended], said: Mapping[int, Failure], stopped: Collection[int] = ()
) -> tuple[int, str]:
    """The rank that began it, and what happened to it, in one line.

    Ranks that wait for one that has died fail as well, and those that do not are ended by their
    parent with SIGTERM: neither is a cause. One that was killed, or ended without a word, is.

    Args:
        ended: Ranks that have ended other than well.
        said: What ranks have left.
        stopped: Process ids of those that stood still, and were waited for.
    """
    first = min(one.time for one in ended.values())
    # Those that stood still and were woken to be ended find the others gone.
    woken = {rank for rank, one in ended.items() if one.pid in stopped}
    said = {rank: failure for rank, failure in said.items() if rank not in woken}
    for rank, one in sorted(ended.items(), key=lambda item: (item[1].code > 0, item[0])):
        at_once = one.code != -signal.SIGTERM and one.time <= first + _TOGETHER
        if at_once and rank not in said and rank not in woken:
            return rank, f"rank {rank} (pid {one.pid}) {_how_text(one.code)}"
    still = min(woken, default=None)
    for kind in ("input", "all", "own", "other"):
        if kind == "other" and still is not None:
            text = f"rank {still} (pid {ended[still].pid}) was stopped, as by SIGSTOP"
            return still, f"{text}, and the others have given it up"
        mine = {rank: failure for rank, failure in said.items() if failure.kind == kind}
        if mine:
            rank = min(mine, key=lambda one: mine[one].time)
            text = mine[rank].text
            return rank, f"rank {rank} failed: {text}" if kind == "own" else text
    rank = min(ended, key=lambda one: ended[one].time)
    return rank, f"rank {rank} (pid {ended[rank].pid}) {_how_text(ended[rank].code)}"


def _how_text(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code} and said nothing"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"
