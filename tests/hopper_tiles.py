"""Helpers for tests of Hopper's instructions: instructions as functions, tiles, tensor maps that keep their arrays."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

import numpy as np

from helpers import engine
from helpers.attention import compile_report
from helpers.engine import tensor_map
from helpers.engine.nvrtc import cupy_options
from helpers.lesson import shortcuts
from helpers.xray import Report

OPTIONS = ("-std=c++17", "-arch=sm_90a")

FOLDER = Path(__file__).resolve().parent / "planted"
HEAD = '#line 1 "head.cuh"\n' + (FOLDER / "hopper.cuh").read_text(encoding="utf-8")


def x_rayed(stage: str, dtype: type, code: str | None = None, *, packed: bool = False, **options: Any) -> Report:
    """X-ray two heads of 150 rows and 130 keys of 72 columns; packed: two sequences."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, rows, 72)).astype(dtype) for rows in (150, 130, 130))
    if packed:
        options["cu_seqlens"] = tuple(np.array(ends, np.int32) for ends in ((0, 70, 150), (0, 30, 130)))
    return shortcuts.xray_stage(stage, q, k, v, code=code, **options)


_KEPT: list[Any] = []  # a map contains only an address


def map_of(array: Any, box: tuple[int, ...], swizzle: int = 128) -> np.ndarray:
    """Encode a tensor map of a device array, which is kept alive. box: the innermost dimension first.

    uint8 and uint16 stand for any one- and two-byte types.
    """
    _KEPT.append(array)
    dims, strides = array.shape[::-1], array.strides[-2::-1]
    if not isinstance(array, engine.ndarray):
        return _by_the_driver(array.dtype.name, array.data.ptr, dims, strides, box, swizzle)
    return tensor_map.encode_tiled(array.dtype.name, array.ctypes.data, dims, strides, box, swizzle=swizzle)


def _by_the_driver(
    dtype: str, address: int, dims: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> np.ndarray:
    """Encode the map of an array on a GPU with cuTensorMapEncodeTiled."""
    room = np.zeros(192, np.uint8)
    start = -room.ctypes.data % 64
    kind = {"uint8": 0, "uint16": 1, "float16": 6, "float32": 7, "bfloat16": 9}[dtype]
    rank = len(dims)
    encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    error = encode(
        ctypes.c_void_p(room.ctypes.data + start),
        kind,
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * max(rank - 1, 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        0,
        {0: 0, 32: 1, 64: 2, 128: 3}[swizzle],
        2,
        0,
    )
    assert error == 0, error
    return room[start : start + 128].view("V128").copy()


def halves(*shape: int, seed: int = 0, cp: Any = engine) -> Any:
    """Make small whole numbers in float16, on the device."""
    return cp.asarray(np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float16))


@functools.cache
def refused_by_ptxas(code: str, options: tuple[str, ...] = OPTIONS) -> str:
    """Return the error of NVRTC or ptxas for a source for sm_90a, or a warning that a build should fail on.

    "" if they accept it, or are not installed.
    """
    try:
        compile_report.nvrtc_version()
    except compile_report.NvrtcMissing:
        return ""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(code, "kernel.cu", [], [])
    try:
        given = tuple(option for option in options if not option.startswith("-arch"))
        try:
            nvrtc.compileProgram(program, cupy_options(given, "sm_90a"))
        except nvrtc.NVRTCError as error:
            return f"{error}:\n{nvrtc.getProgramLog(program).strip()}"
        return "\n".join(re.findall(r".*\bC75\d\d\b.*", nvrtc.getProgramLog(program)))
    finally:
        nvrtc.destroyProgram(program)
