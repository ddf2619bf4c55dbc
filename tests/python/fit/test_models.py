"""Models of all kinds: gradients, buffers and random numbers are plain PyTorch's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fitting import Job, deep, same_as_plain

WORDS = 64


def language_model(model: nn.Module) -> Job:
    words = torch.randint(0, WORDS, (4, 32), generator=torch.Generator().manual_seed(0))

    def loss(n: int) -> Tensor:
        batch = (words + n) % WORDS
        out: Any = model(input_ids=batch, labels=batch, use_cache=False)
        value: Tensor = out.loss
        return value

    return Job(model.train(), loss)


def llama() -> Job:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return language_model(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=WORDS,
                hidden_size=64,
                intermediate_size=176,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
            )
        )
    )


def gpt2(dropout: float) -> Job:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return language_model(
        GPT2LMHeadModel(
            GPT2Config(
                vocab_size=WORDS,
                n_positions=64,
                n_embd=64,
                n_layer=3,
                n_head=4,
                resid_pdrop=dropout,
                embd_pdrop=dropout,
                attn_pdrop=dropout,
            )
        )
    )


class Residual(nn.Module):
    """Batch norms that count, and rectifiers that write over their input."""

    def __init__(self, channels: int, inplace: bool) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.two = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))
        self.act = nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norms[0](self.one(x)))
        y = self.norms[1](self.two(y))
        y += x
        return self.act(y)


def resnet(inplace: bool = True) -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        *(Residual(8, inplace) for _ in range(3)),
        nn.MaxPool2d(2),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(8 * 64, 10),
        nn.SiLU(),
        nn.Linear(10, 10),
    )
    x = torch.randn(16, 3, 16, 16)
    return Job(model, lambda n: model(x + n).square().sum())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x)[0]
        return self.head(out)


def lstm() -> Job:
    torch.manual_seed(0)
    model = Recurrent()
    x = torch.randn(128, 12, 32)
    return Job(model, lambda n: model(x + n).square().sum())


def dropout() -> Job:
    job = deep()
    model = nn.Sequential(
        *(part for layer in job.model.children() for part in (layer, nn.Dropout()))
    )
    x = torch.randn(512, 64)
    return Job(model, lambda n: model(x + n).square().sum())


def shared_weights() -> Job:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    model = nn.Sequential(layer, nn.SiLU(), layer, nn.GELU(), layer, nn.SiLU(), nn.LayerNorm(64))
    x = torch.randn(512, 64)
    return Job(model, lambda n: model(x + n).square().sum())


class Views(nn.Module):
    """Parts, transposes and expansions of what is made again."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(64, 192)
        self.out = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = F.silu(self.mix(x)).chunk(3, dim=-1)
        y = (a.t() @ b) * c[:64].exp().mean(0, keepdim=True).expand(64, 64)
        z = y.unfold(0, 8, 1).transpose(1, 2).reshape(-1, 64)
        return self.out(z.sigmoid().exp().sin())[..., ::2].exp()


def views() -> Job:
    torch.manual_seed(0)
    model = Views()
    x = torch.randn(512, 64)
    return Job(model, lambda n: model(x + n).square().sum())


@pytest.mark.parametrize(
    "make",
    [
        llama,
        lambda: gpt2(0.0),
        lambda: gpt2(0.1),
        resnet,
        lambda: resnet(inplace=False),
        lstm,
        dropout,
        shared_weights,
        views,
    ],
    ids=[
        "llama",
        "gpt2",
        "gpt2-dropout",
        "resnet",
        "resnet-out-of-place",
        "lstm",
        "dropout",
        "shared",
        "views",
    ],
)
@pytest.mark.parametrize("part", [0.2, 0.4])
def test_gradients_buffers_and_random_numbers(make: Callable[[], Job], part: float) -> None:
    fit = same_as_plain(make, part=part)
    assert fit.stats().mode == "planned"
    assert fit.stats().peak <= fit.stats().budget


def test_random_operators_are_never_made_again() -> None:
    plan = same_as_plain(dropout).plan
    assert not [row for row in plan.rows if row.action == "recompute" and "drop" in row.op]


def test_batch_norms_are_never_made_again() -> None:
    plan = same_as_plain(resnet).plan
    assert not [row for row in plan.rows if row.action == "recompute" and "batch_norm" in row.op]


def test_autocast() -> None:
    def make() -> Job:
        job = deep()

        def loss(n: int) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return job.loss(n)

        return Job(job.model, loss)

    fit = same_as_plain(make)
    assert "aten::_to_copy" in {row.op for row in fit.plan.rows}
