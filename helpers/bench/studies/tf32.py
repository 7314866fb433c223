"""Compare float32 on tensor cores with exact float32: errors against float64, speeds in turns, tiles.

python3 -m helpers.bench.study tf32 FILE [errors] [ranges] [speeds] [fp16x3_tiles]

Errors: for 256 rows, of tf32, its steps, tf32 with one product, fp16x3, heads_and_masks, and PyTorch. Scores are
`scale` times as large as those of unit-normal inputs; with "positive", V's elements are above 0, which shows a
truncated sum. Ranges: the same with q and v multiplied by a number and k divided by it, and with columns of magnitudes
2^0 to 2^-bits, reversed in k; relative to the column's magnitude. Speeds: 16,384 tokens and 2048 columns of all heads
together. Tiles: those of fp16x3, at 4096 keys.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from helpers.attention import kernel, reference
from helpers.attention.ladder import LADDER
from helpers.attention.ladder.steps import CLIMBS
from helpers.bench import records
from helpers.bench.cases import Case, shape_of_tokens
from helpers.bench.experiments import TF32_ONE_PRODUCT
from helpers.bench.harness import Part, Row, Study, compare_jobs, compare_tiles, fields_text
from helpers.bench.job import of_peer, of_stage, why_not
from helpers.bench.peers import TORCH
from helpers.bench.run import JobRunner
from helpers.bench.timing import speed_range
from helpers.device import ON_GPU, cp, describe
from helpers.engine.cuda_source.edit import edit

recorded = records.reader("nvidia-h200-tf32.json")
PEERS = tuple(peer for peer in TORCH if "float32" in peer.dtypes)
ROWS = 256
HEAD_DIMS = (64, 128)
# scale of the scores, positive V
KINDS = ((1, False), (1, True), (10, False), (30, False))
ERRORS_AT = (1024, 2048, 4096, 8192, 16384, 32768)
SPEEDS_AT = (1024, 2048, 4096, 8192, 16384)
ROUNDS = 9
# factor of q and v, bits of the columns' magnitudes
RANGES = ((1.0, 0), (1e4, 0), (1e-30, 0), (1.0, 8), (1.0, 16), (1.0, 24), (1.0, 32))
NAMES = ("BLOCK_M", "BLOCK_N", "STAGES", "PINGPONG")
TILES: Mapping[int, tuple[tuple[int, int, int, int], ...]] = {
    64: (*((128, 128, 5, 1), (128, 128, 5, 0), (128, 112, 5, 1), (128, 96, 6, 1), (128, 144, 4, 1), (128, 64, 8, 1)),),
    96: ((128, 64, 5, 1), (128, 80, 4, 1), (128, 96, 3, 1)),
    128: ((128, 64, 5, 1), (128, 64, 5, 0), (128, 48, 6, 1), (128, 80, 4, 1)),
}


def arrays(head_dim: int, keys: int, scale: float, positive: bool) -> tuple[np.ndarray, ...]:
    """Make q of ROWS rows, k and v: (1, 1, rows, head_dim)."""
    rng = np.random.default_rng([head_dim, keys])
    q, k, v = (rng.standard_normal((1, 1, rows, head_dim)) for rows in (ROWS, keys, keys))
    return tuple(a.astype(np.float32) for a in (scale * q, k, np.abs(v) if positive else v))


def outputs(given: Sequence[np.ndarray], with_peers: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the compared outputs by name: the steps to tf32 by their ideas, tf32 itself as "15", and others."""
    tf32 = LADDER["tf32"]
    one_product = edit(kernel.source(tf32.file), *TF32_ONE_PRODUCT)
    for step in CLIMBS["tf32"]:
        yield ("15" if step is tf32 else step.idea), cp.asnumpy(step(*given))
    run, o = tf32.prepare(*given, source=one_product)
    run()
    yield "one product", cp.asnumpy(o)
    if LADDER["fp16x3"].why_not(head_dim=given[0].shape[-1]) is None:
        yield "fp16x3", cp.asnumpy(LADDER["fp16x3"](*given))
    yield "05", cp.asnumpy(LADDER["heads_and_masks"](*given))
    if with_peers:
        import torch

        tensors = SimpleNamespace(torch=tuple(torch.from_numpy(a).cuda() for a in given))
        for peer in PEERS:
            with peer.ready(tensors, False) as call:
                yield peer.name, call().cpu().numpy()


def errors(keys_at: Sequence[int] = ERRORS_AT, with_peers: bool = ON_GPU) -> Iterator[dict[str, Any]]:
    """Yield a row for each output: the largest, the root of the mean square, and the mean of its errors."""
    for head_dim, (scale, positive), keys in itertools.product(HEAD_DIMS, KINDS, keys_at):
        given = arrays(head_dim, keys, scale, positive)
        o = np.asarray(reference.attention(*given))
        of_case = {"head_dim": head_dim, "scale": scale, "positive": positive, "keys": keys}
        for name, out in outputs(given, with_peers):
            off = out - o
            figures = {"max": np.abs(off).max(), "rms": np.sqrt(np.square(off).mean()), "mean": off.mean()}
            yield {**of_case, "name": name, **{what: float(f"{value:.2e}") for what, value in figures.items()}}


