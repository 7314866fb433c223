"""Measure what fusing a neighbour into attention gains or loses: rotary embedding, output projection.

At each length the kernels of a section are timed in turns, on the same 16,384 tokens of 2048 columns: 32 heads of 64 or
16 of 128. Some rows of all results are compared with float64 first; a wrong one is not timed. `extra_bytes` is a way's
memory beyond q, k, v, weights and its result: its other arguments, the arrays between its kernels, and what else its
first run takes from the device.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np

from helpers.attention import kernel, reference, rotary_and_projection
from helpers.attention.check import make_inputs
from helpers.attention.ladder import LADDER, Rung, tiles
from helpers.attention.ladder.steps import ROTATION_IN_LOAD
from helpers.bench import peers, records
from helpers.bench.cases import TYPES, Case, Inputs, Sample, as_numpy, shape_of_tokens
from helpers.bench.harness import Study, speed_text
from helpers.bench.run import device_facts, free_pools
from helpers.bench.timing import in_turns, speeds
from helpers.device import ON_GPU, cp, describe
from helpers.engine.cuda_source.edit import edit

recorded = records.reader("nvidia-h200-fused.json")
TOKENS, COLUMNS = 16384, 2048
LENGTHS, HEAD_DIMS = (512, 4096, 16384), (64, 128)
DTYPE = "bfloat16"
ROUNDS = 8
PROJECTED_ROWS = 8  # rows of one sequence of Y that are compared: each needs all heads
FORMS = ("half-split", "interleaved")  # forms of a rotation
PLAIN, HOPPER = LADDER["flash_mma"], LADDER["hopper"]


def case_of(n: int, head_dim: int, *, causal: bool = False, tokens: int = TOKENS, columns: int = COLUMNS) -> Case:
    """Return a case of sequences of n rows, in bfloat16."""
    return Case(shape_of_tokens(n, head_dim, tokens=tokens, columns=columns), DTYPE, causal)


@dataclass
class Way:
    """One way to compute something. run: launches. result: the device array that it writes, in models' layout.

    given: the arrays that it needs beyond q, k, v, weights and the result. error: returns a result's largest error and
    the tolerance; None if nothing is compared.
    """

    name: str
    run: Callable[[], Any]
    result: Callable[[], Any] | None = None
    given: Sequence[Any] = ()
    error: Callable[[Any], tuple[float, float]] | None = None


# ---- inputs and expected results


class Work:
    """The arrays of a case in models' layout, (batch, n, heads, head_dim), and the errors of results."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._inputs = Inputs(case.shape, case.dtype, heads_last=True)
        self.q, self.k, self.v = (a.swapaxes(1, 2) for a in self._inputs.device)
        batch, heads, n, head_dim = case.shape
        self.shape, self.columns = (batch, n, heads, head_dim), heads * head_dim
        weights = make_inputs(self.columns * heads, 1, head_dim, seed=4, mean=0.0)[0] * self.columns**-0.5
        self._weights = weights.reshape(self.columns, self.columns).astype(TYPES[DTYPE])
        self.w_o = cp.asarray(self._weights)

    def empty(self) -> Any:
        """Return a new output, (batch, n, heads, head_dim)."""
        return cp.empty(self.shape, dtype=TYPES[DTYPE])

    @functools.cached_property
    def _of_one_sequence(self) -> Sample:
        """Return some rows of all heads of the last sequence."""
        batch, _, heads, _ = self.shape
        last = range((batch - 1) * heads, batch * heads)
        return Sample(self._inputs, self.case.causal, heads=last, most_rows=PROJECTED_ROWS * heads)

    def output_error(self, o: Any, form: str = "") -> tuple[float, float]:
        """Return the largest error of some rows of O, and the tolerance. form: that of the rotation of q and k."""
        sample = self._inputs.sample(self.case.causal)
        if form:
            sample = Sample(self._inputs, self.case.causal, rotate=functools.partial(rotate, form=form))
        return sample.error(o.swapaxes(1, 2)), max(sample.tolerance, _bfloat16_step(sample.expected))

    def projection_error(self, y: Any) -> tuple[float, float]:
        """Return the largest error of some rows of Y = O W_O, and the tolerance."""
        sample = self._of_one_sequence
        w_o = self._weights.astype(np.float64)
        exact, near = (np.concatenate(list(o), axis=-1) @ w_o for o in (sample.expected, sample.rounded))
        if y.dtype == TYPES[DTYPE]:
            near = _rounded(near)
        got = as_numpy(y.reshape(*self.shape[:2], -1)[-1])[sample.rows].astype(np.float64)
        tolerance = max(2 * float(np.abs(near - exact).max()), _bfloat16_step(exact))
        return float(np.abs(got - exact).max()), tolerance

    def rotation_error(self, rotated: Sequence[Any], form: str) -> tuple[float, float]:
        """Return the largest error of some rows of the rotated q and k, and the tolerance."""
        sample, heads, found = self._inputs.sample(self.case.causal), self.shape[2], []
        for head in sample.heads.tolist():
            for got, a in zip(rotated, self._inputs.host, strict=False):
                exact = rotate(a[divmod(head, heads)].astype(np.float64), form)[sample.rows]
                off = as_numpy(got.swapaxes(1, 2)[divmod(head, heads)])[sample.rows].astype(np.float64) - exact
                found.append((float(np.abs(off).max()), _bfloat16_step(exact)))
        errors, tolerances = zip(*found, strict=True)
        return float(np.max(errors)), max(tolerances)


