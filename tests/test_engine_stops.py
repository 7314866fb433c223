"""A kernel that would end the process, or never end, is stopped with its line, and Python continues."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import numpy as np
import pytest
from backends import compiled, on_each_device
from cuda_files import cuda_text

from helpers import engine
from helpers.engine import LaunchError, runtime
from helpers.engine.structures import Reason
from helpers.xray import xray

SOURCE = cuda_text("engine_stops")


@functools.cache
def module() -> Any:
    return engine.RawModule(code=SOURCE, backend="nvcc")  # which accepts a host's header, unlike NVRTC


def failure(name: str, threads: int = 32) -> str:
    """Return the message of a launch that fails, after which the engine still works."""
    a = engine.zeros(64, np.int32)
    with pytest.raises(engine.LaunchError) as caught:
        module().get_function(name)((3,), (threads,), (a,))
    module().get_function("good")((1,), (64,), (a,))
    np.testing.assert_array_equal(a, np.arange(64))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("aborts", "the kernel was aborted: it called abort()"),
        ("exits", "the kernel called exit(): a kernel ends by return"),
        ("exits_at_once", "the kernel called _Exit()"),
        ("frees_an_argument", "free() of a pointer that no malloc() or new of a kernel gave"),
        ("frees_twice", "free() of a pointer that no malloc() or new of a kernel gave, or that is free already"),
        ("deletes_the_middle", "delete[] of a pointer that no malloc()"),
        ("asserts", "assertion failed: a[0] == 1"),
    ],
)
def test_python_lives_and_knows_the_line(name: str, says: str) -> None:
    for _ in range(3):
        message = failure(name)
        assert says in message
        line = next(n for n, text in enumerate(SOURCE.splitlines(), 1) if text.endswith(f"// {name}"))
        assert f"kernel.cu:{line}" in message and f"\n{line:>6} | " in message
        assert re.search(
            rf"\[{name}, block \({int(name == 'exits')},0,0\), thread \({5 * (name == 'aborts')},0,0\)", message
        )


def test_a_recursion_without_end() -> None:
    for threads in (1, 64):
        assert "do not fit the engine's stack of 256 KB, or a recursion never ends" in failure("recursion", threads)


@pytest.mark.parametrize("name", ["endless", "endless_barriers"])
def test_a_plain_launch_ends_when_its_time_is_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_CPU_TIMEOUT", "0.2")
    message = failure(name)
    assert "was still running when its time was up: an endless loop, or a wait for something that" in message
    assert message.endswith("A block may take 0.2 s. COURSE_CPU_TIMEOUT sets another limit in seconds; 0 sets none")
    line = next(n for n, text in enumerate(SOURCE.splitlines(), 1) if text.endswith(f"// {name}"))
    loop = (line - 1, line) if name == "endless_barriers" else (line,)  # its condition, or its barrier
    assert any(f"kernel.cu:{number}" in message for number in loop)


def test_a_launch_has_a_time_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_CPU_TIMEOUT", "300")
    with pytest.raises(LaunchError) as caught:
        module().get_function("endless")((1,), (64,), (engine.zeros(64, np.int32),), timeout=0.2)
    assert caught.value.reason == Reason.EXPIRED
    assert "COURSE_CPU_TIMEOUT" not in str(caught.value)
    assert runtime.time_limit(10) == 300
    monkeypatch.setenv("COURSE_CPU_TIMEOUT", "0")
    assert runtime.time_limit(10) == math.inf
    monkeypatch.delenv("COURSE_CPU_TIMEOUT")
    assert runtime.time_limit(10) == 10 and runtime.time_limit() == 20


ENDLESS = (
    "for (int j = 0; j < 10;) {  // here\n    a[0] += 1;  // here\n  }",
    "int j = 0;\n  while (true) {  // here\n    a[j] += 1;  // here\n  }",
    "a[0] = 7;\n  while (true) {  // here\n  }  // here",
    "int s = a[0];\n  for (int j = 0; j < 10;)  // here\n    s += 1;  // here\n  a[0] = s;",
    "for (int j = 0; j < 10; --j) {  // here\n    float s = expf(a[1]);  // here\n    a[0] = s;  // here\n  }",
    "while (atomicAdd(a, 0) == 0);  // here",
)


@pytest.mark.parametrize("optimisation", ["1", "2"])
@pytest.mark.parametrize("loop", ENDLESS)
def test_the_line_of_a_loop_that_a_compiler_empties(
    loop: str, optimisation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a compiler moves out of the loop, the reported line is one of the loop's."""
    monkeypatch.setenv("COURSE_CPU_TIMEOUT", "0.1")
    monkeypatch.setenv("COURSE_CPU_OPTIMISATION", optimisation)
    code = f'extern "C" __global__ void never_ends(int *a) {{\n  {loop}\n}}\n'
    kernel = engine.RawModule(code=code).get_function("never_ends")
    lines = [number for number, text in enumerate(code.splitlines(), 1) if text.endswith("// here")]
    for _ in range(3):  # one stop in hundreds, on a busy machine, hits a thread that is about to begin
        with pytest.raises(engine.LaunchError) as caught:
            kernel((1,), (32,), (engine.zeros(4, np.int32),))
        told = re.search(r"kernel\.cu:(\d+)", str(caught.value))
        if told:
            break
    assert told and int(told[1]) in lines, str(caught.value)