def ranges() -> Iterator[dict[str, Any]]:
    """Yield a row for each output: its largest error relative to its column's magnitude."""
    head_dim, keys = 128, 4096
    for factor, bits in RANGES:
        of_column = np.exp2(-np.linspace(0, bits, head_dim).round()) * factor
        q, k, v = arrays(head_dim, keys, 1, False)
        given = tuple(a.astype(np.float32) for a in (q * of_column, k / of_column, v * of_column))
        o = np.asarray(reference.attention(*given))
        for name, out in outputs(given, ON_GPU):
            off = float(np.abs((out - o) / of_column).max())
            yield {"times": factor, "bits": bits, "keys": keys, "name": name, "max": float(f"{off:.2e}")}


def of_speeds(at: Sequence[int] = SPEEDS_AT, with_peers: bool = ON_GPU) -> Iterator[list[Row]]:
    """Yield a row for each kernel and case: TFLOP/s, and the speedup of tf32."""
    runner = JobRunner(0.0)
    for head_dim, n, causal in itertools.product(HEAD_DIMS, at, (False, True)):
        case = Case(shape_of_tokens(n, head_dim), causal=causal)
        stages = (LADDER[name] for name in ("tf32", "fp16x3", "heads_and_masks"))
        jobs = [of_stage(stage, case) for stage in stages if why_not(stage, case) is None]
        if with_peers:  # the scores of SDPA math would take 34 GB and more
            jobs += [of_peer(peer, case) for peer in PEERS if peer.sweep or n <= 8192]
        yield compare_jobs(runner, jobs, ROUNDS, of="tf32")


def of_tiles() -> Iterator[Row]:
    """Yield a row for each tile of fp16x3: TFLOP/s without a mask and causal, and spilled bytes per thread."""
    for head_dim, candidates in TILES.items():
        ways = {tuple(tile): (LADDER["fp16x3"], dict(zip(NAMES, tile, strict=True))) for tile in candidates}
        for tile, row in compare_tiles(Case(shape_of_tokens(4096, head_dim)), ways).items():
            yield {"head_dim": head_dim, **ways[tile][1], **row}


PARTS: Mapping[str, Part] = {
    "errors": errors,
    "ranges": ranges,
    "speeds": of_speeds,
    "fp16x3_tiles": of_tiles,
}


def _head() -> dict[str, Any]:
    return {"device": describe(), "how": __doc__}


STUDY = Study("tf32", PARTS, _head, line=fields_text, needs=("torch",))
take = STUDY.take


class ErrorCase(NamedTuple):
    """Inputs whose errors are recorded. scale: that of Q. positive: V is between 0 and 1."""

    head_dim: int
    scale: float
    positive: bool
    keys: int


def largest_errors(record: Mapping[str, Any] | None = None) -> dict[str, dict[ErrorCase, float]]:
    """Return the largest error of each kernel in each case, from a record, by default the committed one."""
    errors: dict[str, dict[ErrorCase, float]] = {}
    for row in (record or recorded())["errors"]:
        case = ErrorCase(row["head_dim"], row["scale"], row["positive"], row["keys"])
        errors.setdefault(row["name"], {})[case] = row["max"]
    return errors


@records.shown
def table(record: Mapping[str, Any] | None = None) -> str:
    """Format the record as text: errors by case, a column each; speeds; tiles, fastest first."""
    lines = [f"on {record['device']}"]
    names = list(dict.fromkeys(row["name"] for row in record.get("errors", ())))
    cases = itertools.groupby(record.get("errors", ()), lambda r: (r["head_dim"], r["scale"], r["positive"], r["keys"]))
    heads = [textwrap.wrap(name, 10) for name in names]
    for i in range(max(map(len, heads), default=0)):
        lines.append(
            f"{'' if i else 'largest error':32}" + "".join(f"{''.join(head[i : i + 1]):>11}" for head in heads)
        )
    for (head_dim, scale, positive, keys), rows in cases:
        of = {row["name"]: f"{row['max']:.1e}" for row in rows}
        case = f"d {head_dim}, scale {scale}, {keys}{' positive' * positive}"
        lines.append(f"{case:32}" + "".join(f"{of.get(name, ''):>11}" for name in names))
    for row in record.get("ranges", ()):
        case = f"all times {row['times']:g}, columns of {row['bits']} bits"
        lines.append(f"{case:36}{row['name']:24}{row['max']:.1e}")
    for row in record.get("speeds", ()):
        case = f"d {row['shape'][3]}, N {row['shape'][2]}{' causal' * row['causal']}"
        low, high = speed_range(row)
        speed = f"15 is {row['speed']:.2f} x ({low:.2f} to {high:.2f})"
        lines.append(f"{case:28}{row['name']:18}{row['tflops']:7.1f} TFLOP/s   {speed}")
    for row in sorted(record.get("fp16x3_tiles", ()), key=lambda row: (row["head_dim"], -row["full"] - row["causal"])):
        sizes = " ".join(f"{name}={row[name]}" for name in NAMES)
        spilled = f"{row['local_bytes']} bytes spilled" if row["local_bytes"] else ""
        lines.append(f"d {row['head_dim']:<5}{sizes:46}{row['full']:6.1f} ({row['causal']:.1f}) TFLOP/s  {spilled}")
    return "\n".join(lines)
