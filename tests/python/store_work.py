"""What a member of a store's job can be told to do: see members.py."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from typing import Any

import torch

import tenure
from tenure.store import Handle

open_scopes: dict[tuple[str, str], tenure.store.Scope] = {}
held: dict[str, torch.Tensor] = {}


def tensor_of(shape: list[int], dtype: str = "float32", seed: int = 0) -> torch.Tensor:
    """The same in every process: bytes that a mistake would not give by accident."""
    element = getattr(torch, dtype)
    count = torch.Size(shape).numel()
    size = torch.empty(0, dtype=element).element_size()
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator)
    if element is torch.bool:
        raw = raw % 2
    return raw.view(element).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    """Its elements, bit for bit."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def scope(kind: str, key: int | str, **options: Any) -> tenure.store.Scope:
    name = kind, str(key)
    if name not in open_scopes:
        open_scopes[name] = tenure.store.scope(kind, key, **options)
    return open_scopes[name]


def put(
    kind: str,
    key: int | str,
    tensor: dict[str, Any],
    *,
    call: str | None = None,
    fails: bool = False,
    **options: Any,
) -> Handle:
    owner = scope(kind, key)
    if call is None:
        return owner.put(tensor_of(**tensor), **options)
    with owner.call(call) as attempt:
        handle = attempt.put(tensor_of(**tensor), **options)
        if fails:
            raise RuntimeError("the call failed")
        return handle


def put_many(kind: str, key: int | str, count: int, elements: int) -> list[Handle]:
    owner = scope(kind, key)
    return [owner.put(torch.full((elements,), float(i))) for i in range(count)]


def get(handle: Handle, *, rows: tuple[int, int] | None = None, **options: Any) -> bytes:
    return raw(handle.get(None if rows is None else slice(*rows), **options))


def get_and_hold(handle: Handle, name: str, **options: Any) -> bytes:
    held[name] = handle.get(**options)
    return raw(held[name])


def hold_and_sum(handle: Handle, name: str) -> float:
    """Reads all of it, and makes no copy."""
    held[name] = handle.get()
    return held[name].sum().item()


def get_all(handles: list[Handle], **options: Any) -> list[bytes]:
    return [raw(tensor) for tensor in tenure.store.get_all(handles, **options)]


def let_go(name: str) -> None:
    del held[name]


def add_in_place(name: str) -> bytes:
    held[name].add_(1)
    return raw(held[name])


def put_held(name: str, kind: str, key: int | str) -> Handle:
    return scope(kind, key).put(held[name])


def write_by_numpy(name: str) -> None:
    held[name].numpy()[...] = 7


def close(kind: str, key: int | str) -> tenure.store.Closed:
    open_scopes.pop((kind, str(key)), None)
    return tenure.store.close(kind, key)


def account(kind: str, key: int | str) -> tenure.store.Closed:
    return scope(kind, key).account


def waited_for() -> list[str]:
    return [name for row in tenure.store.objects() for name in row["waiting"]]


def keep_pythons_lock(flag: str) -> None:
    """Runs Python and nothing else, for no thread but its own, until the second byte is set."""
    interval = sys.getswitchinterval()
    with Path(flag).open("r+b") as file, mmap.mmap(file.fileno(), 2) as shared:
        sys.setswitchinterval(1000)
        shared[0] = 1
        while not shared[1]:
            pass
    sys.setswitchinterval(interval)


def adopt_and_close(kind: str, key: int | str, handles: list[Handle]) -> tenure.store.Closed:
    with tenure.store.scope(kind, key) as owner:
        owner.adopt(handles)
    return owner.account


def free(handle: Handle) -> bool:
    return handle.free()


def stats() -> dict[str, int]:
    return tenure.store.stats()


def kept_bytes() -> int:
    return tenure.store.stats()["kept_bytes"]


def join_again(job: str, role: str, rank: int) -> None:
    tenure.store.leave()
    tenure.store.join(job, role, rank)


def pss() -> int:
    """Bytes of this process, shared pages by their share, as the kernel counts them.

    Without files: of torch's libraries the share depends on who else maps them just then.
    """
    wanted = "Pss_Anon:", "Pss_Shmem:"
    rows = map(str.split, Path("/proc/self/smaps_rollup").read_text().splitlines())
    return sum(int(row[1]) * 1024 for row in rows if row[0] in wanted)
