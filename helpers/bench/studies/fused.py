"""Measure what fusing a neighbour into attention gains or loses: rotary embedding, output projection.

At each length the kernels of a section are timed in turns, on the same 16,384 tokens of 2048 columns: 32 heads of 64 or
16 of 128. All results are compared with float64 first, in some of their rows; a wrong one is not timed. `extra_bytes`
is the memory that a way of computing takes beyond q, k, v, weights and its result: the arrays it is given or leaves
between its kernels, and what the device has less after its first run.
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

import ml_dtypes
import numpy as np

from helpers.attention import kernel, reference, rotary_and_projection
from helpers.attention.check import make_inputs
from helpers.attention.ladder import LADDER, Rung
from helpers.attention.ladder.steps import ROTATION_IN_LOAD
from helpers.bench import peers, records
from helpers.bench.harness import Study, speed_text
from helpers.bench.timing import in_turns, speeds
from helpers.device import ON_GPU, cp, describe
from helpers.engine.cuda_source.edit import edit

recorded = records.reader("nvidia-h200-fused.json")
TOKENS, COLUMNS = 16384, 2048
LENGTHS, HEAD_DIMS = (512, 4096, 16384), (64, 128)
DTYPE = np.dtype(ml_dtypes.bfloat16)
ROUNDS = 8
SAMPLED_HEADS, SAMPLED_ROWS = 3, 48
FORMS = ("half-split", "interleaved")  # of a rotation
PLAIN, HOPPER = LADDER["flash_mma"], LADDER["hopper"]


@dataclass(frozen=True)
class Work:
    """A shape: 16,384 tokens in sequences of n rows, as many keys as rows, heads of head_dim columns, 2048 in all."""

    n: int
    head_dim: int
    causal: bool = False
    tokens: int = TOKENS
    columns: int = COLUMNS

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, n, heads, head_dim), as models have it."""
        return self.tokens // self.n, self.n, self.columns // self.head_dim, self.head_dim


@dataclass
class Way:
    """One way to compute something. run: launches. result: the device array that it writes, as models have it.

    given: the arrays that it needs beyond q, k, v, weights and the result. error: the error of the result and the one
    that passes, from a `Truth` and the result; None where nothing is compared.
    """

    name: str
    run: Callable[[], Any]
    result: Callable[[], Any] | None = None
    given: Sequence[Any] = ()
    error: Callable[[Truth, Any], tuple[float, float]] | None = None


# ---- inputs