def rotate(a: np.ndarray, form: str) -> np.ndarray:
    """Rotate all rows (n, d) of a head in float64 by the float32 angles, and round to bfloat16."""
    tables = rotary_and_projection.cos_sin(*a.shape)
    return _rounded(reference.rotary(a, *tables, np.arange(len(a)), interleaved=form == FORMS[1]))


def _rounded(a: np.ndarray) -> np.ndarray:
    return a.astype(TYPES[DTYPE]).astype(np.float64)


def _bfloat16_step(a: np.ndarray) -> float:
    """Return bfloat16's spacing at the largest element of a."""
    return 2**-8 * float(np.abs(a).max())


# ---- the ways of each section


def attention(
    work: Work,
    name: str,
    stage: Rung,
    q: Any = None,
    k: Any = None,
    *,
    given: Sequence[Any] = (),
    form: str = "",
    **options: Any,
) -> Way:
    """Make the way of one stage; it writes O in models' layout. q, k: replace the inputs' own.

    given: see `Way`. form: see `Work.output_error`. options: the stage's.
    """
    o = work.empty()
    arrays = (work.q if q is None else q, work.k if k is None else k, work.v, o)
    *qkv, out = (a.swapaxes(1, 2) for a in arrays)
    run, _ = stage.prepare(*qkv, causal=work.case.causal, out=out, **options)
    return Way(name, run, lambda: o, given, functools.partial(work.output_error, form=form))


def one_after_the_other(name: str, first: Way, second: Way, given: Sequence[Any]) -> Way:
    """Make one way of two that run one after the other, with the second one's result."""

    def run() -> None:
        first.run()
        second.run()

    return Way(name, run, second.result, given, second.error)


Maker = Callable[[], Way]


def rotary_ways(work: Work) -> Iterator[Maker]:
    """Yield a separate pass before attention, and the rotation in attention's load."""
    angles = tuple(map(cp.asarray, rotary_and_projection.cos_sin(work.shape[1], work.shape[3])))
    form = FORMS[0]

    def alone(form: str) -> Way:
        planned = rotary_and_projection.plan_rotary(work.q, work.k, *angles, interleaved=form == FORMS[1])
        error = lambda rotated: work.rotation_error(rotated, form)  # noqa: E731
        return Way(f"rotary alone, {form}", planned.prepare(), lambda: planned.result, error=error)

    def both(stage: Rung, name: str) -> Way:
        first = alone(form)
        second = attention(work, name, stage, *first.result(), form=form)
        return one_after_the_other(name, first, second, first.result())

    def in_load() -> Way:
        options = dict(zip(("rotary_cos", "rotary_sin"), angles, strict=True))
        return attention(work, f"11, {form} in the load", ROTATION_IN_LOAD, form=form, **options)

    def copied() -> Way:
        to = tuple(map(cp.empty_like, (work.q, work.k)))

        def run() -> None:
            to[0][...] = work.q
            to[1][...] = work.k

        return Way("copies of q and k", run)

    yield lambda: attention(work, "07, not rotated", PLAIN)
    yield lambda: both(PLAIN, "rotary, then 07")
    yield in_load
    yield lambda: both(HOPPER, "rotary, then 10")
    yield lambda: alone(FORMS[0])
    yield lambda: alone(FORMS[1])
    yield copied


