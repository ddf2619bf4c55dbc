"""What a watched process says: for itself while it runs, at its end for the run it belongs to."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tenure.errors import TenureError
from tenure.inspect import local, recordings, verdicts
from tenure.inspect.files import whole
from tenure.inspect.options import Options, rank_of, say, world_of

__all__ = ["Turn", "conclude", "is_at_stake", "is_long"]

_OTHERS = 3.0  # seconds that rank 0 waits for the others
_LONG = 100  # steps of growth: few buffers that are emptied now and then fill for longer
_AT_STAKE = 0.25  # of the way from where the growth began to where memory ends


# Note [Speaking while the program runs]
# A replay buffer that fills and a list that is emptied after each epoch are leaks until they are
# full or emptied, and who was told of a leak that was none does not listen the next time. Nothing
# is lost by waiting: who holds what is recorded when it is first suspected. So what is said before
# the end waits for growth that has gone on for long, unless memory would not last until then.


def is_long(judged: Mapping[str, Any], last: int) -> bool:
    """Whether what grew, up to the step `last`, has done so for longer than most buffers fill."""
    return last - int(judged["since"]) >= _LONG


def is_at_stake(judged: Mapping[str, Any], last: int, left: int | None) -> bool:
    """Whether a good part of the memory has gone that there was when the growth began.

    Args:
        judged: What the extension's ``judge`` returned, a leak or growth.
        last: The step that has ended.
        left: Bytes until something kills the process or an allocation fails; None: not known.
    """
    rate = max(judged["per_step"], judged["total"]["per_step"] if judged["total"]["grows"] else 0)
    grown = rate * (last - judged["since"])
    return left is not None and grown > 0 and grown >= _AT_STAKE * (grown + max(0, left))


class Turn:
    """Which of a job's ranks speaks up while they run: the first that has something to say."""

    def __init__(self, recording: Path | None) -> None:
        """Begins with nobody having spoken, whatever an earlier run in the folder left there."""
        several = int(os.environ.get("WORLD_SIZE", "1") or 1) > 1
        self._folder = recording.parent if recording is not None and several else None
        self._began = time.time()
        self._mine: list[Path] = []

    def take(self, kind: str) -> bool:
        """Whether this process is the one to say it."""
        if self._folder is None:
            return rank_of() == 0
        mark = self._folder / f".told-{kind}"
        try:
            if mark.exists() and mark.stat().st_mtime < self._began:
                mark.unlink()
            mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return rank_of() == 0
        self._mine.append(mark)
        return True

    def end(self) -> None:
        """Leaves nothing behind."""
        for mark in self._mine:
            with contextlib.suppress(OSError):
                mark.unlink()


def conclude(
    mine: verdicts.Document,
    written: verdicts.Document,
    recording: Path | None,
    options: Options,
    broken: str,
) -> None:
    """Says the first screen and writes the JSON file.

    Of all processes of the run, so far as they have recorded anything: the last one to end has them
    all, and what it writes stays.

    Args:
        mine: This process's verdict, as it may be said on the terminal.
        written: The same as it may stand in files.
        recording: This process's recording, complete.
        options: How it was watched.
        broken: Why the recording ends early; empty: it does not.
    """
    if recording is None:
        job = written
        _write_json(options, job)
    elif _is_one_of_many(mine, recording, options):
        return
    else:
        _wait_for_ranks(recording)
        with local.alone_in(Path(options.out)):
            job = _of_run(recording, written, broken)
            _write_json(options, job)
    if options.quiet or rank_of() != 0 or job["steps"] == 0 or _only_started_others(mine, job):
        return
    say(verdicts.first_screen(job if len(job["ranks"]) > 1 else mine))
    if recording is not None and not broken and job["verdict"] in {"leak", "growth"}:
        folder = verdicts.shown_path(options.out)
        say(f"recorded in {folder}: `tenure why {folder}` says more")


def _is_one_of_many(mine: verdicts.Document, recording: Path, options: Options) -> bool:
    """Whether rank 0 says it for this process: thousands that read thousands would take hours."""
    if world_of() > options.many:
        return rank_of() != 0
    launched = mine["ranks"][0].get("unit") != "step"
    return launched and len(recordings.listed(recording.parent)) > 2 * options.many


def _only_started_others(mine: verdicts.Document, job: verdicts.Document) -> bool:
    """Whether this is a launcher, whose children have said it all."""
    return all(rank["pid"] != mine["ranks"][0]["pid"] for rank in job["ranks"])


def _wait_for_ranks(recording: Path) -> None:
    """Until all ranks on this host have ended, or a while, if this is the one that speaks."""
    ranks = int(os.environ.get("WORLD_SIZE", "1") or 1)
    if ranks < 2 or rank_of() != 0:
        return
    wanted = int(os.environ.get("LOCAL_WORLD_SIZE", ranks) or ranks)
    until = time.monotonic() + _OTHERS
    listed: list[Path] = []
    here: set[Path] = set()
    ended: set[Path] = set()
    while time.monotonic() < until:
        with contextlib.suppress(TenureError):  # one that is being made
            now = recordings.listed(recording.parent)
            if now != listed:
                run = recordings.run_of(recording)
                here = {path for path in run if _host_in(path) == _host_in(recording)}
                listed = now
            ended |= {path for path in here - ended if recordings.has_ended(path)}
        if len(ended) >= wanted:
            return
        time.sleep(0.1)


def _host_in(recording: Path) -> str:
    return recording.name.rsplit("-", 3)[0]


def _of_run(recording: Path, mine: verdicts.Document, broken: str) -> verdicts.Document:
    try:
        files = recordings.run_of(recording)
        if len(files) == 1:
            return mine
        if not broken:
            return recordings.judge(files)
        found, left_out = recordings.documents(files)
        others = {path: why for path, why in left_out.items() if path != recording}
        return recordings.together({**found, recording: mine}, others)
    except TenureError:
        return mine


def _write_json(options: Options, verdict: verdicts.Document) -> None:
    """At once or not at all, for another process may write it too."""
    if not options.json:
        return
    path = Path(options.json)
    try:
        with whole(path) as file:
            file.write(json.dumps(verdict, ensure_ascii=False, indent=1) + "\n")
    except TenureError as error:
        say(str(error))
    except OSError as error:
        say(f"cannot write {path}: {error.strerror}: give --json a file that can be written to")
