"""Tensors that other processes fetch, owned by scopes that end.

A process puts a tensor and sends the handle, which is plain data, by whatever means it has. Who may
fetch is said when it is put; when they have, or when the scope closes, the memory goes.

>>> import tenure, torch
>>> with tenure.store.scope("step", 0) as scope:
...     handle = scope.put(torch.arange(6.0).reshape(3, 2), collectors=1)
...     print(handle.get(rows=slice(1, 3)).tolist())
[[2.0, 3.0], [4.0, 5.0]]
>>> handle.get()  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
tenure.errors.StaleHandle: 24 B float32 [3, 2] of default 0 in step 0 ...
"""

from tenure.store.accounts import Closed
from tenure.store.fetching import get_all, get_all_async
from tenure.store.handles import Handle
from tenure.store.joining import join, leave, objects, stats, still_mapped
from tenure.store.scopes import Call, Scope, close, scope
from tenure.store.trees import free, get_tree, map_tree, put_tree

__all__ = [
    "Call",
    "Closed",
    "Handle",
    "Scope",
    "close",
    "free",
    "get_all",
    "get_all_async",
    "get_tree",
    "join",
    "leave",
    "map_tree",
    "objects",
    "put_tree",
    "scope",
    "stats",
    "still_mapped",
]
