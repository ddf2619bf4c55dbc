"""The ledger: figures by kind, owner and scope, high-water marks, snapshots as columns, explain."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import tenure
from probes import needs_real_frees

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _interval() -> None:
    tenure.ledger().start_interval()


def figures(totals: tenure.Totals) -> tuple[int, int]:
    return totals.bytes, totals.leases


# --- shared storage counts once ----------------------------------------------------------------


@pytest.fixture
def shared() -> Iterator[list[tenure.Lease]]:
    """1 KiB held four times, by two kinds, three owners and in two scopes, and 16 bytes beside."""
    x, beside = torch.zeros(256), torch.zeros(4)
    with tenure.scope("outer", on_close="release"):
        leases = [
            tenure.hold(x, tenure.Owner("activation", "a", "here")),
            tenure.hold(x.view(16, 16), tenure.Owner("activation", "a", "here")),
            tenure.hold(x[3:5], tenure.Owner("activation", "b", "here")),
        ]
        with tenure.scope("inner", on_close="release"):
            leases.append(tenure.hold(x.view(2, -1).T, tenure.Owner("user", "c", "here")))
            leases.append(tenure.hold(beside, tenure.Owner("user", "c", "here")))
            yield leases


def test_once_in_total(shared: list[tenure.Lease]) -> None:
    assert (tenure.ledger().bytes, tenure.ledger().leases) == (1040, len(shared))


def test_once_per_kind(shared: list[tenure.Lease]) -> None:  # noqa: ARG001
    kinds = tenure.ledger().by_kind()
    assert figures(kinds["activation"]) == (1024, 3)
    assert figures(kinds["user"]) == (1040, 2)
    assert {kind for kind, row in kinds.items() if row.leases} == {"activation", "user"}


def test_once_per_owner(shared: list[tenure.Lease]) -> None:  # noqa: ARG001
    owners = tenure.ledger().by_owner()
    assert {owner: figures(row) for owner, row in owners.items()} == {
        ("user", "c", "here"): (1040, 2),
        ("activation", "a", "here"): (1024, 2),
        ("activation", "b", "here"): (1024, 1),
    }
    assert next(iter(owners)).name == "c", "largest first"


def test_once_per_scope(shared: list[tenure.Lease]) -> None:  # noqa: ARG001
    scopes = tenure.ledger().by_scope()
    assert {scope: figures(row) for scope, row in scopes.items()} == {
        "outer / inner": (1040, 2),
        "outer": (1024, 3),
    }


def test_the_last_lease_takes_the_bytes_away(shared: list[tenure.Lease]) -> None:
    seen = []
    for lease in shared:
        lease.release()
        seen.append(tenure.ledger().bytes)
    assert seen == [1040, 1040, 1040, 16, 0]


def test_the_last_lease_of_a_kind_takes_its_bytes_away(shared: list[tenure.Lease]) -> None:
    for lease in shared[:2]:
        lease.release()
    assert figures(tenure.ledger().by_kind()["activation"]) == (1024, 1)
    shared[2].release()
    assert figures(tenure.ledger().by_kind()["activation"]) == (0, 0)
    assert figures(tenure.ledger().by_kind()["user"]) == (1040, 2)


def test_scopes_of_one_name_are_added_up() -> None:
    """Two threads in "step 3": a table by name must not lose one of them."""
    inside, looked = threading.Barrier(3, timeout=30), threading.Barrier(3, timeout=30)
    shared = torch.zeros(256)

    def run() -> None:
        with tenure.scope("step", 3, on_close="release"):
            kept = [tenure.hold(torch.zeros(4), "own"), tenure.hold(shared, "shared")]
            inside.wait()
            looked.wait()
            del kept

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait()
    by_scope = {scope: figures(row) for scope, row in tenure.ledger().by_scope().items()}
    looked.wait()
    for thread in threads:
        thread.join()
    assert by_scope == {"step 3": (1024 + 32, 4)}


# --- high-water marks --------------------------------------------------------------------------
# Other tests took leases on several threads, so a peak may be off by 1 MiB; exact peaks are tested
# in tests/cpp/core/ledger_test.cpp. The memory here is never touched, so its size costs nothing.


def about(mib: int) -> object:
    return pytest.approx(mib * MIB, abs=MIB)


def hold(mib: int, kind: str = "user") -> tenure.Lease:
    return tenure.hold(torch.empty(mib * MIB, dtype=torch.uint8), "test", kind=kind)


def test_a_peak_stays_until_the_next_interval() -> None:
    with hold(100), hold(200):
        pass
    assert (tenure.ledger().bytes, tenure.ledger().peak) == (0, about(300))
    tenure.ledger().start_interval()
    assert tenure.ledger().peak == 0


def test_an_interval_starts_at_what_is_held() -> None:
    with hold(100):
        tenure.ledger().start_interval()
        assert tenure.ledger().peak == 100 * MIB


def test_start_interval_returns_the_one_that_ended() -> None:
    with hold(100, "gradient"):
        pass
    ended = tenure.ledger().start_interval()
    assert (ended["all"].peak, ended["gradient"].peak) == (about(100), about(100))
    assert (ended["user"].peak, ended["all"].bytes) == (0, 0)


def test_a_peak_of_a_kind_is_its_own() -> None:
    """The peak of all is of one moment, not the sum of the kinds' peaks."""
    with hold(100, "gradient"):
        pass
    with hold(200, "optimizer"):
        pass
    kinds = tenure.ledger().by_kind()
    assert (kinds["gradient"].peak, kinds["optimizer"].peak) == (about(100), about(200))
    assert tenure.ledger().peak == about(200)


