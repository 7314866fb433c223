"""Launches that are checked as they happen, once each; and pytest's options for that."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import engine as cp
from helpers.engine.compiler import HERE
from helpers.engine.failures import LaunchError
from helpers.engine.xray import sanitize

CODE = """
__device__ int launches;
extern "C" __global__ void twice(float *x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= 2;
}
extern "C" __global__ void counts(int *out) { out[0] = ++launches; }
extern "C" __global__ void races(int *out) {
  out[0] = threadIdx.x;  // races
}
extern "C" __global__ void first_half(float *out, int n) { if (threadIdx.x < n / 2) out[threadIdx.x] = 1; }
extern "C" __global__ void asserts(int *a) { assert(a[0] == 1); }
extern "C" __global__ void own_array(int *out, int n) {
  int own[4] = {1, 2, 3, 4};
  for (int i = 0; i <= n; ++i) out[0] += own[i];  // own_array
}
"""


@pytest.fixture(scope="module")
def module() -> Any:
    return cp.RawModule(code=CODE)


def test_each_launch_runs_once(module: Any) -> None:
    """On arrays that it changes in place, and with variables that only kernels change."""
    x, out = cp.ones(40, np.float32), cp.zeros(1, np.int32)
    with sanitize.every_launch() as looked:
        for _ in range(3):
            module.get_function("twice")((2,), (32,), (x, np.int32(40)))
            module.get_function("counts")((1,), (1,), (out,))
    assert (x == 8).all() and out[0] == 3
    assert looked.launches == 6 and looked.kernels == {"twice", "counts"} and looked.findings == 0
    module.get_function("twice")((2,), (32,), (x, np.int32(40)))
    assert (x == 16).all() and looked.launches == 6


def test_a_finding_has_its_lines(module: Any) -> None:
    out = cp.zeros(1, np.int32)
    with sanitize.every_launch(), pytest.raises(sanitize.FoundError) as caught:
        module.get_function("races")((1,), (64,), (out,))
    line = CODE.splitlines().index("  out[0] = threadIdx.x;  // races") + 1
    head, finding, code = str(caught.value).splitlines()
    assert head == "races<<<(1,1,1), (64,1,1)>>>: 1 finding"
    assert re.match(rf"race: write of out\[0\] .* at kernel.cu:{line} races with write by ", finding)
    assert code == f"{line:>6} |   out[0] = threadIdx.x;  // races"
    assert [found.line for found in caught.value.findings] == [line] and not isinstance(caught.value, LaunchError)
    with sanitize.every_launch(allow={"race"}):
        module.get_function("races")((1,), (64,), (out,))
    with sanitize.every_launch(), sanitize.no_launch():
        module.get_function("races")((1,), (64,), (out,))


def test_a_part_of_an_array_may_be_written_unless_that_is_asked_for(module: Any) -> None:
    out, again = cp.empty(8, np.float32), cp.empty(8, np.float32)
    with sanitize.every_launch():
        module.get_function("first_half")((1,), (8,), (out, np.int32(8)))
        with pytest.raises(sanitize.FoundError, match="uninitialised: read of x"):
            module.get_function("twice")((1,), (8,), (out, np.int32(8)))
    with sanitize.every_launch(allow=()), pytest.raises(sanitize.FoundError, match="4 of 8 elements of out were never"):
        module.get_function("first_half")((1,), (8,), (again, np.int32(8)))


def test_what_stops_a_launch_is_an_error_of_the_launch_too(module: Any) -> None:
    with sanitize.every_launch(allow={"stopped"}), pytest.raises(LaunchError, match="assertion failed") as caught:
        module.get_function("asserts")((1,), (1,), (cp.zeros(1, np.int32),))
    assert isinstance(caught.value, sanitize.StoppedError) and caught.value.block == (0, 0, 0)


def test_local_variables_are_looked_at_where_that_is_asked_for(module: Any) -> None:
    args = cp.zeros(1, np.int32), np.int32(4)
    with sanitize.every_launch(local_variables=True), pytest.raises(sanitize.FoundError, match=r"own\[4\]"):
        module.get_function("own_array")((1,), (1,), args)


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="no finding is called raze: barrier divergence, "),
        sanitize.every_launch(allow=["raze"]),
    ):
        pass


# ---- pytest's options

PLUGIN = f"""
import sys
sys.path[:0] = [{str(HERE.parent.parent)!r}, {str(HERE / "plugin")!r}]
import helpers.engine.pytest_plugin
sys.modules["rawkernel"] = helpers.engine
sys.modules["rawkernel.pytest_plugin"] = helpers.engine.pytest_plugin
from pytest_rawkernel import *
"""
PROJECT = f'''
import cupy
import cupy as cp
import cupy.cuda.runtime
import cupyx.profiler
import pytest

module = cp.RawModule(code="""{CODE}""")


def race():
    module.get_function("races")((1,), (64,), (cp.zeros(1, cp.int32),))


def test_plain():
    x = cp.ones(4, cp.float32)
    module.get_function("twice")((1,), (4,), (x, cp.int32(4)))
    assert (x == 2).all() and cupy.cuda.is_available() and cp.is_available()


def test_race():
    race()


@pytest.mark.cuda_sanitize
def test_marked():
    race()


@pytest.mark.cuda_sanitize(allow="race")
def test_allowed():
    race()


@pytest.mark.no_cuda_sanitize
def test_left_alone():
    race()


@pytest.fixture
def racy():
    race()


def test_fixture(racy):
    pass


@pytest.mark.gpu_only
def test_gpu():
    raise AssertionError
'''


NOT_LOADED = [word for name in ("cacheprovider", "xdist", "nbval") for word in ("-p", f"no:{name}")]


def run_pytest(folder: Path, *options: str, **settings: str) -> str:
    (folder / "course_plugin.py").write_text(PLUGIN)
    (folder / "test_project.py").write_text(PROJECT)
    (folder / "pytest.ini").write_text(
        "\n".join(["[pytest]", *(f"{name} = {value}" for name, value in settings.items())])
    )
    command = [sys.executable, "-m", "pytest", "-p", "course_plugin", *NOT_LOADED]
    done = subprocess.run(
        [*command, "--strict-markers", "-rA", "--tb=short", *options],
        **{"cwd": folder, "capture_output": True, "text": True, "env": os.environ | {"PYTHONPATH": str(folder)}},
    )
    return done.stdout + done.stderr


def outcomes(text: str) -> dict[str, str]:
    found = re.findall(r"^(PASSED|FAILED|ERROR) test_project.py::test_(\w+)", text, re.M)
    return {name: outcome for outcome, name in found}


def test_each_launch_of_a_run_is_looked_at(tmp_path: Path) -> None:
    text = run_pytest(tmp_path, "--cuda-sanitize")
    bad = {"race": "FAILED", "marked": "FAILED", "fixture": "ERROR"}
    good = dict.fromkeys(("plain", "allowed", "left_alone"), "PASSED")
    assert outcomes(text) == good | bad, text
    assert "SKIPPED [1]" in text and "CUDA on the CPU by" in text and "each launch is looked at" in text
    line = CODE.splitlines().index("  out[0] = threadIdx.x;  // races") + 1
    assert re.search(rf"^E +race: write of out\[0\] .* at kernel.cu:{line} races", text, re.M)
    assert re.search(rf"^E +{line} \|   out\[0\] = threadIdx.x;", text, re.M)
    assert "looked at 5 launches of 2 kernels, 3 findings" in text


def test_only_marked_tests_are_looked_at_without_the_option(tmp_path: Path) -> None:
    text = run_pytest(tmp_path, cuda_on_cpu="true")
    assert outcomes(text)["marked"] == "FAILED" and "2 launches of 1 kernels" in text, text
    assert {outcome for name, outcome in outcomes(text).items() if name != "marked"} == {"PASSED"}


def test_a_wrong_setting_is_an_error_of_usage(tmp_path: Path) -> None:
    text = run_pytest(tmp_path, "--cuda-sanitize", cuda_sanitize_allow="\n  raze")
    assert "cuda_sanitize_allow: no finding is called raze" in text and "Traceback" not in text, text


def test_without_the_options_nothing_is_in_cupys_place(tmp_path: Path) -> None:
    plain = "import sys\n\ndef test_it():\n    assert getattr(sys.modules.get('cupy'), '__name__', 'cupy') == 'cupy'\n"
    run_pytest(tmp_path, "--version")
    (tmp_path / "test_project.py").write_text(plain)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "course_plugin", *NOT_LOADED]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert "1 passed" in done.stdout and "CUDA on the CPU" not in done.stdout, done.stdout
