"""What storages are to the program: parameters, gradients, the state of optimizers.

Births do not tell: a parameter is made by the same ``aten::empty`` as anything else. Who has it
does, so modules and optimizers are asked now and then.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.optim import Optimizer

from tenure import _C
from tenure.inspect.modules import is_module, module_paths

__all__ = ["Marked", "marked_tensors"]

Marked = tuple[torch.Tensor, str, str]  # a tensor, its kind and its name
_ENGINE = torch.autograd.graph.__file__

# What torch's own optimizers call their state. Any other key is the program's, and is not told.
_STATE = frozenset(
    (
        *("step", "step_size", "prev", "sum", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
        *("exp_inf", "square_avg", "acc_delta", "grad_avg", "momentum_buffer", "ax", "eta", "mu"),
        *("mu_product", "row_var", "col_var", "variance", "d", "t", "H_diag", "prev_flat_grad"),
    )
)


def marked_tensors() -> list[Marked]:
    """Every tensor that a module or an optimizer has, with its kind and name."""
    found = _C.instances([nn.Module, Optimizer])
    modules = [one for one in found if is_module(one)]
    optimizers = [one for one in found if not is_module(one)]
    paths = module_paths(modules)
    names: dict[int, str] = {}
    parameters: list[torch.Tensor] = []
    for module in modules:
        own = vars(module)
        for table in ("_buffers", "_parameters"):
            for name, tensor in own.get(table, {}).items():
                if tensor is not None:
                    names[id(tensor)] = f"{paths.get(id(module), type(module).__qualname__)}.{name}"
                    parameters.append(tensor)
    for optimizer in optimizers:
        parameters += _unnamed_in(optimizer, names)
    out = [(_local(tensor), "parameter", names[id(tensor)]) for tensor in parameters]
    out += _gradients(parameters, names)
    for optimizer in optimizers:
        out += _of_optimizer(optimizer, names)
    return out


def _unnamed_in(optimizer: Optimizer, names: dict[int, str]) -> Iterator[torch.Tensor]:
    """Parameters of no module, which get a name here."""
    groups = vars(optimizer).get("param_groups", [])
    for number, parameter in enumerate(p for group in groups for p in group.get("params", [])):
        if id(parameter) not in names:
            names[id(parameter)] = f"{type(optimizer).__qualname__}.{number}"
            yield parameter


def _of_optimizer(optimizer: Optimizer, names: dict[int, str]) -> Iterator[Marked]:
    own = vars(optimizer)
    for parameter, state in own.get("state", {}).items():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor):
                owner = names.get(id(parameter), type(optimizer).__qualname__)
                name = key if isinstance(key, str) and key in _STATE else "state"
                yield _local(value), "optimizer", f"{owner}.{name}"


def _gradients(parameters: list[torch.Tensor], names: dict[int, str]) -> Iterator[Marked]:
    """None of them while another thread may free them: ``tensor.grad`` would not notice."""
    leaves = [tensor for tensor in parameters if tensor.is_leaf]
    found = _C.gradients(leaves, _ENGINE) or []
    for tensor, gradient in zip(leaves, found, strict=False):
        if gradient is not None:
            yield _local(gradient), "gradient", f"{names[id(tensor)]}.grad"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor that is spread over several."""
    part = vars(tensor).get("_local_tensor") if type(tensor).__name__ == "DTensor" else None
    return part if isinstance(part, torch.Tensor) else tensor
