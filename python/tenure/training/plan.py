"""Plan: everything that a command line chose, as plain values that go to the ranks as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tenure import _C

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """A job and what is around it: its folder, its ranks, its observer.

    Most of it is what C++ calls a job, under the same names: see tenure/train/job.h.

    Attributes:
        model: ``gpt2`` or ``llama``.
        size: A size that has a name, or the path of a Hugging Face ``config.json``.
        least: The learning rate that the schedule ends with.
        ranks: Processes, ``pp * dp``.
        offload: ``none``, ``all`` or ``budget``.
        fit: Bytes that a step is made to fit into; 0: whatever it takes.
        device: ``cpu`` or ``cuda``; each rank takes its own.
        bytes_as_tokens: Whether tokens are the bytes of a text.
        out: Folder of everything that the run writes.
        resume: Whether it goes on from the newest checkpoint in `out`.
        restarts: How often ranks are started again after one has failed.
        observe: Level at which ranks are watched; empty: they are not.
        sinks: Names of loggers for the memory of all ranks.
        alerts: Rules about it.
    """

    model: str
    size: str
    weights: str
    data: str
    validation: str
    rows: int
    length: int
    microbatches: int
    steps: int
    learning_rate: float
    least: float
    warm_up: int
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip: float
    seed: int
    ranks: int
    pp: int
    vpp: int
    dp: int
    schedule: str
    zero: int
    offload: str
    offload_budget: int
    fit: int
    recompute: bool
    device: str
    bf16: bool
    strict: bool
    evaluate_every: int
    evaluate_batches: int
    sample_every: int
    sample_tokens: int
    prompt: str
    bytes_as_tokens: bool
    out: str
    save_every: int
    keep: int
    resume: bool
    timeout: float
    restarts: int
    observe: str
    sinks: list[str]
    alerts: list[str]

    def text(self) -> str:
        """As JSON, for ranks and for the run's folder."""
        return json.dumps(asdict(self), ensure_ascii=False, indent=1)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Reads what :meth:`text` wrote."""
        return cls(**json.loads(text))

    @property
    def config(self) -> _C.TrainConfig:
        """The model's figures. Raises InputError for a size that there is not."""
        if self.size.endswith(".json"):
            return _C.TrainConfig.read(self.size)
        return _C.TrainConfig.named(self.model, self.size)

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return Path(self.out) / "checkpoints"

    def job(self, device: torch.device) -> _C.TrainJob:
        """As C++ takes it, for a rank on that device."""
        return _C.TrainJob(
            model=self.config,
            weights=self.weights,
            data=self.data,
            validation=self.validation,
            rows=self.rows,
            length=self.length,
            microbatches=self.microbatches,
            steps=self.steps,
            learning_rate=self.learning_rate,
            least_learning_rate=self.least,
            warm_up=self.warm_up,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            clip=self.clip,
            seed=self.seed,
            pp=self.pp,
            vpp=self.vpp,
            dp=self.dp,
            schedule=self.schedule,
            zero=self.zero,
            offload=self.offload,
            offload_budget=self.offload_budget,
            fit=self.fit or None,
            recompute=self.recompute,
            device=device,
            bf16=self.bf16,
            strict=self.strict,
            evaluate_every=self.evaluate_every,
            evaluate_batches=self.evaluate_batches,
            sample_every=self.sample_every,
            sample_tokens=self.sample_tokens,
            prompt=self.prompt,
            checkpoints=str(self.checkpoints),
            save_every=self.save_every,
            keep=self.keep,
            resume=self.resume,
            timeout=self.timeout,
        )
