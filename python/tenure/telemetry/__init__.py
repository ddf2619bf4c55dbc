"""Telemetry: what all ranks have of memory while they train, and what is left when they die."""

from typing import TYPE_CHECKING

from tenure._command import is_command

__all__ = [
    "KEYS",
    "Alert",
    "Broken",
    "Figure",
    "Figures",
    "FlightRecorder",
    "Key",
    "Monitor",
    "sinks",
]

# The command line takes what it needs from the modules themselves: torch takes seconds to import.
if TYPE_CHECKING or not is_command():
    from tenure.telemetry import sinks
    from tenure.telemetry.alerts import Alert, Broken
    from tenure.telemetry.figures import Figure, Figures, Key
    from tenure.telemetry.flight import FlightRecorder
    from tenure.telemetry.keys import KEYS
    from tenure.telemetry.monitor import Monitor
