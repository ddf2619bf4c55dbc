"""Pipelines: a model in stages, microbatches in flight, and a bound on their memory that is kept.

>>> from tenure import pipelining
>>> schedule = pipelining.schedule("1f1b", ranks=4, microbatches=8)
>>> [schedule.bound(rank).in_flight for rank in range(4)]
[4, 3, 2, 1]
"""

from __future__ import annotations

from tenure.pipelining.pipeline import Pipeline
from tenure.pipelining.promises import Bound, PipelineStats
from tenure.pipelining.schedules import Schedule, schedule, schedule_names

__all__ = ["Bound", "Pipeline", "PipelineStats", "Schedule", "schedule", "schedule_names"]
