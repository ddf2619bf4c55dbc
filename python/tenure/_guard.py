"""Refuses to load Tenure's libraries beside a torch they were not built against.

They would fail with an undefined symbol, or worse, load and misread torch's objects. So nothing
here imports torch or the extension.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path

_PACKAGE = Path(__file__).parent


def check() -> None:
    """Raises ImportError, in one sentence that says what to run, unless the libraries can load."""
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    if not any((_PACKAGE / f"_C{suffix}").exists() for suffix in suffixes):
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise ImportError(
            f"Tenure is not built for Python {python} in {_PACKAGE}: run {_rebuild()}"
        )

    from tenure._build import HAVE, TORCH_VERSION, VERSION

    built = _minor(TORCH_VERSION)
    installed = _installed_torch()
    if installed is None:
        raise ImportError(
            f"Tenure {VERSION} was built against torch {built} and there is no torch here: "
            f"run {shlex.quote(sys.executable)} -m pip install 'torch=={built}.*'"
        )
    if _minor(installed) != built:
        raise ImportError(
            f"Tenure {VERSION} was built against torch {built} and cannot use the torch "
            f"{installed} installed here: run {_rebuild()}"
        )
    if HAVE["sqlite"]:
        _load_sqlite()


def _load_sqlite() -> None:
    """Loads the system's SQLite, else the one that a wheel brings along.

    Not the other way round: Python's own sqlite3 would get ours then.
    """
    name = "libsqlite3.so.0"
    for library in (name, str(_PACKAGE / "lib" / "beside" / name)):
        with contextlib.suppress(OSError):
            ctypes.CDLL(library)
            return
    raise ImportError(
        f"Tenure was built with SQLite and there is no {name} here: install the package that has "
        f"it (Debian: libsqlite3-0), or without it run {_rebuild()}"
    )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _installed_torch() -> str | None:
    """The version of the torch that `import torch` gives, read without importing it."""
    if "torch" in sys.modules:
        # None where importing it is forbidden.
        version = getattr(sys.modules["torch"], "__version__", None)
        return None if version is None else str(version)
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    try:
        source = (folder / "version.py").read_text()
        found = re.search(r"""^__version__ = ['"](.+)['"]""", source, re.MULTILINE)
        return found[1] if found else importlib.metadata.version("torch")
    except (OSError, importlib.metadata.PackageNotFoundError):
        raise ImportError(
            f"the torch in {folder} does not say which version it is and is not installed whole: "
            f"run {shlex.quote(sys.executable)} -m pip install --force-reinstall torch"
        ) from None


def _rebuild() -> str:
    """The command that builds Tenure against the torch installed here."""
    checkout = _PACKAGE.parent.parent
    if (checkout / "pyproject.toml").exists():
        return f"make -C {shlex.quote(str(checkout))} build"
    pip = f"{shlex.quote(sys.executable)} -m pip install"
    build = f"{pip} scikit-build-core cmake ninja && {pip} --no-build-isolation --force-reinstall"
    source = _source()
    if source is not None:
        return f"{build} --no-deps {source}"
    return f"{build} --no-deps FOLDER, where FOLDER is the folder of Tenure's source"


def _source() -> str | None:
    """What to give pip so that it builds this Tenure from its source, if that is known."""
    try:
        distribution = importlib.metadata.distribution("tenure")
    except importlib.metadata.PackageNotFoundError:  # copied here, not installed
        return None
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        return shlex.quote(f"{vcs['vcs']}+{origin['url']}@{vcs['commit_id']}")
    if "dir_info" in origin:
        return shlex.quote(origin["url"])
    if "url" in origin:
        # A wheel has no source in it; a source archive has.
        return None if origin["url"].endswith(".whl") else shlex.quote(origin["url"])
    return f"--no-binary tenure tenure=={distribution.version}"
