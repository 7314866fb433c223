"""Notebook 17's shortcuts: inputs, expected results, and the rows of a record of ring attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from helpers.attention import flash_attention, reference, ring
from helpers.bench.studies.ring import LOCAL, SHORT
from helpers.device import cp
from helpers.engine.cuda_source.signatures import dtype_of

Row = Mapping[str, Any]
WAYS = {
    "zigzag, peer": "zigzag",
    "zigzag, nccl": "by NCCL",
    "ring, peer": "plain ring",
    "all_gather, peer": "all-gather",
}


def inputs(rows: int, *, keys: int = 0, heads: int = 4, kv_heads: int = 2, d: int = 64) -> list[np.ndarray]:
    """Make q, k, v and do in bfloat16, (1, tokens, heads, d), of non-zero mean. keys: 0 for as many as rows."""
    rng = np.random.default_rng(17)
    shapes = ((rows, heads), (keys or rows, kv_heads), (keys or rows, kv_heads), (rows, heads))
    return [(rng.standard_normal((1, *shape, d)) + 0.25).astype(dtype_of("bfloat16")) for shape in shapes]


def _in_heads(q: np.ndarray, *of_keys: np.ndarray) -> list[np.ndarray]:
    """Convert to (1, heads, tokens, d) in float64, repeating KV heads for the query heads that share them."""
    arrays = [a.astype(np.float64).swapaxes(1, 2) for a in (q, *of_keys)]
    return [a.repeat(arrays[0].shape[1] // a.shape[1], axis=1) for a in arrays]


def expected(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False) -> np.ndarray:
    """Compute the output in float64, in q's layout."""
    return np.asarray(reference.attention(*_in_heads(q, k, v), causal=causal)).swapaxes(1, 2)


def expected_gradients(
    do: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool
) -> list[np.ndarray]:
    """Compute dq, dk and dv in float64, in the layouts of q, k and v."""
    gradients = reference.attention_backward(*_in_heads(do, q, k, v), causal=causal)
    of_heads = (a.reshape(1, like.shape[2], -1, *a.shape[2:]) for a, like in zip(gradients, (q, k, v), strict=True))
    return [a.sum(axis=2).swapaxes(1, 2) for a in of_heads]


def fastest(
    record: Mapping[str, Any] | None, way: str, *, causal: bool, heads: int, gpus: int = 2, part: str = "forward"
) -> dict[int, Row]:
    """Return the fastest row for each number of tokens a GPU among those whose name begins with `way`.

    part: "forward" or "backward".
    """
    best: dict[int, Row] = {}
    wanted = {"part": part, "causal": causal, "heads": heads, "gpus": gpus}
    for row in record["rows"] if record else ():
        fits = all(row.get(name) == value for name, value in wanted.items())
        if fits and row["name"].startswith(way) and row["ms"] <= best.get(row["rows"], row)["ms"]:
            best[row["rows"]] = row
    return best


def efficiency_table(record: Mapping[str, Any], *, heads: int = 16, causal: bool = True) -> str:
    """Tabulate the speed of each way relative to independent GPUs; for zigzag also gradients, time and host time.

    Args:
        heads: of Q; study.HEADS has the number of heads of K and V for each.
    """
    kinds = {name: fastest(record, way, causal=causal, heads=heads) for way, name in WAYS.items()}
    kinds["gradients"] = fastest(record, "zigzag, peer", causal=causal, heads=heads, part="backward")
    kinds = {name: rows for name, rows in kinds.items() if rows}
    lines = [f"{'tokens a GPU':>12}" + "".join(f"{name:>12}" for name in kinds) + f"{'zigzag':>14}{'of the host':>14}"]
    for n in LOCAL:
        numbers = "".join(f"{rows[n]['speed']:12.2f}" if n in rows else " " * 12 for rows in kinds.values())
        row = kinds.get("zigzag", {}).get(n)
        took = f"{row['ms']:11.2f} ms{row['host_ms']:11.2f} ms" if row else ""
        lines.append(f"{n:12,}{numbers}{took}")
    return "\n".join(lines)


KINDS = [(part, causal) for part in ("forward", "backward") for causal in (False, True)]  # those of short steps


def _short(record: Mapping[str, Any], way: str, part: str, causal: bool, heads: int) -> dict[int, Row]:
    return fastest(record, way, causal=causal, heads=heads, part=f"short {part}")


def _kinds(width: int) -> str:
    return "".join(f"{part + (', causal' if causal else ''):>{width}}" for part, causal in KINDS)


