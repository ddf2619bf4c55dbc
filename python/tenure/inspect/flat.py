"""Proof that a step keeps memory flat: :func:`assert_flat`, and what the pytest marker uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from tenure import clock
from tenure.errors import InputError
from tenure.inspect import verdicts
from tenure.inspect.session import watch_apart

__all__ = ["MemoryGrows", "assert_flat", "measured"]

_FEWEST = 14


class MemoryGrows(AssertionError):  # noqa: N818  says what happened
    """Memory grew from step to step; the text names who holds what.

    Attributes:
        verdict: The whole verdict, as in the JSON file.
    """

    def __init__(self, verdict: verdicts.Document) -> None:
        """Says it as the first screen does."""
        super().__init__(verdicts.first_screen(verdict))
        self.verdict = verdict


def assert_flat(step: Callable[[], object], *, steps: int = 40, warmup: int = 3) -> None:
    """Calls `step` again and again, and raises if memory grows with it.

    Args:
        step: One training step, or anything else that should leave no memory behind.
        steps: How often to call it and watch; at least 14.
        warmup: Calls before that, unwatched: optimizers make their state, caches fill.

    Raises:
        MemoryGrows: An AssertionError that names what grows and who holds it.
        InputError: `steps` is too small to tell, or `step` makes no step when it is called: it is
            no function, is async, or is a generator.

    Example:
        >>> import tenure, torch
        >>> kept = []
        >>> try:
        ...     tenure.assert_flat(lambda: kept.append(torch.zeros(4096)))
        ... except tenure.MemoryGrows as error:
        ...     print(str(error).splitlines()[0].split(" since")[0])
        LEAK +16.4 kB/step
    """
    _check(step, steps, warmup)
    if (
        inspect.iscoroutinefunction(step)
        or inspect.isasyncgenfunction(step)
        or inspect.isgeneratorfunction(step)
    ):
        raise InputError(_not_run(getattr(step, "__qualname__", "step")))
    for _ in range(warmup):
        _call(step)
    with watch_apart() as session:
        before = clock.steps()
        try:
            for _ in range(steps):
                _call(step)
                clock.step()
            verdict = session.verdict()
        finally:
            clock.no_more_steps()
    if verdict["verdict"] in {"leak", "growth"}:
        raise MemoryGrows(_counted_from(before, verdict))


def _check(step: object, steps: object, warmup: object) -> None:
    """As far as can be told before anything is called."""
    if not callable(step):
        raise InputError(
            f"assert_flat calls its first argument, and {type(step).__qualname__} cannot be "
            "called: give it a function that makes one step"
        )
    for name, value in (("steps", steps), ("warmup", warmup)):
        if type(value) is not int or value < 0:
            raise InputError(
                f"{name}={value!r} is no whole number from 0 on: it says how many calls"
            )
    if isinstance(steps, int) and steps < _FEWEST:
        raise InputError(f"steps={steps} is too few to tell growth from noise: use {_FEWEST}")


def _call(step: Callable[[], object]) -> None:
    made = step()
    if inspect.iscoroutine(made):
        made.close()  # or Python warns that it was never awaited
        raise InputError(_not_run(made.__qualname__))
    if inspect.isawaitable(made) or inspect.isasyncgen(made) or inspect.isgenerator(made):
        raise InputError(_not_run(type(made).__qualname__))


def _not_run(name: str) -> str:
    return (
        f"{name} only begins when it is called, so no step was made: give assert_flat a function "
        "that makes the whole step, such as lambda: asyncio.run(step())"
    )


def _counted_from(first: int, verdict: verdicts.Document) -> verdicts.Document:
    """The same with steps counted from where `assert_flat` began, and not the process."""
    for told in (*verdict["ranks"], *verdict["suspects"]):
        for name in ("since", "last"):
            if name in told:
                told[name] = max(0, told[name] - first)
    return verdict


def measured(
    test: Callable[..., object], asked: dict[str, int], fail: Callable[[str], object]
) -> Callable[..., None]:
    """A test that calls `test` as :func:`assert_flat` does; for the pytest marker.

    Args:
        test: The test, which is given all its arguments by name.
        asked: Arguments of `assert_flat`.
        fail: Called with a text if memory grows, or if it cannot be told.
    """

    @wraps(test)
    def run(**arguments: Any) -> None:
        said = ""
        try:
            _as_if_in(test, arguments, lambda: assert_flat(partial(test, **arguments), **asked))
        except MemoryGrows as error:
            said = str(error)
        except InputError as error:
            if not _is_ours(error):
                raise
            said = f"flat_memory: {error}"
        if said:  # only here, or pytest would show the other error as well
            fail(said)

    return run


def _as_if_in(
    test: Callable[..., object], arguments: dict[str, Any], measure: Callable[[], None]
) -> None:
    """Calls `measure` from a frame that looks like the test's own, which ends with every step.

    So there is somebody who holds the arguments between two steps, and has their names: a fixture
    is told as the test's variable, and not as something inside pytest.
    """
    values = dict(arguments)
    function = inspect.unwrap(getattr(test, "__func__", test))
    code = getattr(function, "__code__", None)
    if inspect.ismethod(test):
        own = code.co_varnames[0] if code is not None and code.co_argcount else "self"
        values = {own: test.__self__, **values}
    text = f"def call({', '.join(values)}): __measure__()"
    namespace: dict[str, Any] = {"__measure__": measure}
    exec(compile(text, code.co_filename if code is not None else "<test>", "exec"), namespace)
    call = namespace["call"]
    name = getattr(function, "__qualname__", "the test")
    call.__code__ = call.__code__.replace(co_name=name, co_qualname=name)
    call(**values)


def _is_ours(error: BaseException) -> bool:
    """Whether it was raised here, and not by what a test did."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals is globals()
