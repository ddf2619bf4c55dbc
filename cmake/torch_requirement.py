"""Dynamic metadata: what the wheel requires, with torch at the minor version built against."""

import importlib.metadata
from typing import Any


def dynamic_metadata(settings: dict[str, Any], _project: dict[str, Any]) -> dict[str, Any]:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            "Tenure is built against the torch it will run with, and there is none here: "
            "pip install torch, then pip install --no-build-isolation with the same arguments."
        ) from None
    major, minor, *_ = version.split(".")
    return {"dependencies": [*settings["requires"], f"torch=={major}.{minor}.*"]}


def dynamic_wheel(_settings: dict[str, Any]) -> dict[str, bool]:
    """An sdist does not know which torch its wheel will be built against."""
    return {"dependencies": True}