def graph_table(record: Mapping[str, Any], *, heads: int = 16) -> str:
    """Tabulate speeds relative to independent GPUs by peer copies: zigzag call by call, and graphs.

    An all-gather's graphs are recorded for the forward pass only.
    """
    ways = {"calls": "calls, peer", "graphs": "graph, peer", "graphs, all-gather": "all-gather, graph"}
    lines = [f"{'tokens a GPU':38}" + "".join(f"{n:>8,}" for n in SHORT)]
    for part, causal in KINDS:
        kind = f"{part}{', causal' if causal else ''}"
        for name, way in ways.items():
            found = _short(record, way, part, causal, heads)
            speeds = "".join(f"{found[n]['speed']:8.2f}" if n in found else " " * 8 for n in SHORT)
            lines += [f"{kind:18}{name:20}{speeds}"] if found else []
            kind = "" if found else kind
    return "\n".join(lines)


def apart_table(record: Mapping[str, Any], rows: int = 8192, *, heads: int = 16) -> str:
    """Tabulate milliseconds of zigzag's graphs, of variants of them with parts left out, and of independent runs."""
    variants = ("joined after", "no messages", "products alone")
    ways = ("graph, peer", *(f"graph, {variant}" for variant in variants), "all-gather, graph", "independent")
    lines = [f"{f'{rows:,} tokens a GPU':24}{_kinds(18)}"]
    for way in ways:
        ms = [_short(record, way, *kind, heads).get(rows) for kind in KINDS]
        name = way.replace(", peer", "").replace("graph, ", "  ").replace(", graph", "")
        if any(ms):
            lines.append(f"{name:24}" + "".join(f"{row['ms']:15.2f} ms" if row else " " * 18 for row in ms))
    return "\n".join(lines)


def gather_table(record: Mapping[str, Any], rows: int = 16384) -> str:
    """Tabulate the parts of an all-gather, without a mask and causal: milliseconds, and the clock of the first GPU."""
    pieces: dict[str, str] = {}
    for row in record["rows"]:
        if row["part"] == "gathered" and row["rows"] == rows:
            pieces[row["name"]] = (
                pieces.get(row["name"], "") + f"{row.get('sustained_ms', row['ms']):9.2f} ms{row['sm_mhz'][0]:6} MHz"
            )
    head = f"{rows:,} tokens a GPU"
    lines = [f"{head:24}{'no mask':>12}{'causal':>22}", *(f"{name:24}{text}" for name, text in pieces.items())]
    return "\n".join(lines)


def copies_by_size(record: Mapping[str, Any], way: str = "peer copies", *, gpus: int = 2) -> dict[int, Row]:
    """Return the rows of recorded copies of 8 KV heads, by tokens a GPU."""
    rows = (row for row in record["rows"] if row["part"] == "copies")
    return {row["rows"]: row for row in rows if row["name"] == way and row["gpus"] == gpus}


def fit_copies(record: Mapping[str, Any], way: str = "peer copies", *, gpus: int = 2) -> dict[str, float]:
    """Fit t0 + bytes / B to recorded copies, by least squares of relative errors.

    Returns:
        t0_ms and gb_per_s, as `study.efficiency` takes them; and error, the largest relative one.
    """
    rows = copies_by_size(record, way, gpus=gpus).values()
    ms, sent = (np.array([row[name] for row in rows], float) for name in ("ms", "bytes"))
    terms = np.stack([np.ones_like(ms), sent], axis=1) / ms[:, None]
    (t0, ms_per_byte), *_ = np.linalg.lstsq(terms, np.ones_like(ms), rcond=None)
    error = np.abs(terms @ (t0, ms_per_byte) - 1).max()
    return {"t0_ms": float(t0), "gb_per_s": float(1e-6 / ms_per_byte), "error": float(error)}


def longest(record: Mapping[str, Any]) -> dict[int, dict[str, Row]]:
    """Return the recorded runs of 2^20 tokens, by number of GPUs and by transport: "peer copies" or "nccl"."""
    runs: dict[int, dict[str, Row]] = {}
    for row in record["rows"]:
        if row["part"] == "long":
            runs.setdefault(row["gpus"], {})[row["name"].partition(", ")[2]] = row
    return dict(sorted(runs.items()))


def error_of_merges(size: int, store: Callable[[Any], Any]) -> float:
    """Measure the RMS error of a bfloat16 output into which the parts of `size` ranks were merged one by one.

    Args:
        store: applied to each partial output, and to each merged one.
    """
    q, k, v, _ = inputs(512)
    o = lse = None
    for keys, values in zip(np.split(k, size, axis=1), np.split(v, size, axis=1), strict=True):
        arrays = map(cp.asarray, (q, keys, values))
        o_part, lse_part = flash_attention(*arrays, return_lse=True, out_dtype=np.float32)
        o_part = store(o_part)
        if o is None:
            o, lse = o_part, lse_part
        else:
            o = store(ring.merge(o, o_part, (0, q.shape[1]), lse, lse_part))
    return float(np.sqrt(np.mean((cp.asnumpy(rounded(o)) - expected(q, k, v)) ** 2)))


def rounded(a: Any) -> Any:
    """Round an array to bfloat16, and return it as float32."""
    return cp.asarray(cp.asnumpy(a).astype(dtype_of("bfloat16")).astype(np.float32))
