"""The fast run leaves out repetition: what the marks select, and that no part of the course is missing."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import skips
import two_speeds
import unchanged

from helpers.attention import kernel
from helpers.attention.decoders import DECODERS
from helpers.device import cp

ROOT = Path(__file__).resolve().parent.parent


def product(**values: str) -> dict[tuple[str, ...], dict[str, str]]:
    """Return the product of the letters of each parameter, as cases."""
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
    chosen = two_speeds.covering(cases)
    assert len(chosen) == 3 and [set(letters) for letters in zip(*chosen)] == [set("ab"), set("hb"), set("123")]  # noqa: B905
    within = two_speeds.covering(cases, ["name"])
    for name in "ab":
        own = [case for case in within if case[0] == name]
        assert len(own) == 3 and {mask for _, _, mask in own} == set("123") and {d for _, d, _ in own} == set("hb")


def test_few_cases_with_every_pair_of_values() -> None:
    """Fewer than 12 of 36 cases contain all pairs; pairs that no case of a table has are not looked for."""
    cases = product(name="ab", mask="123", size="xyz", dtype="hb")
    chosen = two_speeds.covering(cases, together=2)
    assert len(chosen) < 12
    for a, b in itertools.combinations(range(4), 2):
        assert {(case[a], case[b]) for case in chosen} == {(case[a], case[b]) for case in cases}
    within = two_speeds.covering(cases, ["name"], together=2)
    assert all({case[1:3] for case in within if case[0] == name} == {case[1:3] for case in cases} for name in "ab")
    diagonal = {case: params for case, params in cases.items() if case[1:3] in {tuple("1x"), tuple("2y")}}
    assert {case[1:3] for case in two_speeds.covering(diagonal, together=2)} == {tuple("1x"), tuple("2y")}


def test_values_without_a_text_of_their_own_are_told_apart() -> None:
    first, second = object(), object()
    cases = {"a": {"x": first}, "b": {"x": second}, "c": {"x": first}}
    assert two_speeds.covering(cases) == {"a", "b"}


def has_what_it_needs(path: Path) -> bool:
    """Check that the optional packages are installed without which a test file is skipped entirely."""
    needs = re.findall(r'^\w+ = pytest\.importorskip\("(\w+)"', path.read_text(encoding="utf-8"), re.M)
    return all(importlib.util.find_spec(name) is not None for name in needs)


def test_every_part_of_the_course_is_in_the_fast_run(request: pytest.FixtureRequest) -> None:
    """Each notebook is executed, and each file of tests has at least one test, among the collected ones."""
    session = request.session
    if two_speeds.chosen(request.config):
        pytest.skip("only some of the tests were chosen")
    left_out = set() if request.config.getoption("--fast") else two_speeds.repetitions(session.items)[0]
    tested = {item.path for item in session.items if item not in left_out}
    folders = [Path(arg).resolve() for arg in request.config.args]
    need_not = unchanged.may_be_left_out if unchanged.asked_for(request.config) else lambda path: False
    tests = {path for path in ROOT.glob("tests/test_*.py") if path.parent in folders and has_what_it_needs(path)}
    tests -= {path for path in tests if need_not(path)}
    tests -= {path for path in tests if re.search(r"^pytestmark = .*exhaustive", path.read_text("utf-8"), re.M)}
    assert tests <= tested
    if request.config.getoption("--nbval", False):
        notebooks = {path for path in ROOT.glob("notebooks/*.ipynb") if path.parent in folders}
        assert {path for path in notebooks if path.name not in two_speeds.NOTEBOOKS and not need_not(path)} <= tested


def test_a_file_that_no_test_launches_is_named(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    for name in ("01_a.cu", "02_b.cu", "common.cuh", "steps/02_01_c.cu"):
        (tmp_path / name).write_text("")
    assert two_speeds.never_launched({"01_a.cu"}, tmp_path) == ["02_b.cu", "steps/02_01_c.cu"]
    assert two_speeds.never_launched({"01_a.cu", "02_b.cu", "steps/02_01_c.cu"}, tmp_path) == []
    assert two_speeds.never_launched({"01_a.cu", "02_b.cu"}, tmp_path, steps=False) == []


def test_a_launch_counts_and_a_plan_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step counts as well: the text that its kernel was compiled from names its file."""
    step, seen, fast = DECODERS["one_block_a_head"], set(), [True]
    assert two_speeds.files_of(kernel.source(step.file)) == {step.file}
    monkeypatch.setattr(kernel.Kernel, "bind", two_speeds.recorded(kernel.Kernel.bind, seen, lambda: fast[0]))
    x = cp.zeros(1, dtype=cp.float32)
    launches = []
    for name in ("one.cu", "steps/two.cu"):
        code = kernel.with_headers('extern "C" __global__ void one(float* x) { *x += 1; }\n', name)
        launches.append(kernel.load(code, "one").bind((1,), (1,), (x,)))
    assert not seen
    for launch in launches:
        launch()
    assert seen == {"one.cu", "steps/two.cu"} and x[0] == 2
    seen.clear()
    fast[0] = False
    for launch in launches:
        launch()
    assert seen == {"steps/two.cu"}


