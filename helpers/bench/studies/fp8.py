"""Measure FP8 attention: errors rung by rung and by length, a model's loss, speeds in turns.

python3 -m helpers.bench.study fp8 FILE [rungs] [lengths] [model] [speeds] [turns] [transposition]

Rungs: measures that lower the error on several kinds of data: scales per tensor, per head, per block of rows, K minus
    its mean, a Hadamard rotation, sums of each tile added in float32, weights summed by a row of ones; against float64
    on the unrounded numbers.
Lengths: the error by the number of keys, against float64 on the rounded numbers, also FlashAttention-3's. Gain is the
    output's projection on the exact one.
Model: the loss of a small GPT, trained in float32, by the type of its attention.
Speeds: those of repeated calls, which do not order tiles again; ours include the transposition of V.
Turns: the stage with turns of its consumers at the products, and without.
Transposition: that of V, and a copy that reads and writes the same number of bytes.
Tried (not measured again): changes, in turns with an earlier version of the stage, and whether they were kept.
Power (not measured again): clock, power, and the share of the tensor cores' rate at that clock, of a kernel that runs
    repeatedly.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from helpers.attention import flash_attention, kernel, reference
from helpers.attention.check import real_inputs
from helpers.attention.fp8 import DESCALE_ROWS, E4M3, dequantise, descale_of, hadamard, minus_mean, quantise
from helpers.attention.ladder import LADDER
from helpers.attention.ladder.steps import CLIMBS, FP8_CODES
from helpers.attention.models.char_gpt import CharGPT, Config, FlashAttention, to_host, train
from helpers.bench import records
from helpers.bench.cases import TYPES, Case
from helpers.bench.harness import Part, Row, Study, Way, compare, compare_case, fields_text, speed_text
from helpers.bench.job import WrongOutput
from helpers.bench.peers import flash_attention_3, torch_on_gpu
from helpers.bench.results import NO_RECORD
from helpers.bench.studies.train import origin
from helpers.device import ON_GPU, cp, describe
from helpers.draw.picture import GPU, PEER, Picture, Text, figure

recorded = records.reader("nvidia-h200-fp8.json")
FP8, ONE_LEVEL, TWO_LEVELS, CODES = "fp8", "one level of sums", "two levels of sums", "weights by codes"
ROW_OF_ONES, QUARTERS = "a row of ones", "O in quarters"
BLOCKS = "descales of blocks"  # fp8 with a descale for each block of rows
FA3, FA3_BF16, HOPPER = "FlashAttention-3 fp8", "FlashAttention-3 bf16", "hopper bf16"
KERNELS = {
    **dict(zip((ONE_LEVEL, TWO_LEVELS, ROW_OF_ONES, QUARTERS, FP8), CLIMBS["fp8"], strict=True)),
    CODES: FP8_CODES,
}
HEADS, ROWS, KEYS, HEAD_DIM = 4, 256, 2048, 128
LENGTHS = (1024, 4096, 16384, 65536)
SHAPES = (
    *((1, 16, 16384, 128), (16, 4, 4096, 128), (1, 32, 16384, 64), (4, 32, 4096, 64)),
    *((1, 8, 16384, 256), (4, 8, 4096, 256)),
)
ROUNDS = 9
TRAINED = {"config": Config(context=256, layers=2, heads=4, width=256), "batch": 64, "steps": 600, "warm_up": 100}
LEARNING_RATE = 2e-3
BATCHES = 8  # of held-out text
EXP2_PER_CYCLE, FLOP_PER_CYCLE = 16, 8192  # per multiprocessor, for e4m3 products


# ---- errors


def errors_of(o: Any, exact: np.ndarray) -> dict[str, float]:
    """Return the rms error relative to the exact output's rms, the largest error, and the gain."""
    o = np.asarray(o, np.float64)
    return {
        "rms": float(np.linalg.norm(o - exact) / np.linalg.norm(exact)),
        "largest": float(np.abs(o - exact).max()),
        "gain": float((o * exact).sum() / (exact**2).sum()),
    }


