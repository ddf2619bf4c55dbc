"""What `tenure train` makes of a machine beside plain PyTorch: one rank, the arms in turn.

    python bench/train.py [--size 124M] [--rows 32] [--microbatches 1] [--rounds 5] [--steps 10]

The same GPT-2, the same batches, bf16 by autocast on CUDA (fp32 on the CPU), fused AdamW, gradients
clipped: by Tenure's loop in C++, as nn.Modules run eagerly, and these compiled. The plain arms wait
for the device at the end of a round only; ours reports every step, and its strict mode is on.
"""

from __future__ import annotations

import sys

sys.path.append(sys.path.pop(0))  # last, for a file here has the name of one of Python's modules

import argparse
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tables
import torch
from rich.progress import track
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tenure import _C

SEED = 1
Round = Callable[[int], float]
"""Trains so many steps; returns the last loss."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.ln_1(x)).split(width, 2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, config: _C.TrainConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)

    def load(self, config: _C.TrainConfig) -> None:
        """The values that Tenure's model begins with."""
        ours = dict(_C.TrainStage(config, seed=SEED).named_weights())
        place = {
            "ln_1": "ln_1", "attn.c_attn": "qkv", "attn.c_proj": "out",
            "ln_2": "ln_2", "mlp.c_fc": "up", "mlp.c_proj": "down",
        }  # fmt: skip
        with torch.no_grad():
            self.tokens.weight.copy_(ours["transformer.wte.weight"])
            self.positions.weight.copy_(ours["transformer.wpe.weight"])
            for number, block in enumerate(self.blocks):
                for theirs, name in place.items():
                    module = getattr(block, name)
                    for kind in ("weight", "bias"):
                        value = ours[f"transformer.h.{number}.{theirs}.{kind}"]
                        getattr(module, kind).copy_(value.T if value.dim() == 2 else value)
            for kind in ("weight", "bias"):
                getattr(self.norm, kind).copy_(ours[f"transformer.ln_f.{kind}"])


class Plain:
    """A loop as one writes it in PyTorch."""

    def __init__(self, options: argparse.Namespace, data: Path, compiled: bool) -> None:
        self.options = options
        config = _C.TrainConfig.named("gpt2", options.size)
        model = Gpt2(config)
        model.load(config)
        model.to(options.device)
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.parameters = parameters
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
        self.model = torch.compile(model) if compiled else model
        tokens = _C.TrainTokens.open(str(data))
        self.batches = _C.TrainBatches(
            tokens, rows=options.rows, length=options.length, seed=SEED, vocab=config.vocab
        )

    def __call__(self, steps: int) -> float:
        for _ in range(steps - 1):
            self.step()
        return float(self.step())

    def step(self) -> torch.Tensor:
        parts = self.options.microbatches
        x, y = (one.to(self.options.device).chunk(parts) for one in self.batches.next())
        total = torch.zeros((), device=self.options.device)
        for one, target in zip(x, y, strict=True):
            with torch.autocast(
                self.options.device.type, torch.bfloat16, enabled=self.options.device.type != "cpu"
            ):
                logits = self.model(one)
                loss = F.cross_entropy(logits.view(-1, logits.size(-1)), target.view(-1)) / parts
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


class Tenure:
    """Tenure's loop, which stands still between rounds."""

    def __init__(self, options: argparse.Namespace, data: Path, steps: int) -> None:
        self._go: queue.Queue[int] = queue.Queue()
        self._done: queue.Queue[Any] = queue.Queue()
        self._left = 0
        self._job = _C.TrainJob(
            _C.TrainConfig.named("gpt2", options.size),
            str(data),
            rows=options.rows,
            length=options.length,
            microbatches=options.microbatches,
            steps=steps,
            learning_rate=1e-4,
            least_learning_rate=1e-4,
            seed=SEED,
            device=options.device,
            bf16=options.device.type != "cpu",
        )
        group = dist.group.WORLD
        self._trainer = _C.Trainer(
            self._job, pipe_up=group, pipe_down=group, pipe_side=group, data_group=group,
            data_side=group, world_side=group, store=dist.HashStore(),
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._left = self._go.get()
            self._trainer.run(self)
        except Exception as error:  # noqa: BLE001 for the thread that waits
            self._done.put(error)

    def stepped(self, report: dict[str, Any]) -> bool:
        self._left -= 1
        if self._left == 0:
            self._done.put(report["loss"])
            self._left = self._go.get()
        return self._left > 0

    def __call__(self, steps: int) -> float:
        self._go.put(steps)
        found = self._done.get()
        if isinstance(found, BaseException):
            raise found
        return float(found)

    def end(self) -> None:
        self._go.put(0)
        self._thread.join()


def timed(arm: Round, steps: int, device: torch.device) -> tuple[float, float]:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    loss = arm(steps)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin, loss


def write_tokens(path: Path, vocab: int, count: int) -> None:
    """llm.c's file, of made-up tokens: what is learnt does not matter here, what it costs does."""
    header = np.zeros(256, np.int32)
    header[:3] = (20240520, 1, count)
    draw = np.random.default_rng(SEED)
    path.write_bytes(header.tobytes() + draw.integers(0, vocab, count).astype(np.uint16).tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--size", default="124M" if on_gpu else "tiny")
    parser.add_argument("--rows", type=int, default=32 if on_gpu else 16)
    parser.add_argument("--length", type=int, default=1024 if on_gpu else 128)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--arms", default="tenure,eager,compiled")
    options = parser.parse_args()
    options.device = torch.device("cuda" if on_gpu else "cpu")
    if not on_gpu:
        torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "tokens.bin"
        config = _C.TrainConfig.named("gpt2", options.size)
        write_tokens(data, config.vocab, 200 * options.rows * options.length + 1)
        measure(options, data)
    dist.destroy_process_group()


def measure(options: argparse.Namespace, data: Path) -> None:
    ours = Tenure(options, data, (options.rounds + 1) * options.steps + 1)
    every: dict[str, Round] = {
        "tenure": ours,
        "eager": Plain(options, data, compiled=False),
        "compiled": Plain(options, data, compiled=True),
    }
    arms = {name: every[name] for name in options.arms.split(",")}
    losses = {name: timed(arm, options.steps, options.device)[1] for name, arm in arms.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in track(range(options.rounds), "rounds", transient=True):
        for name, arm in arms.items():
            seconds, losses[name] = timed(arm, options.steps, options.device)
            times[name].append(seconds)
    ours.end()
    tokens = options.rows * options.length * options.steps
    table = tables.Table("train", ["arm", "tokens/s", "× eager", "ms a step", "last loss"])
    for name, found in times.items():
        speed = tokens / statistics.median(found)
        base = times.get("eager", found)
        ratio = statistics.median(b / f for b, f in zip(base, found, strict=True))
        cells = [
            name, f"{speed:,.0f}", f"{ratio:.3f}",
            f"{statistics.median(found) / options.steps * 1e3:.1f}", f"{losses[name]:.4f}",
        ]  # fmt: skip
        table.add(cells, arm=name, tokens_per_second=speed, over_eager=ratio, loss=losses[name])
    table.show()


if __name__ == "__main__":
    main()
