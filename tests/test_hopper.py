"""Stage 10 beside what test_tensor_cores.py asks of it: its tiles, its order of tiles, tensor maps, planted bugs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from planted import ALL, Bug
from test_tensor_cores import check_both, inputs

from helpers import compile_report, cpu, kernel
from helpers.attention import flash_attention
from helpers.device import cp
from helpers.ladder import LADDER, launches, limits, tensor_maps, tiles
from helpers.ladder.call import Spec

HOPPER = LADDER["hopper"]
try:
    compile_report.nvrtc_version()
    missing = ""
except compile_report.NvrtcMissing as error:
    missing = str(error)
needs_nvrtc = pytest.mark.skipif(bool(missing), reason=missing)
runs_here = pytest.mark.skipif(
    HOPPER.why_not(head_dim=64, dtype="float16") is not None, reason="this GPU is not of compute capability 9.0"
)

# ---- what it is compiled with


@needs_nvrtc
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("head_dim", [8, 64, 72, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_it_compiles_without_spills_and_keeps_its_products_in_flight(dtype: str, head_dim: int, masked: bool) -> None:
    sizes = {"HEAD_DIM": head_dim, **tiles.pick_hopper(head_dim, masked)}
    report = compile_report.compile_report(HOPPER.file, sizes, "sm_90a", name=HOPPER.kernel_name(dtype))
    assert (report.spill_bytes, report.stack_bytes, report.warnings) == (0, 0, ())
    assert tiles.hopper_shared_bytes(head_dim, sizes) <= 227 * 1024


@needs_nvrtc
def test_what_the_assembler_warns_of_is_seen() -> None:
    """S is read while its products may be in flight (C7514); the registers do not suffice (C7512)."""
    no_wait = Bug("", "    wgmma_wait<1>();\n", "").plant(kernel.source(HOPPER.file))
    for text, sizes, code in (
        (no_wait, {"HEAD_DIM": 64}, "C7514"),
        (HOPPER.file, {"HEAD_DIM": 64, "BLOCK_M": 256, "BLOCK_N": 96}, "C7512"),
    ):
        report = compile_report.compile_report(text, sizes, "sm_90a", name=HOPPER.kernel_name("float16"))
        assert report.warnings and code in report.warnings[0], str(report)


def test_shared_memory_is_what_the_kernel_counts() -> None:
    text = kernel.source(HOPPER.file) + '\nextern "C" __global__ void count(unsigned* n) { *n = SHARED_BYTES; }\n'
    for head_dim, sizes in ((64, {"BLOCK_M": 128, "BLOCK_N": 192}), (72, {"BLOCK_M": 192, "BLOCK_N": 16, "STAGES": 3})):
        n = cpu.zeros(1, np.uint32)
        options = kernel.options({"HEAD_DIM": head_dim, **sizes})
        cpu.RawModule(code=text, options=options).get_function("count")((1,), (1,), (n,))
        assert n.get()[0] == tiles.hopper_shared_bytes(head_dim, sizes)


@pytest.mark.parametrize(("cc", "there"), [(89, "8.9"), (100, "10.0"), (120, "12.0")])
def test_other_gpus_are_told(cc: int, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "compute_capability", lambda: cc)
    reason = HOPPER.why_not(head_dim=64, dtype="float16")
    assert reason is not None and reason.endswith(f"this GPU has {there}")
    assert cc < 90 or "compiled for sm_90a, which only compute capability 9.0 runs" in reason


# ---- tensor maps


def test_dimensions_of_a_view() -> None:
    """(batch, heads, rows, d) of (batch, rows, heads, d); strides in bytes; one of size 1 has any stride."""
    spec = Spec((2, 3, 50, 64), (50 * 3 * 128, 128, 3 * 128, 2), np.dtype(np.float16))
    assert tensor_maps.dimensions(spec) == ((64, 50, 3, 2), (3 * 128, 128, 50 * 3 * 128))
    assert tensor_maps.dimensions(Spec((1, 1, 7, 72), (2, 6, 144, 2), np.dtype(np.float16)))[1] == (144, 144, 144)


@runs_here
def test_maps_are_kept_by_address() -> None:
    a, b = (cp.zeros((1, 2, 30, 64), np.float16) for _ in range(2))
    kept = tensor_maps.Kept(Spec.of(a), 64)
    first, second = (kept.pointer(x.data.ptr) for x in (a, b))
    assert first != second and kept.pointer(a.data.ptr) == first
    for i in range(2 * kept.MOST):
        kept.pointer(a.data.ptr + 16 * i)
        assert len(kept) <= kept.MOST


@runs_here
def test_a_bound_launch_keeps_its_arrays() -> None:
    """A tensor map has the address alone, and NumPy inputs are copied: the copies must outlive the call."""
    q, k, v = inputs((1, 2, 50, 64), 70, 2, "float16")
    launch, got = HOPPER.prepare(q, k, v, return_lse=True)
    others = [cp.full(q.shape, cp.nan, q.dtype) for _ in range(20)]
    launch()
    check_both("hopper", got, q, k, v)
    assert len(others) == 20


@runs_here
def test_calls_with_new_addresses() -> None:
    """The second call of its kind makes its maps anew, on a GPU in a launch without checks."""
    shape = (2, 100, 4, 64)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        q, k, v = (rng.standard_normal(shape).astype(np.float16) for _ in range(3))
        o, lse = flash_attention(*map(cp.asarray, (q, k, v)), causal=True, return_lse=True, stage="hopper")
        heads_first = (a.swapaxes(1, 2) for a in (q, k, v))
        check_both(f"call {seed}", (cp.asnumpy(o).swapaxes(1, 2), lse), *heads_first, causal=True)


# ---- the order of tiles


@runs_here
@pytest.mark.parametrize("blocks", [1, 3, 5])
@pytest.mark.parametrize("together", [1, 3, 100])
def test_every_tile_is_computed_whatever_the_order(blocks: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few blocks take many tiles each: the stages of K and V, and Q, pass from tile to tile."""
    monkeypatch.setattr(limits, "multiprocessors", lambda: blocks)
    monkeypatch.setattr(launches, "heads_together", lambda call: together)
    q, k, v = inputs((2, 4, 300, 64), 170, 2, "float16")
    for options in ({}, {"causal": True}, {"window": (60, 10)}):
        launch, got = HOPPER.prepare(q, k, v, return_lse=True, sizes={"BLOCK_N": 64}, **options)
        launch()
        check_both(f"hopper {options}", got, q, k, v, **options)


