"""How benchmarks say what they found: a table to read, and JSON with versions and machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table as RichTable

import tenure

RESULTS = Path(__file__).parent / "results"


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def environment() -> dict[str, object]:
    """What a figure means nothing without."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tenure": tenure.__version__,
    }


class Table:
    """Rows for people and records for programs."""

    def __init__(self, name: str, columns: list[str]) -> None:
        self._name = name
        self._environment = environment()
        self._records: list[dict[str, object]] = []
        self._table = RichTable(title=f"bench/{name}", title_justify="left", box=None)
        for i, column in enumerate(columns):
            self._table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)

    def add(self, cells: list[str], **record: object) -> None:
        self._table.add_row(*cells)
        self._records.append(record)

    def rule(self) -> None:
        self._table.add_section()

    def show(self) -> None:
        console = Console(width=None if sys.stdout.isatty() else 110)
        console.print(self._table)
        console.print(" · ".join(f"{k} {v}" for k, v in self._environment.items() if v is not None))
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self._name}.json"
        path.write_text(
            json.dumps({"environment": self._environment, "rows": self._records}, indent=1) + "\n"
        )
        console.print(f"written to {os.path.relpath(path)}")
