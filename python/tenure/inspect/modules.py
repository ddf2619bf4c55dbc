"""Names for the modules in whose calls storages are born."""

from __future__ import annotations

import weakref

from torch import nn

from tenure import _C

__all__ = ["is_module", "module_paths", "name_modules"]


def name_modules() -> None:
    """Gives every module that a birth has met its path: ``GPT.blocks.3.mlp``."""
    unnamed = dict(_C.unnamed_modules())
    if not unnamed:
        return
    by_address = {id(found): found for found in _C.instances([nn.Module])}
    paths = module_paths(list(by_address.values()))
    for number, address in unnamed.items():
        module = by_address.get(address)
        if module is None:
            _C.name_module(number, "")
            continue
        _C.name_module(number, paths.get(address, type(module).__qualname__))
        weakref.finalize(module, _C.forget_module, address).atexit = False


def is_module(found: object) -> bool:
    """Whether an object is a module, asked so that no code of the program runs."""
    return issubclass(type(found), nn.Module)  # not isinstance: that asks proxies, which act on it


def module_paths(modules: list[nn.Module]) -> dict[int, str]:
    """The path of each module by its address, from the outermost module that contains it."""
    children = {
        id(child)
        for module in modules
        for child in module.__dict__.get("_modules", {}).values()
        if child is not None
    }
    out: dict[int, str] = {}
    for module in modules:
        if id(module) in children:
            continue
        name = type(module).__qualname__
        for path, inner in module.named_modules():
            out.setdefault(id(inner), f"{name}.{path}" if path else name)
    return out
