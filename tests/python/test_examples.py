"""The C++ example builds against the installed package and runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tenure

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/cpp"


def cmake(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    program = shutil.which("cmake", path=path)
    assert program, "CMake is not installed"
    return subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, check=False
    )


def configure(build: Path, *definitions: str) -> subprocess.CompletedProcess[str]:
    return cmake(
        *("-S", EXAMPLE, "-B", build),
        f"-DCMAKE_PREFIX_PATH={tenure.cmake_prefix_path}",
        f"-DPython_EXECUTABLE={sys.executable}",
        *definitions,
    )


def test_cpp_example(tmp_path: Path) -> None:
    # As what is tested itself is compiled: what torch's headers take is known from the last time.
    ccache = shutil.which("ccache")
    configured = configure(
        tmp_path, *([f"-DCMAKE_CXX_COMPILER_LAUNCHER={ccache}"] if ccache else [])
    )
    assert configured.returncode == 0, configured.stderr
    built = cmake("--build", tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr

    run = subprocess.run([tmp_path / "linear"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    last_step, after = lines.index("in the last step:"), lines.index("after training:")
    assert any("activation 'prediction'" in line for line in lines[last_step:after])
    assert [line.split()[:2] for line in lines[after + 1 :]] == [["parameter", "'weight'"]]
    assert any("step 12" in line and "activation 'prediction'" in line for line in lines)

    run = subprocess.run([tmp_path / "offload"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "gradients equal" in run.stdout


@pytest.mark.parametrize("minor", [0, 99])
def test_another_torch_is_refused_in_one_sentence(tmp_path: Path, minor: int) -> None:
    header = tmp_path / "torch/include/torch/headeronly/version.h"
    header.parent.mkdir(parents=True)
    header.write_text(
        f"#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR {minor}\n"
        "#define TORCH_VERSION_PATCH 0\n"
    )
    configured = configure(tmp_path / "build", f"-DTENURE_TORCH_ROOT={tmp_path / 'torch'}")
    assert configured.returncode != 0
    said = " ".join(configured.stderr.split())
    assert "was built against torch" in said
    assert f"and cannot use torch 2.{minor}.0" in said
