"""Runs many small programs as processes of their own that import torch only once.

Reads one JSON object a line: program, arguments, cwd, env, out and err (files). Forks a child for
each, at most as many at a time as given, that starts watching as the start-up hook would and then
is the program. Writes `{"at": n, "code": c}` as each ends, n counting the lines.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any


def become(job: dict[str, Any]) -> None:
    """Makes this process the program."""
    os.chdir(job["cwd"])
    os.environ.update(job["env"])
    for number, name in ((0, os.devnull), (1, job["out"]), (2, job["err"])):
        file = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(file, number)
    sys.argv = [job["program"], *job["arguments"]]
    sys.path[0] = str(Path(job["program"]).parent)
    from tenure.inspect.session import watch_from_environment

    watch_from_environment()
    runpy.run_path(job["program"], run_name="__main__")


def main() -> None:
    # What the children share; the first step of an optimizer imports the last.
    import torch._dynamo  # noqa: F401

    import tenure.inspect.session  # noqa: F401

    most = int(sys.argv[1])
    running: dict[int, int] = {}
    for at, line in enumerate(sys.stdin):
        while len(running) >= most:
            reap(running)
        child = os.fork()
        if child == 0:
            become(json.loads(line))
            return
        running[child] = at
    while running:
        reap(running)


def reap(running: dict[int, int]) -> None:
    child, status = os.waitpid(-1, os.WNOHANG)
    if child == 0:
        time.sleep(0.01)
        return
    code = os.waitstatus_to_exitcode(status)
    print(json.dumps({"at": running.pop(child), "code": code}), flush=True)


main()
