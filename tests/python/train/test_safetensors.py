"""Safetensors files: ours read by theirs, theirs by ours, and damaged ones refused in words."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tenure import InputError, TenureError
from tenure._C import train_read_safetensors, train_write_safetensors

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {
        f"w.{dtype}": (torch.randn(3, 5) * 4).abs().to(dtype).reshape(5, 3) for dtype in DTYPES
    }
    return tensors | {"scalar": torch.tensor(2.5), "none": torch.empty(0, 4), 'é"\n': torch.ones(1)}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
    )


def test_every_type_is_read_by_theirs(tmp_path: Path) -> None:
    tensors = some_tensors()
    file = tmp_path / "x.safetensors"
    train_write_safetensors(str(file), list(tensors.items()), {"format": "pt", "who": 'ü "x"'})
    loaded = load_file(file)
    assert loaded.keys() == tensors.keys()
    assert all(same(loaded[name], value) for name, value in tensors.items())
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "who": 'ü "x"'}


def test_every_type_is_read_by_ours(tmp_path: Path) -> None:
    tensors = some_tensors()
    save_file(tensors, tmp_path / "x", {"a": "b"})
    loaded, metadata = train_read_safetensors(str(tmp_path / "x"))
    assert metadata == {"a": "b"}
    assert loaded.keys() == tensors.keys()
    assert all(same(loaded[name], value) for name, value in tensors.items())


def test_what_is_not_contiguous_is_written_as_it_looks(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).view(3, 4)
    train_write_safetensors(str(tmp_path / "x"), [("t", matrix.t()), ("s", matrix[:, 1::2])], {})
    loaded = load_file(tmp_path / "x")
    assert torch.equal(loaded["t"], matrix.t())
    assert torch.equal(loaded["s"], matrix[:, 1::2])


def test_a_file_of_no_tensors(tmp_path: Path) -> None:
    train_write_safetensors(str(tmp_path / "x"), [], {})
    assert train_read_safetensors(str(tmp_path / "x")) == ({}, {})
    assert load_file(tmp_path / "x") == {}


def file_of(path: Path, header: object, data: bytes = b"", length: int | None = None) -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return str(path)


def entry(begin: int, end: int, shape: object = (2,), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "complaint"),
    [
        (b"{", b"", "header: this is not JSON: a string is missing at byte 1."),
        (b'{"\xff":1}', b"", "header: this is not JSON: a character that is not UTF-8 at byte 2."),
        (b"[]", b"", "its header is not a JSON object."),
        (b'{"a":1,"a":2}', b"", 'header: this is not JSON: "a" is there twice at byte 10.'),
        ({"a": 1}, b"", 'tensor "a" needs a dtype, a shape and data_offsets.'),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"", 'tensor "a" needs a dtype, a shape and data'),
        ({"a": entry(0, 8, dtype="F3")}, bytes(8), '"a" has the dtype F3, which is unknown here.'),
        ({"a": entry(0, 8, shape=(-2,))}, bytes(8), '"a" has a shape that cannot be.'),
        ({"a": entry(0, 8, shape=(2**40, 2**40))}, bytes(8), '"a" has a shape that cannot be.'),
        ({"a": entry(0, 8, shape=(2.0,))}, bytes(8), '"a" has a shape that cannot be.'),
        ({"a": entry(8, 0)}, bytes(8), '"a" has data_offsets that are no range.'),
        ({"a": entry(-8, 0)}, bytes(8), '"a" has data_offsets that are no range.'),
        ({"a": entry(0, 12)}, bytes(12), '"a" has 12 bytes, and its shape needs 8.'),
        ({"a": entry(0, 8)}, bytes(7), '"a" ends at byte 8 of the data, and the file has only 7: '),
        ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), 'tensor "b" overlaps "a".'),
        ({"a": entry(0, 8), "b": entry(0, 8)}, bytes(8), 'tensor "b" overlaps "a".'),
        ({"a": entry(4, 12)}, bytes(12), 'there are 4 bytes of no tensor before "a".'),
        ({"a": entry(0, 8)}, bytes(9), "there are 1 bytes of no tensor at its end."),
        ({"__metadata__": {"a": 1}}, b"", 'its metadata "a" is not a string.'),
        ({"__metadata__": [1]}, b"", "its metadata is not a JSON object."),
    ],
)
def test_a_damaged_file(tmp_path: Path, header: object, data: bytes, complaint: str) -> None:
    file = file_of(tmp_path / "x", header, data)
    with pytest.raises(InputError) as refused:
        train_read_safetensors(file)
    assert str(refused.value).startswith(f"{file} is no safetensors file, or damaged: ")
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "it has 0 bytes, and the length of its header alone takes 8."),
        (b"1234567", "it has 7 bytes, and"),
        (struct.pack("<Q", 20) + b"{}", "it claims a header of 20 bytes, and ends after 2."),
        (struct.pack("<Q", 2**63) + b"{}", f"a header of {2**63} bytes, and 100,000,000 are allow"),
    ],
)
def test_a_file_that_is_cut_or_something_else(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(InputError) as refused:
        train_read_safetensors(str(tmp_path / "x"))
    assert complaint in str(refused.value)


def test_a_real_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    train_write_safetensors(str(tmp_path / "x"), list(some_tensors().items()), {})
    content = (tmp_path / "x").read_bytes()
    for size in range(0, len(content), 7):
        (tmp_path / "y").write_bytes(content[:size])
        with pytest.raises(InputError, match="is no safetensors file, or damaged"):
            train_read_safetensors(str(tmp_path / "y"))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gone cannot be read: No such file or directory."):
        train_read_safetensors(str(tmp_path / "gone"))
    with pytest.raises(InputError, match="is no file."):
        train_read_safetensors(str(tmp_path))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="x cannot be written: No such file or directory."):
        train_write_safetensors(str(tmp_path / "gone" / "x"), [], {})


@pytest.mark.parametrize(
    ("weights", "complaint"),
    [
        ([("a", torch.ones(1)), ("a", torch.ones(1))], 'the name "a" is taken'),
        ([("__metadata__", torch.ones(1))], 'the name "__metadata__" is taken'),
        ([("a", torch.ones(1, dtype=torch.complex128))], '"a" is of ComplexDouble'),
    ],
)
def test_what_cannot_be_written_leaves_no_file(
    tmp_path: Path, weights: list[tuple[str, torch.Tensor]], complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        train_write_safetensors(str(tmp_path / "x"), weights, {})
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    """A process whose files may not be larger than 4 KiB, with a file that would be."""
    file = tmp_path / "x"
    train_write_safetensors(str(file), [("a", torch.ones(2))], {})
    before = file.read_bytes()
    if (child := os.fork()) == 0:
        import resource
        import signal

        status = 1
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            train_write_safetensors(str(file), [("a", torch.ones(4096))], {})
        except TenureError as error:
            status = 0 if "was not written: File too large; what was there" in str(error) else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]
