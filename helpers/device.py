"""The one switch: `cp` is CuPy where a GPU answers, else the CPU engine with the same names.

    from helpers.device import cp

`COURSE_DEVICE=cpu` or `COURSE_DEVICE=gpu` overrides the choice. `COURSE_NVRTC=1`: on the CPU engine, NVRTC
compiles each kernel first, and a kernel that it refuses is not run (see engine/nvrtc.py). Grading does this wherever
NVRTC is installed, unless COURSE_NVRTC=0.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

from helpers.engine import tracebacks

__all__ = ["ON_GPU", "cp", "describe"]


def _choose() -> tuple[ModuleType, bool]:
    choice = os.environ.get("COURSE_DEVICE", "").lower()
    if choice not in ("", "cpu", "gpu"):
        raise ValueError(f"COURSE_DEVICE is 'cpu' or 'gpu', not {choice!r}")
    reason = ""
    if choice != "cpu":
        try:
            import cupy

            if cupy.cuda.is_available():
                return cupy, True
            reason = "CuPy is installed, but no NVIDIA driver answers"
        except Exception as error:  # a broken installation of CuPy can raise anything: use the engine
            reason = f"CuPy does not import ({type(error).__name__}: {error})"
    if choice == "gpu":
        raise RuntimeError(f"COURSE_DEVICE=gpu, but there is no GPU to use: {reason}. Unset it to run on the CPU.")
    from helpers import engine
    from helpers.engine import nvrtc

    if os.environ.get("COURSE_NVRTC", "") not in ("", "0"):
        nvrtc.check_first()
    return engine, False


cp, ON_GPU = _choose()
tracebacks.install(Path(__file__).parent, *(() if ON_GPU else (cp.CompileError,)))


def describe() -> str:
    """Describe in one line the device that runs the kernels, and the compiler that builds them."""
    if not ON_GPU:
        return cp.cuda.describe()
    properties = cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)
    major, minor = cp.cuda.nvrtc.getVersion()
    return (
        f"{properties['name'].decode()} (compute capability {properties['major']}.{properties['minor']}), "
        f"kernels compiled by NVRTC {major}.{minor} through CuPy {cp.__version__}"
    )
