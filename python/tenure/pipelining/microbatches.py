"""What a rank was given for a step, in microbatches."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from tenure.errors import InputError

__all__ = ["join", "rows_of", "split"]


def _rows(tensors: list[torch.Tensor], what: str) -> int:
    rows = {tensor.shape[0] for tensor in tensors}
    if len(rows) > 1:
        raise InputError(
            f"the {what} has tensors of {' and '.join(map(str, sorted(rows)))} rows: all are split "
            "along their first dimension, which must be the batch"
        )
    return rows.pop()


def split(given: Any, microbatches: int, what: str) -> list[Any]:
    """A nest of tensors as one for each microbatch, split along the first dimension.

    Sizes differ by one at most. What is no tensor, or one of no dimension, is in all of them.
    """
    leaves, spec = pytree.tree_flatten(given)
    parts: list[list[Any]] = [[leaf] * microbatches for leaf in leaves]
    batched = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0
    ]
    if batched:
        rows = _rows([leaves[i] for i in batched], what)
        if rows < microbatches:
            raise InputError(
                f"the {what} has {rows} rows, too few for {microbatches} microbatches: pass a "
                "larger batch, or make the pipeline with fewer microbatches"
            )
    for i in batched:
        parts[i] = list(torch.tensor_split(leaves[i], microbatches))
    return [
        pytree.tree_unflatten([part[number] for part in parts], spec)
        for number in range(microbatches)
    ]


def join(outputs: list[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
    """What a stage returned for each microbatch, as if it had been called with the whole batch.

    Tensors are joined along their first dimension; those of no dimension make a new one.
    """
    counts = sorted({len(one) for one in outputs})
    if len(counts) > 1:
        raise InputError(
            f"the last stage returned {' and '.join(map(str, counts))} outputs for different "
            "microbatches: they cannot be joined"
        )
    return [_joined(list(parts), i) for i, parts in enumerate(zip(*outputs, strict=True))]


def _joined(parts: list[torch.Tensor | None], number: int) -> torch.Tensor | None:
    tensors = [part for part in parts if part is not None]
    if not tensors:
        return None
    if len(tensors) < len(parts):
        raise InputError(
            f"output {number} of the last stage is None for some microbatches and a tensor for "
            "others: they cannot be joined"
        )
    if all(tensor.dim() == 0 for tensor in tensors):
        return torch.stack(tensors)
    return torch.cat(tensors)


def rows_of(parts: list[Any]) -> list[int]:
    """The rows of each microbatch, if it has a tensor with any."""
    counts = [_row_count(part) for part in parts]
    return counts if any(counts) else []


def _row_count(part: Any) -> int:
    tensors = [
        leaf
        for leaf in pytree.tree_leaves(part)
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0
    ]
    return tensors[0].shape[0] if tensors else 0