TINY = """
import pytest
def test_that_runs(): pass
@pytest.mark.exhaustive
def test_that_repeats(): pass
def test_that_is_skipped(): pytest.skip("{reason}")
"""


def run_tiny(folder: Path, *words: str, reason: str, **environment: str) -> tuple[int, str]:
    """Return the exit code and output of pytest, with the conftest of these tests, over TINY."""
    (folder / "test_tiny.py").write_text(TINY.format(reason=reason))
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:nbval"]  # (it takes seconds to import)
    argv += ["--rootdir", str(folder), str(folder), *words]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    kept = {name: value for name, value in os.environ.items() if name != "CI" and not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*argv, "-p", "conftest"],
        cwd=ROOT / "tests",
        env={**kept, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_hooks_are_called_for_notebooks_as_well(tmp_path: Path) -> None:
    """They are outside of the conftest's folder. The notebook that trains a model has its kernels compiled with -O3."""
    cell = {"cell_type": "code", "execution_count": 1, "id": "a", "metadata": {}, "outputs": []}
    cell["source"] = "import os\nassert os.environ['COURSE_CPU_OPTIMISATION'] == '3'"
    notebook = tmp_path / "09_drop_in.ipynb"
    notebook.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    tests = "tests/test_two_speeds.py::test_the_first_case_of_each_kind", str(notebook)
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "helpers.cli.quick_pytest", "-n", "0"]
    argv += ["--nbval", "--nbval-current-env", *tests]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("needs a GPU that CuPy and PyTorch both see", "needs a GPU"),
        ("no GPU that torch can use", "needs a GPU"),
        ("this machine has no python3.6", "needs a Python that is too old for the course"),
        # What pip can install, and what was skipped in only one kind of run.
        ("could not import 'torch': No module named 'torch'", None),
        ("PyTorch is optional, and not installed here", None),
        ("transformers 5 is optional, and not installed here", None),
        ("NVRTC is not installed", None),
        ("there is no Numba, or it was imported without its simulator", None),
        ("needs a GPU, or else", None),
        ("the full run leaves nothing out", None),
    ],
)
def test_what_may_be_skipped_in_ci(reason: str, kind: str | None) -> None:
    assert skips.kind(reason) == kind


def test_the_fast_run_leaves_out_what_repeats_and_ci_skips_nothing_for_a_reason_that_is_not_listed(
    tmp_path: Path,
) -> None:
    """Every run lists skips with their reasons."""
    code, text = run_tiny(tmp_path, "-rA", "--fast", reason="no rain today")
    assert re.search(r"PASSED \S+::test_that_runs", text) and "::test_that_repeats" not in text
    assert code == 0 and re.search(r"skipped, by reason =*\n+ +1  no rain today\n", text), text
    code, text = run_tiny(tmp_path, "-rA", reason="no rain today", CI="true")
    assert re.search(r"PASSED \S+::test_that_repeats", text) and re.search(r"PASSED \S+::test_that_runs", text)
    assert code == 1 and "skipped: no rain today\nCI skips nothing for a reason" in text, text
