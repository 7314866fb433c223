"""Where the tests of CUDA's features run: on the CPU engine, and on the GPU where there is one.

Every source that such a test compiles on the CPU engine must be CUDA C++ for a GPU as well: NVRTC, which needs no GPU,
compiles it too, where it is installed.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from helpers import device, engine
from helpers.attention import compile_report
from helpers.attention import kernel as kernels
from helpers.engine import nvrtc as headers
from helpers.xray import run

BACKENDS = [pytest.param(engine, id="cpu")]
if device.ON_GPU:
    BACKENDS.append(pytest.param(device.cp, id="gpu"))

on_each_device = pytest.mark.parametrize("cp", BACKENDS)


@functools.lru_cache
def compiled(cp: Any, code: str, names: tuple[str, ...] = (), options: tuple[str, ...] = ("-std=c++17",)) -> Any:
    """A module, compiled once for all the tests that share its source."""
    folders = kernels.headers(code) if cp is not engine else ()
    return cp.RawModule(code=code, options=(*options, *folders), name_expressions=names or None)


@functools.lru_cache
def refused_by_nvrtc(code: str, names: tuple[str, ...], options: tuple[str, ...]) -> str:
    """What NVRTC says against the source, "" where it compiles it or is not installed. It stops at PTX."""
    try:
        compile_report.nvrtc_version()
    except compile_report.NvrtcMissing:
        return ""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(code, "kernel.cu", [], [])
    try:
        for name in names:
            nvrtc.addNameExpression(program, name)
        options = (*options, *headers.header_options(code))
        try:
            nvrtc.compileProgram(program, headers.cupy_options(options))
        except nvrtc.NVRTCError as error:
            return f"{error}:\n{nvrtc.getProgramLog(program).strip()}"
        return ""
    finally:
        nvrtc.destroyProgram(program)


def assert_clean(kernel: Any, grid: Any, block: Any, args: Any, shared_mem: int = 0) -> None:
    """No finding in a checked run of a launch: the builds that count, and those that fill locals, are left out."""
    findings = run.find(kernel, grid, block, args, shared_mem)
    assert not findings, "\n".join(map(str, findings))