def test_heads_that_are_worked_on_together() -> None:
    """K and V of 32 MB; whole groups; without a causal mask one head after the other."""
    from helpers.ladder.call import Call

    def of(heads: int, kv_heads: int, keys: int, window: tuple[int, int]) -> int:
        shapes = {"q": (1, heads, 5, 128), "k": (1, kv_heads, keys, 128), "v": (1, kv_heads, keys, 128)}
        arrays = {name: Spec.dense(shape, np.float16) for name, shape in shapes.items()}
        return launches.heads_together(Call(arrays, 1.0, window, rows=5, sequences=1, aligned=True))

    assert of(16, 16, 16384, (-1, -1)) == 1
    assert of(16, 16, 16384, (-1, 0)) == 4 and of(16, 4, 16384, (-1, 0)) == 16
    assert of(16, 16, 10**6, (-1, 0)) == 1 and of(16, 2, 10**6, (-1, 0)) == 8


@runs_here
@pytest.mark.parametrize(
    "sizes",
    [
        {"BLOCK_M": 192, "BLOCK_N": 128},
        {"BLOCK_M": 192, "BLOCK_N": 96, "PINGPONG": 0},
        {"BLOCK_M": 256, "BLOCK_N": 64},
        {"BLOCK_N": 80, "STAGES": 3},
        {"BLOCK_N": 16},
        {"BLOCK_N": 224},
    ],
    ids=str,
)
def test_other_tiles(sizes: dict[str, int]) -> None:
    q, k, v = inputs((1, 3, 300, 64), 333, 3, "bfloat16")
    for options in ({}, {"causal": True}):
        launch, got = HOPPER.prepare(q, k, v, return_lse=True, sizes=sizes, **options)
        launch()
        check_both(f"hopper {sizes}", got, q, k, v, **options)


# ---- packed lengths, infinities


