"""Time hopper_backward where the first block stores a tile of dQ, and where all blocks add to zeros, on a GPU.

    python3 -m helpers.bench.study first_store FILE

bfloat16, 16,384 tokens, heads x head_dim = 2048; all three kernels, in turns. "tries": other changes of the kernel that
were timed in turns with it, at 512 to 16,384 rows. They lost, or gained too little for what they need: programmatic
dependent launch needs an attribute of launches that CuPy has no argument for. Their texts are not kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from helpers.attention.ladder import BACKWARD, LADDER, backward
from helpers.bench import records
from helpers.bench.cases import Case, Inputs, shape_of_tokens
from helpers.bench.harness import Study, compare, speed_text
from helpers.device import cp, describe

recorded = records.reader("nvidia-h200-first_store.json")
STAGE = BACKWARD["hopper_backward"]
WAYS = {"first stores": 1, "zeros": 0}
CASES = tuple(
    Case(shape_of_tokens(n, head_dim), "bfloat16", causal, backward=True)
    for head_dim in (128, 64)
    for n in (512, 1024, 4096)
    for causal in (False, True)
)
ROUNDS = 15


def rows(cases: tuple[Case, ...] = CASES, rounds: int = ROUNDS) -> Iterator[list[dict[str, Any]]]:
    """Time both in turns, case by case. AssertionError if their gradients differ by more than rounding."""
    for case in cases:
        inputs = Inputs(case.shape, case.dtype)
        q, k, v = inputs.device
        o, lse = LADDER["hopper"](q, k, v, causal=case.causal, return_lse=True)
        given = cp.asarray(inputs.do), q, k, v, o, lse
        ways, gradients = {}, {}
        for name, stores in WAYS.items():
            sizes = {"FIRST_STORES": stores}
            ways[name], gradients[name] = backward.prepare(STAGE, *given, causal=case.causal, sizes=sizes)
            ways[name]()
        one, other = ([cp.asnumpy(a).astype("float32") for a in of_way] for of_way in gradients.values())
        for a, b in zip(one, other, strict=True):
            assert abs(a - b).max() <= 0.01 * abs(b).max(), f"{case}: the gradients differ"
        timed = compare(ways, rounds, flops=case.flops, over="zeros")
        what = {"shape": list(case.shape), "dtype": case.dtype, "causal": case.causal}
        yield [{"name": name, **what, **figures} for name, figures in timed.items()]


STUDY = Study("first_store", {"rows": rows}, lambda: {"device": describe(), "rounds": ROUNDS})
take = STUDY.take


@records.shown
def table(record: Mapping[str, Any] | None = None) -> str:
    """Format a record as text, a case a line: both times, and how many times as fast the first way is."""
    first, zeros = WAYS
    lines = [f"{'the gradients, bfloat16':40}{'zeros':>12}{'first stores':>14}"]
    pairs = zip(record["rows"][::2], record["rows"][1::2], strict=True)
    for one, other in pairs:
        assert (one["name"], other["name"]) == (first, zeros)
        batch, heads, n, d = one["shape"]
        what = f"{batch} x {heads} heads of {d}, N = {n}" + ", causal" * one["causal"]
        lines.append(f"{what:40}{other['ms']:9.3f} ms{one['ms']:11.3f} ms{speed_text(one):>24}")
    return "\n".join(lines)


@records.shown
def tries_table(record: Mapping[str, Any] | None = None) -> str:
    """Format the tries as text, one a line: the lowest and the highest speed, over the kernel as it was."""
    lines = []
    for row in record["tries"]:
        low, high = row["speeds"]
        lines.append(f"{row['name']:58}{low:.2f} to {high:.2f}×")
    return "\n".join(lines)
