"""Releasing a storage's data: every alias sees it, and refilling makes every alias good again."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import tenure
from probes import assert_ends_well, needs_real_frees, resident_bytes

MIB = 1 << 20

# Every way to have another name for the storage of a 4x4 float32 tensor.
ALIASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda x: x,
    "slice": lambda x: x[1:],
    "element": lambda x: x[2, 3],
    "strided slice": lambda x: x[:, ::2],
    "transpose": lambda x: x.T,
    "reshape": lambda x: x.view(2, 8),
    "chunk": lambda x: x.chunk(2)[1],
    "unbind": lambda x: x.unbind()[3],
    "expand": lambda x: x[:1].expand(4, 4),
    "as_strided": lambda x: x.as_strided((3,), (5,), 1),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "alias": torch.ops.aten.alias,
    "other dtype": lambda x: x.view(torch.int32),
    "smaller dtype": lambda x: x.view(torch.uint8),
    "complex": lambda x: torch.view_as_complex(x.view(4, 2, 2)),
    "set_": lambda x: torch.empty(0).set_(x.untyped_storage(), 4, (3,)),
    "parameter": lambda x: torch.nn.Parameter(x),
    "buffer of a module": lambda x: torch.nn.Buffer(x),
    "flattened": lambda x: torch.flatten(x),
    "diagonal": lambda x: x.diagonal(),
    "requires grad": lambda x: x.detach().requires_grad_(),
}
READS: dict[str, Callable[[torch.Tensor], object]] = {
    "sum": lambda x: x.sum(),
    "add": lambda x: x + 1,
    "add_": lambda x: x.detach().as_strided((), ()).add_(1),
    "zero_": lambda x: x.detach().zero_(),
    "copy_ from": lambda x: torch.empty_like(x).copy_(x),
    "equal": lambda x: torch.equal(x, torch.empty_like(x)),
    "cat": lambda x: torch.cat([x.reshape(-1), x.reshape(-1)]),
    "numpy": lambda x: x.detach().numpy(),
    "asarray": lambda x: np.asarray(x.detach()),
    "data_ptr": lambda x: x.data_ptr(),
    "storage's data_ptr": lambda x: x.untyped_storage().data_ptr(),
    "tolist": lambda x: x.tolist(),
    "clone": lambda x: x.clone(),
    "lazy clone": lambda x: torch._lazy_clone(x),
    "deepcopy": lambda x: copy.deepcopy(x.detach()),
    "pickle": lambda x: pickle.dumps(x.detach()),
    "save": lambda x: torch.save(x.detach(), io.BytesIO()),
    "repr": repr,
    "dlpack": lambda x: np.from_dlpack(x.detach()),
    "share_memory_": lambda x: x.detach().share_memory_(),
    "resize_": lambda x: x.untyped_storage().resize_(1024),
    "bytes": lambda x: x.untyped_storage().tolist(),
    "is_shared": lambda x: x.is_shared(),
}


def base() -> torch.Tensor:
    return torch.arange(16.0).view(4, 4)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("alias", ALIASES)
def test_a_read_raises_until_it_is_refilled(alias: str, read: str) -> None:
    x = base()
    view = ALIASES[alias](x)
    expected = view.detach().clone()
    tenure.release(x)
    with pytest.raises(RuntimeError, match=r"^UseAfterRelease: storage 0x"):
        READS[read](view)
    assert tenure.is_released(view)
    tenure.refill(x, torch.arange(16.0))
    assert torch.equal(view, expected)


@pytest.mark.parametrize("alias", ALIASES)
def test_release_and_refill_through_any_alias(alias: str) -> None:
    x = base()
    view = ALIASES[alias](x)
    tenure.release(view)
    with pytest.raises(RuntimeError, match="UseAfterRelease"):
        x.sum()
    tenure.refill(view, torch.arange(16.0))
    assert torch.equal(x, base())


def test_aliases_made_after_the_release_raise_and_are_good_again() -> None:
    x = base()
    tenure.release(x)
    view = x.T[1:]
    with pytest.raises(RuntimeError, match="UseAfterRelease"):
        view.sum()
    tenure.refill(x, base())
    assert torch.equal(view, base().T[1:])


def test_a_ref_can_be_copied() -> None:
    x = base()
    ref = tenure.StorageRef(x)
    assert copy.copy(ref) == copy.deepcopy({"ref": ref})["ref"] == ref
    del x
    assert not copy.copy(ref).alive


def test_shape_and_size_stay() -> None:
    x = base()
    tenure.release(x)
    assert (x.shape, x.stride(), x.dtype, x.untyped_storage().nbytes()) == (
        (4, 4),
        (4, 1),
        torch.float32,
        64,
    )


def test_versions_stay() -> None:
    x = base()
    view, parameter = x[1:], torch.nn.Parameter(x)
    x.add_(1)
    before = x._version, view._version, parameter._version
    tenure.release(x)
    tenure.refill(x, base())
    assert (x._version, view._version, parameter._version) == before


def test_refill_without_content_makes_it_usable() -> None:
    x = base()
    tenure.release(x)
    tenure.refill(x)
    assert torch.equal(x.fill_(3), torch.full((4, 4), 3.0))


def test_many_rounds() -> None:
    x = base()
    view = x[2:]
    for i in range(100):
        tenure.release(x)
        tenure.refill(x, torch.full((16,), float(i)))
        assert view[0, 0] == i


# --- the text --------------------------------------------------------------------------------


def read_error(x: torch.Tensor) -> str:
    with pytest.raises(RuntimeError) as raised:
        x.sum()
    return str(raised.value)


def test_the_text_names_storage_owner_releaser_site_and_scope() -> None:
    x = base()
    with tenure.hold(x, "mlp.0", kind="activation"):
        with tenure.scope("epoch", 1), tenure.scope("step", 12):
            tenure.release(x, by="offload")
        assert re.search(
            r"^UseAfterRelease: storage 0x[0-9a-f]+ \(64 B on cpu\), "
            r"owned by activation 'mlp.0' \(tests/python/core/test_storages.py:\d+\), "
            r"was released by 'offload' at tests/python/core/test_storages.py:\d+ "
            r"in scope 'epoch 1 / step 12': "
            r"refill it before this read, or release it after its last reader",
            read_error(x),
        )


def test_the_text_without_an_owner_says_so() -> None:
    x = base()
    tenure.release(x)
    assert "of no owner known to Tenure, was released by 'user' at" in read_error(x)


def test_the_text_is_of_the_last_release() -> None:
    x = base()
    tenure.release(x, by="first")
    tenure.refill(x)
    tenure.release(x, by="second")
    assert "released by 'second'" in read_error(x)


def test_explain_tells_what_a_reader_gets() -> None:
    x = base()
    assert tenure.explain(x).released is None
    tenure.release(x)
    assert read_error(x).startswith(tenure.explain(x).released)


# --- autograd --------------------------------------------------------------------------------


def saved_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w


def saved_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x[1:] * w[1:]


def saved_transpose(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.T @ w


def saved_through_a_linear_layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, w).relu()


@pytest.mark.parametrize(
    "op", [saved_product, saved_view, saved_transpose, saved_through_a_linear_layer]
)
def test_backward_raises_and_after_refill_gives_the_same_gradients(
    op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(0)
    content = torch.randn(4, 4)
    weight = torch.randn(4, 4)

    def gradients(*, release: bool) -> list[torch.Tensor]:
        x, w = content.clone(), weight.clone().requires_grad_()
        loss = op(x, w).square().sum()
        if release:
            tenure.release(x)
            with pytest.raises(RuntimeError, match="UseAfterRelease: storage"):
                loss.backward(retain_graph=True)
            w.grad = None
            tenure.refill(x, content)
        loss.backward()
        return [w.grad]

    for with_release, without in zip(
        gradients(release=True), gradients(release=False), strict=True
    ):
        assert torch.equal(with_release, without)


def test_autograd_still_sees_writes_between() -> None:
    """A refill is no write, but a write is one: autograd's own check stays."""
    x, w = base(), torch.ones(4, 4, requires_grad=True)
    loss = (x * w).sum()
    tenure.release(x)
    tenure.refill(x, base())
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_leaf_that_requires_grad() -> None:
    x = base().requires_grad_()
    loss = (x * 2).sum()
    tenure.release(x)
    loss.backward()  # needs no value of x
    tenure.refill(x, base())
    assert torch.equal(x.grad, torch.full((4, 4), 2.0))


