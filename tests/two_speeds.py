"""What the fast run of the tests leaves out: repetition, and nothing else.

`course.py test` runs pytest with --fast, which leaves repetition out; `course.py test --all` then runs it with --rest,
which runs what was left out. Pytest by hand, and of files that are named, runs all. Three marks say what is repetition.

    @pytest.mark.repetition                                  # another test of the fast run would fail as well
    @pytest.mark.one_of_each(kind=lambda name, bug: (name, bug.inputs))
                                                             # of a table: the first case of each kind
    @pytest.mark.each_value(within=("name",))                # of a product of parameters: for each name, cases in which
                                                             # every value of every other parameter occurs

A single row of a table takes a mark as well: `pytest.param(..., marks=pytest.mark.repetition)`.

The fast run leaves out no part of the course: where it has launched no kernel of some file, it has failed.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from helpers.attention import kernel

MARKS = (
    "repetition: not in the fast run; another of its tests would fail as well",
    "one_of_each(kind): the fast run has the first case of each kind, a function of the test's parameters",
    "each_value(within=()): the fast run has cases in which every value of every parameter occurs, for each value of "
    "those named",
)

Case = TypeVar("Case")
Parameters = Mapping[str, Any]


def first_of_each(cases: Mapping[Case, Parameters], kind: Callable[..., Hashable]) -> set[Case]:
    """The first case of each kind. kind: takes some of the parameters by their names."""
    names = inspect.signature(kind).parameters
    chosen: dict[Hashable, Case] = {}
    for case, params in cases.items():
        chosen.setdefault(kind(**{name: params[name] for name in names}), case)
    return set(chosen.values())


def with_every_value(cases: Mapping[Case, Parameters], within: Sequence[str] = ()) -> set[Case]:
    """Few cases in which all values of all parameters occur, beside each combination of values of those in `within`.

    Takes the case with the most values that have not occurred until none is left; the first of several.
    """

    def values(params: Parameters) -> frozenset[Hashable]:
        group = tuple(_key(params[name]) for name in within)
        others = [(group, name, _key(value)) for name, value in params.items() if name not in within]
        return frozenset([(group,), *others])

    of_case = {case: values(params) for case, params in cases.items()}
    missing = set().union(*of_case.values())
    chosen: set[Case] = set()
    while missing:
        best = max(of_case, key=lambda case: len(of_case[case] & missing))
        chosen.add(best)
        missing -= of_case.pop(best)
    return chosen


def _key(value: Any) -> Hashable:
    """What tells a value of a parameter from another."""
    return repr(value) if isinstance(value, str | bytes | int | float | tuple | list | dict | type(None)) else id(value)


def repetitions(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The collected tests that the fast run leaves out."""
    left_out = {item for item in items if item.get_closest_marker("repetition")}
    tables: dict[tuple[str, str], dict[pytest.Item, Parameters]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and item not in left_out:
            table = tables.setdefault((str(item.path), item.originalname), {})  # type: ignore[attr-defined]
            table[item] = callspec.params
    for table in tables.values():
        item = next(iter(table))
        if mark := item.get_closest_marker("one_of_each"):
            left_out |= table.keys() - first_of_each(table, mark.kwargs["kind"])
        if mark := item.get_closest_marker("each_value"):
            left_out |= table.keys() - with_every_value(table, mark.kwargs.get("within", ()))
    return left_out


def chosen(config: pytest.Config) -> bool:
    """Whether options of pytest's, beside --fast and --rest, choose among the tests that are collected."""
    return any(getattr(config.option, name, None) for name in ("keyword", "markexpr", "deselect", "lf", "collectonly"))


# ---- what is launched


@functools.cache
def files_of(code: str) -> frozenset[str]:
    """The kernel files that a source is made of, by the `#line` directives with which they were pasted in."""
    return frozenset(re.findall(r'^#line \d+ "([^"]+\.cu)"$', code, re.M))


def recorded(bind: Callable[..., Callable[[], None]], launched: set[str]) -> Callable[..., Callable[[], None]]:
    """`Kernel.bind`, whose launches put the kernel's files into a set."""

    @functools.wraps(bind)
    def bind_and_record(self: kernel.Kernel, *args: Any, **options: Any) -> Callable[[], None]:
        launch = bind(self, *args, **options)

        def launch_and_record() -> None:
            launch()
            launched.update(files_of(self.code))

        return launch_and_record

    return bind_and_record


def never_launched(launched: Collection[str], folder: Path = kernel.KERNELS) -> list[str]:
    """The kernel files of the course, steps included, of which no kernel was launched."""
    files = [*folder.glob("*.cu"), *folder.glob("steps/*.cu")]
    return sorted({path.relative_to(folder).as_posix() for path in files} - set(launched))