def attention_of(name: str, qkv: Sequence[np.ndarray], descales: Sequence[Any] = (None,) * 3) -> np.ndarray:
    """Run one of KERNELS on e4m3 bytes (heads, rows, head_dim).

    Args:
        descales: (1 or heads, 1, 1), or (heads, rows, 1) for blocks of rows; None for all 1.

    Returns:
        float32.
    """
    q, k, v = (cp.asarray(a[None]) for a in qkv)
    o = cp.full(q.shape, cp.nan, np.float32)
    given = {
        f"{letter}_descale": cp.asarray(_as_kernels_read(descale, len(a)))
        for letter, a, descale in zip("qkv", qkv, descales, strict=True)
        if descale is not None
    }
    KERNELS[name](q, k, v, out=o, **given)
    return cp.asnumpy(o)[0]


def _as_kernels_read(descale: np.ndarray, heads: int) -> np.ndarray:
    """Reshape the descales from `scaled` to (1, heads), or for blocks of rows to (1, heads, blocks)."""
    of_heads = np.broadcast_to(descale, (heads, *descale.shape[1:]))[None, :, ::DESCALE_ROWS, 0]
    return np.ascontiguousarray(of_heads if descale.shape[1] > 1 else of_heads[..., 0])


def data(kind: str, rng: np.random.Generator) -> list[np.ndarray]:
    """Make q, k and v, float32 (heads, rows, head_dim), of one kind."""
    if kind == "MiniLM":  # from a small language model: 12 heads, 272 rows, 32 columns
        return [np.stack(each) for each in zip(*map(real_inputs, range(12)), strict=True)]
    q, k, v = (rng.standard_normal((HEADS, rows, HEAD_DIM)) for rows in (ROWS, KEYS, KEYS))
    if kind == "heads of different size":
        size = np.geomspace(1, 64, HEADS)[:, None, None]
        q, k, v = q * size, k / size, v * size
    elif kind == "V with a mean":
        v = 1 + v / 2
    elif kind == "K with a mean":
        k = k + 8 * rng.standard_normal((HEADS, 1, HEAD_DIM))
    elif kind == "rare outliers":  # as in FlashAttention-3's paper
        q, k = (a + 10 * rng.standard_normal(a.shape) * (rng.random(a.shape) < 1e-3) for a in (q, k))
    elif kind == "outlier columns":
        q[..., ::32] *= 3
        k[..., ::32] *= 3
    elif kind == "outlier columns of K alone":
        q[..., ::32] /= 4
        k[..., ::32] *= 20
    return [a.astype(np.float32) for a in (q, k, v)]


KINDS = (
    *("normal", "heads of different size", "V with a mean", "K with a mean", "rare outliers", "outlier columns"),
    *("outlier columns of K alone", "MiniLM"),
)


class Rung(NamedTuple):
    """A rung of accuracy. scale: what has its own: "tensor", "head" or "block" of rows. sums: one of KERNELS."""

    name: str
    scale: str
    minus_mean: bool = False
    rotates: bool = False
    sums: str = ONE_LEVEL


RUNGS = (
    Rung("a scale for each tensor", "tensor"),
    Rung("a scale for each head", "head"),
    Rung("a scale for each block of rows", "block", sums=FP8),
    Rung("K minus its mean", "head", True),
    Rung("Hadamard", "head", True, True),
    Rung("each tile added in float32", "head", True, True, TWO_LEVELS),
    Rung("weights summed by a row of ones", "head", True, True, FP8),
    Rung("the same without Hadamard", "head", True, sums=FP8),
)


def scaled(a: np.ndarray, scale: str) -> np.ndarray:
    """Return the descales of (heads, rows, head_dim), in a shape that broadcasts over it."""
    if scale == "tensor":
        return descale_of(a)
    if scale == "head":
        return descale_of(a, (1, 2))
    blocks = [descale_of(a[:, i : i + DESCALE_ROWS], (1, 2)) for i in range(0, a.shape[1], DESCALE_ROWS)]
    return np.concatenate(blocks, 1).repeat(DESCALE_ROWS, 1)[:, : a.shape[1]]


