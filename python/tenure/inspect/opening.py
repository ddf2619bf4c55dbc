"""Opening the file of a recording, and telling one that is damaged from one that is not."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tenure.errors import InputError
from tenure.inspect.words import many

__all__ = ["SCHEMA", "damaged", "opened", "what_is_wrong"]

SCHEMA = 1

# What is wrong in a column: SQLite takes anything there, and sorts numbers below texts.
_NO_NUMBER = "({} < '') IS NOT 1"
_NO_TEXT = "({} >= '') IS NOT 1"
_NO_NUMBER_NOR_NULL = "{} >= ''"
_NO_TEXT_NOR_NULL = "{} < ''"
# By table, the columns that are read; recordings of an older Tenure do not have all.
_WRONG = {
    "steps": {
        **dict.fromkeys(("seconds", "held", "peak"), _NO_NUMBER),
        **dict.fromkeys(("rss", "device_used", "device_allocated"), _NO_NUMBER_NOR_NULL),
    },
    "origins": {
        **dict.fromkeys(("op", "module", "phase", "site", "forward_site"), _NO_TEXT_NOR_NULL),
        "device": _NO_NUMBER_NOR_NULL,
    },
    "storages": {
        **dict.fromkeys(("bytes", "born_step", "born_ns"), _NO_NUMBER),
        **dict.fromkeys(("died_step", "died_ns"), _NO_NUMBER_NOR_NULL),
    },
    "kinds": {"kind": _NO_TEXT, "name": _NO_TEXT},
    "cuts": dict.fromkeys(("step", "origin", "bytes", "count", "birth_steps"), _NO_NUMBER),
    "holdings": {"origin": _NO_NUMBER, "path": _NO_TEXT},
}


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A recording, for reading. Raises InputError for what is none, is damaged or is newer."""
    try:
        with path.open("rb") as file:
            head = file.read(100)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    if not head.startswith(b"SQLite format 3\x00"):
        raise InputError(f"{path} is no recording: `tenure run` makes them")
    try:
        _check_length(path, head)
        with closing(_connect(path)) as connection:
            _check_schema(path, connection)
            yield connection
    except InputError:
        raise
    except (sqlite3.Error, LookupError, TypeError, ValueError) as error:
        # What is in it may be no JSON, no number, or not there.
        raise damaged(path, error) from None


def _check_length(path: Path, head: bytes) -> None:
    """SQLite reads zeros where the end of the last page is missing."""
    if len(head) < 100 or head[24:28] != head[92:96] or _log_of(path).exists():
        return  # how many pages there are is not in the head
    page = int.from_bytes(head[16:18], "big")
    wanted = (65536 if page == 1 else page) * int.from_bytes(head[28:32], "big")
    there = path.stat().st_size
    if there < wanted:
        raise ValueError(f"{there:,} of its {wanted:,} bytes are there")


def _log_of(path: Path) -> Path:
    file = path.resolve()
    return file.with_name(f"{file.name}-wal")


def _connect(path: Path) -> sqlite3.Connection:
    """Read-only; the log beside a recording that was cut off is read too, where that can be.

    Without a log nobody writes it, and with `immutable` SQLite leaves no files of its own there.
    """
    file = path.resolve()
    if _log_of(file).exists():
        try:
            connection = sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)
            connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            pass  # in a folder that cannot be written to, SQLite cannot make the log's index
        else:
            return connection
    return sqlite3.connect(f"{file.as_uri()}?immutable=1", uri=True)


def _check_schema(path: Path, connection: sqlite3.Connection) -> None:
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    if not {"meta", "steps", "origins", "holdings"} <= tables:
        raise InputError(
            f"{path} is no recording, or was copied without the file {path.name}-wal beside it"
        )
    row = connection.execute("SELECT value FROM meta WHERE key='schema'").fetchone()
    told = str(row[0]) if row else ""
    schema = int(told) if told.isascii() and told.isdigit() else 0
    if schema < 1:
        raise InputError(f"{path} is damaged or no recording: '{told}' is no schema")
    if schema > SCHEMA:
        raise InputError(
            f"{path} was recorded by a newer Tenure (schema {schema}, this one reads {SCHEMA}): "
            "update with pip install --upgrade tenure"
        )


def what_is_wrong(path: Path) -> str:
    """What cannot be read in a recording that can be opened; nothing if it is sound."""
    try:
        with opened(path) as connection:
            for table in _WRONG:
                _check_table(connection, table)
    except InputError as error:
        return str(error)
    return ""


def _check_table(connection: sqlite3.Connection, table: str) -> None:
    """Reads every row, for SQLite says that a page is lost when it comes to it."""
    there = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    wrong = [_WRONG[table][column].format(column) for column in there if column in _WRONG[table]]
    if wrong:
        sql = f"SELECT count(*) FROM {table} WHERE {' OR '.join(wrong)}"
        (count,) = connection.execute(sql).fetchone()
        if count:
            raise ValueError(f"{many(count, 'row')} of its {table} cannot be read")


def damaged(path: Path, why: object) -> InputError:
    """The error that says so."""
    return InputError(f"{path} is damaged or no recording: {why}")
