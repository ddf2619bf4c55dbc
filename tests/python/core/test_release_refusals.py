"""Storages that cannot be released or refilled: the reason is named, and nothing changes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import tenure


def with_numpy_taken() -> torch.Tensor:
    x = torch.ones(4)
    x.numpy()
    return x


def shared(strategy: str) -> torch.Tensor:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        return torch.ones(4).share_memory_()
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def from_file(*, is_shared: bool) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data"
        path.write_bytes(bytes(16))
        return torch.from_file(str(path), shared=is_shared, size=4)


def loaded(*, mmap: bool) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data"
        torch.save(torch.ones(4), path)
        return torch.load(path, mmap=mmap)  # type: ignore[no-any-return]


def numpy_mapped() -> torch.Tensor:
    with tempfile.NamedTemporaryFile() as file:
        return torch.from_numpy(np.memmap(file, dtype=np.float32, mode="w+", shape=4))


def copy_on_write() -> torch.Tensor:
    x = torch.ones(4)
    x.keep_the_other_alive = torch._lazy_clone(x)  # type: ignore[attr-defined]
    return x


MAPPED = "shared with other processes or mapped from a file"
OUTSIDE = "belongs to someone outside PyTorch"
REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "numpy taken before": (with_numpy_taken, "not resizable (numpy() and pin_memory() do"),
    "from_numpy": (lambda: torch.from_numpy(np.ones(4)), OUTSIDE),
    "numpy's memmap": (numpy_mapped, OUTSIDE),
    "frombuffer": (lambda: torch.frombuffer(bytearray(16), dtype=torch.uint8), OUTSIDE),
    "from_dlpack": (lambda: torch.from_dlpack(np.ones(4)), OUTSIDE),
    "loaded": (lambda: loaded(mmap=False), OUTSIDE),
    "loaded, mapped": (lambda: loaded(mmap=True), OUTSIDE),
    "from_file": (lambda: from_file(is_shared=False), MAPPED),
    "from_file, shared": (lambda: from_file(is_shared=True), MAPPED),
    "shared by descriptor": (lambda: shared("file_descriptor"), MAPPED),
    "shared by name": (lambda: shared("file_system"), MAPPED),
    "copy on write": (copy_on_write, "copy-on-write and another tensor may share its data"),
    "lazy clone": (lambda: torch._lazy_clone(torch.ones(4)), "copy-on-write"),
}


@pytest.mark.parametrize("maker", REFUSED)
def test_release_is_refused_with_the_reason(maker: str) -> None:
    make, why = REFUSED[maker]
    x = make()
    before = x.tolist()
    with pytest.raises(tenure.ReleaseError) as raised:
        tenure.release(x[1:])
    assert why in str(raised.value)
    assert str(raised.value).endswith("clone() it first")
    assert not tenure.is_released(x)
    assert x.tolist() == before


@pytest.mark.parametrize("maker", REFUSED)
def test_the_advice_works(maker: str) -> None:
    x = REFUSED[maker][0]().clone()
    if maker in {"copy on write", "lazy clone"}:
        x.data_ptr()  # clone() of a copy-on-write tensor is a real one
    tenure.release(x)
    assert tenure.is_released(x)


class TestPinned:
    def test_pin_memory_is_refused(self, fake: ModuleType) -> None:  # noqa: ARG002
        x = torch.ones(4).pin_memory()
        with pytest.raises(tenure.ReleaseError, match="not resizable"):
            tenure.release(x)
        assert x.tolist() == [1] * 4

    @pytest.mark.skipif(
        torch.cuda.is_available(), reason="is_pinned() asks CUDA, not the fake device"
    )
    def test_memory_allocated_pinned_comes_back_pinned(self, fake: ModuleType) -> None:  # noqa: ARG002
        x = torch.empty(4, pin_memory=True)
        tenure.release(x)
        tenure.refill(x, torch.arange(4.0))
        assert x.is_pinned()
        assert x.tolist() == [0, 1, 2, 3]


# --- releasing twice, refilling wrongly --------------------------------------------------------


@pytest.fixture
def released() -> Iterator[torch.Tensor]:
    """A released tensor that, after the test, is still released with the same text, and refills."""
    x = torch.arange(16.0)
    with tenure.hold(x, "owner"):
        tenure.release(x, by="first")
        text = tenure.explain(x).released
        yield x
        assert tenure.explain(x).released == text
        assert tenure.ledger().bytes == 0
        tenure.refill(x, torch.arange(16.0))
        assert x.tolist() == list(range(16))
        assert tenure.ledger().bytes == 64


def test_releasing_twice_is_refused(released: torch.Tensor) -> None:
    with pytest.raises(tenure.UseAfterRelease, match=r"by 'first'.*cannot be released a second"):
        tenure.release(released[1:], by="second")


def test_a_source_that_is_too_small_is_refused(released: torch.Tensor) -> None:
    with pytest.raises(tenure.ReleaseError, match="from 60 bytes: it has 64, and the content must"):
        tenure.refill(released, torch.ones(15))


def test_a_source_that_is_too_large_is_refused(released: torch.Tensor) -> None:
    with pytest.raises(tenure.ReleaseError, match="from 68 bytes: it has 64"):
        tenure.refill(released, torch.ones(17))


def test_a_view_is_refilled_whole_or_not_at_all(released: torch.Tensor) -> None:
    with pytest.raises(tenure.ReleaseError, match="the content must cover all of it"):
        tenure.refill(released[8:], torch.ones(8))


def test_a_released_source_is_refused(released: torch.Tensor) -> None:
    other = torch.ones(16)
    tenure.release(other, by="other")
    with pytest.raises(tenure.UseAfterRelease, match="released by 'other'"):
        tenure.refill(released, other)


def test_its_own_alias_as_the_source_is_refused(released: torch.Tensor) -> None:
    with pytest.raises(tenure.UseAfterRelease, match="released by 'first'"):
        tenure.refill(released, released.view(4, 4))


def test_a_source_that_is_no_tensor_is_refused(released: torch.Tensor) -> None:
    with pytest.raises(tenure.InputError, match="needs a torch.Tensor and got list"):
        tenure.refill(released, [1.0] * 16)  # type: ignore[arg-type]


def test_refilling_what_has_its_data_is_refused() -> None:
    x = torch.ones(4)
    with pytest.raises(tenure.ReleaseError, match=r"was not released and cannot be refilled"):
        tenure.refill(x, torch.zeros(4))
    assert x.tolist() == [1] * 4


def test_refilling_twice_is_refused() -> None:
    x = torch.ones(4)
    tenure.release(x)
    tenure.refill(x, torch.full((4,), 2.0))
    with pytest.raises(tenure.ReleaseError, match="was not released"):
        tenure.refill(x, torch.full((4,), 3.0))
    assert x.tolist() == [2] * 4


class TestOnADevice:
    @pytest.mark.parametrize("device", ["cpu", "fake:1"])
    def test_a_source_on_another_device_is_refused(self, fake: ModuleType, device: str) -> None:  # noqa: ARG002
        x = torch.arange(4.0, device="fake:0")
        tenure.release(x)
        with pytest.raises(tenure.ReleaseError, match=f"from {device}: move the content to fake:0"):
            tenure.refill(x, torch.ones(4, device=device))
        assert tenure.is_released(x)
        tenure.refill(x, torch.ones(4, device="fake:0"))
        assert x.tolist() == [1] * 4

    def test_running_out_of_memory_leaves_it_released(self, fake: ModuleType) -> None:
        x = torch.ones(256, device="fake")
        tenure.release(x, by="first")
        fake.set_memory_policy(device_bytes=512)
        with pytest.raises(torch.OutOfMemoryError):
            tenure.refill(x)
        with pytest.raises(RuntimeError, match="UseAfterRelease: .* by 'first'"):
            x.sum()
        fake.set_memory_policy()
        tenure.refill(x)
        assert x.fill_(2).tolist() == [2] * 256

    def test_a_copy_that_fails_leaves_it_released(self, fake: ModuleType) -> None:
        """The source must be made contiguous first, for which there is no room."""
        x = torch.ones(256, device="fake")
        source = torch.ones(256, 2, device="fake")[:, 0].view(16, 16)
        tenure.release(x, by="first")
        fake.set_memory_policy(device_bytes=torch.accelerator.memory_allocated("fake") + 1024)
        with pytest.raises(torch.OutOfMemoryError):
            tenure.refill(x, source)
        assert tenure.is_released(x)


# --- storages of no size -----------------------------------------------------------------------


def test_a_tensor_of_no_elements() -> None:
    x = torch.empty(0, 3)
    tenure.release(x)
    assert tenure.is_released(x)
    tenure.refill(x, torch.empty(0))
    assert x.sum() == 0


def test_a_storage_that_was_resized_to_nothing() -> None:
    """What FSDP does to free a parameter: there is nothing left to free, and nothing breaks."""
    x = torch.ones(4)
    x.untyped_storage().resize_(0)
    tenure.release(x)
    with pytest.raises(RuntimeError, match=r"UseAfterRelease: storage 0x[0-9a-f]+ \(0 B on cpu\)"):
        x.sum()
    tenure.refill(x)
    x.untyped_storage().resize_(16)
    assert x.fill_(2).tolist() == [2] * 4


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("", "name of the releaser is empty"),
        ("a\nb", "contains a newline"),
        ("x" * 10_000, "has 10000 bytes"),
        ("a" + "é" * 200, "has 401 bytes"),
        ("a\ud800", "name of the releaser contains a lone surrogate"),
        (5, "name of the releaser must be a str and is of type int"),
    ],
)
def test_a_bad_name_of_the_releaser_is_refused(name: str, complaint: str) -> None:
    x = torch.ones(4)
    with pytest.raises(tenure.InputError, match=complaint):
        tenure.release(x, by=name)
    assert x.tolist() == [1] * 4


def test_a_fence_that_is_none_is_refused() -> None:
    x = torch.ones(4)
    with pytest.raises(tenure.InputError, match="needs a tenure.Fence and got int"):
        tenure.release(x, after=5)  # type: ignore[arg-type]
    assert x.tolist() == [1] * 4