def projection_ways(work: Work) -> Iterator[Maker]:
    """Yield attention followed by a matrix product, and both in one kernel, in its two forms."""

    def product(o: Any) -> Way:
        rows = o.reshape(-1, work.columns)
        torch = peers.torch_on_gpu()
        y = cp.empty(rows.shape, dtype=np.float32 if torch is None else TYPES[DTYPE])

        def by_numpy() -> None:
            y[...] = cp.asarray(cp.asnumpy(rows).astype(np.float32) @ cp.asnumpy(work.w_o).astype(np.float32))

        run: Callable[[], Any] = by_numpy
        if torch is not None:  # bfloat16 by its bits, which every DLPack supports
            views = (torch.from_dlpack(a.view(np.int16)).view(torch.bfloat16) for a in (rows, work.w_o, y))
            a, b, out = views
            run = functools.partial(torch.mm, a, b, out=out)
        return Way("GEMM", run, lambda: y, error=work.projection_error)

    def both(stage: Rung, name: str) -> Way:
        first = attention(work, name, stage)
        return one_after_the_other(name, first, product(first.result()), [first.result()])

    yield lambda: both(PLAIN, "07, then GEMM")
    yield lambda: _fused_projection(work, "atomics", "11, atomics")
    yield lambda: _fused_projection(work, "all_heads", "11, all heads in a block")
    yield lambda: both(HOPPER, "10, then GEMM")
    yield lambda: attention(work, "07 alone", PLAIN)
    yield lambda: Way("GEMM alone", product(work.q).run)


Edits = tuple[tuple[str, str], ...]
# The fused projection with one change, by form: (name, edits, -D options, whether the result is still right).
PARTS: Mapping[str, tuple[tuple[str, Edits, Mapping[str, int], bool], ...]] = {
    "atomics": (
        ("atomics", (), {}, True),
        ("atomics, all heads begin with the same columns", (), {"STAGGERED": 0}, True),
        ("stores in place of atomics", (("red.global.add.v4.f32", "st.global.v4.f32"),), {}, False),
        (
            "no atomics",
            (("          atomic_add(row,", "          if (sum[m][n][0] == 1e30f) atomic_add(row,"),),
            {},
            False,
        ),
    ),
    "all_heads": (
        ("all heads", (), {}, True),
        ("all heads, Y is not read", (("if (ALL_HEADS && head > 0)", "if (false)"),), {}, False),
    ),
}
TILES = {  # BLOCK_M, BLOCK_N, WARPS, MIN_BLOCKS
    64: ((128, 64, 4, 2), (128, 64, 8, 1), (128, 128, 8, 1), (64, 64, 4, 2)),
    128: ((128, 64, 8, 1), (128, 64, 4, 2), (64, 64, 4, 2)),
}


def _fused_projection(
    work: Work,
    form: str,
    name: str,
    *,
    edits: Edits = (),
    sizes: Mapping[str, int] | None = None,
    right: bool = True,
) -> Way:
    source = edit(kernel.source(rotary_and_projection.PROJECTION), *edits) if edits else None
    planned = rotary_and_projection.plan_projection(
        work.q, work.k, work.v, work.w_o, form=form, causal=work.case.causal, source=source, sizes=sizes
    )
    return Way(name, planned.prepare(), lambda: planned.result, error=work.projection_error if right else None)


def projection_parts(work: Work) -> Iterator[Maker]:
    """Yield the fused projection with one part removed or changed, which shows where its time goes."""
    for form, changes in PARTS.items():
        for name, edits, sizes, right in changes:
            yield functools.partial(_fused_projection, work, form, name, edits=edits, sizes=sizes, right=right)


def projection_tiles(work: Work) -> Iterator[Maker]:
    """Yield other tiles of the fused projection, to check the table of tiles."""
    for form in rotary_and_projection.FORMS:
        for tile in TILES[work.shape[3]]:
            sizes = dict(zip(("BLOCK_M", "BLOCK_N", "WARPS", "MIN_BLOCKS"), tile, strict=True))
            name = f"{form}, {tile[0]} x {tile[1]}, {tile[2]} warps"
            yield functools.partial(_fused_projection, work, form, name, sizes=sizes)


