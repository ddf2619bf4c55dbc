"""`make setup`: a set-up that failed is not taken for one that is done."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The Python of a .venv whose pip fails, as it does without an index or for a torch that is none.
PYTHON_WITHOUT_PIP = f"""#!/bin/sh
[ "$1 $2" = "-m pip" ] && echo "ERROR: no such torch" >&2 && exit 1
exec {sys.executable} "$@"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a .venv that was set up once, and whose pip fails."""
    for name in ("pyproject.toml", "scripts/setup"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON_WITHOUT_PIP)
    python.chmod(0o755)
    (tmp_path / ".venv/setup.choices").write_text(f"last_python={sys.executable}\nlast_torch=1.0\n")
    (tmp_path / ".venv/setup.stamp").write_text("of an older set-up")
    return tmp_path


def test_a_failed_install_stops_it_and_leaves_no_stamp(checkout: Path) -> None:
    run = subprocess.run(
        [checkout / "scripts/setup"],
        env=os.environ | {"PYTHON": sys.executable, "TORCH": "9.9.9", "SKIP_OPTIONAL": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 1, run.stdout
    assert run.stderr.splitlines()[-1].startswith(
        "setup: could not install torch 9.9.9 and the other Python packages"
    )
    assert not (checkout / ".venv/setup.stamp").exists()
