"""Folder: where a run keeps what it writes, and who may write there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tenure import _C
from tenure.errors import InputError
from tenure.inspect.verdicts import shown_path
from tenure.training.lock import Lock, holder_of
from tenure.training.plan import Plan

__all__ = ["Folder"]


class Folder:
    """The folder of a run: `--out`.

    Attributes:
        path: It.
        plan: What the run was told, JSON.
        lock: There while a run is going, and says which process that is.
        metrics: A line of JSON a step.
        log: What happened, with times.
        report: The page of the observer.
        recordings: What the observer recorded, a file a rank.
        memory: What the monitor keeps, for `tenure top` and loggers.
        logs: What ranks said on stderr, and how they failed.
        checkpoints: A folder a checkpoint.
    """

    def __init__(self, path: str | Path) -> None:
        """Makes nothing."""
        self.path = Path(path)
        self.plan = self.path / "run.json"
        self.lock = self.path / "lock"
        self.metrics = self.path / "metrics.jsonl"
        self.log = self.path / "train.log"
        self.report = self.path / "report.html"
        self.recordings = self.path / "recordings"
        self.memory = self.path / "memory"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"

    def newest(self) -> str | None:
        """The newest whole checkpoint."""
        if not self.checkpoints.is_dir():
            return None
        return _C.train_newest_checkpoint(str(self.checkpoints))

    def newest_step(self) -> int | None:
        """The step that it was made after."""
        newest = self.newest()
        return step_of(newest) if newest is not None else None

    def check(self, plan: Plan, *, overwrite: bool) -> None:
        """Raises InputError unless the run may write here. Changes nothing."""
        try:
            self._check(plan, overwrite=overwrite)
        except OSError as error:
            raise self._unwritable(error) from None

    def _check(self, plan: Plan, *, overwrite: bool) -> None:
        shown = shown_path(self.path)
        if plan.resume and overwrite:
            raise InputError("--resume goes on with a run and --overwrite removes it: choose one")
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{shown} is a file: --out is a folder")
        if holder := holder_of(self.lock):
            raise self._in_use(holder)
        if overwrite:
            if self._is_used() and not self._is_ours():
                raise InputError(f"{shown} has files in it that no run of ours made: name another")
            return
        step = self.newest_step()
        if plan.resume:
            if step is not None and step >= plan.steps:
                raise InputError(
                    f"the run in {shown} has done {step} steps: it goes on with more --steps, as "
                    f"--steps {2 * step}"
                )
            return
        if self._is_used():
            reached = f", up to step {step}" if step is not None else ""
            raise InputError(
                f"{shown} has a run in it{reached}: --resume goes on with it, --overwrite begins "
                "anew, --out FOLDER leaves it as it is"
            )

    def claim(self, plan: Plan, *, overwrite: bool) -> Lock:
        """Makes the folder and writes the plan; with `overwrite` removes what a run left.

        Nobody else can claim it until the lock is let go, or this process has ended.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = Lock(self.lock)
            if overwrite and self._is_ours():
                self._clear()
            shutil.rmtree(self.logs, ignore_errors=True)
            self.logs.mkdir()
            self.checkpoints.mkdir(exist_ok=True)
            self.plan.write_text(plan.text() + "\n")
        except BlockingIOError:
            raise self._in_use(holder_of(self.lock)) from None
        except OSError as error:
            raise self._unwritable(error) from None
        return lock

    def before(self) -> Plan | None:
        """What the run in it was told the last time."""
        try:
            return Plan.parse(self.plan.read_text())
        except (OSError, ValueError, TypeError):  # TypeError: another version had other settings
            return None

    def tidy(self) -> None:
        """Removes logs that nobody wrote to."""
        if not any(path.stat().st_size for path in self.logs.rglob("*") if path.is_file()):
            shutil.rmtree(self.logs, ignore_errors=True)

    def _clear(self) -> None:
        for one in (self.recordings, self.memory, self.logs, self.checkpoints):
            shutil.rmtree(one, ignore_errors=True)
        for one in (self.metrics, self.log, self.report):
            one.unlink(missing_ok=True)

    def _in_use(self, holder: str) -> InputError:
        return InputError(
            f"a run is still going in {shown_path(self.path)} ({holder}): wait for it or stop it, "
            "or give --out another folder"
        )

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(
            f"cannot write to {shown_path(self.path)}: {error.strerror}: give --out another folder"
        )

    def _is_used(self) -> bool:
        """Whether a run has got as far as its first step."""
        stepped = self.metrics.exists() and self.metrics.stat().st_size > 0
        return stepped or (self.checkpoints.is_dir() and any(self.checkpoints.iterdir()))

    def _is_ours(self) -> bool:
        try:
            return "microbatches" in json.loads(self.plan.read_text())
        except (OSError, ValueError):
            return False


def step_of(checkpoint: str) -> int:
    """The step in a checkpoint's name."""
    return int(Path(checkpoint).name.removeprefix("step-"))
