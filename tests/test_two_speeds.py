"""The fast run leaves out repetition: what the marks select, and that nothing of the course is missing."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import two_speeds

from helpers.attention.ladder import LADDER

ROOT = Path(__file__).resolve().parent.parent


def product(**values: str) -> dict[tuple[str, ...], dict[str, str]]:
    """The product of the letters of each parameter, as cases."""
    cases: list[dict[str, str]] = [{}]
    for name, letters in values.items():
        cases = [{**case, name: letter} for case in cases for letter in letters]
    return {tuple(case.values()): case for case in cases}


def test_the_first_case_of_each_kind() -> None:
    cases = product(name="ab", bug="xyz")
    chosen = two_speeds.first_of_each(cases, lambda name, bug: (name, bug == "z"))
    assert chosen == {("a", "x"), ("a", "z"), ("b", "x"), ("b", "z")}
    assert two_speeds.first_of_each(cases, lambda bug: bug) == {("a", "x"), ("a", "y"), ("a", "z")}


def test_few_cases_with_every_value() -> None:
    cases = product(name="ab", dtype="hb", mask="123")
    chosen = two_speeds.with_every_value(cases)
    assert len(chosen) == 3 and [set(letters) for letters in zip(*chosen)] == [set("ab"), set("hb"), set("123")]  # noqa: B905
    within = two_speeds.with_every_value(cases, ["name"])
    for name in "ab":
        own = [case for case in within if case[0] == name]
        assert len(own) == 3 and {mask for _, _, mask in own} == set("123") and {d for _, d, _ in own} == set("hb")


def test_values_without_a_text_of_their_own_are_told_apart() -> None:
    first, second = object(), object()
    cases = {"a": {"x": first}, "b": {"x": second}, "c": {"x": first}}
    assert two_speeds.with_every_value(cases) == {"a", "b"}


def has_what_it_needs(path: Path) -> bool:
    """Whether the optional packages are here without which a file of tests is skipped as a whole."""
    needs = re.findall(r'^\w+ = pytest\.importorskip\("(\w+)"', path.read_text(encoding="utf-8"), re.M)
    return all(importlib.util.find_spec(name) is not None for name in needs)


def test_every_part_of_the_course_is_in_the_fast_run(request: pytest.FixtureRequest) -> None:
    """Each stage and step is launched, each notebook executed, and each file of tests has at least one test."""
    if not request.config.getoption("--fast"):
        pytest.skip("the full run leaves nothing out")
    ids = [item.nodeid for item in request.session.items]
    files = {node.partition("::")[0] for node in ids}
    assert {f"tests/{path.name}" for path in ROOT.glob("tests/test_*.py") if has_what_it_needs(path)} <= files
    assert {f"notebooks/{path.name}" for path in ROOT.glob("notebooks/*.ipynb")} <= files
    launched = " ".join(node for node in ids if "::test_output" in node or "::test_gradients" in node)
    for step in (ROOT / "kernels" / "steps").glob("*.cu"):
        assert step.name in launched, f"no test of the fast run launches {step.name}"
    names = " ".join(ids)
    for stage in LADDER.values():
        assert stage.name in names, f"no test of the fast run is of {stage.name}"
