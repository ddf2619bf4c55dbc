"""What recordings have of a sharded model."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import torch

import tenure
from ranks import run_ranks
from sharded_models import Net, batch_of, loss_of


def printed(rank: int, _world: int) -> str:
    model = tenure.shard(Net(), prefetch=0)
    for step in range(2):
        loss_of(model, batch_of(rank, step)).backward()
    return str(model.tenure.stats())


def test_they_can_be_printed() -> None:
    [text] = run_ranks(printed, 1)
    first, second, head, *units = text.splitlines()
    assert re.fullmatch(r"Shard: \S+ KiB of pieces, 0 B gathered now, after 2 passes", first), text
    assert "(excess 1.00)" in second
    assert head.split()[:3] == ["unit", "bytes", "gathers"]
    assert [line.split()[0] for line in units] == ["blocks.0", "blocks.1", "blocks.2", "Net"]
    assert len({len(line) for line in units}) == 1


def watched(rank: int, _world: int, folder: str) -> list[dict[str, int]]:
    out = Path(folder, f"{rank}.tenure")
    with tenure.watch(out, quiet=True):
        model = tenure.shard(Net(), prefetch=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            loss_of(model, batch_of(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    [path] = out.iterdir()
    with closing(sqlite3.connect(path)) as file:
        rows = file.execute("SELECT step, name, value FROM figures WHERE part = 'shard'").fetchall()
    found: dict[int, dict[str, int]] = {}
    for step, name, value in rows:
        found.setdefault(step, {})[name] = value
    return [found[step] for step in sorted(found)]


def test_each_step_has_its_figures(tmp_path: Path) -> None:
    for steps in run_ranks(watched, 2, str(tmp_path)):
        assert len(steps) == 4
        for step in steps:
            assert step["gathered_bytes"] == 0
            assert step["peak_gathered_bytes"] == step["peak_needed_bytes"] > 0
            assert step["moved_bytes"] > step["reduced_bytes"] > 0
            assert step["release_lag_us"] >= 0
            assert step["waited_us"] > 0