SECTIONS: Mapping[str, Callable[[Work], Iterator[Maker]]] = {
    "rotary": rotary_ways,
    "projection": projection_ways,
    "narrow": projection_ways,  # models with 64 to 256 columns
    "projection parts": projection_parts,
    "projection tiles": projection_tiles,
}
PLAN: tuple[tuple[str, Case], ...] = (
    *((name, case_of(n, d)) for name in ("rotary", "projection") for d in HEAD_DIMS for n in LENGTHS),
    *((name, case_of(n, d, causal=True)) for name in ("rotary", "projection") for d in HEAD_DIMS for n in LENGTHS[1:]),
    *(("narrow", case_of(512, 64, tokens=tokens, columns=c)) for tokens in (2048, 16384) for c in (64, 128, 256)),
    *(("projection parts", case_of(n, d)) for d in HEAD_DIMS for n in (512, 16384)),
    *(("projection tiles", case_of(4096, d)) for d in HEAD_DIMS),
)


# ---- measuring


def _free_bytes() -> int:
    """Return the device's free memory."""
    if not ON_GPU:
        return 0
    cp.cuda.Device().synchronize()
    return cp.cuda.runtime.memGetInfo()[0]


def _where(section: str, case: Case) -> dict[str, Any]:
    batch, heads, n, head_dim = case.shape
    return {"section": section, "shape": [batch, n, heads, head_dim], "causal": case.causal}


def _failure(error: Exception) -> dict[str, str]:
    return {"failed": f"{type(error).__name__}: {error}"[:500]}


def rows_of(section: str, case: Case, rounds: int = ROUNDS) -> Iterator[dict[str, Any]]:
    """Measure one section at one shape: yield a row for each way, timed in turns, or with "failed"."""
    work = Work(case)
    ready: dict[str, Way] = {}
    measured: dict[str, dict[str, Any]] = {}
    for number, make in enumerate(SECTIONS[section](work)):
        row = {**_where(section, case), "name": f"way {number}"}
        try:
            way = make()
            row["name"] = way.name
            way.run()  # memory that is allocated once, such as a library's workspace, does not count
            free_pools()
            before = _free_bytes()
            way.run()
            row["extra_bytes"] = sum(a.nbytes for a in way.given) + max(0, before - _free_bytes())
            if way.error and way.result:
                row["max_error"], row["tolerance"] = way.error(way.result())
                if not row["max_error"] <= row["tolerance"]:
                    raise ValueError(f"wrong: error {row['max_error']:.2e} > tolerance {row['tolerance']:.2e}")
            ready[way.name], measured[way.name] = way, row
        except Exception as error:  # a way that fails must not stop the others
            yield {**_where(section, case), "name": row["name"], **_failure(error)}
    times = in_turns({name: way.run for name, way in ready.items()}, rounds)
    for name, row in measured.items():
        yield {**row, "ms": statistics.median(times[name]), "rounds": [round(ms, 5) for ms in times[name]]}


def kernels(case: Case) -> Iterator[dict[str, Any]]:
    """Yield registers, spills, shared memory and blocks per multiprocessor of the kernels, at one shape."""
    work = Work(case)
    angles = tuple(map(cp.asarray, rotary_and_projection.cos_sin(work.shape[1], work.shape[3])))
    options: dict[str, tuple[Rung, dict[str, Any]]] = {
        "07": (PLAIN, {}),
        "11, half-split": (ROTATION_IN_LOAD, {"rotary_cos": angles[0], "rotary_sin": angles[1]}),
    }
    planned: dict[str, tuple[Any, int, int]] = {}
    for name, (stage, given) in options.items():
        with contextlib.suppress(Exception):
            ready, arrays, _ = stage.plan(*(a.swapaxes(1, 2) for a in (work.q, work.k, work.v)), **given)
            ((launch, compiled, _),) = ready.resolve_arguments(arrays)
            planned[name] = compiled, launch.block[0], launch.shared_bytes
    plans = {
        f"11, {form}": rotary_and_projection.plan_projection(work.q, work.k, work.v, work.w_o, form=form)
        for form in rotary_and_projection.FORMS
    }
    plans["rotary"] = rotary_and_projection.plan_rotary(work.q, work.k, *angles)
    for name, plan in plans.items():
        compiled, _, (threads,), _, shared = plan.launch
        planned[name] = compiled, threads, shared
    gpu = tiles.this_gpu()
    for name, (compiled, threads, shared) in planned.items():
        facts = compiled.attributes
        row = {"name": name, "head_dim": work.shape[3], "threads": threads, "shared_bytes": shared}
        row.update(registers=facts.get("num_regs"), local_bytes=facts.get("local_size_bytes"))
        if gpu is not None:
            row["blocks"] = gpu.resident(threads, row["registers"], shared)[0]
        yield row


