"""Which modules of a model are units, and which parameters belong to which."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tenure.errors import InputError

__all__ = [
    *("WRAPPERS", "Choice", "Home", "Member", "Units", "check", "check_modules", "choose"),
    *("device_of", "kinds_of"),
]

Units = None | type[nn.Module] | Iterable[type[nn.Module] | str] | Callable[[str, nn.Module], bool]

# What makes of a model one that several devices or ranks compute.
WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"}


@dataclass(frozen=True)
class Home:
    """One place where a module has a parameter; a tied one has several."""

    module: nn.Module
    name: str


@dataclass
class Member:
    """A parameter, under the first name that it has."""

    name: str
    parameter: nn.Parameter
    homes: list[Home]


@dataclass
class Choice:
    """What is gathered and released as one: a module, and what it alone has."""

    name: str
    module: nn.Module | None = None  # none: what other units use
    path: str | None = None  # the module's
    stays: bool = False  # gathered for a whole pass
    members: list[Member] = field(default_factory=list)
    needs: set[int] = field(default_factory=set)  # others that own a parameter that it uses


def kinds_of(module: nn.Module) -> set[str]:
    """The names of its class and of those that this is made of: to load them may take seconds."""
    return {kind.__name__ for kind in type(module).__mro__}


def check_modules(model: nn.Module) -> None:
    """Raises InputError for a module that hooks of modules cannot be put on, or mean nothing to."""
    for name, module in model.named_modules():
        kinds = kinds_of(module)
        what = name or "the model"
        if wrapper := kinds & WRAPPERS:
            raise InputError(
                f"{what} is a {min(wrapper)}, which keeps the parameters in its own way: shard the "
                "module in it"
            )
        if "ScriptModule" in kinds:
            raise InputError(f"{what} is a ScriptModule, which has no hooks: shard it unscripted")


def choose(model: nn.Module, units: Units, keep_resident: int) -> list[Choice]:
    """The units of a model, then the model itself, then what is small."""
    named = dict(model.named_modules())
    chosen = _chosen(named, units)
    for path in chosen:
        if getattr(named[path].forward, "__func__", None) is nn.Module.forward:
            raise InputError(
                f"units: {path} is a {type(named[path]).__name__}, which has no forward: "
                "choose what is in it"
            )
    owner = _owners(named, chosen)
    choices = {
        path: Choice(path or type(model).__name__, named[path], path) for path in [*chosen, ""]
    }
    order = list(choices)
    small = Choice("small parameters", stays=True)
    all_of_them = [*choices.values(), small]
    known: dict[nn.Parameter, tuple[int, Member]] = {}
    for module_name, module in named.items():
        at = order.index(owner[module_name])
        for short, parameter in module._parameters.items():
            if parameter is None:
                continue
            home = Home(module, short)
            if parameter in known:
                first, member = known[parameter]
                member.homes.append(home)
            else:
                full = f"{module_name}.{short}" if module_name else short
                _require_shape(full, parameter)
                first = len(order) if parameter.numel() < keep_resident else at
                member = Member(full, parameter, [home])
                known[parameter] = (first, member)
                all_of_them[first].members.append(member)
            if first != at:
                all_of_them[at].needs.add(first)
    return all_of_them if small.members else all_of_them[:-1]


def _chosen(named: dict[str, nn.Module], units: Units) -> list[str]:
    if units is None:
        return _elements(named)
    if isinstance(units, type | str):
        units = (units,)
    if callable(units) and not isinstance(units, nn.Module):
        found = [name for name, module in named.items() if name and units(name, module)]
        if not found:
            raise InputError("units: the function chose no module of the model")
        return found
    found = []
    if not isinstance(units, Iterable) or isinstance(units, nn.Module):
        raise InputError(_no_units(units))
    for unit in units:
        if isinstance(unit, str):
            fits = [name for name in named if name == unit and name]
        elif not isinstance(unit, type):
            raise InputError(_no_units(unit))
        else:
            fits = [name for name, module in named.items() if name and isinstance(module, unit)]
        if not fits:
            what = repr(unit) if isinstance(unit, str) else unit.__name__
            raise InputError(f"units: no module of the model is {what}; it has {_some_of(named)}")
        found += fits
    if not found:
        raise InputError(
            "units: there is none, and the model would be gathered as one; leave it out for the "
            "elements of the model's lists"
        )
    return [name for name in named if name in set(found)]


def _no_units(given: object) -> str:
    told = f"a {type(given).__name__} (give its class)" if isinstance(given, nn.Module) else given
    return f"units are classes of modules, their names, or a function of both; not {told}"


def _some_of(named: dict[str, nn.Module]) -> str:
    kinds = dict.fromkeys(type(module).__name__ for name, module in named.items() if name)
    return ", ".join(list(kinds)[:8]) or "no modules in it"


def _elements(named: dict[str, nn.Module]) -> list[str]:
    """The elements of lists that are not inside an element themselves: a model's blocks."""
    found: list[str] = []
    for name, module in named.items():
        parent = named.get(name.rpartition(".")[0]) if name else None
        in_list = isinstance(parent, nn.ModuleList | nn.Sequential)
        inside = any(name.startswith(f"{other}.") for other in found)
        if in_list and not inside and any(True for _ in module.parameters()):
            found.append(name)
    return found


