"""The fixture `fake`, and a process of their own for the tests that use it.

A process that has installed a PrivateUse1 device has it for good: torch.accelerator finds it, CPU
tensors can be pinned, autograd has device threads. Other tests must not see that, and it must come
before the first backward. So the first test with the fixture `fake` starts one pytest for all of
them, and each then reports what happened to it there; the workers of xdist share it.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# Set in the child: the file it writes its reports to, one JSON object a line.
REPORTS = "TENURE_FAKE_PROCESS_REPORTS"

_reports = pytest.StashKey[dict[str, list[pytest.TestReport]]]()


@pytest.fixture
def fake() -> Iterator[ModuleType]:
    """The module fake_accelerator, its device as new before the test and after it."""
    import fake_accelerator

    yield fake_accelerator
    fake_accelerator.reset()


def pytest_configure(config: pytest.Config) -> None:
    if REPORTS in os.environ:
        import fake_accelerator  # noqa: F401

        config.pluginmanager.register(_Writer(config, Path(os.environ[REPORTS])))


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if REPORTS in os.environ or "fake" not in getattr(item, "fixturenames", ()):
        return None
    session = item.session
    if _reports not in session.stash:
        session.stash[_reports] = _reports_of_all(session)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in session.stash[_reports].get(item.nodeid, []):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # The test before this one left up what it thought this one would share with it.
    session._setupstate.teardown_exact(nextitem)
    return True


class _Writer:
    """Writes the child's reports to a file."""

    def __init__(self, config: pytest.Config, file: Path) -> None:
        self.config = config
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        with self.file.open("a") as file:
            file.write(json.dumps(data) + "\n")


def _reports_of_all(session: pytest.Session) -> dict[str, list[pytest.TestReport]]:
    config = session.config
    if hasattr(config, "workerinput"):
        shared = config._tmp_path_factory.getbasetemp().parent / "fake-process"
        with shared.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second waits for the first
            if not shared.exists():
                lines = _run_all(session)
                shared.write_text("\n".join(lines))
            lines = shared.read_text().splitlines()
    else:
        lines = _run_all(session)
    found: dict[str, list[pytest.TestReport]] = {}
    for line in lines:
        report = config.hook.pytest_report_from_serializable(config=config, data=json.loads(line))
        if isinstance(report.longrepr, list):  # why it was skipped: JSON has no tuples
            report.longrepr = tuple(report.longrepr)
        found.setdefault(report.nodeid, []).append(report)
    return found


def _run_all(session: pytest.Session) -> list[str]:
    """Runs all tests with the fixture; their reports, each a line of JSON."""
    config = session.config
    items = [item for item in session.items if "fake" in getattr(item, "fixturenames", ())]
    maxfail = config.getoption("maxfail") or 0
    overrides = [f"--override-ini={value}" for value in config.getoption("override_ini") or []]
    with tempfile.TemporaryDirectory(prefix="fake-process-") as folder:
        file = Path(folder) / "reports"
        file.touch()
        command = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", *overrides]
        command += [f"--maxfail={maxfail}", *(item.nodeid for item in items)]
        child = subprocess.run(
            command,
            cwd=config.rootpath,
            env=os.environ | {REPORTS: str(file)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines = file.read_text().splitlines()
    reports: list[dict[str, Any]] = [json.loads(line) for line in lines]
    failures = sum(report["outcome"] == "failed" for report in reports)
    if 0 < maxfail <= failures:
        return lines  # it stopped where this process will stop, too
    ended = {report["nodeid"] for report in reports if report["when"] == "teardown"}
    lost = [_lost(item, child) for item in items if item.nodeid not in ended]
    for report in lost:
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        lines.append(json.dumps(data))
    return lines


def _lost(item: pytest.Item, child: subprocess.CompletedProcess[str]) -> pytest.TestReport:
    """The report of a test that the child did not live to finish."""
    text = f"the fake accelerator's process ended with {child.returncode}:\n{child.stdout}"
    return pytest.TestReport(
        item.nodeid, item.location, {item.name: 1}, "failed", text, when="call"
    )