# --- what refill copies ----------------------------------------------------------------------


SOURCES: dict[str, torch.Tensor] = {
    "contiguous": torch.arange(16.0),
    "another shape": torch.arange(16.0).view(2, 8),
    "strided": torch.arange(32.0)[::2],
    "transposed": torch.arange(16.0).view(4, 4).T,
    "with an offset": torch.arange(20.0)[4:],
    "expanded": torch.arange(4.0).expand(4, 4),
    "requires grad": torch.arange(16.0, requires_grad=True),
    "not a leaf": torch.arange(16.0, requires_grad=True) * 2,
    "other dtype": torch.arange(8.0, dtype=torch.float64),
    "bytes": torch.arange(64, dtype=torch.uint8),
    "complex": torch.arange(8).to(torch.complex64) * 1j,
    "conjugate": (torch.arange(8).to(torch.complex64) * 1j).conj(),
    "negative": (torch.arange(16).to(torch.complex64) * 1j).conj().imag,
}


@pytest.mark.parametrize("source", SOURCES)
def test_refill_copies_the_values(source: str) -> None:
    content = SOURCES[source]
    expected = content.detach().resolve_conj().resolve_neg().contiguous()
    x = torch.zeros(16)
    tenure.release(x)
    tenure.refill(x, content)
    assert torch.equal(x.view(torch.uint8), expected.flatten().view(torch.uint8))


def channels_last() -> torch.Tensor:
    return torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)


TARGETS: dict[str, Callable[[], torch.Tensor]] = {
    "row-major": base,
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "permuted": lambda: torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
    "channels last": channels_last,
    "channels-last weight": lambda: (
        torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last).weight.detach()
    ),
    "conjugate": lambda: torch.complex(base(), base() + 1).t().conj(),
    "negative": lambda: base().t()._neg_view(),
    "scalar": lambda: torch.tensor(3.0),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", ["as it is", "row-major"])
