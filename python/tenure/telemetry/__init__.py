"""Telemetry: what all ranks have of memory while they train, and what is left when they die."""

from tenure.telemetry import sinks
from tenure.telemetry.alerts import Alert, Broken
from tenure.telemetry.figures import Figure, Figures, Key
from tenure.telemetry.keys import KEYS
from tenure.telemetry.monitor import Monitor

__all__ = ["KEYS", "Alert", "Broken", "Figure", "Figures", "Key", "Monitor", "sinks"]
