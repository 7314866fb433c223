"""Arrays without contiguous memory: broadcast, reversed, overlapping and sliced, against the same arrays made dense.

Every stage gets them, forward and backward, and the steps to 10 and 13, whose copies use tensor maps; packed sequences,
decoding and the ring as well. On a GPU the driver makes the maps, otherwise the CPU engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from half_gradients import reference
from test_steps import BACKWARD_STEPS, HALF_STEPS, OWN_KEYS, small

from helpers.attention import (
    check,
    flash_attention,
    flash_attention_backward,
    flash_attention_varlen,
    flash_attention_varlen_backward,
    flash_attention_with_kvcache,
    ring_attention,
    ring_attention_backward,
)
from helpers.attention.comms import virtual_ranks
from helpers.attention.decoders import DECODERS
from helpers.attention.ladder import LADDER, Stage, backward
from helpers.attention.ladder.extras import is_readable
from helpers.attention.ladder.layout import Spec, bits
from helpers.device import cp
from helpers.engine.cuda_source.signatures import dtype_of

Make = Callable[[], Any]


def strided(a: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """View the memory of a device array from its first element on, with other strides."""
    return cp.ndarray(shape, a.dtype, memptr=a.data, strides=strides)


def views(shape: tuple[int, ...], dtype: Any, seed: int) -> dict[str, Make]:
    """Return functions, by name, that make an array of this shape, (batch, heads, rows, head_dim), with other strides.

    Heads are between rows, as in models, unless the name says otherwise.
    """
    rng = np.random.default_rng([seed, *shape])
    batch, heads, rows, columns = shape

    def memory(*sizes: int) -> Any:
        numbers = (rng.standard_normal(sizes) + 0.25).astype(np.float32)
        return cp.asarray(check.in_type(numbers, np.dtype(dtype).name))

    def dense(*sizes: int) -> Any:
        return memory(*sizes).swapaxes(1, 2)

    def broadcast(*axes: int) -> Any:
        a = memory(batch, rows, heads, columns)
        steps = a.swapaxes(1, 2).strides
        return strided(a, shape, tuple(0 if axis in axes else step for axis, step in enumerate(steps)))

    def overlapping() -> Any:
        """Make an array in which a row begins 8 elements after the previous one, and a head 16 elements after."""
        a = memory(8 * (3 * batch + 2 * heads + rows) + columns)
        step = 8 * a.itemsize
        return strided(a, shape, (3 * step, 2 * step, step, a.itemsize))

    names = {0: "batches", 1: "heads", 2: "rows", 3: "columns"}
    made: dict[str, Make] = {f"one of {names[axis]} for all": lambda axis=axis: broadcast(axis) for axis in (0, 1, 2)}
    made["one row for all"] = lambda: broadcast(0, 1, 2)
    made["one number for all"] = lambda: broadcast(0, 1, 2, 3)
    for axis in range(4):
        back = (slice(None),) * axis + (slice(None, None, -1),)
        made[f"{names[axis]} reversed"] = lambda back=back: dense(batch, rows, heads, columns)[back]
    made["batches reversed, one of heads for all"] = lambda: broadcast(1)[::-1]
    made["overlapping rows"] = overlapping
    made["every second batch, row and head"] = lambda: dense(2 * batch, 2 * rows, 2 * heads, columns)[::2, ::2, 1::2]
    made["columns of wider rows"] = lambda: dense(batch, rows, heads, columns + 16)[..., 8 : columns + 8]
    made["unaligned columns of wider rows"] = lambda: dense(batch, rows, heads, columns + 16)[..., 1 : columns + 1]
    made["every second column"] = lambda: dense(batch, rows, heads, 2 * columns)[..., ::2]
    made["rows of columns"] = lambda: dense(batch, columns, heads, rows).swapaxes(2, 3)
    return made


def in_turn(
    shapes: dict[str, tuple[int, ...]], dtype: Any, turns: slice = slice(None)
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return (names of the views, the arrays by name): each array is each view once, and all are different.

    turns: selects some of them.
    """
    of_each = {name: views(shape, dtype, seed) for seed, (name, shape) in enumerate(shapes.items())}
    kinds = [*next(iter(of_each.values()))]
    apart = len(kinds) // len(shapes)
    for first in range(len(kinds))[turns]:
        chosen = {name: kinds[(first + i * apart) % len(kinds)] for i, name in enumerate(shapes)}
        yield str(chosen), {name: of_each[name][kind]() for name, kind in chosen.items()}


def densely(arrays: dict[str, Any]) -> dict[str, Any]:
    """Copy each array to its own dense memory."""
    return {name: cp.asarray(np.ascontiguousarray(cp.asnumpy(bits(a)))).view(a.dtype) for name, a in arrays.items()}


