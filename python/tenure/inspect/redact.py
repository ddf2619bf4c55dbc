"""Recordings without the program's names: ``--redact``.

What a text is made of becomes hashes, except for words that are nobody's secret: Tenure's own, and
those of Python and torch. The key comes with the variable ``TENURE``, so that all processes of a
run hash alike, and is written nowhere.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tenure import _C

__all__ = ["redactor", "without_names"]

# Keys of a verdict or a holding whose texts may have names of the program in them.
_NAMED = {"text", "site", "function", "module", "op", "host"}
_OUR_WORDS = """
    a an and at base before being by cache closure code context cpu ctx cuda default argument
    arguments exception feature from function functools global grad graph handled hook hooks in
    item its kept key local lru_cache method modules node nodes object of or partial py root
    saved seconds suspended tensor tensors the thread threading to torch use value values
    variable variables watching __main__ module __traceback__ __cause__ __context__
"""
# Under these names autograd's own nodes save what they need.
_SAVED = """
    self other mat1 mat2 input weight bias result result0 result1 result2 exponent indices index
    target grad_output output logsumexp query key value condition mask vec1 vec2 batch1 batch2
    AccumulateGrad Backward
"""


def redactor(key: str) -> _C.Redactor:
    """Hashes names under this key; without one it leaves texts as they are."""
    if not key:
        return _C.Redactor()
    words = {
        *_OUR_WORDS.split(),
        *_SAVED.split(),
        *dir(builtins),
        *dir(torch.nn),
        *dir(torch.optim),
    }
    words |= {"collections", "deque", "nn", "optim", "utils", "data", "Tensor", "Parameter"}
    return _C.Redactor(key, sorted(words))


def without_names(given: Any, redact: _C.Redactor) -> Any:
    """A verdict or a holding with the program's names hashed."""
    return _cleaned(given, redact, named=False)


def _cleaned(given: Any, redact: _C.Redactor, named: bool) -> Any:
    if isinstance(given, Mapping):
        return {key: _cleaned(value, redact, key in _NAMED) for key, value in given.items()}
    if isinstance(given, Sequence) and not isinstance(given, str):
        return [_cleaned(value, redact, named) for value in given]
    if isinstance(given, str) and named:
        return redact(given)
    return given
