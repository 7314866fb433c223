"""Write and read the records in notebooks/measured.

Every record is written with one row a line, so that a diff shows the changed rows.
"""

from __future__ import annotations

import errno
import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

MEASURED = Path(__file__).resolve().parents[2] / "notebooks" / "measured"
NO_RECORD = "no GPU run is recorded yet"
WIDTH = 120  # columns: a value that fits is written on one line

Table = TypeVar("Table", bound=Callable[..., Any])


class Refused(SystemExit):
    """A measurement cannot begin. The message says in a line what is missing."""


def as_json(value: Any, depth: int = 0, *, row: bool = False) -> str:
    """Format a record as JSON. A value wider than a line gets a line per item; a list's item, a row, is one line."""
    line = json.dumps(value)
    if row or not isinstance(value, dict | list) or depth + len(line) <= WIDTH:
        return line
    if isinstance(value, dict):
        ends, items = "{}", (f"{json.dumps(str(key))}: {as_json(each, depth + 1)}" for key, each in value.items())
    else:
        ends, items = "[]", (as_json(each, depth + 1, row=True) for each in value)
    return f"{ends[0]}\n" + ",\n".join(" " * (depth + 1) + item for item in items) + f"\n{' ' * depth}{ends[1]}"


def save(path: Path, record: Any) -> None:
    """Save a record. The file is replaced atomically, so it is never half written."""
    unfinished = opened(path)
    unfinished.write_text(as_json(record) + "\n", encoding="utf-8")
    unfinished.replace(path)


def opened(path: Path) -> Path:
    """Make the file that becomes the record at `path`. OSError where no record can be written: asked before a run."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.touch()
    return unfinished


def check_single_file(study: str, words: Sequence[str]) -> None:
    """Raise Refused if words for parts follow the FILE of a study that has a single part."""
    if words:
        raise Refused(f"{study} takes a single FILE; got also {' '.join(words)}")


def check_file(path: Path) -> None:
    """Raise Refused unless a record can be written to `path`, where there is no file or a record."""
    try:
        opened(path).unlink()
        record = load(path)
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}") from None
    except ValueError as error:
        raise Refused(f"{path} is not a record, and would be replaced: {error}") from None
    if record is not None and not isinstance(record, dict):
        raise Refused(f"{path} is not a record, and would be replaced: it holds no JSON object")


def load(path: Path) -> Any | None:
    """Read a record; None if the file does not exist."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def first(rows: Iterable[Mapping[str, Any]], **wanted: Any) -> Any | None:
    """Return the first row with all of these values; None if there is none."""
    return next((row for row in rows if all(key in row and row[key] == value for key, value in wanted.items())), None)


def reader(*names: str) -> Callable[[], Any | None]:
    """Make a function that reads the first of these committed records; it returns None if none exists."""

    def recorded() -> Any | None:
        return next(filter(None, (load(MEASURED / name) for name in names)), None)

    return recorded


def shown(function: Table) -> Table:
    """Make a function read the committed record, by its module's `recorded`, if it gets no argument `record`.

    Without a committed record the function is not called: the result is NO_RECORD.
    """
    return table_of(lambda: function.__globals__["recorded"]())(function)


def table_of(read: Callable[[], Any], missing: Callable[[], Any] = lambda: NO_RECORD) -> Callable[[Table], Table]:
    """Make a decorator for functions with an argument `record`, whose default is read().

    If that is None, the function is not called: the result is missing().
    """

    def decorate(function: Table) -> Table:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def with_record(*args: Any, **options: Any) -> Any:
            bound = signature.bind(*args, **options)
            if bound.arguments.get("record") is None:
                bound.arguments["record"] = read()
            return missing() if bound.arguments["record"] is None else function(*bound.args, **bound.kwargs)

        return cast(Table, with_record)

    return decorate