def _warm(section: str, case: Case) -> None:
    """Compile all kernels of a section at a shape into CuPy's cache."""
    for make in SECTIONS[section](Work(case)):
        with contextlib.suppress(Exception):
            way = make()
            if ON_GPU:
                way.run()
    if ON_GPU:
        cp.cuda.Device().synchronize()


def _compile_ahead(parts: Collection[str]) -> None:
    """Compile in parallel what these sections launch, into CuPy's cache."""
    # Every launch has the tiles of one of these.
    planned = [(name, case) for name, case in PLAN if name in parts and case.shape[2] in (512, 4096)]
    planned = [(name, case) for name, case in planned if case.shape[1] * case.shape[3] in (64, COLUMNS)]
    with ProcessPoolExecutor(min(15, max(1, len(planned))), mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(_warm, *one) for one in planned]:
            with contextlib.suppress(Exception):
                done.result()


def _section(name: str) -> Iterator[list[dict[str, Any]]]:
    """Measure a section at all of its shapes. A failed shape is a row with "failed", and the others continue."""
    for case in (case for section, case in PLAN if section == name):
        try:
            yield list(rows_of(name, case))
        except Exception as error:
            yield [{**_where(name, case), "name": "all", **_failure(error)}]


def _head() -> dict[str, Any]:
    versions = {name: fact for name, fact in device_facts().items() if name in ("driver", "torch")}
    return {"device": describe(), **versions, "dtype": DTYPE, "tokens": TOKENS}


STUDY = Study(
    "fused",
    {
        **{name: functools.partial(_section, name) for name in SECTIONS},
        "kernels": lambda: (row for d in HEAD_DIMS for row in kernels(case_of(4096, d))),
    },
    head=_head,
    prepare=_compile_ahead,
    key="section",
)
take = STUDY.take


# ---- reading


