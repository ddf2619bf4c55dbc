"""The Trainer of transformers inside `tenure.integrations.transformers.offload`."""

from __future__ import annotations

import contextlib
import doctest
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tenure
from tenure.integrations import transformers as integration

pytestmark = pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("accelerate")),
    reason="transformers and accelerate are not installed",
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are slower on several, most of all beside other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trainer(folder: Path, **settings: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (8, 24))]
    return transformers.Trainer(
        transformers.LlamaForCausalLM(config),
        transformers.TrainingArguments(
            str(folder),
            max_steps=3,
            per_device_train_batch_size=2,
            use_cpu=True,
            learning_rate=1e-2,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **settings,
        ),
        train_dataset=rows,
    )


def train(made: Any) -> tuple[list[float], list[torch.Tensor]]:
    made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    return losses, [parameter.detach() for parameter in made.model.parameters()]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "bf16": True},
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
        },
    ],
    ids=["plain", "accumulation-checkpointing-bf16", "reentrant"],
)
def test_training_is_what_it_is_without(tmp_path: Path, settings: dict[str, Any]) -> None:
    losses, weights = train(trainer(tmp_path, **settings))
    assert len(set(losses)) == 3, "nothing was trained"

    made = trainer(tmp_path, **settings)
    with integration.offload(made, target="copy", min_bytes=1024) as offload:
        offloaded_losses, offloaded_weights = train(made)

    assert offloaded_losses == losses
    assert all(map(torch.equal, offloaded_weights, weights))
    stats = offload.stats()
    assert stats.steps == 3 * settings.get("gradient_accumulation_steps", 1)
    assert stats.moved_in_bytes == stats.moved_out_bytes > 0
    assert "training_step" not in vars(made)


def test_evaluation_is_not_touched(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    with integration.offload(made, target="copy", min_bytes=1024) as offload:
        made.evaluate(made.train_dataset)
    assert offload.stats().steps == 0


class Loop:
    """A trainer as small as one can be."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.model(batch).square().sum()
        loss.backward()
        return loss.detach()


def test_an_error_in_a_step_goes_through_and_the_trainer_is_as_it_was() -> None:
    loop = Loop()
    with (
        pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
        integration.offload(loop, target="copy", min_bytes=1) as offload,
    ):
        loop.training_step(torch.ones(64, 64))
        loop.training_step(torch.ones(64, 65))
    assert "training_step" not in vars(loop)

    steps = offload.stats().steps
    loop.training_step(torch.ones(64, 64))
    assert offload.stats().steps == steps, "the step ran in an Offload that has ended"
    with integration.offload(loop, target="copy", min_bytes=1) as offload:
        for _ in range(3):
            loop.training_step(torch.ones(64, 64))
    assert offload.stats().moved_out_bytes > 0


def test_a_step_that_was_there_already_comes_back() -> None:
    loop = Loop()
    calls: list[str] = []
    of_class = loop.training_step

    def own(batch: torch.Tensor) -> torch.Tensor:
        calls.append("own")
        return of_class(batch)

    loop.training_step = own  # type: ignore[method-assign]
    with integration.offload(loop, target="copy"):
        loop.training_step(torch.ones(64, 64))
    assert calls == ["own"]
    assert loop.training_step is own


# --- what is refused ------------------------------------------------------------------------------


@contextlib.contextmanager
def refused(complaint: str) -> Iterator[None]:
    with pytest.raises(tenure.InputError, match=complaint):
        yield


def test_a_trainer_that_offloads_already_is_refused() -> None:
    loop = Loop()
    loop.maybe_activation_offload_context = tenure.Offload(loop.model, target="copy")  # type: ignore[attr-defined]
    with refused("offloads activations already"), integration.offload(loop):
        pass
    loop.maybe_activation_offload_context = contextlib.nullcontext()  # type: ignore[attr-defined]
    with integration.offload(loop, target="copy"):
        loop.training_step(torch.ones(64, 64))


def test_a_trainer_that_makes_its_model_anew_is_refused() -> None:
    loop = Loop()
    loop.model_init = Loop  # type: ignore[attr-defined]
    with refused("model_init"), integration.offload(loop):
        pass


def test_what_is_no_trainer_is_refused() -> None:
    with refused("Linear has no model"), integration.offload(nn.Linear(1, 1)):
        pass
    holder = contextlib.nullcontext()
    holder.model = nn.Linear(1, 1)  # type: ignore[attr-defined]
    with refused("nullcontext has no training_step"), integration.offload(holder):
        pass


def test_an_option_that_offload_does_not_have_is_refused() -> None:
    with refused("Offload has no option size"), integration.offload(Loop(), size=1):  # type: ignore[call-arg]
        pass


def test_the_docstring_runs() -> None:
    assert doctest.testmod(integration).failed == 0
