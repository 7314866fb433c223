"""A learner sees the cell's line and the message of an error that the course reports, in a real kernel."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

SETUP = '''
import numpy as np
from helpers.attention import reference
from helpers.device import ON_GPU, cp
from helpers.attention.kernel import load, typed

code = """
extern "C" __global__ void __launch_bounds__(256) add(const float* a, float* b, int n, float s) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) b[i] = a[i] + s;
}"""
add = typed(cp.RawModule(code=code), "add")
a, b, n, s = cp.zeros(200, dtype=cp.float32), cp.zeros(200, dtype=cp.float32), cp.int32(200), cp.float32(1)


def mine(grid):
    add(grid, (128,), (a, b, n, s))
'''
Run = Callable[[str], str]


def kernel() -> Iterator[Run]:
    """Run a cell, and return the traceback that it shows, without colours, or ""."""
    jupyter_client = pytest.importorskip("jupyter_client")  # installed with ipykernel
    manager, client = jupyter_client.manager.start_new_kernel(kernel_name="python3")

    def run(cell: str) -> str:
        shown: list[str] = []

        def take(message: dict) -> None:
            if message["msg_type"] == "error":
                shown.append("\n".join(message["content"]["traceback"]))

        client.execute_interactive(cell, output_hook=take, timeout=600)
        return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(shown))

    assert run(SETUP) == ""
    yield run
    client.stop_channels()
    manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    yield from kernel()


GOOD = ("(2,)", "(128,)", "(a, b, n, s)")


@pytest.mark.parametrize(
    ("grid", "block", "args", "says"),
    [
        ("2", GOOD[1], GOOD[2], "grid is the number 2: expected a tuple of one to three sizes; write (2,)"),
        (GOOD[0], "128", GOOD[2], "block is the number 128: expected a tuple of one to three sizes; write (128,)"),
        ("200 / 128", GOOD[1], GOOD[2], "grid is 1.5625, a float: expected a tuple of one to three whole numbers; //"),
        ("(200 / 128,)", GOOD[1], GOOD[2], "grid holds 1.5625, a float: expected whole numbers; // divides"),
        ("()", GOOD[1], GOOD[2], "grid is (): expected a tuple of one to three sizes, such as (128,)"),
        ("'2'", GOOD[1], GOOD[2], "grid is '2', a str: expected a tuple of one to three whole numbers"),
        (*GOOD[:2], "a", "args is of type ndarray: expected a tuple with one value for each parameter of add(const"),
        (*GOOD[:2], "(a, b, n)", "add takes 4 arguments, got 3: missing float32 s"),
        (*GOOD[:2], "(a, b, n, s, s)", "add takes 4 arguments, got 5"),
        (*GOOD[:2], "(np.zeros(9), b, n, s)", "is a NumPy array: expected a device array; write cp.asarray(...)"),
        (*GOOD[:2], "([1.0], b, n, s)", "expected a device array; got list [1.0]; write cp.asarray(...)"),
        (*GOOD[:2], "(a.astype(cp.float64), b, n, s)", "is float64, the kernel reads float32; give it array.astype("),
        (*GOOD[:2], "(a, b, 200.0, s)", "(int32 n) of add got a Python float"),
        (*GOOD[:2], "(a, b, 200.0, s)", "write cp.int32(200)"),
        (*GOOD[:2], "(a, b, n, 1.0)", "write cp.float32(1.0)"),
        (*GOOD[:2], "(a, n, b, s)", "argument 1 (float32* b) of add: expected a device array; got int32"),
    ],
)
def test_common_mistakes(run: Run, grid: str, block: str, args: str, says: str) -> None:
    shown = run(f"add({grid}, {block}, {args})")
    assert says in shown.splitlines()[-1]
    assert "----> 1 add(" in shown and "helpers" not in shown


def test_only_our_frames_are_left_out(run: Run) -> None:
    shown = run("mine(2)")
    assert "in mine(grid)" in shown and "----> 1 mine(2)" in shown and "write (2,)" in shown and "helpers" not in shown


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("add((1,), (512,), (a, b, n, s))", "add is compiled for 256 at most, by its __launch_bounds__"),
        ("cp.RawModule(code=code.replace('b[i]', 'c[i]')).get_function('add')", "c.? was not declared|undeclared"),
    ],
)
def test_the_engine_too(run: Run, cell: str, says: str) -> None:
    if run("assert not ON_GPU"):
        pytest.skip("the messages of the CPU engine")
    shown = run(cell)
    assert re.search(says, shown) and shown.count("----> 1 ") == 1 and "helpers" not in shown


def test_what_nobody_raised_keeps_all_frames(run: Run) -> None:
    shown = run("load('no line break', object())")
    assert "FileNotFoundError" in shown and "helpers" not in shown, "reported: no such file"
    shown = run("load(7, 'add')")
    assert "helpers/attention/kernel.py" in shown, (
        "a mistake that the course does not report: the frames help to find it"
    )


def test_causes_and_syntax_errors(run: Run) -> None:
    shown = run("from helpers.attention.check import check\nreference.attention('q', a, a)")
    assert shown.count("Traceback (most recent call last)") == 1 and "----> 2 reference.attention" in shown
    assert "SyntaxError" in run("a b") and "ZeroDivisionError" in run("1 / 0")


def test_a_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_TRACEBACK", "full")
    for run in kernel():
        shown = run("add(2, (128,), (a, b, n, s))")
        assert "helpers/attention/kernel.py" in shown and "write (2,)" in shown
