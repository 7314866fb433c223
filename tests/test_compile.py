"""Every kernel compiled by NVRTC, with no GPU, for every architecture: registers, shared memory, spills, stack."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from backends import needs_nvrtc

from helpers.attention import compile_report as reports
from helpers.attention import kernel
from helpers.attention.compile_report import ARCHITECTURES, CompileReport, compile_report
from helpers.attention.ladder import FORWARD, LADDER, Stage, limits
from helpers.attention.ladder.launches import in_slots
from helpers.attention.ladder.stages.tensor_cores import packed_tf32
from helpers.device import ON_GPU, cp
from helpers.engine import CompileError, nvrtc
from helpers.engine.cuda_source import source

FILES = sorted(path.name for path in kernel.KERNELS.glob("*.cu"))
STAGES = {stage.file: stage for stage in LADDER.values()}
INSTANCES = {  # for files that are not stages
    "08_sum_splits.cu": "sum_splits<__half>",
    "10_order.cu": "order_tiles",
    "11_bias_gradient.cu": "bias_gradient<__half, float>",
    "11_bias_gradient_mma.cu": "bias_gradient_mma<__half, float>",
    "11_rotary.cu": "rotary<__half>",
    "11_projection.cu": "projection<__half>",
    "14_join.cu": "join_prefix<__half, float>",
    "14_split_kv.cu": "split_kv<__half>",
    "16_background.cu": "fp8<__half>",
    "16_transpose.cu": "transpose_v",
    "17_merge.cu": "merge_partial<__half>",
    "17_sum.cu": "sum_parts<__half>",
}
# what a stage launches in addition to its own kernel, with its instructions
ONLY_WITH = dict.fromkeys(("16_background.cu", "16_transpose.cu"), LADDER["fp8"])
# At the largest head dimension a compilation takes seconds: one architecture for each of three generations.
GENERATIONS = ("sm_90", "sm_80", "sm_120")
SLOW_ARCH = "sm_90"  # the only one for a stage that takes half a minute to compile
# Loops over HEAD_DIM are fully unrolled, and all architectures have one tile: at the largest, only SLOW_ARCH.
UNROLLED = ("02_tiled.cu", "03_online_softmax.cu")
MOST_REGISTERS = 255
# Bytes of spills that a file may have: 08 in half types on sm_80 at head_dim 128, 15 on sm_120 there, 16 at head_dim
# 128 with NVRTC 12.9.
MAY_SPILL = {"08_backward_mma.cu": 16, "15_tf32.cu": 64, "16_background.cu": 88, "16_fp8.cu": 88}
STATIC_SHARED = 48 * 1024


def test_every_stage_has_its_file() -> None:
    assert FILES and set(STAGES) <= set(FILES)


def runs_on(file: str, architectures: tuple[str, ...]) -> tuple[str, ...]:
    """Return the architectures that the file is compiled for; sm_90a instead of sm_90 if it uses its instructions."""
    stage = STAGES.get(file) or ONLY_WITH.get(file)
    if stage is None:
        return tuple(arch for arch in architectures if arch != "sm_75" or file not in INSTANCES)
    if stage.slow_to_compile:
        architectures = tuple(arch for arch in architectures if arch == SLOW_ARCH)
    numbers = [int(arch.removeprefix("sm_")) for arch in architectures]
    return tuple(stage.architecture(n) for n in numbers if (n == stage.min_cc if stage.only_cc else n >= stage.min_cc))


def compile_all(
    file: str, defines: dict[str, int] | None, architectures: tuple[str, ...], record_row: Callable[..., None]
) -> list[CompileReport]:
    """Compile the file for each architecture; each is a row of the printed table."""
    names: tuple[str | None, ...] = (INSTANCES.get(file),)
    if file in STAGES:
        if reason := STAGES[file].unavailable():
            pytest.skip(reason)
        names = STAGES[file].kernel_names(STAGES[file].dtypes[0])
    begin = time.perf_counter()
    found = [compile_report(file, defines, arch, name=name) for arch in architectures for name in names]
    seconds = time.perf_counter() - begin
    record_row(
        "NVRTC: registers per architecture, bytes of shared memory, spills and stack",
        kernel=file,
        sizes=" ".join(f"{key}={size}" for key, size in (defines or {}).items()) or "its own",
        **{arch: next((r.registers for r in found if r.arch.removesuffix("a") == arch), "") for arch in ARCHITECTURES},
        shared=max((report.shared_bytes for report in found), default=0),
        spills=max((report.spill_bytes for report in found), default=0),
        stack=max((report.stack_bytes for report in found), default=0),
        s=f"{seconds:.1f}",
    )
    return found


def faults(found: list[CompileReport], may_spill: int = 0) -> list[str]:
    """List what is not allowed: spilled values, arrays that are not in registers, more than a GPU has."""
    return [
        str(report)
        for report in found
        if report.spill_bytes > may_spill
        or report.stack_bytes > may_spill
        or report.shared_bytes > STATIC_SHARED
        or not 0 < report.registers <= MOST_REGISTERS
        or report.warnings
    ]


def ends_of(file: str) -> list[Any]:
    """Return (file, architectures) for `test_its_own_sizes`: SLOW_ARCH, then the oldest and the newest."""
    able = runs_on(file, ARCHITECTURES)
    ends = able[:1] + able[-1:]
    one = runs_on(file, (SLOW_ARCH,)) or ends[:1]
    rest = tuple(arch for arch in dict.fromkeys(ends) if arch not in one)
    return [
        pytest.param(file, one, id=file),
        *[pytest.param(file, rest, id=f"{file}-ends")] * bool(rest),
    ]


@needs_nvrtc
@pytest.mark.parametrize("file", [file for file in FILES if not nvrtc.uses_cute(kernel.source(file))])
def test_nvrtc_reads_each_file(file: str) -> None:
    """With its own sizes, whose assertions it checks, and up to PTX: assembling would double the time."""
    names = STAGES[file].kernel_names(STAGES[file].dtypes[0]) if file in STAGES else (INSTANCES.get(file),)
    code = kernel.source(file)
    expressions = [name for name in names if name and (name.endswith(">") or name in source.kernels(code))]
    assert nvrtc.refusal(code, kernel.options(), tuple(expressions)) == ""


@pytest.mark.exhaustive
@needs_nvrtc
@pytest.mark.parametrize(("file", "architectures"), [case for file in FILES for case in ends_of(file)])
def test_its_own_sizes(file: str, architectures: tuple[str, ...], record_row: Callable[..., None]) -> None:
    """For SLOW_ARCH, and for the oldest and the newest architecture it runs on.

    Those between have no instructions of their own, except sm_90a, whose kernels run only there; sm_80 is compiled
    below, with the sizes that it gets.

    For a stage that is slow to compile, one instance is made below, at the head dimension with the fewest free
    registers.

    Here NVRTC compiles it with its own sizes, and checks the assertions about them.
    """
    stage = STAGES.get(file)
    if stage and stage.slow_to_compile and not stage.unavailable():
        log, _ = reports._compiled(kernel.source(file), kernel.options(None), SLOW_ARCH, "")
        assert "error" not in log and "Compiling entry function" not in log
        return
    assert not faults(compile_all(file, None, architectures, record_row), MAY_SPILL.get(file, 0))


AT_LARGEST = [
    (file, arch)
    for arch in GENERATIONS
    for file in STAGES
    if runs_on(file, (arch,)) and (file not in UNROLLED or arch == SLOW_ARCH)
]


@pytest.mark.exhaustive
@needs_nvrtc
@pytest.mark.parametrize(("file", "arch"), AT_LARGEST)
def test_largest_head_dim(
    file: str, arch: str, record_row: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each architecture with the sizes that it gets from the shared memory of its blocks."""
    limit = {"sm_75": 64, "sm_80": 163, "sm_90": 227}.get(arch, 99) * 1024
    monkeypatch.setattr(limits, "most_shared", lambda: limit)
    found = compile_all(file, STAGES[file].defines(128), runs_on(file, (arch,)), record_row)
    assert not faults(found, MAY_SPILL.get(file, 0))


