"""Who holds a tensor's storage: Tenure, Python, autograd, and what is left over."""

from __future__ import annotations

import re
import sys
import types
from dataclasses import dataclass

import torch

from tenure import _C
from tenure._C import LeaseInfo, StorageRef
from tenure.inspect import holders, html
from tenure.storages import need_tensor

__all__ = ["Explanation", "explain"]

_MOST = 16  # holders that are told
_MOST_LOOKED_AT = 64  # references to one tensor

Way = list[holders.Element]


@dataclass(frozen=True)
class Explanation:
    """Who holds a storage. Print it, or read its fields.

    Attributes:
        storage: The storage, weakly.
        nbytes: Its size.
        references: All strong references to it, whoever has them.
        leases: Tenure's leases on it, oldest first.
        held_by: What other parts of Tenure say of it.
        released: The text that a reader gets, if its data is gone.
        paths: For each reference to a tensor or storage object on it, the shortest way from a root,
            in words; without the variable of who asks, if anything else holds that tensor.
        summary: What core says of it, in words.
        residue: References that neither Tenure nor Python nor autograd explains: C++ code has them.
        frees: References that the storage would go with if one of them went, outermost first, and
            the bytes that would go in all. Empty if it is held in several ways.
    """

    storage: StorageRef
    nbytes: int
    references: int
    leases: list[LeaseInfo]
    held_by: list[str]
    released: str | None
    paths: list[str]
    summary: str
    residue: int
    frees: list[tuple[str, int]]

    @property
    def others(self) -> int:
        """References that no lease explains."""
        return self.references - len(self.leases)

    def __str__(self) -> str:
        """Several lines."""
        lines = [self.summary, *(f"  held by {path}" for path in self.paths)]
        if self.residue > 0:
            many = "reference" if self.residue == 1 else "references"
            lines.append(f"  {self.residue} more {many} from C++ code")
        lines += [f"  would go with {what}: {size:,} bytes in all" for what, size in self.frees]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The same for notebooks."""
        first, *rest = str(self).splitlines()
        return html.block(first, html.items(line.strip() for line in rest))


def explain(tensor: torch.Tensor) -> Explanation:
    """Says who holds a tensor's storage: leases, Python references, autograd, C++.

    Looks at every object of the process: some hundred milliseconds in a large program. Call it
    where no other thread runs backward.

    Example:
        >>> import tenure, torch
        >>> x = torch.zeros(1024)
        >>> cache = {"last": x[:10]}
        >>> lease = tenure.hold(x, "replay buffer")
        >>> found = tenure.explain(x)
        >>> found.references, found.residue, [lease.owner for lease in found.leases]
        (3, 0, ['replay buffer'])
        >>> len(found.paths)
        2
        >>> del lease
    """
    need_tensor(tensor, "explain")
    known = _C.explain(tensor)
    with _C.References(holders.own_objects()) as references:
        node = references.node_of(tensor)
        if node is None:
            unseen, paths, frees = known.references - len(known.leases), [], []
        else:
            unseen = references.unseen(node)
            paths = _paths(references, node, tensor, sys._getframe(1))
            frees = _frees(references, node)
    return Explanation(
        known.storage,
        known.nbytes,
        known.references,
        known.leases,
        known.held_by,
        known.released,
        paths,
        str(known),
        max(0, unseen),
        frees,
    )


@dataclass(frozen=True)
class _Reference:
    """One that a holder has to a tensor, to its Python object, or to a Python storage.

    Attributes:
        holder: Its node.
        path: The way to the holder, whose element names what it refers to.
        target: What that is.
        rest: What follows on the way to the storage.
    """

    holder: int
    path: Way
    target: holders.Element
    rest: Way

    def is_of(self, frame: types.FrameType) -> bool:
        """Whether it is a variable of this running function."""
        kind, shown, text, _ = self.path[-1]
        code = frame.f_code
        here = (code.co_filename, frame.f_lineno)
        return kind == "frame" and text == code.co_qualname and shown == here

    def elements(self) -> Way:
        """The whole way."""
        return [*self.path, self.target, *self.rest]


def _paths(
    references: _C.References, node: int, tensor: torch.Tensor, asking: types.FrameType
) -> list[str]:
    """Ways to the storage in words, and how many more there are."""
    alike: dict[str, list[str]] = {}  # by what they say but for numbers
    on_it = references.referring_to(node)
    left = 0
    for at in on_it:
        found, more = _references_to(references, at, {*on_it})
        left += more
        others = [one for one in found if not one.is_of(asking)]
        if others and any(one.target[1] is tensor for one in found):
            found = others  # who asks has it, of course
        for words in [_words(references, one) for one in found] or [_way(references, at)]:
            alike.setdefault(re.sub(r"\d+", "", words), []).append(words)
    told = [_one_of(ways) for ways in alike.values()][:_MOST]
    left += sum(len(ways) for ways in list(alike.values())[_MOST:])
    return [*told, *([f"… and {left:,} more"] if left else [])]


def _one_of(ways: list[str]) -> str:
    return ways[0] if len(ways) == 1 else f"{ways[0]}, and {len(ways) - 1} like it"


def _references_to(
    references: _C.References, at: int, passed_over: set[int]
) -> tuple[list[_Reference], int]:
    """Those to a tensor and its Python object, but for what only that itself leads to.

    Also how many were not looked at.
    """
    _, way, *_ = references.retention(at)
    direct = references.referring_to(at)
    left = max(0, len(direct) - _MOST_LOOKED_AT)
    ways: list[tuple[int, int, Way]] = []  # holder, what it refers to, what follows
    own = None
    for holder in direct[:_MOST_LOOKED_AT]:
        if holder in passed_over:
            continue  # a view, which is told itself
        _, path, *_ = references.retention(holder)
        if path[-1][0] == "object" and issubclass(type(path[-1][1]), torch.Tensor):
            own = path[-1][1]
            further = [one for one in references.referring_to(holder) if one != at]
            left += max(0, len(further) - _MOST_LOOKED_AT)
            ways += [(one, holder, way[-1:]) for one in further[:_MOST_LOOKED_AT]]
        else:
            ways.append((holder, at, []))
    found = []
    for holder, target, rest in ways:
        _, path, *_ = references.retention(holder)
        if own is None or all(shown is not own for _, shown, *_ in path):
            named = [*path[:-1], references.element(holder, target)]
            referred = references.element(target, at)
            found.append(_Reference(holder, named, referred, rest))
    return found, left


def _words(references: _C.References, reference: _Reference) -> str:
    reached, _, cycle, _ = references.retention(reference.holder)
    if not reached and cycle:
        return _way(references, reference.holder)
    words = _text(reference.elements())
    return words if reached else f"no root; outermost is {words}"


def _frees(references: _C.References, node: int) -> list[tuple[str, int]]:
    """What the storage would go with: all that lies on every way to it."""
    reached, path, *_ = references.retention(node)
    if not reached:
        return []
    gone, alone = references.gone_with(node), references.goes_with_reference(node)
    out: list[tuple[str, int]] = []
    for hop in holders.retention_path(path):
        at = hop.target
        if hop.name and at < len(path) and alone[at] and gone[at] > 0:
            out.append((hop.text, gone[at]))
    return out


def _way(references: _C.References, holder: int) -> str:
    reached, path, cycle, _ = references.retention(holder)
    if not reached and cycle:
        words = holders.path_text(holders.retention_path([*cycle, cycle[0]]))
        return f"a cycle that no root holds: {words}"
    words = _text(path)
    return words if reached else f"no root; outermost is {words}"


def _text(path: Way) -> str:
    return holders.path_text(holders.retention_path(path))
