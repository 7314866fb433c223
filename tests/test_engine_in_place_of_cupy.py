"""Programs that import CuPy and get the engine: their imports, and what they set up before a launch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import compiled, on_each_device

from helpers import engine
from helpers.engine.compiler import HERE

RECIPE = f"""
import sys
sys.path.insert(0, {str(HERE.parent.parent)!r})
from helpers import engine
sys.modules["cupy"] = engine
"""
IMPORTS = [
    "import cupy.cuda; x = cupy.array([1, 2]); assert type(x) is engine.ndarray and cupy.cuda is engine.cuda",
    "from cupy.cuda import runtime; assert runtime.getDeviceCount() == 1 and runtime is engine.cuda.runtime",
    "from cupy.cuda import Stream, Event, Device, alloc_pinned_memory, get_elapsed_time",
    "from cupy.cuda.memory import MemoryPointer; assert MemoryPointer is engine.cuda.MemoryPointer",
    "from cupy.cuda.compiler import CompileException; assert CompileException is engine.CompileError",
    "from cupy.cuda.stream import Event; import cupy.cuda.device as d; assert d.get_compute_capability() == '90'",
    "import cupy.cuda.profiler as p; p.start(); p.stop()",
    "import cupy.linalg; assert cupy.linalg.norm(cupy.asarray([3.0, 4.0])) == 5",
    "import cupy.testing as t; t.assert_array_equal(engine.asarray([1, 2]), __import__('numpy').array([1, 2]))",
    "from cupy.random import default_rng; assert type(default_rng(0).random(3)) is engine.ndarray",
    "import cupyx; assert float(cupyx.rsqrt(engine.asarray(4.0))) == 0.5; assert cupyx.zeros_pinned(3).sum() == 0",
    "from cupyx.profiler import benchmark, time_range; r = benchmark(sum, ([1, 2],), n_repeat=3, n_warmup=1); "
    "assert r.gpu_times.shape == (1, 3) and r.cpu_times.shape == (3,) and 'GPU-0' in str(r)",
    "import cupy, cupy as cp; from cupy import RawKernel, cuda; assert cp.get_array_module(cp.ones(2)) is cupy",
]


def run(*programs: str) -> None:
    """Run each program in a child of one process that has imported the engine and its dependencies."""
    code = f"""{RECIPE}
import os
for program in {programs!r}:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, program
        continue
    spec = engine.cuda.__spec__
    exec(program)
    assert engine.cuda.__spec__ is spec
    assert not [n for n in sys.modules if n.startswith("cupy.") and "engine" not in str(sys.modules[n])]
    break
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_modules_of_cupy_are_the_engines() -> None:
    run(*IMPORTS)


def test_modules_that_the_engine_has_not() -> None:
    run("""
import importlib
for name in ("cupy.array", "cupy.launch", "cupy._core", "cupyx.scipy", "cupy.cuda.nccl", "cupyx.jit"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert "the CPU engine, which replaces CuPy here" in str(error), error
    else:
        raise AssertionError(name)
""")


