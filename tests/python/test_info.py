"""`tenure info`: complete, true, plain where it must be, and silent about the environment."""

from __future__ import annotations

import io
import json
import os
import platform
import resource
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import tenure
from tenure import _build, info
from tenure.cli import app
from tenure.info import as_json, collect, print_text


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["info", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def text_of(**console: object) -> str:
    out = io.StringIO()
    print_text(collect(), Console(file=out, **console))  # type: ignore[arg-type]
    return out.getvalue()


def test_json_holds_what_the_machine_says() -> None:
    said = json.loads(run("--json"))
    assert said["schema"] == 1
    versions, limits = said["versions"], said["limits"]
    assert versions["tenure"] == tenure.__version__
    assert versions["torch"]["running"] == torch.__version__
    assert versions["torch"]["built_against"] == _build.TORCH_VERSION
    assert versions["python"] == platform.python_version()
    assert versions["libc"] == " ".join(platform.libc_ver())
    assert said["parts"]["built"] == list(_build.PARTS)
    assert limits["open_files"]["soft"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert limits["memory"]["total"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    shm = os.statvfs("/dev/shm")
    assert limits["dev_shm"]["total"] == shm.f_blocks * shm.f_frsize
    assert limits["max_map_count"] == int(Path("/proc/sys/vm/max_map_count").read_text())
    assert limits["overcommit"] in (0, 1, 2)


def test_a_pipe_gets_one_plain_line_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    said = run()
    assert "\x1b" not in said
    facts = [fact for section in collect() for fact in section.facts]
    assert len(said.splitlines()) == len(facts)
    torch_line = next(line for line in said.splitlines() if " torch " in line)
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    assert torch_line.endswith(f"built against {_build.TORCH_VERSION}, {cuda}")


def test_a_terminal_gets_a_table_that_fits_one_screen() -> None:
    said = text_of(force_terminal=True, width=100, color_system="standard")
    assert "\x1b[" in said
    assert len(said.splitlines()) < 40


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    said = text_of(force_terminal=True, width=100)
    assert "\x1b[3" not in said  # bold may stay


def test_only_variables_on_the_list_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "OMP_NUM_THREADS": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "TENURE_TRIAL": "two\nlines\x1b[31m",
    }
    hidden = {"AWS_SECRET": "s3cr3t-1", "MY_PYTORCH_KEY": "s3cr3t-2", "XTENURE": "s3cr3t-3"}
    for name, value in (shown | hidden).items():
        monkeypatch.setenv(name, value)
    environment = as_json(collect())["environment"]
    assert isinstance(environment, dict)
    assert shown.items() <= environment.items()
    assert not hidden.keys() & environment.keys()
    said = text_of(force_terminal=False)
    assert "s3cr3t" not in said
    assert "'two\\nlines\\x1b[31m'" in said


def test_what_was_left_out_is_said_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "HAVE", {"asio": False, "sqlite": False, "openssl": True})
    said = text_of(force_terminal=False)
    assert "store over TCP (Asio was not found at build time)" in said
    assert "recordings (SQLite was not found at build time)" in said
    assert "OpenSSL" not in said


def test_what_the_machine_does_not_give_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_path: str) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(info, "_read", lambda _path: "")
    monkeypatch.setattr(info.shutil, "disk_usage", absent)
    limits = as_json(collect())["limits"]
    assert isinstance(limits, dict)
    assert limits["dev_shm"] is None
    assert "max_map_count" not in limits


def test_a_device_is_described(fake: object) -> None:  # noqa: ARG001
    devices = as_json(collect())["devices"]
    assert isinstance(devices, dict)
    assert "fake:0" in devices
