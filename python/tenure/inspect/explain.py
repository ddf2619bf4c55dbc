"""Who holds a tensor's storage: Tenure, Python, autograd, and what is left over."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tenure import _C
from tenure._C import LeaseInfo, StorageRef
from tenure.inspect import holders, html
from tenure.storages import need_tensor

__all__ = ["Explanation", "explain"]

_MOST = 16  # holders that are told


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
        paths: For each tensor or storage object on it, the shortest way from a root, in words.
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
            paths, frees = _paths(references, node), _frees(references, node)
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


def _paths(references: _C.References, node: int) -> list[str]:
    """Ways to the storage in words."""
    held = references.referring_to(node)
    paths = [_way(references, holder) for holder in held[:_MOST]]
    if len(held) > _MOST:
        paths.append(f"… and {len(held) - _MOST} more")
    return paths


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
    words = holders.path_text(holders.retention_path(path))
    return words if reached else f"no root; outermost is {words}"
