"""What the examples of the store learn: which of four arms a context calls for."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

CONTEXT, ARMS = 1024, 4


def policy() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(CONTEXT, ARMS)


def right_arm(contexts: torch.Tensor) -> torch.Tensor:
    """The largest of the first four numbers."""
    return contexts[:, :ARMS].argmax(1)


@torch.no_grad()
def rollout(model: nn.Module, rows: int, seed: int) -> dict[str, torch.Tensor]:
    """Contexts, the arms that the policy pulls, and what they pay."""
    draw = torch.Generator().manual_seed(seed)
    contexts = torch.randn(rows, CONTEXT, generator=draw)
    contexts[:, ARMS:] *= 0.1
    arms = torch.multinomial(model(contexts).softmax(1), 1, generator=draw).squeeze(1)
    return {"contexts": contexts, "arms": arms, "paid": (arms == right_arm(contexts)).float()}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, torch.Tensor]]
) -> float:
    """One step of REINFORCE. Returns what an arm paid on average."""
    contexts, arms, paid = (
        torch.cat([batch[name] for batch in batches]) for name in ("contexts", "arms", "paid")
    )
    chosen = F.log_softmax(model(contexts), 1).gather(1, arms[:, None]).squeeze(1)
    loss = -(chosen * (paid - paid.mean())).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return paid.mean().item()


def proportional_bytes() -> int:
    """Of this process, but for files; what it shares with others counts in part (PSS)."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    wanted = ("Pss_Anon:", "Pss_Shmem:")
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(wanted))
