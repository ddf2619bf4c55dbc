"""Pipeline: a rank's stages of a model, run by a schedule."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from tenure import _C
from tenure._groups import new_group
from tenure.errors import CollectiveError, InputError
from tenure.pipelining.microbatches import join, rows_of, split
from tenure.pipelining.promises import Bound, PipelineStats
from tenure.pipelining.schedules import Schedule, schedule
from tenure.sharding.identity import sharded_in, whole_parameters

if TYPE_CHECKING:
    from tenure.sharding.sharded import Sharded

__all__ = ["Pipeline", "groups_of"]

Loss = Callable[[Any, Any], torch.Tensor]
_TIMEOUT = 300.0


class Pipeline:
    """A rank's stages of a model, run by a schedule.

    Every rank of the group makes one and calls :meth:`step` equally often. Gradients are as those
    of the whole model on the whole batch, for a loss that is a mean over rows.

    Args:
        stage: What this rank runs: a module, or a list of them in the order of the model where the
            schedule has several stages a rank. Between stages go tensors, or tuples and lists of
            tensors and None.
        schedule: A name (``tenure pipeline show`` draws them), the path of a CSV file, or a
            :class:`~tenure.pipelining.Schedule`.
        microbatches: Into how many parts a batch is split.
        group: The ranks of the pipeline, in the order of its stages; by default all.
        loss: Called on the last rank with what the last stage returned and the target of a
            microbatch; gives one number, a mean over the microbatch's rows.
        timeout: Seconds after which a rank that does not answer is given up; by default 300.
        strict: Hold every step against the bound, by the allocator's figures, and raise
            :class:`~tenure.BudgetError` when it is exceeded or something is left at the end. Costs
            a look at the allocator for each action, and on the CPU a count of all its tensors.
        stay_gathered: Whether stages that are sharded (:func:`tenure.shard`) are gathered once a
            step and add up their gradients over ranks once, after this rank's last backward. If
            not, they do both for each microbatch: more to send, and less memory, which is not known
            to the bound: not with `strict`.

    Example:
        >>> import tenure, torch
        >>> from torch import distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> stage = torch.nn.Linear(4, 1)
        >>> mean = torch.nn.functional.mse_loss
        >>> pipe = tenure.Pipeline(stage, schedule="1f1b", microbatches=4, loss=mean)
        >>> loss = pipe.step(torch.ones(8, 4), target=torch.zeros(8, 1))
        >>> print(pipe.bound())
        rank 0: at most 1 microbatches in flight
        >>> dist.destroy_process_group()
    """

    _numbers = itertools.count(1 << 40)

    def __init__(
        self,
        stage: nn.Module | Sequence[nn.Module],
        schedule: str | Path | Schedule = "1f1b",
        microbatches: int = 1,
        group: dist.ProcessGroup | None = None,
        loss: Loss | None = None,
        *,
        timeout: float = _TIMEOUT,
        strict: bool = False,
        stay_gathered: bool = True,
    ) -> None:
        """All ranks of the group call it.

        Raises:
            InputError: An argument of this rank cannot be, or the ranks do not say the same.
            CollectiveError: Another rank raised; the text names it and its error.
        """
        try:
            modules = _modules_of(stage)
            found = _group_of(group)
            _require_arguments(modules, loss, timeout, strict, stay_gathered)
            self.rank = dist.get_rank(found)
            ranks = dist.get_process_group_ranks(found)
            self.schedule = _schedule_of(schedule, len(ranks), microbatches, len(modules))
            own = _own_stages(self.schedule, self.rank, len(modules))
            device = _device_of(modules)
        except Exception as error:
            _tell_others(group, timeout, error)
            raise
        side = _new_group(ranks, "gloo", timeout)
        _require_same(self.schedule, device, side)
        up, down = _lanes(ranks, device, timeout, side)
        self.microbatches = self.schedule.microbatches
        self.loss = loss
        self._first = 0 in own
        self._last = self.schedule.stages - 1 in own
        self._stages = [_Stage(module, number) for module, number in zip(modules, own, strict=True)]
        self._number = next(self._numbers)
        self._stay_gathered = stay_gathered
        self._strict = strict
        self._running = False
        self._runtime = _C.PipelineRuntime(
            self.schedule.data, self._stages, up, down, side, timeout, strict
        )

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor | None:
        """Trains on one batch: all microbatches forward and backward through all stages.

        Gradients are added to what parameters have, as backward() does.

        Args:
            args: What the first stage is called with, on the first rank; elsewhere not looked at.
            target: What the loss is called with, on the last rank.
            kwargs: What each of this rank's stages is called with besides.

        Returns:
            The loss of the batch on the last rank, nothing elsewhere.

        Raises:
            CollectiveError: Another rank failed: the text names it, and what it did. On that rank
                the exception is its own. Nothing of the step is left but gradients that it added.
        """
        loss, _ = self._run(True, args, target, kwargs)
        _C.tick_explicit(self._number, None)
        return loss

    def eval(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """The same without backward.

        Returns:
            On the last rank the loss if there is a target, else what the last stage returned for
            the whole batch: numbers one for each microbatch, None where it is. Nothing elsewhere.
        """
        with torch.no_grad():
            loss, outputs = self._run(False, args, target, kwargs)
        if not outputs:
            return loss
        joined = join(outputs)
        return joined[0] if self._stages[-1].single else tuple(joined)

    def bound(self) -> Bound:
        """What the schedule promises of this rank's memory."""
        return Bound(self.rank, **self._runtime.promise())

    def stats(self) -> PipelineStats:
        """What this rank measured."""
        return PipelineStats(self.rank, **self._runtime.stats())

    def _run(
        self, train: bool, args: tuple[Any, ...], target: Any, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor | None, list[list[torch.Tensor | None]]]:
        if self._running:
            raise InputError(
                "this pipeline is in the middle of a step: call step() and eval() one after the "
                "other, not from within a stage, a loss or another thread"
            )
        with ExitStack() as held:
            self._running = True
            held.callback(setattr, self, "_running", False)
            for stage in self._stages:
                held.callback(stage.clear)
            try:
                targets = self._take(train, args, target, kwargs)
                loss = None
                if self._last and (train or target is not None):
                    loss = _LossOf(self.loss, targets, self._stages[-1])
                for model in self._to_hold():
                    held.enter_context(model.hold())
                rows = self._batch_rows(), rows_of(targets or [])
                shapes = self._shapes(args if self._first else (), kwargs, target)
            except BaseException as error:
                self._runtime.refuse(train, f"{type(error).__name__}: {error}")
                raise
            try:
                return self._runtime.step(train, loss, *rows, shapes)
            except BaseException as error:
                if self._runtime.failed_in:
                    error.add_note(f"{self._rank_text()}, in {self._runtime.failed_in}")
                raise

    def _rank_text(self) -> str:
        """Beside other pipelines a rank has two numbers."""
        job = dist.get_rank()
        is_same = job == self.rank
        return f"rank {job}" if is_same else f"rank {job} (rank {self.rank} of the pipeline)"

    def _to_hold(self) -> list[Sharded]:
        """The sharded models that this rank's stages are, or are parts of, but for those held."""
        if not self._stay_gathered:
            return []
        found = {id(model): model for stage in self._stages for model in sharded_in(stage.module)}
        return [model for model in found.values() if not model.held]

    def _take(
        self, train: bool, args: tuple[Any, ...], target: Any, kwargs: dict[str, Any]
    ) -> list[Any] | None:
        """Gives the stages what they need of this step. Returns the targets."""
        if self._first and not args:
            raise InputError("the first rank has the first stage: pass step() its batch")
        if self._last and train and self.loss is None:
            raise InputError("the last rank needs a loss to train: Pipeline(..., loss=...)")
        if self._last and train and target is None:
            raise InputError("the last rank needs a target to find the loss: pass step() target=")
        named = split(kwargs, self.microbatches, "batch")
        for stage in self._stages:
            stage.kwargs = named
        if self._first:
            self._stages[0].args = split(args, self.microbatches, "batch")
        if not self._last or target is None:
            return None
        return split(target, self.microbatches, "target")

    def _batch_rows(self) -> list[int]:
        """By microbatch; nothing on ranks that have not the first stage."""
        if not self._first:
            return []
        stage = self._stages[0]
        return rows_of(stage.args or []) or rows_of(stage.kwargs)

    def _shapes(self, *given: Any) -> int:
        """A number for them, and for how stages are: what a step takes depends on it.

        Messages may not tell of it. Other numbers than bools do not count: one that is another in
        every step would make each a step that is not checked.
        """
        if not self._strict:
            return 0
        leaves = tree_leaves(given)
        tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
        ways = [(i, one) for i, one in enumerate(leaves) if isinstance(one, (bool, str))]
        told = (
            tuple((one.shape, one.dtype, one.requires_grad) for one in tensors),
            tuple(ways),
            tuple(part.training for stage in self._stages for part in stage.modules()),
            tuple(p.requires_grad for stage in self._stages for p in stage.parameters()),
        )
        return hash(told) % 2**64