@pytest.fixture
def two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks compute all tiles."""
    monkeypatch.setattr(limits, "multiprocessors", lambda: 2)


def packed(text: str | None = None) -> None:
    """Infinities in one sequence reach no other, though TMA copies the rows after a sequence's end with its own."""
    rows, keys = (70, 1, 33, 130), (50, 13, 30, 65)
    cu = tuple(np.cumsum([0, *lengths], dtype=np.int32) for lengths in (rows, keys))
    q, k, v = (a[0] for a in inputs((1, 2, sum(rows), 72), sum(keys), 1, "float16"))
    v[:, cu[1][2] : cu[1][3]] = np.inf
    k[:, cu[1][2] : cu[1][3]] = np.nan
    launch, (o, lse) = HOPPER.prepare(
        q, k, v, causal=True, cu_seqlens=cu, return_lse=True, source=text, sizes={"BLOCK_N": 48}
    )
    launch()
    o, lse = cp.asnumpy(o), cp.asnumpy(lse)
    for i in (0, 1, 3):
        own, its = slice(*cu[0][i : i + 2]), slice(*cu[1][i : i + 2])
        one = q[None, :, own], k[None, :, its], v[None, :, its]
        check_both(f"sequence {i}", (o[None, :, own], lse[None, :, own]), *one, causal=True)


def beside_infinities(text: str | None = None) -> None:
    """What a block has added up for a tile of a head that is infinite does not reach its next tile."""
    q, k, v = inputs((1, 4, 150, 72), 100, 2, "float16")
    v[:, :1] = np.inf
    launch, (o, lse) = HOPPER.prepare(q, k, v, return_lse=True, source=text, sizes={"BLOCK_N": 48})
    launch()
    o, lse = cp.asnumpy(o), cp.asnumpy(lse)
    check_both("two heads", (o[:, 2:], lse[:, 2:]), q[:, 2:], k[:, 1:], v[:, 1:])


@runs_here
def test_infinities_stay_in_their_sequence_and_head(two_blocks: None) -> None:
    packed()
    beside_infinities()


# ---- planted bugs


def changed(name: str, old: str, new: str = "", **more: Any) -> Bug:
    return Bug(name, old, new, which=ALL, **more)


def hangs(name: str, old: str, new: str = "", **more: Any) -> Bug:
    """A wait that never ends: on a GPU it would be one too."""
    return Bug(name, old, new, which=ALL, cpu_only=True, **more)