def test_refilling_can_set_a_peak() -> None:
    x = torch.empty(100 * MIB, dtype=torch.uint8)
    with tenure.hold(x, "x"):
        tenure.release(x)
        with hold(200):
            assert tenure.ledger().peak == about(200)
            tenure.refill(x)
            assert tenure.ledger().peak == about(300)


# --- snapshots ---------------------------------------------------------------------------------


def test_columns_describe_the_leases() -> None:
    x = torch.zeros(256)
    with (
        tenure.scope("step", 1) as step,
        tenure.hold(x, tenure.Owner("activation", "a", "here")),
        tenure.hold(x, tenure.Owner("user", "b", "there"), scope=step),
    ):
        table = tenure.leases()
        owners = [table.owner_of(owner) for owner in table.owner]
        assert sorted(owners) == [("activation", "a", "here"), ("user", "b", "there")]
        assert [table.scope_of(scope) for scope in table.scope] == ["step 1"] * 2
        assert table.scope.tolist() == [step.id] * 2
        assert table.bytes.tolist() == [1024] * 2
        assert len(set(table.storage.tolist())) == 1
        assert [row.device for row in table] == ["cpu"] * 2
        assert all(0 <= age < 60 for age in table.age)


def test_dtypes() -> None:
    table = tenure.leases()
    dtypes = {name: getattr(table, name).dtype for name in ("storage", "bytes", "scope")}
    assert dtypes == dict.fromkeys(dtypes, np.dtype(np.uint64))
    assert (table.owner.dtype, table.device.dtype, table.age.dtype) == (
        np.uint32,
        np.uint16,
        np.float64,
    )


def test_an_empty_snapshot() -> None:
    table = tenure.leases()
    assert (len(table), table.bytes.sum(), list(table), table.by_owner()) == (0, 0, [], {})


@pytest.mark.parametrize("name", ["storage", "bytes", "scope", "owner", "device"])
def test_columns_are_views_that_cannot_be_written(name: str) -> None:
    with tenure.hold(torch.zeros(4), "test"):
        table = tenure.leases()
        column = getattr(table, name)
        assert not column.flags.owndata
        assert np.shares_memory(column, getattr(table, name))
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1


