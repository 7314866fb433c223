"""The climbs: every step is a kernel that works, and differs from the one before it by one lesson.

A new climb is tested by its entry in CLIMBS.
"""

from __future__ import annotations

import difflib
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

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
STEPS = [step for climb in CLIMBS.values() for step in climb[:-1]]  # the last one is a stage, tested as such
every_step = pytest.mark.parametrize("step", STEPS, ids=lambda step: step.file.removeprefix("steps/"))
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
    assert all(0 < count <= MOST_CHANGED_LINES for count in counts.values()), counts


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
        report = reports.compile_report(code, defines, arch, name=step.kernel_name(step.dtypes[0]))
        assert (report.spill_bytes, report.stack_bytes) == (0, 0), report


@every_step
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


@every_step
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
