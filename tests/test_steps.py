"""The climbs: every step is a kernel that works, and differs from the one before it by one lesson.

A new climb is tested by its entry in CLIMBS.
"""

from __future__ import annotations

import difflib
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from backends import in_place_of_bind

from helpers import check, kernel, reference
from helpers import compile_report as reports
from helpers.device import cp
from helpers.ladder import LADDER, Stage
from helpers.ladder.steps import BEFORE, CLIMBS
from helpers.xray import xray

try:
    reports.nvrtc_version()
    missing = ""
except reports.NvrtcMissing as error:
    missing = str(error)

MOST_CHANGED_LINES = 60
# Jumps that are larger, and why.
LARGER = {
    # From one lane a row to four: maxima, masks, weights, sums and the epilogue change their layout together.
    "steps/07_06_four_lanes_a_row.cu": 77,
}
STEPS = [step for climb in CLIMBS.values() for step in climb[:-1]]  # the last one is a stage, tested as such
every_step = pytest.mark.parametrize("step", STEPS, ids=lambda step: step.file.removeprefix("steps/"))
FLOAT_STEPS = [step for step in STEPS if step.dtypes == ("float32",)]
every_float_step = pytest.mark.parametrize("step", FLOAT_STEPS, ids=lambda step: step.file.removeprefix("steps/"))
HALF_STEPS = list(CLIMBS["flash_mma"][:-1])
every_half_step = pytest.mark.parametrize("step", HALF_STEPS, ids=lambda step: step.file.removeprefix("steps/"))
# Steps to 07 whose registers may spill at HEAD_DIM = 128: a lane holds 32 rows' share of S and acc, and all addresses.
SPILLS = {step.file for step in HALF_STEPS if step.file.removeprefix("steps/")[:5] >= "07_09"}
# Sizes of one warp, for each set of macros that a step may have.
SMALL: dict[frozenset[str], dict[str, int]] = {
    frozenset(sizes): sizes
    for sizes in (
        {"BLOCK_M": 32, "BLOCK_N": 8},
        {"BLOCK_M": 64, "BLOCK_N": 8, "THREADS": 32},
        {"BLOCK_M": 16, "BLOCK_N": 16, "THREADS": 32, "THREADS_X": 8},
    )
}


def changed_lines(before: str, after: str) -> int:
    """Lines of a file that the other does not have, comments included, both ways: a line that changes counts twice."""
    a, b = ((kernel.KERNELS / file).read_text().splitlines() for file in (before, after))
    opcodes = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    return sum(i_end - i + j_end - j for tag, i, i_end, j, j_end in opcodes if tag != "equal")


def test_changed_lines_are_counted_both_ways(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "KERNELS", tmp_path)
    (tmp_path / "a.cu").write_text("one\ntwo\nthree\n")
    (tmp_path / "b.cu").write_text("one\n2\nthree\nfour\n")
    assert changed_lines("a.cu", "b.cu") == 3
    assert changed_lines("a.cu", "a.cu") == 0


@pytest.mark.parametrize("name", CLIMBS)
def test_a_climb_ends_at_its_stage(name: str) -> None:
    assert CLIMBS[name][-1] is LADDER[name]
    assert CLIMBS.keys() == BEFORE.keys()
    for step in CLIMBS[name]:
        assert (step.name, step.number) == (name, LADDER[name].number)
    ideas = [step.idea for step in CLIMBS[name]]
    assert len(set(ideas)) == len(ideas)


def test_every_file_is_a_step() -> None:
    files = {path.relative_to(kernel.KERNELS).as_posix() for path in (kernel.KERNELS / "steps").glob("*.cu")}
    assert files == {step.file for step in STEPS}


@pytest.mark.parametrize("name", CLIMBS)
def test_each_step_is_small(name: str) -> None:
    files = [BEFORE[name], *(step.file for step in CLIMBS[name])]
    counts = {after: changed_lines(before, after) for before, after in pairwise(files)}
    assert all(0 < count <= LARGER.get(after, MOST_CHANGED_LINES) for after, count in counts.items()), counts


@pytest.mark.skipif(bool(missing), reason=missing)
@every_step
def test_registers_and_shared_memory(step: Stage) -> None:
    """No step spills, and the launch gives a block exactly the shared memory that the text declares."""
    for arch in ("sm_80", "sm_90"):
        if int(arch.removeprefix("sm_")) < step.min_cc:
            continue
        defines = step.defines(64)
        code = kernel.source(step.file)
        if "struct __align__(16) Shared" in code:
            code += (
                f'static_assert(sizeof(Shared) == {step.shared_bytes(defines)}, "helpers/ladder/steps.py differs");\n'
            )
        if "SHARED_BYTES" in code:
            code += f'static_assert(SHARED_BYTES == {step.shared_bytes(defines)}, "helpers/ladder/steps.py differs");\n'
        report = reports.compile_report(code, defines, arch, name=step.kernel_name(step.dtypes[0]))
        assert (report.spill_bytes, report.stack_bytes) == (0, 0), report


