"""Attention to a sequence that is cut over several GPUs: ring attention, zigzag, and all-gather of K and V.

    comms = nccl()                                       # or virtual_ranks(4), see comms.py
    q, k, v = (comms.put(shard(a, comms.size)) for a in (q, k, v))
    o, lse = ring_attention(q, k, v, causal=True, return_lse=True, comms=comms)

Each rank keeps its rows of Q, and K and V go round the ranks, while the products with those at hand are computed by
`flash_attention`, in float32, and joined by their lse (Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise
Transformers"). hopper and hopper_backward join them as they store them; after other kernels a pass does. Under a causal
mask a rank gets a chunk from the front and one from the back, so that all have equal work in every step (zigzag:
github.com/zhuzilin/ring-flash-attention). Where K and V of the whole sequence fit, as with few heads of K and V, they
can be gathered first (Llama Team 2024, "The Llama 3 Herd of Models", 3.3.2). Windows, packed sequences and uneven parts
are planned by ring_masks.py. The launches of short steps take longer than their work: `comms.captured` makes one CUDA
graph of a call, or of several.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from helpers import device
from helpers.attention import kernel, passes, ring_schedules
from helpers.attention.calls import Attention
from helpers.attention.comms import Comms, Message
from helpers.attention.ladder import limits
from helpers.attention.ladder.call import (
    BATCHED,
    CU_SEQLENS,
    BackwardOptions,
    ForwardOptions,
    check_model_arrays,
    longest_of,
    mask_window,
    softmax_scale_of,
)
from helpers.attention.ladder.kinds import DeviceArrays
from helpers.attention.ladder.launches import C_NAMES
from helpers.attention.ladder.layout import Spec, bits, dense
from helpers.attention.passes import SUM_PARTS, Merge, Sum, merge_sizes, sum_sizes
from helpers.attention.ring_gradients import OF_ROWS, Part, tile_of
from helpers.attention.ring_joined import Joined, Place, joins, places
from helpers.attention.ring_masks import MaskedStep, Piece, chunk_numbers, masked_steps, rows_of
from helpers.attention.ring_schedules import (
    Product,
    Step,
    check_rows,
    check_schedule,
    chunk_places,
    empty_of,
    gathering_steps,
    shard,
    some_rows,
    steps,
    without_axis,
)
from helpers.attention.run import run
from helpers.attention.scalars import check_flags, whole_number

MERGE, SUM = "17_merge.cu", "17_sum.cu"
STAGE: str | None = None  # of products whose kernels join results; None: the usual one, if it does
BACKWARD_STAGE: str | None = None  # the same for gradients
_UNKNOWN = dense((1,), np.dtype(np.float32))  # an array of which a plan needs only the name


# ---- the forward pass


def ring_attention(
    q: Sequence[Any],
    k: Sequence[Any],
    v: Sequence[Any],
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    cu_seqlens: Sequence[int] | None = None,
    tokens: int | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    schedule: str = "zigzag",
    comms: Comms,
) -> Any:
    """Compute softmax(softmax_scale * q k^T) v for a sequence that is cut over the ranks of `comms`.

    Every process calls it with the same options, on the current streams of its GPUs. If other processes have ranks, it
    returns when the last keys have arrived, while the products with them may still run.

    Args:
        q: for each rank of this process (batch, rows, heads, head_dim), on the rank's device: as `shard` cuts it for
            the schedule, and `comms.put` places it. float32, float16 or bfloat16; all ranks have the same shapes.
        k, v: the same with (batch, keys, kv_heads, head_dim); kv_heads divides heads. With causal=True as many as rows.
        causal: a token sees those at and before its position in the whole sequence.
        window: (left, right): how many keys before and after its position a token sees, -1 for unlimited; with
            causal=True right is 0. A ring of chunks in order ends after the last step in which a rank sees keys.
        cu_seqlens: of packed sequences in a batch of 1, numbers of the host: 0, then the end of each, in the whole
            array. A token sees only its own sequence. Zigzag does not balance short sequences.
        tokens: those of the whole sequence, if `shard(..., uneven=True)` has cut it; with cu_seqlens, their last.
        softmax_scale: by default 1 / sqrt(head_dim).
        return_lse: also the natural log of the sum of exp(scaled scores) over all keys, as `ring_attention_backward`
            needs it.
        schedule: "zigzag": equal work for all ranks in each step, also under a causal mask, where rows must be even.
            "ring": chunks in the order of the sequence; under a causal mask, R ranks stand idle for (R - 1) / (2R - 1)
            of the time. "all_gather": K and V of all ranks are gathered, while some products with a rank's own ones are
            computed; cut as for zigzag.
        comms: from comms.py.

    Returns:
        The outputs of the local ranks, as q; with return_lse, (outputs, lses), each float32 (batch, heads, rows).
        Virtual ranks give the same bits as GPUs of the same model.

    Raises:
        TypeError, ValueError: as for `flash_attention`; another number of arrays than local ranks; shapes that differ;
            a causal mask, and rows that are not keys or cannot be halved. A window, packed sequences or uneven parts,
            and other rows than keys; "all_gather" of uneven parts. On every rank, arguments that differ between ranks.
        TimeoutError, RuntimeError: a rank of another process has failed, see comms.py.
    """
    mask = {"causal": causal, "window": window, "cu_seqlens": cu_seqlens, "tokens": tokens}
    options = {"schedule": schedule, **mask, "softmax_scale": softmax_scale}
    with _refusal_told(comms):
        check_flags(return_lse=return_lse)
        plan, rows_by_rank, order = _plan(comms, schedule, mask, q=q, k=k, v=v)
        scale = softmax_scale_of(softmax_scale, q[0].shape[-1])

        def calls_of(number: int, i: int, at_hand: Sequence[Any], given: Mapping[str, Any]) -> Iterator[Attention]:
            """Yield the calls of a step of local rank i, with its arrays or with their specs."""
            rank = comms.ranks[i]
            products: tuple[Product | Piece, ...] = plan[number].products[rank]
            for which, product in enumerate(products):
                arrays = _inputs_of(product, given["q"], at_hand)
                if joined:
                    arrays |= _arrays_to_join(product.rows, joined[i][number][which], given)
                    yield Joined(arrays, ForwardOptions(*_mask_of(product), scale, stage=STAGE))
                    continue
                alone, _ = _place_of(product, plan, number, rank)
                out = "" if alone else "float32"
                options = ForwardOptions(*_mask_of(product), scale, return_lse=True, out=out)
                yield _call(product, arrays, options)

        joined = _joined(comms, plan, rows_by_rank, scale, q=q, k=k, v=v)
        if schedule == "all_gather" and joined:
            meanwhile = _meanwhile(comms, plan, q[0], k[0], causal)
            if of_both := _joined(comms, meanwhile, rows_by_rank, scale, q=q, k=k, v=v):
                plan, joined = meanwhile, of_both
        _compile_first(comms, plan, rows_by_rank, calls_of, options, q=q, k=k, v=v)
    comms.agree(_form("ring_attention", options, q, k))
    outputs = []
    for rank, a in zip(comms.ranks, q, strict=True):
        with comms.on(rank):
            outputs.append(_Output(a, joined=bool(joined)))
    with _abort_on_error(comms):
        at_hand = [*zip(k, v, strict=True)]
        if plan[0].sources[0] is None and comms.size > 1:
            at_hand = _gathered(comms, at_hand, order)()
        for number, step in enumerate(plan):
            arrived = None
            if number + 1 < len(plan):
                counts = [[rows_by_rank[each]] * 2 for each in _local(comms, plan[number + 1])]
                arrived = _pass_on(comms, at_hand, counts) if counts else _gathered(comms, at_hand, order)
            with limits.reserve_sms(comms.leave if arrived else 0):
                for i, rank in enumerate(comms.ranks):
                    with comms.on(rank):
                        calls = [*calls_of(number, i, at_hand[i], {"q": q[i], **outputs[i].so_far})]
                        products: tuple[Product | Piece, ...] = step.products[rank]
                        if joined:
                            _run_beside(comms, rank, products, calls)
                            continue
                        for product, call in zip(products, calls, strict=True):
                            alone, last = _place_of(product, plan, number, rank)
                            outputs[i].join(*_batched(product, run(call)), product.rows, alone=alone, last=last)
            if arrived:
                at_hand = arrived()
        comms.finish()
    for each, rank in zip(outputs, comms.ranks, strict=True):
        with comms.on(rank):
            each.complete()
    results = [each.o for each in outputs]
    return (results, [each.lse for each in outputs]) if return_lse else results


def _run_beside(comms: Comms, rank: int, products: Sequence[Product | Piece], calls: Sequence[Attention]) -> None:
    """Run products in parallel, so that one may begin when another has no tiles left. Those of the same rows wait.

    A call adds to the earlier calls' results for its rows.
    """
    rows = [*dict.fromkeys(product.rows for product in products)]
    apart = all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(rows)))
    if len(rows) < 2 or not apart:
        for call in calls:
            run(call)
        return
    with comms.beside(rank) as aside:
        for product, call in zip(products, calls, strict=True):
            with aside() if rows.index(product.rows) % 2 else contextlib.nullcontext():
                run(call)


def _meanwhile(comms: Comms, plan: Plan, q: Any, k: Any, causal: bool) -> Plan:
    """Return the plan of an all-gather that computes products with own keys while K and V come; or the plan itself."""
    if comms.size == 1 or not all(isinstance(step, Step) for step in plan):
        return plan
    return gathering_steps(comms.size, causal, q.shape[1], k.shape[1])


def _inputs_of(product: Product | Piece, q: Any, at_hand: Sequence[Any]) -> dict[str, Any]:
    """Return a product's q, k and v: parts of a rank's arrays, or of their specs."""
    return {
        "q": some_rows(q, product.rows),
        **{n: some_rows(a, product.keys) for n, a in zip("kv", at_hand, strict=True)},
    }


def _arrays_to_join(rows: tuple[int, int], place: Place, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a product's arrays of results: parts of those of its rank, or of their specs."""
    if "o" not in given:
        q = given["q"]
        batch, n, heads, _ = q.shape
        shapes = {"o": (q.shape, q.dtype), "part": (q.shape, np.float32), "lse": ((batch, heads, n), np.float32)}
        given = {name: dense(*form)._replace(device=q.device) for name, form in shapes.items()}
    arrays = {"o": some_rows(given["o"], rows), "lse_so_far": some_rows(given["lse"], rows, 2)}
    if place.before:
        arrays["o_before"] = some_rows(given["part"], rows)
    if place.first_open < rows[1]:
        arrays["o_after"] = some_rows(given["part"], (place.first_open, rows[1]))
    return arrays


