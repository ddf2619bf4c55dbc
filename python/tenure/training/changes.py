"""What a run that goes on does otherwise than it did before: where its losses part."""

from __future__ import annotations

from collections.abc import Callable

from tenure.inspect.verdicts import shown_path
from tenure.training.plan import Plan

__all__ = ["changes"]

# What decides how a model learns; not how it is split, shown or saved, nor, for that is refused,
# which model it is.
_LEARNING: dict[str, Callable[[Plan], object]] = {
    "--data": lambda plan: shown_path(plan.data),
    "--validation": lambda plan: shown_path(plan.validation) if plan.validation else "none",
    "--seed": lambda plan: plan.seed,
    "rows a step": lambda plan: plan.rows * plan.dp,
    "--length": lambda plan: plan.length,
    "--steps": lambda plan: plan.steps,
    "--learning-rate": lambda plan: plan.learning_rate,
    "--learning-rate-decay-frac": lambda plan: _part(plan.least, plan.learning_rate),
    "--warm-up": lambda plan: plan.warm_up if plan.warm_up != plan.steps // 10 else "a tenth",
    "--beta1": lambda plan: plan.beta1,
    "--beta2": lambda plan: plan.beta2,
    "--weight-decay": lambda plan: plan.weight_decay,
    "--clip": lambda plan: plan.clip,
    "--dtype": lambda plan: "bfloat16" if plan.bf16 else "float32",
}


def changes(before: Plan, now: Plan) -> str:
    """In one line; empty if the run goes on as it was."""
    pairs = {name: (of(before), of(now)) for name, of in _LEARNING.items()}
    told = [f"{name} {new} (was {old})" for name, (old, new) in pairs.items() if new != old]
    if not told:
        return ""
    return f"the run goes on with other settings than it had: {', '.join(told)}"


def _part(least: float, most: float) -> float:
    return float(f"{least / most:.6g}") if most else 0.0
