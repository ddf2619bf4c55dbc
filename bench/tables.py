"""How benchmarks say what they found: a table to read, and JSON with versions and machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from pathlib import Path

import torch

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
        self._columns = columns
        self._rows: list[list[str]] = []  # an empty one is a rule

    def add(self, cells: list[str], **record: object) -> None:
        self._rows.append(cells)
        self._records.append(record)

    def rule(self) -> None:
        self._rows.append([])

    def show(self) -> None:
        rows = [self._columns, *self._rows]
        wide = range(len(self._columns))
        widths = [max(len(row[i]) for row in rows if len(row) > i) for i in wide]
        print(f"bench/{self._name}")
        for row in rows:
            cells = zip(row, widths, strict=False)
            shown = [text.rjust(w) if i else text.ljust(w) for i, (text, w) in enumerate(cells)]
            print("  ".join(shown).rstrip())
        print(" · ".join(f"{k} {v}" for k, v in self._environment.items() if v is not None))
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self._name}.json"
        path.write_text(
            json.dumps({"environment": self._environment, "rows": self._records}, indent=1) + "\n"
        )
        print(f"written to {os.path.relpath(path)}")
