"""Watching storages on a real device."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

import tenure
from tenure import _C


def train(steps: int, body, **options) -> dict:  # type: ignore[no-untyped-def, type-arg]
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh()).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tenure.watch(quiet=True, **options) as session:
        for step in range(steps):
            loss = model(torch.randn(64, 256, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            body(step, model)
            tenure.step()  # other tests here announced steps, so optimizers are not counted
        return session.verdict()


@pytest.mark.usefixtures("cuda")
def test_a_flat_program_is_flat() -> None:
    verdict = train(60, lambda _step, _model: None)
    assert verdict["verdict"] == "flat", verdict["ranks"]


@pytest.mark.usefixtures("cuda")
def test_a_leak_on_the_device_is_named() -> None:
    kept = []
    verdict = train(60, lambda _step, _model: kept.append(torch.randn(50_000, device="cuda")))
    assert verdict["verdict"] == "leak", verdict["ranks"]
    suspect = verdict["suspects"][0]
    assert suspect["device"].startswith("cuda")
    assert "test_inspect.py" in suspect["site"]
    assert "kept" in str(suspect["holders"])
    # What it says a step is what the allocator says.
    assert suspect["bytes_per_step"] == pytest.approx(200_192, rel=0.05)


@pytest.mark.usefixtures("cuda")
def test_a_kept_graph_on_the_device() -> None:
    kept = []
    body = lambda _step, model: kept.append(model(torch.randn(512, 256, device="cuda")))  # noqa: E731
    verdict = train(60, body)
    assert verdict["verdict"] == "leak"
    assert "kept" in str(verdict["suspects"][0]["holders"])
    assert any("graph" in str(s["holders"]) for s in verdict["suspects"])


@pytest.mark.usefixtures("cuda")
def test_held_is_what_the_allocator_says() -> None:
    before = torch.randn(1000, 1000, device="cuda")
    with tenure.watch(quiet=True) as session:
        with _C.References([]) as references:
            assert references.size > 0
        kept = [torch.randn(1000, 100, device="cuda") for _ in range(10)]
        for _ in range(3):  # whoever announced steps before loses the lead
            tenure.step()
        row = session._watch.rows()[-1]
        assert row["device_allocated"] == torch.cuda.memory_allocated()
        assert row["held"] >= before.nbytes + sum(t.nbytes for t in kept)


@pytest.mark.usefixtures("cuda")
def test_the_programs_own_memory_history_is_not_disturbed() -> None:
    torch.cuda.memory._record_memory_history(max_entries=10_000)
    train(20, lambda _step, _model: None)
    events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    assert sum(event["action"] == "alloc" for event in events) > 20
    torch.cuda.memory._record_memory_history(enabled=None)


@pytest.mark.usefixtures("cuda")
def test_storages_of_backward_name_their_forward_line() -> None:
    grads = []

    def keep(_step: int, _model: torch.nn.Module) -> None:
        x = torch.randn(512, 256, device="cuda", requires_grad=True)
        (x.sin() * 2).sum().backward()
        grads.append(x.grad)

    verdict = train(60, keep)
    assert verdict["verdict"] == "leak"
    assert any(s["phase"] == "backward" and "keep" in s["function"] for s in verdict["suspects"])


def test_watching_from_before_cuda_is_used() -> None:
    program = """
    import torch, tenure
    with tenure.watch(quiet=True) as session:
        model = torch.nn.Linear(64, 64).cuda()
        optimizer, kept = torch.optim.SGD(model.parameters()), []
        for _ in range(40):
            model(torch.randn(8, 64, device="cuda")).sum().backward()
            optimizer.step()
            kept.append(torch.randn(5000, device="cuda"))
        print(session.verdict()["verdict"])
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (0, "leak\n"), ended.stderr


WITHOUT_TRACKER = """
import sys, torch, tenure
from pathlib import Path
from tenure.inspect import devices
devices._LIBRARY = Path("/nowhere/libtenure_cuda.so")
if sys.argv[1] == "recording":
    torch.cuda.memory._record_memory_history(max_entries=1000)

def keep(kept):
    kept.append(torch.randn(50_000, device="cuda"))

def main():
    model = torch.nn.Linear(64, 64).cuda()
    optimizer, kept = torch.optim.SGD(model.parameters()), []
    with tenure.watch(quiet=True) as session:
        for _ in range(60):
            model(torch.randn(8, 64, device="cuda")).sum().backward()
            optimizer.step()
            if sys.argv[1] != "flat":
                keep(kept)
        verdict = session.verdict()
    print(verdict["verdict"])
    for suspect in verdict["suspects"][:1]:
        where = (suspect["site"], suspect["function"], suspect["device"])
        print(*where, "kept (local of main)" in str(suspect["holders"]))
    print(torch._C._cuda_isHistoryEnabled())

main()
"""


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("mode", ["leak", "flat", "recording"])
def test_without_the_tracker_torchs_own_history_serves(mode: str) -> None:
    command = [sys.executable, "-c", WITHOUT_TRACKER, mode]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout.splitlines()
    assert "only the lines that made them are known" in ended.stderr
    if mode == "flat":
        assert said[0] == "flat", ended.stdout
    else:
        assert said[0] == "leak", ended.stdout
        assert said[1] == "<string>:10 keep cuda:0 True"
    # Ours is switched off again, the program's own is not.
    assert said[-1] == str(mode == "recording")
