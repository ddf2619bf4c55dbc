"""A job of four ranks under monitors, that lives and dies on command.

Reads lines: `start ATTEMPT` forks the ranks of an attempt, `kill RANK` kills one as the kernel
would, `end` has all that are left close their monitors and exit. Answers each when it is done. At
the end of its input it kills all that run.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

import torch
from torch import distributed as dist

import tenure

RANKS = 4
MIB = 2**20
HELD = [20, 10, 160, 80]  # MiB


def be_rank(folder: Path, rank: int, attempt: str, commands: int, told: int) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_RESTART_COUNT": attempt}
    meeting = dist.FileStore(str(folder / f"meeting-{attempt}"), RANKS)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=RANKS)
    keep = torch.ones(HELD[rank] * MIB // 4)
    settings = {"sinks": [], "every": 1, "stage": rank // 2, "flight_recorder": False}
    with tenure.Monitor(folder=folder / "run.tenure", **settings) as monitor:
        os.write(told, b"r")
        while not select.select([commands], [], [], 0.02)[0]:  # pacing, not waiting for anyone
            monitor.step()
    del keep
    os._exit(0)


def main() -> None:
    folder = Path(sys.argv[1])
    ranks: dict[int, tuple[int, int]] = {}  # process and what it is told through
    for line in sys.stdin:
        match line.split():
            case ["start", attempt]:
                ready, told = os.pipe()
                for rank in range(RANKS):
                    commands, command = os.pipe()
                    if (child := os.fork()) == 0:
                        for _, other in ranks.values():
                            os.close(other)
                        os.close(command)
                        be_rank(folder, rank, attempt, commands, told)
                    os.close(commands)
                    ranks[rank] = child, command
                heard = 0
                while heard < RANKS:
                    heard += len(os.read(ready, RANKS))
                os.close(told)
                os.close(ready)
            case ["kill", rank]:
                child, command = ranks.pop(int(rank))
                os.kill(child, signal.SIGKILL)
                os.close(command)
                os.waitpid(child, 0)
            case ["end"]:
                for _, command in ranks.values():
                    os.close(command)
                for child, _ in ranks.values():
                    os.waitpid(child, 0)
                ranks.clear()
        print("done", flush=True)
    for child, _ in ranks.values():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