def _joined(
    comms: Comms, plan: Plan, rows_by_rank: Sequence[int], scale: float, **arrays: Sequence[Any]
) -> list[list[list[Place]]]:
    """Find the places of each local rank's products, by step; empty if some kernel does not join results."""
    if any(isinstance(step, MaskedStep) for step in plan):
        return []
    kind = DeviceArrays()
    keys = [kind.cache_keys(parts) for parts in arrays.values()]
    form = "joined", plan, scale < 0, *map(tuple, keys)
    if form not in comms.compiled:
        comms.compiled[form] = all(
            joins(specs, ForwardOptions(*_mask_of(product), scale, stage=STAGE))
            for i, rank in enumerate(comms.ranks)
            for specs, product in _specs_of(plan, rank, rows_by_rank, [kind.spec(of[i]) for of in keys])
        )
    found = [
        places([[product.rows for product in step.products[rank]] for step in plan], arrays["q"][i].shape[1])
        for i, rank in enumerate(comms.ranks)
    ]
    return found if comms.compiled[form] and None not in found else []  # type: ignore[return-value]


def _specs_of(
    plan: Plan, rank: int, rows_by_rank: Sequence[int], own: Sequence[Spec]
) -> Iterator[tuple[dict[str, Spec], Product | Piece]]:
    """Yield q, k and v of each product of a rank, and the product."""
    q, *pair = own
    for number, at_hand in _keys_at_hand(plan, rank, rows_by_rank, pair):
        for product in plan[number].products[rank]:
            yield _inputs_of(product, q, at_hand), product


