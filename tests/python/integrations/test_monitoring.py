"""A monitor inside the trainers of others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tenure
from tenure.errors import InputError
from tenure.integrations import lightning as with_lightning
from tenure.integrations import transformers as with_transformers
from tenure.telemetry.figures import Figures


class Monitor:
    """Counts, as `tenure.Monitor` would."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def step(self) -> None:
        self.calls.append("step")

    def failed(self, error: BaseException) -> None:
        self.calls.append(f"failed: {error}")

    def close(self) -> None:
        self.calls.append("close")


def train(folder: Path, monitor: Any, accumulated: int = 1) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    transformers.Trainer(
        transformers.LlamaForCausalLM(config),
        transformers.TrainingArguments(
            str(folder),
            max_steps=3,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=accumulated,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (8, 8))],
        callbacks=[with_transformers.monitor_callback(monitor)],
    ).train()


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_trainer_of_transformers_steps_it(tmp_path: Path, accumulated: int) -> None:
    monitor = Monitor()
    train(tmp_path, monitor, accumulated)
    assert monitor.calls == ["step"] * 3 + ["close"]


def test_a_monitor_in_the_trainer_of_transformers_tells_each_step(tmp_path: Path) -> None:
    seen: list[Figures] = []
    monitor = tenure.Monitor(sinks=[seen.append], every=1, folder=tmp_path / "memory")
    train(tmp_path, monitor)
    assert len(seen) == 3
    assert all(one.world["host_rss_bytes"].value > 1 << 20 for one in seen)
    with pytest.raises(InputError, match="closed"):
        monitor.step()


def module(lightning: Any, fails_at: int | None) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            if number == fails_at:
                raise RuntimeError("out of memory")
            return self.layer(batch).sum()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def fit(monitor: Monitor, folder: Path, fails_at: int | None = None, **options: Any) -> None:
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed").pytorch
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        callbacks=[with_lightning.monitor_callback(monitor)],
        **options,
    )
    batches = torch.utils.data.DataLoader(torch.ones(6, 4), batch_size=1)
    trainer.fit(module(lightning, fails_at), batches)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_trainer_of_lightning_steps_it(tmp_path: Path, accumulated: int) -> None:
    monitor = Monitor()
    fit(monitor, tmp_path, accumulate_grad_batches=accumulated)
    assert monitor.calls == ["step"] * (6 // accumulated) + ["close"]


def test_the_trainer_of_lightning_closes_it_when_it_fails(tmp_path: Path) -> None:
    monitor = Monitor()
    with pytest.raises(RuntimeError, match="out of memory"):
        fit(monitor, tmp_path, fails_at=2)
    assert monitor.calls == ["step", "step", "failed: out of memory", "close"]


def test_what_lightning_makes_of_a_signal_is_a_failure() -> None:
    pytest.importorskip("lightning", reason="its callback is one of Lightning's")
    monitor = Monitor()
    callback = with_lightning.monitor_callback(monitor)
    callback.on_exception(None, None, SystemExit("SIGTERM"))
    callback.on_exception(None, None, KeyboardInterrupt())
    assert monitor.calls == ["failed: SIGTERM", "close", "close"]


@pytest.mark.parametrize("integration", [with_transformers, with_lightning])
def test_what_is_no_monitor_is_refused(integration: Any) -> None:
    for wrong in (None, Monitor):
        with pytest.raises(InputError, match="takes a tenure.Monitor and not"):
            integration.monitor_callback(wrong)


@pytest.mark.parametrize(
    ("integration", "modules"),
    [(with_transformers, ["transformers"]), (with_lightning, ["lightning", "pytorch_lightning"])],
)
def test_a_trainer_that_is_not_installed_is_told(
    monkeypatch: pytest.MonkeyPatch, integration: Any, modules: list[str]
) -> None:
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "lightning.pytorch", raising=False)
    with pytest.raises(InputError, match="pip install"):
        integration.monitor_callback(Monitor())


def test_importing_tenure_imports_no_trainer() -> None:
    program = "import sys, tenure; print({'transformers', 'lightning'} & set(sys.modules))"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "set()"
