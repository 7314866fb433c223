"""The devices for tests of CUDA's features: the CPU engine, and the GPU if there is one.

Every source that such a test compiles on the CPU engine must be valid for a GPU as well: NVRTC, which needs no GPU,
compiles it too if it is installed.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from helpers import device, engine
from helpers.attention import compile_report
from helpers.attention import kernel as kernels
from helpers.engine.xray import run

BACKENDS = [pytest.param(engine, id="cpu")]
if device.ON_GPU:
    BACKENDS.append(pytest.param(device.cp, id="gpu"))

on_each_device = pytest.mark.parametrize("cp", BACKENDS)

try:
    compile_report.nvrtc_version()
    _no_nvrtc = ""
except compile_report.NvrtcMissing as error:
    _no_nvrtc = str(error)
needs_nvrtc = pytest.mark.skipif(bool(_no_nvrtc), reason=_no_nvrtc)


@functools.lru_cache
def compiled(cp: Any, code: str, names: tuple[str, ...] = (), options: tuple[str, ...] = ("-std=c++17",)) -> Any:
    """A module, compiled once for all the tests that share its source."""
    folders = kernels.headers(code) if cp is not engine else ()
    return cp.RawModule(code=code, options=(*options, *folders), name_expressions=names or None)


def assert_clean(kernel: Any, grid: Any, block: Any, args: Any, shared_mem: int = 0) -> None:
    """Check that a checked run of a launch has no findings, without the builds that count and that fill locals."""
    findings = run.find(kernel, grid, block, args, shared_mem)
    assert not findings, "\n".join(map(str, findings))
