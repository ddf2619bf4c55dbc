"""Scopes as a stack on one thread: nesting, what closing does, and what it refuses."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

import tenure
from probes import current_scope


def hold(elements: int = 256) -> tenure.Lease:
    """A lease of its own storage in the current scope, 4 bytes an element."""
    return tenure.hold(torch.zeros(elements), "held")


def in_thread(fn: Callable[[], object]) -> object:
    """Runs `fn` on a thread of its own; returns what it returned or raised."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(fn())
        except BaseException as error:  # noqa: BLE001  handed to the caller
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


# --- nesting ---------------------------------------------------------------------------------


def test_without_a_scope_leases_belong_to_the_process() -> None:
    assert current_scope() == "process"


def test_scopes_nest_and_unwind() -> None:
    seen = []
    with tenure.scope("epoch", 1):
        seen.append(current_scope())
        with tenure.scope("step", 12):
            seen.append(current_scope())
            with tenure.scope("eval"):
                seen.append(current_scope())
            seen.append(current_scope())
        seen.append(current_scope())
    step = "epoch 1 / step 12"
    assert seen == ["epoch 1", step, f"{step} / eval", step, "epoch 1"]
    assert current_scope() == "process"


@pytest.mark.parametrize("count", [0, -1, 2**63 - 1, -(2**63)])
def test_counter_is_part_of_the_name(count: int) -> None:
    with tenure.scope("step", count) as scope:
        assert current_scope() == scope.name == f"step {count}"


def test_an_id_is_never_given_twice() -> None:
    ids = []
    for _ in range(1000):
        with tenure.scope("call") as scope:
            ids.append(scope.id)
    assert len(set(ids)) == 1000


def test_state_can_be_asked() -> None:
    scope = tenure.scope("call", 3)
    assert not scope.is_open
    assert repr(scope) == "<tenure.Scope 'call 3', not opened>"
    with scope:
        assert scope.is_open
    assert not scope.is_open
    assert repr(scope) == "<tenure.Scope 'call 3', closed>"


def test_nesting_has_a_limit_that_says_so() -> None:
    opened: list[tenure.Scope] = []
    try:
        with pytest.raises(tenure.ScopeError, match=r"'deep' would be nested 256 deep.*close"):
            while True:
                scope = tenure.scope("deep")
                scope.open()
                opened.append(scope)
        assert len(opened) == 255
        assert not scope.is_open
        assert current_scope() == " / ".join(["deep"] * 255)
    finally:
        for scope in reversed(opened):
            scope.close()


def test_many_scopes_in_turn_take_no_memory_for_good() -> None:
    """Places of closed scopes are used again: more of them than may be open at once."""
    for i in range(100_000):
        with tenure.scope("call", i):
            pass
    assert current_scope() == "process"


def test_threads_start_without_a_scope() -> None:
    with tenure.scope("step", 1):
        assert in_thread(current_scope) == "process"


def test_threads_have_scopes_of_their_own() -> None:
    def other() -> str:
        with tenure.scope("other"):
            both_inside.wait()
            seen = current_scope()
            both_inside.wait()
            return seen

    both_inside = threading.Barrier(2, timeout=30)
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.append(other()))
    with tenure.scope("main"):
        thread.start()
        both_inside.wait()
        assert current_scope() == "main"
        both_inside.wait()
    thread.join()
    assert results == ["other"]


def test_a_generator_runs_in_the_scope_of_whoever_runs_it() -> None:
    def scopes_seen() -> Iterator[str]:
        while True:
            yield current_scope()

    seen = scopes_seen()
    with tenure.scope("step", 1):
        assert next(seen) == "step 1"
    with tenure.scope("step", 2):
        assert next(seen) == "step 2"
    assert next(seen) == "process"


def test_a_generator_that_is_dropped_closes_its_scope() -> None:
    def batches() -> Iterator[str]:
        with tenure.scope("loading", on_close="release"):
            while True:
                lease = hold()
                yield lease.scope

    for seen in batches():
        assert seen == "loading"
        break
    assert tenure.ledger().leases == 0
    assert current_scope() == "process"


# --- what closing does -----------------------------------------------------------------------


class StepFailedError(Exception):
    pass


def test_report_warns_and_moves_to_the_enclosing_scope() -> None:
    with tenure.scope("epoch", 1, on_close="release"):
        with pytest.warns(tenure.ScopeWarning) as warned, tenure.scope("step", 2) as step:
            lease = hold()
        assert lease.scope == "epoch 1"
        assert (step.report.leases, step.report.bytes) == (1, 1024)
    text = str(warned[0].message)
    assert "scope 'step 2' closed with 1 lease (1.0 KiB) still held: user 'held' (" in text
    assert "test_scopes.py:" in text
    assert "Release them before the scope ends, or transfer them" in text


def test_the_warning_points_at_the_with_block() -> None:
    with pytest.warns(tenure.ScopeWarning) as warned, tenure.scope("step"):
        lease = hold()
    assert warned[0].filename == __file__
    lease.release()


