"""The climbs: every step is a working kernel, and differs from the previous one by one lesson.

A new climb is tested by its entry in CLIMBS.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import oracle
import pytest
from backends import assert_clean, needs_nvrtc
from half_gradients import check as check_gradients
from half_gradients import check_packed, gradients, inputs
from half_gradients import compare as compare_gradients
from half_gradients import reference as exact_gradients

from helpers.attention import check, kernel, reference
from helpers.attention import compile_report as reports
from helpers.attention.decoders import DECODERS
from helpers.attention.ladder import LADDER, Stage
from helpers.attention.ladder.steps import (
    BASES,
    BEFORE,
    CLIMBS,
    FP8_CODES,
    MULTICAST,
    ROTATION_IN_LOAD,
    files,
)
from helpers.bench import reading, records
from helpers.bench.steps import RENAMED
from helpers.device import cp
from helpers.xray import xray

MOST_NEW_LINES = 90  # of a step, relative to the previous one
MOST_LINES = 255
# Bytes of spills on sm_90: for 06_01 at its usual head dimension, for the steps to 07, 15 and 16 only at 128.
SPILLS = {
    "steps/06_01_row_per_lane.cu": 120,
    "steps/07_09_wider_tiles.cu": 720,
    "steps/07_10_swizzle.cu": 424,
    "steps/07_11_double_buffering.cu": 192,
    "steps/07_12_addresses_by_xor.cu": 176,
    "steps/07_13_addresses_of_copies.cu": 80,
    "steps/07_16_lazy_rescale.cu": 16,
    "steps/15_04_four_neighbours.cu": 28,
    "steps/16_01_one_level.cu": 16,
    "steps/16_02_two_levels.cu": 112,
    "steps/16_03_codes.cu": 28,
    "steps/16_05_row_of_ones.cu": 88,
    "steps/16_06_quarters.cu": 88,
}
SPILLS_ON_SM_80 = {"steps/15_04_four_neighbours.cu": 60}
# The last one of a climb is a stage, and tested as such.
STEPS = [
    *(step for climb in CLIMBS.values() for step in climb[:-1]),
    *BASES.values(),
    FP8_CODES,
    MULTICAST,
]
MOST_SPILLS = 120  # for the steps to 08, with other versions of NVRTC and on sm_80, with an H200's tiles
FORWARD_STEPS = [step for step in STEPS if step.direction == "forward"]
FLOAT_STEPS = [step for step in FORWARD_STEPS if "strides" not in step.features]
HALF_STEPS = [step for step in FORWARD_STEPS if "strides" in step.features]  # and those to 15, in float32
BACKWARD_STEPS = [step for step in STEPS if step.direction == "backward"]
BACKWARD_STEPS_BY_MMA = [step for step in BACKWARD_STEPS if not step.only_cc]
# Of the steps in CuTe, whose builds take up to half a minute: the one that is compiled for a GPU and X-rayed.
IN_CUTE = "steps/12_03_tiled_copy.cu"


def every(steps: Iterable[Stage], *, one_in_cute: bool = False) -> pytest.MarkDecorator:
    """Mark a test of each of these steps; those in CuTe are not in the fast run. one_in_cute: only IN_CUTE of them."""
    params = [
        pytest.param(step, marks=[pytest.mark.exhaustive] * step.slow_to_compile)
        for step in steps
        if not one_in_cute or not step.slow_to_compile or step.file == IN_CUTE
    ]
    return pytest.mark.parametrize("step", params, ids=lambda step: step.file.removeprefix("steps/"))


every_float_step, every_half_step, every_backward_step = map(every, (FLOAT_STEPS, HALF_STEPS, BACKWARD_STEPS))
# Sizes for one or two warps, for each set of macros that a step may have.
SMALL: dict[frozenset[str], dict[str, int]] = {
    frozenset(sizes): sizes
    for sizes in (
        {"BLOCK_M": 32, "BLOCK_N": 8},
        {"BLOCK_M": 64, "BLOCK_N": 8, "THREADS": 32},
        {"BLOCK_M": 16, "BLOCK_N": 16, "THREADS": 32, "THREADS_X": 8},
        {"BLOCK_M": 64, "BLOCK_N": 32, "MIN_BLOCKS": 1},
        {"BLOCK_M": 32, "BLOCK_N": 32, "WARPS": 2, "MIN_BLOCKS": 1},
        {"BLOCK_M": 128, "BLOCK_N": 32, "STAGES": 2},  # two warpgroups is the minimum
    )
}


@pytest.fixture(autouse=True)
def _what_a_step_includes(request: pytest.FixtureRequest) -> None:
    step = getattr(request.node, "callspec", None) and request.node.callspec.params.get("step")
    if step and (reason := step.unavailable()):
        pytest.skip(reason)


def new_lines(before: str, after: str) -> int:
    """Return a file's lines that the previous one lacks, including comments. A line may have moved to the right."""
    texts = ((kernel.KERNELS / file).read_text().splitlines() for file in (before, after))
    a, b = ([line.strip() for line in lines] for lines in texts)
    opcodes = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    return sum(j_end - j for tag, _, _, j, j_end in opcodes if tag != "equal")


