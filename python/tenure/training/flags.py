"""Flags: what `tenure train` can be told. See command.py for how they become a command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

__all__ = ["Flags"]

_MODEL = "Model and data"
_LENGTH = "How long, how much a step"
_LEARNING = "Learning"
_PARALLEL = "Parallelism"
_MEMORY = "Memory"
_LOOKING = "Looking at it"
_SAVING = "Saving and going on"


def _option(heading: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=heading, **more)


@dataclass(frozen=True)
class Flags:
    """The command line as it was typed: None and empty are what was not said."""

    model: Annotated[
        str | None, _option(_MODEL, "gpt2 or llama.", metavar="NAME", show_default="gpt2")
    ] = None
    size: Annotated[
        str | None,
        _option(_MODEL, "tiny; gpt2: 124M 350M 774M 1558M; llama: 1B 3B 8B.", show_default="tiny"),
    ] = None
    weights: Annotated[
        str,
        _option(
            _MODEL,
            "Hugging Face safetensors to begin with, a folder or a file; the config.json beside "
            "them says model and size.",
        ),
    ] = ""
    data: Annotated[
        str,
        _option(
            _MODEL,
            "llm.c's tokens (.bin), a text, whose bytes are tokens, or a folder of *.py.",
            "--data",
            "--input-bin",
            show_default="Python's standard library",
        ),
    ] = ""
    validation: Annotated[
        str,
        _option(
            _MODEL,
            "The same, to evaluate on.",
            "--validation",
            "--input-val-bin",
            show_default="the last tenth of --data",
        ),
    ] = ""

    steps: Annotated[
        int,
        _option(
            _LENGTH,
            "Optimizer steps.",
            "--steps",
            "--num-iterations",
            "--num-iteration",
            min=1,
        ),
    ] = 300
    rows: Annotated[
        int | None,
        _option(_LENGTH, "Sequences a step, of one data rank.", min=1, show_default="8"),
    ] = None
    length: Annotated[
        int, _option(_LENGTH, "Tokens a sequence.", "--length", "--sequence-length", min=1)
    ] = 128
    microbatches: Annotated[
        int | None,
        _option(_LENGTH, "Parts in which a step's rows are done.", min=1, show_default="4"),
    ] = None
    batch_size: Annotated[
        int | None,
        _option(
            _LENGTH,
            "Rows of a microbatch, as llm.c has it, instead of --rows.",
            min=1,
            show_default=False,
        ),
    ] = None
    total_batch_size: Annotated[
        int | None,
        _option(
            _LENGTH, "Tokens a step of all ranks, instead of --rows.", min=1, show_default=False
        ),
    ] = None

    learning_rate: Annotated[
        float | None,
        _option(_LEARNING, "The highest.", min=0, show_default="0.003 for tiny, else 0.0006"),
    ] = None
    learning_rate_decay_frac: Annotated[
        float, _option(_LEARNING, "What of it is left at the end.", min=0, max=1)
    ] = 0.1
    warm_up: Annotated[
        int | None,
        _option(
            _LEARNING,
            "Steps until it is reached.",
            "--warm-up",
            "--warmup-iters",
            min=0,
            show_default="a tenth of them",
        ),
    ] = None
    beta1: Annotated[float, _option(_LEARNING, "AdamW's.")] = 0.9
    beta2: Annotated[float, _option(_LEARNING, "AdamW's.")] = 0.95
    weight_decay: Annotated[float, _option(_LEARNING, "AdamW's.", min=0)] = 0.1
    clip: Annotated[
        float,
        _option(
            _LEARNING,
            "The most that the norm of all gradients may be; 0: anything.",
            "--clip",
            "--grad-clip",
            min=0,
        ),
    ] = 1.0
    dtype: Annotated[str, _option(_LEARNING, "float32, or bfloat16 by autocast.")] = "float32"
    seed: Annotated[int, _option(_LEARNING, "Of weights and batches.", min=0, max=2**63 - 1)] = 0

    ranks: Annotated[
        int | None,
        _option(
            _PARALLEL,
            "Processes to start; under torchrun it joins those that are there.",
            "--ranks",
            "--nthread-per-process",
            min=1,
            show_default="--pp times --dp",
        ),
    ] = None
    pp: Annotated[
        int, _option(_PARALLEL, "Ranks of a pipeline.", "--pp", "--pipeline-parallel", min=1)
    ] = 1
    vpp: Annotated[
        int | None,
        _option(
            _PARALLEL,
            "Stages a rank.",
            "--vpp",
            "--virtual-pipeline-parallel",
            min=1,
            show_default="the schedule's",
        ),
    ] = None
    schedule: Annotated[
        str,
        _option(
            _PARALLEL,
            "gpipe, 1f1b, interleaved-1f1b, looped-bfs, zb-h1, zb-v, dualpipev, or a file; "
            "`tenure pipeline show` draws them.",
            metavar="NAME|FILE.csv",
        ),
    ] = "1f1b"
    dp: Annotated[
        int | None,
        _option(
            _PARALLEL,
            "Data ranks: pipelines side by side, each with its own rows.",
            min=1,
            show_default="--ranks by --pp",
        ),
    ] = None
    zero: Annotated[
        int,
        _option(
            _PARALLEL,
            "3: data ranks share out weights, gradients and optimizer; 0: each has all.",
            "--zero",
            "--zero-stage",
        ),
    ] = 0
    device: Annotated[
        str, _option(_PARALLEL, "auto, cpu or cuda; auto: cuda with a GPU for each rank.")
    ] = "auto"

    offload: Annotated[
        str,
        _option(
            _MEMORY,
            "What autograd saves goes to the host: none, all, or what does not fit.",
            metavar="none|all|8GiB",
        ),
    ] = "none"
    fit: Annotated[
        str,
        _option(
            _MEMORY,
            "A step fits into this, in the least time: what autograd saves is kept, moved to the "
            "host or made again, each thing as is cheapest; instead of --offload and --recompute.",
            metavar="6GiB",
            show_default=False,
        ),
    ] = ""
    recompute: Annotated[bool, _option(_MEMORY, "Layers run again in backward.", "--recompute")] = (
        False
    )
    strict: Annotated[
        bool,
        _option(_MEMORY, "Hold each step's activations against the bound; stop when over it."),
    ] = True
    observe: Annotated[bool, _option(_MEMORY, "Watch all ranks, for verdict and report.")] = True
    level: Annotated[
        str, _option(_MEMORY, "count: bytes only; trace: each storage; deep: whole stacks.")
    ] = "trace"

    sinks: Annotated[
        str,
        _option(
            _MEMORY,
            "Loggers for the memory of all ranks, by commas: tensorboard, prometheus, wandb, "
            "mlflow, comet, jsonl; `tenure top OUT` shows it in any case.",
            show_default=False,
        ),
    ] = ""
    alerts: Annotated[
        str,
        _option(
            _MEMORY,
            "Rules about it, by commas: 'headroom < 5%, growth > 1 MB/step for 50 steps'.",
            show_default=False,
        ),
    ] = ""

    evaluate_every: Annotated[
        int | None,
        _option(
            _LOOKING,
            "Steps; 0: never.",
            "--evaluate-every",
            "--val-loss-every",
            min=0,
            show_default="a quarter of them",
        ),
    ] = None
    evaluate_batches: Annotated[
        int,
        _option(
            _LOOKING, "Batches of an evaluation.", "--evaluate-batches", "--val-max-steps", min=1
        ),
    ] = 4
    sample_every: Annotated[
        int | None,
        _option(
            _LOOKING,
            "Steps; 0: never.",
            "--sample-every",
            "--freq-generate-txt",
            min=0,
            show_default="at the end",
        ),
    ] = None
    sample_tokens: Annotated[
        int, _option(_LOOKING, "Its tokens.", "--sample-tokens", "--text-length", min=1)
    ] = 160
    prompt: Annotated[str, _option(_LOOKING, "What a sample goes on from.")] = "def "

    out: Annotated[
        str,
        _option(
            _SAVING,
            "Folder for checkpoints, metrics, log, recordings and the report.",
            "--out",
            "--output-dir",
        ),
    ] = "train.tenure"
    resume: Annotated[
        bool,
        _option(
            _SAVING,
            "Go on from the newest checkpoint in --out, on as many ranks as you like.",
            "--resume",
        ),
    ] = False
    overwrite: Annotated[
        bool,
        _option(
            _SAVING, "Begin anew: what an earlier run left in --out is removed.", "--overwrite"
        ),
    ] = False
    save_every: Annotated[
        int,
        _option(_SAVING, "Steps; 0: at the end only.", "--save-every", "--save-interval", min=0),
    ] = 100
    keep: Annotated[
        int,
        _option(
            _SAVING, "Checkpoints, the newest; 0: all.", "--keep", "--max-checkpoint-keep", min=0
        ),
    ] = 2
    timeout: Annotated[
        float, _option(_SAVING, "Seconds until a rank that is silent is given up.", min=1)
    ] = 300.0
    restarts: Annotated[
        int,
        _option(
            _SAVING, "How often ranks start again, from the newest checkpoint, if one fails.", min=0
        ),
    ] = 0
