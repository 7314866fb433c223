"""The files of notebooks/measured: how a record is written and read, and the tables that are made of one.

Every record is written with one row a line, so that a diff shows which rows have changed.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

MEASURED = Path(__file__).resolve().parents[2] / "notebooks" / "measured"
NO_RECORD = "no GPU run is recorded yet"
WIDTH = 120  # what fits a line is written on one

Table = TypeVar("Table", bound=Callable[..., Any])


def as_json(value: Any, depth: int = 0, *, row: bool = False) -> str:
    """A record as JSON: what is longer than a line has an item a line. An item of a list, a row, is always one line."""
    line = json.dumps(value)
    if row or not isinstance(value, dict | list) or depth + len(line) <= WIDTH:
        return line
    if isinstance(value, dict):
        ends, items = "{}", (f"{json.dumps(str(key))}: {as_json(each, depth + 1)}" for key, each in value.items())
    else:
        ends, items = "[]", (as_json(each, depth + 1, row=True) for each in value)
    return f"{ends[0]}\n" + ",\n".join(" " * (depth + 1) + item for item in items) + f"\n{' ' * depth}{ends[1]}"


def save(path: Path, record: Any) -> None:
    """Write a record. The file is whole at any time: it is replaced when the new one is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(as_json(record) + "\n", encoding="utf-8")
    unfinished.replace(path)


def load(path: Path) -> Any | None:
    """A record, or None where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def table_of(read: Callable[[], Any], missing: Callable[[], Any] = lambda: NO_RECORD) -> Callable[[Table], Table]:
    """A decorator for functions with an argument `record`: where none is given, it is what read() returns.

    Where that is None, there is no record, and the function is not called: the result is missing().
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