def rows(
    section: str,
    n: int,
    head_dim: int,
    *,
    causal: bool = False,
    record: Any = None,
) -> dict[str, dict[str, Any]]:
    """Return the recorded rows of a section at one shape by name, without failed ones; {} without a record."""
    shape = [TOKENS // n, n, COLUMNS // head_dim, head_dim]
    record = recorded() if record is None else record
    return {
        row["name"]: row
        for row in (record or {}).get("rows", ())
        if (row["section"], row["shape"], row["causal"]) == (section, shape, causal) and "failed" not in row
    }


# The way that the others of a section are compared with.
COMPARED_WITH = {
    "rotary": "rotary, then 07",
    "projection": "07, then GEMM",
    "narrow": "07, then GEMM",
    "projection parts": "atomics",
    "projection tiles": "",
}


@records.shown
def section_table(section: str, *, causal: bool = False, record: Any = None) -> str:
    """Format a section: a line for each way and shape with milliseconds, speedup over its pair, extra memory."""
    lines, of_shape = [], {}
    for row in record["rows"]:
        if (row["section"], row["causal"]) == (section, causal) and "failed" not in row:
            of_shape.setdefault(tuple(row["shape"]), {})[row["name"]] = row
    for (batch, n, heads, head_dim), found in of_shape.items():
        other = found.get(COMPARED_WITH[section])
        lines.append(f"d = {head_dim}, N = {n}{', causal' * causal}: {batch} x {heads} heads")
        for name, row in found.items():
            ratio = speeds(row["rounds"], other["rounds"]) if other else None
            faster = speed_text(ratio, 5) if ratio else ""
            lines.append(f"  {name:48}{row['ms']:9.3f} ms  {faster:24}{row['extra_bytes'] / 2**20:10,.0f} MiB")
    for row in record["rows"]:
        if (row["section"], row["causal"]) == (section, causal) and "failed" in row:
            lines.append(f"  {row['shape']} {row['name']}: {row['failed']}")
    return "\n".join(lines)


# Each fusion, and what it is compared with: (words, section, way, other).
PAIRS = (
    ("rotary in the load v. a pass, 07", "rotary", "11, half-split in the load", "rotary, then 07"),
    ("rotary in the load v. a pass, 10", "rotary", "11, half-split in the load", "rotary, then 10"),
    ("O W_O by atomics v. 07, GEMM", "projection", "11, atomics", "07, then GEMM"),
    ("O W_O, all heads v. 07, GEMM", "projection", "11, all heads in a block", "07, then GEMM"),
    ("O W_O by atomics v. 10, GEMM", "projection", "11, atomics", "10, then GEMM"),
)


def gain(words: str, n: int, head_dim: int, *, causal: bool = False, record: Any = None) -> dict[str, float] | None:
    """Return the speedup of a fusion of PAIRS over its pair; None if it is not recorded."""
    _, section, way, other = next(pair for pair in PAIRS if pair[0] == words)
    at_shape = rows(section, n, head_dim, causal=causal, record=record)
    return speeds(at_shape[way]["rounds"], at_shape[other]["rounds"]) if way in at_shape and other in at_shape else None


# Ways whose memory is shown: (words, section, way).
MEMORY = (
    ("rotary in the load", "rotary", "11, half-split in the load"),
    ("a pass of its own", "rotary", "rotary, then 07"),
    ("O W_O in the kernel", "projection", "11, atomics"),
    ("O, then a product", "projection", "07, then GEMM"),
)


def _table_of_shapes(cells: Mapping[str, Callable[[int, int], str]]) -> str:
    """Format a line for each of the words, a column for each shape; cells are made from (n, head_dim)."""
    shapes = [(d, n) for d in HEAD_DIMS for n in LENGTHS]
    lines = [" " * 40 + "".join(f"{f'd = {d}' if n == LENGTHS[0] else '':>11}" for d, n in shapes)]
    lines.append(" " * 40 + "".join(f"{f'N = {n}':>11}" for _, n in shapes))
    for words, cell in cells.items():
        texts = [cell(n, d) for d, n in shapes]
        if any(texts):
            lines.append(f"{words:40}" + "".join(f"{text:>11}" for text in texts))
    return "\n".join(line.rstrip() for line in lines)


@records.shown
def gains_table(*, causal: bool = False, record: Any = None) -> str:
    """Format each fusion's speedup over its unfused pair, the median over the rounds, as text."""

    def cell(words: str, n: int, head_dim: int) -> str:
        result = gain(words, n, head_dim, causal=causal, record=record)
        return f"{result['speed']:.2f}×" if result else ""

    return _table_of_shapes({words: functools.partial(cell, words) for words, *_ in PAIRS})


@records.shown
def memory_table(record: Any = None) -> str:
    """Format the MiB that the ways of MEMORY take beyond q, k, v, weights and the result, as text."""

    def cell(section: str, way: str, n: int, head_dim: int) -> str:
        row = rows(section, n, head_dim, record=record).get(way)
        return f"{row['extra_bytes'] / 2**20:,.0f}" if row else ""

    return _table_of_shapes({words: functools.partial(cell, section, way) for words, section, way in MEMORY})


@records.shown
def kernels_table(record: Any = None) -> str:
    """Format registers, local memory, shared memory and blocks per multiprocessor, as text."""
    lines = [f"{'':22}{'d':>5}{'registers':>11}{'local bytes':>13}{'shared bytes':>14}{'threads':>9}{'blocks':>8}"]
    for row in record["kernels"]:
        lines.append(
            f"{row['name']:22}{row['head_dim']:5}{row['registers'] or 0:11}{row['local_bytes'] or 0:13}"
            f"{row['shared_bytes']:14,}{row['threads']:9}{row.get('blocks', 0):8}"
        )
    return "\n".join(lines)


@records.shown
def table(record: Mapping[str, Any] | None = None) -> str:
    """Format a record, by default the committed one, as text."""
    parts = [
        f"{record['device']}, {record['dtype']}",
        gains_table(record=record),
        gains_table(causal=True, record=record),
    ]
    parts.append(f"MiB\n{memory_table(record=record)}")
    for section in SECTIONS:
        for causal in (False, True):
            if text := section_table(section, causal=causal, record=record):
                parts.append(f"{section}, compared with {COMPARED_WITH[section] or 'nothing'}\n{text}")
    return "\n\n".join([*parts, kernels_table(record)])
