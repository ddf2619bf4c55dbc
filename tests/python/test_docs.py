"""What the documentation shows runs as it is shown.

In README.md and docs/, each ```python block of a file runs, in order, as one program in a process
of its own; blocks of `>>>` examples run as doctests; a block marked ```python no-run is left out.
In the package, every example of a docstring runs.
"""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
from pathlib import Path

import pytest

import tenure
from forks import run_forked
from tenure.store import joining

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(page for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")] if page.exists())
FENCE = re.compile(r"^(```+)(.*)$")
MODULES = sorted(
    f"tenure.{module.name}"
    for module in pkgutil.iter_modules(tenure.__path__)
    if module.name not in {"__main__", "_C"}
) + sorted(f"tenure.store.{module.name}" for module in pkgutil.iter_modules(tenure.store.__path__))


def blocks(text: str) -> list[tuple[int, str]]:
    """The python blocks that are to run, each with the number of its first line."""
    found: list[tuple[int, str]] = []
    fence = info = ""
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        match = FENCE.match(line)
        if not fence and match:
            fence, info, lines = match[1], match[2].strip(), []
        elif fence and match and match[1] == fence and not match[2].strip():
            words = info.split()
            if words and words[0] == "python" and "no-run" not in words[1:]:
                found.append((number - len(lines), "\n".join(lines)))
            fence = ""
        else:
            lines.append(line)
    return found


def program(text: str) -> str:
    """The blocks as one program, each line where it is in the page: tracebacks point there."""
    out: list[str] = []
    for number, block in blocks(text):
        if not block.lstrip().startswith(">>>"):
            out += [""] * (number - 1 - len(out)) + block.splitlines()
    return "\n".join(out)


def examples(text: str) -> str:
    return "\n\n".join(block for _, block in blocks(text) if block.lstrip().startswith(">>>"))


def run(script: Path, cwd: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = run_forked([script], cwd=cwd, env=environment, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_a_page_runs(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    if source := program(text):
        script = tmp_path / page.name
        script.write_text(source)
        run(script, tmp_path)
    if source := examples(text):
        assert_examples_pass(source, page.name)


def assert_examples_pass(text: str, name: str) -> None:
    report: list[str] = []
    test = doctest.DocTestParser().get_doctest(text, {}, name, name, 0)
    result = doctest.DocTestRunner().run(test, out=report.append)
    assert result.failed == 0, "".join(report)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_left", None)  # by the docstrings of another module
    module = importlib.import_module(name)
    report: list[str] = []
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(module, name):
        runner.run(test, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def test_the_packages_own_docstring_runs() -> None:
    assert doctest.testmod(tenure).failed == 0


# --- the reading of pages ----------------------------------------------------------------------

PAGE = """\
# Title

```python
x = 1
```

```sh
make run
```

```python no-run
x = nonsense(
```

````python
y = x + 1
````

```python
>>> 1 + 1
2
```
"""


def test_python_blocks_become_one_program() -> None:
    assert program(PAGE).split() == ["x", "=", "1", "y", "=", "x", "+", "1"]


def test_lines_stay_where_they_are() -> None:
    lines = program(PAGE).splitlines()
    assert (lines[3], lines[15]) == ("x = 1", "y = x + 1")


def test_examples_are_found() -> None:
    assert examples(PAGE) == ">>> 1 + 1\n2"


def test_a_block_that_fails_fails_the_test(tmp_path: Path) -> None:
    script = tmp_path / "page.md"
    script.write_text(program(PAGE.replace("x + 1", "x + nothing")))
    with pytest.raises(AssertionError, match=r"page.md\", line 16.*\n.*\n?.*nothing"):
        run(script, tmp_path)


def test_an_example_that_fails_fails_the_test() -> None:
    with pytest.raises(AssertionError, match=r"Expected:\s+3\s+Got:\s+2"):
        assert_examples_pass(">>> 1 + 1\n3", "page.md")
