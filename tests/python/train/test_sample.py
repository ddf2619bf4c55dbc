"""Text from a model."""

from __future__ import annotations

import pytest
import torch

from tenure import InputError
from tenure._C import TrainAdamW, TrainConfig, TrainStage, train_loss


@pytest.fixture(scope="module")
def model() -> TrainStage:
    """A model of random weights that are large enough to prefer some tokens."""
    config = TrainConfig.named("llama", "tiny")
    stage = TrainStage(config, seed=3)
    with torch.no_grad():
        for name, weight in stage.named_weights():
            if name == "lm_head.weight":
                weight.mul_(10)
    return stage


def likeliest(model: TrainStage, row: list[int]) -> list[int]:
    with torch.no_grad():
        return model(torch.tensor([row]))[0, -1].argsort(descending=True).tolist()


def test_greedy_takes_the_likeliest(model: TrainStage) -> None:
    row = [1, 2, 3]
    for token in model.sample(row, count=5, temperature=0.0):
        assert token == likeliest(model, row)[0]
        row.append(token)


def test_top_k_takes_one_of_the_likeliest(model: TrainStage) -> None:
    row = [9]
    for token in model.sample(row, count=30, top_k=3, temperature=5.0, seed=1):
        assert token in likeliest(model, row)[:3]
        row.append(token)
    assert len(row) == 31


def test_one_of_one_is_greedy(model: TrainStage) -> None:
    assert model.sample([5], count=8, top_k=1) == model.sample([5], count=8, temperature=0.0)


def test_a_seed_repeats_and_another_does_not(model: TrainStage) -> None:
    first, again, other = (model.sample([5], count=20, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_drawn_as_often_as_likely() -> None:
    config = TrainConfig(
        kind="gpt2", layers=1, heads=1, kv_heads=1, width=4, hidden=4, vocab=3, context=8
    )
    stage = TrainStage(config, seed=1)
    with torch.no_grad():
        for _, weight in stage.named_weights():
            weight.mul_(30)
        probabilities = stage(torch.tensor([[0]]))[0, -1].softmax(0)
    drawn = torch.tensor([stage.sample([0], count=1, seed=seed)[0] for seed in range(1000)])
    shares = drawn.bincount(minlength=3) / 1000
    assert torch.allclose(shares, probabilities, atol=0.05)  # three deviations at 1,000 draws


def test_a_row_longer_than_the_context_goes_on(model: TrainStage) -> None:
    prompt = [i % 256 for i in range(300)]
    token = model.sample(prompt, count=1, temperature=0.0)
    assert token == model.sample(prompt[-256:], count=1, temperature=0.0)


@pytest.mark.parametrize(
    ("prompt", "options", "complaint"),
    [
        ([], {}, "give it one token at least"),
        ([1], {"temperature": -1.0}, "temperature -1 .* has no meaning"),
        ([1], {"top_k": -1}, "has no meaning"),
    ],
)
def test_options_without_meaning(
    model: TrainStage, prompt: list[int], options: dict[str, float], complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        model.sample(prompt, count=1, **options)


def test_a_stage_cannot_be_sampled_from() -> None:
    stage = TrainStage(TrainConfig.named("gpt2", "tiny"), layers=(0, 2), seed=1)
    with pytest.raises(InputError, match="only a whole model can be sampled from"):
        stage.sample([1], count=1)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_what_was_learned_is_said(kind: str) -> None:
    """Every part together: a tiny model that learns one sentence by heart."""
    stage = TrainStage(TrainConfig.named(kind, "tiny"), seed=1)
    optimizer = TrainAdamW(stage.named_weights())
    sentence = b"the lease ends with its scope. "
    row = torch.tensor([list(sentence)])
    for _ in range(80):
        optimizer.zero_grad()
        loss = train_loss(stage(row[:, :-1]), row[:, 1:])
        loss.backward()
        optimizer.step(1e-3)
    said = stage.sample(list(sentence[:4]), count=len(sentence) - 4, temperature=0.0)
    assert bytes(said) == sentence[4:]
