"""What another process does with RTensors, for tests/python/integrations/test_areal.py."""

from __future__ import annotations

from typing import Any

import torch

import tenure
from tenure.integrations import areal


def join(job: str, role: str, rank: int) -> None:
    torch.set_num_threads(1)
    tenure.store.join(job, role, rank)


def localize(tree: Any) -> Any:
    """As lists, so that what travels back is no tensor."""
    return tenure.store.map_tree(areal.RTensor.localize(tree), lambda tensor: tensor.tolist())


def remotize(tree: Any, **options: Any) -> Any:
    return areal.RTensor.remotize(tree, node_addr="elsewhere", **options)


def stats() -> dict[str, int]:
    return (
        areal.storage_stats()
        | areal.fetch_buffer_stats()
        | {"kept_bytes": tenure.store.stats()["kept_bytes"]}
    )