def test_columns_outlive_the_snapshot() -> None:
    with tenure.hold(torch.zeros(256), "test"):
        columns = [tenure.leases().bytes for _ in range(100)]
    assert [column.tolist() for column in columns] == [[1024]] * 100


def test_a_snapshot_stays_what_it_was() -> None:
    lease = tenure.hold(torch.zeros(256), "test")
    other = tenure.hold(torch.zeros(256), "other")
    table = tenure.leases()
    lease.release()
    other.release()
    assert (len(table), table.bytes.tolist()) == (2, [1024, 1024])
    assert repr(table) == "<tenure.Leases: 2 leases, 2048 bytes>"


def test_storage_ids_are_not_used_again() -> None:
    ids = set()
    for _ in range(1000):
        with tenure.hold(torch.zeros(4), "test"):
            ids.add(int(tenure.leases().storage[0]))
    assert len(ids) == 1000


def test_a_hundred_thousand_leases_add_up() -> None:
    tensors = [torch.empty(n % 7 + 1) for n in range(1000)]
    kinds = list(tenure.ledger().by_kind())
    with tenure.scope("step", 1, on_close="release"):
        held = [
            tenure.hold(tensors[n % 1000], f"owner {n % 50}", kind=kinds[n % len(kinds)])
            for n in range(100_000)
        ]
        table = tenure.leases()
        assert len(table) == tenure.ledger().leases == 100_000
        once = sum(x.nbytes for x in tensors)
        storages, first = np.unique(table.storage, return_index=True)
        assert (len(storages), int(table.bytes[first].sum())) == (1000, once)
        assert tenure.ledger().bytes == once
        assert sum(row.leases for row in table.by_owner().values()) == 100_000
        assert figures(table.by_scope()["step 1"]) == (once, 100_000)
        assert sum(row.leases for row in tenure.ledger().by_kind().values()) == 100_000
    assert not any(lease.held for lease in held)
    assert tenure.ledger().leases == 0


# --- the table and explain ---------------------------------------------------------------------


def test_the_table_shows_kinds_that_are_or_were_held() -> None:
    with hold(100, "gradient"):
        pass
    with tenure.hold(torch.zeros(2048), "b"):
        lines = [line.split() for line in str(tenure.ledger()).splitlines()]
    assert [line[:3] for line in lines] == [
        ["kind", "bytes", "leases"],
        ["gradient", "0", "0"],
        ["user", "8,192", "1"],
        ["all", "8,192", "1"],
    ]


def test_explain_tells_leases_from_other_references() -> None:
    x = torch.zeros(256)
    view = x[1:]
    with tenure.scope("step", 2), tenure.hold(x, "first"), tenure.hold(view, "second"):
        found = tenure.explain(view)
        assert (found.nbytes, found.references, found.others) == (1024, 4, 2)
        assert [(lease.owner, lease.scope) for lease in found.leases] == [
            ("first", "step 2"),
            ("second", "step 2"),
        ]
        assert found.storage == tenure.StorageRef(x)
        text = str(found)
    assert "4 references, 2 by Tenure, 2 by tensors and other code" in text
    assert "leased to user 'first' (tests/python/core/test_ledger.py:" in text
    assert "in scope 'step 2' for " in text


def test_explain_does_not_count_itself() -> None:
    x = torch.zeros(4)
    assert [tenure.explain(x).references for _ in range(3)] == [1, 1, 1]


def test_explain_counts_what_autograd_saved() -> None:
    x, w = torch.zeros(4), torch.ones(3, requires_grad=True)
    before = tenure.explain(x).others
    y = x[1:] * w
    assert tenure.explain(x).others == before + 1
    del y
    assert tenure.explain(x).others == before


# --- identity ----------------------------------------------------------------------------------


def test_refs_of_one_storage_are_equal() -> None:
    x = torch.zeros(4)
    refs = {tenure.StorageRef(x), tenure.StorageRef(x[1:]), tenure.StorageRef(x.untyped_storage())}
    assert len(refs) == 1
    assert tenure.StorageRef(x) != tenure.StorageRef(torch.zeros(4))
    assert tenure.StorageRef(x) != "x"


