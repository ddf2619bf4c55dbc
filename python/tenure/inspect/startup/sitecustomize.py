"""Runs at the start of every Python process below `tenure run`: watches it once it imports torch.

Where only an agent is asked for (``TENURE=agent``) it starts that, and imports no torch. First it
gives way to the sitecustomize that would have run without it. It must never break the program:
whatever goes wrong is one line on stderr.
"""

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent


def _run_the_other() -> None:
    paths = [p for p in sys.path if Path(p or ".").resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


class _AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch as it would be found, and starts watching once it is imported."""

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname != "torch":
            return None
        # Some only ask whether torch is there, so it may be looked for again.
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._loader = spec.loader
                spec.loader = self
                return spec
        return None

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        return self._loader.create_module(spec)

    def exec_module(self, module):  # type: ignore[no-untyped-def]
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _watch_when_ready()


def _watch_when_ready() -> None:
    package = sys.modules.get("tenure")
    if package is not None and getattr(package.__spec__, "_initializing", False):
        package.when_ready = _watch  # type: ignore[attr-defined]  # it was it that imported torch
    else:
        _watch()


def _watch() -> None:
    try:
        from tenure.inspect.session import watch_from_environment

        watch_from_environment()
    except Exception as error:  # noqa: BLE001  the program goes on
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        print(f"tenure: this process is not watched: {reason}", file=sys.stderr)


def _say_if_nothing_was_seen(folder: str, began: float) -> None:
    made = any(path.stat().st_mtime >= began for path in Path(folder).glob("*.sqlite"))
    if "torch" not in sys.modules and not made:
        print(
            "tenure: nothing was watched: neither the program nor a child of it imported torch",
            file=sys.stderr,
        )


def _begin_agent() -> None:
    """By file: to import the package is to import torch."""
    try:
        if not _load("tenure._command", _HERE.parents[1] / "_command.py").is_command():
            _load("tenure.inspect.agent", _HERE.parent / "agent.py").begin()
    except Exception as error:  # noqa: BLE001  the program goes on
        print(f"tenure: this process has no agent: {error}", file=sys.stderr)


def _load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be run")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _begin() -> None:
    if not os.environ.get("TENURE"):
        return
    if os.environ["TENURE"] == "agent":
        _begin_agent()
        return
    from urllib.parse import parse_qsl

    given = dict(parse_qsl(os.environ["TENURE"]))
    if "torch" in sys.modules:  # the other sitecustomize imported it, or a .pth file
        _watch_when_ready()
    else:
        sys.meta_path.insert(0, _AfterTorch())
    if given.get("starter") == str(os.getpid()) and given.get("quiet") != "1":
        atexit.register(_say_if_nothing_was_seen, given.get("out", ""), time.time())


try:
    _run_the_other()
finally:
    _begin()
