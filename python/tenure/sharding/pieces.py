"""Pieces of a model's state that know what they are pieces of, for checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tenure.errors import InputError

if TYPE_CHECKING:  # they take seconds to load
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["Box", "Place", "StatePiece", "boxes_of"]


@dataclass(frozen=True)
class Box:
    """A part of a tensor that is a range in each of its dimensions."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def inside(self, row: int) -> Box:
        """The same in one row of a tensor with a dimension more."""
        return Box((row, *self.offsets), (1, *self.sizes))


def boxes_of(shape: tuple[int, ...], begin: int, end: int) -> list[Box]:
    """A range of a tensor's elements in row-major order, as boxes in that order.

    They are at most 2 * len(shape) - 1. REQUIRES a range that is not empty.
    """
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # of whole rows, the last one excluded
    if first > last:
        return [
            box.inside(last) for box in boxes_of(shape[1:], begin - last * row, end - last * row)
        ]
    out = []
    if begin < first * row:
        before = boxes_of(shape[1:], begin - (first - 1) * row, row)
        out += [box.inside(first - 1) for box in before]
    if first < last:
        out.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    if last * row < end:
        out += [box.inside(last) for box in boxes_of(shape[1:], 0, end - last * row)]
    return out


@dataclass(frozen=True)
class Place:
    """Which elements of a parameter a rank has, counted in row-major order."""

    name: str  # the parameter's first one
    shape: tuple[int, ...]  # of the whole parameter
    begin: int
    size: int

    def __str__(self) -> str:
        """For messages: "elements 0 to 12 of w of shape (3, 8)"."""
        end = self.begin + self.size
        return f"elements {self.begin} to {end} of {self.name} of shape {self.shape}"

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """These elements of a whole tensor. REQUIRES its shape."""
        return whole.reshape(-1).narrow(0, self.begin, self.size)

    def is_whole(self) -> bool:
        """Whether there are no other elements: on one rank, and of a small parameter."""
        return self.size == math.prod(self.shape)

    def has_elements_of(self, other: Place) -> bool:
        """Whether both are of the same elements; a tied parameter may have another name."""
        return (self.shape, self.begin, self.size) == (other.shape, other.begin, other.size)

    def boxes(self) -> list[Box]:
        """The same elements as boxes; a parameter without elements is one on every rank."""
        if math.prod(self.shape) == 0:
            return [Box(tuple(0 for _ in self.shape), self.shape)]
        return boxes_of(self.shape, self.begin, self.begin + self.size) if self.size else []


class StatePiece(torch.Tensor):
    """This rank's piece of a tensor that is sharded, in the shape of the whole tensor.

    `torch.distributed.checkpoint` saves and loads it as the whole tensor, on any number of ranks.
    It can be copied, moved, saved and loaded; it cannot be computed with.

    Attributes:
        local: The elements that this rank has, in one dimension.
        place: Which elements of which parameter they are.
    """

    local: torch.Tensor
    place: Place

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(local: torch.Tensor, place: Place) -> StatePiece:
        """The same memory, as a piece."""
        make: Any = torch.Tensor._make_wrapper_subclass
        piece: StatePiece = make(StatePiece, place.shape, dtype=local.dtype, device=local.device)
        piece.local = local
        piece.place = place
        return piece

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Copies and moves; raises InputError for all else."""
        kwargs = kwargs or {}
        first, other = (*args, None, None)[:2]
        if func is _copy and isinstance(other, StatePiece) and other.place.is_whole():
            return first.copy_(other.local.view(other.shape), *args[2:], **kwargs)
        if isinstance(first, StatePiece):
            if func in _OF_LOCAL:
                return cls.of(func(first.local, **kwargs), first.place)
            if func is _new_empty and tuple(args[1]) == first.place.shape:
                return cls.of(first.local.new_empty(first.place.size, **kwargs), first.place)
            alike = isinstance(other, StatePiece) and first.place.has_elements_of(other.place)
            if func is _copy and alike:
                first.local.copy_(args[1].local, *args[2:], **kwargs)
                return first
        piece = next((one for one in args if isinstance(one, StatePiece)), None)
        what = "a StatePiece is one rank's piece" if piece is None else f"this has {piece.place}"
        raise InputError(
            f"{what}, and {func} needs all of it: "
            "use model.tenure.full_state_dict(), or torch.distributed.checkpoint"
        )

    def untyped_storage(self) -> torch.UntypedStorage:
        """None: who saves tensors by their memory, as safetensors does, would save a piece."""
        raise InputError(
            f"this has {self.place}, and saving it so needs all of it: use "
            "model.tenure.full_state_dict(), or torch.distributed.checkpoint"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        """What it is a piece of, and the elements."""
        return f"StatePiece({self.place}: {self.local})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For torch.save: the elements, and which they are."""
        place = self.place
        return _rebuild_piece, (self.local, place.name, place.shape, place.begin)

    def __deepcopy__(self, memo: dict[int, Any]) -> StatePiece:
        """A copy of this rank's elements alone, not of the storage that others share."""
        out = StatePiece.of(self.local.clone(), self.place)
        memo[id(self)] = out
        return out

    # The protocol by which torch.distributed.checkpoint takes what is not whole.

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        """What a checkpoint gets from this rank: a box each."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        size = torch.Size(self.place.shape)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What this rank wants from a checkpoint."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in self.place.boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """One of the boxes, in this rank's memory."""
        at = 0
        for box in self.place.boxes():
            size = math.prod(box.sizes)
            if index.offset is not None and tuple(index.offset) == box.offsets:
                return self.local.narrow(0, at, size).view(box.sizes)
            at += size
        raise InputError(f"this rank has {self.place}: nothing of it begins at {index.offset}")


_aten = torch.ops.aten
_OF_LOCAL = {_aten.detach.default, _aten.clone.default, _aten._to_copy.default, _aten.alias.default}
_copy = _aten.copy_.default
_new_empty = _aten.new_empty.default


def _rebuild_piece(
    local: torch.Tensor, name: str, shape: tuple[int, ...], begin: int
) -> StatePiece:
    return StatePiece.of(local, Place(name, tuple(shape), begin, local.numel()))


# So that torch.load() reads pieces with weights_only=True, its default.
torch.serialization.add_safe_globals([_rebuild_piece])