def output_of(rung: Rung, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Quantise q, k and v for a rung, and return their attention."""
    if rung.minus_mean:
        k = minus_mean(k)
    if rung.rotates:
        rotation = hadamard(q.shape[-1], seed=0)
        q, k = q @ rotation, k @ rotation
    descales = [scaled(a, rung.scale) for a in (q, k, v)]
    e4m3 = [quantise(a, descale) for a, descale in zip((q, k, v), descales, strict=True)]
    return attention_of(rung.sums, e4m3, descales)


def of_rungs(kinds: Sequence[str] = KINDS) -> Iterator[Row]:
    """Yield a row for each kind of data and rung: errors against float64 on the unrounded numbers."""
    for kind in kinds:
        q, k, v = data(kind, np.random.default_rng(16))
        exact = reference.attention(q.astype(np.float64), k.astype(np.float64), v.astype(np.float64))
        for rung in RUNGS:
            what = {"data": kind, "name": rung.name, "sums": rung.sums, "shape": list(k.shape)}
            yield {**what, **errors_of(output_of(rung, q, k, v), exact)}


def _fa3() -> Any | None:
    """Import FlashAttention-3, if it and PyTorch are installed and see the GPU."""
    return flash_attention_3() if torch_on_gpu() else None


def _fa3_tensors(torch: Any, bytes_: Sequence[np.ndarray]) -> list[Any]:
    """Convert e4m3 bytes (batch, heads, rows, head_dim) to tensors (batch, rows, heads, head_dim)."""
    contiguous = (np.ascontiguousarray(a.swapaxes(1, 2)) for a in bytes_)
    return [torch.from_numpy(a).cuda().view(torch.float8_e4m3fn) for a in contiguous]


def _fa3_output(module: Any, tensors: Sequence[Any], descale: Any = None, **options: Any) -> Any:
    """Call FlashAttention-3. descale: per head, (batch, heads), for e4m3."""
    if descale is not None:
        options |= dict.fromkeys(("q_descale", "k_descale", "v_descale"), descale)
    o = module.flash_attn_func(*tensors, **options)
    return o[0] if isinstance(o, tuple) else o


def of_lengths(lengths: Sequence[int] = LENGTHS) -> Iterator[Row]:
    """Yield a row for each kernel, kind of V and number of keys: errors against float64 on the rounded numbers."""
    module = _fa3()
    for kind, keys in itertools.product(("normal", "V with a mean"), lengths):
        rng = np.random.default_rng(keys)
        q, k, v = (rng.standard_normal((2, rows, HEAD_DIM), dtype=np.float32) for rows in (ROWS, keys, keys))
        e4m3 = [quantise(a) for a in (q, k, 1 + v / 2 if kind == "V with a mean" else v)]
        exact = reference.attention(*(dequantise(a, dtype=np.float64) for a in e4m3))
        outputs: dict[str, Callable[[], Any]] = {name: functools.partial(attention_of, name, e4m3) for name in KERNELS}
        if module is not None:
            import torch

            tensors = _fa3_tensors(torch, [a[None] for a in e4m3])
            one = torch.ones(1, 2, device="cuda")
            outputs[FA3] = lambda given=tensors, one=one: (
                _fa3_output(module, given, one)[0].float().cpu().numpy().swapaxes(0, 1)
            )
        for name, call in outputs.items():
            yield {"data": kind, "keys": keys, "name": name, **errors_of(call(), exact)}


# ---- an end task


class Fp8Attention:
    """A model's attention in e4m3: a descale per head, K minus its mean. It has no gradients."""

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return the output (B, T, H, d) in q's type, and None: no backward pass."""
        q_host, k_host, v_host = map(to_host, (q, k, v))
        arrays, descales = [], {}
        for name, a in (("q", q_host), ("k", minus_mean(k_host, axis=1)), ("v", v_host)):
            descale = descale_of(a, (1, 3))
            arrays.append(cp.asarray(quantise(a, descale)))
            descales[f"{name}_descale"] = cp.asarray(np.ascontiguousarray(descale[:, 0, :, 0]))
        o = flash_attention(*arrays, causal=True, out_dtype="float32", **descales)
        return (o if ON_GPU else np.asarray(cp.asnumpy(o))).astype(q.dtype, copy=False), None

    def backward(self, do: Any, saved: Any) -> tuple[Any, Any, Any]:
        """Raise NotImplementedError: there are no gradients."""
        raise NotImplementedError("attention in e4m3 has no gradients here")


def of_model(text: str | None = None, batches: int = BATCHES, **how: Any) -> Iterator[Row]:
    """Train a small GPT in float32, then yield its loss on held-out text, a row for each type of its attention."""
    text = origin() if text is None else text
    how = {"learning_rate": LEARNING_RATE, "every": 10**9, "report": None, **TRAINED, **how}
    model = train(text, **how).model
    context = model.config.context
    tokens = model.encode(text[-(batches * (context + 1)) :]).reshape(batches, context + 1)
    tokens = cp.asarray(tokens) if ON_GPU else tokens
    types = {"float32": FlashAttention(), "bfloat16": FlashAttention("bfloat16"), "e4m3": Fp8Attention()}
    for name, attention in types.items():
        own = CharGPT(model.characters, model.config, attention)
        own.parameters[...] = model.parameters
        loss = float(own.loss(tokens[:, :-1], tokens[:, 1:]))
        yield {"name": name, "loss": loss, "characters": int(tokens.size), "steps": how["steps"]}


# ---- speeds


@functools.lru_cache(maxsize=1)
def _bytes(size: int) -> tuple[np.ndarray, ...]:
    """Draw normal numbers in e4m3 for q, k and v, equally many for every shape."""
    rng = np.random.default_rng(8)
    return tuple(quantise(rng.standard_normal(size, dtype=np.float32)) for _ in range(3))


def _after_the_first(stage: Any, arrays: Sequence[Any], causal: bool, **more: Any) -> Way:
    """Launch a call; return a function that launches what repeated calls with these shapes need, and returns o."""
    ready, named, o = stage.plan(*arrays, causal=causal, **more)
    again = []
    for launch, built, args in ready.resolve_arguments(named):
        run = built.bind(launch.grid, launch.block, args, shared_mem=launch.shared_bytes)
        run()
        if not launch.once:
            again.append(run)

    def run_again(alive: Any = named) -> Any:  # a tensor map does not keep its array alive
        for each in again:
            each()
        return o

    return run_again


def _of_blocks(qkv: Sequence[Any]) -> dict[str, Any]:
    """Return descales, all 1, for the blocks of rows of q, k and v (batch, heads, rows, head_dim)."""
    shapes = ((*a.shape[:2], -(-a.shape[2] // DESCALE_ROWS)) for a in qkv)
    return {f"{letter}_descale": cp.ones(shape, np.float32) for letter, shape in zip("qkv", shapes, strict=True)}


def _ways(case: Case, given: Sequence[np.ndarray]) -> dict[str, Way]:
    """Prepare the timed ways: ours, the stage hopper in bfloat16, FlashAttention-3 in both types. Each returns o."""
    causal, on_device = case.causal, [cp.asarray(a) for a in given]
    wide = [cp.asarray(a.view(E4M3).astype(TYPES["bfloat16"])) for a in given]
    ways = {name: _after_the_first(stage, on_device, causal) for name, stage in KERNELS.items()}
    ways[BLOCKS] = _after_the_first(LADDER["fp8"], on_device, causal, **_of_blocks(on_device))
    ways[HOPPER] = _after_the_first(LADDER["hopper"], wide, causal)
    if module := _fa3():
        import torch

        tensors = _fa3_tensors(torch, given)
        halves = [a.to(torch.bfloat16) for a in tensors]
        one = torch.ones(*case.shape[:2], device="cuda")
        ways[FA3] = lambda: _fa3_output(module, tensors, one, causal=causal)
        ways[FA3_BF16] = lambda: _fa3_output(module, halves, causal=causal)
    return ways


CHECKED_ROWS, MOST_RMS = 64, 0.06


def _require_right(name: str, o: Any, given: Sequence[np.ndarray], causal: bool) -> None:
    """Compare the last rows of the last head with float64.

    Raises:
        WrongOutput: the error is larger than the rounding of P explains.
    """
    q, k, v = (dequantise(a[-1, -1], dtype=np.float64) for a in given)
    exact = reference.attention(q[-CHECKED_ROWS:], k, v, causal=causal)
    if hasattr(o, "cpu"):  # a tensor (batch, rows, heads, head_dim)
        rows = o[-1, -CHECKED_ROWS:, -1].float().cpu().numpy()
    else:
        rows = cp.asnumpy(o[-1, -1, -CHECKED_ROWS:]).astype(np.float64)
    rms = errors_of(rows, exact)["rms"]
    if not rms <= MOST_RMS:
        raise WrongOutput(f"{name} has an rms error of {rms:.1e}; at most {MOST_RMS} is allowed")


def _compared(
    shapes: Sequence[Sequence[int]], rounds: int, ways_of: Callable[[Case, list[np.ndarray]], dict[str, Way]], of: str
) -> Iterator[list[Row]]:
    """Yield rows for each shape, without a mask and causal: all ways are checked, then timed in turns."""
    for shape, causal in itertools.product(shapes, (False, True)):
        case, given = Case(tuple(shape), "uint8", causal), [a.reshape(shape) for a in _bytes(math.prod(shape))]
        ways = ways_of(case, given)
        for name, way in ways.items():
            _require_right(name, way(), given, causal)
        yield compare_case(case, ways, rounds, of=of, itself=True)


def of_speeds(shapes: Sequence[Sequence[int]] = SHAPES, rounds: int = ROUNDS) -> Iterator[list[Row]]:
    """Yield rows for each shape and mask: TFLOP/s, and the speed of fp8 relative to each, in turns."""
    return _compared(shapes, rounds, _ways, FP8)


TURNS = {"turns": 1, "no turns": 0}  # fp8's -D option


def of_turns(shapes: Sequence[Sequence[int]] = SHAPES, rounds: int = ROUNDS) -> Iterator[list[Row]]:
    """Yield rows for each shape and mask: fp8 with turns and without, in turns."""

    def ways(case: Case, given: list[np.ndarray]) -> dict[str, Way]:
        tile = LADDER["fp8"].tiles(case.shape[3])
        arrays = [cp.asarray(a) for a in given]
        sizes = {name: {**tile, "TURNS": turns} for name, turns in TURNS.items()}
        return {name: _after_the_first(LADDER["fp8"], arrays, case.causal, sizes=each) for name, each in sizes.items()}

    return _compared(shapes, rounds, ways, "turns")


def of_transposition(shapes: Sequence[Sequence[int]] = SHAPES, rounds: int = ROUNDS) -> Iterator[list[Row]]:
    """Yield rows for each shape: V's transposition, with its speed relative to a copy of the same number of bytes."""
    for shape in shapes:
        given = [cp.asarray(a.reshape(shape)) for a in _bytes(math.prod(shape))]
        ready, named, _ = LADDER["fp8"].plan(*given, sizes={**LADDER["fp8"].tiles(shape[-1]), "BACKGROUND": 0})
        (launch, transpose, args), *_ = ready.resolve_arguments(named)
        v, image = args[:2]
        here, there = (cp.zeros((v.size + image.size) // 2, np.uint8) for _ in range(2))
        ways: dict[str, Way] = {
            "transposition": transpose.bind(launch.grid, launch.block, args, shared_mem=launch.shared_bytes),
            "copy": functools.partial(cp.copyto, there, here),
        }
        for way in ways.values():
            way()
        rows = compare(ways, rounds, over="copy", itself=True)
        yield [{"shape": list(shape), "name": name, "bytes": v.size + image.size, **row} for name, row in rows.items()]


def _compile_ahead(parts: Collection[str]) -> None:
    """Compile the kernels for all head_dims in parallel: each takes a GPU's compiler many seconds."""
    timed = {shape[-1] for shape in SHAPES} if "speeds" in parts else set()
    jobs = []
    for head_dim in sorted({*timed, HEAD_DIM}):
        shape = (1, 1, 256, head_dim)
        e4m3 = [cp.zeros(shape, np.uint8)] * 3
        for stage in KERNELS.values():
            plan = functools.partial(stage.plan, *e4m3)
            jobs += [functools.partial(plan, out=cp.zeros(shape, np.float32))] * (head_dim == HEAD_DIM)
            jobs += [plan] * (head_dim in timed)
        blocks = functools.partial(LADDER["fp8"].plan, *e4m3, **_of_blocks(e4m3))
        jobs += [blocks] * (head_dim in timed) + [functools.partial(blocks, out=cp.zeros(shape, np.float32))]
        wide = [cp.zeros(shape, TYPES["bfloat16"])] * 3
        jobs += [functools.partial(LADDER["hopper"].plan, *wide)] * (head_dim in timed)
    kernel.side_by_side(jobs)


PARTS: Mapping[str, Part] = {
    "rungs": of_rungs,
    "lengths": of_lengths,
    "model": of_model,
    "speeds": of_speeds,
    "turns": of_turns,
    "transposition": of_transposition,
}


STUDY = Study("fp8", PARTS, lambda: {"device": describe(), "how": __doc__}, _compile_ahead, line=fields_text)
take = STUDY.take


# ---- read by notebook 16


def gains() -> dict[int, float]:
    """Return FlashAttention-3's gain by the number of keys, for V with a mean; {} without a record of it."""
    rows = (recorded() or {}).get("lengths", ())
    return {row["keys"]: row["gain"] for row in rows if (row["name"], row["data"]) == (FA3, "V with a mean")}


def speeds(
    shape: Sequence[int], causal: bool = False, record: Mapping[str, Any] | None = None, *, part: str = "speeds"
) -> dict[str, Mapping[str, Any]]:
    """Return the rows of a shape by name, from part "speeds" or "turns"; {} without a record."""
    rows = (record or recorded() or {}).get(part, ())
    return {row["name"]: row for row in rows if row["shape"] == list(shape) and row["causal"] == causal}


def gained_by_turns(record: Mapping[str, Any] | None = None) -> tuple[float, float]:
    """Return the smallest and the largest speed of fp8 over fp8 without turns, up to head_dim 128; 1 without rows.

    At 256, the compiler spills without turns: stores and loads of 952 bytes a thread in 16_fp8.cu, of 32 with them.
    """
    rows = (record or recorded() or {}).get("turns", ())
    speeds_of = [row["speed"] for row in rows if row["name"] == "no turns" and row["shape"][-1] <= 128] or [1.0]
    return min(speeds_of), max(speeds_of)


def exponentials_share(head_dim: int) -> float:
    """Return the share of the tensor cores' peak at which the exponentials alone take all cycles; at most 1."""
    return min(1.0, 4 * head_dim * EXP2_PER_CYCLE / FLOP_PER_CYCLE)


@records.shown
def rungs_table(record: Mapping[str, Any] | None = None) -> str:
    """Format the rms errors of the rungs as text, a line for each kind of data."""
    rows = record["rungs"]
    columns = {
        "a scale for each tensor": "tensor",
        "a scale for each head": "head",
        "a scale for each block of rows": "block*",
        "K minus its mean": "K - mean",
        "Hadamard": "Hadamard",
        "each tile added in float32": "new sums",
        "weights summed by a row of ones": "ones",
    }
    lines = [f"{'rms error':28}" + "".join(f"{short:>10}" for short in columns.values())]
    for kind in dict.fromkeys(row["data"] for row in rows):
        of = {row["name"]: row["rms"] for row in rows if row["data"] == kind}
        lines.append(f"{kind:28}" + "".join(f"{of[name]:10.1%}" if name in of else " " * 10 for name in columns))
    lines.append("* with new sums and ones")
    return "\n".join(lines)


@records.shown
def speeds_table(record: Mapping[str, Any] | None = None) -> str:
    """Format the recorded speeds without a mask as text: a line for each shape, in TFLOP/s and relative to fp8."""
    names = {CODES: "codes", HOPPER: "10, bf16", FA3: "FA-3, FP8", FA3_BF16: "FA-3, bf16"}
    lines = [f"{'TFLOP/s (× fp8)':24}{'fp8':>5}" + "".join(f"{short:>18}" for short in names.values())]
    for shape in SHAPES:
        rows = speeds(shape, False, record)
        if FP8 not in rows:
            continue
        cells = [
            f"{rows[name]['tflops']:.0f} ({1 / rows[name]['speed']:.2f}×)" if name in rows else "" for name in names
        ]
        what = f"{'×'.join(map(str, shape[:3]))}, d = {shape[3]}"
        lines.append(f"{what:24}{rows[FP8]['tflops']:5.0f}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def steps_picture() -> Picture | Text:
    """Draw the recorded speeds of the steps and of FlashAttention-3 at 16,384 keys, as bars for each head_dim."""
    shapes = sorted((shape for shape in SHAPES if shape[2] == 16384), key=lambda shape: shape[3])
    names = [ONE_LEVEL, TWO_LEVELS, ROW_OF_ONES, QUARTERS, FP8, CODES, FA3]
    groups = {shape[-1]: speeds(shape) for shape in shapes}
    if not all(FP8 in rows for rows in groups.values()):
        return Text(NO_RECORD)
    labels = {FP8: "16", FA3: "FlashAttention-3, FP8"}
    fig, ax = figure(8, 4.6)
    height = 0.9 / len(names)
    for i, name in enumerate(names):
        values = [rows[name]["tflops"] if name in rows else 0 for rows in groups.values()]
        places = np.arange(len(groups)) + (i - (len(names) - 1) / 2) * height
        colour = PEER if name == FA3 else GPU
        bars = ax.barh(places, values, height=0.9 * height, color=colour, alpha=1 if name in (FP8, FA3) else 0.45)
        ax.bar_label(bars, [f"{labels.get(name, name)}: {value:.0f}" for value in values], padding=4, fontsize=7)
    ax.set_yticks(range(len(groups)), [f"d = {head_dim}" for head_dim in groups])
    ax.invert_yaxis()
    ax.margins(x=0.25)
    ax.set_xlabel("TFLOP/s (more is better), recorded on an H200")
    said = (f"{name} {rows[name]['tflops']:.0f}" for rows in groups.values() for name in names if name in rows)
    return Picture(fig, "TFLOP/s at d = 64, 128, 256: " + ", ".join(said))


# By part: the label of a table's line after the shape.
_LINES: Mapping[str, Callable[[Row], str]] = {
    "speeds": lambda row: f"{row['name']:26}{row['tflops']:6.0f} TFLOP/s  fp8 is {speed_text(row)}",
    "turns": lambda row: f"{row['name']:26}{row['ms']:6.3f} ms  with turns {speed_text(row)}",
    "transposition": lambda row: (
        f"{row['name']:26}{1e3 * row['ms']:6.1f} µs  {row['bytes'] / row['ms'] / 1e9:.2f} TB/s"
    ),
    "tried": lambda row: (
        f"{row['name']:56}{row['speed']:.3f}× the stage before, {'kept' if row['kept'] else 'not kept'}"
    ),
}


@records.shown
def table(record: Mapping[str, Any] | None = None) -> str:
    """Format the record as text: errors by rung and by length, losses, speeds."""
    lines = [f"on {record['device']}"]
    for row in record.get("rungs", ()):
        lines.append(f"{row['data']:28}{row['name']:32}rms {row['rms']:.1e}  gain {row['gain']:.4f}")
    for row in record.get("lengths", ()):
        lines.append(
            f"{row['data']:16}{row['keys']:6} keys  {row['name']:24}rms {row['rms']:.1e}  gain {row['gain']:.4f}"
        )
    for row in record.get("model", ()):
        lines.append(f"loss with attention in {row['name']:10}{row['loss']:.4f}")
    for part, text in _LINES.items():
        for row in record.get(part, ()):
            shape = "×".join(map(str, row["shape"])) + " causal" * row.get("causal", False)
            lines.append(f"{shape:24}{text(row)}")
    return "\n".join(lines)