def test_new_lines_are_counted(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "KERNELS", tmp_path)
    (tmp_path / "a.cu").write_text("one\ntwo\nthree\ngone\n")
    (tmp_path / "b.cu").write_text("one\n2\nthree\nfour\nfive\n")
    assert new_lines("a.cu", "b.cu") == 3
    assert new_lines("a.cu", "a.cu") == 0


@pytest.mark.parametrize("name", CLIMBS)
def test_a_climb_ends_at_its_stage(name: str) -> None:
    assert CLIMBS[name][-1] is LADDER[name]
    assert CLIMBS.keys() == BEFORE.keys()
    for step in CLIMBS[name]:
        assert (step.name, step.number) == (name, LADDER[name].number)
    ideas = [step.idea for step in CLIMBS[name]]
    assert len(set(ideas)) == len(ideas)


def test_every_file_is_a_step() -> None:
    paths = (kernel.KERNELS / "steps").glob("*.cu")
    assert {path.relative_to(kernel.KERNELS).as_posix() for path in paths} == {
        step.file for step in (*STEPS, ROTATION_IN_LOAD, *DECODERS.values()) if step.file.startswith("steps/")
    }


@pytest.mark.parametrize("name", CLIMBS)
def test_a_climb_begins_at_a_stage_or_anew(name: str) -> None:
    stages = [stage.file for stage in LADDER.values()]
    assert BEFORE[name] in (*stages, CLIMBS[name][0].file, *(base.file for of, base in BASES.items() if of == name))


@pytest.mark.parametrize("name", [*CLIMBS, "split_kv"])
def test_each_step_is_small(name: str) -> None:
    chain = files(name) if name in CLIMBS else [decoder.file for decoder in DECODERS.values()]
    counts = {after: new_lines(before, after) for before, after in pairwise(chain)}
    assert all(0 < count <= MOST_NEW_LINES for count in counts.values()), counts


def test_every_step_is_recorded_or_shown() -> None:
    """A file that no notebook names, and that no record has a time for, teaches nobody."""
    rows = [row for record in (reading.recorded(), reading.in_turns()) for row in record["results"]]
    recorded = {
        (r["name"].partition(": ")[0], RENAMED.get((r["name"].partition(": ")[0], r["idea"]), r["idea"])) for r in rows
    }
    written = {int(path.name[:2]) for path in (kernel.KERNELS.parent / "notebooks").glob("[0-9]*.ipynb")}
    unrecorded = [step.file for step in STEPS if (step.name, step.idea) not in recorded and step.number in written]
    of_decoding = {row["name"] for row in records.load(records.MEASURED / "nvidia-h200-decoding.json")["rows"]}
    unrecorded += [decoder.file for name, decoder in DECODERS.items() if name not in of_decoding]
    notebooks = "".join(path.read_text() for path in (kernel.KERNELS.parent / "notebooks").glob("*.ipynb"))
    notebooks += "".join(base.file for base in BASES.values())  # the bases that first steps are compared with
    assert [file for file in unrecorded if file not in notebooks] == []
    assert unrecorded


