"""What a watched program hears of activations that were moved: who made them and who holds them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import tenure
from tenure.inspect import verdicts

STEPS = 16
ROWS = 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.blocks(x)
        return out


def words(suspect: dict[str, Any]) -> str:
    return " → ".join(hop["text"] for hop in verdicts.path_from_root(suspect))


def kept_losses(device: str, target: str) -> dict[str, Any]:
    """The verdict on a training that keeps each loss, and with it what its graph saved."""
    net = Net().to(device)
    offload = tenure.Offload(net, target=target, min_bytes=1)
    losses = []
    with tenure.watch(quiet=True) as session:
        for _ in range(STEPS):
            with offload:
                losses.append(net(torch.randn(ROWS, 64, device=device)).sum())
            tenure.step()
        verdict: dict[str, Any] = session.verdict()
    losses.clear()
    gc.collect()
    return verdict


def test_a_graph_that_is_kept_is_named_as_the_holder() -> None:
    verdict = kept_losses("cpu", "copy")
    assert verdict["verdict"] == "leak"
    for suspect in verdict["suspects"]:
        assert words(suspect).startswith("losses (local of kept_losses) → "), suspect
    made = {suspect["op"]: suspect for suspect in verdict["suspects"]}
    moved = made["aten::clamp_min, on the host, from cpu"]
    assert moved["module"].startswith("Net.blocks.")
    assert "ReluBackward0 saved result → tenure.Offload" in words(moved)


@pytest.mark.usefixtures("fake")
def test_on_a_device_too() -> None:
    """Births on it are not seen, as on any device whose allocator tells nothing."""
    verdict = kept_losses("fake", "host")
    assert verdict["verdict"] == "leak"
    (first, *_) = verdict["suspects"]
    assert first["op"].endswith("on the host, from fake:0")
    assert words(first).startswith("losses (local of kept_losses) → ")


def test_owners_name_the_module_and_the_operator() -> None:
    net = Net()
    offload = tenure.Offload(net, target="copy", min_bytes=1)
    with tenure.watch(quiet=True):
        for _ in range(3):
            with offload:
                net(torch.randn(ROWS, 64)).sum().backward()
            tenure.step()
        with offload:
            loss = net(torch.randn(ROWS, 64)).sum()
            owners = [str(owner) for owner in tenure.leases().by_owner()]
            seen = tenure.census()
    assert "host_copy 'Net.blocks.0 aten::clamp_min' (from cpu)" in owners
    assert "offloaded: Net.blocks.0 aten::clamp_min, from cpu, on the host" in str(seen)
    assert seen.residue == 0
    assert loss.grad_fn is not None


def test_copies_that_go_are_seen_to_go() -> None:
    net = Net()
    offload = tenure.Offload(net, target="copy", min_bytes=1)

    def alive() -> int:
        return sum(nbytes for _, nbytes in tenure._C.alive_storages())

    gc.collect()
    with tenure.watch(quiet=True) as session:
        before = alive()  # of other tests of this process, too
        for _ in range(STEPS):
            with offload:
                net(torch.randn(ROWS, 64)).sum().backward()
            net.zero_grad()
            tenure.step()
        assert session.verdict()["verdict"] != "leak"
        assert alive() - before < ROWS * 64 * 4


def test_a_lease_that_is_kept_is_named_as_the_holder() -> None:
    kept = []
    with tenure.watch(quiet=True) as session:
        for _ in range(STEPS):
            kept.append(tenure.hold(torch.zeros(ROWS, 64), "replay"))
            tenure.step()
        verdict = session.verdict()
    assert verdict["verdict"] == "leak"
    path = words(verdict["suspects"][0])
    assert path.startswith("kept (local of test_a_lease_that_is_kept_is_named_as_the_holder) → ")
    assert path.endswith("→ lease of 'replay'")
    for lease in kept:
        lease.release()
