"""The step clock: one counter, whoever announces a step's end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import tenure
from probes import assert_ends_well, current_scope


@pytest.fixture(autouse=True)
def _scopes_lead() -> None:
    """The clock follows one announcer; here, to begin with, step scopes."""
    for _ in range(2):
        with tenure.scope("step"):
            pass


@pytest.fixture
def ended() -> Iterator[list[int]]:
    """The steps that end during the test."""
    steps: list[int] = []
    subscription = tenure.on_step(steps.append)
    yield steps
    subscription.end()


def test_a_step_scope_ticks_with_its_number(ended: list[int]) -> None:
    for n in (100, 101, 102):
        with tenure.scope("step", n):
            pass
    assert ended == [100, 101, 102]
    assert tenure.steps() == 103


def test_a_step_scope_without_a_number_ticks_once(ended: list[int]) -> None:
    with tenure.scope("step", 7):
        pass
    for _ in range(3):
        with tenure.scope("step"):
            pass
    assert ended == [7, 8, 9, 10]


def test_other_scopes_do_not_tick(ended: list[int]) -> None:
    with tenure.scope("microbatch", 1), tenure.scope("steps", 2), tenure.scope("eval"):
        pass
    assert ended == []


def test_a_step_is_over_when_its_scope_is(ended: list[int]) -> None:
    with tenure.scope("step", 5):
        assert ended == []


def test_a_step_inside_its_scope_counts_once(ended: list[int]) -> None:
    for n in range(20, 25):
        with tenure.scope("step", n):
            tenure.step()
    assert len(ended) == 5


def test_step_and_scope_after_one_another_count_once(ended: list[int]) -> None:
    for n in range(30, 35):
        with tenure.scope("step", n):
            pass
        tenure.step()
    assert len(ended) == 5


def test_step_alone_counts_after_the_scopes_ended(ended: list[int]) -> None:
    """Whoever led falls silent: at most the first announcement of another is taken for an echo."""
    with tenure.scope("step", 40):
        pass
    ended.clear()
    for _ in range(5):
        tenure.step()
    assert len(ended) in {4, 5}


def test_a_subscription_ends_when_it_is_dropped() -> None:
    steps: list[int] = []
    subscription = tenure.on_step(steps.append)
    with tenure.scope("step", 50):
        pass
    del subscription
    with tenure.scope("step", 51):
        pass
    assert steps == [50]


def test_ending_a_subscription_twice_does_nothing() -> None:
    subscription = tenure.on_step(lambda _: None)
    subscription.end()
    subscription.end()


def test_a_subscriber_may_use_tenure() -> None:
    seen: list[str] = []

    def on_step(n: int) -> None:
        with tenure.scope("telemetry", n):
            seen.append(current_scope())

    subscription = tenure.on_step(on_step)
    with tenure.scope("epoch", 1), tenure.scope("step", 60):
        pass
    subscription.end()
    assert seen == ["epoch 1 / telemetry 60"]


def test_a_subscriber_may_end_itself() -> None:
    steps: list[int] = []

    def once(n: int) -> None:
        steps.append(n)
        subscription.end()

    subscription = tenure.on_step(once)
    for n in (70, 71):
        with tenure.scope("step", n):
            pass
    assert steps == [70]


def test_threads_may_tick(ended: list[int]) -> None:
    def run() -> None:
        for n in range(100):
            with tenure.scope("step", n):
                pass

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ended) == sorted(list(range(100)) * 4)


def raise_it(n: int) -> None:
    raise ValueError(f"subscriber at {n}")


def test_what_a_subscriber_raises_arrives_once_the_scope_is_closed() -> None:
    subscription = tenure.on_step(raise_it)
    with tenure.scope("epoch", 1):
        with pytest.raises(ValueError, match="subscriber at 80"), tenure.scope("step", 80) as step:
            pass
        subscription.end()
        assert not step.is_open
        assert current_scope() == "epoch 1"
    assert current_scope() == "process"


def test_a_subscriber_that_raises_does_not_silence_others(ended: list[int]) -> None:
    first = tenure.on_step(raise_it)
    later: list[int] = []
    last = tenure.on_step(later.append)
    with pytest.raises(ValueError, match="subscriber at 90"), tenure.scope("step", 90):
        pass
    first.end()
    last.end()
    assert (ended, later) == ([90], [90])


def test_a_step_inside_a_step_counts_once(ended: list[int]) -> None:
    for n in (110, 111):
        with tenure.scope("step", n), tenure.scope("microbatch"), tenure.scope("step", n):
            pass
    assert ended == [110, 111]


def test_where_step_leads_numbers_of_scopes_do_not_count(ended: list[int]) -> None:
    for _ in range(2):
        tenure.step()
    ended.clear()
    before = tenure.steps()
    for n in (500, 501):
        with tenure.scope("step", n):
            tenure.step()
    assert ended == [before, before + 1]


class Unraisable(list[object]):
    def __call__(self, args: object) -> None:
        self.append(args.exc_value)  # type: ignore[attr-defined]


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> Unraisable:
    seen = Unraisable()
    monkeypatch.setattr("sys.unraisablehook", seen)
    return seen


def test_a_subscriber_does_not_replace_an_exception(unraisable: Unraisable) -> None:
    subscription = tenure.on_step(raise_it)
    with pytest.raises(KeyError, match="mine") as raised, tenure.scope("step", 120) as step:
        raise KeyError("mine")
    subscription.end()
    assert raised.value.__context__ is None
    assert [str(error) for error in unraisable] == ["subscriber at 120"]
    assert not step.is_open


def test_a_subscriber_does_not_hide_what_was_left(unraisable: Unraisable) -> None:
    subscription = tenure.on_step(raise_it)
    with (
        pytest.raises(tenure.ScopeError, match="'step 130' closed with 1 lease"),
        tenure.scope("step", 130, on_close="raise"),
    ):
        lease = tenure.hold(torch.zeros(4), "left")
    subscription.end()
    lease.release()
    assert [str(error) for error in unraisable] == ["subscriber at 130"]


def test_a_subscription_may_live_until_the_interpreter_ends() -> None:
    output = assert_ends_well("""
        import tenure
        subscription = tenure.on_step(print)
        for n in range(3):
            with tenure.scope("step", n):
                pass
    """)
    assert output == "0\n1\n2\n"
