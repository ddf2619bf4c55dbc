"""Stands in for the package of this name: what TRL's trainers ask of a small dataset in memory.

That package and what it brings, pandas and pyarrow, are 250 MB, of which a test of a trainer needs
the few lines below. `make test-integrations` runs the same tests with the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

__version__ = "5.2.0"  # transformers asks for it

Row = dict[str, Any]


class Dataset:
    """Rows; its methods do what the real ones do with the arguments that TRL gives."""

    cache_files = ()

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    @classmethod
    def from_dict(cls, columns: dict[str, list[Any]]) -> Dataset:
        rows = zip(*columns.values(), strict=True)
        return cls([dict(zip(columns, row, strict=True)) for row in rows])

    @property
    def format(self) -> dict[str, Any]:
        return {"type": None, "format_kwargs": {}}

    @property
    def column_names(self) -> list[str]:
        return list(self.rows[0])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> Row:
        return self.rows[at]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def map(
        self,
        function: Callable[..., Row],
        *,
        fn_kwargs: dict[str, Any] | None = None,
        remove_columns: str | list[str] | None = None,
        **_: object,
    ) -> Dataset:
        removed = [remove_columns] if isinstance(remove_columns, str) else remove_columns or []
        mapped = []
        for row in self.rows:
            kept = {name: value for name, value in row.items() if name not in removed}
            mapped.append(kept | function(dict(row), **(fn_kwargs or {})))
        return Dataset(mapped)

    def filter(self, keep: Callable[[Row], bool], **_: object) -> Dataset:
        return Dataset([row for row in self.rows if keep(row)])

    def remove_columns(self, names: str | list[str]) -> Dataset:
        return self.map(lambda _row: {}, remove_columns=names)


class DatasetDict(dict[str, Dataset]): ...


class IterableDataset: ...


class IterableDatasetDict(dict[str, IterableDataset]): ...


def concatenate_datasets(parts: list[Dataset]) -> Dataset:
    return Dataset([row for part in parts for row in part])
