"""Pieces of gradients, whose norm is that of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

__all__ = ["Group", "Piece"]

_Function = Callable[..., Any]


@dataclass(frozen=True)
class Group:
    """Ranks that each have a piece, and where their collectives take tensors from."""

    ranks: dist.ProcessGroup
    device: torch.device

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """In place, wherever the tensor is."""
        there = tensor.to(self.device)
        dist.all_reduce(there, op, group=self.ranks)
        tensor.copy_(there)


class Piece(torch.Tensor):
    """This rank's piece of a gradient.

    For all operators it is the plain tensor that it holds, but for norms: those are of the whole
    gradient, over all ranks, so that `torch.nn.utils.clip_grad_norm_` clips by the global norm; and
    but for the check of `GradScaler`, which finds what is not finite on any rank. All ranks must
    ask, as for any collective.
    """

    group: Group

    @staticmethod
    def of(tensor: torch.Tensor, group: Group) -> Piece:
        """The same memory, as a piece of what the group has together."""
        piece = tensor.as_subclass(Piece)
        piece.group = group
        return piece

    @classmethod
    def __torch_function__(
        cls,
        func: _Function,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Norms and the check of `GradScaler` over all ranks, all else on this one."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch._foreach_norm:
                return _norms(list(args[0]), *args[1:], **kwargs)
            if func in _OF_ONE and _is_of_all(func, args, kwargs):
                return _norms([args[0]], *args[1:2], **kwargs)[0]
            result = func(*args, **kwargs)
            if func is torch._amp_foreach_non_finite_check_and_unscale_:
                _largest(args[1], args[0])
            return result


_OF_ONE = {torch.norm, torch.Tensor.norm, torch.linalg.vector_norm, torch.linalg.norm}


def _is_of_all(func: _Function, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether it is one number; by rows and columns a piece has none."""
    if len(args) > 2 or kwargs.get("dim") is not None or kwargs.get("keepdim"):
        raise ValueError(
            f"{func.__name__}() of a sharded gradient is that of the whole: "
            "leave out dim and keepdim"
        )
    return True


def _group_of(tensors: Sequence[torch.Tensor]) -> Group:
    return next(tensor.group for tensor in tensors if isinstance(tensor, Piece))


def _norms(
    tensors: list[torch.Tensor],
    ord: Any = 2,  # noqa: A002  as torch calls it
    p: Any = None,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Of each: the pieces' with one collective for all of them."""
    order = float(ord if p is None or p == "fro" else p)
    local = [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]
    pieces = [i for i, tensor in enumerate(tensors) if isinstance(tensor, Piece)]
    together = torch.stack([local[i].double() for i in pieces])
    group = _group_of(tensors)
    if order == float("inf"):
        group.all_reduce(together, dist.ReduceOp.MAX)
    elif order == float("-inf"):
        group.all_reduce(together, dist.ReduceOp.MIN)
    else:
        together = together if order == 0 else together.pow(order)
        group.all_reduce(together, dist.ReduceOp.SUM)
        together = together if order == 0 else together.pow(1 / order)
    for i, norm in zip(pieces, together, strict=True):
        local[i] = norm.to(local[i].dtype)
    return local


def _largest(found: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    _group_of(tensors).all_reduce(found, dist.ReduceOp.MAX)
