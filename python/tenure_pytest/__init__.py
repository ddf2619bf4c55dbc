"""The pytest marker ``flat_memory``: a test that is run again and again must keep memory flat.

Not in the package `tenure`, for pytest loads plugins in every run and that one loads torch.

```python
@pytest.mark.flat_memory(steps=40)
def test_train_step(model, batch):
    train_step(model, batch)
```
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

__all__: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """Makes the marker known."""
    config.addinivalue_line(
        "markers",
        "flat_memory(steps=40, warmup=3): call the test so often; it fails if memory grows",
    )


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Calls a marked test many times, under watch."""
    marker = pyfuncitem.get_closest_marker("flat_memory")
    if marker is None:
        return (yield)
    import tenure

    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    test = pyfuncitem.obj
    try:
        tenure.assert_flat(lambda: test(**arguments), **marker.kwargs)
    except tenure.MemoryGrows as error:
        pytest.fail(str(error), pytrace=False)
    except TypeError as error:
        if "assert_flat" in str(error):
            pytest.fail(f"flat_memory: {error}", pytrace=False)
        raise
    return (yield)
