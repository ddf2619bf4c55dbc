"""Pieces of gradients, whose norm is that of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

__all__ = ["Group", "Piece", "accumulate"]

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
    ask, as for any collective. What an operator makes of it element by element is a piece, too.
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
                return _foreach_norms(*args, **kwargs)
            if func in _OF_ONE:
                return _norm(func.__name__, *args, **kwargs)
            result = func(*args, **kwargs)
            if func is torch._amp_foreach_non_finite_check_and_unscale_:
                for _, group in _by_group(args[0]):
                    group.all_reduce(args[1], dist.ReduceOp.MAX)
            if func in _TOGETHER:
                return _all_together(result, args[0] if args else kwargs["tensors"])
            return _still_pieces(result, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Piece:
        """A piece of the same, in memory of its own."""
        out = Piece.of(self.as_subclass(torch.Tensor).clone(), self.group)
        memo[id(self)] = out
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as the plain tensor that it holds."""
        plain: Any = self.as_subclass(torch.Tensor)
        return plain.__reduce_ex__(protocol)


def accumulate(parameter: Any, gradient: Piece) -> None:
    """Adds to a parameter's gradient as autograd would, with the parameter's hooks."""
    found: Any = gradient
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(found)
        found = found if changed is None else changed
    if parameter.grad is None:
        parameter.grad = found
    else:  # which may be a plain tensor, if the loss reads the parameter itself
        parameter.grad = Piece.of(parameter.grad.add_(found), gradient.group)
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)


_OF_ONE = {torch.norm, torch.Tensor.norm, torch.linalg.vector_norm, torch.linalg.norm}


_TOGETHER = {torch.cat, torch.concat, torch.concatenate, torch.hstack}


def _all_together(result: torch.Tensor, given: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pieces end to end have the norm of all of them, unless there is something else among them."""
    groups = _by_group(given)
    if len(groups) == 1 and len(groups[0][0]) == len(given):
        return Piece.of(result, groups[0][1])
    return result


def _still_pieces(result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What was made of pieces element by element; what was written to stays what it was."""
    given = args[0] if args else None
    if isinstance(result, list | tuple) and isinstance(given, list | tuple):
        if len(result) == len(given):
            both = zip(result, given, strict=True)
            return type(result)(_as(one, source) for one, source in both)
        return result
    if result is given or result is kwargs.get("out"):
        return result
    piece = next((one for one in args if isinstance(one, Piece)), None)
    return _as(result, piece)


def _as(result: Any, piece: Any) -> Any:
    plain = isinstance(result, torch.Tensor) and not isinstance(result, Piece)
    if plain and isinstance(piece, Piece) and result.shape == piece.shape:
        return Piece.of(result, piece.group)
    return result


def _by_group(tensors: Sequence[torch.Tensor]) -> list[tuple[list[int], Group]]:
    """Which of them are pieces of what, in the order in which they come: alike on all ranks."""
    found: dict[dist.ProcessGroup, tuple[list[int], Group]] = {}
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, Piece):
            found.setdefault(tensor.group.ranks, ([], tensor.group))[0].append(i)
    return list(found.values())


def _norm(
    name: str,
    tensor: torch.Tensor,
    ord: Any = None,  # noqa: A002  as torch calls it
    dim: Any = None,
    keepdim: bool = False,
    *,
    p: Any = None,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One number; by rows and columns a piece has none."""
    if dim is not None or keepdim or out is not None:
        raise ValueError(
            f"{name}() of a sharded gradient is that of the whole: leave out dim, keepdim and out"
        )
    order = ord if p is None else p
    return _norms([tensor], 2.0 if order in (None, "fro") else float(order), dtype)[0]


def _foreach_norms(
    tensors: Sequence[torch.Tensor],
    ord: Any = 2,  # noqa: A002  as torch calls it
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    return _norms(list(tensors), float(ord), dtype)


def _norms(
    tensors: list[torch.Tensor], order: float, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """Of each: the pieces' with one collective for all of a group."""
    local = [_local_norm(tensor, order, dtype) for tensor in tensors]
    for pieces, group in _by_group(tensors):
        together = _over_ranks(torch.stack([local[i].double() for i in pieces]), order, group)
        for i, norm in zip(pieces, together, strict=True):
            local[i] = norm.to(local[i].dtype)
    return local


def _over_ranks(norms: torch.Tensor, order: float, group: Group) -> torch.Tensor:
    if math.isinf(order):
        # What is largest says nothing of what is no number: that goes along.
        unknown = norms.isnan()
        both = torch.stack([norms.masked_fill(unknown, 0) * math.copysign(1, order), unknown])
        group.all_reduce(both, dist.ReduceOp.MAX)
        return (both[0] * math.copysign(1, order)).masked_fill(both[1] > 0, math.nan)
    together = norms if order == 0 else norms.pow(order)
    group.all_reduce(together, dist.ReduceOp.SUM)
    return together if order == 0 else together.pow(1 / order)


def _local_norm(tensor: torch.Tensor, order: float, dtype: torch.dtype | None) -> torch.Tensor:
    if tensor.numel() == 0 and math.isinf(order):
        return tensor.new_full((), 0.0 if order > 0 else math.inf, dtype=dtype)
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, order, dtype=dtype)
    return norm
