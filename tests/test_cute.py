"""12, the kernel in CuTe: where its headers come from, what it computes, planted bugs, and its record.

A build of 12 takes the CPU engine ten seconds and NVRTC thirty, so each serves as many tests as it can: bugs that need
no other types share one build, and a number on the device selects one.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest

from helpers import device, engine
from helpers.attention import compile_report, flash_attention_varlen, kernel
from helpers.attention.ladder import FORWARD, LADDER, default_of
from helpers.attention.ladder.stages.tensor_cores import mma_shared_bytes, pick_cute
from helpers.bench.cases import Case
from helpers.bench.results import NO_RECORD
from helpers.bench.studies import cute
from helpers.device import cp
from helpers.engine import nvrtc

STAGE = LADDER["flash_cute"]
TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
why_not = STAGE.why_not(head_dim=64, dtype="float16")
has_cute = pytest.mark.skipif(why_not is not None, reason=str(why_not))


def needs_cute(test: Any) -> Any:
    """Compiling CuTe takes seconds for each test."""
    return pytest.mark.exhaustive(has_cute(test))


HELLO = "#include <cute/layout.hpp>\n__global__ void hello(int* x) { *x = cute::make_layout(cute::_8{})(3); }\n"


@pytest.fixture
def looked_up_anew() -> object:
    """Forget, before and after, the folder of the headers, which a process caches."""
    nvrtc.cute_folder.cache_clear()
    yield
    nvrtc.cute_folder.cache_clear()


@pytest.mark.parametrize(("package", "below"), nvrtc.CUTE_FOLDERS.items())
def test_the_headers_are_found_and_nothing_is_imported(
    package: str, below: str, looked_up_anew: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / package / below
    with_headers(folder, "4, 5, 0")
    (tmp_path / package / "__init__.py").write_text("raise RuntimeError('this package is only looked up')")
    monkeypatch.delenv("CUTLASS_PATH", raising=False)
    monkeypatch.setattr(nvrtc, "CUTE_FOLDERS", {package: below})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, package, raising=False)
    assert nvrtc.cute_folder() == folder and nvrtc.cute_version() == "4.5.0"
    assert kernel.headers(HELLO)[0] == f"-I{folder}"
    assert package not in sys.modules


def test_a_clone_of_cutlass_comes_first(looked_up_anew: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_headers(tmp_path / "include", "4, 7, 1")
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path))
    assert nvrtc.cute_folder() == tmp_path / "include" and nvrtc.cute_version() == "4.7.1"


def with_headers(folder: Path, version: str) -> None:
    """Make a folder of headers of this version, laid out like CUTLASS."""
    for name in ("cute", "cutlass"):
        (folder / name).mkdir(parents=True)
    (folder / "cute" / "tensor.hpp").write_text("")
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split(", "), strict=True)
    text = "".join(f"#define CUTLASS_{part} {number}\n" for part, number in numbers)
    (folder / "cutlass" / "version.h").write_text(text)


def test_a_machine_without_the_headers_is_told_what_to_install(
    looked_up_anew: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delenv("CUTLASS_PATH", raising=False)
    with pytest.raises(nvrtc.CuteMissing, match=r"-m pip install --no-deps nvidia-cutlass==4\.2\.0\.0"):
        kernel.headers(HELLO)
    with pytest.raises(nvrtc.CuteMissing, match=r"includes <cute/\.\.\.>"):
        nvrtc.header_options(HELLO)
    assert kernel.headers("// <cute/tensor.hpp> in a comment\n__global__ void f() {}\n") == ()


def test_the_named_version_is_the_listed_one() -> None:
    text = (kernel.KERNELS.parent / "environment.yml").read_text()
    assert f"- {nvrtc.CUTLASS} " in text


# ---- the stage


def test_no_call_gets_it_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """07 computes the same, and compiles in a second."""
    for rows, dtype in ((16384, "float16"), (16384, "bfloat16"), (1, "float16")):
        chosen = default_of(FORWARD, rows, 32 * rows, head_dim=64, dtype=dtype)
        assert chosen is not None and chosen is not STAGE
    monkeypatch.setattr(nvrtc, "cute_folder", lambda: None)
    assert "pip install --no-deps nvidia-cutlass" in str(STAGE.why_not(head_dim=64, dtype="float16"))
    assert all("cutlass" not in str(s.why_not(head_dim=64)) for s in FORWARD.values() if s is not STAGE)


@pytest.mark.exhaustive(each_value=())
@pytest.mark.parametrize("limit", [99 * 1024, 163 * 1024, 227 * 1024])
def test_its_tiles_fit_and_are_copied_evenly(limit: int) -> None:
    """The kernel's assertions hold at all head dimensions."""
    for head_dim in range(8, 129, 8):
        sizes = pick_cute(head_dim, limit)
        padded = -(-head_dim // 16) * 16
        panel = next(columns for columns in (64, 32, 16) if padded % columns == 0)
        copied = 32 * sizes["WARPS"] // (panel // 8)
        assert sizes["BLOCK_M"] % copied == sizes["BLOCK_N"] % copied == 0, (head_dim, sizes)
        assert mma_shared_bytes({"HEAD_DIM": head_dim, **sizes}) <= limit
    with pytest.raises(ValueError, match="1 to 128"):
        pick_cute(136, limit)


# ---- what it computes


def inputs(n: int, n_kv: int, head_dim: int, dtype: str, *, grow: float = 1.0) -> list[np.ndarray]:
    """Make q (2, n, 4, head_dim) and k, v (2, n_kv, 2, head_dim) with non-zero means; logits are enlarged."""
    rng = np.random.default_rng([n, n_kv, head_dim])
    shapes = (2, n, 4, head_dim), *2 * ((2, n_kv, 2, head_dim),)
    q, k, v = (rng.standard_normal(shape) + 0.25 for shape in shapes)
    return [a.astype(TYPES[dtype]) for a in (q * grow**0.5, k * grow**0.5, v)]


OWN = 40, "bfloat16"
CAUSAL, WINDOW = {"causal": True}, {"window": (40, 9)}


@needs_cute
def test_sizes_masks_and_packed_lengths() -> None:
    """With its own choice of tiles, and a head dimension that fills no atom. Bugs are planted at another one."""
    head_dim, dtype = OWN
    sizes = STAGE.tiles(head_dim)
    for n, n_kv, mask in (
        *((1, 1, {}), (65, 131, {}), (128, 128, {}), (130, 70, CAUSAL), (150, 200, CAUSAL), (129, 200, WINDOW)),
        *((3, 300, {"window": (0, 0)}), (200, 100, {"window": (-1, 33), "softmax_scale": -0.3})),
    ):
        arrays = inputs(n, n_kv, head_dim, dtype)
        views = (cp.asarray(a).swapaxes(1, 2) for a in arrays)
        run, (o, lse) = STAGE.prepare(*views, return_lse=True, sizes=sizes, **mask)
        run()
        oracle.check_call(f"flash_cute, {n} x {n_kv}, {mask}", o, lse, *arrays, **mask)

    rows, keys = (3, 130, 0, 64), (150, 130, 5, 0)
    attend = partial(flash_attention_varlen, causal=True, return_lse=True, stage="flash_cute")
    packed = (a[0] for a in inputs(sum(rows), sum(keys), head_dim, dtype))
    oracle.check_packed("flash_cute", attend, *packed, (rows, keys), causal=True)


# ---- planted bugs


@dataclass(frozen=True)
class Switched:
    """A bug that is active while the device's number `planted` is its own: the old text, and the new one.

    In `new`, PLANTED tells whether it is active. cpu_only: it would leave a GPU's context unusable, or shows there only
    by luck.
    """

    name: str
    old: str
    new: str
    cpu_only: bool = False


def instead(name: str, right: str, wrong: str, **more: Any) -> Switched:
    """Replace an expression."""
    return Switched(name, right, f"(PLANTED ? ({wrong}) : ({right}))", **more)


def left_out(name: str, statement: str, **more: Any) -> Switched:
    """Leave out a statement."""
    return Switched(name, statement, f"if (!PLANTED) {statement}", **more)


BUGS = (
    instead("full tiles end late", "first + BLOCK_N > min(first_row + window.hi + 1, end)", "first > end"),
    instead("full for the first row is full for all", "first < last_row + window.lo", "first < first_row + window.lo"),
    instead(
        "begins where the last row does",
        "max(first_pos - params.window_left, 0)",
        "max(last_pos - params.window_left, 0)",
    ),
    instead("ends where the first row does", "last_pos + params.window_right", "first_pos + params.window_right"),
    instead("wrong head of K and V", "head / (params.heads / params.kv_heads)", "head % params.kv_heads"),
    Switched(
        "no maximum for rows that see nothing",
        "maxima.limit[i] = M_INIT",
        "maxima.limit[i] = PLANTED ? NEG_INF : M_INIT",
    ),
    instead("division by zero", "sum == 0.0f", "false"),
    instead("lse in units of log2", "LN_2 * (m_i + log2f(sum))", "m_i + log2f(sum)"),
    instead("lse of another row", "lse[head_row + first_row + r]", "lse[head_row + first_row + (r ^ 1)]"),
    instead("m_i is never updated", "m_new[i] > maxima.limit[i]", "maxima.limit[i] == M_INIT"),
    left_out("l_i is not rescaled", "l_i[i] *= rescale;"),
    left_out("half of acc is not rescaled", "row_pair(acc, i, n)[1] *= rescale;"),
    instead(
        "sums of two lanes out of four",
        "row_allreduce(l_i[i], [](float a, float b) { return a + b; })",
        "l_i[i] + __shfl_xor_sync(0xffffffff, l_i[i], 1)",
    ),
    instead("one of two neighbours twice", "&rows(i, 2 * n)", "&rows(i, 2 * n - n % 2)"),
    Switched("a key too many", "end - first, window.lo, window.hi)", "end - first, window.lo, window.hi + PLANTED)"),
    instead("a key past the end", "end - key", "BLOCK_N"),
    instead("a key too few", "keys_before<BLOCK_N>(row + window_lo)", "keys_before<BLOCK_N>(row + window_lo + 1)"),
    instead("bits of a thread's second keys", "min(keys % 8, 2)", "min(keys % 8, 1)"),
    instead("registers of P exchanged", "4 * k + i / 2 * 2", "4 * k + i % 2 * 2"),
    instead("row halves of P exchanged", "2 * m + i % 2", "2 * m + i / 2"),
    Switched("always the first half of V_smem", "tOsVt(_, _, k, stage)", "tOsVt(_, _, k, PLANTED ? 0 : stage)"),
    Switched("columns of Q in another order", "tSsQ(_, _, k)", "tSsQ(_, _, PLANTED ? k ^ 1 : k)"),
    Switched(
        "no wait for the copies",
        "    cp_async_wait<0>();\n    __syncthreads();",
        "    if (!PLANTED) cp_async_wait<0>();\n    __syncthreads();",
        cpu_only=True,
    ),
    left_out("no barrier in the loop", "__syncthreads();  // hazard: a tile", cpu_only=True),
    Switched(
        "the next tile overwrites this one",
        "tKsK(_, _, _, stage ^ 1)",
        "tKsK(_, _, _, PLANTED ? stage : stage ^ 1)",
        cpu_only=True,
    ),
    instead("rows past the end are read", "further < rows_left - row", "true", cpu_only=True),
    instead(
        "rows are compared as unsigned numbers",
        "further < rows_left - row",
        "unsigned(further) < unsigned(rows_left - row)",
        cpu_only=True,
    ),
)
SQUARE = {"BLOCK_M": 64, "BLOCK_N": 64}
CALLS: tuple[dict[str, Any], ...] = (
    {"n": 150, "n_kv": 200, "window": (90, 90)},
    {"n": 200, "n_kv": 130, "causal": True, "softmax_scale": -0.2},  # some rows see nothing
    {"n": 40, "n_kv": 300, "grow": 400.0},
)


def with_switches() -> str:
    """Return 12 with all bugs, none of which is active while the device's `planted` is 0."""
    text = kernel.source(STAGE.file)
    for number, bug in enumerate(BUGS, start=1):
        assert text.count(bug.old) == 1, f"rewrite the bug {bug.name!r}: found {text.count(bug.old)} times: {bug.old!r}"
        text = text.replace(bug.old, bug.new.replace("PLANTED", f"(planted == {number})"))
    return f"__device__ int planted;\n{text}"


def check_planted(text: str, number: int) -> None:
    """Check a few calls with one bug, or with none: shared K and V, tails, masks, large logits."""
    for call in CALLS:
        options = dict(call)
        arrays = inputs(options.pop("n"), options.pop("n_kv"), 128, "float16", grow=options.pop("grow", 1.0))
        views = (device.cp.asarray(a).swapaxes(1, 2) for a in arrays)
        ready, by_name, (o, lse) = STAGE.plan(*views, return_lse=True, source=text, sizes=SQUARE, **options)
        ((launch, compiled, args),) = ready.resolve_arguments(by_name)
        planted = device.cp.ndarray((1,), np.int32, compiled.module.get_global("planted"))
        planted[...] = number
        compiled(launch.grid, launch.block, args, shared_mem=launch.shared_bytes)
        oracle.check_call(f"planted {number}, {call}", o, lse, *arrays, **options)


@needs_cute
def test_without_a_bug() -> None:
    check_planted(with_switches(), 0)


@pytest.mark.exhaustive(one_of_each=lambda bug: bug.cpu_only)
@needs_cute
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_is_seen(bug: Switched, request: pytest.FixtureRequest) -> None:
    if bug.cpu_only:
        request.getfixturevalue("cpu_engine")
    text = with_switches()
    with pytest.raises((AssertionError, engine.LaunchError)):
        check_planted(text, BUGS.index(bug) + 1)


# ---- the record


@needs_cute
@pytest.mark.skipif(device.ON_GPU, reason="on a GPU the record itself checks and times them")
def test_ways_are_checked_and_timed(cpu_engine: None) -> None:
    """07 and 12 on the CPU engine, with another test's build; a wrong result is not timed."""
    case = Case((1, 2, 70, OWN[0]), "bfloat16", causal=True)
    rows = [row for rows in cute.timed([case], [cute.COMPARED_WITH, cute.Way("12", STAGE)], rounds=1) for row in rows]
    assert [row["name"] for row in rows] == ["07", "12"] and rows[0]["speed"] == 1
    assert all(row["max_error"] <= row["tolerance"] and row["ms"] > 0 and row["tflops"] > 0 for row in rows)
    idle = dataclasses.replace(LADDER["flash_mma"], launches=lambda *_: [])
    with pytest.raises(AssertionError, match=r"wrong at 1x2x70x40 bfloat16 causal: max error nan > "):
        list(cute.timed([case], [cute.COMPARED_WITH, cute.Way("wrong", idle)], rounds=1))


def test_the_ways_differ_by_kernel_and_tile() -> None:
    names = [way.name for way in cute.WAYS]
    assert names[0] == cute.COMPARED_WITH.name and len(set(names)) == len(names)
    for head_dim in cute.HEAD_DIMS:
        own = {way.name: way.defines(head_dim) for way in cute.WAYS}
        assert own["12"] == own["07"] == own["12, first step"], "the same tiles, so that what differs is the code"
        assert (own["12, 64 x 64"]["BLOCK_M"], own["12, 64 x 64"]["BLOCK_N"]) == (64, 64)


def test_lines_of_code() -> None:
    seven, twelve = cute.lines("07_mma.cu"), cute.lines("12_cute.cu")
    text = (kernel.KERNELS / "07_mma.cu").read_text() + (kernel.KERNELS / "ptx.cuh").read_text()
    assert seven["all"] == text.count("\n")
    assert 0 < twelve["code"] < seven["code"] < seven["all"]


@pytest.mark.skipif(nvrtc.version() is None, reason="NVRTC is not installed")
def test_a_cold_compilation() -> None:
    """Compiling 07, which is quick, gives the figures of the compile report."""
    found = cute.cold(cute.COMPARED_WITH, 64)
    report = compile_report.compile_report("07_mma.cu", found["sizes"], "sm_90", name="flash_mma<__nv_bfloat16>")
    assert (found["registers"], found["spill_bytes"]) == (report.registers, report.spill_bytes)
    assert found["seconds"] > 0 and found["cubin_bytes"] > 10_000
    assert (found["loop"] is None) == (shutil.which("nvdisasm") is None)


def test_a_record_as_text() -> None:
    compiled = {"name": "12", "file": "12_cute.cu", "head_dim": 64, "sizes": {}, "seconds": 20.04, "registers": 255}
    compiled |= {"spill_bytes": 0, "instructions": None, "loop": 1096, "opcodes": {"IMAD": 3, "HMMA": 9, "UIADD3": 2}}
    timed = {"shape": [4, 32, 4096, 64], "causal": True, "name": "12", "ms": 2.0, "tflops": 333.3, "speed": 0.985}
    record = {
        "device": "a GPU",
        "how": {"nvrtc": "13.0", "architecture": "sm_90", "processes": 3, "machine": "a CPU"},
        "compiled": [compiled],
        "timed": [{**timed, "extra_bytes": 3 << 20}, {**timed, "causal": False, "extra_bytes": None}],
    }
    text = cute.table(record)
    assert re.search(r"d =  64, N =  4096, causal +333  0\.98×|333  0\.99×", text)
    assert re.search(rf"d =  64, 12 +{cute.lines('12_cute.cu')['code']} +20\.0 +255 +0 +1096 +5\b", text)
    assert "a CPU" in text and "a GPU" in text


def test_without_a_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cute, "recorded", lambda: None)
    assert cute.table() == cute.times_table() == cute.memory_table() == cute.compiled_table() == NO_RECORD
    assert cute.row("12", 4096, 64) is None and cute.compiled_row("12", 64) is None


@pytest.mark.skipif(cute.recorded() is None, reason="nothing is recorded")
def test_the_record_holds_what_was_promised() -> None:
    """At N = 4096 and 16384, 12 with 07's tiles is at least 0.95 times as fast as 07."""
    for n in (4096, 16384):
        for head_dim in cute.HEAD_DIMS:
            for causal in (False, True):
                found = cute.row("12", n, head_dim, causal=causal)
                assert found is not None and found["speed"] >= 0.95, found
