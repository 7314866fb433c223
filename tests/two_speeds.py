"""What the fast run of the tests leaves out: repetition, and nothing else.

`course.py test` runs pytest with --fast, `course.py test --all` and pytest by hand without it. Three marks say what the
fast run needs not repeat; a test without a mark is in both.

    @pytest.mark.repetition                                  # another test of the fast run would fail as well
    @pytest.mark.one_of_each(kind=lambda name, bug: (name, bug.inputs))
                                                             # of a table: the first case of each kind
    @pytest.mark.each_value(within=("name",))                # of a product of parameters: for each name, cases in which
                                                             # every value of every other parameter occurs

A single row of a table takes a mark as well: `pytest.param(..., marks=pytest.mark.repetition)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

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
