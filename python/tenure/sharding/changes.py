"""What a program does to a model that is sharded: it moves it or a piece, or adds parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks

from tenure.errors import InputError
from tenure.sharding.choosing import WRAPPERS, Home, Member, kinds_of
from tenure.sharding.identity import identity_of

__all__ = ["Arrivals", "Memory", "follow_freezing", "refuse_moves"]


def refuse_moves(module: nn.Module) -> None:
    """Has `module.to()` and its like raise InputError if they would replace pieces."""
    weak = weakref.ref(module)

    def apply(change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        one = weak()
        assert one is not None
        for name, piece in one._parameters.items():
            if piece is None or name not in one.__dict__:
                continue
            if not _stays(piece, change):
                raise InputError(
                    f"{name} of {type(one).__name__} is sharded and cannot be moved, shared or "
                    "cast: do it before tenure.shard()"
                )
        plain: Any = type(one)._apply  # which has no types
        changed: nn.Module = plain(one, change, recurse)
        return changed

    module.__dict__["_apply"] = apply


def _stays(piece: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether a change leaves a tensor of this kind where it is. It is tried on another one."""
    tried = torch.zeros(1, dtype=piece.dtype, device=piece.device)
    before = tried.data_ptr()
    changed = change(tried)
    return (piece.device, piece.dtype, before) == (
        changed.device,
        changed.dtype,
        changed.data_ptr(),
    )


class Memory:
    """Where pieces are: what is gathered is there, whatever tensor a piece is given."""

    def __init__(self) -> None:
        """Of no piece."""
        self._names: list[str] = []
        self._pieces: list[nn.Parameter] = []
        self._known: list[tuple[int, int]] = []
        # By a module's parameters, which are kept without it, and its name for one.
        self._homes: dict[tuple[int, str], tuple[dict[str, Any], str, nn.Parameter]] = {}

    def watch(self, members: list[Member], pieces: list[nn.Parameter]) -> None:
        """These too, from now on."""
        self._names += [member.name for member in members]
        self._pieces += pieces
        self._known += _places(pieces)
        for member, piece in zip(members, pieces, strict=True):
            for home in member.homes:
                registered: Any = home.module._parameters
                self._homes[id(registered), home.name] = registered, member.name, piece

    def require(self) -> None:
        """Raises InputError if a piece is elsewhere: by `.data =`, or another one in its place."""
        for (_, short), (registered, name, piece) in self._homes.items():
            found = registered.get(short)
            if found is not None and found is not piece:
                raise InputError(
                    f"{name} has another tensor in its place, by torch.func.functional_call say, "
                    "which the model would not compute with: a sharded model has its own only"
                )
        now = _places(self._pieces)
        if now == self._known:
            return
        told = zip(self._names, now, self._known, strict=True)
        names = [name for name, one, known in told if one != known]
        raise InputError(
            f"{', '.join(names[:4])}: the piece that model.parameters() gives has got another "
            "tensor (`.data =`), which the model would not compute with: write into the piece "
            "itself, under torch.no_grad() with copy_()"
        )


def follow_freezing(
    known: list[list[bool]], pieces: list[list[nn.Parameter]], wholes: list[list[bool]]
) -> list[list[bool]]:
    """Which are trained, by flat: a program says it of pieces, or of what modules have.

    Pieces are told what was said of the whole; where both have changed, theirs holds.
    """
    out = [[piece.requires_grad for piece in flat] for flat in pieces]
    if out == known == wholes:
        return out
    for flat, trained in enumerate(out):
        for index, one in enumerate(trained):
            if one == known[flat][index] != wholes[flat][index]:
                trained[index] = wholes[flat][index]
                pieces[flat][index].requires_grad_(trained[index])
    return out


def _places(pieces: list[nn.Parameter]) -> list[tuple[int, int]]:
    return [(piece.data_ptr(), piece.numel()) for piece in pieces]


def _put_back(module: nn.Module, name: str, new: Any) -> nn.Parameter | None:
    """One that is set where it is already, by `tie_weights()` say, leaves all as it was."""
    identity = identity_of(new)
    model = identity.model() if identity is not None else None
    if identity is None or model is None:
        return None
    piece = model.piece_of(identity)
    if module._parameters.get(name) is not piece:
        return None
    module.__dict__[name] = new
    return piece


class Arrivals:
    """Parameters and modules that a program adds to a model. Costs nothing in a step without."""

    def __init__(self, model: nn.Module) -> None:
        """Listens from now on, as long as the model lives."""
        self._model = weakref.ref(model)
        self._known = weakref.WeakSet(model.modules())
        self._some = False
        weak = weakref.ref(self)

        def listen(module: nn.Module, _name: str, _new: Any) -> None:
            arrivals = weak()
            if arrivals is not None and module in arrivals._known:
                arrivals._some = True

        def refuse(module: nn.Module, _name: str, new: nn.Module | None) -> None:
            arrivals = weak()
            wrapper = kinds_of(module) & WRAPPERS
            if arrivals is None or new is None or not wrapper:
                return
            if arrivals._model() in set(new.modules()):
                raise InputError(
                    f"the model is sharded, and {min(wrapper)} has no part in it: its gradients "
                    "are means over ranks already, so leave it as tenure.shard() gave it"
                )

        put_back: Any = _put_back  # which torch's types do not let return anything
        handles = (
            hooks.register_module_parameter_registration_hook(put_back),
            hooks.register_module_parameter_registration_hook(listen),
            hooks.register_module_module_registration_hook(listen),
            hooks.register_module_module_registration_hook(refuse),
        )
        for handle in handles:
            weakref.finalize(model, handle.remove)

    def require_none(self) -> None:
        """Raises InputError if parameters have come that nobody has adopted."""
        if not self._some:
            return
        names = [member.name for member in self.members()]
        if names:
            raise InputError(
                f"{', '.join(names[:4])} came after tenure.shard(): call model.tenure.adopt() on "
                "all ranks, then give the optimizer what model.parameters() has for them"
            )
        self._some = False

    def members(self) -> list[Member]:
        """Those that have come, each with its homes."""
        model = self._model()
        assert model is not None
        found: dict[nn.Parameter, Member] = {}
        for path, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is None or name in module.__dict__:
                    continue  # the whole parameter is there: it is sharded
                full = f"{path}.{name}" if path else name
                member = found.setdefault(parameter, Member(full, parameter, []))
                member.homes.append(Home(module, name))
        return list(found.values())

    def adopted(self) -> None:
        """They are sharded now."""
        model = self._model()
        assert model is not None
        self._known = weakref.WeakSet(model.modules())
        self._some = False
