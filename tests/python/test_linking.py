"""Which libraries the extension takes its functions from."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from tenure import _C


class Found(ctypes.Structure):
    """`Dl_info` of <dlfcn.h>."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def library_of(symbol: str) -> str:
    """The file that the extension, and what is loaded with it, find that symbol in."""
    address = ctypes.cast(getattr(ctypes.CDLL(_C.__file__), symbol), ctypes.c_void_p)
    found = Found()
    assert ctypes.CDLL(None).dladdr(address, ctypes.byref(found))
    return Path(found.file.decode()).name


# torch's libraries hold a part of libstdc++ and let others find it. It is an older one, and its
# remove_all calls a null pointer in torch 2.11 for CUDA.
@pytest.mark.parametrize(
    "symbol",
    [
        "_ZNSt10filesystem10remove_allERKNS_7__cxx114pathE",
        "_ZNSt10filesystem6renameERKNS_7__cxx114pathES3_",
        "_ZNSt10filesystem7__cxx1118directory_iteratorppEv",
    ],
)
def test_files_are_the_business_of_one_libstdcxx(symbol: str) -> None:
    assert library_of(symbol).startswith("libstdc++.so")