def test_cupys_own_modules_are_left_alone() -> None:
    code = RECIPE.replace('sys.modules["cupy"]', "other") + (
        "from importlib.util import find_spec\n"
        "assert find_spec('cupy') is None or 'helpers' not in str(find_spec('cupy.cuda').origin)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------- what is set up


@on_each_device
def test_what_programs_set_up(cp: Any) -> None:
    assert int(cp.__version__.split(".")[0]) >= 13
    pool, pinned = cp.get_default_memory_pool(), cp.get_default_pinned_memory_pool()
    before = pool.used_bytes()
    array = cp.zeros(1 << 20, cp.uint8)
    assert pool.used_bytes() - before >= array.nbytes and pool.total_bytes() >= array.nbytes
    del array
    pool.free_all_blocks()
    pinned.free_all_blocks()
    assert pinned.n_free_blocks() == 0 and (cp is not engine or pool.n_free_blocks() == 0)  # others' blocks, on a GPU
    with cp.cuda.using_allocator(cp.cuda.MemoryPool(cp.cuda.malloc_managed).malloc):
        cp.zeros(3)
    memory = cp.cuda.alloc_pinned_memory(12)
    host = np.frombuffer(memory, np.float32, 3)
    host[...] = 7
    assert memory.ptr and host.sum() == 21
    runtime = cp.cuda.runtime
    assert not runtime.is_hip and runtime.runtimeGetVersion() >= 12000 and runtime.driverGetVersion() >= 12000
    free, total = runtime.memGetInfo()
    assert 0 < free <= total
    device = cp.cuda.Device()
    assert device.attributes["WarpSize"] == 32 and int(device) == 0 and device == cp.cuda.Device(0)
    assert device.attributes["MaxThreadsPerBlock"] == 1024 and cp.cuda.get_device_id() == 0
    assert cp.cuda.device.get_compute_capability() == device.compute_capability
    cp.cuda.nvtx.RangePush("a range")
    cp.cuda.nvtx.RangePop()
    with pytest.raises(runtime.CUDARuntimeError if cp is not engine else ValueError):
        runtime.setDevice(99)


def test_a_limit_of_memory_is_kept() -> None:
    pool = engine.get_default_memory_pool()
    try:
        pool.set_limit(size=pool.used_bytes() + 1000)
        engine.zeros(900, np.uint8)
        with pytest.raises(MemoryError, match="no 2000 bytes"):
            engine.zeros(2000, np.uint8)
    finally:
        pool.set_limit(size=0)
    assert pool.get_limit() == 0 and engine.zeros(2000, np.uint8).size == 2000
    for wrong in ({}, {"size": 1, "fraction": 0.5}, {"size": -1}, {"fraction": 2}):
        with pytest.raises(ValueError):
            pool.set_limit(**wrong)


@on_each_device
def test_fused_functions(cp: Any) -> None:
    @cp.fuse()
    def scaled(x: Any, y: Any) -> Any:
        return x * y + 1

    @cp.fuse
    def squared(x: Any) -> Any:
        return x * x

    x = cp.arange(4, dtype=cp.float32)
    assert cp.asnumpy(scaled(x, x)).tolist() == [1, 2, 5, 10] and cp.asnumpy(squared(x)).tolist() == [0, 1, 4, 9]


ADD = 'extern "C" __global__ void add(float* x, const float* y, int n) { if (x) x[blockIdx.x] += y ? y[0] : n; }'


@on_each_device
def test_null_pointers_and_empty_grids(cp: Any) -> None:
    x = cp.zeros(2, cp.float32)
    kernel = compiled(cp, ADD).get_function("add")
    for null in (0, None, np.uint64(0), np.int64(0), cp.zeros(0, cp.float32)):
        kernel((1,), (1,), (x, null, np.int32(2)))
    assert cp.asnumpy(x).tolist() == [10, 0]
    for grid, block in (((0,), (1,)), ((0, 0, 0), (0,)), ((1, 0), (1, 0, 0))):  # CuPy turns each 0 into 1
        kernel(grid, block, (x, None, np.int32(1)))
    assert cp.asnumpy(x).tolist() == [13, 0]


def test_numbers_of_4_bytes_are_no_pointers() -> None:
    kernel = compiled(engine, ADD).get_function("add")
    for number in (np.int32(0), np.uint32(1 << 20), True, 7):
        with pytest.raises(TypeError, match="expected a device array"):
            kernel((1,), (1,), (engine.zeros(1, np.float32), number, np.int32(1)))


def test_attributes_of_a_kernel() -> None:
    kernel = engine.RawKernel(ADD, "add")
    attributes = kernel.attributes
    assert attributes["binary_version"] == attributes["ptx_version"] == kernel.binary_version == 90
    assert attributes["max_threads_per_block"] == 1024 and attributes["shared_size_bytes"] == 0
    kernel.preferred_shared_memory_carveout = 50
    assert kernel.attributes["preferred_shared_memory_carveout"] == 50
    with pytest.raises(engine.LaunchError, match="a percentage"):
        kernel.preferred_shared_memory_carveout = 101
    for name in ("num_regs", "local_size_bytes", "const_size_bytes"):
        with pytest.raises(KeyError, match=f"{name} is what a GPU's compiler decides"):
            attributes[name]


def test_what_the_engine_refuses_by_name() -> None:
    for of, name in (
        (engine.cuda, "Graph"),
        (engine.cuda.runtime, "memcpyAsync"),
        (engine.cuda.memory, "UnownedMemory"),
    ):
        with pytest.raises(AttributeError, match=f"has no '{name}'.*the rest is a GPU's"):
            getattr(of, name)


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    """A process whose folder was removed can still compile kernels."""
    code = (
        RECIPE
        + f"""
import os
os.chdir({str(tmp_path)!r})
os.rmdir({str(tmp_path)!r})
x = engine.zeros(1, "float32")
engine.RawKernel('''{ADD.replace("add", "gone")}''', "gone")((1,), (1,), (x, None, engine.int32(3)))
assert x[0] == 3
"""
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