def test_refill_with_the_same_shape_gives_equal_tensors(target: str, layout: str) -> None:
    x = TARGETS[target]()
    content = x.clone() if layout == "as it is" else x.clone(memory_format=torch.contiguous_format)
    tenure.release(x)
    tenure.refill(x, content)
    assert torch.equal(x, content)


def test_refill_with_the_same_shape_moves_the_bits_of_another_dtype() -> None:
    x = channels_last()
    bits = x.clone().view(torch.int32)
    tenure.release(x)
    tenure.refill(x, bits)
    assert torch.equal(x, channels_last())


def test_refill_of_a_strided_tensor_with_flat_bytes_takes_them_in_order() -> None:
    x = channels_last()
    content = torch.tensor(x.untyped_storage().tolist(), dtype=torch.uint8)
    tenure.release(x)
    tenure.refill(x, content)
    assert torch.equal(x, channels_last())


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1:],
        lambda x: x.expand(2, 4, 4),
        lambda x: x.as_strided((4, 4), (1, 1)),  # as many elements, but not all of them
    ],
    ids=["part", "expanded", "overlapping"],
)
def test_refill_through_a_view_that_is_not_the_storage_takes_bytes_in_order(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = torch.zeros(4, 4)
    alias = view(x)
    tenure.release(x)
    tenure.refill(alias, base())
    assert torch.equal(x, base())


def test_refill_in_inference_mode() -> None:
    x = base()
    with torch.inference_mode():
        tenure.release(x)
        tenure.refill(x, base() + 1)
    assert torch.equal(x, base() + 1)


class Refuse(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError(f"{func} was dispatched")


def test_modes_do_not_see_a_refill() -> None:
    x, content = base(), base() + 1
    tenure.release(x)
    with Refuse():
        tenure.refill(x, content)
    assert torch.equal(x, base() + 1)


def test_refill_while_fake_tensors_are_made() -> None:
    x, content = base(), base() + 1
    tenure.release(x)
    with FakeTensorMode():
        tenure.refill(x, content)
    assert torch.equal(x, base() + 1)


def test_refill_inside_a_transform() -> None:
    x, content = base(), base() + 1
    tenure.release(x)

    def fn(y: torch.Tensor) -> torch.Tensor:
        tenure.refill(x, content)
        return y.sum()

    torch.func.grad(fn)(torch.ones(3))
    assert torch.equal(x, base() + 1)


def test_refill_under_another_default_device() -> None:
    x, content = base(), base() + 1
    tenure.release(x)
    with torch.device("meta"):
        tenure.refill(x, content)
    assert torch.equal(x, base() + 1)


# --- memory ----------------------------------------------------------------------------------


@needs_real_frees
def test_release_gives_memory_back_to_the_system() -> None:
    assert_ends_well(
        """
        import os, pathlib, torch, tenure

        def resident_bytes():
            pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
            return int(pages) * os.sysconf("SC_PAGE_SIZE")

        MIB = 1 << 20
        x = torch.ones(256 * MIB // 4)
        views = [x[1:], x.view(2, -1), x.detach()]
        held = resident_bytes()
        tenure.release(x)
        assert held - resident_bytes() > 255 * MIB
        tenure.refill(x)
        x.fill_(1)
        assert abs(resident_bytes() - held) < MIB
        assert all(view.flatten()[-1] == 1 for view in views)
        """,
        MIMALLOC_PURGE_DELAY="0",  # torch's allocator on aarch64 keeps what was freed for a while
    )


def test_the_ledger_counts_nothing_while_it_is_released() -> None:
    x = base()
    with tenure.hold(x, "a"), tenure.hold(x.T, "b", kind="activation"):
        assert tenure.ledger().bytes == 64
        tenure.release(x)
        kinds = tenure.ledger().by_kind()
        assert (tenure.ledger().bytes, kinds["user"].bytes, kinds["activation"].bytes) == (0, 0, 0)
        assert tenure.ledger().leases == 2
        tenure.refill(x)
        kinds = tenure.ledger().by_kind()
        assert (tenure.ledger().bytes, kinds["user"].bytes, kinds["activation"].bytes) == (64,) * 3


def test_a_lease_taken_while_it_is_released_counts_after_refill() -> None:
    x = base()
    tenure.release(x)
    with tenure.hold(x, "test") as lease:
        assert (lease.nbytes, tenure.ledger().bytes) == (0, 0)
        tenure.refill(x)
        assert (lease.nbytes, tenure.ledger().bytes) == (64, 64)


@needs_real_frees
def test_released_storages_that_die_leave_nothing() -> None:
    def release_and_drop(times: int) -> None:
        for _ in range(times):
            tenure.release(torch.empty(4))

    release_and_drop(5_000)
    before = resident_bytes()
    release_and_drop(50_000)
    # A StorageImpl and its record take over 200 bytes: 10 MB if they all stayed.
    assert resident_bytes() - before < MIB
