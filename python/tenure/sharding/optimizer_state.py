"""The state of an optimizer of a sharded model, by the names of parameters."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from tenure.errors import InputError
from tenure.sharding.initial_state import initial_state
from tenure.sharding.pieces import Place, StatePiece
from tenure.sharding.state import ModelState

__all__ = ["OptimizerState"]

ByName = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class _Whole:
    """A tensor that is sent apart, or put together from pieces."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class OptimizerState(ModelState):
    """What `model.tenure` does with the state of optimizers.

    Such a state is `{"state": {name: {key: value}}, "param_groups": [{…, "params": [name, …]}]}`,
    as `torch.distributed.checkpoint.state_dict` has it.
    """

    def full_optimizer_state(
        self, optimizer: Optimizer, *, rank0_only: bool = False
    ) -> dict[str, Any]:
        """The whole state of an optimizer on the host, by the names of parameters. A collective.

        Args:
            optimizer: One of `model.parameters()`, or of some of them.
            rank0_only: Whether the other ranks get an empty dict.

        Raises:
            InputError: It has a parameter of another model, or a state that is not by elements.
        """
        mine = self._by_name(optimizer)
        places = self._places_by_name()
        kinds = self._agreed(
            {
                name: {key: _kind(places[name], name, key, value) for key, value in values.items()}
                for name, values in mine.items()
            }
        )
        keeps = self._is_first or not rank0_only
        state: ByName = {name: dict(values) for name, values in kinds.items()}
        for unit, flat, names, pieces in self._flats():
            for kind in _kinds_among(names, kinds):
                given = [
                    _own(piece, kind, mine.get(name, {}), kinds.get(name, {}))
                    for name, piece in zip(names, pieces, strict=True)
                ]
                joined = self.sharder.join(unit, flat, given)
                for name, had, whole in zip(names, given, joined, strict=True):
                    if keeps and had is not None:
                        state[name][kind[0]] = whole.cpu()
        return {"state": state, "param_groups": self._groups(optimizer)} if keeps else {}

    def load_full_optimizer_state(
        self, optimizer: Optimizer, state: Mapping[str, Any] | None
    ) -> None:
        """Loads a whole state that the first rank has; what others give is not looked at.

        Sent one tensor at a time. An optimizer that has no state yet gets it here. A collective.

        Args:
            optimizer: One of `model.parameters()`, in the groups that the state has.
            state: On the first rank, what `full_optimizer_state` gave.

        Raises:
            InputError: On all ranks: names, groups or shapes are not those of the optimizer;
                nothing was loaded.
        """
        outline = self._from_first(lambda: self._outline(optimizer, state))
        given: ByName = state["state"] if state and self._is_first else {}
        places = self._places_by_name()
        mine: ByName = {}
        for name, values in outline["state"].items():
            mine[name] = {}
            for key, value in values.items():
                if isinstance(value, _Whole):
                    sent = given.get(name, {}).get(key)
                    whole = self._sent(sent, value.shape, value.dtype)
                    # A copy, for a view would keep the whole tensor.
                    value = places[name].cut(whole).clone()
                mine[name][key] = copy.deepcopy(value)
        self._install(optimizer, mine, outline["param_groups"])

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer as pieces, for `torch.distributed.checkpoint`.

        A parameter without state yet has what its first step would begin with, so that a checkpoint
        can be loaded into it; the optimizer itself is as it was.

        Args:
            optimizer: One of `model.parameters()`, or of some of them.

        Raises:
            InputError: It has a parameter of another model, or a state that is not by elements.
        """
        found = self._by_name(optimizer)
        groups = self._groups(optimizer)
        held = self._held()
        names = (name for group in groups for name in group["params"])
        new = [held[name] for name in names if held[name].requires_grad and name not in found]
        begun = initial_state(optimizer, new)
        found |= {name: begun[piece] for name, piece in held.items() if piece in begun}
        places = self._places_by_name()
        state = {
            name: {key: _as_piece(places[name], name, key, value) for key, value in values.items()}
            for name, values in found.items()
        }
        return {"state": state, "param_groups": groups}

    def load_sharded_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Loads what `sharded_optimizer_state` gave, after a checkpoint was read into it.

        Args:
            optimizer: One of `model.parameters()`, in the groups that the state has.
            state: As `sharded_optimizer_state` gave it on this rank.

        Raises:
            InputError: Names, groups or pieces are not those of the optimizer; nothing was loaded.
        """
        self._require_same_groups(optimizer, state)
        places = self._places_by_name()
        mine: ByName = {}
        for name, values in state["state"].items():
            mine[name] = {}
            for key, value in values.items():
                if isinstance(value, StatePiece):
                    if not value.place.has_elements_of(places[name]):
                        raise InputError(
                            f"{key} of {name} has {value.place}, and this rank has "
                            f"{places[name]}: use torch.distributed.checkpoint to load it"
                        )
                    value = value.local
                elif isinstance(value, torch.Tensor) and value.dim() > 0:
                    raise InputError(
                        f"{key} of {name} is no piece: use load_full_optimizer_state() for it"
                    )
                mine[name][key] = value
        self._install(optimizer, mine, state["param_groups"])

    def _held(self) -> dict[str, nn.Parameter]:
        return {
            name: piece
            for _, _, names, pieces in self._flats()
            for name, piece in zip(names, pieces, strict=True)
        }

    def _places_by_name(self) -> dict[str, Place]:
        return {name: self._places[piece] for name, piece in self._held().items()}

    def _groups(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """The optimizer's groups with names for parameters."""
        names = {piece: name for name, piece in self._held().items()}
        out = []
        for group in optimizer.param_groups:
            if foreign := [one for one in group["params"] if one not in names]:
                raise InputError(
                    f"the optimizer has a parameter of shape {tuple(foreign[0].shape)} that is "
                    "not of this model: make it with model.parameters() after tenure.shard()"
                )
            rest = {key: value for key, value in group.items() if key != "params"}
            named = [names[parameter] for parameter in group["params"]]
            out.append({**copy.deepcopy(rest), "params": named})
        return out

    def _by_name(self, optimizer: Optimizer) -> ByName:
        """The state of those parameters that have one; tensors are the optimizer's own."""
        held = self._held()
        names = [name for group in self._groups(optimizer) for name in group["params"]]
        found = {name: optimizer.state.get(held[name]) for name in names}
        return {name: dict(values) for name, values in found.items() if values}

    def _agreed(self, kinds: ByName) -> ByName:
        """Of all ranks: a rank must not wait for a piece of what another one does not have."""
        outline = {
            name: {key: kind for key, kind in values.items() if isinstance(kind, _Whole)}
            for name, values in kinds.items()
        }
        if len(set(self._told(repr(outline)))) == 1:
            return kinds
        out: ByName = {}
        for told in self._told(kinds):
            for name, values in told.items():
                out[name] = values | out.get(name, {})
        return out

    def _told(self, mine: Any) -> list[Any]:
        out: list[Any] = [None] * dist.get_world_size(self._side)
        dist.all_gather_object(out, mine, group=self._side)
        return out

    def _require_same_groups(self, optimizer: Optimizer, state: Mapping[str, Any] | None) -> None:
        if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
            raise InputError('an optimizer\'s state has "state" and "param_groups"')
        groups = [group["params"] for group in self._groups(optimizer)]
        known = {name for names in groups for name in names}
        saved = [group["params"] for group in state["param_groups"]]
        named = [*state["state"], *(name for names in saved for name in names)]
        if unknown := [name for name in named if name not in known]:
            raise InputError(
                f"the optimizer has no parameter {unknown[0]}, and the state has: "
                "give the state of an optimizer of the same model"
            )
        if [set(names) for names in groups] != [set(names) for names in saved]:
            raise InputError(
                f"the optimizer's {len(groups)} groups have other parameters than the state's "
                f"{len(saved)}: make it with the groups that were saved"
            )

    def _outline(self, optimizer: Optimizer, state: Mapping[str, Any] | None) -> dict[str, Any]:
        """A whole state without the tensors that are sent apart."""
        self._require_same_groups(optimizer, state)
        assert state is not None
        held, places = self._held(), self._places_by_name()
        # What such a parameter has for its element looks like a number: a step tells which it is.
        scalars = [held[name] for name in state["state"] if not places[name].shape]
        begun = initial_state(optimizer, scalars)
        out: ByName = {}
        for name, values in state["state"].items():
            shape = places[name].shape
            out[name] = {}
            for key, value in values.items():
                if not isinstance(value, torch.Tensor) or (shape and value.dim() == 0):
                    out[name][key] = value
                elif tuple(value.shape) != shape or isinstance(value, StatePiece):
                    raise InputError(
                        f"{key} of {name} has shape {tuple(value.shape)} and the parameter {shape}"
                        ": give what full_optimizer_state() gave"
                    )
                elif not shape and getattr(begun.get(held[name], {}).get(key), "ndim", 0) == 0:
                    out[name][key] = value
                else:
                    out[name][key] = _Whole(shape, value.dtype)
        return {"state": out, "param_groups": state["param_groups"]}

    def _install(self, optimizer: Optimizer, state: ByName, saved: list[dict[str, Any]]) -> None:
        groups = [group["params"] for group in self._groups(optimizer)]
        numbers = {name: number for number, name in enumerate(itertools.chain(*groups))}
        optimizer.load_state_dict(
            {
                "state": {numbers[name]: values for name, values in state.items()},
                "param_groups": [
                    {**group, "params": [numbers[name] for name in names]}
                    for group, names in zip(saved, groups, strict=True)
                ],
            }
        )


def _kind(place: Place, name: str, key: str, value: Any) -> Any:
    """What a value is of the whole parameter: a tensor like it, or the same on every rank."""
    piece = _as_piece(place, name, key, value)
    if isinstance(piece, StatePiece):
        return _Whole(piece.place.shape, piece.dtype)
    return value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _as_piece(place: Place, name: str, key: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if value.shape == (place.size,):
        return StatePiece.of(value.detach().as_subclass(torch.Tensor), place)
    raise InputError(
        f"the optimizer's {key} of {name} has shape {tuple(value.shape)}, neither that of the "
        f"piece, ({place.size},), nor a scalar's: save optimizer.state_dict() on each rank"
    )


def _kinds_among(names: list[str], kinds: ByName) -> list[tuple[str, torch.dtype]]:
    """What is joined for a flat: key and dtype, in an order that all ranks agree on."""
    pairs = (pair for name in names for pair in kinds.get(name, {}).items())
    return list(dict.fromkeys((key, kind.dtype) for key, kind in pairs if isinstance(kind, _Whole)))


def _own(
    piece: nn.Parameter, kind: tuple[str, torch.dtype], mine: dict[str, Any], kinds: dict[str, Any]
) -> torch.Tensor | None:
    """This rank's part in a join: nothing if no rank has such a thing of the parameter."""
    key, dtype = kind
    agreed = kinds.get(key)
    if not isinstance(agreed, _Whole) or agreed.dtype != dtype:
        return None
    # A rank whose optimizer has not met the parameter has zeros of it.
    found = mine.get(key)
    found = torch.zeros_like(piece, dtype=dtype) if found is None else found
    plain: torch.Tensor = found.detach().as_subclass(torch.Tensor)
    return plain