@every_float_step
def test_output(step: Stage) -> None:
    """Sizes around those of the tiles; head dimensions that fill no float4 or no row of threads, and usual ones.

    Each is a compilation, so neighbouring steps, which differ little, share them out: (3, 128) and (40, 64).
    """
    for head_dim in ((3, 128), (40, 64))[STEPS.index(step) % 2]:
        for n, n_kv in ((1, 1), (65, 131), (130, 17)):
            heads = [check.make_inputs(n, n_kv, head_dim, seed=seed) for seed in (0, 1)]
            q, k, v = (np.stack(pair) for pair in zip(*heads, strict=True))
            title = f"{step.file}, N = {n}, N_kv = {n_kv}, head_dim = {head_dim}"
            check.check(title, step(q, k, v), reference.attention(q, k, v))


@every_float_step
def test_xray_is_clean(step: Stage) -> None:
    """No race, no access out of bounds, no word that nobody wrote."""
    head_dim = 12
    usual = step.tiles(head_dim)
    sizes = {"HEAD_DIM": head_dim, **SMALL[frozenset(usual)]}
    n, n_kv = sizes["BLOCK_M"] + 1, 2 * sizes["BLOCK_N"] + 3
    q, k, v = (cp.asarray(np.stack([a, a])) for a in check.make_inputs(n, n_kv, head_dim))
    o = cp.full(q.shape, cp.nan, dtype=q.dtype)
    loaded = kernel.load(step.file, step.kernel_name(), defines=sizes)
    args = (q, k, v, o, cp.int32(n), cp.int32(n_kv), cp.float32(0.3))
    xray(loaded, (2, 2), (step.threads(sizes),), args, step.shared_bytes(sizes)).assert_clean()
    check.check(step.file, o, reference.attention(*map(cp.asnumpy, (q, k, v)), softmax_scale=0.3))


# ---- half types


def half(step: Stage, shape: tuple[int, int, int, int], n_kv: int, kv_heads: int) -> tuple[np.ndarray, ...]:
    """q (batch, heads, N, d), k and v; neighbouring steps take the two types in turn."""
    batch, _, _, d = shape
    dtype = (np.float16, ml_dtypes.bfloat16)[HALF_STEPS.index(step) % 2]
    rng = np.random.default_rng([*shape, n_kv])
    kv = (batch, kv_heads, n_kv, d)
    return tuple((rng.standard_normal(size) + 0.3).astype(dtype) for size in (shape, kv, kv))


def check_half(step: Stage, got: Any, q: Any, k: Any, v: Any, **options: Any) -> None:
    """got: o, or o and lse."""
    o, lse = got if isinstance(got, tuple) else (got, None)
    expected = check.expect(*(a.swapaxes(1, 2) for a in (q, k, v)), **options)
    check.check(f"{step.file}, {options}", o, expected.o.swapaxes(1, 2), tolerance=expected.tolerance)
    if lse is not None:
        lse, seen = cp.asnumpy(lse), np.isfinite(expected.lse)
        assert np.array_equal(np.isneginf(lse), ~seen)
        np.testing.assert_allclose(lse[seen], expected.lse[seen], rtol=1e-5, atol=1e-5)


@every_half_step
def test_output_in_half_types(step: Stage) -> None:
    """Tails, heads that share K and V, masks, rows that see nothing, a negative scale; packed lengths at some steps.

    Each head dimension is a compilation, so pairs of steps take 40 and 128 in turn.
    """
    d = (40, 128)[HALF_STEPS.index(step) // 2 % 2]
    for n, n_kv, options in (
        (1, 1, {}),
        (130, 151, {"causal": True}),
        (150, 70, {"window": (40, 17)}),
        (65, 131, {"softmax_scale": -0.2}),
    ):
        q, k, v = half(step, (1, 4, n, d), n_kv, 2)
        check_half(step, step(q, k, v, return_lse=True, **options), q, k, v, **options)
    if step is HALF_STEPS[HALF_STEPS.index(step) // 4 * 4]:  # one in four
        rows, keys = (3, 130, 0, 64), (200, 130, 5, 0)
        cu_seqlens = tuple(np.cumsum([0, *lengths], dtype=np.int32) for lengths in (rows, keys))
        q, k, v = half(step, (1, 4, sum(rows), d), sum(keys), 2)
        launch, o = step.prepare(*(a[0] for a in (q, k, v)), cu_seqlens=cu_seqlens, causal=True)
        launch()
        o = cp.asnumpy(o).reshape(q.shape)
        for i in range(len(rows)):
            mine, its = (slice(ends[i], ends[i + 1]) for ends in cu_seqlens)
            if rows[i] and keys[i]:
                check_half(step, o[:, :, mine], q[:, :, mine], k[:, :, its], v[:, :, its], causal=True)
            else:
                assert not o[:, :, mine].any()


@every_half_step
def test_xray_of_a_half_step_is_clean(step: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []

    def checked(self: kernel.Kernel, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        looked.append(xray(self, grid, block, args, shared_mem))

    monkeypatch.setattr(kernel.Kernel, "bind", in_place_of_bind(checked))
    q, k, v = half(step, (1, 1, 33, 40), 70, 1)
    got = step(q, k, v, causal=True, softmax_scale=-0.2)
    (report,) = looked
    report.assert_clean()
    check_half(step, got, q, k, v, causal=True, softmax_scale=-0.2)


@pytest.mark.skipif(bool(missing), reason=missing)
@every_half_step
def test_spills_where_they_are_said_to_be(step: Stage) -> None:
    for arch in ("sm_80", "sm_90"):
        report = reports.compile_report(step.file, step.defines(128), arch, name=step.kernel_name("float16"))
        assert report.spill_bytes <= (800 if step.file in SPILLS else 0), report


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