@pytest.mark.parametrize("loop", ["for (;;) {}", "for (int j = 0; j < 9;) a[0] += 1;"])
def test_a_loop_that_is_one_jump_is_found_by_what_is_near(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers drop invisible stores and reduce the rest to a jump, which has no line of its own.

    One stop in hundreds, on a busy machine, hits a thread that is about to begin: one of three must report the line.
    """
    monkeypatch.setenv("COURSE_CPU_TIMEOUT", "0.2")
    text = f'extern "C" __global__ void k(int *a) {{\n  a[1] = 1;\n  if (threadIdx.x < 64)\n    {loop}\n}}\n'
    told = []
    for _ in range(3):
        with pytest.raises(engine.LaunchError, match="was still running") as caught:
            engine.RawModule(code=text).get_function("k")((1,), (32,), (engine.zeros(64, np.int32),))
        told.append(str(caught.value))
        if re.search(r"(at|near) kernel\.cu:4 ", told[-1]):
            break
    else:
        pytest.fail("\n".join(told))


@pytest.mark.parametrize("value", ["-1", "soon", "inf", "nan"])
def test_wrong_time_limits(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_CPU_TIMEOUT", value)
    with pytest.raises(ValueError, match="COURSE_CPU_TIMEOUT must be a number of seconds"):
        module().get_function("good")((1,), (64,), (engine.zeros(64, np.int32),))
    monkeypatch.setenv("COURSE_CPU_TIMEOUT", "0")
    module().get_function("good")((1,), (64,), (engine.zeros(64, np.int32),))


@pytest.mark.parametrize("statement", ["throw 1;", "try { a[0] = 1; } catch (...) { a[0] = 2; }"])
def test_exceptions_are_refused(statement: str) -> None:
    """The message is NVRTC's."""
    with pytest.raises(
        engine.CompileError, match=r"kernel\.cu:1: error: device code does not support exception handling"
    ):
        engine.RawModule(code=f'extern "C" __global__ void k(int *a) {{ {statement} }}\n').compile()


def test_the_xray_stops_there_too() -> None:
    for name in ("aborts", "exits", "frees_an_argument"):
        report = xray(module().get_function(name), (3,), (32,), (engine.zeros(64, np.int32),))
        line = next(n for n, text in enumerate(SOURCE.splitlines(), 1) if text.endswith(f"// {name}"))
        assert [(f.kind, f.line) for f in report.findings] == [("stopped", line)], report


HEAP = cuda_text("engine_stops_heap")


@on_each_device
def test_the_heap_of_a_kernel(cp: Any) -> None:
    x, out = np.random.default_rng(2).integers(0, 9, (64, 10)).astype(np.int32), cp.zeros(64, np.int32)
    for _ in range(30):  # 64 KB each time: nothing is left behind
        compiled(cp, HEAP).get_function("lists")((1,), (64,), (cp.asarray(x), out, np.int32(10)))
    np.testing.assert_array_equal(cp.asnumpy(out), (x * 3 ** np.arange(10)).sum(axis=1))
    compiled(cp, HEAP).get_function("greedy")((1,), (1,), (out, np.uint64(1 << 40)))
    assert cp.asnumpy(out)[0] == 1, "no such memory: a null pointer"
    compiled(cp, HEAP).get_function("keep")((1,), (1,), (np.int32(77),))
    compiled(cp, HEAP).get_function("take")((1,), (1,), (out,))
    assert cp.asnumpy(out)[0] == 77, "it outlives the launch"
