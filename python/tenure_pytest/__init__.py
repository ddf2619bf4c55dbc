"""The pytest marker ``flat_memory``: a test that is run again and again must keep memory flat.

Not in the package `tenure`, for pytest loads plugins in every run and that one loads torch.

```python
@pytest.mark.flat_memory(steps=40)
def test_train_step(model, batch):
    train_step(model, batch)
```
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import NoReturn

import pytest

__all__: list[str] = []

_OPTIONS = ("steps", "warmup")


def pytest_configure(config: pytest.Config) -> None:
    """Makes the marker known."""
    config.addinivalue_line(
        "markers",
        "flat_memory(steps=40, warmup=3): call the test so often; it fails if memory grows",
    )


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Has a marked test called many times, under watch.

    The test is replaced and not its call: methods of unittest are not called by pytest.
    """
    marker = item.get_closest_marker("flat_memory")
    if marker is None:
        return (yield)
    if not isinstance(item, pytest.Function):
        _refuse(f"{item.name} is no test function: mark a function that makes one step")
    test = item.obj
    if inspect.iscoroutinefunction(test) or inspect.isasyncgenfunction(test):
        _refuse(
            f"{item.name} is async, and would be called without being awaited: mark a plain "
            "function that runs its own loop, with asyncio.run(step())"
        )
    asked = _options(marker)
    from tenure.inspect.flat import measured

    item.obj = measured(test, asked, _fail)
    try:
        return (yield)
    finally:
        item.obj = test


def _options(marker: pytest.Mark) -> dict[str, int]:
    """What the marker asks for; the number of steps may come without its name."""
    if len(marker.args) > 1:
        _refuse(f"one argument without a name is steps, and {len(marker.args)} were given")
    asked = dict(marker.kwargs)
    if marker.args:
        if "steps" in asked:
            _refuse("steps is given twice")
        asked["steps"] = marker.args[0]
    for name, value in asked.items():
        if name not in _OPTIONS:
            _refuse(f"there is no argument {name}: use {' and '.join(_OPTIONS)}")
        if type(value) is not int:
            _refuse(f"{name}={value!r} is no whole number")
    return asked


def _refuse(why: str) -> NoReturn:
    _fail(f"flat_memory: {why}")


def _fail(said: str) -> NoReturn:
    pytest.fail(said, pytrace=False)
