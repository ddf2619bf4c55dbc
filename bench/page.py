"""How long a report of 1e5 storages takes to make, and a browser to open it.

python bench/page.py
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(sys.path.pop(0))  # this folder has an inspect.py, as Python has

import tables
from playwright.sync_api import sync_playwright

BAR_SECONDS = 3
PROGRAM = """
import torch
from torch import nn
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)])
optimizer = torch.optim.Adam(model.parameters())
kept = []
for step in range(50):
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    kept += [torch.empty(1 + i % 900) for i in range({each})]
"""


def record(folder: Path, storages: int) -> Path:
    script = folder / "train.py"
    script.write_text(PROGRAM.format(each=storages // 50))
    command = [sys.executable, "-m", "tenure", "run", "--quiet", "--max-cost", "1000", str(script)]
    subprocess.run(command, cwd=folder, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return folder / "run.tenure"


def opening(file: Path, times: int) -> list[float]:
    """Seconds from asking for the page until its last table is there."""
    out = []
    with sync_playwright() as playwright:
        program = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for _ in range(times):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            begin = time.perf_counter()
            page.goto(file.as_uri())
            page.wait_for_selector("#ranks-table tbody tr", state="attached")
            page.wait_for_selector("#peak-plot svg", state="attached")
            out.append(time.perf_counter() - begin)
            page.close()
        browser.close()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storages", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = record(folder, options.storages)
        begin = time.perf_counter()
        command = [sys.executable, "-m", "tenure", "report", str(run), "--out", "page.html"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        making = time.perf_counter() - begin
        file = folder / "page.html"
        loads = opening(file, options.times)
        load, size = statistics.median(loads), file.stat().st_size
    table = tables.Table("page", ["what", "measured", "bar", ""])
    what = f"make the page of {options.storages:,} storages"
    table.add([what, f"{making:.1f} s", "", ""], arm="make", seconds=making)
    holds = "holds" if load <= BAR_SECONDS else "MISSED"
    table.add(["open it", f"{load:.2f} s", f"{BAR_SECONDS} s", holds], arm="open", seconds=loads)
    table.add(["its size", f"{size / 1e6:.1f} MB", "", ""], arm="size", bytes=size)
    table.show()


if __name__ == "__main__":
    main()
