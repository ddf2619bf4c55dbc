"""The arrows of the house: who may include whom. See docs/architecture.md.

train → {inspect, pipeline, shard, offload, store, telemetry} → core; bindings may include all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = {"inspect", "pipeline", "shard", "offload", "store", "telemetry"}
MAY_INCLUDE = {
    "core": {"core"},
    **{part: {"core", part} for part in PARTS},
    "train": {"core", "train", *PARTS},
    "bindings": {"core", "train", *PARTS},
}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
VERSION_CHECK = re.compile(r"^\s*#\s*(?:el)?if.*\bTORCH_VERSION_\w+", re.MULTILINE)


def sources(root: Path) -> Iterator[tuple[str, Path]]:
    """Every C++ file with the folder whose rules it obeys."""
    for pattern, depth in (("tenure/*/**/*", 1), ("python/bindings/**/*", 1)):
        for file in sorted(root.glob(pattern)):
            if file.suffix in {".h", ".cpp", ".cu"}:
                yield file.relative_to(root).parts[depth], file


def included_folder(name: str, file: Path, root: Path) -> str | None:
    """The folder of tenure/ that an include reaches into, or None for what is not ours."""
    beside = (file.parent / name).resolve()
    if beside.is_file() and beside.is_relative_to(root / "tenure"):
        name = str(beside.relative_to(root))
    parts = Path(name).parts
    return parts[1] if len(parts) > 2 and parts[0] == "tenure" else None


def violations(root: Path) -> list[str]:
    found = []
    for folder, file in sources(root):
        text = file.read_text()
        where = file.relative_to(root)
        allowed = MAY_INCLUDE.get(folder)
        if allowed is None:
            found.append(f"{where}: {folder}/ is not a part of the house")
            continue
        for name in INCLUDE.findall(text):
            target = included_folder(name, file, root)
            if target is not None and target not in allowed:
                found.append(f"{where}: {folder} may not include {target} ({name})")
            if name == "torch/torch.h" and folder != "train":
                found.append(f"{where}: torch/torch.h is for train/ only")
        if VERSION_CHECK.search(text) and str(where) != "tenure/core/torch_compat.h":
            found.append(f"{where}: version checks belong in tenure/core/torch_compat.h")
    return found


def test_every_arrow_points_the_right_way() -> None:
    assert list(sources(ROOT)), "found no sources to check"
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("tenure/core/a.h", "#include <tenure/store/b.h>", "core may not include store"),
        ("tenure/core/a.cpp", "#include <tenure/train/b.h>", "core may not include train"),
        ("tenure/shard/a.h", "#include <tenure/offload/b.h>", "shard may not include offload"),
        ("tenure/shard/a.h", '  #  include "../offload/b.h"', "shard may not include offload"),
        ("tenure/store/tcp/a.h", "#include <tenure/train/b.h>", "store may not include train"),
        ("tenure/core/a.cpp", "#include <torch/torch.h>", "torch/torch.h is for train/ only"),
        ("python/bindings/a.cpp", "#include <torch/torch.h>", "torch/torch.h is for train/ only"),
        ("tenure/junk/a.cpp", "", "junk/ is not a part of the house"),
        ("tenure/core/a.cpp", "#if TORCH_VERSION_MINOR >= 13", "version checks belong in"),
        ("tenure/core/a.cpp", "#elif defined(X) && TORCH_VERSION_MAJOR > 2", "version checks"),
    ],
)
def test_a_wrong_arrow_is_caught(tmp_path: Path, file: str, line: str, complaint: str) -> None:
    (tmp_path / "tenure/offload").mkdir(parents=True)
    (tmp_path / "tenure/offload/b.h").touch()
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(f"// a\n{line}\n")
    assert [found for found in violations(tmp_path) if complaint in found]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("tenure/core/a.h", "#include <tenure/core/b.h>"),
        ("tenure/core/a.h", "#include <tenure/config.h>"),
        ("tenure/core/torch_compat.h", "#if TORCH_VERSION_MINOR >= 13"),
        ("tenure/store/a.h", "#include <tenure/core/b.h>"),
        ("tenure/train/a.h", "#include <tenure/store/b.h>"),
        ("tenure/train/a.cpp", "#include <torch/torch.h>"),
        ("python/bindings/a.cpp", "#include <tenure/train/b.h>"),
    ],
)
def test_a_right_arrow_is_not(tmp_path: Path, file: str, line: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(f"{line}\n")
    assert violations(tmp_path) == []