def test_a_ref_knows_when_its_storage_is_dead() -> None:
    x = torch.zeros(4)
    ref = tenure.StorageRef(x)
    assert (ref.alive, ref.nbytes, ref.device) == (True, 16, torch.device("cpu"))
    assert ref.lock().data_ptr() == x.data_ptr()
    del x
    assert (ref.alive, ref.nbytes, ref.lock()) == (False, 0, None)
    assert "(dead)" in repr(ref)


def test_a_ref_does_not_keep_the_storage_alive() -> None:
    x = torch.zeros(4)
    refs = [tenure.StorageRef(x) for _ in range(100)]
    assert tenure.explain(x).references == 1
    del x
    assert not any(ref.alive for ref in refs)


@needs_real_frees
def test_a_key_of_a_dead_storage_is_not_taken_for_a_new_one() -> None:
    """TRL's bug: an offloaded activation was known by its address, which was used again."""
    copies: dict[tenure.StorageRef, int] = {}
    addresses: set[int] = set()
    reused = 0
    for n in range(10_000):
        x = torch.empty(2048)
        reused += x.data_ptr() in addresses
        addresses.add(x.data_ptr())
        assert tenure.StorageRef(x) not in copies
        copies[tenure.StorageRef(x)] = n
    assert len(copies) == 10_000
    assert reused > 100, "addresses were hardly given out again: this tested nothing"


@pytest.mark.parametrize("thing", [None, 3, "x", [1.0]])
def test_a_ref_to_what_has_no_storage_is_refused(thing: object) -> None:
    name = type(thing).__name__
    with pytest.raises(
        tenure.InputError, match=f"needs a torch.Tensor or a torch.UntypedStorage and got {name}"
    ):
        tenure.StorageRef(thing)  # type: ignore[call-overload]


# --- storages that change while they are leased ----------------------------------------------


def test_a_resized_storage_counts_as_it_is_in_a_table() -> None:
    x = torch.zeros(256)
    with tenure.hold(x, "test") as lease:
        x.resize_(1024)
        assert lease.nbytes == 4096
        assert tenure.leases().bytes.tolist() == [4096]
        assert tenure.ledger().bytes == 4096  # the table told it
        x.untyped_storage().resize_(0)
        assert lease.nbytes == 0
        assert tenure.ledger().by_scope()["process"].bytes == 0
    assert tenure.ledger().bytes == 0


def test_leasing_a_resized_storage_again_refreshes_the_totals() -> None:
    x = torch.zeros(256)
    with tenure.hold(x, "a", kind="activation"):
        x.resize_(1024)
        with tenure.hold(x, "b"):
            kinds = tenure.ledger().by_kind()
            figures = (tenure.ledger().bytes, kinds["activation"].bytes, kinds["user"].bytes)
            assert figures == (4096, 4096, 4096)
    assert tenure.ledger().bytes == 0


def test_a_scope_reports_the_size_that_a_storage_has() -> None:
    with tenure.scope("step", on_close="release") as step:
        x = torch.zeros(256)
        lease = tenure.hold(x, "test")
        x.resize_(1024)
    assert step.report.bytes == 4096
    assert not lease.held


def test_a_lease_taken_while_the_data_is_released_counts_nothing() -> None:
    """The lease may be taken before or after the release, on another thread: nothing is left."""
    for _ in range(500):
        x = torch.zeros(16)
        both = threading.Barrier(2, timeout=30)
        leases: list[tenure.Lease] = []

        def take(x: torch.Tensor, both: threading.Barrier, leases: list[tenure.Lease]) -> None:
            both.wait()
            leases.append(tenure.hold(x, "test"))

        thread = threading.Thread(target=take, args=(x, both, leases))
        thread.start()
        both.wait()
        tenure.release(x)
        thread.join()
        assert (tenure.ledger().bytes, leases[0].nbytes) == (0, 0)
        leases.clear()