def test_report_of_nothing_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tenure.scope("step") as step:
            hold().release()
    assert not step.report
    assert (step.report.leases, step.report.bytes) == (0, 0)


def test_release_frees_the_storage() -> None:
    with tenure.scope("step", on_close="release") as step:
        x = torch.zeros(256)
        ref = tenure.StorageRef(x)
        lease = tenure.hold(x, "held")
        del x
        assert ref.alive
    assert not ref.alive
    assert not lease.held
    assert step.report.released
    assert (step.report.leases, step.report.bytes) == (1, 1024)


def test_raise_raises_once_it_is_closed() -> None:
    with tenure.scope("epoch", on_close="release"):
        with (
            pytest.raises(tenure.ScopeError, match=r"'step 3' closed with 1 lease .* still held"),
            tenure.scope("step", 3, on_close="raise") as step,
        ):
            lease = hold()
        assert not step.is_open
        assert current_scope() == "epoch"
        assert lease.scope == "epoch"


def test_raise_does_not_where_nothing_is_left() -> None:
    with tenure.scope("step", on_close="raise"):
        hold().release()


def test_a_lease_that_was_transferred_out_is_not_left() -> None:
    with tenure.scope("epoch", on_close="release") as epoch:
        with tenure.scope("step", on_close="raise"):
            lease = hold()
            lease.transfer(epoch)
        assert lease.scope == "epoch"


def test_inner_scopes_report_to_the_next_one_out() -> None:
    kept: list[tenure.Lease] = []
    with (
        tenure.scope("epoch", on_close="release") as epoch,
        pytest.warns(tenure.ScopeWarning),
        tenure.scope("step"),
    ):
        kept.append(hold())
        with pytest.warns(tenure.ScopeWarning), tenure.scope("microbatch"):
            kept.append(hold())
        assert kept[1].scope == "epoch / step"
    assert epoch.report.leases == 2


@pytest.mark.parametrize(
    ("on_close", "left_with_outer"), [("report", True), ("release", False), ("raise", False)]
)
def test_an_exception_passes_through_unchanged(on_close: str, left_with_outer: bool) -> None:
    with tenure.scope("epoch", on_close="release"), warnings.catch_warnings():
        warnings.simplefilter("error")
        lease = None
        with pytest.raises(StepFailedError), tenure.scope("step", on_close=on_close):
            lease = hold()
            raise StepFailedError
        assert lease.held is left_with_outer
        assert current_scope() == "epoch"


def test_the_error_of_an_exception_has_nothing_chained_to_it() -> None:
    with pytest.raises(StepFailedError) as raised, tenure.scope("step", on_close="raise"):
        lease = hold()
        raise StepFailedError
    assert raised.value.__context__ is None
    assert not lease.held


@pytest.mark.parametrize(("on_close", "held"), [("report", True), ("release", False)])
def test_an_exception_ends_what_was_left_open_inside(on_close: str, held: bool) -> None:
    with tenure.scope("epoch", on_close="release"), warnings.catch_warnings():
        warnings.simplefilter("error")
        inner = [tenure.scope("inner"), tenure.scope("innermost", on_close=on_close)]
        with pytest.raises(StepFailedError) as raised, tenure.scope("step") as step:
            inner[0].open()
            inner[1].open()
            lease = hold()
            raise StepFailedError
        assert raised.value.__context__ is None
        assert not any(scope.is_open for scope in (step, *inner))
        assert inner[1].report.leases == 1
        assert [bool(scope.report) for scope in (inner[0], step)] == [held, held]
        assert lease.held is held
        assert current_scope() == "epoch"


def test_an_exception_turns_a_raise_inside_into_a_release() -> None:
    inner = tenure.scope("inner", on_close="raise")
    with pytest.raises(StepFailedError), tenure.scope("step"):
        inner.open()
        lease = hold()
        raise StepFailedError
    assert inner.report.released
    assert not lease.held


def test_an_exception_in_a_scope_closed_by_hand_passes_through() -> None:
    with pytest.raises(StepFailedError), tenure.scope("step") as step:
        step.close()
        raise StepFailedError


def test_where_an_exception_cannot_end_a_scope_it_gets_a_note() -> None:
    scope = tenure.scope("step")
    scope.open()
    error = StepFailedError()
    in_thread(lambda: scope.__exit__(StepFailedError, error, None))
    assert "'step' was opened by thread 'MainThread'" in error.__notes__[0]
    assert scope.is_open
    scope.close()


def test_a_report_names_the_largest_owners_first_and_counts_the_rest() -> None:
    with tenure.scope("step", on_close="release") as step:
        kept = [tenure.hold(torch.zeros(n), f"owner {n}") for n in (1, 5, 3, 7, 2, 6, 4)]
    assert [owner.split("'")[1] for owner in step.report.owners] == [
        f"owner {n}" for n in (7, 6, 5, 4, 3, 2, 1)
    ]
    assert "and 2 more owners" in str(step.report)
    assert not any(lease.held for lease in kept)