def _keys_at_hand(
    plan: Plan, rank: int, rows_by_rank: Sequence[int], own: Sequence[Spec]
) -> Iterator[tuple[int, Sequence[Spec]]]:
    """Yield the number of each step, and the specs of K and V that a rank has in it."""
    batch, _, *columns = own[0].shape
    for number, step in enumerate(plan):
        source = step.sources[rank]
        count = sum(rows_by_rank) if source is None else rows_by_rank[source]
        arrived = dense((batch, count, *columns), own[0].dtype)._replace(device=own[0].device)
        yield number, own if source == rank or len(rows_by_rank) == 1 else (arrived, arrived)


def _local(comms: Comms, step: Step | MaskedStep) -> list[int]:
    """Return whose K and V each local rank has in a step of a ring."""
    return [source for rank in comms.ranks if (source := step.sources[rank]) is not None]


def _mask_of(product: Product | Piece) -> tuple[tuple[int, int] | None, bool]:
    """Return the options window and causal of a product's call."""
    if isinstance(product, Product):
        return None, product.causal
    left, right = product.window
    return (None if left == -1 and right <= 0 else product.window), right == 0


def _call(product: Product | Piece, arrays: Mapping[str, Any], options: Any) -> Attention:
    """Make the call of a product, of arrays or of specs."""
    if isinstance(product, Product) or product.cu_seqlens is None:
        return Attention(arrays, options)
    tokens = {name: _first_of_batch(a) for name, a in arrays.items()}
    for name, cu in zip(CU_SEQLENS, product.cu_seqlens, strict=True):
        spec = dense((len(cu),), np.dtype(np.int32))
        q = arrays["q"]
        tokens[name] = spec._replace(device=q.device) if isinstance(q, Spec) else device.cp.asarray(np.int32(cu))
    longest = tuple(max(b - a for a, b in pairwise(cu)) for cu in product.cu_seqlens)
    return Attention(tokens, options, longest, longest if "do" in arrays else longest[0])


def _first_of_batch(a: Any) -> Any:
    return Spec(a.shape[1:], a.strides[1:], *a[2:]) if isinstance(a, Spec) else a[0]


