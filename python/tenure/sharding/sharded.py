"""A model whose parameters are sharded: what `model.tenure` is."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from tenure import _C
from tenure.errors import InputError
from tenure.sharding.backwards import Backwards, current_backward
from tenure.sharding.changes import Arrivals, Memory, follow_freezing
from tenure.sharding.choosing import Choice, Member, check, device_of
from tenure.sharding.gradients import Group, Piece, accumulate
from tenure.sharding.identity import Identity, identify, identity_of
from tenure.sharding.meeting import agree, least_left, refusal_of
from tenure.sharding.optimizer_state import OptimizerState
from tenure.sharding.parts import Part, nearest, parts_of
from tenure.sharding.passing import Unit, has_ended, require_no_transform
from tenure.sharding.replacing import alike, replace

__all__ = ["Ahead", "Compiled", "Sharded"]


@dataclass(frozen=True)
class Ahead:
    """How much is gathered before it is needed."""

    units: int
    limit: int | None  # bytes of all that is gathered


@dataclass(frozen=True)
class Compiled:
    """What was found out about one compiled graph.

    Attributes:
        kind: "forward" or "backward".
        peak_bytes: The most that it has gathered at once.
        why: Why it could not be proven, so that its units are gathered all the time; nothing if it
            was.
    """

    kind: str
    peak_bytes: int
    why: tuple[str, ...]


class Sharded(OptimizerState):
    """The units of a model on this rank."""

    def __init__(
        self,
        choices: list[Choice],
        sharder: _C.Sharder,
        group: Group,
        side: dist.ProcessGroup,
        ahead: Ahead,
    ) -> None:
        """Takes over the parameters of these units: the model is sharded when this returns."""
        self.sharder = sharder
        self.ahead = ahead
        self.graphs: list[Compiled] = []
        self.held = False
        self.number = sharder.number()
        self._left: dict[int, int] = {}
        self._adds_up = True
        self._group = group
        self._memory = Memory()
        self._warned: set[str] = set()  # warnings
        self._depth = 0
        self._outermost: FrameType | None = None  # which runs the module that began the pass
        self._backwards = Backwards()
        # By unit and flat.
        self._pieces: list[list[list[nn.Parameter]]] = []
        self._trained: list[list[list[bool]]] = []
        made = self._take_over(choices)
        # Modules and graphs have the units, and those have this: a cycle would outlive the model.
        self._units = [weakref.ref(unit) for unit in made]
        self._modules = [
            (choice.path, weakref.ref(choice.module))
            for choice in choices
            if choice.module is not None  # a module may have no length
        ]
        for unit, choice in zip(made, choices, strict=True):
            unit.needs = [made[number] for number in sorted(choice.needs)]
            if choice.module is not None:
                unit.install(choice.module)
        self._keep_state(choices, side)
        self._parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._watch_parts()
        self._arrivals = Arrivals(self._living_model())

    def _take_over(self, choices: list[Choice]) -> list[Unit]:
        """All of them or none: modules are changed only when nothing is left that may fail."""
        before = self.sharder.count()
        try:
            numbers = [self._add(choice) for choice in choices]
        except BaseException:
            self.sharder.keep_first(before)
            raise
        return [self._make(*both) for both in zip(numbers, choices, strict=True)]

    def _add(self, choice: Choice) -> int:
        groups = alike(choice.members)
        return self.sharder.add(
            choice.name,
            [[member.name for member in group] for group in groups],
            [[member.parameter.detach() for member in group] for group in groups],
            stays=choice.stays,
        )

    def _make(self, number: int, choice: Choice) -> Unit:
        groups = alike(choice.members)
        whole, pieces = [], []
        for index, group in enumerate(groups):
            found = zip(
                group,
                self.sharder.parameters(number, index),
                self.sharder.pieces(number, index),
                strict=True,
            )
            both = [replace(*member) for member in found]
            whole.append([gathered for gathered, _ in both])
            pieces.append([piece for _, piece in both])
        self._pieces.append(pieces)
        for flat, group in zip(pieces, groups, strict=True):
            self._memory.watch(group, flat)
        self._trained.append([[piece.requires_grad for piece in flat] for flat in pieces])
        identify(self, number, whole)
        return Unit(number, self, whole)

    def stats(self) -> _C.ShardStats:
        """What sharding did, in the pass before this one and ever."""
        return self.sharder.stats()

    def adopt(self) -> list[str]:
        """Shards the parameters that came to the model after `tenure.shard()`. A collective.

        Their values are those of the first rank, and they are gathered with the unit around them.
        An optimizer does not know of them yet.

        Returns:
            Their names.

        Raises:
            InputError: They cannot be sharded, or are not the same on all ranks; nothing is done.
        """
        members = self._arrivals.members()
        added = agree(refusal_of(lambda: self._choices_of(members)), "adopt", self._side)
        made = self._take_over(added)
        for choice, unit in zip(added, made, strict=True):
            around = self._units[self._unit_around(choice.members[0].name)]()
            assert around is not None
            self._units.append(weakref.ref(unit))
            around.needs.append(unit)
        self._add_state(added)
        self._watch_parts()
        self._arrivals.adopted()
        return [member.name for member in members]

    def _choices_of(self, members: list[Member]) -> list[Choice]:
        """One for each unit around them. Raises InputError for what cannot be adopted."""
        added: dict[int, Choice] = {}
        for member in members:
            if identity_of(member.parameter) is not None:
                raise InputError(
                    f"{member.name} is a parameter of a sharded model under another name: "
                    "tie parameters before tenure.shard()"
                )
            owner = self._unit_around(member.name)
            name = f"what came to unit {owner}"
            added.setdefault(owner, Choice(name)).members.append(member)
        found = list(added.values())
        check(found)
        if any(device_of([choice]) != self._group.device for choice in found):
            raise InputError(f"parameters are on {self._group.device}: move new ones there, too")
        return found

    def _watch_parts(self) -> None:
        """Those of the model's own unit may be called alone."""
        units = self._living_units()
        own = self._units[units[""]]()
        assert own is not None
        for module in parts_of(self._living_model(), units):
            if module not in self._parts:
                self._parts.add(module)
                Part(own, module)

    def _unit_around(self, path: str) -> int:
        """The nearest one whose module is still there."""
        return nearest(path, self._living_units())

    def _living_units(self) -> dict[str, int]:
        named = dict(self._living_model().named_modules())
        return {
            known: number
            for number, (known, module) in enumerate(self._modules)
            if known is not None and named.get(known) is module()
        }

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Neither pickled nor copied."""
        raise InputError(
            "a sharded model cannot be copied or pickled: copy it before tenure.shard(), save what "
            "model.state_dict() or model.tenure.full_state_dict() gives"
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here keep whole gradients; the first one after adds them all up.

        They are kept until one has: a backward that fails in here leaves what it has added to
        them, as in a plain model, and one that fails after leaves them as they were.
        """
        before, self._adds_up = self._adds_up, False
        self.sharder.put_off_sums(True)
        try:
            yield
        finally:
            self._adds_up = before
            self.sharder.put_off_sums(not before)

    def drop_unsynced(self) -> None:
        """Forgets what backwards in `no_sync()` have kept: `zero_grad()` does not see it."""
        self.sharder.drop_put_off()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """All units are gathered as long as this lasts, for several forwards and backwards.

        Gradients are added up in the whole parameters, in their dtype, and over ranks at the end,
        once; an exception drops them. Ranks begin and end it together. It takes the memory of the
        whole parameters and of their gradients.

        Raises:
            InputError: It is held already, or runs.
            MutationError: At the end: parameters or pieces were written to; gradients are dropped.
        """
        self._recover()
        if self.held:
            raise InputError("the model is held already: end that hold before the next")
        if self._depth > 0 or current_backward() != -1:
            raise InputError("a sharded model cannot be held while it runs")
        self._prepare()
        try:
            self.sharder.hold()
            self.held = True
            yield
            self._end_hold()
        except BaseException:
            self.held = False
            self.sharder.drop_hold()
            for unit in self._living():
                unit.drop_gradients()
            self.sharder.drop_gradients()
            raise

    def _end_hold(self) -> None:
        self.held = False
        self.sharder.let_go()
        for unit in self._living():
            unit.add_up()
        self._set_gradients(self.sharder.end_backward(outermost=True))

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients that there are, whole, by name. A collective."""
        return self._whole(lambda piece: piece.grad)

    def _whole(self, of: Callable[[nn.Parameter], torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """What the parameters have of one kind, put together; those that have none are left out."""
        out: dict[str, torch.Tensor] = {}
        for unit, flat, names, pieces in self._flats():
            found = [of(piece) for piece in pieces]
            if all(one is None for one in found):
                continue
            plain = [None if one is None else one.as_subclass(torch.Tensor) for one in found]
            whole = self.sharder.join(unit, flat, plain)
            told = zip(names, found, whole, strict=True)
            out |= {name: tensor for name, had, tensor in told if had is not None}
        return out

    # Called by units, modules and compiled graphs.

    def piece_of(self, identity: Identity) -> nn.Parameter:
        """What this rank has of a whole parameter."""
        return self._pieces[identity.unit][identity.flat][identity.index]

    def left_beside(self, memory: int) -> int:
        """Bytes of `memory` that the rank which has least left still has. At first a collective.

        Asked again it says the same: ranks may compile their later graphs at different times.
        """
        if memory not in self._left:
            self._left[memory] = least_left(memory, self._group.device, self._side)
        return self._left[memory]

    def hand_over(self, unit: int, gradients: int) -> None:
        """A compiled graph that the backward comes to gives so many of a unit's by itself."""
        one = self._units[unit]()
        if one is not None:
            one.hand_over(gradients)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A forward, or a part of one."""
        self.begin(sys._getframe(2))
        try:
            yield
        finally:
            self.end()

    def begin(self, running: FrameType) -> None:
        """A module is entered; the outermost one begins a pass, unless backward computes it.

        Args:
            running: The frame that runs as long as the module does.
        """
        self._recover()
        if current_backward() != -1:
            self._give_up_failed()
        elif self._depth == 0 and not self.held:
            self._outermost = running
            self._prepare()
            self.sharder.begin_pass()
        self._depth += 1

    def _recover(self) -> None:
        """Torch calls no hook for what ends a module without being an Exception: Ctrl-C."""
        if self._depth > 0 and self._outermost is not None and has_ended(self._outermost):
            self._depth = 0
            for unit in self._living():
                unit.forget()
            if current_backward() == -1:
                self.sharder.give_up_pass()

    def _prepare(self) -> None:
        """A pass is about to begin."""
        require_no_transform()
        self._arrivals.require_none()
        self._memory.require()
        self._warn_of_stuck()
        self._follow_freezing()
        if self._backwards:  # one that has never ended
            self._backwards.clear()
            for unit in self._living():
                unit.forget()
            self.sharder.drop_gradients()
            self.sharder.give_up_pass()

    def _living(self) -> list[Unit]:
        return [unit for one in self._units if (unit := one()) is not None]

    def end(self) -> None:
        """The module is left, in any way."""
        self._depth -= 1
        if self._depth == 0:
            self._outermost = None

    def _warn_of_stuck(self) -> None:
        for why in self.sharder.stuck():
            if why not in self._warned:
                self._warned.add(why)
                warnings.warn(f"{why}, as in p.detach().clone().numpy()", stacklevel=2)

    def _follow_freezing(self) -> None:
        for unit in self._living():
            known = self._trained[unit.number]
            asked = unit.trained(known)
            trained = follow_freezing(known, self._pieces[unit.number], asked)
            if not trained == known == asked:
                self._trained[unit.number] = trained
                unit.train(trained)

    def backward_runs(self) -> _C.Course:
        """What the backward that runs will do; asked at first, its end is told, too."""
        self._give_up_failed()
        return self._backwards.course(self._backward_ended)

    def _give_up_failed(self) -> None:
        """What an exception has ended leaves nothing to the backward that comes after it."""
        failed = self._backwards.take_failed()
        if not failed:
            return
        with ExitStack() as ending:  # all of it, whatever raises
            if not self._backwards:  # or what came is a part of the one that is around it
                if self._depth == 0:
                    ending.callback(self.sharder.begin_pass)
                    ending.callback(self.sharder.give_up_pass)
                ending.callback(self.sharder.drop_gradients)
            for unit in self._living():
                for number in failed:
                    ending.callback(unit.give_up, number)

    def _backward_ended(self, number: int) -> None:
        outermost = self._backwards.begin_end(number)
        for unit in self._living():
            unit.end_backward(number)
        self._set_gradients(self.sharder.end_backward(outermost=outermost))
        self._backwards.over(number)

    def _set_gradients(self, reduced: list[_C.Reduced]) -> None:
        """The mean over ranks is the pieces' gradient."""
        for one in reduced:
            pieces = self._pieces[one.unit][one.flat]
            for piece, came in zip(pieces, one.came, strict=True):
                if came and piece.requires_grad:
                    mean = one.mean.narrow(0, piece.storage_offset(), piece.numel())
                    accumulate(piece, Piece.of(mean, self._group))
