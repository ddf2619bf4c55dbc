"""`tenure report`: recordings as one page that needs nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tenure.errors import InputError
from tenure.inspect import recordings
from tenure.inspect.files import whole
from tenure.report.data import as_block, collected

__all__ = ["report"]

_PARTS = Path(__file__).parent / "page"
_TEXTS = ("common.js", "suspects.js", "storages.js", "ranks.js")
_PLOTS = ("memory.js", "peak.js")  # after Plotly, which takes a while: all else is there by then


def report(
    paths: recordings.Meant,
    out: str | Path,
    progress: recordings.Progress | None = None,
    name: str = "",
) -> Path:
    """Writes the page.

    Args:
        paths: Folders that `tenure run` made, or files.
        out: The file to write.
        progress: Called now and then with how many recordings are judged, of how many.
        name: What the page is called; default: the folder.

    Returns:
        That file.
    """
    found = recordings.find(paths)
    text = rendered(collected(found, progress, name))
    try:
        with whole(Path(out), inputs=found.inputs) as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}: give --out another file") from None
    return Path(out)


def rendered(data: dict[str, Any]) -> str:
    """The page of what :func:`tenure.report.data.collected` found."""
    import jinja2

    loader = jinja2.FileSystemLoader(_PARTS)
    pages = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return pages.get_template("report.html").render(
        data=data,
        block=as_block(data),
        style=(_PARTS / "report.css").read_text(),
        plotly=_plotly(),
        texts=[(_PARTS / name).read_text() for name in _TEXTS],
        plots=[(_PARTS / name).read_text() for name in _PLOTS],
    )


def _plotly() -> str:
    """Plotly's own bundle, as its package has it."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise InputError("a report needs plotly: pip install 'plotly>=6'") from None
    return str(get_plotlyjs()).replace("</script", "<\\/script")
