"""The state of a sharded model: as pieces for checkpoints, and whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch import nn

from tenure import _C
from tenure.errors import InputError
from tenure.sharding.choosing import Choice
from tenure.sharding.gradients import Group
from tenure.sharding.pieces import Place, StatePiece

__all__ = ["ModelState"]

T = TypeVar("T")
# By module and the name that it has for a parameter. Modules have the hooks that have this, so a
# reference from here would keep the model alive.
Places = weakref.WeakKeyDictionary[nn.Module, dict[str, Place]]


class ModelState:
    """What `model.tenure` does with the values of parameters."""

    sharder: _C.Sharder
    _pieces: list[list[list[nn.Parameter]]]
    _group: Group
    _places: dict[nn.Parameter, Place]  # by piece

    def _keep_state(self, choices: list[Choice], side: dist.ProcessGroup) -> None:
        """From now on the model's state dicts have pieces. `side` has all ranks, on the host."""
        self._side = side
        self._is_first = dist.get_rank(side) == 0
        self._places = {}
        self._by_module: Places = weakref.WeakKeyDictionary()
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        model = next(choice.module for choice in choices if choice.path == "")
        assert model is not None
        self._model = weakref.ref(model)
        self._add_state(choices)

    def _add_state(self, choices: list[Choice]) -> None:
        """These are sharded as well."""
        model = self._living_model()
        rank = dist.get_rank(self._group.ranks)
        for member in (member for choice in choices for member in choice.members):
            home = member.homes[0]
            piece = home.module._parameters[home.name]
            assert piece is not None
            place = _place_of(member.name, home.module.__dict__[home.name], piece, rank)
            self._places[piece] = place
            for home in member.homes:
                self._by_module.setdefault(home.module, {})[home.name] = place
        for module in set(model.modules()) - set(self._hooked):
            _hook(module, self._by_module, is_model=module is model)
            self._hooked.add(module)

    def _living_model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise InputError("the sharded model is gone: keep it as long as its model.tenure")
        return model

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """The whole state of the model on the host, as the model would have it unsharded.

        Put together one unit at a time. No two tensors share memory, so that
        `safetensors.torch.save_file` takes tied parameters, too. A collective.

        Args:
            rank0_only: Whether the other ranks get an empty dict.
        """
        keeps = self._is_first or not rank0_only
        whole: dict[int, torch.Tensor] = {}  # by the place, which says nothing of names
        for unit, flat, _, pieces in self._flats():
            joined = self.sharder.join(unit, flat, [piece.detach() for piece in pieces])
            if keeps:
                places = [id(self._places[piece]) for piece in pieces]
                whole |= {at: one.cpu() for at, one in zip(places, joined, strict=True)}
        if not keeps:
            return {}
        state = self._model_state()
        given = set()
        for key, value in state.items():
            if isinstance(value, StatePiece):
                at = id(value.place)
                state[key] = whole[at].clone() if at in given else whole[at]
                given.add(at)
            elif isinstance(value, torch.Tensor):
                state[key] = value.to("cpu", copy=True)
        return state

    def load_full_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Loads a whole state that the first rank has; what others give is not looked at.

        Sent one parameter at a time, so that no rank needs room for the whole model. A collective.

        Args:
            state: On the first rank, the state dict of the model as it would be unsharded.

        Raises:
            InputError: On all ranks: names or shapes are not the model's; nothing was loaded.
        """
        own = self._model_state()
        others = self._from_first(lambda: _checked(own, state))
        given = state if state and self._is_first else {}
        for key, target in own.items():
            if key in others:
                own[key] = others[key]
                continue
            value = self._sent(given.get(key), target.shape, target.dtype)
            if isinstance(target, StatePiece):
                target.local.copy_(target.place.cut(value))
            else:
                target.copy_(value)
        # For values that are no tensors, and for what modules do beside copying.
        self._living_model().load_state_dict(own)

    def _model_state(self) -> dict[str, Any]:
        return self._living_model().state_dict()

    def _flats(self) -> Iterator[tuple[int, int, list[str], list[nn.Parameter]]]:
        """Unit, number, names and pieces of each."""
        named = self._named()
        for unit, flats in enumerate(self._pieces):
            for flat, pieces in enumerate(flats):
                yield unit, flat, [named[piece] for piece in pieces], pieces

    def _named(self) -> dict[nn.Parameter, str]:
        """The names that pieces have now: a block may have got another number since shard().

        What the model has no more keeps its name, with a word if another one has that now.
        """
        model = self._model()
        out = {} if model is None else {one: name for name, one in model.named_parameters()}
        taken = set(out.values())
        for piece, place in self._places.items():
            if piece not in out:
                name = place.name
                while name in taken:
                    name += " (gone)"
                taken.add(name)
                out[piece] = name
        return out

    def _from_first(self, make: Callable[[], T]) -> T:
        """What the first rank makes, on all; its InputError as well."""
        made: list[Any] = [None]
        if self._is_first:
            try:
                made = [make()]
            except InputError as error:
                made = [error]
        dist.broadcast_object_list(made, group=self._side, group_src=0)
        if isinstance(made[0], InputError):
            raise made[0]
        out: T = made[0]
        return out

    def _sent(
        self, value: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """The first rank's value on all ranks, on the host."""
        if self._is_first and value is not None:
            whole = value.detach().to("cpu", dtype).contiguous()
        else:
            whole = torch.empty(shape, dtype=dtype)
        if whole.numel() > 0:
            # As bytes, for backends know fewer types than tensors do.
            dist.broadcast(whole.view(-1).view(torch.uint8), group=self._side, group_src=0)
        return whole