def _batched(product: Product | Piece, results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the results of a product's call with a batch axis."""
    packed = isinstance(product, Piece) and product.cu_seqlens is not None
    return tuple(a[None] for a in results) if packed else results


Plan = Sequence[Step | MaskedStep]


def _plan(
    comms: Comms, schedule: str, mask: Mapping[str, Any], **arrays: Sequence[Any]
) -> tuple[Plan, tuple[int, ...], str]:
    """Check everything that does not need other ranks' arrays.

    Returns:
        The steps; the number of keys of each rank; the schedule by which the sequence is cut.
    """
    if not isinstance(comms, Comms):
        raise TypeError(f"comms is of helpers.attention.comms, such as virtual_ranks(2); got {type(comms).__name__}")
    causal, cu_seqlens, tokens = mask["causal"], mask["cu_seqlens"], mask["tokens"]
    left, right = mask_window(mask["window"], causal)
    if cu_seqlens is not None:
        if comms.capturing:
            raise ValueError("a graph cannot hold cu_seqlens, which the host copies to the GPU in every call")
        cu_seqlens = _checked_cu_seqlens(cu_seqlens, tokens)
        tokens = cu_seqlens[-1]
    elif tokens is not None:
        tokens = whole_number("tokens", tokens, least=0)
    for name, parts in arrays.items():
        if not isinstance(parts, (list, tuple)) or len(parts) != len(comms.ranks):
            count = len(parts) if isinstance(parts, (list, tuple)) else type(parts).__name__
            raise ValueError(f"{name} must be a list of one array per local rank, {len(comms.ranks)}; got {count}")
        for a in parts:
            if not isinstance(a, device.cp.ndarray):
                raise TypeError(f"{name} has device arrays, as comms.put makes them; got {type(a).__name__}")
            axis = 2 if name == "lse" else 1
            shapes = [each.shape if tokens is None else without_axis(each.shape, axis) for each in (parts[0], a)]
            if shapes[0] != shapes[1] or a.dtype != parts[0].dtype:
                both = f"{parts[0].dtype} {parts[0].shape} and {a.dtype} {a.shape}"
                raise ValueError(f"{name} differs between ranks: {both}")
    for q, k, v in zip(arrays["q"], arrays["k"], arrays["v"], strict=True):
        if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or not k.dtype == v.dtype == q.dtype:
            shapes = f"q {q.dtype} {q.shape}, k {k.dtype} {k.shape} and v {v.dtype} {v.shape}"
            raise ValueError(f"{shapes} do not fit: see q")
        check_model_arrays(q, k, v, BATCHED)  # here, because a product's arrays have other shapes
    for i, q in enumerate(arrays["q"]):
        batch, rows, heads, _ = q.shape
        for name, shape, dtype in (
            ("do", q.shape, q.dtype),
            ("o", q.shape, q.dtype),
            ("lse", (batch, heads, rows), np.dtype(np.float32)),
        ):
            if name in arrays and (arrays[name][i].shape != shape or arrays[name][i].dtype != dtype):
                got = arrays[name][i]
                raise ValueError(
                    f"{name} of each rank must be {dtype} {shape}, as q is {q.shape}; got {got.dtype} {got.shape}"
                )
    q, k = arrays["q"][0], arrays["k"][0]
    check_schedule(schedule)
    has_window = left >= 0 or (right >= 0 and not causal)
    if (
        not has_window
        and cu_seqlens is None
        and (tokens is None or tokens % chunk_numbers(schedule, comms.size, 0)[1] == 0)
    ):
        if tokens is not None:
            for rank, a in zip(comms.ranks, arrays["q"], strict=True):
                check_rows(schedule, comms.size, rank, a.shape[1], tokens)
        plan = steps(schedule, comms.size, causal=bool(causal), rows=q.shape[1], keys=k.shape[1])
        return plan, (k.shape[1],) * comms.size, schedule if causal else "ring"
    what = "packed sequences" if cu_seqlens else "a window" if has_window else "uneven parts"
    return _masked_plan(comms, schedule, what, (left, right), cu_seqlens, tokens, arrays)


def _masked_plan(
    comms: Comms,
    schedule: str,
    what: str,
    window: tuple[int, int],
    cu_seqlens: tuple[int, ...] | None,
    tokens: int | None,
    arrays: Mapping[str, Sequence[Any]],
) -> tuple[Plan, tuple[int, ...], str]:
    """Plan a call with a window, packed sequences or uneven parts: see `_plan`."""
    for q, k in zip(arrays["q"], arrays["k"], strict=True):
        if q.shape[1] != k.shape[1]:
            raise ValueError(f"{what}: as many rows of q as of k are needed; got {q.shape[1]} and {k.shape[1]}")
        if cu_seqlens and q.shape[0] != 1:
            raise ValueError(f"packed sequences are a batch of 1; q has shape {q.shape}")
    if tokens is None:
        tokens = comms.size * arrays["q"][0].shape[1]
    _, count = chunk_numbers(schedule, comms.size, 0)
    if schedule == "all_gather" and tokens % count:
        raise ValueError(f"{tokens} tokens, {comms.size} ranks: all_gather takes no uneven parts; zigzag and ring do")
    for rank, q in zip(comms.ranks, arrays["q"], strict=True):
        check_rows(schedule, comms.size, rank, q.shape[1], tokens)
    batch = arrays["q"][0].shape[0]
    made = masked_steps(schedule, comms.size, tokens, *window, cu_seqlens or (0, tokens), batch)
    return made, rows_of(schedule, comms.size, tokens), schedule


def _checked_cu_seqlens(cu_seqlens: Any, tokens: Any) -> tuple[int, ...]:
    """Return the ends of packed sequences as whole numbers. TypeError or ValueError for anything else."""
    if not isinstance(cu_seqlens, (list, tuple, np.ndarray)) or isinstance(cu_seqlens, device.cp.ndarray):
        raise TypeError(f"cu_seqlens must be a list or an array of the host; got {type(cu_seqlens).__name__}")
    cu = np.asarray([whole_number(f"cu_seqlens[{i}]", end) for i, end in enumerate(cu_seqlens)], np.int32)
    longest_of("cu_seqlens", cu, "the whole sequence", cu[-1] if tokens is None and len(cu) else tokens)
    return tuple(cu.tolist())


@contextlib.contextmanager
def _refusal_told(comms: Comms) -> Iterator[None]:
    """Tell the other ranks about an error in this context, because they would wait for this one."""
    try:
        yield
    except Exception as error:
        if isinstance(comms, Comms):
            comms.refuse(error)
        raise


def _form(name: str, options: Mapping[str, Any], q: Sequence[Any], k: Sequence[Any]) -> dict[str, Any]:
    """List what all ranks must call with; for uneven parts, shapes without rows."""
    told = {name: value for name, value in options.items() if value is not None or name == "softmax_scale"}
    shapes = {"q.shape": q[0].shape, "k.shape": k[0].shape}
    if "tokens" in told or "cu_seqlens" in told:
        shapes = {name: (shape[0], "rows", *shape[2:]) for name, shape in shapes.items()}
    if "cu_seqlens" in told:
        cu = np.asarray(told["cu_seqlens"], np.int32)
        told["cu_seqlens"] = f"{len(cu) - 1} sequences to {cu[-1]} (CRC {zlib.crc32(cu.tobytes()):08x})"
    return {"call": name, "q.dtype": q[0].dtype, **shapes, **told}


_Calls = Callable[[int, int, Sequence[Any], Mapping[str, Any]], Iterator[Attention]]


def _compile_first(
    comms: Comms,
    plan: Plan,
    rows_by_rank: Sequence[int],
    calls_of: _Calls,
    options: Mapping[str, Any],
    whole: Callable[[Mapping[str, Any]], Sequence[Attention]] | None = None,
    **arrays: Sequence[Any],
) -> None:
    """Compile what the local ranks will launch, unless an earlier call like this one has, before anything is sent.

    A rank may need a compiler for a minute, where another finds its kernels on disk; once K and V are under way, that
    rank's time limit runs.

    Args:
        calls_of: yields the calls of a step of a local rank, from specs of K and V at hand and of its own arrays.
        whole: makes calls for all rows of a rank, from the specs of its arrays. arrays: of the local ranks, by name.
    """
    kind = DeviceArrays()
    keys = {name: kind.cache_keys(parts) for name, parts in arrays.items()}
    form = *map(str, options.items()), *((name, *of) for name, of in keys.items())
    if form in comms.compiled:
        return
    for i, rank in enumerate(comms.ranks):
        given = {name: kind.spec(of[i]) for name, of in keys.items()}
        own = given["k"], given["v"]
        columns = own[0].shape[2:]
        with comms.on(rank):
            for call in whole(given) if whole else ():
                call.plan(call.arrays)
            for number, at_hand in _keys_at_hand(plan, rank, rows_by_rank, own):
                leave = comms.leave if number + 1 < len(plan) or "do" in arrays else 0
                with limits.reserve_sms(leave):
                    for call in calls_of(number, i, at_hand, given):
                        call.plan(call.arrays)
            for name in {"float32", own[0].dtype.name}:
                c_name = _c_name(f"k is {name}", name)
                kernel.load(MERGE, f"merge_partial<{c_name}>", defines=merge_sizes(columns[-1]))
                if "do" in arrays:
                    for heads in {columns[0], given["q"].shape[2]}:
                        kernel.load(SUM, f"sum_parts<{c_name}>", defines=sum_sizes(heads * columns[-1]))
    comms.compiled[form] = True


@contextlib.contextmanager
def _abort_on_error(comms: Comms) -> Iterator[None]:
    try:
        yield
    except BaseException:
        comms.abort()
        raise


def _place_of(product: Product | Piece, plan: Plan, number: int, rank: int) -> tuple[bool, bool]:
    """Return (no other product of the rank has some of these rows, no product of the rank follows)."""
    if isinstance(product, Piece):
        every = [each for step in plan for each in step.products[rank]]
        return len(every) == 1, product is every[-1]
    later = [step.products[rank] for step in plan[number + 1 :]]
    every = [each for step in plan for each in step.products[rank]]
    return sum(_overlap(each.rows, product.rows) for each in every) == 1, not any(later)


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _pass_on(
    comms: Comms, at_hand: Sequence[Sequence[Any]], rows: Sequence[Sequence[int]], hop: int = 1
) -> Callable[[], list[tuple[Any, ...]]]:
    """Start to send each rank's arrays to the next one. Return a function that waits for the received ones.

    rows: those of each array that a local rank receives. hop: how many ranks further they are sent.
    """
    sends, receives, received = [], [], []
    for rank, arrays, counts in zip(comms.ranks, at_hand, rows, strict=True):
        with comms.on(rank):
            mine = [device.cp.ascontiguousarray(a) for a in arrays]
            received.append(
                tuple(empty_of(a, (a.shape[0], n, *a.shape[2:])) for a, n in zip(mine, counts, strict=True))
            )
        sends += [Message(rank, (rank + hop) % comms.size, a) for a in mine]
        receives += [Message(rank, (rank - hop) % comms.size, a) for a in received[-1]]
    wait = comms.start(sends, receives)

    def arrived(alive: Any = sends) -> list[tuple[Any, ...]]:
        wait()
        return received

    return arrived


def _to_all(
    comms: Comms, arrays: Callable[[int, int], Sequence[Any]], like: Sequence[Any]
) -> list[list[Sequence[Any]]]:
    """Exchange arrays between all ranks. Return those received, by local rank and sender; its own as they are.

    Args:
        arrays: those of local rank number i for rank `peer`, contiguous. like: arrays as they are received.
    """
    sends, receives, received = [], [], []
    for i, rank in enumerate(comms.ranks):
        with comms.on(rank):
            of_rank: list[Sequence[Any]] = []
            for peer in range(comms.size):
                mine = arrays(i, peer)
                of_rank.append(mine if peer == rank else [empty_of(a, a.shape) for a in like])
                if peer != rank:
                    sends += [Message(rank, peer, a) for a in mine]
                    receives += [Message(rank, peer, a) for a in of_rank[-1]]
            received.append(of_rank)
    comms.start(sends, receives)()
    return received


def _gathered(comms: Comms, at_hand: Sequence[Sequence[Any]], schedule: str) -> Callable[[], list[tuple[Any, ...]]]:
    """Start to gather all ranks' K and V on each local rank. Return a function that waits for them.

    Each chunk arrives at its place in the sequence, a rank's own ones too, last.
    """
    sends, receives, whole = [], [], []
    for rank, pair in zip(comms.ranks, at_hand, strict=True):
        with comms.on(rank):
            mine = [device.cp.ascontiguousarray(a) for a in pair]
            whole.append(tuple(empty_of(a, (a.shape[0], comms.size * a.shape[1], *a.shape[2:])) for a in mine))
        n = whole[-1][0].shape[1]
        parts = [part for _, part in chunk_places(schedule, comms.size, rank, n)]
        for distance in range(1, comms.size + 1):
            peer = (rank + distance) % comms.size
            places = [place for place, _ in chunk_places(schedule, comms.size, peer, n)]
            for a, of_all, b in ((*each, b) for each in zip(mine, whole[-1], strict=True) for b in range(len(mine[0]))):
                for part, place in zip(parts, places, strict=True):
                    sends.append(Message(rank, peer, a[b, slice(*part)]))
                    receives.append(Message(rank, peer, of_all[b, slice(*place)]))
    wait = comms.start(sends, receives)

    def arrived(alive: Any = sends) -> list[tuple[Any, ...]]:
        wait()
        return whole

    return arrived


class _Output:
    """A rank's output so far, and its lse."""

    def __init__(self, q: Any, *, joined: bool = False) -> None:
        """Begin without a part, or, `joined`, with arrays that kernels change in place."""
        self._q, self.o, self.lse = q, None, None
        self.so_far: dict[str, Any] = {}
        if joined:
            batch, n, heads, _ = q.shape
            self.o, self.lse = empty_of(q, q.shape), device.cp.empty((batch, heads, n), dtype=np.float32)
            self.so_far = {"o": self.o, "lse": self.lse, "part": device.cp.empty(q.shape, dtype=np.float32)}

    def join(self, o: Any, lse: Any, rows: tuple[int, int], *, alone: bool, last: bool) -> None:
        """Merge one partial output. alone: no other partial has these rows. last: no partial follows."""
        everything = rows == (0, self._q.shape[1])
        if everything and self.o is None:
            self.o, self.lse = o, lse
        elif alone:
            if self.o is None:
                batch, n, heads, _ = self._q.shape
                self.o, self.lse = empty_of(self._q, self._q.shape), empty_of(lse, (batch, heads, n))
            bits(some_rows(self.o, rows))[...] = bits(o)
            some_rows(self.lse, rows, 2)[...] = lse
        else:
            if self.o is None:  # rows without a partial so far count as rows without keys
                self._see_nothing(np.float32)
            self.o = merge(self.o, o, rows, self.lse, lse, self._q.dtype if last else None)

    def complete(self) -> None:
        """Fill in rows that no partial result covers."""
        if self.o is None:
            self._see_nothing(self._q.dtype)

    def _see_nothing(self, dtype: Any) -> None:
        batch, n, heads, _ = self._q.shape
        self.o = device.cp.zeros(self._q.shape, dtype=dtype)
        self.lse = device.cp.full((batch, heads, n), -np.inf, dtype=np.float32)


def merge(o: Any, part: Any, rows: tuple[int, int], lse: Any, part_lse: Any, dtype: Any = None) -> Any:
    """Merge a partial result into an existing one, on the current device, with kernels/17_merge.cu.

    Args:
        o: float32 (batch, n, heads, head_dim), C-contiguous, as all are. Changed in place, unless dtype is another.
        part: float32 (batch, rows[1] - rows[0], heads, head_dim) for those rows of o.
        lse, part_lse: float32 (batch, heads, n) and (batch, heads, rows): o becomes the mean by their weights, and lse
            the log of the sum of both, changed in place.
        dtype: of the result, which is then complete; None: float32.

    Returns:
        o, or a new array for another dtype than float32.

    Raises:
        TypeError, ValueError: arrays, rows or a dtype other than these.
    """
    _check_merge(o, part, rows, lse, part_lse, dtype)
    rounded = dtype is not None and np.dtype(dtype) != np.float32
    if not o.size:
        return device.cp.empty(o.shape, dtype=dtype) if rounded else o
    arrays = {"o": o, "lse": lse, "part": part, "part_lse": part_lse}
    new = Merge.launch(arrays, MERGE, (o.shape, np.dtype(dtype)) if rounded else None, *rows)
    return new if rounded else o


def _c_name(given: str, dtype: str) -> str:
    """Return a result type's name in C++. Raises a TypeError that begins with `given`."""
    if dtype not in C_NAMES:
        raise TypeError(f"{given}; there are {', '.join(C_NAMES)}")
    return C_NAMES[dtype]


def _check_merge(o: Any, part: Any, rows: Any, lse: Any, part_lse: Any, dtype: Any) -> None:
    if not isinstance(o, device.cp.ndarray) or o.ndim != 4:
        got = f"shape {o.shape}" if isinstance(o, device.cp.ndarray) else type(o).__name__
        raise TypeError(f"o must be a device array (batch, n, heads, head_dim); got {got}")
    batch, n, heads, head_dim = o.shape
    if not isinstance(rows, (tuple, list)) or len(rows) != 2:
        raise TypeError(f"rows must be a pair (first, end); got {rows!r:.40}")
    if not 0 <= rows[0] <= rows[1] <= n:
        raise ValueError(f"rows = {tuple(rows)}; o has rows 0 to {n}")
    if dtype is not None:
        _c_name(f"dtype = {dtype!r:.60}", dtype if isinstance(dtype, str) else np.dtype(dtype).name)
    count = rows[1] - rows[0]
    for name, a, shape in (
        ("o", o, o.shape),
        ("part", part, (batch, count, heads, head_dim)),
        ("lse", lse, (batch, heads, n)),
        ("part_lse", part_lse, (batch, heads, count)),
    ):
        if a.shape != shape or a.dtype != np.float32 or not a.flags.c_contiguous:
            got = f"{a.dtype} {a.shape}, strides {a.strides}"
            raise ValueError(f"{name} must be float32 {shape}, C-contiguous; got {got}")


# ---- the backward pass


def ring_attention_backward(
    do: Sequence[Any],
    q: Sequence[Any],
    k: Sequence[Any],
    v: Sequence[Any],
    o: Sequence[Any],
    lse: Sequence[Any],
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    cu_seqlens: Sequence[int] | None = None,
    tokens: int | None = None,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    schedule: str = "zigzag",
    comms: Comms,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Compute the gradients of the sum of do * ring_attention(q, k, v) over all ranks, with respect to q, k and v.

    Each product's are computed with the o and lse of all keys, and are float32, as are the sums. dQ stays with its
    rows, and hopper_backward's products all add to one. dK and dV of a rank's keys travel with them, from the first
    other rank that has computed some, and come home after the last step, while the rank computes with the last half of
    its rows what its own keys get from them. Where K and V are gathered, each rank sends to each other one what it has
    of its keys.

    Args:
        do, o: for each local rank as q. lse: float32 (batch, heads, rows), as `ring_attention` returned it.
        q, k, v, causal, window, cu_seqlens, tokens, softmax_scale, schedule, comms: as they were passed to
            `ring_attention`.
        deterministic: the same bits in every run, and those of virtual ranks.

    Returns:
        (dq, dk, dv), each a list with one array for each local rank, as q, k and v.

    Raises:
        TypeError, ValueError, TimeoutError, RuntimeError: as for `ring_attention`.
    """
    mask = {"causal": causal, "window": window, "cu_seqlens": cu_seqlens, "tokens": tokens}
    options = {"schedule": schedule, **mask, "softmax_scale": softmax_scale, "deterministic": deterministic}
    own_arrays = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}
    with _refusal_told(comms):
        check_flags(deterministic=deterministic)
        plan, rows_by_rank, order = _plan(comms, schedule, mask, **own_arrays)
        scale = softmax_scale_of(softmax_scale, q[0].shape[-1])

        def parts_of(number: int, rank: int) -> Sequence[Product | Piece]:
            """Return the products of a step; that of a rank's own keys in two parts, one of which is for the last step.

            That part is computed while dK and dV return. For pieces, it is the last one.
            """
            made: list[Product | Piece] = []
            split = number == 0 and len(plan) > 1
            for product in plan[number].products[rank]:
                made += product.parts() if split and isinstance(product, Product) else [product]
            return made

        def calls_of(number: int, i: int, at_hand: Sequence[Any], given: Mapping[str, Any]) -> Iterator[Attention]:
            """Yield the calls of a step of local rank i, with its arrays or with their specs."""
            for which, product in enumerate(parts_of(number, comms.ranks[i])):
                arrays = {name: some_rows(given[name], product.rows) for name in ("do", "q", "o")}
                arrays |= {name: some_rows(a, product.keys) for name, a in zip("kv", at_hand, strict=True)}
                arrays["lse"] = some_rows(given["lse"], product.rows, 2)
                arrays = {name: arrays[name] for name in own_arrays}
                options = BackwardOptions(*_mask_of(product), scale, deterministic, BACKWARD_STAGE, out="float32")
                if once:
                    first = dict.fromkeys(OF_ROWS, product.rows[0] // once) | {"dq_semaphore": 2 * number + which}
                    of_rows = {name: given[name][first[name] :] if name in given else _UNKNOWN for name in OF_ROWS}
                    yield Part(arrays | of_rows, options, lengths=("multiply", given["q"].shape[1]))
                else:
                    yield _call(product, arrays, options)

        def of_all_rows(which: str, given: Mapping[str, Any]) -> Part:
            options = BackwardOptions(softmax_scale=scale, stage=BACKWARD_STAGE)
            arrays = dict(given) if which == "prepare" else {**dict.fromkeys(OF_ROWS, _UNKNOWN), **given}
            return Part(arrays, options, lengths=(which, given["q"].shape[1]))

        once = 0
        once = _once(comms, plan, rows_by_rank, calls_of, deterministic, **own_arrays)
        whole = (lambda given: [of_all_rows("prepare", given), of_all_rows("round", given)]) if once else None
        _compile_first(comms, plan, rows_by_rank, calls_of, options, whole, **own_arrays)
    comms.agree(_form("ring_attention_backward", options, q, k))
    state: list[dict[str, Any]] = []
    for i, rank in enumerate(comms.ranks if once else ()):
        with comms.on(rank):
            given = {name: parts[i] for name, parts in own_arrays.items()}
            state.append(given | dict(zip(OF_ROWS, run(of_all_rows("prepare", given)), strict=True)))
    dq, own = [_Sum(a) for a in q], [(_Sum(a), _Sum(b)) for a, b in zip(k, v, strict=True)]

    def add_step(
        number: int, at_hand: Sequence[Sequence[Any]], sums: Sequence[Sequence[_Sum]], some: slice = slice(None)
    ) -> None:
        """Compute the products of a step: add dQ to the rows' sum, and dK and dV to the sums of the keys at hand.

        some: the products, from `parts_of`.
        """
        for i, rank in enumerate(comms.ranks):
            with comms.on(rank):
                given = state[i] if once else {name: parts[i] for name, parts in own_arrays.items()}
                pairs = zip(parts_of(number, rank), calls_of(number, i, at_hand[i], given), strict=True)
                for product, call in [*pairs][some]:
                    if once:
                        of_keys = run(call)
                    else:
                        of_rows, *of_keys = _batched(product, run(call))
                        dq[i].add(of_rows, product.rows)
                    for total, part in zip(sums[i], of_keys, strict=True):
                        total.add(part, product.keys)

    with _abort_on_error(comms):
        if schedule == "all_gather" and comms.size > 1:
            at_hand = _gathered(comms, [*zip(k, v, strict=True)], order)()
            sums = [tuple(map(_Sum, pair)) for pair in at_hand]
            add_step(0, at_hand, sums)
            _send_home(comms, sums, own, order)
        else:
            _round_the_ring(comms, plan, rows_by_rank, [*zip(k, v, strict=True)], own, add_step)
        results = []
        for i, rank in enumerate(comms.ranks):
            with comms.on(rank):
                of_rows = run(of_all_rows("round", state[i])) if once else dq[i].rounded()
                results.append([of_rows, *(total.rounded() for total in own[i])])
        comms.finish()
    of_q, of_k, of_v = ([each[which] for each in results] for which in range(3))
    return of_q, of_k, of_v


def _once(
    comms: Comms,
    plan: Plan,
    rows_by_rank: Sequence[int],
    calls_of: _Calls,
    deterministic: bool,
    **arrays: Sequence[Any],
) -> int:
    """Return the rows of a tile, if a rank's rows are prepared once for all its products; else 0."""
    if any(isinstance(step, MaskedStep) for step in plan):
        return 0
    kind = DeviceArrays()
    keys = {name: kind.cache_keys(parts) for name, parts in arrays.items()}
    form = "once", BACKWARD_STAGE, deterministic, plan, *((name, *of) for name, of in keys.items())
    if form not in comms.tiles:
        found = set()
        for i, rank in enumerate(comms.ranks):
            given = {name: kind.spec(of[i]) for name, of in keys.items()}
            found.add(tile_of(Attention(given, BackwardOptions(stage=BACKWARD_STAGE)), (*given,)))
            for number, at_hand in _keys_at_hand(plan, rank, rows_by_rank, (given["k"], given["v"])):
                for call in calls_of(number, i, at_hand, given):
                    found.add(tile_of(call))
        firsts = {product.rows[0] for step in plan for rank in comms.ranks for product in step.products[rank]}
        if len(plan) > 1:
            own: list[Any] = [each for rank in comms.ranks for each in plan[0].products[rank]]
            firsts |= {part.rows[0] for each in own for part in each.parts()}
        tile = min(found, default=0) if len(found) == 1 else 0
        batch, rows, heads, _ = arrays["q"][0].shape
        numbers = tile and batch * heads * -(-rows // tile)  # number of semaphores: see `Part`
        fits = numbers >= 2 * len(plan) and not any(first % tile for first in firsts)
        comms.tiles[form] = tile if fits else 0
    return comms.tiles[form]


def _round_the_ring(
    comms: Comms,
    plan: Plan,
    rows_by_rank: Sequence[int],
    at_hand: Sequence[Sequence[Any]],
    own: Sequence[Sequence[_Sum]],
    add_step: Callable[..., None],
) -> None:
    """Compute all steps: K and V travel round the ring, dK and dV one step behind, and the last step's return to `own`.

    A rank's own keys come first and last, so that there is work while K and V leave and while dK and dV come home.
    """
    if len(plan) == 1:
        return add_step(0, at_hand, own)
    mine, sums = at_hand, []
    for number, step in enumerate(plan):
        keys_move, sums_move = number + 1 < len(plan), number > 1
        leaving = [
            (*(at_hand[i] if keys_move else ()), *(_totals(comms, rank, sums[i], plan, number) if sums_move else ()))
            for i, rank in enumerate(comms.ranks)
        ]
        counts: list[list[int]] = [[] for _ in comms.ranks]
        for i, rank in enumerate(comms.ranks):
            if keys_move:
                counts[i] += [rows_by_rank[_source(plan[number + 1], rank)]] * 2
            if sums_move:
                first, end = _reach(plan, number, _source(step, rank))
                counts[i] += [end - first] * 2
        arrived = _pass_on(comms, leaving, counts) if keys_move or sums_move else None
        here = [tuple(map(_Sum, pair)) for pair in at_hand] if number else own
        with limits.reserve_sms(comms.leave if arrived else 0):
            add_step(number, at_hand, here, slice(None) if number else slice(-1))
        received = arrived() if arrived else []
        if number:
            sums = here
            for i, rank in enumerate(comms.ranks):
                with comms.on(rank):
                    for total, before in zip(sums[i], received[i][-2:] if sums_move else (), strict=False):
                        total.add(before, _reach(plan, number, _source(step, rank)))
        at_hand = [arrays[:2] for arrays in received]
    totals = [_totals(comms, rank, sums[i], plan, len(plan)) for i, rank in enumerate(comms.ranks)]
    home = [_reach(plan, len(plan), rank) for rank in comms.ranks]
    arrived = _pass_on(comms, totals, [[end - first] * 2 for first, end in home], 1 - len(plan))
    with limits.reserve_sms(comms.leave):
        add_step(0, mine, own, slice(-1, None))
    for i, (rank, arrays) in enumerate(zip(comms.ranks, arrived(), strict=True)):
        with comms.on(rank):
            for total, part in zip(own[i], arrays, strict=True):
                total.add(part, home[i])


def _totals(comms: Comms, rank: int, sums: Sequence[_Sum], plan: Plan, number: int) -> tuple[Any, ...]:
    """Return the sums that a rank sends on before step `number`."""
    with comms.on(rank):
        rows = _reach(plan, number, _source(plan[number - 1], rank))
        return tuple(total.so_far(rows) for total in sums)


def _source(step: Step | MaskedStep, rank: int) -> int:
    """Return whose K and V a rank has in a step of a ring."""
    source = step.sources[rank]
    assert source is not None
    return source


def _reach(plan: Plan, number: int, source: int) -> tuple[int, int]:
    """Return the range of a rank's keys that have gradients from other ranks before step `number`."""
    seen: list[tuple[int, int]] = []
    for step in plan[1:number]:
        for rank, of in enumerate(step.sources):
            products: tuple[Product | Piece, ...] = step.products[rank] if of == source else ()
            seen += [product.keys for product in products]
    return min((first for first, _ in seen), default=0), max((end for _, end in seen), default=1)


def _send_home(comms: Comms, sums: Sequence[Sequence[_Sum]], own: Sequence[Sequence[_Sum]], schedule: str) -> None:
    """Send each rank the parts of its keys' gradients from all, to be added in the order of the ranks."""
    cut = []
    for rank, pair in zip(comms.ranks, sums, strict=True):
        with comms.on(rank):
            cut.append([shard(total.so_far(total.whole), comms.size, schedule) for total in pair])
    like = [parts[0] for parts in cut[0]]
    received = _to_all(comms, lambda i, peer: [parts[peer] for parts in cut[i]], like)
    for i, rank in enumerate(comms.ranks):
        with comms.on(rank):
            for of_sender in received[i]:
                for total, part in zip(own[i], of_sender, strict=True):
                    total.add(part)


class _Sum:
    """The sum of float32 parts of a gradient, each for some of its rows. like: the array it is the gradient of."""

    def __init__(self, like: Any) -> None:
        self._like, self._parts = like, []
        self.whole = 0, like.shape[1]

    def add(self, part: Any, rows: tuple[int, int] | None = None) -> None:
        """Add a part. Up to SUM_PARTS wait, to be added in one pass."""
        if len(self._parts) == SUM_PARTS:
            self.so_far(self.whole)
        self._parts.append((part, rows or self.whole))

    def so_far(self, rows: tuple[int, int]) -> Any:
        """Return the sum, float32, for these rows, which contain those of all parts."""
        if [which for _, which in self._parts] != [rows]:
            self._parts = [(sum_parts(self._like, self._parts, rows), rows)]
        return self._parts[0][0]

    def rounded(self) -> Any:
        """Return the sum in the dtype of `like`. Nothing can be added after it."""
        if self._like.dtype == np.float32:
            return self.so_far(self.whole)
        return sum_parts(self._like, self._parts, self.whole, self._like.dtype)


def sum_parts(
    like: Any, parts: Sequence[tuple[Any, tuple[int, int]]], rows: tuple[int, int], dtype: Any = np.float32
) -> Any:
    """Add parts of a gradient in one pass, on the current device, with kernels/17_sum.cu.

    Args:
        like: (batch, n, heads, head_dim), what it is the gradient of. parts: up to SUM_PARTS, float32, C-contiguous,
            and which rows of the whole it has; none of them is used afterwards. rows: of the whole; others are left
            out, and those that no part has are 0. dtype: of the result.
    """
    places = tuple([which for _, which in parts])
    in_place = next((i for i, which in enumerate(places) if which == rows and dtype == np.float32), None)
    shape = like.shape[0], rows[1] - rows[0], *like.shape[2:]
    if 0 in shape:
        return device.cp.empty(shape, dtype=dtype) if in_place is None else parts[in_place][0]
    arrays = {"o": like, **{f"part_{i}": a for i, (a, _) in enumerate(parts)}}
    if in_place is None:
        return Sum.launch(arrays, SUM, (shape, np.dtype(dtype)), rows, "result", places)
    Sum.launch(arrays, SUM, None, rows, f"part_{in_place}", places)
    return parts[in_place][0]


# Learners' copies of version 1.0.0 import these from here.
SCHEDULES, positions, unshard = ring_schedules.SCHEDULES, ring_schedules.positions, ring_schedules.unshard
rows_of_block = passes.rows_of_block
