"""`import tenure` beside the wrong torch says in one sentence what to run, and loads nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import tenure
from tenure import _guard

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site-packages with a Tenure built against torch 7.1, and no torch."""
    package = tmp_path / "tenure"
    built = shutil.ignore_patterns("*.so", "include", "lib", "__pycache__")
    shutil.copytree(Path(tenure.__file__).parent, package, ignore=built)
    (package / f"_C{SUFFIX}").write_text("not a library: loading it fails")
    (package / "_build.py").write_text(
        'VERSION = "0.1.0"\nTORCH_VERSION = "7.1.0"\nHAVE = {"sqlite": True}\n'
    )
    info = tmp_path / "tenure-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tenure\nVersion: 0.1.0\n")
    return tmp_path


def install_torch(site: Path, version: str) -> None:
    (site / "torch").mkdir()
    (site / "torch/__init__.py").write_text("raise RuntimeError('torch was imported')")
    (site / "torch/version.py").write_text(f"__version__ = '{version}'\n")


def stderr_of_import(site: Path, before: str = "") -> str:
    run = subprocess.run(
        [sys.executable, "-S", "-c", f"{before}import tenure"],
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    return run.stderr


def error_of_import(site: Path, before: str = "") -> str:
    said = stderr_of_import(site, before)
    kind, _, sentence = said.strip().splitlines()[-1].partition(": ")
    assert kind == "ImportError", said
    return sentence


def test_another_minor_names_both_and_the_command(site: Path) -> None:
    install_torch(site, "7.2.1+cu130")
    assert error_of_import(site) == (
        "Tenure 0.1.0 was built against torch 7.1 and cannot use the torch 7.2.1+cu130 installed "
        f"here: run {sys.executable} -m pip install scikit-build-core cmake ninja && "
        f"{sys.executable} -m pip install --no-build-isolation --force-reinstall --no-deps "
        "--no-binary tenure tenure==0.1.0"
    )


def test_the_command_line_says_it_without_a_traceback(site: Path) -> None:
    install_torch(site, "7.2.1")
    run = subprocess.run(
        [sys.executable, "-S", "-m", "tenure", "info"],
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr.startswith("tenure: Tenure 0.1.0 was built against torch 7.1 and cannot use")
    assert len(run.stderr.splitlines()) == 1


def test_the_command_builds_from_where_tenure_came(site: Path) -> None:
    install_torch(site, "7.2.1")
    (site / "tenure-0.1.0.dist-info/direct_url.json").write_text(
        '{"url": "file:///home/me/tenure", "dir_info": {}}'
    )
    assert error_of_import(site).endswith("--no-deps file:///home/me/tenure")


def came_from(site: Path, url: str) -> None:
    (site / "tenure-0.1.0.dist-info/direct_url.json").write_text(
        f'{{"url": "{url}", "archive_info": {{}}}}'
    )


def test_a_wheel_from_a_file_cannot_be_built_again(site: Path) -> None:
    install_torch(site, "7.2.1")
    came_from(site, "file:///home/me/tenure-0.1.0-cp311-cp311-linux_x86_64.whl")
    said = error_of_import(site)
    assert said.endswith(
        "--no-build-isolation --force-reinstall --no-deps FOLDER, where FOLDER is the folder of "
        "Tenure's source"
    )
    assert "tenure==" not in said


def test_a_source_archive_can_be_built_again(site: Path) -> None:
    install_torch(site, "7.2.1")
    came_from(site, "file:///home/me/tenure-0.1.0.tar.gz")
    assert error_of_import(site).endswith("--no-deps file:///home/me/tenure-0.1.0.tar.gz")


def test_a_copy_that_was_never_installed(site: Path) -> None:
    install_torch(site, "7.2.1")
    shutil.rmtree(site / "tenure-0.1.0.dist-info")
    assert error_of_import(site).endswith("FOLDER is the folder of Tenure's source")


def test_a_torch_that_does_not_say_its_version(site: Path) -> None:
    install_torch(site, "7.1.0")
    (site / "torch/version.py").unlink()
    assert error_of_import(site) == (
        f"the torch in {site / 'torch'} does not say which version it is and is not installed "
        f"whole: run {sys.executable} -m pip install --force-reinstall torch"
    )


def test_another_patch_is_the_same_torch(site: Path) -> None:
    install_torch(site, "7.1.9")
    assert "torch was imported" in stderr_of_import(site)


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


def test_a_torch_that_may_not_be_imported(site: Path) -> None:
    install_torch(site, "7.1.0")
    said = error_of_import(site, "import sys; sys.modules['torch'] = None; ")
    assert said.startswith("Tenure 0.1.0 was built against torch 7.1 and there is no torch here")


def test_no_sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's is used where there is one, else that of a wheel, else one sentence."""
    tried = []

    def load(name: str) -> None:
        tried.append(name)
        raise OSError

    monkeypatch.setattr(_guard.ctypes, "CDLL", load)
    with pytest.raises(ImportError, match=r"there is no libsqlite3\.so\.0 here: install"):
        _guard._load_sqlite()
    beside = Path(tenure.__file__).parent / "lib" / "beside" / "libsqlite3.so.0"
    assert tried == ["libsqlite3.so.0", str(beside)]
