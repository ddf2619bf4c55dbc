"""One storage that gets larger from step to step: a state that is joined to, or longer inputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from watched import forked_run

LOOP = """
import torch, tenure
def main():
    embed, head = torch.nn.Embedding(1000, 64), torch.nn.Linear(64, 1000)
    state, weight = torch.zeros(0, 256), torch.randn(256, 256)
    cell = torch.nn.RNN(64, 64)
    torch.set_grad_enabled(False)
    for step in range(60):
        {body}
        tenure.step()
main()
"""
LONGER = {
    "logits of longer sequences": "logits = head(embed(torch.randint(0, 1000, (64 + 16 * step,))))",
    "a product of larger batches": "x = torch.randn(64 + 16 * step, 256); y = x @ x.T",
    # One more node for each word that hands a gradient to the same weight.
    "the graph of a recurrent cell": (
        "torch.set_grad_enabled(True); "
        "loss = cell(torch.randn(8 + step, 64, 64))[0].mean(); loss.backward()"
    ),
}
KEPT = {
    "joined and used once": "state = torch.cat([state, torch.randn(16, 256)]); (state * 2).sum()",
    "joined and attended to": (
        "x = torch.randn(16, 256); state = torch.cat([state, x]); "
        "y = torch.softmax(x @ weight @ state.T, -1) @ state"
    ),
    "a sum of losses of longer sequences": (
        "torch.set_grad_enabled(True); "
        "loss = cell(torch.randn(8 + step, 64, 64))[0].mean(); loss.backward(); "
        "state = state.sum() + loss"
    ),
}


def verdict_of(folder: Path, body: str) -> dict[str, object]:
    (folder / "train.py").write_text(LOOP.format(body=body))
    verdict: dict[str, object] = forked_run(["train.py"], folder).verdict
    return verdict


@pytest.mark.parametrize("body", LONGER.values(), ids=LONGER)
def test_longer_inputs_are_no_leak(tmp_path: Path, body: str) -> None:
    assert verdict_of(tmp_path, body)["verdict"] == "growth"


@pytest.mark.parametrize("body", KEPT.values(), ids=KEPT)
def test_a_state_that_is_joined_to_is_one(tmp_path: Path, body: str) -> None:
    verdict = verdict_of(tmp_path, body)
    assert verdict["verdict"] == "leak"
    assert "state (local of main)" in str(verdict["suspects"])