def _owners(named: dict[str, nn.Module], chosen: list[str]) -> dict[str, str]:
    """For each module the nearest unit around it."""
    out: dict[str, str] = {}
    units = set(chosen)
    for name in named:
        at = name
        while at and at not in units:
            at = at.rpartition(".")[0]
        out[name] = at
    return out


def check(choices: Iterable[Choice]) -> None:
    """Raises InputError for a parameter that cannot be sharded."""
    from torch.distributed.tensor import DTensor

    if torch.is_inference_mode_enabled():
        raise InputError("parameters cannot be sharded in torch.inference_mode(): do it outside")
    for member in (member for choice in choices for member in choice.members):
        parameter = member.parameter
        if isinstance(parameter, DTensor):
            raise InputError(
                f"{member.name} is a DTensor (tensor parallel), which cannot be sharded further"
            )
        _require_shape(member.name, parameter)
        if parameter.is_inference():
            raise InputError(
                f"{member.name} was made in torch.inference_mode(), so it cannot be trained: "
                "make the model outside"
            )
        if parameter.is_meta:
            raise InputError(f"{member.name} is on the meta device: give it values first")
        if parameter.layout is not torch.strided:
            raise InputError(
                f"{member.name} is a sparse tensor ({parameter.layout}), which cannot be sharded: "
                "to_dense() first"
            )
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise InputError(
                f"{member.name} has a hook after its gradient: register it after tenure.shard(), "
                "on what model.parameters() gives"
            )
        for home in member.homes:
            _check_home(member.name, home.module)


def _require_shape(name: str, parameter: nn.Parameter) -> None:
    if is_lazy(parameter):
        raise InputError(f"{name} has no shape yet: run the lazy module once, then shard")


def _check_home(name: str, module: nn.Module) -> None:
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return
    if module.sparse:
        raise InputError(f"{name} has sparse gradients, which cannot be sharded: sparse=False")
    if module.max_norm is not None:
        raise InputError(
            f"{name} is written to by its forward, for max_norm is set, so it cannot be sharded"
        )


def device_of(choices: Iterable[Choice]) -> torch.device:
    """The one device that all parameters are on."""
    found: dict[torch.device, str] = {}
    for choice in choices:
        for member in choice.members:
            found.setdefault(member.parameter.device, member.name)
    if len(found) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in found.items())
        raise InputError(f"the parameters are on several devices: {places}; move the model to one")
    if not found:
        raise InputError("the model has no parameters to shard")
    return next(iter(found))
