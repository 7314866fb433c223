"""What notebook 17 works with: inputs, what is expected, and the rows of a record of ring attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from helpers.attention import reference
from helpers.bench.studies.ring import HEADS, LOCAL
from helpers.engine.cuda_source.signatures import dtype_of
from helpers.renamed import old_names

Row = Mapping[str, Any]
WAYS = {
    "zigzag, peer": "zigzag",
    "zigzag, nccl": "by NCCL",
    "ring, peer": "plain ring",
    "all_gather, peer": "all-gather",
}


def inputs(rows: int, *, keys: int = 0, heads: int = 4, kv_heads: int = 2, d: int = 64) -> list[np.ndarray]:
    """q, k, v and do in bfloat16, (1, tokens, heads, d), of non-zero mean. keys: as many as rows if 0."""
    rng = np.random.default_rng(17)
    shapes = ((rows, heads), (keys or rows, kv_heads), (keys or rows, kv_heads), (rows, heads))
    return [(rng.standard_normal((1, *shape, d)) + 0.25).astype(dtype_of("bfloat16")) for shape in shapes]


def _in_heads(q: np.ndarray, *of_keys: np.ndarray) -> list[np.ndarray]:
    """(1, heads, tokens, d) in float64, each head of K and V once for each head of Q that shares it."""
    arrays = [a.astype(np.float64).swapaxes(1, 2) for a in (q, *of_keys)]
    return [a.repeat(arrays[0].shape[1] // a.shape[1], axis=1) for a in arrays]


def expected(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False) -> np.ndarray:
    """The output in float64, in q's layout."""
    return np.asarray(reference.attention(*_in_heads(q, k, v), causal=causal)).swapaxes(1, 2)


def expected_gradients(
    do: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool
) -> list[np.ndarray]:
    """dq, dk and dv in float64, in the layouts of q, k and v."""
    gradients = reference.attention_backward(*_in_heads(do, q, k, v), causal=causal)
    of_heads = (a.reshape(1, like.shape[2], -1, *a.shape[2:]) for a, like in zip(gradients, (q, k, v), strict=True))
    return [a.sum(axis=2).swapaxes(1, 2) for a in of_heads]


def fastest(
    record: Mapping[str, Any] | None, way: str, *, causal: bool, heads: int, gpus: int = 2, part: str = "forward"
) -> dict[int, Row]:
    """Of the rows whose name begins with `way`, the fastest one of each number of tokens a GPU.

    part: "forward" or "backward".
    """
    best: dict[int, Row] = {}
    wanted = {"part": part, "causal": causal, "heads": heads, "gpus": gpus}
    for row in record["rows"] if record else ():
        fits = all(row.get(name) == value for name, value in wanted.items())
        if fits and row["name"].startswith(way) and row["ms"] <= best.get(row["rows"], row)["ms"]:
            best[row["rows"]] = row
    return best


def efficiency_table(record: Mapping[str, Any]) -> str:
    """The speed of each way beside independent GPUs as a table; of zigzag also the time, and what of it is the host."""
    lines = []
    for heads, kv_heads in HEADS:
        for causal in (False, True):
            table = {name: fastest(record, way, causal=causal, heads=heads) for way, name in WAYS.items()}
            table = {name: rows for name, rows in table.items() if rows}
            title = f"{heads}/{kv_heads} heads, {'causal' if causal else 'no mask'}"
            lines += ["", f"{title:22}" + "".join(f"{name:>12}" for name in table)]
            for n in LOCAL:
                numbers = (f"{rows[n]['speed']:12.2f}" if n in rows else " " * 12 for rows in table.values())
                row = table.get("zigzag", {}).get(n)
                took = f"   zigzag {row['ms']:7.2f} ms, host {row['host_ms']:.2f} ms" if row else ""
                lines.append(f"{n:6,} tokens a GPU   " + "".join(numbers) + took)
    return "\n".join(lines[1:])


def gradient_efficiency_table(record: Mapping[str, Any]) -> str:
    """Zigzag's gradients beside those of independent GPUs as a table, by peer copies."""
    kinds = [(heads, kv_heads, causal) for heads, kv_heads in HEADS for causal in (False, True)]
    heads = "".join(f"{f'{q}/{kv} heads' + ', causal' * causal:>20}" for q, kv, causal in kinds)
    found = [fastest(record, "zigzag, peer", causal=causal, heads=heads, part="backward") for heads, _, causal in kinds]
    lines = [f"{'gradients, zigzag':18}{heads}"]
    for n in sorted(set().union(*found)):
        numbers = "".join(f"{rows[n]['speed']:20.2f}" if n in rows else " " * 20 for rows in found)
        lines.append(f"{n:6,} tokens a GPU{numbers}")
    return "\n".join(lines)


old_names(
    __name__,
    exact="expected",
    exact_gradients="expected_gradients",
    shares="efficiency_table",
    shares_of_gradients="gradient_efficiency_table",
)
