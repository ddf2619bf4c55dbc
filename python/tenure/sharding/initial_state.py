"""The state with which an optimizer begins."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["initial_state"]


def initial_state(
    optimizer: Optimizer, parameters: list[nn.Parameter]
) -> dict[nn.Parameter, dict[str, Any]]:
    """What the optimizer would begin with for these parameters of its, by parameter.

    Only a step makes an optimizer say so. A twin of it makes one with stand-ins, so that neither
    the optimizer nor the parameters and their gradients change.
    """
    stand_ins = {one: nn.Parameter(torch.zeros_like(one)) for one in parameters}
    if not stand_ins:
        return {}
    for stand_in in stand_ins.values():
        stand_in.grad = torch.zeros_like(stand_in)
    twin = _twin(optimizer, stand_ins)
    twin.step()
    out = {}
    for parameter, stand_in in stand_ins.items():
        values = dict(twin.state.get(stand_in, {}))
        if isinstance(step := values.get("step"), torch.Tensor | int | float):
            values["step"] = step - step  # none has been made
        if values:
            out[parameter] = values
    return out


def _twin(optimizer: Optimizer, stand_ins: dict[nn.Parameter, nn.Parameter]) -> Any:
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler has put one there that is the optimizer's
    twin.__dict__.update(
        state=defaultdict(dict),
        param_groups=[
            {**group, "params": chosen}
            for group in optimizer.param_groups
            if (chosen := [stand_ins[one] for one in group["params"] if one in stand_ins])
        ],
        _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
    )
    return twin
