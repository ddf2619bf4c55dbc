"""assert_flat, the pytest marker, explain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tenure


def test_assert_flat_passes_what_is_flat() -> None:
    model = torch.nn.Linear(64, 64)
    tenure.assert_flat(lambda: model(torch.randn(8, 64)).sum().backward())


def test_assert_flat_names_what_grows() -> None:
    model, losses = torch.nn.Linear(64, 64), []
    with pytest.raises(tenure.MemoryGrows, match="losses") as caught:
        tenure.assert_flat(lambda: losses.append(model(torch.randn(64, 64))))
    assert caught.value.verdict["suspects"]


def test_released_storages_that_something_keeps_do_not_matter() -> None:
    kept = torch.randn(1000)
    tenure.release(kept)
    tenure.assert_flat(lambda: None, steps=14)
    tenure.refill(kept, torch.randn(1000))


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(tenure.InputError, match="steps=3 is too few"):
        tenure.assert_flat(lambda: None, steps=3)


def test_watching_twice_is_refused() -> None:
    with tenure.watch(quiet=True), pytest.raises(tenure.TenureError, match="watched already"):
        tenure.watch(quiet=True)
    with tenure.watch(quiet=True):
        pass


def test_the_marker(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest, torch\n"
        "kept = []\n"
        "@pytest.fixture\n"
        "def model(): return torch.nn.Linear(64, 64)\n"
        "@pytest.mark.flat_memory(steps=20)\n"
        "def test_flat(model): model(torch.randn(8, 64))\n"
        "@pytest.mark.flat_memory(steps=20)\n"
        "def test_leaky(model): kept.append(model(torch.randn(64, 64)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--strict-markers", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert "1 failed, 1 passed" in ended.stdout, ended.stdout + ended.stderr
    assert "kept (global of" in ended.stdout


def test_explain_tells_python_autograd_and_leases() -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    out = weight.sin()
    lease = tenure.hold(weight, "weights")
    found = tenure.explain(weight)
    words = " ".join(found.paths)
    assert "weight (local of test_explain_tells_python_autograd_and_leases)" in words
    assert len(found.leases) == 1
    assert found.references == len(found.paths) + 1
    assert found.residue == 0
    del lease, out


def test_explain_counts_what_cxx_holds_of_the_tensor_itself() -> None:
    tensor = torch.randn(64)
    assert tenure.explain(tensor).residue == 0
    capsules = [torch.utils.dlpack.to_dlpack(tensor) for _ in range(2)]
    found = tenure.explain(tensor)
    assert found.residue == 2
    assert "2 more references from C++ code" in str(found)
    del capsules
    assert tenure.explain(tensor).residue == 0


def test_explain_tells_saved_tensors() -> None:
    x = torch.randn(64, requires_grad=True)
    out = x.tanh()
    kept = [out.sum()]
    del out
    loss = kept[0]
    saved = loss.grad_fn.next_functions[0][0]._saved_result  # type: ignore[union-attr]
    assert "TanhBackward0" in str(tenure.explain(saved))