class _Stage:
    """A module as the runtime calls it."""

    def __init__(self, module: nn.Module, number: int) -> None:
        self.module = module
        self.number = number
        self.single = True
        self.args: list[tuple[Any, ...]] | None = None
        self.kwargs: list[dict[str, Any]] = []

    def forward(self, microbatch: int, inputs: list[torch.Tensor | None]) -> list[Any]:
        given = self.args[microbatch] if self.args is not None else inputs
        try:
            made = self.module(*given, **self.kwargs[microbatch])
        except RuntimeError as error:
            if "a leaf Variable that requires grad" in str(error):
                error.add_note(
                    f"stage {self.number} may not write to what it receives, which is a leaf: do "
                    "without inplace=True in its first layer, or begin it with x = x.clone()"
                )
            raise
        self.single = isinstance(made, torch.Tensor)
        tensors = [made] if self.single else made
        if not isinstance(tensors, (list, tuple)) or not all(
            one is None or isinstance(one, torch.Tensor) for one in tensors
        ):
            raise InputError(
                f"stage {self.number} returned {type(made).__name__}: between stages go tensors, "
                "or tuples of tensors and None"
            )
        return list(tensors)

    def modules(self) -> list[nn.Module]:
        """It and all within; none if it is a function."""
        return list(self.module.modules()) if isinstance(self.module, nn.Module) else []

    def parameters(self) -> list[torch.Tensor]:
        """Gradients come to whole parameters first, and then to the pieces of those sharded."""
        return [*self.module.parameters(), *whole_parameters(self.module)]

    def clear(self) -> None:
        self.args = None
        self.kwargs = []