BUGS = (
    # which keys
    changed("full tiles end late", "first + BLOCK_N > min(tile.first_pos", "first > min(tile.first_pos"),
    changed("full for the first row is full for all", "first < last_pos -", "first < tile.first_pos -"),
    changed("begins where the last row does", "max(tile.first_pos - params", "max(tile.first_pos + BLOCK_M - params"),
    changed(
        "ends where the first row does", "tile.first_pos + min(BLOCK_M, tile.rows) + params", "tile.first_pos + params"
    ),
    changed("a key too many", "8 * i + right + 1, end)", "8 * i + right + 2, end)"),
    changed("a key past the end", "min(row_pos + 8 * i + right + 1, end)", "row_pos + 8 * i + right + 1"),
    changed("a key too few", "keys_before(low - first)", "keys_before(low + 1 - first)"),
    changed("wrong head of K and V", "tile.head / (params.heads / params.kv_heads)", "tile.head % params.kv_heads"),
    # softmax
    changed("no maximum for rows that see nothing", "= LOWEST,", "= NEG_INF,"),
    changed("maxima of one lane out of four", "return fmaxf(a, b); });", "return a; });"),
    changed(
        "sums of one lane out of four", "[](float a, float b) { return a + b; }", "[](float a, float b) { return a; }"
    ),
    changed("l_i is not rescaled", "l_i[i] *= rescale[i];", ""),
    changed("acc is not rescaled", "acc[i] *= rescale[i / 2 % 2]", "acc[i] *= 1.0f"),
    changed("acc is rescaled by the other row's factor", "rescale[i / 2 % 2]", "rescale[1 - i / 2 % 2]"),
    changed("rescaled the wrong way", "exp2f(m_i[i] - m_new", "exp2f(-m_i[i] + m_new"),
    changed("m_i of the tile before", "if (ends) start_rows(m_i, l_i);", "if (ends) l_i[0] = l_i[1] = 0.0f;"),
    changed("l_i of the tile before", "if (ends) start_rows(m_i, l_i);", "if (ends) m_i[0] = m_i[1] = LOWEST;"),
    changed("O of the tile before", "      clear(acc);\n"),
    changed("division by zero", "sum == 0.0f ? 0.0f : __fdividef(1.0f, sum)", "__fdividef(1.0f, sum)"),
    changed("lse in units of log2", "LN_2 * (m_i", "(m_i"),
    changed("rows of P exchanged", "P[n / 2][n % 2 * 2 + i]", "P[n / 2][n % 2 * 2 + 1 - i]"),
    # descriptors and the swizzle
    changed("the next 16 columns of Q are those of K's half", "i % 4 * 32) / 16, k", "i % 4 * 16) / 16, k"),
    changed("the second panel of K is the first", "k + (i / 4 * BLOCK_N * 128 +", "k + ("),
    changed(
        "the second panel of V is elsewhere",
        "wgmma_descriptor(V_smem, BLOCK_N * 128)",
        "wgmma_descriptor(V_smem, 1024)",
    ),
    changed("the next 16 keys are the next 8", "v + i * 16 * 128 / 16", "v + i * 8 * 128 / 16"),
    changed(
        "each consumer has the first rows", "wgmma_descriptor(Q_smem + consumer * 64 * 128)", "wgmma_descriptor(Q_smem)"
    ),
    # stages, phases
    changed("always the first stage of K", "k + stage * (TILE_BYTES / 16)", "k", cpu_only=True),
    Bug("always the first stage of V", "v + v_stage * (TILE_BYTES / 16)", "v", times=2, cpu_only=True),
    changed("always the first stage of Q", "q + q_stage * (Q_BYTES / 16)", "q", cpu_only=True),
    changed(
        "Q is not waited for",
        "    if (ends) mbarrier_wait(q_full + 8 * q_stage, tiles / Q_STAGES & 1);\n",
        cpu_only=True,
    ),
    changed("V is not waited for", "    mbarrier_wait(v_full + 8 * v_stage, v_parity);\n", cpu_only=True),
    hangs("K's wrong parity", "mbarrier_wait(k_full + 8 * stage, parity)", "mbarrier_wait(k_full + 8 * stage, 0)"),
    hangs("a stage is empty only when it is full", "(step / STAGES & 1) ^ 1)", "step / STAGES & 1)"),
    hangs("one consumer does not give K back", "if (leader && !(l_i", "if (leader && !consumer && !(l_i"),
    hangs("Q is never given back", "    if (leader && first == tile.begin) mbarrier_arrive(q_empty + 8 * q_stage);\n"),
    hangs("nobody has the first turn", "PINGPONG && consumer == CONSUMERS - 1", "false"),
    hangs("fewer bytes than expected", "q_full + 8 * stage, Q_BYTES)", "q_full + 8 * stage, 2 * Q_BYTES)"),
    changed(
        "more bytes than expected",
        "expect_tx(full + 8 * stage, TILE_BYTES)",
        "expect_tx(full + 8 * stage, TILE_BYTES / 2)",
        cpu_only=True,
    ),
    # products in flight
    changed("S is read in flight", "    wgmma_wait<1>();\n", cpu_only=True),
    changed(
        "acc is read in flight", "    wgmma_wait<0>();\n    wgmma_registers(acc);\n    if", "    if", cpu_only=True
    ),
    # packed, the epilogue, the order
    changed("rows of the next sequence stay", "if (!packed || first", "if (true || first"),
    changed("words are exchanged once", "step <= 2; ++step", "step <= 1; ++step"),
    changed("O without the head", " + tile.head * params.o.head"),
    changed(
        "rounds overlap",
        "round % 2 ? gridDim.x - 1 - blockIdx.x",
        "round % 2 ? gridDim.x - 2 - blockIdx.x",
        cpu_only=True,
    ),
)
WITH_BUG: tuple[dict[str, Any], ...] = (
    {"n": 150, "n_kv": 200, "window": (90, 90)},
    {"n": 200, "n_kv": 130, "causal": True},  # rows that see nothing
    {"n": 40, "n_kv": 300, "grow": 4000.0},
)


def check_with(text: str) -> None:
    """A few calls with another text of the kernel, of many tiles for each block."""
    for case in WITH_BUG:
        options = dict(case)
        q, k, v = inputs((1, 4, options.pop("n"), 72), options.pop("n_kv"), 2, "float16", grow=options.pop("grow", 1.0))
        launch, got = HOPPER.prepare(q, k, v, source=text, return_lse=True, sizes={"BLOCK_N": 48}, **options)
        launch()
        check_both("hopper", got, q, k, v, **options)
    packed(text)
    beside_infinities(text)


@runs_here
def test_kernel_without_a_bug_passes(two_blocks: None) -> None:
    check_with(kernel.source(HOPPER.file))


@runs_here
@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_bug_is_seen(bug: Bug, two_blocks: None, request: pytest.FixtureRequest) -> None:
    if bug.cpu_only:
        request.getfixturevalue("cpu_engine")
    text = bug.plant(kernel.source(HOPPER.file))
    with pytest.raises((AssertionError, cpu.LaunchError)):
        check_with(text)
