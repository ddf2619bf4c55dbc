"""From flags to a plan: what was left out, what excludes what, and what cannot be."""

from __future__ import annotations

import math
import os
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tenure import _C
from tenure._inputs import need_size, parse_bytes
from tenure.errors import InputError
from tenure.inspect.options import LEVELS
from tenure.pipelining.schedules import schedule
from tenure.telemetry.alerts import alerts_of
from tenure.telemetry.sinks import NAMES as SINKS
from tenure.training.flags import Flags
from tenure.training.plan import Plan

__all__ = ["World", "plan_of", "started_world"]

_MICROBATCHES = 4
_ROWS = 8
_LEARNING_RATES = {"tiny": 3e-3}
_LEARNING_RATE = 6e-4
_MOST = 2**31 - 1
_MOST_SEED = 2**63 - 1
_DAY = 86_400.0


@dataclass(frozen=True)
class World:
    """A rank among others: numbers in the job and on this machine."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1


def started_world(given: Mapping[str, str] = os.environ) -> World | None:
    """What torchrun or the like has started, if this process is one of its ranks.

    Raises:
        InputError: The variables are there and are no numbers.
    """
    if not given.get("RANK") or not given.get("WORLD_SIZE"):
        return None
    try:
        rank, ranks = int(given["RANK"]), int(given["WORLD_SIZE"])
        here = int(given.get("LOCAL_RANK", rank)), int(given.get("LOCAL_WORLD_SIZE", ranks))
    except ValueError:
        raise InputError(
            "RANK and WORLD_SIZE are in the environment and are no numbers: unset them"
        ) from None
    return World(rank, ranks, *here)


def plan_of(flags: Flags, world: World | None) -> Plan:
    """The plan that the flags mean.

    Raises:
        InputError: They contradict each other.
    """
    _require_text(flags)
    _require_figures(flags)
    ranks, dp = _ranks(flags, world)
    model, size = _model(flags)
    rows, microbatches = _batch(flags, dp)
    offload, budget = _offload(flags.offload)
    if flags.zero not in (0, 3):
        raise InputError(
            f"--zero is 0 (each data rank has all) or 3 (they share out weights, gradients and "
            f"optimizer), not {flags.zero}"
        )
    if flags.level not in LEVELS:
        raise InputError(f"--level is {', '.join(LEVELS)}, not {flags.level!r}")
    rate = flags.learning_rate
    if rate is None:
        rate = _LEARNING_RATES.get(size, _LEARNING_RATE)
    quarter = -(-flags.steps // 4)
    return Plan(
        model=model,
        size=size,
        weights=_path(flags.weights),
        data=_path(flags.data) or sysconfig.get_path("stdlib"),
        validation=_path(flags.validation),
        rows=rows,
        length=flags.length,
        microbatches=microbatches,
        steps=flags.steps,
        learning_rate=rate,
        least=rate * flags.learning_rate_decay_frac,
        warm_up=flags.steps // 10 if flags.warm_up is None else flags.warm_up,
        beta1=flags.beta1,
        beta2=flags.beta2,
        eps=1e-8,
        weight_decay=flags.weight_decay,
        clip=flags.clip,
        seed=flags.seed,
        ranks=ranks,
        pp=flags.pp,
        vpp=flags.vpp or 0,
        dp=dp,
        schedule=_schedule(flags, microbatches),
        zero=flags.zero,
        offload=offload,
        offload_budget=budget,
        fit=_fit(flags),
        recompute=flags.recompute,
        device=_device(flags.device, world.local_ranks if world else ranks),
        bf16=_is_bf16(flags.dtype),
        strict=flags.strict,
        evaluate_every=quarter if flags.evaluate_every is None else flags.evaluate_every,
        evaluate_batches=flags.evaluate_batches,
        sample_every=flags.steps if flags.sample_every is None else flags.sample_every,
        sample_tokens=flags.sample_tokens,
        prompt=flags.prompt,
        bytes_as_tokens=not flags.data.endswith(".bin"),
        out=_out(flags.out),
        save_every=flags.save_every,
        keep=flags.keep,
        resume=flags.resume,
        timeout=flags.timeout,
        restarts=flags.restarts,
        observe=flags.level if flags.observe else "",
        sinks=_sinks(flags.sinks),
        alerts=_alerts(flags.alerts),
    )


def _sinks(names: str) -> list[str]:
    found = [name.strip() for name in names.split(",") if name.strip()]
    for name in found:
        if name not in SINKS:
            raise InputError(f"--sinks {name} is none: there are {', '.join(SINKS)}")
    return found


def _alerts(rules: str) -> list[str]:
    return [alert.rule for alert in alerts_of([one for one in rules.split(",") if one.strip()])]


def _require_text(flags: Flags) -> None:
    """Raises InputError for bytes that a shell passes on and that are no text."""
    for name, value in asdict(flags).items():
        try:
            str(value).encode()
        except UnicodeEncodeError:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} {value!r} is no text in UTF-8: choose another") from None


def _require_figures(flags: Flags) -> None:
    """Raises InputError for numbers that no machine counts to."""
    for name, value in asdict(flags).items():
        if isinstance(value, int) and value > (_MOST_SEED if name == "seed" else _MOST):
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} {value} is more than can be counted to: choose less")
    if not 0 < flags.timeout <= _DAY:
        raise InputError(f"--timeout is a number of seconds up to a day, not {flags.timeout}")
    for name, value in asdict(flags).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"--{name.replace('_', '-')} is a finite number, not {value}")


def _ranks(flags: Flags, world: World | None) -> tuple[int, int]:
    """How many ranks there are, and how many pipelines."""
    if world is not None and flags.ranks not in (None, world.ranks):
        raise InputError(
            f"--ranks says {flags.ranks} and the launcher has started {world.ranks}: leave --ranks "
            "out"
        )
    wanted = world.ranks if world is not None else flags.ranks
    said = f"{wanted} ranks" if world is not None else f"--ranks {wanted}"
    if wanted is not None and wanted % flags.pp != 0:
        raise InputError(
            f"{said} cannot be split into pipelines of --pp {flags.pp} ranks: choose a multiple of "
            f"{flags.pp}"
        )
    dp = flags.dp if flags.dp is not None else (wanted or flags.pp) // flags.pp
    ranks = flags.pp * dp
    if wanted not in (None, ranks):
        raise InputError(
            f"{said} is not --pp {flags.pp} times --dp {dp}, which is {ranks}: leave one of them "
            "out"
        )
    return ranks, dp


def _model(flags: Flags) -> tuple[str, str]:
    """Kind and size, or what stands beside the weights."""
    if not flags.weights or flags.size:
        return flags.model or "gpt2", flags.size or "tiny"
    weights = Path(_path(flags.weights))
    if not os.path.exists(weights):  # noqa: PTH110  false also for a name that is too long
        raise InputError(f"{flags.weights} does not exist: --weights is a file or a folder")
    config = (weights if weights.is_dir() else weights.parent) / "config.json"
    if not config.is_file():
        raise InputError(
            f"there is no config.json beside the weights in {config.parent}: say --model and --size"
        )
    kind = _C.TrainConfig.read(str(config)).kind
    if flags.model not in (None, "", kind):
        raise InputError(
            f"the weights in {config.parent} are of a {kind} and --model says {flags.model}: leave "
            "--model out"
        )
    return kind, str(config)


def _batch(flags: Flags, dp: int) -> tuple[int, int]:
    """Rows of a step on one data rank, and microbatches."""
    rows = flags.rows
    total = flags.total_batch_size
    if total is not None:
        unit = flags.length * dp
        if total % unit != 0:
            raise InputError(
                f"--total-batch-size {total} is no multiple of {unit}, the tokens of one row "
                f"(--length {flags.length}) on {dp} data ranks"
            )
        if rows not in (None, total // unit):
            raise InputError(
                f"--total-batch-size {total} makes {total // unit} rows a step and --rows says "
                f"{rows}: leave one of them out"
            )
        rows = total // unit
    size = flags.batch_size
    if size is None:
        return rows or _ROWS, flags.microbatches or _MICROBATCHES
    if rows is None:
        parts = flags.microbatches or _MICROBATCHES
        return size * parts, parts
    if rows % size != 0 or flags.microbatches not in (None, rows // size):
        parts_text = f"{flags.microbatches} " if flags.microbatches else ""
        raise InputError(
            f"{rows} rows a step cannot be split into {parts_text}microbatches of --batch-size "
            f"{size}"
        )
    return rows, rows // size


def _schedule(flags: Flags, microbatches: int) -> str:
    if not flags.schedule.endswith(".csv"):
        return flags.schedule
    path = _path(flags.schedule)
    schedule(path, flags.pp, microbatches, flags.vpp)  # here and not in C++: it names the file
    return path


def _offload(text: str) -> tuple[str, int]:
    if text in ("none", "all"):
        return text, 0
    try:
        return "budget", parse_bytes(text)
    except InputError:
        raise InputError(
            f"--offload is none, all or the memory that a device may use, as 8GiB, not {text!r}"
        ) from None


def _fit(flags: Flags) -> int:
    """Bytes; 0 if it was not said."""
    if not flags.fit:
        return 0
    for name, chosen in (("offload", flags.offload != "none"), ("recompute", flags.recompute)):
        if chosen:
            raise InputError(
                f"--fit chooses for each activation whether it is kept, moved or made again, and "
                f"--{name} says it for all: leave one of them out"
            )
    try:
        return need_size(flags.fit, "--fit")
    except InputError:
        raise InputError(
            f"--fit is the memory that a rank's device may use, as 6GiB, not {flags.fit!r}"
        ) from None


def _device(text: str, here: int) -> str:
    if text == "auto":
        return "cuda" if torch.cuda.device_count() >= here else "cpu"
    if text not in ("cpu", "cuda"):
        raise InputError(f"--device is auto, cpu or cuda, not {text!r}: each rank takes its own")
    if text == "cuda" and torch.cuda.device_count() < here:
        raise InputError(
            f"--device cuda needs a GPU for each rank, of which {here} are here, and torch sees "
            f"{torch.cuda.device_count()}: --device cpu trains without"
        )
    return text


def _is_bf16(dtype: str) -> bool:
    if dtype not in ("float32", "bfloat16"):
        raise InputError(f"--dtype is float32 or bfloat16, not {dtype!r}")
    return dtype == "bfloat16"


def _out(text: str) -> str:
    if not text.strip():
        raise InputError("--out is a folder and its name is empty: leave it out, or name one")
    return _path(text)


def _path(text: str) -> str:
    """Absolute, for ranks may have another current folder."""
    return str(Path(text).expanduser().absolute()) if text else ""
