"""What bench/offload.py compares: one job, and the ways to hold what its forward saves."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import checkpoint as checkpoints
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaModel

import tenure

FRACTIONS = (0.8, 0.6, 0.45, 0.35)
FULL = {"use_reentrant": False}
aten = torch.ops.aten
MATMULS_AND_ATTENTION = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}


@dataclass(frozen=True)
class Shape:
    """The model of DESIGN; TINY is for machines without a GPU."""

    layers: int = 16
    width: int = 2048
    inner: int = 8192
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 32000


TINY = Shape(layers=3, width=64, inner=192, heads=4, kv_heads=2, vocabulary=128)


class Job:
    """Forward and backward of a Hugging Face Llama without its head, on one sequence."""

    def __init__(self, shape: Shape, device: str) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.width,
            intermediate_size=shape.inner,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=1 << 17,
            attn_implementation="sdpa",
        )
        with torch.device(device):
            self.model = LlamaModel(config)
        self.model.to(torch.bfloat16 if device == "cuda" else torch.float32).train()
        self.device = device
        self.vocabulary = shape.vocabulary
        self.resize(1)

    def resize(self, tokens: int) -> None:
        self.tokens = torch.randint(self.vocabulary, (1, tokens), device=self.device)

    def loss(self) -> torch.Tensor:
        hidden = self.model(input_ids=self.tokens, use_cache=False).last_hidden_state
        return hidden.float().square().mean()

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def checkpointing(self, options: dict[str, object] | None) -> Iterator[None]:
        if options is None:
            yield
            return
        self.model.gradient_checkpointing_enable(options)
        try:
            yield
        finally:
            self.model.gradient_checkpointing_disable()


@dataclass(frozen=True)
class Reference:
    """Bytes of the device under arm none: at rest, after forward, and at most."""

    rest: int
    after: int
    peak: int

    @property
    def activations(self) -> int:
        return self.after - self.rest


@dataclass
class Arm:
    """A way to run a step, ready to use."""

    name: str
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    checkpoint: dict[str, object] | None = None
    offload: tenure.Offload | tenure.Fit | None = None
    budget: int | None = None

    def settle(self) -> None:
        """Until nothing that was copied is held on the device for its copy's sake."""
        if self.offload is not None and hasattr(self.offload, "settle"):
            self.offload.settle()


@dataclass(frozen=True)
class Way:
    """How to make an arm, and what it may be expected to hold on the host."""

    name: str
    make: Callable[[Job, Reference], Arm]
    host: float = 0.0  # of the activations' bytes
    missing: Callable[[str], str | None] = lambda _device: None  # why it cannot run here


def ours(job: Job, name: str, budget: int | None = None) -> Arm:
    target = {} if job.device == "cuda" else {"target": "copy"}
    offload = tenure.Offload(job.model, budget=budget, **target)
    checkpoint = FULL if name.endswith("checkpointing") else None
    return Arm(name, lambda: offload, checkpoint, offload, budget)


def no_offload(_device: str) -> str | None:
    return None if hasattr(tenure, "Offload") else f"tenure {tenure.__version__} has no Offload"


def save_on_cpu() -> contextlib.AbstractContextManager[object]:
    return torch.autograd.graph.save_on_cpu(pin_memory=True)


class Trl:
    """TRL's offloader: its own file from its wheel, unpacked, without the rest of TRL.

    The file imports accelerate, psutil and transformers and gets the real ones.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "trl/models/activation_offloading.py"
        found = sorted(folder.glob("trl-*.dist-info"))
        self.version = found[-1].stem.removeprefix("trl-") if found else "?"

    def missing(self, device: str) -> str | None:
        if device != "cuda":
            return "TRL's offloader needs an accelerator"
        return None if self.file.exists() else f"no {self.file}: see --peers"

    @functools.cached_property
    def module(self) -> ModuleType:
        from accelerate import PartialState

        PartialState()  # its logger raises without
        spec = importlib.util.spec_from_file_location("trl_activation_offloading", self.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def arm(self, job: Job, name: str, checkpoint: dict[str, object] | None = None) -> Arm:
        context = self.module.get_act_offloading_ctx_manager(job.model, warn_if_no_head=False)
        return Arm(name, lambda: context, checkpoint)


def selective_options() -> dict[str, object]:
    """Matmuls and attention to the host, the rest recomputed."""

    def policy(_context: object, op: object, *_: object, **__: object) -> object:
        if op in MATMULS_AND_ATTENTION:
            return checkpoints.CheckpointPolicy.MUST_CPU_OFFLOAD
        return checkpoints.CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(checkpoints.create_selective_checkpoint_contexts, policy)
    return {**FULL, "context_fn": contexts}


class _Count(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += func is aten.mm.default
        return func(*args, **(kwargs or {}))


def no_selective(_device: str) -> str | None:
    """Asks torch itself: a matmul that was offloaded is not computed again."""
    if not hasattr(checkpoints.CheckpointPolicy, "MUST_CPU_OFFLOAD"):
        return f"torch {torch.__version__} has no CheckpointPolicy.MUST_CPU_OFFLOAD"
    x = torch.ones(2, 2, requires_grad=True)
    with _Count() as count:
        out = checkpoints.checkpoint(
            lambda y: y.mm(torch.ones(2, 2)).cos(), x, **selective_options()
        )
        before = count.calls
        out.sum().backward()
    if count.calls - before > 1:  # one is the gradient's own
        return (
            f"torch {torch.__version__} has CheckpointPolicy.MUST_CPU_OFFLOAD and recomputes what "
            "it names: that is arm checkpointing"
        )
    return None


def ways(trl: Trl) -> list[Way]:
    """All arms, in the order of the table."""
    return [
        Way("none", lambda _job, _reference: Arm("none")),
        Way("checkpointing", lambda _job, _reference: Arm("checkpointing", checkpoint=FULL)),
        Way("trl", lambda job, _: trl.arm(job, "trl"), 1.1, trl.missing),
        Way(
            "checkpointing+trl",
            lambda job, _: trl.arm(job, "checkpointing+trl", FULL),
            0.1,
            trl.missing,
        ),
        # It copies every saved tensor, also one of the same storage again, and parameters.
        Way("save_on_cpu", lambda _job, _reference: Arm("save_on_cpu", save_on_cpu), 1.45),
        Way(
            "selective",
            lambda _job, _reference: Arm("selective", checkpoint=selective_options()),
            0.5,
            no_selective,
        ),
        Way("ours", lambda job, _: ours(job, "ours"), 1.05, missing=no_offload),
        *(_at(fraction) for fraction in FRACTIONS),
        Way(
            "ours+checkpointing",
            lambda job, _: ours(job, "ours+checkpointing"),
            0.1,
            missing=no_offload,
        ),
    ]


def _at(fraction: float) -> Way:
    name = f"ours@{fraction}"

    def make(job: Job, reference: Reference) -> Arm:
        return ours(job, name, int(fraction * reference.peak))

    return Way(name, make, 1.1 * (1 - fraction), missing=no_offload)


def groups(chosen: list[Way], reference: Reference, room: float) -> list[list[Way]]:
    """Arms that are measured together: as many as `room` bytes of the host hold, `none` in each."""
    none = next(way for way in chosen if way.name == "none")
    out: list[list[Way]] = []
    for way in chosen:
        if way is none:
            continue
        for group in out:
            if sum(each.host for each in [*group, way]) * reference.activations <= room:
                group.append(way)
                break
        else:
            out.append([none, way])
    return out or [[none]]