def _place_of(name: str, whole: torch.Tensor, piece: torch.Tensor, rank: int) -> Place:
    """Each rank has as much of the flat buffer, in which the whole parameter lies somewhere."""
    begin = 0
    if piece.numel() > 0:
        size_of_all = piece.untyped_storage().nbytes() // piece.element_size()
        begin = rank * size_of_all + int(piece.storage_offset()) - int(whole.storage_offset())
    return Place(name, tuple(whole.shape), begin, piece.numel())


def _hook(module: nn.Module, places: Places, *, is_model: bool) -> None:
    """Has the module's own parameters saved as pieces, and loaded from pieces or whole tensors."""

    def save(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for name, place in places.get(module, {}).items():
            if (found := state.get(prefix + name)) is not None:
                state[prefix + name] = StatePiece.of(found.detach(), place)

    def load(
        module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        # Before anything is loaded: the first call of a load_state_dict(), wherever it began.
        if is_model or not prefix:
            _require_loadable(module, state, prefix, metadata, places)
        for name, place in places.get(module, {}).items():
            value = state.get(prefix + name)
            if isinstance(value, StatePiece):
                state[prefix + name] = value.local
            elif isinstance(value, torch.Tensor):
                state[prefix + name] = place.cut(value)

    hooked: Any = module  # torch's stubs have no types for these
    hooked.register_state_dict_post_hook(save)
    hooked.register_load_state_dict_pre_hook(load)


def _require_loadable(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    places: Places,
) -> None:
    # Taken out, for torch has put it into the state dict, where it would stay for the next load.
    if metadata.pop("assign_to_params_buffers", False):
        raise InputError(
            "load_state_dict(assign=True) would take the parameters away from the sharded model: "
            "leave out assign"
        )
    wrong = []
    for path, one in module.named_modules(prefix=prefix.rstrip("."), remove_duplicate=False):
        for name, place in places.get(one, {}).items():
            key = f"{path}.{name}" if path else name
            if isinstance(state.get(key), torch.Tensor):
                wrong += _faults(key, state[key], place)
    if wrong:
        raise InputError(
            f"Error(s) in loading state_dict for {type(module).__name__}:\n\t" + "\n\t".join(wrong)
        )


def _faults(key: str, value: torch.Tensor, place: Place) -> list[str]:
    if tuple(value.shape) != place.shape:
        text = (
            f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, "
            f"the shape in current model is {torch.Size(place.shape)}."
        )
        return [text]
    if isinstance(value, StatePiece) and not value.place.has_elements_of(place):
        text = (
            f"{key} in the state has {value.place}, and this rank has {place}: use "
            "torch.distributed.checkpoint, or model.tenure.full_state_dict(), to load it here."
        )
        return [text]
    return []


def _checked(own: dict[str, Any], state: Mapping[str, Any] | None) -> dict[str, Any]:
    """What of a whole state is no tensor. Raises InputError if it is not of this model."""
    if not isinstance(state, Mapping):
        raise InputError(f"the first rank must have the state dict, not {type(state).__name__}")
    if missing := [key for key in own if key not in state]:
        raise InputError(f"the state has no {_some(missing)}: give that of the same model")
    if unknown := [key for key in state if key not in own]:
        raise InputError(f"the model has no {_some(unknown)}: give the state of the same model")
    others = {}
    for key, target in own.items():
        value = state[key]
        if not isinstance(target, torch.Tensor):
            others[key] = value
        elif not isinstance(value, torch.Tensor) or isinstance(value, StatePiece):
            raise InputError(f"{key} in the state is a {type(value).__name__}, not a whole tensor")
        elif value.shape != target.shape:
            raise InputError(
                f"{key} has shape {tuple(value.shape)} in the state and {tuple(target.shape)} "
                "in the model: give the state of the same model"
            )
    return others


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