IN_SLOTS = [stage for stage in LADDER.values() if stage.slots is in_slots and not stage.slow_to_compile]


@pytest.mark.exhaustive
@needs_nvrtc
@pytest.mark.parametrize("stage", IN_SLOTS, ids=lambda stage: stage.name)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_search_of_a_slot_spills_little(stage: Stage, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward kernels do not spill, except 15; in a gradient only values computed once per block, before the loop."""
    monkeypatch.setattr(limits, "most_shared", lambda: 227 * 1024)
    defines = {**stage.defines(head_dim), **(packed_tf32(head_dim) if stage.number == 15 else {}), "SLOTS": 1}
    for name in stage.kernel_names(stage.dtypes[-1]):
        report = compile_report(stage.file, defines, stage.architecture(90), name=name)
        assert report.spill_bytes <= (8 * (stage.number == 15) if stage.direction == "forward" else 48), report


@needs_nvrtc
@pytest.mark.skipif(not ON_GPU, reason="there is no GPU to compare with")
@pytest.mark.parametrize("name", FORWARD)
def test_a_launch_uses_what_the_report_says(name: str) -> None:
    stage = LADDER[name]
    if reason := stage.why_not(head_dim=40, dtype=stage.dtypes[0]):
        pytest.skip(reason)
    defines = stage.defines(40)
    properties = cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)
    name = stage.kernel_name(stage.dtypes[0])
    arch = stage.architecture(10 * properties["major"] + properties["minor"])
    report = compile_report(stage.file, defines, arch, name=name)
    attributes = kernel.load(stage.file, name, defines=defines).attributes
    assert attributes["num_regs"] == report.registers
    assert attributes["shared_size_bytes"] == report.shared_bytes
    assert attributes["local_size_bytes"] == report.stack_bytes


# ---- compile_report itself

SPILLS = """
extern "C" __global__ void __launch_bounds__(1024) spills(const float* x, float* y) {
  float a[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) a[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 128; ++i) y[i * 1024 + threadIdx.x] = a[127 - i] * a[i];
}
"""
STACK = """
extern "C" __global__ void stack(const int* at, float* y, int n) {
  float a[100];
  for (int i = 0; i < n; ++i) a[at[i]] = i;
  y[0] = a[at[n]];
}
"""
TWO = """
namespace ours {
template <class T, int WORDS> __global__ void reverse(T* x) {
  __shared__ T s[WORDS];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s[WORDS - 1 - threadIdx.x];
}
}
__global__ void nothing() {}
"""
# The line of the failing assertion that d > 128, numbered as in the file.
ASSERTION = (kernel.KERNELS / "01_naive.cu").read_text().partition("static_assert")[0].count("\n") + 1


@needs_nvrtc
def test_spills_are_seen() -> None:
    report = compile_report(SPILLS, arch="sm_80")
    assert report.registers <= 64  # 65,536 registers of a multiprocessor for 1024 threads
    assert report.spill_bytes > 0 and report.stack_bytes > 0
    assert faults([report]) == [str(report)]
    assert re.fullmatch(
        r"spills for sm_80: \d+ registers, 0 bytes of shared memory, \d+ of spills, \d+ of stack", str(report)
    )


@needs_nvrtc
def test_an_array_outside_registers_is_seen() -> None:
    report = compile_report(STACK, arch="sm_80")
    assert (report.spill_bytes, report.stack_bytes) == (0, 400)
    assert faults([report])


@needs_nvrtc
def test_reports_are_kept_beside_the_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key contains all that a report depends on; a source that includes a file by its name is recompiled."""
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.h").write_text("constexpr int N = 64;\n")
    kernel_of = "__global__ void fill(float* x) { __shared__ float s[N]; s[threadIdx.x] = *x; *x = s[1]; }\n"
    plain, including = ("\n" + 'extern "C" ' + kernel_of, '#include "mine.h"\n' + 'extern "C" ' + kernel_of)
    compiled: list[tuple[Any, ...]] = []
    ask = reports._compile
    monkeypatch.setattr(reports, "_compile", lambda *what: compiled.append(what) or ask(*what))

    def shared_bytes(*what: Any) -> int:
        reports._compiled.cache_clear()  # as in another process
        return compile_report(*what).shared_bytes

    assert [shared_bytes(plain, {"N": 32}, "sm_80") for _ in range(2)] == [128, 128] and len(compiled) == 1
    assert shared_bytes(plain, {"N": 16}, "sm_80") == 64 and len(compiled) == 2
    shared_bytes(plain, {"N": 16}, "sm_90")
    assert len(compiled) == 3
    assert shared_bytes(including, None, "sm_80") == 256
    (tmp_path / "mine.h").write_text("constexpr int N = 8;\n")
    assert shared_bytes(including, None, "sm_80") == 32 and len(compiled) == 5


@needs_nvrtc
def test_shared_memory_of_an_instance() -> None:
    report = compile_report(TWO, arch="sm_90a", name="ours::reverse<double, 96>")
    assert report.shared_bytes == 8 * 96
    assert report.kernel == "ours::reverse<double, 96>" and report.arch == "sm_90a"
    assert compile_report(TWO, arch="sm_80", name="nothing").shared_bytes == 0


@needs_nvrtc
def test_one_compilation_tells_of_all_kernels_of_c_linkage() -> None:
    one = 'extern "C" __global__ void one(float* x) { *x = 1; }\n'
    other = 'extern "C" __global__ void other(float* x) { __shared__ float s[64]; s[*x > 0] = 1; *x = s[1]; }\n'
    before = reports._compiled.cache_info().misses
    both = [compile_report(one + other, arch="sm_90", name=name) for name in ("one", "other")]
    assert reports._compiled.cache_info().misses == before + 1
    assert both == [compile_report(code, arch="sm_90") for code in (one, other)]
    assert [report.shared_bytes for report in both] == [0, 256]


@needs_nvrtc
def test_defines_reach_the_compiler() -> None:
    sizes = {"HEAD_DIM": 8, "BLOCK_M": 32, "BLOCK_N": 4}
    assert compile_report("02_tiled.cu", sizes).shared_bytes == 4 * (32 * 9 + 2 * 4 * 8)
    assert compile_report("02_tiled.cu", {**sizes, "BLOCK_N": 8}).shared_bytes == 4 * (32 * 9 + 2 * 8 * 8)


@needs_nvrtc
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("00_none.cu",), FileNotFoundError, "no kernel file '00_none.cu' in kernels/; there are: 01_naive.cu"),
        (("01_naive.cu", None, "sm_10"), ValueError, "does not know arch='sm_10'; it knows sm_"),
        (("01_naive.cu", None, 90), ValueError, "does not know arch=90; it knows sm_"),
        ((TWO,), ValueError, "name= says which kernel is meant; the source has: reverse, nothing"),
        (("int a;\n",), ValueError, "name= says which kernel is meant; the source has: none"),
        (("01_naive.cu", {"HEAD_DIM": 129}), CompileError, f"01_naive.cu({ASSERTION}): error: static assertion failed"),
        ((STACK.replace("at[n]", "at[m]"),), CompileError, 'error: identifier "m" is undefined'),
    ],
    ids=["no such file", "old architecture", "not a name", "two kernels", "no kernel", "too large", "typing error"],
)
def test_errors(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        compile_report(*arguments)


@needs_nvrtc
@pytest.mark.parametrize("name", ["tiles", "ours::tiled<4>"])
def test_a_kernel_that_is_not_there(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"the source has no kernel {name!r}; its kernels: naive")):
        compile_report("01_naive.cu", name=name)


@pytest.fixture
def asked_anew() -> Any:
    """Forget nvrtc_version()'s cached answer before and after the test."""
    reports.nvrtc_version.cache_clear()
    yield
    reports.nvrtc_version.cache_clear()


def test_without_cupy(asked_anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(reports.NvrtcMissing, match=r"CuPy, which does not import .* pip install cupy-cuda12x"):
        compile_report("01_naive.cu")


@needs_nvrtc
def test_without_nvrtc(asked_anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy.cuda import nvrtc

    def fail() -> None:
        raise RuntimeError("CuPy failed to load libnvrtc.so.12")

    monkeypatch.setattr(nvrtc, "getVersion", fail)
    with pytest.raises(reports.NvrtcMissing, match=r"finds no NVRTC .*libnvrtc.so.12.* pip install 'nvidia-cuda-nvrtc"):
        compile_report("01_naive.cu")
