"""Time hopper_backward with and without four ideas, on a GPU: FIRST_STORES, PERSISTENT, a fixed order, GROUP_SPLITS.

    python3 -m helpers.bench.study first_store FILE

bfloat16, some 16,384 tokens, heads x head_dim = 2048; all three kernels, in turns. "rows": the first block at a tile of
dQ stores it, or all blocks add to zeros. "persistent": blocks that go from tile to tile of keys, or one block for each.
"turns": blocks add in a fixed order, or in any order, as by default.
"shares": few heads of K and V; several blocks share the heads of a group, or one has them all. The same work with as
many heads of K and V as of Q is timed in turns with both.
"tries": other changes of the kernel that were timed in turns with it, at 512 to 16,384 rows. They lost, or gained too
little for their cost: programmatic dependent launch needs a launch attribute that CuPy has no argument for. Their texts
are not kept.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from helpers.attention.ladder import BACKWARD, LADDER, backward
from helpers.bench import records
from helpers.bench.cases import Case, Inputs, shape_of_tokens
from helpers.bench.harness import Study, compare_case, heads_text, require_same, speed_text
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
ROUNDS, SAMPLED_HEADS = 15, 8
BLOCKS = {"persistent blocks": {"PERSISTENT": 1}, "a block for each tile": {"PERSISTENT": 0}}
BLOCK_CASES = tuple(
    Case((batch, 2048 // head_dim, n, head_dim), "bfloat16", causal, backward=True)
    for head_dim in (128, 64)
    for batch, n in ((32, 512), (4, 512), (16, 1024), (8, 2112), (4, 4096), (1, 16384))
    for causal in (False, True)
)
TURNS = {"a fixed order": {"DETERMINISTIC": 1, "FIRST_STORES": 0, "PERSISTENT": 0}, "any order": {}}
TURN_CASES = tuple(
    Case(shape, "bfloat16", True, backward=True)
    for shape in (
        *((1, 16, 4096, 128), (16, 16, 1024, 128), (8, 16, 2112, 128), (4, 16, 4096, 128), (2, 16, 8192, 128)),
        *((1, 16, 16384, 128), (4, 32, 4096, 64), (1, 32, 16384, 64)),
    )
)
SHARES = {"shared groups": {}, "a block a group": {"GROUP_SPLITS": 1, "PERSISTENT": 0}}
WHOLE = "as many heads"  # of K and V as of Q
SHARE_CASES = tuple(
    (Case((batch, heads, n, head_dim), "bfloat16", causal, backward=True), kv_heads)
    for head_dim in (64, 128)
    for batch, heads, kv_heads, n, causal in (
        *((1, 16, 4, 1024, True), (1, 16, 4, 4096, True), (2, 16, 4, 4096, True), (1, 32, 8, 1024, True)),
        *((1, 8, 1, 4096, True), (1, 8, 1, 4096, False), (1, 8, 1, 8192, True)),
    )
)


@functools.lru_cache(maxsize=1)
def inputs(count: int) -> tuple[Any, ...]:
    """Make this many elements of do, q, k and v, once for all cases."""
    made = Inputs((1, 1, -(-count // 128), 128), "bfloat16")
    return tuple(a.reshape(-1) for a in (cp.asarray(made.do), *made.device))


def rows(cases: tuple[Case, ...] = CASES, rounds: int = ROUNDS) -> Iterator[list[dict[str, Any]]]:
    """Time both in turns, case by case. Raises WrongOutput if their gradients differ by more than rounding."""
    return _compared(cases, {name: {"FIRST_STORES": stores} for name, stores in WAYS.items()}, rounds)


def persistent(cases: tuple[Case, ...] = BLOCK_CASES, rounds: int = ROUNDS) -> Iterator[list[dict[str, Any]]]:
    """Time blocks with many tiles of keys and with one, like `rows`."""
    return _compared(cases, BLOCKS, rounds)


def turns(cases: tuple[Case, ...] = TURN_CASES, rounds: int = ROUNDS) -> Iterator[list[dict[str, Any]]]:
    """Time a fixed order and any order, like `rows`."""
    return _compared(cases, TURNS, rounds)


def shares(cases: tuple[tuple[Case, int], ...] = SHARE_CASES, rounds: int = ROUNDS) -> Iterator[list[dict[str, Any]]]:
    """Time shared groups and a block for each, and as many heads of K and V as of Q. cases: with heads of K and V."""
    for case, kv_heads in cases:
        most = max(math.prod(each.shape) for each, _ in cases)
        do, q, *whole = (a[: math.prod(case.shape)].reshape(case.shape) for a in inputs(most))
        few = [a[:, :kv_heads].copy() for a in whole]
        made = {}
        for name, sizes in {**SHARES, WHOLE: {}}.items():
            k, v = whole if name == WHOLE else few
            given = do, q, k, v, *LADDER["hopper"](q, k, v, causal=case.causal, return_lse=True)
            made[name] = backward.prepare(STAGE, *given, causal=case.causal, sizes=sizes)

        def gradients(run: Callable[[], None], found: Sequence[Any]) -> list[Any]:
            run()
            return [cp.asnumpy(a).astype("float32") for a in found]

        require_same(str(case), {name: functools.partial(gradients, *made[name]) for name in SHARES}, 0.01)
        _, one = SHARES
        timed = compare_case(case, {name: run for name, (run, _) in made.items()}, rounds, over=one)
        yield [{**row, "kv_heads": kv_heads} for row in timed]


def _compared(
    cases: tuple[Case, ...], all_sizes: Mapping[str, Mapping[str, int]], rounds: int
) -> Iterator[list[dict[str, Any]]]:
    """Time the stage with these sizes: the speed of the first over the second."""
    _, other_way = all_sizes
    for case in cases:
        count = math.prod(case.shape)
        do, q, k, v = (a[:count].reshape(case.shape) for a in inputs(max(math.prod(each.shape) for each in cases)))
        o, lse = LADDER["hopper"](q, k, v, causal=case.causal, return_lse=True)
        given = do, q, k, v, o, lse
        made = {
            name: backward.prepare(STAGE, *given, causal=case.causal, sizes=sizes) for name, sizes in all_sizes.items()
        }
        batch, heads, *_ = case.shape
        some = {divmod(head, heads) for head in range(0, batch * heads, max(batch * heads // SAMPLED_HEADS, 1))}

        def sampled(run: Callable[[], None], gradients: Sequence[Any], some: Any = some) -> list[Any]:
            run()
            return [cp.asnumpy(a[at]).astype("float32") for a in gradients for at in sorted(some)]

        require_same(str(case), {name: functools.partial(sampled, *way) for name, way in made.items()}, 0.01)
        yield compare_case(case, {name: run for name, (run, _) in made.items()}, rounds, over=other_way)


STUDY = Study(
    "first_store",
    {"rows": rows, "persistent": persistent, "turns": turns, "shares": shares},
    lambda: {"device": describe(), "rounds": ROUNDS},
)
take = STUDY.take


@records.shown
def table(record: Mapping[str, Any] | None = None) -> str:
    """Format a record as text, a case a line: both times, and the speedup of the first way."""
    parts = {
        "rows": (WAYS, ("zeros", "first stores")),
        "persistent": (BLOCKS, ("one tile", "persistent")),
        "turns": (TURNS, ("any order", "fixed order")),
    }
    tables = ["\n".join(_lines(record[part], *how)) for part, how in parts.items() if part in record]
    texts = {"shares": shares_table, "tries": tries_table}
    return "\n\n".join([*tables, *(text(record) for part, text in texts.items() if part in record)])


def _lines(rows: Sequence[Mapping[str, Any]], ways: Iterable[str], titles: tuple[str, str]) -> list[str]:
    first, second = ways
    lines = [f"{'the gradients, bfloat16':40}{titles[0]:>12}{titles[1]:>14}"]
    for one, other in zip(rows[::2], rows[1::2], strict=True):
        assert (one["name"], other["name"]) == (first, second)
        lines.append(f"{heads_text(one):40}{other['ms']:9.3f} ms{one['ms']:11.3f} ms{speed_text(one):>24}")
    return lines


@records.shown
def shares_table(record: Mapping[str, Any] | None = None) -> str:
    """Format the times of groups with a block each, of shared ones, and of as many heads of K and V, a case a line."""
    lines = [f"{'the gradients, bfloat16':43}{'a block':>9}{'shared':>12}{'':20}{WHOLE:>15}"]
    for shared, one, whole in zip(*(iter(record["shares"]),) * 3, strict=True):
        what = heads_text(shared).replace(" heads", f"/{shared['kv_heads']} heads", 1)
        times = f"{one['ms']:9.3f} ms{shared['ms']:9.3f} ms{speed_text(shared):>22}{whole['ms']:10.3f} ms"
        lines.append(f"{what:40}{times}")
    return "\n".join(lines)


@records.shown
def tries_table(record: Mapping[str, Any] | None = None) -> str:
    """Format the tries as text, one a line: the lowest and the highest speed, relative to the unchanged kernel."""
    lines = []
    for row in record["tries"]:
        low, high = row["speeds"]
        lines.append(f"{row['name']:58}{low:.2f} to {high:.2f}×")
    return "\n".join(lines)