@functools.lru_cache(maxsize=1)
def _tokens(tokens: int, columns: int) -> tuple[np.ndarray, ...]:
    """Make q, k and v of all tokens and heads, and w_o, on the host: rounded to bfloat16."""
    q, k, v = (make_inputs(tokens * columns // 64, 1, 64, seed=seed)[0].astype(DTYPE) for seed in (1, 2, 3))
    w_o = (make_inputs(columns * columns // 64, 1, 64, seed=4, mean=0.0)[0] * columns**-0.5).astype(DTYPE)
    return tuple(a.reshape(-1, columns) for a in (q, k, v, w_o))


@functools.lru_cache(maxsize=1)
def _tokens_there(tokens: int, columns: int) -> tuple[Any, ...]:
    return tuple(map(cp.asarray, _tokens(tokens, columns)))


class Inputs:
    """Device arrays of one Work."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.q, self.k, self.v = (a.reshape(work.shape) for a in _tokens_there(work.tokens, work.columns)[:3])
        self.w_o = _tokens_there(work.tokens, work.columns)[3]

    def heads_first(self, *arrays: Any) -> tuple[Any, ...]:
        """Return views (batch, heads, n, head_dim)."""
        return tuple(a.transpose(0, 2, 1, 3) for a in arrays)

    def empty(self) -> Any:
        """Return a new output, (batch, n, heads, head_dim)."""
        return cp.empty(self.work.shape, dtype=DTYPE)


def _torch(a: Any) -> Any:
    """Return a tensor of the same memory; bfloat16 through its bits, which DLPack always knows."""
    import torch

    return torch.from_dlpack(a.view(np.int16)).view(torch.bfloat16)


# ---- what is right


class Truth:
    """What some rows of some heads should be, float64, and the error that passes; on the host."""

    def __init__(self, work: Work, seed: int = 5) -> None:
        self.work = work
        rng = np.random.default_rng(seed)
        batch, n, heads, _ = work.shape
        self.places = [(int(rng.integers(batch)), int(rng.integers(heads))) for _ in range(SAMPLED_HEADS - 1)]
        self.places.append((batch - 1, heads - 1))
        self.rows = np.unique(np.r_[0, n - 1, rng.integers(0, n, SAMPLED_ROWS - 2)])

    def _head(self, batch: int, head: int) -> tuple[np.ndarray, ...]:
        arrays = (a.reshape(self.work.shape) for a in _tokens(self.work.tokens, self.work.columns)[:3])
        return tuple(a[batch, :, head].astype(np.float64) for a in arrays)

    @functools.cache  # noqa: B019 - a Truth lives as long as its section
    def _rows(self, batch: int, head: int, every: int, rotated: str = "") -> tuple[np.ndarray, ...]:
        """Compute O for every `every`-th of a head's sampled rows: exactly, and with P and O rounded to bfloat16."""
        rows = self.rows[::every]
        q, k, v = self._head(batch, head)
        n, head_dim = q.shape
        q = q[rows]
        if rotated:
            q, k = (rotate(a, at, rotated == "interleaved") for a, at in ((q, rows), (k, np.arange(n))))
        s = q @ k.T * head_dim**-0.5
        if self.work.causal:
            s[np.arange(n) > rows[:, None]] = -np.inf
        p = np.exp(s - s.max(axis=-1, keepdims=True))
        total = p.sum(axis=-1, keepdims=True)
        return p @ v / total, _rounded(_rounded(p) @ v / total)

    def outputs(self, o: Any, **how: str) -> tuple[float, float]:
        """Return the largest error of sampled rows of O, and the tolerance."""
        error, passes = 0.0, 0.0
        for batch, head in self.places:
            exact, near = self._rows(batch, head, 1, **how)
            got = cp.asnumpy(o[batch])[self.rows, head].astype(np.float64)  # contiguous: no kernel copies it
            error = max(error, _largest(got - exact))
            passes = max(passes, 2 * _largest(near - exact), 2**-8 * _largest(exact))
        return error, passes

    def projected(self, y: Any) -> tuple[float, float]:
        """Return the largest error of Y = O W_O in eight rows of one sequence, and the tolerance."""
        batch, every = self.places[0][0], max(1, len(self.rows) // 8)
        rows = self.rows[::every]
        heads = [self._rows(batch, head, every) for head in range(self.work.shape[2])]
        w_o = _tokens(self.work.tokens, self.work.columns)[3].astype(np.float64)
        exact, near = (np.concatenate(parts, axis=-1) @ w_o for parts in zip(*heads, strict=True))
        if y.dtype == DTYPE:
            near = _rounded(near)
        got = cp.asnumpy(y.reshape(*self.work.shape[:2], -1)[batch])[rows].astype(np.float64)
        return _largest(got - exact), max(2 * _largest(near - exact), 2**-8 * _largest(exact))

    def rotated(self, q: Any, k: Any, *, interleaved: bool) -> tuple[float, float]:
        """Return the largest error of the rotated q and k, and the tolerance."""
        error, passes = 0.0, 0.0
        for batch, head in self.places:
            for got, exact in zip((q, k), self._head(batch, head), strict=False):
                exact = rotate(exact[self.rows], self.rows, interleaved)
                error = max(error, _largest(cp.asnumpy(got[batch])[self.rows, head].astype(np.float64) - exact))
                passes = max(passes, 2**-8 * _largest(exact))
        return error, passes


def rotate(a: np.ndarray, positions: np.ndarray, interleaved: bool) -> np.ndarray:
    """Return rows (rows, d) rotated in float64 by the float32 angles of their positions, and rounded to bfloat16."""
    tables = rotary_and_projection.cos_sin(int(positions.max()) + 1, a.shape[1])
    return _rounded(reference.rotary(a, *tables, positions, interleaved=interleaved))


def _rounded(a: np.ndarray) -> np.ndarray:
    return a.astype(np.float32).astype(DTYPE).astype(np.float64)


def _largest(a: np.ndarray) -> float:
    return float(np.abs(a).max()) if np.isfinite(a).all() else float("inf")


# ---- the ways of each section


def attention(
    inputs: Inputs,
    name: str,
    stage: Rung,
    q: Any = None,
    k: Any = None,
    *,
    given: Sequence[Any] = (),
    how: Mapping[str, str] | None = None,
    **options: Any,
) -> Way:
    """Make the way of one stage; it writes O in models' layout. q, k: in place of the inputs' own.

    given: as `Way`. how: the rotation of the call, see `Truth.outputs`. options: of the stage.
    """
    o = inputs.empty()
    arrays = inputs.heads_first(inputs.q if q is None else q, inputs.k if k is None else k, inputs.v, o)
    run, _ = stage.prepare(*arrays[:3], causal=inputs.work.causal, out=arrays[3], **options)
    return Way(name, run, lambda: o, given, lambda truth, o: truth.outputs(o, **(how or {})))


def one_after_the_other(name: str, first: Way, second: Way, given: Sequence[Any]) -> Way:
    """Make one way of two, with the result of the second."""

    def run() -> None:
        first.run()
        second.run()

    return Way(name, run, second.result, given, second.error)


Maker = Callable[[], Way]


def rotary_ways(inputs: Inputs) -> Iterator[Maker]:
    """Yield a pass of its own before attention, and the rotation in attention's load."""
    angles = tuple(map(cp.asarray, rotary_and_projection.cos_sin(inputs.work.n, inputs.work.head_dim)))

    def alone(interleaved: bool) -> Way:
        planned = rotary_and_projection.plan_rotary(inputs.q, inputs.k, *angles, interleaved=interleaved)
        return Way(
            f"rotary alone, {FORMS[interleaved]}",
            planned.prepare(),
            lambda: planned.result,
            error=lambda truth, found: truth.rotated(*found, interleaved=interleaved),
        )

    def both(stage: Rung, name: str) -> Way:
        first = alone(False)
        second = attention(inputs, name, stage, *first.result(), how={"rotated": FORMS[False]})
        return one_after_the_other(name, first, second, first.result())

    def in_load() -> Way:
        form, options = FORMS[False], dict(zip(("rotary_cos", "rotary_sin"), angles, strict=True))
        return attention(inputs, f"11, {form} in the load", ROTATION_IN_LOAD, how={"rotated": form}, **options)

    def copied() -> Way:
        to = tuple(map(cp.empty_like, (inputs.q, inputs.k)))

        def run() -> None:
            to[0][...] = inputs.q
            to[1][...] = inputs.k

        return Way("copies of q and k", run)

    yield lambda: attention(inputs, "07, not rotated", PLAIN)
    yield lambda: both(PLAIN, "rotary, then 07")
    yield in_load
    yield lambda: both(HOPPER, "rotary, then 10")
    yield lambda: alone(False)
    yield lambda: alone(True)
    yield copied


def projection_ways(inputs: Inputs) -> Iterator[Maker]:
    """Yield attention, then one matrix product; and both in one kernel, in its two forms."""

    def product(o: Any) -> Way:
        rows = o.reshape(-1, inputs.work.columns)
        if peers.torch_on_gpu() is None:
            y = cp.empty((len(rows), inputs.w_o.shape[1]), dtype=np.float32)

            def by_numpy() -> None:
                y[...] = cp.asarray(cp.asnumpy(rows).astype(np.float32) @ cp.asnumpy(inputs.w_o).astype(np.float32))

            return Way("GEMM", by_numpy, lambda: y, error=Truth.projected)
        import torch

        y = cp.empty((len(rows), inputs.w_o.shape[1]), dtype=DTYPE)
        there, w_o, to = _torch(rows), _torch(inputs.w_o), _torch(y)
        return Way("GEMM", lambda: torch.mm(there, w_o, out=to), lambda: y, error=Truth.projected)

    def both(stage: Rung, name: str) -> Way:
        first = attention(inputs, name, stage)
        return one_after_the_other(name, first, product(first.result()), [first.result()])

    yield lambda: both(PLAIN, "07, then GEMM")
    yield lambda: _fused_projection(inputs, "atomics", "11, atomics")
    yield lambda: _fused_projection(inputs, "all_heads", "11, all heads in a block")
    yield lambda: both(HOPPER, "10, then GEMM")
    yield lambda: attention(inputs, "07 alone", PLAIN)
    yield lambda: Way("GEMM alone", product(inputs.q).run)


Edits = tuple[tuple[str, str], ...]
# The fused projection with one thing changed, by form: (name, edits, -D options, whether the result is still right).
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
    inputs: Inputs,
    form: str,
    name: str,
    *,
    edits: Edits = (),
    sizes: Mapping[str, int] | None = None,
    right: bool = True,
) -> Way:
    source = edit(kernel.source(rotary_and_projection.PROJECTION), *edits) if edits else None
    planned = rotary_and_projection.plan_projection(
        inputs.q, inputs.k, inputs.v, inputs.w_o, form=form, causal=inputs.work.causal, source=source, sizes=sizes
    )
    return Way(name, planned.prepare(), lambda: planned.result, error=Truth.projected if right else None)


def projection_parts(inputs: Inputs) -> Iterator[Maker]:
    """Yield the fused projection with one thing left out or changed: what its time goes into."""
    for form, changes in PARTS.items():
        for name, edits, sizes, right in changes:
            yield functools.partial(_fused_projection, inputs, form, name, edits=edits, sizes=sizes, right=right)


def projection_tiles(inputs: Inputs) -> Iterator[Maker]:
    """Yield other tiles of the fused projection, so that the table of tiles can be checked."""
    for form in rotary_and_projection.FORMS:
        for tile in TILES[inputs.work.head_dim]:
            sizes = dict(zip(("BLOCK_M", "BLOCK_N", "WARPS", "MIN_BLOCKS"), tile, strict=True))
            name = f"{form}, {tile[0]} x {tile[1]}, {tile[2]} warps"
            yield functools.partial(_fused_projection, inputs, form, name, sizes=sizes)


SECTIONS: Mapping[str, Callable[[Inputs], Iterator[Maker]]] = {
    "rotary": rotary_ways,
    "projection": projection_ways,
    "narrow": projection_ways,  # models of 64 to 256 columns
    "projection parts": projection_parts,
    "projection tiles": projection_tiles,
}
PLAN: tuple[tuple[str, Work], ...] = (
    *((name, Work(n, d)) for name in ("rotary", "projection") for d in HEAD_DIMS for n in LENGTHS),
    *((name, Work(n, d, causal=True)) for name in ("rotary", "projection") for d in HEAD_DIMS for n in (4096, 16384)),
    *(("narrow", Work(512, 64, tokens=tokens, columns=c)) for tokens in (2048, 16384) for c in (64, 128, 256)),
    *(("projection parts", Work(n, d)) for d in HEAD_DIMS for n in (512, 16384)),
    *(("projection tiles", Work(4096, d)) for d in HEAD_DIMS),
)


# ---- measuring


def _free_bytes() -> int:
    """Return the device's free memory, after all pools have given back what is unused."""
    if not ON_GPU:
        return 0
    cp.get_default_memory_pool().free_all_blocks()
    if (torch := peers.torch_on_gpu()) is not None:
        torch.cuda.empty_cache()
    cp.cuda.Device().synchronize()
    return cp.cuda.runtime.memGetInfo()[0]


def rows_of(section: str, work: Work, rounds: int = ROUNDS) -> Iterator[dict[str, Any]]:
    """Measure one section at one shape: yield a row for each way, timed in turns, or with "failed"."""
    inputs, truth = Inputs(work), Truth(work)
    ready: dict[str, Way] = {}
    measured: dict[str, dict[str, Any]] = {}
    where = {"section": section, "shape": list(work.shape), "causal": work.causal}
    for number, make in enumerate(SECTIONS[section](inputs)):
        name = f"way {number}"
        try:
            way = make()
            name = way.name
            row = {**where, "name": name}
            way.run()  # what is allocated once, such as a library's workspace, is not this way's
            before = _free_bytes()
            way.run()
            if ON_GPU:
                cp.cuda.Device().synchronize()
                grown = max(0, before - cp.cuda.runtime.memGetInfo()[0])
            else:
                grown = 0
            row["extra_bytes"] = sum(a.nbytes for a in way.given) + grown
            if way.error and way.result:
                row["max_error"], row["tolerance"] = way.error(truth, way.result())
                if not row["max_error"] <= row["tolerance"]:
                    raise ValueError(f"wrong: the error is {row['max_error']:.2e}, {row['tolerance']:.2e} passes")
            ready[name], measured[name] = way, row
        except Exception as error:  # a way that fails must not lose the others
            yield {**where, "name": name, "failed": f"{type(error).__name__}: {error}"[:500]}
    times = in_turns({name: way.run for name, way in ready.items()}, rounds)
    for name, row in measured.items():
        yield {**row, "ms": statistics.median(times[name]), "rounds": [round(ms, 5) for ms in times[name]]}


def kernels(work: Work) -> Iterator[dict[str, Any]]:
    """Yield registers, spills, shared memory and blocks a multiprocessor of the kernels, at one shape."""
    from helpers.attention.ladder import tiles

    inputs = Inputs(work)
    angles = tuple(map(cp.asarray, rotary_and_projection.cos_sin(work.n, work.head_dim)))
    qkv = inputs.heads_first(inputs.q, inputs.k, inputs.v)
    options: dict[str, tuple[Rung, dict[str, Any]]] = {
        "07": (PLAIN, {}),
        "11, half-split": (ROTATION_IN_LOAD, {"rotary_cos": angles[0], "rotary_sin": angles[1]}),
    }
    planned: dict[str, tuple[Any, int, int]] = {}
    for name, (stage, given) in options.items():
        with contextlib.suppress(Exception):
            ready, arrays, _ = stage.plan(*qkv, **given)
            ((launch, compiled, _),) = ready.resolve_arguments(arrays)
            planned[name] = compiled, launch.block[0], launch.shared_bytes
    for form in rotary_and_projection.FORMS:
        plan = rotary_and_projection.plan_projection(inputs.q, inputs.k, inputs.v, inputs.w_o, form=form)
        compiled, _, (threads,), _, shared = plan.launch
        planned[f"11, {form}"] = compiled, threads, shared
    compiled, _, (threads,), _, shared = rotary_and_projection.plan_rotary(inputs.q, inputs.k, *angles).launch
    planned["rotary"] = compiled, threads, shared
    gpu = tiles.this_gpu()
    for name, (compiled, threads, shared) in planned.items():
        facts = compiled.attributes
        row = {"name": name, "head_dim": work.head_dim, "threads": threads, "shared_bytes": shared}
        row.update(registers=facts.get("num_regs"), local_bytes=facts.get("local_size_bytes"))
        if gpu is not None:
            row["blocks"] = gpu.resident(threads, row["registers"], shared)[0]
        yield row


def _warm(section: str, work: Work) -> None:
    """Compile all kernels of a section at a shape into CuPy's cache."""
    inputs = Inputs(work)
    for make in SECTIONS[section](inputs):
        with contextlib.suppress(Exception):
            way = make()
            if ON_GPU:
                way.run()
    if ON_GPU:
        cp.cuda.Device().synchronize()


def _compile_ahead(parts: Collection[str]) -> None:
    """Compile what these sections launch side by side, into CuPy's cache."""
    # All that is launched has the tiles of one of these.
    planned = [(name, work) for name, work in PLAN if name in parts and work.n in (512, 4096)]
    planned = [(name, work) for name, work in planned if work.columns in (64, COLUMNS)]
    with ProcessPoolExecutor(min(15, max(1, len(planned))), mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(_warm, *one) for one in planned]:
            with contextlib.suppress(Exception):
                done.result()


def _section(name: str) -> Iterator[list[dict[str, Any]]]:
    """Measure a section at all of its shapes. One shape that fails is a row with "failed", and the others go on."""
    for work in (work for section, work in PLAN if section == name):
        try:
            yield list(rows_of(name, work))
        except Exception as error:
            where = {"section": name, "shape": list(work.shape), "causal": work.causal, "name": "all"}
            yield [where | {"failed": f"{type(error).__name__}: {error}"[:500]}]


STUDY = Study(
    "fused",
    {
        **{name: functools.partial(_section, name) for name in SECTIONS},
        "kernels": lambda: (row for d in HEAD_DIMS for row in kernels(Work(4096, d))),
    },
    head=lambda: {"device": describe(), **_versions(), "dtype": DTYPE.name, "tokens": TOKENS},
    prepare=_compile_ahead,
    key="section",
)
take = STUDY.take


def _versions() -> dict[str, Any]:
    """Return the versions of the driver and of PyTorch, as far as they are there."""
    versions: dict[str, Any] = {}
    if ON_GPU:
        versions["driver"] = cp.cuda.runtime.driverGetVersion()
    if (torch := peers.torch_on_gpu()) is not None:
        versions["torch"] = torch.__version__
    return versions


# ---- reading


def rows(
    section: str,
    n: int,
    head_dim: int,
    *,
    causal: bool = False,
    heads: int = 0,
    tokens: int = TOKENS,
    record: Any = None,
) -> dict[str, dict[str, Any]]:
    """Return the recorded rows of a section at one shape by name, those that failed left out; empty without a record.

    heads: of 2048 columns where it is 0.
    """
    shape = [tokens // n, n, heads or COLUMNS // head_dim, head_dim]
    record = recorded() if record is None else record
    return {
        row["name"]: row
        for row in (record or {}).get("rows", ())
        if (row["section"], row["shape"], row["causal"]) == (section, shape, causal) and "failed" not in row
    }


def speed(way: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """Return how many times as fast one row is as another, round by round: speed, speed_min, speed_max."""
    return speeds(way["rounds"], other["rounds"])


# The way that the others of a section are compared with.
BESIDE = {
    "rotary": "rotary, then 07",
    "projection": "07, then GEMM",
    "narrow": "07, then GEMM",
    "projection parts": "atomics",
    "projection tiles": "",
}


@records.shown
def section_table(section: str, *, causal: bool = False, record: Any = None, names: Sequence[str] = ()) -> str:
    """Format a section: a line for each way and shape with milliseconds, speed over its pair, extra memory."""
    lines, of_shape = [], {}
    for row in record["rows"]:
        if (row["section"], row["causal"]) == (section, causal) and "failed" not in row:
            of_shape.setdefault(tuple(row["shape"]), {})[row["name"]] = row
    for (batch, n, heads, head_dim), found in of_shape.items():
        other = found.get(BESIDE[section])
        lines.append(f"d = {head_dim}, N = {n}{', causal' * causal}: {batch} x {heads} heads")
        for name, row in found.items():
            if names and name not in names:
                continue
            ratio = speed(row, other) if other else None
            faster = speed_text(ratio, 5) if ratio else ""
            lines.append(f"  {name:48}{row['ms']:9.3f} ms  {faster:24}{row['extra_bytes'] / 2**20:10,.0f} MiB")
    for row in record["rows"]:
        if (row["section"], row["causal"]) == (section, causal) and "failed" in row:
            lines.append(f"  {row['shape']} {row['name']}: {row['failed']}")
    return "\n".join(lines)


# Each fusion, and what it is compared with: (words, section, way, other).
PAIRS = (
    ("rotary in the load, beside a pass, 07", "rotary", "11, half-split in the load", "rotary, then 07"),
    ("rotary in the load, beside a pass, 10", "rotary", "11, half-split in the load", "rotary, then 10"),
    ("O W_O by atomics, beside 07, GEMM", "projection", "11, atomics", "07, then GEMM"),
    ("O W_O, all heads, beside 07, GEMM", "projection", "11, all heads in a block", "07, then GEMM"),
    ("O W_O by atomics, beside 10, GEMM", "projection", "11, atomics", "10, then GEMM"),
)


def gain(words: str, n: int, head_dim: int, *, causal: bool = False, record: Any = None) -> dict[str, float] | None:
    """Return how many times as fast a fusion of PAIRS is as its pair; None if that is not recorded."""
    _, section, way, other = next(pair for pair in PAIRS if pair[0] == words)
    at_shape = rows(section, n, head_dim, causal=causal, record=record)
    return speed(at_shape[way], at_shape[other]) if way in at_shape and other in at_shape else None


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
    """Format how many times as fast each fusion is as its unfused pair, the median over the rounds, as text."""

    def cell(words: str, n: int, head_dim: int) -> str:
        result = gain(words, n, head_dim, causal=causal, record=record)
        return f"{result['speed']:.2f}×" if result else ""

    return _table_of_shapes({words: functools.partial(cell, words) for words, *_ in PAIRS})


@records.shown
def memory_table(record: Any = None) -> str:
    """Format how many MiB the ways of MEMORY take beyond q, k, v, weights and the result, as text."""

    def cell(section: str, way: str, n: int, head_dim: int) -> str:
        row = rows(section, n, head_dim, record=record).get(way)
        return f"{row['extra_bytes'] / 2**20:,.0f}" if row else ""

    return _table_of_shapes({words: functools.partial(cell, section, way) for words, section, way in MEMORY})


@records.shown
def kernels_table(record: Any = None) -> str:
    """Format registers, local memory, shared memory, blocks a multiprocessor, as text."""
    lines = [f"{'':22}{'d':>5}{'registers':>11}{'local bytes':>13}{'shared bytes':>14}{'threads':>9}{'blocks':>8}"]
    for row in record["kernels"]:
        lines.append(
            f"{row['name']:22}{row['head_dim']:5}{row['registers'] or 0:11}{row['local_bytes'] or 0:13}"
            f"{row['shared_bytes']:14,}{row['threads']:9}{row.get('blocks', 0):8}"
        )
    return "\n".join(lines)


@records.shown
def table(record: Mapping[str, Any] | None = None) -> str:
    """Format a record as text; the committed one where none is given."""
    parts = [
        f"{record['device']}, {record['dtype']}",
        gains_table(record=record),
        gains_table(causal=True, record=record),
    ]
    parts.append(f"MiB\n{memory_table(record=record)}")
    for section in SECTIONS:
        for causal in (False, True):
            if text := section_table(section, causal=causal, record=record):
                parts.append(f"{section}, beside {BESIDE[section] or 'nothing'}\n{text}")
    return "\n\n".join([*parts, kernels_table(record)])
