"""Modules of torch::nn in a pipeline, on ranks that are Python processes: see tests/cpp/ranks."""

from __future__ import annotations

import pytest
from torch import distributed as dist

import tenure
from ranks import run_ranks


def every_schedule(_rank: int, _world: int) -> None:
    import tenure_rank_cases as cases

    for name in sorted(
        {*tenure.pipelining.schedule_names()} - {"looped-bfs"}
    ):  # adds in another order
        cases.train_pipelined(dist.group.WORLD, name)


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_are_those_of_the_whole_model(world: int) -> None:
    run_ranks(every_schedule, world)