def assert_alike(title: str, got: Any, wanted: Any, dtype: Any) -> None:
    """Check that results differ by a few units at most: atomic sums have any order, and unaligned rows other loads."""
    for number, (x, want) in enumerate(zip(got, wanted, strict=True)):
        x, want = (cp.asnumpy(a).astype(np.float64) for a in (x, want))
        allowed = 4 * float(ml_dtypes.finfo(dtype).eps) * (1 + np.abs(want[np.isfinite(want)]).max(initial=0))
        np.testing.assert_allclose(x, want, rtol=0, atol=allowed, err_msg=f"{title}, result {number}")


def rows_and_keys(n: int, n_kv: int, d: int, *, kv_heads: int = 2) -> dict[str, tuple[int, ...]]:
    kv = (2, kv_heads, n_kv, d)
    return {"q": (2, 4, n, d), "k": kv, "v": kv}


# ---- stages and steps

# 12 has 07's launches, and takes long to compile.
STAGES = [stage for stage in LADDER.values() if not stage.slow_to_compile]
STAGES += [step for step in reversed(HALF_STEPS) if step.number == 10]
STAGES += [step for step in reversed(BACKWARD_STEPS) if step.number == 13]


def kind_of(stage: Stage) -> tuple[Any, ...]:
    """Return what copies and tensor maps depend on; tests of each stage have heads and rows with any strides."""
    return stage.direction, "float32" in stage.dtypes, stage.only_cc


FIRST_OF_KIND = {kind_of(stage): stage for stage in reversed(STAGES)}


@pytest.mark.exhaustive(one_of_each=kind_of)
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.file.removeprefix("steps/").removesuffix(".cu"))
def test_a_stage_reads_any_array(stage: Stage) -> None:
    # The sizes of test_steps.py, whose builds can be reused.
    steps = HALF_STEPS if stage in HALF_STEPS else BACKWARD_STEPS if stage in BACKWARD_STEPS else None
    odd = steps is None or (steps.index(stage) + (stage.direction == "backward")) % 2
    head_dim, dtype = (64, "bfloat16") if odd else (72, "float16")
    if dtype not in stage.dtypes:
        dtype = stage.dtypes[0]
    head_dim += -head_dim % stage.head_dim_step
    if reason := stage.why_not(head_dim=head_dim, dtype=dtype):
        pytest.skip(reason)
    # The first of each kind gets each array in each view; of the others, two stages or four steps share the views.
    apart = 1 if FIRST_OF_KIND[kind_of(stage)] is stage else 2 if steps is None else 4
    turns = slice((steps or STAGES).index(stage) % apart, None, apart)
    kind, of_results = dtype_of(dtype), dtype_of(stage.result_dtype(dtype))
    shapes = rows_and_keys(40, 70, head_dim, kv_heads=2 if "gqa" in stage.features else 4)
    mask: dict[str, Any] = {"causal": True} if "causal" in stage.features else {}
    if stage.direction == "forward":
        sizes = stage.tiles(head_dim) if steps else None
        if "lse" in stage.features:
            mask["return_lse"] = True
        for title, arrays in in_turn(shapes, kind, turns):
            got, wanted = ([], [])
            for results, given in ((got, arrays), (wanted, densely(arrays))):
                run, result = stage.prepare(**given, sizes=sizes, **mask)
                run()
                results += result if "return_lse" in mask else (result,)
            assert_alike(f"{stage.file}, {title}", got, wanted, of_results)
        return
    sizes = small(stage, OWN_KEYS) if steps else None
    for title, arrays in in_turn({"do": shapes["q"], **shapes}, kind, turns):
        dense = densely(arrays)
        *_, o, lse = reference(*(cp.asnumpy(a) for a in dense.values()), window=(-1, 0))
        results = []
        for given in (arrays, dense):
            o_and_lse = o.astype(kind), cp.asarray(np.stack([lse, lse], -1).astype(np.float32))[..., 0]
            run, gradients = backward.prepare(stage, *given.values(), *o_and_lse, causal=True, sizes=sizes)
            run()
            results.append(gradients)
        assert_alike(f"{stage.file}, {title}", *results, kind)


# ---- entry points


def as_models(a: Any) -> Any:
    """Convert (batch, heads, rows, head_dim) to (batch, rows, heads, head_dim)."""
    return a.swapaxes(1, 2)