class _LossOf:
    """The loss as the runtime calls it."""

    def __init__(self, loss: Loss | None, targets: list[Any] | None, stage: _Stage) -> None:
        if loss is None or targets is None:
            raise InputError("there is no loss to be found: Pipeline(..., loss=...)")
        self._loss, self._targets, self._stage = loss, targets, stage

    def __call__(self, microbatch: int, outputs: list[torch.Tensor]) -> torch.Tensor:
        made = outputs[0] if self._stage.single else tuple(outputs)
        found = self._loss(made, self._targets[microbatch])
        if not isinstance(found, torch.Tensor):
            raise InputError(f"the loss is a tensor of one element, not {type(found).__name__}")
        return found


def _modules_of(stage: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    if isinstance(stage, nn.Module) or not isinstance(stage, Iterable):
        modules = [stage]
    else:
        modules = list(stage)
    if not modules or not all(map(_is_module, modules)):
        raise InputError(f"stage is a module or a list of modules, not {stage!r}")
    return modules


def _is_module(one: object) -> bool:
    """One of C++ has no class of torch's."""
    return callable(one) and callable(getattr(one, "parameters", None))


def _group_of(group: object) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise InputError(
            "torch.distributed has no process group: call init_process_group() first, for one "
            "rank too"
        )
    found = group if group is not None else dist.group.WORLD
    if not isinstance(found, dist.ProcessGroup):
        raise InputError(f"group is a process group that this rank is in, not {found!r}")
    return found


def _require_arguments(
    modules: list[nn.Module], loss: object, timeout: float, strict: bool, stay_gathered: bool
) -> None:
    for name, flag in (("strict", strict), ("stay_gathered", stay_gathered)):
        if not isinstance(flag, bool):
            raise InputError(f"{name} is True or False, not {flag!r}")
    if loss is not None and not callable(loss):
        raise InputError(f"loss is a function of an output and a target, not {loss!r}")
    if strict and not stay_gathered and any(map(sharded_in, modules)):
        raise InputError(
            "strict=True needs sharded stages that stay gathered: the bound does not know when "
            "others gather"
        )
    if not _is_timeout(timeout):
        raise InputError(f"timeout is a number of seconds up to a day, not {timeout!r}")


def _is_timeout(timeout: object) -> bool:
    return isinstance(timeout, Real) and 0 < float(timeout) <= 86_400


def _device_of(modules: list[nn.Module]) -> torch.device:
    devices = (p.device for module in modules for p in module.parameters())
    return next(devices, torch.device("cpu"))


def _schedule_of(
    given: str | Path | Schedule, ranks: int, microbatches: int, chunks: int
) -> Schedule:
    if isinstance(given, Schedule):
        if given.ranks != ranks:
            raise InputError(f"the schedule is for {given.ranks} ranks, the group has {ranks}")
        return given
    is_file = str(given).lower().endswith(".csv")
    return schedule(given, ranks, microbatches, None if is_file else chunks)


def _own_stages(schedule: Schedule, rank: int, modules: int) -> list[int]:
    own = schedule.stages_of(rank)
    if len(own) != modules:
        raise InputError(
            f"schedule '{schedule.name}' has {len(own)} stages on rank {rank}, and it was given "
            f"{modules}"
        )
    return own


def groups_of(
    ranks: list[int], device: torch.device, timeout: float
) -> tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]:
    """Groups of the same ranks: to higher ranks, to lower ranks, and one on the host."""
    side = _new_group(ranks, "gloo", timeout)
    return *_lanes(ranks, device, timeout, side), side