@pytest.mark.parametrize("file", [file for file in BEFORE.values() if file.startswith("steps/")])
def test_a_climb_begins_anew_with_a_short_file(file: str) -> None:
    assert len((kernel.KERNELS / file).read_text().splitlines()) <= MOST_LINES


def compiled(step: Stage, head_dim: int, arch: str) -> reports.CompileReport:
    """Compile with NVRTC, and check that a block declares the shared memory that its launch gives it.

    Gradients on sm_90 are compiled for the measured type: bfloat16.
    """
    defines = step.defines(head_dim)
    code = kernel.source(step.file)
    texts = {
        "struct __align__(16) Shared": "sizeof(Shared)",
        "template <typename T>\nstruct __align__(16) Shared": "sizeof(Shared<__half>)",
        "constexpr int SHARED_BYTES": "SHARED_BYTES",
        "constexpr unsigned SHARED_BYTES": "SHARED_BYTES",
    }
    declared = [size for text, size in texts.items() if text in code][-1:]
    for size in declared:
        code += f'static_assert({size} == {step.shared_bytes(defines)}, "helpers/attention/ladder/steps.py differs");\n'
    dtype = "bfloat16" if step.direction == "backward" and arch.startswith("sm_90") else step.dtypes[0]
    return reports.compile_report(code, defines, arch, name=step.kernel_name(dtype))


@pytest.mark.exhaustive
@needs_nvrtc
@every(STEPS, one_in_cute=True)
def test_registers_and_shared_memory(step: Stage) -> None:
    """A step spills only where its header says so, and the launch gives a block the shared memory that it declares.

    On sm_90 the steps to 07 and 08 have a head dimension of 128, where registers are scarcest. Those to 10 and 13,
    which run only there, also have one of 64, with more warpgroups or rows. Every third is compiled for sm_80 as well,
    unless that is slow.
    """
    for cc, head_dim in ((80, 64), (90, 128 if step.number >= 7 else 64), *[(90, 64)] * step.only_cc):
        if cc < step.min_cc or (cc == 80 and (step.slow_to_compile or STEPS.index(step) % 3)):
            continue
        report = compiled(step, head_dim, step.architecture(cc))
        assert not report.warnings, report
        if step in BACKWARD_STEPS_BY_MMA:
            assert report.spill_bytes <= MOST_SPILLS, report
        else:
            spills = {} if step.only_cc and head_dim == 64 else SPILLS if cc == 90 else SPILLS_ON_SM_80
            assert report.spill_bytes == spills.get(step.file, 0), report
        assert bool(report.stack_bytes) == bool(report.spill_bytes), report


@pytest.mark.exhaustive
@needs_nvrtc
@every(BACKWARD_STEPS_BY_MMA)
def test_spills_are_those_of_the_header(step: Stage) -> None:
    """On sm_90 at both head dimensions that are measured."""
    said = re.search(r"// Spills   by NVRTC (\d+)\.(\d+) for sm_90: (.*)", kernel.source(step.file))
    if reports.nvrtc_version() != (int(said[1]), int(said[2])):
        pytest.skip(f"the header speaks of NVRTC {said[1]}.{said[2]}, here is {reports.nvrtc_version()}")
    found = {head_dim: compiled(step, head_dim, "sm_90").spill_bytes for head_dim in (64, 128)}
    told = [f"{found[64]} bytes at HEAD_DIM = 64"] * bool(found[64])
    told += [f"{found[128]} at 128" if told else f"{found[128]} bytes at HEAD_DIM = 128"] * bool(found[128])
    assert said[3] == (", ".join(told) or "none")