@pytest.mark.exhaustive(one_of_each=lambda forward, packed: packed if forward else None)
@pytest.mark.parametrize(("forward", "back"), [(None, None), ("hopper", "hopper_backward"), (None, "backward_mma")])
@pytest.mark.parametrize("packed", [False, True], ids=["batched", "packed"])
def test_an_entry_point_reads_any_array(forward: str | None, back: str | None, packed: bool) -> None:
    if forward and (reason := LADDER[forward].why_not(head_dim=64, dtype="float16")):
        pytest.skip(reason)
    lengths = [cp.asarray(np.array(cu, np.int32)) for cu in ((0, 11, 40), (0, 30, 70))]
    shapes = rows_and_keys(40, 70, 64)

    def results(do: Any, q: Any, k: Any, v: Any) -> Any:
        o, lse = forward_of(q, k, v)
        return o, lse, *backward_of(do, q, k, v, o, lse)

    def forward_of(q: Any, k: Any, v: Any) -> Any:
        if packed:
            return flash_attention_varlen(q, k, v, *lengths, causal=True, return_lse=True, stage=forward)
        return flash_attention(q, k, v, causal=True, return_lse=True, stage=forward)

    def backward_of(*arrays: Any) -> Any:
        if packed:
            return flash_attention_varlen_backward(*arrays, *lengths, causal=True, stage=back)
        return flash_attention_backward(*arrays, causal=True, stage=back)

    turns = slice(int(packed), None, 4) if back else slice(None)  # every stage has met all views above
    for title, arrays in in_turn({"do": shapes["q"], **shapes}, np.float16, turns):
        both = []
        for given in (arrays, densely(arrays)):
            of_models = (as_models(a)[0] if packed else as_models(a) for a in given.values())
            both.append(results(*of_models))
        assert_alike(title, *both, np.float16)


def test_a_column_of_records_is_copied() -> None:
    """Its rows are not a whole number of elements apart, as kernels require."""
    records = np.zeros((1, 40, 2), [("half", np.float16), ("row", np.float32, (16,))])
    assert not Spec.of(records["row"]).in_rows
    assert not is_readable("bias", Spec.of(records["row"]))
    assert Spec.of(records["row"].copy()).in_rows


@pytest.mark.parametrize("stage", DECODERS)
def test_decoding_reads_a_cache_that_sequences_share(stage: str) -> None:
    """The caches are read in place, so one that a kernel cannot read is an error; q may be anything."""
    lengths = cp.asarray(np.array([70, 33], np.int32))
    tokens, cache = (2, 8, 2, 64), (2, 2, 80, 64)
    readable = ("one of batches for all", "one of heads for all", "one row for all", "overlapping rows")
    of_cache = [views(cache, np.float16, seed) for seed in (1, 2)]
    for title, make in views(tokens, np.float16, 0).items():
        q = make()
        k, v = (of_cache[i][title if title in readable else readable[i]]() for i in (0, 1))
        arrays = {"q": q, "k_cache": k, "v_cache": v}
        got, wanted = (
            flash_attention_with_kvcache(
                **{name: as_models(a) for name, a in given.items()}, cache_seqlens=lengths, return_lse=True, stage=stage
            )
            for given in (arrays, densely(arrays))
        )
        assert_alike(f"{stage}, {title}", got, wanted, np.float16)


@pytest.mark.parametrize("axis", [0, 1])
def test_decoding_reads_a_table_of_pages_backwards(axis: int) -> None:
    rng = np.random.default_rng(0)
    q = cp.asarray(rng.standard_normal((3, 1, 4, 64)).astype(np.float16))
    k, v = (cp.asarray(rng.standard_normal((12, 16, 2, 64)).astype(np.float16)) for _ in range(2))
    table = cp.asarray(rng.permutation(12).astype(np.int32).reshape(3, 4))
    back = table[::-1] if axis == 0 else table[:, ::-1]
    how = {"cache_seqlens": cp.asarray(np.array([64, 1, 40], np.int32))}
    got, wanted = (
        flash_attention_with_kvcache(q, k, v, block_table=a, **how) for a in (back, cp.asarray(cp.asnumpy(back).copy()))
    )
    assert_alike("table", (got,), (wanted,), np.float16)


@pytest.mark.parametrize("schedule", ["zigzag", "all_gather"])
def test_a_ring_reads_any_array(schedule: str) -> None:
    ranks = virtual_ranks(2)
    shapes = rows_and_keys(20, 20, 16)
    for title, arrays in in_turn({"do": shapes["q"], **shapes}, np.float32, slice(None, None, 3)):
        both = []
        for given in (arrays, densely(arrays)):
            do, q, k, v = ([as_models(a), as_models(a)] for a in given.values())
            how = {"causal": True, "schedule": schedule, "comms": ranks}
            o, lse = ring_attention(q, k, v, return_lse=True, **how)
            gradients = ring_attention_backward(do, q, k, v, o, lse, **how)
            both.append([a for parts in (o, lse, *gradients) for a in parts])
        assert_alike(title, *both, np.float32)
