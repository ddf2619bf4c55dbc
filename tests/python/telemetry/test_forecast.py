"""The forecast, held against a program that really runs out of memory."""

from __future__ import annotations

import json
from pathlib import Path

from forks import run_forked
from tenure.telemetry.rings import rings_of

# It keeps a tensor of 4 MiB a step, and no more than 400 MiB are left.
LEAKS = """
import json, resource, sys, time
import tenure, torch

seen, kept = [], []
monitor = tenure.Monitor(sinks=[seen.append], every=1, folder=sys.argv[1])
used = tenure.sample().process.data
resource.setrlimit(resource.RLIMIT_DATA, (used + (400 << 20),) * 2)
for step in range(1, 1000):
    print(step, flush=True)
    kept.append(torch.ones(1 << 20))
    monitor.step()
    while len(seen) < step:
        time.sleep(0.001)
    world = seen[-1].world
    names = ("host_headroom_bytes", "steps_left", "steps_left_earliest", "steps_left_latest")
    print(json.dumps([step, *(world[name].value for name in names if name in world)]), flush=True)
"""


def test_a_run_dies_when_it_was_said_to(tmp_path: Path) -> None:
    done = run_forked(["-c", LEAKS, tmp_path], timeout=180)
    assert done.returncode == 1
    assert "you tried to allocate 4194304 bytes" in done.stderr
    assert "rank 0 ran out of memory" in done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    death = max(line for line in lines if isinstance(line, int))
    told = [line for line in lines if isinstance(line, list)]
    assert 50 < death < 150
    assert all(len(line) == 2 for line in told[:11]), "said before it could be known"
    forecasts = [line for line in told if len(line) > 2]
    assert len(forecasts) > death / 2
    for step, headroom, left, earliest, latest in forecasts:
        assert headroom < 400 << 20
        assert earliest <= left <= latest
        # The step itself may be the one of which it dies, and the program needs more than tensors.
        assert step + earliest - 3 <= death <= step + latest + 3, (step, left, death)
    (ring,) = rings_of(tmp_path)
    assert ring.state == "failed"
    assert ring.closed is not None
    assert ring.closed.startswith("failed: RuntimeError: ")
    assert ring.rows[-1]["step"] >= death - 1
