"""Leave tests marked `exhaustive` out of the fast run, and most of a product of parameters out of both.

`course.py test` runs pytest with --fast, which leaves it out; `course.py test --all` and plain pytest run all tests,
and so does every run for named files. A test is exhaustive if another one in the fast run would most likely fail as
well, or if it takes long and a change seldom breaks it.

    @pytest.mark.exhaustive                                  # all of it is left out
    @pytest.mark.exhaustive(one_of_each=lambda name, bug: (name, bug.inputs))
                                                             # of a table: the first case of each kind stays
    @pytest.mark.exhaustive(each_value=("name",))            # of a product of parameters: for each name, cases stay in
                                                             # which every value of every other parameter occurs; in the
                                                             # run of all tests, every pair of two others' values

A case of a product without a new pair runs only by name, as `tests/test_x.py::test_y[...]`.

A single row of a table takes the mark as well: `pytest.param(..., marks=pytest.mark.exhaustive)`.

Except for CuTe, whose kernels take longest to compile, the fast run leaves out no stage, and the full run no step: if
no test has launched a kernel of some file, the run fails.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from helpers.attention import kernel
from helpers.engine import nvrtc

MARK = (
    "exhaustive(one_of_each=None, each_value=None): not in the fast run, but for the first case of each kind (a "
    "function of the test's parameters), or for cases in which every value of every parameter occurs, for each value "
    "of those named; of these, all tests are those in which every pair of values occurs"
)
# One trains a model for half a minute, one compiles CuTe.
NOTEBOOKS = ("09_drop_in.ipynb", "12_cute.ipynb")

Case = TypeVar("Case")
Parameters = Mapping[str, Any]


def first_of_each(cases: Mapping[Case, Parameters], kind: Callable[..., Hashable]) -> set[Case]:
    """Return the first case of each kind. kind: takes some of the parameters by name."""
    names = inspect.signature(kind).parameters
    chosen: dict[Hashable, Case] = {}
    for case, params in cases.items():
        chosen.setdefault(kind(**{name: params[name] for name in names}), case)
    return set(chosen.values())


def covering(cases: Mapping[Case, Parameters], within: Sequence[str] = (), together: int = 1) -> set[Case]:
    """Choose few cases that have the values of all parameters, for each combination of the values of those in `within`.

    Takes the case with the most new values until none is left; among several, the first.
    together: 1 for every value of every other parameter, 2 for every pair of two others' values that some case has.
    """

    def values(params: Parameters) -> frozenset[Hashable]:
        group = tuple(_key(params[name]) for name in within)
        others = [(name, _key(value)) for name, value in params.items() if name not in within]
        sets = itertools.combinations(others, min(together, len(others)))
        return frozenset((group, *each) for each in sets)

    of_case = {case: values(params) for case, params in cases.items()}
    missing = set().union(*of_case.values())
    chosen: set[Case] = set()
    while missing:
        best = max(of_case, key=lambda case: len(of_case[case] & missing))
        chosen.add(best)
        missing -= of_case.pop(best)
    return chosen


def _key(value: Any) -> Hashable:
    """Return a key that distinguishes a parameter's values."""
    return repr(value) if isinstance(value, str | bytes | int | float | tuple | list | dict | type(None)) else id(value)


def repetitions(items: Sequence[pytest.Item]) -> tuple[set[pytest.Item], set[pytest.Item]]:
    """Return the collected tests that the fast run leaves out, and those of products that no run needs."""
    left_out = {item for item in items if item.path.name in NOTEBOOKS}
    no_run_needs: set[pytest.Item] = set()
    tables: dict[tuple[str, str], dict[pytest.Item, Parameters]] = {}
    for item in items:
        marks = list(item.iter_markers("exhaustive"))
        if any(not mark.kwargs for mark in marks):
            left_out.add(item)
        elif marks:
            table = tables.setdefault((str(item.path), item.originalname), {})  # type: ignore[attr-defined]
            table[item] = item.callspec.params  # type: ignore[attr-defined]
    for table in tables.values():
        for mark in next(iter(table)).iter_markers("exhaustive"):
            if "one_of_each" in mark.kwargs:
                left_out |= table.keys() - first_of_each(table, mark.kwargs["one_of_each"])
                continue
            values, pairs = (covering(table, mark.kwargs["each_value"], together) for together in (1, 2))
            left_out |= table.keys() - values
            no_run_needs |= table.keys() - values - pairs
    return left_out, no_run_needs


def chosen(config: pytest.Config) -> bool:
    """Return whether pytest's options, besides --fast, select among the collected tests."""
    return any(getattr(config.option, name, None) for name in ("keyword", "markexpr", "deselect", "lf", "collectonly"))


# ---- what is launched


@functools.cache
def files_of(code: str) -> frozenset[str]:
    """Return the kernel files in a source, from the `#line` directives with which they were pasted in."""
    return frozenset(re.findall(r'^#line \d+ "([^"]+\.cu)"$', code, re.M))


def recorded(
    bind: Callable[..., Callable[[], None]], launched: set[str], fast: Callable[[], bool] = lambda: True
) -> Callable[..., Callable[[], None]]:
    """Wrap `Kernel.bind` so that launches add the kernel's files to a set: those of stages in tests of the fast run."""

    @functools.wraps(bind)
    def bind_and_record(self: kernel.Kernel, *args: Any, **options: Any) -> Callable[[], None]:
        launch = bind(self, *args, **options)
        if isinstance(launch, functools.partial):  # from `kernel.launches_replaced`: nothing is launched
            return launch

        def launch_and_record() -> None:
            launch()
            launched.update(file for file in files_of(self.code) if fast() or file.startswith("steps/"))

        return launch_and_record

    return bind_and_record


def never_launched(launched: Collection[str], folder: Path = kernel.KERNELS, steps: bool = True) -> list[str]:
    """Return the course's kernel files, except CuTe's, of which no kernel was launched. steps: include steps."""
    files = [*folder.glob("*.cu"), *(folder.glob("steps/*.cu") if steps else ())]
    files = [path for path in files if not nvrtc.uses_cute(path.read_text(encoding="utf-8"))]
    return sorted({path.relative_to(folder).as_posix() for path in files} - set(launched))
