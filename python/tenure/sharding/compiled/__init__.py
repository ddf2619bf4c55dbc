"""Sharded parameters in compiled graphs: where they are gathered, and the proof that it suffices.

Works on `torch.fx` graphs as AOTAutograd leaves them. `schedule()` inserts the collectives,
`prove()` checks the finished graph on its own, whoever made it.
"""

from tenure.sharding.compiled.aliases import Aliases, Effect, effect_of
from tenure.sharding.compiled.backend import backend
from tenure.sharding.compiled.checker import prove
from tenure.sharding.compiled.schedule import Gradient, Ops, Unit, peak, schedule

__all__ = [
    "Aliases",
    "Effect",
    "Gradient",
    "Ops",
    "Unit",
    "backend",
    "effect_of",
    "peak",
    "prove",
    "schedule",
]