def _lanes(
    ranks: list[int], device: torch.device, timeout: float, side: dist.ProcessGroup
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The groups to higher and to lower ranks.

    Gloo tells messages apart by their tags. Others go by their order, so that what goes up and what
    goes down may not be on one.
    """
    if device.type == "cpu":
        return side, side
    return _new_group(ranks, None, timeout), _new_group(ranks, None, timeout)


def _new_group(ranks: list[int], backend: str | None, timeout: float) -> dist.ProcessGroup:
    return new_group(ranks, timeout, "tenure.pipeline", backend)


@dataclass(frozen=True)
class _Word:
    """What ranks tell each other before the first step."""

    error: str = ""
    schedule: str = ""
    device: str = ""


def _exchange(mine: _Word, side: dist.ProcessGroup) -> list[_Word]:
    heard: list[Any] = [None] * dist.get_world_size(side)
    dist.all_gather_object(heard, mine, group=side)
    return heard


def _tell_others(group: object, timeout: float, error: Exception) -> None:
    """The others wait in the group that this rank would have made: they are told why it does not.

    Nobody can be told without a group. What fails here is less than the error that is told.
    """
    with suppress(Exception):
        ranks = dist.get_process_group_ranks(_group_of(group))
        seconds = timeout if _is_timeout(timeout) else _TIMEOUT
        side = _new_group(ranks, "gloo", seconds)
        _exchange(_Word(error=f"{type(error).__name__}: {error}"), side)


def _require_same(schedule: Schedule, device: torch.device, side: dist.ProcessGroup) -> None:
    """Raises CollectiveError if another rank has failed, InputError if it is made otherwise."""
    digest = hashlib.sha256(schedule.csv().encode()).hexdigest()
    heard = _exchange(_Word(schedule=f"{schedule.name} {digest}", device=device.type), side)
    failed = [f"rank {rank}: {word.error}" for rank, word in enumerate(heard) if word.error]
    if failed:
        raise CollectiveError(f"the pipeline cannot be made: it failed on {'; on '.join(failed)}")
    others = [rank for rank, word in enumerate(heard) if word.schedule != heard[0].schedule]
    if others:
        raise InputError(
            f"rank {', '.join(map(str, others))} has another schedule than rank 0: pass the same "
            "schedule and microbatches on all ranks"
        )
    elsewhere = [rank for rank, word in enumerate(heard) if word.device != heard[0].device]
    if elsewhere:
        raise InputError(
            f"the stages of rank {', '.join(map(str, elsewhere))} are on "
            f"{heard[elsewhere[0]].device}, those of rank 0 on {heard[0].device}: move them to one "
            "kind of device; a stage without parameters counts as on the cpu, so give it one"
        )
