"""`import tenure` beside the wrong torch says in one sentence what to run, and loads nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import tenure

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site-packages with a Tenure built against torch 7.1, and no torch."""
    package = tmp_path / "tenure"
    package.mkdir()
    source = Path(tenure.__file__).parent
    for name in ("__init__.py", "_guard.py"):
        shutil.copy(source / name, package)
    (package / f"_C{SUFFIX}").write_text("not a library: loading it fails")
    (package / "_build.py").write_text('VERSION = "0.1.0"\nTORCH_VERSION = "7.1.0"\n')
    info = tmp_path / "tenure-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tenure\nVersion: 0.1.0\n")
    return tmp_path


def install_torch(site: Path, version: str) -> None:
    (site / "torch").mkdir()
    (site / "torch/__init__.py").write_text("raise RuntimeError('torch was imported')")
    (site / "torch/version.py").write_text(f"__version__ = '{version}'\n")


def error_of_import(site: Path) -> str:
    run = subprocess.run(
        [sys.executable, "-S", "-c", "import tenure"],
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    kind, _, sentence = run.stderr.strip().splitlines()[-1].partition(": ")
    assert kind == "ImportError", run.stderr
    return sentence


def test_another_minor_names_both_and_the_command(site: Path) -> None:
    install_torch(site, "7.2.1+cu130")
    assert error_of_import(site) == (
        "Tenure 0.1.0 was built against torch 7.1 and cannot use the torch 7.2.1+cu130 installed "
        f"here: run {sys.executable} -m pip install scikit-build-core cmake ninja && "
        f"{sys.executable} -m pip install --no-build-isolation --force-reinstall --no-deps "
        "--no-binary tenure tenure==0.1.0"
    )


def test_the_command_builds_from_where_tenure_came(site: Path) -> None:
    install_torch(site, "7.2.1")
    (site / "tenure-0.1.0.dist-info/direct_url.json").write_text(
        '{"url": "file:///home/me/tenure", "dir_info": {}}'
    )
    assert error_of_import(site).endswith("--no-deps file:///home/me/tenure")


def test_another_patch_is_the_same_torch(site: Path) -> None:
    install_torch(site, "7.1.9")
    run = subprocess.run(
        [sys.executable, "-S", "-c", "import tenure"],
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "torch was imported" in run.stderr


def test_no_torch(site: Path) -> None:
    assert error_of_import(site) == (
        "Tenure 0.1.0 was built against torch 7.1 and there is no torch here: "
        f"run {sys.executable} -m pip install 'torch==7.1.*'"
    )


def test_no_extension(site: Path) -> None:
    (site / f"tenure/_C{SUFFIX}").unlink()
    install_torch(site, "7.1.0")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert error_of_import(site).startswith(
        f"Tenure is not built for Python {version} in {site / 'tenure'}: run "
    )