@pytest.mark.exhaustive(one_of_each=lambda step: step.number)
@every_float_step
def test_output(step: Stage) -> None:
    """Sizes around those of the tiles; head dimensions that fill no float4 or no row of threads, and usual ones.

    Each is a compilation, so neighbouring steps, which differ little, alternate: (3, 128) and (40, 64).
    """
    for head_dim in ((3, 128), (40, 64))[STEPS.index(step) % 2]:
        for n, n_kv in ((1, 1), (65, 131), (130, 17)):
            heads = [check.make_inputs(n, n_kv, head_dim, seed=seed) for seed in (0, 1)]
            q, k, v = (np.stack(pair) for pair in zip(*heads, strict=True))
            title = f"{step.file}, N = {n}, N_kv = {n_kv}, head_dim = {head_dim}"
            check.check(title, step(q, k, v), reference.attention(q, k, v))


@pytest.mark.exhaustive(one_of_each=lambda step: step.number)
@pytest.mark.usefixtures("only_x_rayed")
@every_float_step
def test_xray_is_clean(step: Stage) -> None:
    """No race, no access out of bounds, no unwritten word."""
    head_dim = 12
    usual = step.tiles(head_dim)
    sizes = {"HEAD_DIM": head_dim, **SMALL[frozenset(usual)]}
    n, n_kv = sizes["BLOCK_M"] + 1, 2 * sizes["BLOCK_N"] + 3
    q, k, v = (cp.asarray(np.stack([a, a])) for a in check.make_inputs(n, n_kv, head_dim))
    o = cp.full(q.shape, cp.nan, dtype=q.dtype)
    loaded = kernel.load(step.file, step.kernel_name(), defines=sizes)
    args = (q, k, v, o, cp.int32(n), cp.int32(n_kv), cp.float32(0.3))
    assert_clean(loaded, (2, 2), (step.threads(sizes),), args, step.shared_bytes(sizes))
    check.check(step.file, o, reference.attention(*map(cp.asnumpy, (q, k, v)), softmax_scale=0.3))


# ---- half types


def type_of(step: Stage, dtype: str) -> str:
    """Return the half type, or float32 if a step takes that."""
    return dtype if dtype in step.dtypes else step.dtypes[0]


def head_dim_of(step: Stage, usual: int) -> int:
    """Return the usual head dimension, or the next one that the step takes."""
    return usual + -usual % step.head_dim_step


