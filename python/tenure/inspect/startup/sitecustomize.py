"""Runs at the start of every Python process below `tenure run`: watches it once it imports torch.

First it gives way to the sitecustomize that would have run without it. It must never break the
program: whatever goes wrong is one line on stderr.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

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

    def find_spec(self, fullname, _path=None, _target=None):  # type: ignore[no-untyped-def]
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        self._loader = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        return self._loader.create_module(spec)

    def exec_module(self, module):  # type: ignore[no-untyped-def]
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _watch()


def _watch() -> None:
    try:
        from tenure.inspect.session import watch_from_environment

        watch_from_environment()
    except Exception as error:  # noqa: BLE001  the program goes on
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        print(f"tenure: this process is not watched: {reason}", file=sys.stderr)


try:
    _run_the_other()
finally:
    if os.environ.get("TENURE"):
        sys.meta_path.insert(0, _AfterTorch())
