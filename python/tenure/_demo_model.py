"""The model of `tenure demo`: a GPT over bytes, small enough for one slow core."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional


class TinyGPT(nn.Module):
    """Predicts the next byte at each position of up to `context` bytes."""

    def __init__(self, *, context: int, width: int = 192, heads: int = 4, layers: int = 3) -> None:
        """Makes a model with random weights from torch's current generator."""
        super().__init__()
        self._token = nn.Embedding(256, width)
        self._position = nn.Embedding(context, width)
        self._blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self._norm = nn.LayerNorm(width)
        self._head = nn.Linear(width, 256)

    def named_blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """The layers between embedding and head: `block 0`, `block 1` and so on."""
        for index, block in enumerate(self._blocks):
            yield f"block {index}", block

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of shape (batch, length, 256) for tokens of shape (batch, length)."""
        hidden: torch.Tensor = self._token(tokens) + self._position.weight[: tokens.shape[1]]
        for block in self._blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self._head(self._norm(hidden))
        return logits


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self._before_attention = nn.LayerNorm(width)
        self._query_key_value = nn.Linear(width, 3 * width)
        self._after_attention = nn.Linear(width, width)
        self._mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self._attend(self._before_attention(hidden))
        mixed: torch.Tensor = self._mlp(hidden)
        return hidden + mixed

    def _attend(self, hidden: torch.Tensor) -> torch.Tensor:
        split = self._query_key_value(hidden).unflatten(-1, (3, self._heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self._after_attention(seen.transpose(1, 2).flatten(2))
        return out