def half_inputs(n: int, n_kv: int, head_dim: int, dtype: str, *, batch: int = 1, heads: int = 4) -> list[np.ndarray]:
    """Make q (batch, n, heads, head_dim) and k, v (batch, n_kv, heads / 2, head_dim)."""
    shapes = (batch, n, heads, head_dim), *2 * ((batch, n_kv, heads // 2, head_dim),)
    rng = np.random.default_rng([n, n_kv, head_dim])
    return [check.in_type((rng.standard_normal(shape) + 0.25).astype(np.float32), dtype) for shape in shapes]


LOAD_ALL = kernel.load_all
LAST_INCLUDE = '#include "mma_tiles.cuh"'  # of the steps in CuTe: the code after it is their own


@functools.lru_cache
def built_together(instance: str, sizes: tuple[tuple[str, int], ...]) -> dict[str, kernel.Kernel]:
    """Return the instance of each step in CuTe by its file, from one build, each in its own namespace.

    Most of a build is CuTe's templates, which the steps share: 13 s of CPU time instead of 40.
    """
    steps = [step for step in HALF_STEPS if step.slow_to_compile]
    heads, bodies = [], []
    for number, step in enumerate(steps):
        head, _, own = (kernel.KERNELS / step.file).read_text().partition(LAST_INCLUDE)
        line = head.count("\n") + 1
        heads.append(head)
        bodies.append(f'namespace step_{number} {{\n#line {line} "{step.file}"\n{own}\n}}\n')
    assert len({tuple(re.findall(r"^#include .*", head, re.M)) for head in heads}) == 1
    # The last one also declares how its header finds two neighbours in a CuTe tensor.
    code = kernel.with_headers(f"{heads[-1]}{LAST_INCLUDE}\n{''.join(bodies)}", "the steps in CuTe")
    names = {step.file: f"step_{number}::{instance}" for number, step in enumerate(steps)}
    loaded = LOAD_ALL(code, tuple(names.values()), defines=dict(sizes))
    return {file: loaded[name] for file, name in names.items()}


@pytest.fixture
def one_build_in_cute(step: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use `built_together` for a step in CuTe."""

    def load(file: str, names: tuple[str, ...], *, defines: dict[str, int]) -> dict[str, kernel.Kernel]:
        return {name: built_together(name, tuple(defines.items()))[file] for name in names}

    if step.slow_to_compile:
        monkeypatch.setattr(kernel, "load_all", load)


@pytest.mark.exhaustive(one_of_each=lambda step: step.number)
@pytest.mark.usefixtures("one_build_in_cute")
@every_half_step
def test_output_in_half_types(step: Stage) -> None:
    """Tails, shared heads, masks with rows that see nothing, views of (batch, seq, heads, head_dim), packed lengths.

    Each head dimension and type is a compilation, so neighbouring steps alternate; those in CuTe have one. Larger
    scores have one batch and two heads, because offsets of batches and heads do not depend on the lengths.
    """
    head_dim, dtype = ((72, "float16"), (64, "bfloat16"))[HALF_STEPS.index(step) % 2]
    if step.slow_to_compile:
        head_dim, dtype = 72, "bfloat16"
    head_dim, dtype = head_dim_of(step, head_dim), type_of(step, dtype)
    causal, window = {"causal": True}, {"window": (40, 9)}
    sizes = step.tiles(head_dim)  # otherwise packed sequences, which have more blocks, might get others
    for n, n_kv, mask in ((1, 1, {}), (65, 131, {}), (130, 70, causal), (150, 200, causal), (129, 200, window)):
        many = {"batch": 2, "heads": 4} if n * n_kv < 9_000 else {"batch": 1, "heads": 2}
        arrays = half_inputs(n, n_kv, head_dim, dtype, **many)
        views = (cp.asarray(a).swapaxes(1, 2) for a in arrays)
        run, (o, lse) = step.prepare(*views, return_lse=True, sizes=sizes, **mask)
        run()
        oracle.check_call(f"{step.file}, {n} x {n_kv}, {mask}", o, lse, *arrays, **mask)

    if "varlen" not in step.features:
        return
    rows, keys = (3, 130, 0, 64), (150, 130, 5, 0)

    def attend(q: Any, k: Any, v: Any, *cu: Any) -> tuple[Any, Any]:
        packed = (cp.asarray(a).swapaxes(0, 1) for a in (q, k, v))
        run, (o, lse) = step.prepare(*packed, causal=True, return_lse=True, cu_seqlens=cu, sizes=sizes)
        run()
        return o.swapaxes(0, 1), lse

    packed = (a[0] for a in half_inputs(sum(rows), sum(keys), head_dim, dtype, heads=2))
    oracle.check_packed(step.file, attend, *packed, (rows, keys), causal=True)


@pytest.mark.exhaustive(one_of_each=lambda step: step.number)
@pytest.mark.usefixtures("only_x_rayed")
@every(HALF_STEPS, one_in_cute=True)
def test_xray_is_clean_in_half_types(step: Stage) -> None:
    """No race, no access out of bounds, no unwritten word; a head dimension that fills no fragment."""
    head_dim = head_dim_of(step, 24)
    sizes = SMALL[frozenset(step.tiles(head_dim)) | ({"STAGES"} if step.only_cc else set())]
    arrays = half_inputs(sizes["BLOCK_M"] + 1, 2 * sizes["BLOCK_N"] + 3, head_dim, type_of(step, "float16"))
    views = (cp.asarray(a).swapaxes(1, 2) for a in arrays)
    with kernel.launches_replaced(assert_clean):
        run, (o, lse) = step.prepare(*views, causal=True, return_lse=True, sizes=sizes)
        run()
    oracle.check_call(step.file, o, lse, *arrays, causal=True)


# ---- gradients

# A few rows and keys per block: with 4 warps along the keys and all rows in each, and with 2 warps that share keys.
_NAMES = ("BLOCK_M", "BLOCK_N", "WARPS", "WARPS_KEYS", "WARPS_DKV", "WARPS_DQ", "SLICE_M", "MIN_BLOCKS")
OWN_KEYS = dict(zip(_NAMES, (32, 64, 4, 4, 4, 2, 16, 1), strict=True))
SHARED_KEYS = dict(zip(_NAMES, (32, 64, 4, 2, 2, 2, 16, 1), strict=True))
# Sizes for the steps to hopper, instead of its own: half as many rows per tile as at head_dim 128, and as many.
FEW_ROWS, USUAL_ROWS = {"BLOCK_M": 32, "BLOCK_N": 128}, {"BLOCK_M": 64, "BLOCK_N": 128}


def small(step: Stage, tiling: dict[str, int]) -> dict[str, int]:
    """Return a step's value for one of the two tilings."""
    if step in BACKWARD_STEPS_BY_MMA:
        return tiling
    if reason := step.why_not(head_dim=64, dtype="bfloat16"):
        pytest.skip(reason)
    return FEW_ROWS if tiling is OWN_KEYS else USUAL_ROWS


def ways(step: Stage) -> list[dict[str, int]]:
    """Return the macros of a step's variants for gradients."""
    return [{}, {"DETERMINISTIC": 1}] if "deterministic" in step.features else [{}]


@pytest.mark.exhaustive(one_of_each=lambda step: step.number)
@every_backward_step
def test_gradients(step: Stage) -> None:
    """Tails, shared heads, masks with rows and keys that see nothing, in float16.

    Each tiling is a compilation, so neighbouring steps alternate; the X-ray has the other one. With a mask there is one
    batch of two heads, because offsets of batches and heads do not depend on it.
    """
    sizes = small(step, (SHARED_KEYS, OWN_KEYS)[BACKWARD_STEPS.index(step) % 2])
    every_key, causal, window = (-1, -1), (-1, 0), (40, 9)
    cases = (1, 1, every_key), (65, 131, every_key), (130, 70, causal), (50, 200, causal), (129, 200, window)
    for way in ways(step):
        for n, n_kv, mask in cases:
            batch, heads = (2, 4) if mask == every_key else (1, 2)
            given = inputs((batch, heads, n, 72), n_kv, heads // 2, "float16")
            title = f"{step.file}, {n} x {n_kv}, window {mask}, {way}"
            check_gradients(step, title, {**sizes, **way}, given, window=mask)


@pytest.mark.exhaustive(one_of_each=lambda step: step.number)
@every_backward_step
def test_gradients_with_its_own_sizes(step: Stage) -> None:
    """The tiles that a launch has at head_dim 128, in bfloat16.

    K and V as slices of one array, (batch, seq, heads, head_dim); packed lengths.
    """
    head_dim = 128
    if reason := step.why_not(head_dim=head_dim, dtype="bfloat16"):
        pytest.skip(reason)
    do, q, k, v = inputs((1, 2, 150, head_dim), 200, 1, "bfloat16")
    *_, o, lse = exact_gradients(do, q, k, v, window=(-1, 0))
    both = cp.asarray(np.ascontiguousarray(np.concatenate([k, v], axis=-1).swapaxes(1, 2))).swapaxes(1, 2)
    arrays = [cp.asarray(np.ascontiguousarray(a.swapaxes(1, 2))).swapaxes(1, 2) for a in (do, q, o.astype(q.dtype))]
    views = *arrays[:2], both[..., :head_dim], both[..., head_dim:], arrays[2], cp.asarray(lse.astype(np.float32))
    found = gradients(step, *views, step.tiles(head_dim), window=(-1, 0))
    compare_gradients(step.file, found, (do, q, k, v), window=(-1, 0))
    check_packed(step, {**step.tiles(head_dim), **ways(step)[-1]}, (3, 130, 0, 64), (150, 130, 5, 0), head_dim)


@pytest.mark.exhaustive(one_of_each=lambda step: step.number)
@pytest.mark.usefixtures("only_x_rayed")
@every_backward_step
def test_xray_of_gradients_is_clean(step: Stage) -> None:
    """No race, no access out of bounds, no unwritten word, no bank conflict; heads share K and V.

    Neighbouring steps alternate between the two tilings.
    """
    sizes = small(step, (OWN_KEYS, SHARED_KEYS)[BACKWARD_STEPS.index(step) % 2])

    def looked_at(kernel: Any, grid: Any, block: Any, args: Any, shared_mem: int = 0) -> None:
        report = xray(kernel, grid, block, args, shared_mem)
        report.assert_clean()
        assert not any(figures.conflicts for figures in report.shared.values()), report.summary()

    for way in ways(step):
        given = inputs((1, 2, 70, 64), 100, 1, "bfloat16")
        check_gradients(step, step.file, {**sizes, **way}, given, window=(-1, 0), launch=looked_at)


def test_only_the_steps_with_turns_are_deterministic() -> None:
    able = [step for step in BACKWARD_STEPS if step.why_not(head_dim=64, dtype="bfloat16", deterministic=True) is None]
    assert [step.file for step in able] == ["steps/08_18_turns.cu"]
    refused = BACKWARD_STEPS[0].why_not(head_dim=64, dtype="bfloat16", deterministic=True)
    assert refused == "it has no deterministic=True"


def test_turns_give_the_same_bits() -> None:
    """Whatever the order of the blocks; and each tile of keys has had its turn at each tile of dQ."""
    step = BACKWARD_STEPS_BY_MMA[-1]
    do, q, k, v = inputs((1, 2, 200, 64), 300, 1, "float16")
    *_, o, lse = exact_gradients(do, q, k, v)
    arrays = [cp.asarray(a) for a in (do, q, k, v, o.astype(np.float16), lse.astype(np.float32))]
    turns = []

    def launch(kernel: Any, grid: Any, block: Any, args: Any, shared_mem: int = 0) -> None:
        kernel(grid, block, args, shared_mem=shared_mem)
        turns.extend(cp.asnumpy(a) for a in args if getattr(a, "dtype", None) == np.int32)

    sizes = {**OWN_KEYS, "DETERMINISTIC": 1}
    one, other = (gradients(step, *arrays, sizes, launch=launch) for _ in range(2))
    for a, b in zip(one, other, strict=True):
        assert np.array_equal(cp.asnumpy(a), cp.asnumpy(b))
    row_tiles, key_tiles = 2 * -(-200 // sizes["BLOCK_M"]), -(-300 // sizes["BLOCK_N"])
    before, after = [0] * (row_tiles + 1), [key_tiles] * (row_tiles + 1)  # the last number counts the blocks
    assert [a.tolist() for a in turns] == 2 * [before, after]


# ---- sources


def test_a_step_finds_the_includes_of_the_kernels(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "KERNELS", tmp_path)
    (tmp_path / "steps").mkdir()
    (tmp_path / "ours.cuh").write_text("int in_the_header;\n")
    (tmp_path / "steps" / "one.cu").write_text('#include "ours.cuh"\nint in_the_step;\n')
    assert kernel.source("steps/one.cu").splitlines() == [
        '#line 1 "steps/one.cu"',
        '#line 1 "ours.cuh"',
        "int in_the_header;",
        '#line 2 "steps/one.cu"',
        "int in_the_step;",
    ]