def test_storage_leased_twice_counts_once_in_a_report() -> None:
    with tenure.scope("step", on_close="release") as step:
        x = torch.zeros(256)
        kept = [tenure.hold(x, "a"), tenure.hold(x[1:], "b")]
    assert (step.report.leases, step.report.bytes) == (2, 1024)
    assert not any(lease.held for lease in kept)


def test_a_warning_turned_into_an_error_leaves_the_scope_closed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(tenure.ScopeWarning), tenure.scope("step"):
            lease = hold()
    assert current_scope() == "process"
    lease.release()


# --- what closing refuses --------------------------------------------------------------------


def test_out_of_order_is_refused_and_changes_nothing() -> None:
    outer, inner = tenure.scope("outer"), tenure.scope("inner")
    outer.open()
    inner.open()
    lease = hold()
    with pytest.raises(
        tenure.ScopeError, match="'outer' is not the innermost scope here, 'outer / inner' is"
    ):
        outer.close()
    assert outer.is_open
    assert inner.is_open
    assert lease.scope == current_scope() == "outer / inner"
    lease.release()
    inner.close()
    outer.close()


def test_twice_is_refused() -> None:
    scope = tenure.scope("step")
    scope.open()
    scope.close()
    with pytest.raises(tenure.ScopeError, match="closed already"):
        scope.close()


def test_twice_is_refused_inside_another_scope() -> None:
    closed = tenure.scope("closed")
    closed.open()
    closed.close()
    with tenure.scope("step"):
        with pytest.raises(tenure.ScopeError, match="closed already"):
            closed.close()
        assert current_scope() == "step"


def test_unopened_is_refused() -> None:
    with pytest.raises(tenure.ScopeError, match="'step' was never opened: use it as a `with`"):
        tenure.scope("step").close()


def test_opening_twice_is_refused() -> None:
    with tenure.scope("step") as scope:
        with pytest.raises(tenure.ScopeError, match="'step' was opened before: make a new one"):
            scope.open()
        assert current_scope() == "step"
    with pytest.raises(tenure.ScopeError, match="'step' was opened before"):
        scope.open()


def test_another_thread_is_refused() -> None:
    with tenure.scope("step", 4) as scope:
        lease = hold()
        error = in_thread(scope.close)
        assert isinstance(error, tenure.ScopeError)
        assert re.search(
            "'step 4' was opened by thread 'MainThread' and thread 'Thread-.*' tried to close it: "
            "close it where it was opened",
            str(error),
        )
        assert scope.is_open
        assert lease.scope == current_scope() == "step 4"
        lease.release()


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("", "scope name is empty"),
        ("a\nb", "scope name contains a newline"),
        ("a\0b", "control character"),
        ("a\x85b", "scope name contains a newline"),
        ("a\u2028b", "scope name contains a newline"),
        ("a\u2029b", "scope name contains a newline"),
        ("a\n" * 10_000, "scope name contains a newline"),
        ("a\ud800b", "scope name contains a lone surrogate"),
        (5, "scope name must be a str and is of type int"),
        (None, "scope name must be a str and is of type NoneType"),
        ("x" * 10_000, "has 10000 bytes: use at most 256"),
        ("é" * 200, "has 400 bytes: use at most 256"),
        ("a" + "é" * 200, "has 401 bytes: use at most 256"),
    ],
)
def test_a_bad_name_is_refused(name: str, complaint: str) -> None:
    scope = tenure.scope(name)
    with pytest.raises(tenure.InputError, match=complaint):
        scope.open()
    assert not scope.is_open
    assert current_scope() == "process"


@pytest.mark.parametrize(
    ("count", "complaint"),
    [
        (2**63, "scope counter does not fit into 64 bits"),
        (-(2**63) - 1, "scope counter does not fit into 64 bits"),
        (1.0, "scope counter must be an int and is of type float"),
        ("1", "scope counter must be an int and is of type str"),
    ],
)
def test_a_bad_count_is_refused(count: int, complaint: str) -> None:
    with pytest.raises(tenure.InputError, match=complaint):
        tenure.scope("step", count).open()
    assert current_scope() == "process"


def test_a_policy_that_is_no_text_is_refused() -> None:
    with pytest.raises(tenure.InputError, match="on_close must be a str and is of type int"):
        tenure.scope("step", on_close=5).open()  # type: ignore[arg-type]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(tenure.InputError, match="'keep': use 'report', 'release' or 'raise'"):
        tenure.scope("step", on_close="keep").open()  # type: ignore[arg-type]
    assert current_scope() == "process"


def test_names_may_be_in_any_language() -> None:
    with tenure.scope("Schritt – 步 🚶", 1):
        assert current_scope() == "Schritt – 步 🚶 1"
