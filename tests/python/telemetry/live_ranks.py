"""Ranks that live and die on command: real processes, each with a ring of its own.

Reads lines: `start RANK ATTEMPT` forks a rank that appends rows until it is killed, `end RANK` has
it close its ring and exit, `kill RANK` kills it as the kernel would. Answers each when it is done.
At the end of its input it kills all that run.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

from tenure import _C

RANKS = 4
MIB = 2**20


def be_rank(folder: str, rank: int, attempt: int, told: int, commands: int) -> None:
    """Rank 3 grows; the others stay as they are."""
    ring = _C.TelemetryRing(
        folder,
        host="node<b>7",  # a name that would be markup if a page let it
        rank=rank,
        ranks=RANKS,
        stage=rank // 2,
        stages=2,
        role="trainer",
        attempt=attempt,
    )
    step = 0
    while not select.select([commands], [], [], 0.02)[0]:  # pacing, not waiting for anyone
        step += 1
        grown = step * MIB if rank == 3 else 0
        used = (200 + 10 * rank) * MIB + grown
        total = 8192 * MIB
        figures = {
            "device_allocated_bytes": used,
            "device_reserved_bytes": used + 50 * MIB,
            "device_allocated_top_bytes": used + 20 * MIB,
            "device_headroom_bytes": total - used,
            "device_headroom_permille": 1000 * (total - used) // total,
            "host_rss_bytes": 300 * MIB,
            "bound_bytes": 400 * MIB,
            "parameters_bytes": 100 * MIB,
            "optimizer_bytes": 200 * MIB,
            "activations_bytes": 5 * MIB,
            "device_growth_bytes_per_step": MIB if rank == 3 else 0,
        }
        if rank == 3:
            left = (total - used) // MIB
            figures |= {
                "steps_left": left,
                "steps_left_earliest": left * 9 // 10,
                "steps_left_latest": left * 11 // 10,
            }
        ring.append(step, figures)
        if step == 1:
            os.write(told, b"x")
    ring.close("ended")
    os._exit(0)


def main(folder: str) -> None:
    running: dict[int, tuple[int, int]] = {}
    for line in sys.stdin:
        what, rank, *attempt = line.split()
        number = int(rank)
        if what == "start":
            told, telling = os.pipe()
            commands, commanding = os.pipe()
            child = os.fork()
            if child == 0:
                be_rank(folder, number, int(attempt[0]), telling, commands)
            os.read(told, 1)
            running[number] = (child, commanding)
        else:
            child, commanding = running.pop(number)
            if what == "end":
                os.write(commanding, b"x")
            else:
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        print("done", time.time(), flush=True)
    for child, _ in running.values():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1])
