"""Sharded models of C++, on ranks that are Python processes: see tests/cpp/ranks."""

from __future__ import annotations

import pytest
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from ranks import run_ranks


def all_cases(_rank: int, _world: int) -> tuple[list[float], list[float]]:
    import tenure_rank_cases as cases

    side = dist.new_group(backend="gloo")
    store = c10d._get_default_store()
    names = ("release_sharded", "misuse_sharded", "failing_sharded", "partly_sharded")
    for name in (*names, "written_in_backward"):
        getattr(cases, name)(dist.group.WORLD, side, c10d.PrefixStore(name, store))
    losses = cases.train_sharded(dist.group.WORLD, side, c10d.PrefixStore("train", store))
    return losses.plain, losses.sharded


def held_cases(_rank: int, _world: int) -> None:
    import tenure_rank_cases as cases

    side = dist.new_group(backend="gloo")
    names = ("gradients", "kinds", "evaluation", "misuse", "alone")
    for case in (*(getattr(cases, f"held_{name}") for name in names), cases.joined_pieces):
        store = c10d.PrefixStore(case.__name__, c10d._get_default_store())
        case(dist.group.WORLD, side, store)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_model_that_is_held(world: int) -> None:
    run_ranks(held_cases, world)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_it_is_data_parallel_training(world: int) -> None:
    for plain, sharded in run_ranks(all_cases, world):
        assert sharded == pytest.approx(plain, rel=1e-5)
        assert sharded[-1] < sharded[0]
