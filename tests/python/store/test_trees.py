"""Tensors in nests."""

from __future__ import annotations

import collections
import dataclasses
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

import tenure


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Plain:
    tensor: Any
    name: str = "n"


@dataclasses.dataclass(frozen=True)
class Frozen:
    tensor: Any
    made: Any = dataclasses.field(init=False, default=3)


@dataclasses.dataclass
class Late:
    tensor: Any
    later: Any = dataclasses.field(init=False)


def shapes(tree: Any) -> Any:
    return tenure.store.map_tree(tree, lambda tensor: list(tensor.shape))


def test_every_kind_of_nest() -> None:
    one = torch.ones(2)
    assert shapes([one, {"a": (one, 3)}]) == [[2], {"a": ([2], 3)}]
    assert shapes(Pair(one, "x")) == Pair([2], "x")
    assert shapes(Plain(one)) == Plain([2])
    assert shapes(Frozen((one,))) == Frozen(([2],))
    assert shapes(MappingProxyType({"a": one})) == {"a": [2]}
    ordered = shapes(collections.OrderedDict(b=one, a=1))
    assert isinstance(ordered, collections.OrderedDict)
    assert list(ordered.items()) == [("b", [2]), ("a", 1)]
    counted = shapes(collections.defaultdict(list, a=one))
    assert counted["new"] == []
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert shapes(packed).data == [5]
    assert shapes(torch.max(torch.ones(2, 3), dim=0))[0] == [3]
    assert shapes(one) == [2]


def test_a_field_that_is_not_set_yet() -> None:
    found = shapes(Late(torch.ones(2)))
    assert found.tensor == [2]
    assert not hasattr(found, "later")


def test_what_has_no_tensor_is_not_copied() -> None:
    tree = {"a": [1, (2, Plain(None))], "b": {1, 2}}
    assert shapes(tree) is tree


def test_one_that_appears_twice_is_put_once() -> None:
    tensor = torch.ones(3)
    with tenure.store.scope("call") as scope:
        tree = tenure.store.put_tree(scope, {"a": tensor, "b": [tensor]})
        [object_] = tenure.store.objects()
        assert "test_trees.py:" in object_["site"]
        assert tree["a"] is tree["b"][0]
        got = tenure.store.get_tree(tree)
        assert got["a"] is got["b"][0]
        assert torch.equal(got["a"], tensor)
        assert tenure.store.free(tree) == (1, [])


def test_a_part_that_appears_often_is_looked_at_once() -> None:
    """2^60 ways lead to the tensor."""
    tree: list[Any] = [torch.ones(2)]
    for _ in range(60):
        tree = [tree, tree]
    found = shapes(tree)
    for _ in range(60):
        assert found[0] is found[1]
        found = found[0]
    assert found == [[2]]


def test_a_nest_without_an_end() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(tenure.InputError, match="a list contains itself"):
        shapes(tree)


def test_what_is_not_stored_cannot_be_fetched() -> None:
    with tenure.store.scope("call") as scope:
        tree = tenure.store.put_tree(scope, [torch.ones(1)], collectors=[])
        assert tenure.store.get_tree([3]) == [3]
        with pytest.raises(tenure.StaleHandle, match="never stored"):
            tree[0].get()
        with pytest.raises(tenure.StaleHandle, match="never stored"):
            tenure.store.get_tree(tree)
