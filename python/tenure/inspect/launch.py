"""`tenure run` and `tenure env`: starting programs so that they and their children are watched."""

from __future__ import annotations

import importlib.util
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from tenure.errors import InputError
from tenure.inspect.options import (
    Options,
    environment,
    idle_environment,
    make_folder,
    parse_ranks,
    say,
)

__all__ = [
    "command_of",
    "exports",
    "idle_exports",
    "new_key",
    "prepared",
    "run",
    "run_idle",
]


def new_key() -> str:
    """A key for one run's redaction: with it, and only with it, a name's hash can be made."""
    return secrets.token_hex(16)


def prepared(options: Options) -> Options:
    """The options with paths that hold wherever the program goes; makes the folder."""
    if options.ranks:
        parse_ranks(options.ranks)
    out = Path(options.out).absolute()
    if out.is_file():
        raise InputError(f"{out} is a file: give --out a folder")
    make_folder(out)
    if not os.access(out, os.W_OK | os.X_OK):
        raise InputError(f"cannot write recordings to {out}: give --out a folder you may write to")
    verdict = ""
    if options.json:
        verdict = str(Path(options.json).absolute())
        if not os.access(Path(verdict).parent, os.W_OK | os.X_OK):
            where = "a folder that is there and that you may write to"
            raise InputError(f"cannot write {options.json}: give --json a file in {where}")
        if Path(verdict).is_dir():
            raise InputError(f"cannot write {options.json}: it is a folder: give --json a file")
    local = str(Path(options.local).absolute()) if options.local else ""
    return replace(options, out=str(out), json=verdict, local=local)


def command_of(arguments: Sequence[str]) -> list[str]:
    """The program to start, from what follows `tenure run`: a script, ``-m module``, or a command.

    Raises InputError if there is nothing, or nothing that can be started.
    """
    given = list(arguments)
    if given and given[0] == "--":
        given = given[1:]
    if not given:
        raise InputError("what is to be run? For example: tenure run train.py --epochs 3")
    first = given[0]
    if first == "-m":
        if len(given) < 2:
            raise InputError("-m needs the name of a module: tenure run -m package.module")
        return [sys.executable, *given]
    if first == "-c":
        return [sys.executable, *given]
    if first.endswith(".py") or Path(first).is_dir():
        if not Path(first).exists():
            raise InputError(f"there is no script {first} in {Path.cwd()}")
        return [sys.executable, *given]
    if _is_program(first):
        return given
    if Path(first).is_file():
        return [sys.executable, *given]
    raise InputError(f"{first} is no script, and no program on PATH")


def _is_program(name: str) -> bool:
    from shutil import which

    return which(name) is not None


def run(arguments: Sequence[str], options: Options) -> NoReturn:
    """Becomes the program: same process, so its signals, output and exit status are its own."""
    command = command_of(arguments)
    if importlib.util.find_spec("torch") is None:
        raise InputError("this Python has no torch: run `tenure` from the program's environment")
    ready = replace(prepared(options), run=secrets.token_hex(8), starter=os.getpid())
    _become(command, environment(ready))


def run_idle(arguments: Sequence[str], *, quiet: bool = False) -> NoReturn:
    """The same without watching: the program only gets the agent that `tenure attach` asks."""
    command = command_of(arguments)
    if not quiet:
        say(f"not watched yet: `tenure attach {os.getpid()}` does that, whenever you want")
    _become(command, idle_environment())


def _become(command: list[str], variables: dict[str, str]) -> NoReturn:
    try:
        os.execvpe(command[0], command, {**os.environ, **variables})
    except OSError as error:
        raise InputError(f"cannot start {command[0]}: {error.strerror}") from None


def exports(options: Options, style: str) -> str:
    """The variables as lines of a shell, as JSON for Ray's ``runtime_env``, or as a pod's YAML."""
    return _written(environment(prepared(options)), style)


def idle_exports(style: str) -> str:
    """The same for processes that are not watched, but can be attached to."""
    return _written(idle_environment(), style)


def _written(variables: dict[str, str], style: str) -> str:
    import json
    import shlex

    if style == "json":
        return json.dumps({"env_vars": variables})
    if style == "yaml":
        return "\n".join(f"- name: {k}\n  value: {json.dumps(v)}" for k, v in variables.items())
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())
