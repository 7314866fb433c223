"""Attention to a sequence that is cut over several GPUs: ring attention, zigzag, and all-gather of K and V.

    comms = nccl()                                       # or virtual_ranks(4), see comms.py
    q, k, v = (comms.put(shard(a, comms.size)) for a in (q, k, v))
    o, lse = ring_attention(q, k, v, causal=True, return_lse=True, comms=comms)

Each rank keeps its rows of Q, and K and V go round the ranks, while the products with those at hand are computed: by
`flash_attention`, in float32, merged by their lse (Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise
Transformers"). Under a causal mask a rank gets a chunk from the front and one from the back, so that all have equal
work in every step (zigzag: github.com/zhuzilin/ring-flash-attention). Where K and V of the whole sequence fit, as with
few heads of K and V, they can be gathered first (Llama Team 2024, "The Llama 3 Herd of Models", 3.3.2).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from helpers import device
from helpers.attention import kernel
from helpers.attention.calls import Attention
from helpers.attention.comms import Comms, Message
from helpers.attention.ladder import limits
from helpers.attention.ladder.call import (
    BATCHED,
    BackwardOptions,
    ForwardOptions,
    check_model_arrays,
    softmax_scale_of,
)
from helpers.attention.ladder.kinds import DeviceArrays
from helpers.attention.ladder.launches import C_NAMES, MAX_GRID_YZ, slices
from helpers.attention.ladder.layout import Spec, bits, dense
from helpers.attention.run import run
from helpers.attention.scalars import check_flags, whole_number

SCHEDULES = ("zigzag", "ring", "all_gather")
MERGE, MERGE_THREADS = "17_merge.cu", 256


# ---- which rank has which tokens, and what it computes when


class Product(NamedTuple):
    """Rows of a rank's Q times keys of the K and V at hand, each a pair (first, end).

    causal: the last of these rows sees the last of these keys, the row before it one less, and so on.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    causal: bool

    @property
    def pairs(self) -> int:
        """Number of pairs of a row and a key that it sees."""
        rows, keys = self.rows[1] - self.rows[0], self.keys[1] - self.keys[0]
        return rows * keys - (rows * (rows - 1) // 2 if self.causal else 0)

    def halves(self) -> tuple[Product, ...]:
        """Split it into two products, of the first and of the last rows."""
        (first, last), (first_key, last_key), causal = self
        half = (first + last) // 2
        seen = last_key - (last - half) if causal else last_key
        made = Product((first, half), (first_key, seen), causal), Product((half, last), (first_key, last_key), causal)
        return made[half == first :]


class Step(NamedTuple):
    """A step of all ranks. sources: by rank, whose K and V it has; None: those of all, in the order of the sequence."""

    sources: tuple[int | None, ...]
    products: tuple[tuple[Product, ...], ...]


def steps(schedule: str, size: int, *, causal: bool, rows: int, keys: int | None = None) -> tuple[Step, ...]:
    """Return what each rank computes in each step: plain data, to be drawn and counted.

    Args:
        schedule: one of SCHEDULES; without a mask "zigzag" is "ring".
        rows: of q of a rank. keys: of its k, as many as rows where it is not given.

    Raises:
        TypeError, ValueError: an unknown schedule; numbers that are not whole, or too small; a causal mask with other
            rows than keys, or with rows that cannot be halved into two chunks.
    """
    _check_schedule(schedule)
    size = whole_number("size", size, least=1)
    rows = whole_number("rows", rows, least=0)
    keys = rows if keys is None else whole_number("keys", keys, least=0)
    check_flags(causal=causal)
    if causal and rows != keys:
        raise ValueError(f"causal=True needs as many rows of q as of k on each rank; got {rows} and {keys}")
    if causal and schedule != "ring" and rows % 2:
        raise ValueError(f"each rank has two chunks of equal length: {rows} rows cannot be halved")
    return _steps(schedule, size, bool(causal), rows, keys)


@functools.cache
def _steps(schedule: str, size: int, causal: bool, rows: int, keys: int) -> tuple[Step, ...]:
    zigzag, half = causal and schedule != "ring", rows // 2
    if schedule == "all_gather":
        alone = (Product((0, rows), (0, size * keys), False),)
        chunks = []
        for rank in range(size):
            front, back = (0, (rank + 1) * half), (0, (2 * size - rank) * half)
            chunks.append((Product((0, half), front, True), Product((half, rows), back, True)))
        return (Step((None,) * size, tuple(chunks if causal else [alone] * size)),)
    made = []
    for step in range(size):
        sources = tuple((rank - step) % size for rank in range(size))
        products: list[tuple[Product, ...]] = []
        for rank, source in enumerate(sources):
            if not causal or source == rank:
                products.append((Product((0, rows), (0, keys), causal),))
            elif source < rank:  # before this rank's tokens, those of zigzag's front chunk
                products.append((Product((0, rows), (0, half if zigzag else keys), False),))
            else:  # behind them, but those of zigzag's back chunk of q
                products.append((Product((half, rows), (0, keys), False),) if zigzag else ())
        made.append(Step(sources, tuple(products)))
    return tuple(made)


def _check_schedule(schedule: str) -> None:
    if not isinstance(schedule, str) or schedule not in SCHEDULES:
        raise ValueError(f"schedule = {schedule!r:.40}; there are {', '.join(SCHEDULES)}")


def _chunks(schedule: str, size: int, rank: int) -> tuple[tuple[int, ...], int]:
    """Return which chunks of the sequence a rank has, and how many there are."""
    return ((rank,), size) if schedule == "ring" else ((rank, 2 * size - 1 - rank), 2 * size)


def positions(schedule: str, size: int, rank: int, rows: int) -> np.ndarray:
    """Return the positions of a rank's rows in the sequence, int32 (rows,), for a rotary embedding.

    Raises:
        TypeError, ValueError: no such schedule or rank; rows that the rank's chunks cannot share equally.
    """
    _check_schedule(schedule)
    size, rows = whole_number("size", size, least=1), whole_number("rows", rows, least=0)
    rank = whole_number("rank", rank, least=0)
    if rank >= size:
        raise ValueError(f"rank = {rank}; there are 0 to {size - 1}, as size is {size}")
    chunks, _ = _chunks(schedule, size, rank)
    if rows % len(chunks):
        raise ValueError(f"rows = {rows}; a rank has {len(chunks)} chunks of equal length ({schedule})")
    if size * rows > np.iinfo(np.int32).max:
        raise ValueError(f"rows = {rows} of {size} ranks: more positions than int32 can count")
    each = rows // len(chunks)
    return np.concatenate([np.arange(c * each, (c + 1) * each, dtype=np.int32) for c in chunks])


def shard(x: Any, size: int, schedule: str = "zigzag", *, axis: int = 1) -> list[Any]:
    """Cut an array along its sequence into the contiguous part of each of `size` ranks, on x's device.

    "ring": rank r has chunk r of `size`. Otherwise it has chunks r and 2 size - 1 - r of 2 size.

    Args:
        x: an array of NumPy or the device. size: 1 or more ranks. axis: of the sequence; lse: 2.

    Raises:
        TypeError: x is no such array, size or axis no whole number.
        ValueError: no such schedule, size or axis; the length is not a multiple of the number of chunks: pad it, and
            mask or drop what is padded.
    """
    _check_schedule(schedule)
    size, axis = whole_number("size", size, least=1), _axis_of("x", x, axis)
    _, count = _chunks(schedule, size, 0)
    n = x.shape[axis]
    if n % count:
        raise ValueError(f"{n} tokens cannot be cut into {count} chunks of equal length ({schedule}, {size} ranks)")
    parts = []
    for rank in range(size):
        part = _like(x, (*x.shape[:axis], n // size, *x.shape[axis + 1 :]))
        for of_whole, of_part in _places(schedule, size, rank, n // size):
            bits(_rows(part, of_part, axis))[...] = bits(_rows(x, of_whole, axis))
        parts.append(part)
    return parts


def unshard(parts: Sequence[Any], schedule: str = "zigzag", *, axis: int = 1) -> Any:
    """Join the parts of all ranks, which are NumPy's or on one device: undo `shard`. For lse, axis is 2.

    Raises:
        TypeError, ValueError: parts is no list of such arrays, all alike; no such schedule or axis; an odd number of
            rows, of two chunks.
    """
    _check_schedule(schedule)
    if not isinstance(parts, (list, tuple)) or not parts:
        got = "none" if isinstance(parts, (list, tuple)) else type(parts).__name__
        raise TypeError(f"parts is a list of the arrays of all ranks, one or more; got {got}")
    of_axis = [_axis_of(f"parts[{i}]", part, axis) for i, part in enumerate(parts)]
    for i, part in enumerate(parts):
        if part.shape != parts[0].shape or part.dtype != parts[0].dtype or type(part) is not type(parts[0]):
            one, other = (f"{type(a).__name__} {a.dtype} {a.shape}" for a in (parts[0], part))
            raise ValueError(f"parts[0] is {one} and parts[{i}] {other}: all ranks have arrays that are alike")
    size, axis = len(parts), of_axis[0]
    rows = parts[0].shape[axis]
    if rows % len(_chunks(schedule, size, 0)[0]):
        raise ValueError(f"parts have {rows} rows, which are no two chunks of equal length ({schedule})")
    whole = _like(parts[0], (*parts[0].shape[:axis], size * rows, *parts[0].shape[axis + 1 :]))
    for rank, part in enumerate(parts):
        for of_whole, of_part in _places(schedule, size, rank, rows):
            bits(_rows(whole, of_whole, axis))[...] = bits(_rows(part, of_part, axis))
    return whole


def _axis_of(name: str, a: Any, axis: Any) -> int:
    """Return the axis, counted from the first. TypeError or ValueError if it is not an array with that axis."""
    if not isinstance(a, (np.ndarray, device.cp.ndarray)):
        raise TypeError(f"{name} is an array of NumPy or the device; got {type(a).__name__}")
    if a.dtype.hasobject or a.dtype.itemsize not in (1, 2, 4, 8):
        raise TypeError(f"{name} is {a.dtype}; numbers of 1, 2, 4 or 8 bytes are needed")
    axis = whole_number("axis", axis)
    if not -a.ndim <= axis < a.ndim:
        raise ValueError(f"axis = {axis}; {name} has shape {a.shape}")
    return axis % a.ndim


def _places(schedule: str, size: int, rank: int, rows: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the rows of each chunk of a rank: in the whole sequence, and in the rank's part."""
    chunks, _ = _chunks(schedule, size, rank)
    each = rows // len(chunks)
    for i, chunk in enumerate(chunks):
        yield (chunk * each, (chunk + 1) * each), (i * each, (i + 1) * each)


def _rows(a: Any, rows: tuple[int, int], axis: int = 1) -> Any:
    """Return some rows of an array, or the spec of these rows of a spec's array."""
    if not isinstance(a, Spec):
        return a[(slice(None),) * axis + (slice(*rows),)]
    shape = (*a.shape[:axis], rows[1] - rows[0], *a.shape[axis + 1 :])
    return Spec(shape, a.strides, a.dtype, (a.offset + rows[0] * a.strides[axis]) % 16, a.device)


def _like(a: Any, shape: Sequence[int]) -> Any:
    """Make an uninitialised array of a's kind and dtype."""
    kind = device.cp if isinstance(a, device.cp.ndarray) else np
    return kind.empty(tuple(shape), dtype=a.dtype)


# ---- the forward pass


def ring_attention(
    q: Sequence[Any],
    k: Sequence[Any],
    v: Sequence[Any],
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    schedule: str = "zigzag",
    comms: Comms,
) -> Any:
    """Compute softmax(softmax_scale * q k^T) v of a sequence that is cut over the ranks of `comms`.

    Every process calls it with the same options, on the current streams of its GPUs. Where other processes have ranks,
    it returns when the last keys have arrived, while the products with them may still be computed.

    Args:
        q: for each rank of this process (batch, rows, heads, head_dim), on the rank's device: as `shard` cuts it for
            the schedule, and `comms.put` places it. float32, float16 or bfloat16; all ranks have the same shapes.
        k, v: the same with (batch, keys, kv_heads, head_dim); kv_heads divides heads. With causal=True as many as rows.
        causal: a token sees those at and before its position in the whole sequence.
        softmax_scale: 1 / sqrt(head_dim) where it is not given.
        return_lse: also the natural log of the sum of exp(scaled scores) over all keys, as `ring_attention_backward`
            needs it.
        schedule: "zigzag": equal work for all ranks in each step, also under a causal mask, where rows must be even.
            "ring": chunks in the order of the sequence; under a causal mask, R ranks stand idle for (R - 1) / (2R - 1)
            of the time. "all_gather": K and V of all ranks are gathered first; cut as for zigzag.
        comms: of comms.py.

    Returns:
        The outputs of the local ranks, as q; with return_lse, (outputs, lses), each float32 (batch, heads, rows).
        Virtual ranks give the same bits as GPUs of the same model.

    Raises:
        TypeError, ValueError: as `flash_attention`; other numbers of arrays than local ranks; shapes that differ;
            a causal mask, and rows that are not keys or cannot be halved.
        TimeoutError, RuntimeError: a rank of another process has failed, see comms.py.
    """
    options = {"schedule": schedule, "causal": causal, "softmax_scale": softmax_scale}
    with _refusal_told(comms):
        check_flags(return_lse=return_lse)
        plan = _plan(comms, schedule, causal, q=q, k=k, v=v)
        scale = softmax_scale_of(softmax_scale, q[0].shape[-1])

        def calls_of(number: int, i: int, at_hand: Sequence[Any], given: Mapping[str, Any]) -> Iterator[Attention]:
            """Yield the calls of a step of local rank i, with its arrays or with their specs."""
            rank = comms.ranks[i]
            for product in plan[number].products[rank]:
                alone, _ = _place_of(product, plan, number, rank)
                arrays = _rows(given["q"], product.rows), *(_rows(a, product.keys) for a in at_hand)
                out = "" if alone else "float32"
                options = ForwardOptions(None, product.causal, scale, return_lse=True, out=out)
                yield Attention(dict(zip("qkv", arrays, strict=True)), options)

        _compile_first(comms, plan, calls_of, options, q=q, k=k, v=v)
    comms.agree(_form("ring_attention", options, q, k))
    outputs = [_Output(a) for a in q]
    with _abort_on_error(comms):
        at_hand = [*zip(k, v, strict=True)]
        if schedule == "all_gather" and comms.size > 1:
            at_hand = _gathered(comms, at_hand, schedule if causal else "ring")
        for number, step in enumerate(plan):
            arrived = _pass_on(comms, at_hand) if number + 1 < len(plan) else None
            with limits.reserve_sms(comms.leave if arrived else 0):
                for i, rank in enumerate(comms.ranks):
                    with comms.on(rank):
                        calls = calls_of(number, i, at_hand[i], {"q": q[i]})
                        for product, call in zip(step.products[rank], calls, strict=True):
                            alone, last = _place_of(product, plan, number, rank)
                            outputs[i].join(*run(call), product.rows, alone=alone, last=last)
            if arrived:
                at_hand = arrived()
        comms.finish()
    results = [each.o for each in outputs]
    return (results, [each.lse for each in outputs]) if return_lse else results


def _plan(comms: Comms, schedule: str, causal: bool, **arrays: Sequence[Any]) -> tuple[Step, ...]:
    """Return the steps, after all checks that need no other rank's arrays."""
    if not isinstance(comms, Comms):
        raise TypeError(f"comms is of helpers.attention.comms, such as virtual_ranks(2); got {type(comms).__name__}")
    check_flags(causal=causal)
    for name, parts in arrays.items():
        if not isinstance(parts, (list, tuple)) or len(parts) != len(comms.ranks):
            count = len(parts) if isinstance(parts, (list, tuple)) else type(parts).__name__
            raise ValueError(f"{name} is a list of one array for each of {len(comms.ranks)} local ranks; got {count}")
        for a in parts:
            if not isinstance(a, device.cp.ndarray):
                raise TypeError(f"{name} has device arrays, as comms.put makes them; got {type(a).__name__}")
            if a.shape != parts[0].shape or a.dtype != parts[0].dtype:
                both = f"{parts[0].dtype} {parts[0].shape} and {a.dtype} {a.shape}"
                raise ValueError(f"{name} differs between ranks: {both}")
    q, k, v = (arrays[name][0] for name in "qkv")
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or not k.dtype == v.dtype == q.dtype:
        raise ValueError(f"q {q.dtype} {q.shape}, k {k.dtype} {k.shape} and v {v.dtype} {v.shape} do not fit: see q")
    check_model_arrays(q, k, v, BATCHED)  # here, since what a product is given has other shapes
    batch, rows, heads, _ = q.shape
    for name, shape, dtype in (
        ("do", q.shape, q.dtype),
        ("o", q.shape, q.dtype),
        ("lse", (batch, heads, rows), np.dtype(np.float32)),
    ):
        if name in arrays and (arrays[name][0].shape != shape or arrays[name][0].dtype != dtype):
            got = arrays[name][0]
            raise ValueError(f"{name} of each rank is {dtype} {shape}, as q is {q.shape}; got {got.dtype} {got.shape}")
    return steps(schedule, comms.size, causal=bool(causal), rows=q.shape[1], keys=k.shape[1])


@contextlib.contextmanager
def _refusal_told(comms: Comms) -> Iterator[None]:
    """Tell the other ranks of an error within the context: they would wait for this one."""
    try:
        yield
    except Exception as error:
        if isinstance(comms, Comms):
            comms.refuse(error)
        raise


def _form(name: str, options: Mapping[str, Any], q: Sequence[Any], k: Sequence[Any]) -> dict[str, Any]:
    """List what all ranks have to call with."""
    return {"call": name, "q.dtype": q[0].dtype, "q.shape": q[0].shape, "k.shape": k[0].shape, **options}


_Calls = Callable[[int, int, Sequence[Any], Mapping[str, Any]], Iterator[Attention]]


def _compile_first(
    comms: Comms, plan: Sequence[Step], calls_of: _Calls, options: Mapping[str, Any], **arrays: Sequence[Any]
) -> None:
    """Compile what the local ranks will launch, unless an earlier call like this one has: nothing is sent before.

    A rank may need a compiler for a minute, where another finds its kernels on disk; once K and V are under way, that
    rank's time limit runs.

    Args:
        calls_of: yields the calls of a step of a local rank, from specs of K and V at hand and of its own arrays.
        arrays: of the local ranks, by name.
    """
    kind = DeviceArrays()
    keys = {name: [kind.cache_key(a) for a in parts] for name, parts in arrays.items()}
    form = *map(str, options.items()), *((name, *of) for name, of in keys.items())
    if form in comms.compiled:
        return
    for i, rank in enumerate(comms.ranks):
        given = {name: kind.spec(of[i]) for name, of in keys.items()}
        own = given["k"], given["v"]
        batch, rows, *columns = own[0].shape
        with comms.on(rank):
            for number, step in enumerate(plan):
                count = rows * comms.size if step.sources[rank] is None else rows
                arrived = dense((batch, count, *columns), own[0].dtype)._replace(device=own[0].device)
                leave = comms.leave if number + 1 < len(plan) or "do" in arrays else 0
                with limits.reserve_sms(leave):
                    at_hand = own if number == 0 and count == rows else (arrived, arrived)
                    for call in calls_of(number, i, at_hand, given):
                        call.plan(call.arrays)
            for name in {"float32", own[0].dtype.name}:
                _merge_kernel(MERGE, C_NAMES[name], columns[-1])
    comms.compiled[form] = True


@contextlib.contextmanager
def _abort_on_error(comms: Comms) -> Iterator[None]:
    try:
        yield
    except BaseException:
        comms.abort()
        raise


def _place_of(product: Product, plan: Sequence[Step], number: int, rank: int) -> tuple[bool, bool]:
    """Return (no other product of the rank has some of these rows, no product of the rank follows)."""
    later = [step.products[rank] for step in plan[number + 1 :]]
    every = [each for step in plan for each in step.products[rank]]
    return sum(_overlap(each.rows, product.rows) for each in every) == 1, not any(later)


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _pass_on(comms: Comms, at_hand: Sequence[Sequence[Any]]) -> Callable[[], list[tuple[Any, ...]]]:
    """Start to send each rank's arrays to the next one. Return a function that waits for the received ones."""
    sends, receives, received = [], [], []
    for rank, arrays in zip(comms.ranks, at_hand, strict=True):
        with comms.on(rank):
            mine = [device.cp.ascontiguousarray(a) for a in arrays]
            received.append(tuple(_like(a, a.shape) for a in mine))
        sends += [Message(rank, (rank + 1) % comms.size, a) for a in mine]
        receives += [Message(rank, (rank - 1) % comms.size, a) for a in received[-1]]
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
                of_rank.append(mine if peer == rank else [_like(a, a.shape) for a in like])
                if peer != rank:
                    sends += [Message(rank, peer, a) for a in mine]
                    receives += [Message(rank, peer, a) for a in of_rank[-1]]
            received.append(of_rank)
    comms.start(sends, receives)()
    return received


def _gathered(comms: Comms, at_hand: Sequence[Sequence[Any]], schedule: str) -> list[tuple[Any, ...]]:
    """Gather all ranks' K and V on each local rank, in the order of the sequence."""
    mine = []
    for rank, pair in zip(comms.ranks, at_hand, strict=True):
        with comms.on(rank):
            mine.append([device.cp.ascontiguousarray(a) for a in pair])
    received = _to_all(comms, lambda i, peer: mine[i], mine[0])
    whole = []
    for rank, of_rank in zip(comms.ranks, received, strict=True):
        with comms.on(rank):
            whole.append(tuple(unshard(parts, schedule) for parts in zip(*of_rank, strict=True)))
    return whole


class _Output:
    """A rank's output so far, and its lse."""

    def __init__(self, q: Any) -> None:
        self._q, self.o, self.lse = q, None, None

    def join(self, o: Any, lse: Any, rows: tuple[int, int], *, alone: bool, last: bool) -> None:
        """Merge one partial output. alone: no other partial has these rows. last: no partial follows."""
        everything = rows == (0, self._q.shape[1])
        if everything and self.o is None:
            self.o, self.lse = o, lse
        elif alone:
            if self.o is None:
                batch, n, heads, _ = self._q.shape
                self.o, self.lse = _like(self._q, self._q.shape), _like(lse, (batch, heads, n))
            bits(_rows(self.o, rows))[...] = bits(o)
            _rows(self.lse, rows, 2)[...] = lse
        else:
            self.o = merge(self.o, o, rows, self.lse, lse, self._q.dtype if last else None)


def merge(o: Any, part: Any, rows: tuple[int, int], lse: Any = None, part_lse: Any = None, dtype: Any = None) -> Any:
    """Join a partial result to what there is, on the current device, by kernels/17_merge.cu.

    Args:
        o: float32 (batch, n, heads, head_dim), C-contiguous, as all are. Changed in place, unless dtype is another.
        part: float32 (batch, rows[1] - rows[0], heads, head_dim) for those rows of o; None: nothing is joined.
        lse, part_lse: float32 (batch, heads, n) and (batch, heads, rows): o is the mean by their weights, and lse the
            log of the sum of both, changed in place. None: o is the sum.
        dtype: of the result, which is then complete; None: float32.

    Returns:
        o, or of another dtype than float32 a new array.

    Raises:
        TypeError, ValueError: arrays, rows or a dtype other than these.
    """
    cp = device.cp
    _check_merge(o, part, rows, lse, part_lse, dtype)
    batch, n, heads, head_dim = o.shape
    rounded = dtype is not None and np.dtype(dtype) != np.float32
    result = cp.empty(o.shape, dtype=dtype) if rounded else None
    if (part is None and not rounded) or not o.size:
        return o if result is None else result
    first, last = (0, n) if rounded else rows
    name = C_NAMES[np.dtype(dtype).name if rounded else "float32"]
    compiled = _merge_kernel(MERGE, name, head_dim)
    form = lse is None, part is None, result is None
    launch = compiled.launch_known if form in compiled.accepted else compiled  # which compares them with the signature
    numbers = n, heads, first, last - first, rows[0], rows[1] - rows[0] if part is not None else 0
    grid = -(-(last - first) * heads // rows_of_block(head_dim))
    for some in slices(batch, MAX_GRID_YZ):
        arrays = [a if a is None else a[some] for a in (o, lse, part, part_lse, result)]
        args = (*arrays, *map(np.int32, numbers))
        launch((grid, some.stop - some.start), (MERGE_THREADS,), args, shared_mem=0)
    if not kernel.launches_are_replaced():
        compiled.accepted.add(form)
    return o if result is None else result


def _check_merge(o: Any, part: Any, rows: Any, lse: Any, part_lse: Any, dtype: Any) -> None:
    if not isinstance(o, device.cp.ndarray) or o.ndim != 4:
        got = f"shape {o.shape}" if isinstance(o, device.cp.ndarray) else type(o).__name__
        raise TypeError(f"o is a device array (batch, n, heads, head_dim); got {got}")
    batch, n, heads, head_dim = o.shape
    if not isinstance(rows, (tuple, list)) or len(rows) != 2:
        raise TypeError(f"rows is a pair (first, end); got {rows!r:.40}")
    if not 0 <= rows[0] <= rows[1] <= n:
        raise ValueError(f"rows = {tuple(rows)}; o has rows 0 to {n}")
    if dtype is not None and (dtype not in C_NAMES if isinstance(dtype, str) else np.dtype(dtype).name not in C_NAMES):
        raise TypeError(f"dtype = {dtype!r:.60}; there are {', '.join(C_NAMES)}")
    count = rows[1] - rows[0]
    if (lse is None) != (part_lse is None) and part is not None:
        raise ValueError("lse and part_lse come together: without both the result is a sum")
    for name, a, shape in (
        ("o", o, o.shape),
        ("part", part, (batch, count, heads, head_dim)),
        ("lse", lse, (batch, heads, n)),
        ("part_lse", part_lse, (batch, heads, count)),
    ):
        if a is not None and (a.shape != shape or a.dtype != np.float32 or not a.flags.c_contiguous):
            raise ValueError(f"{name} is float32 {shape}, C-contiguous; got {a.dtype} {a.shape}, strides {a.strides}")


@functools.lru_cache(maxsize=64)
def _merge_kernel(file: str, name: str, head_dim: int) -> kernel.Kernel:
    return kernel.load(file, f"merge_partial<{name}>", defines={"HEAD_DIM": head_dim, "THREADS": MERGE_THREADS})


def rows_of_block(head_dim: int) -> int:
    """Return ROWS of kernels/17_merge.cu, the rows of a block."""
    chunks = head_dim if head_dim % 4 else head_dim // 4
    return MERGE_THREADS // (32 if chunks > 16 else 16 if chunks > 8 else 8)


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
    softmax_scale: float | None = None,
    deterministic: bool = False,
    schedule: str = "zigzag",
    comms: Comms,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Compute the gradients of the sum of do * ring_attention(q, k, v) over all ranks, with respect to q, k and v.

    Each product's are computed with the o and lse of all keys, and are float32, as are the sums. dQ stays with its
    rows. dK and dV of a rank's keys travel with them, from the first other rank that has computed some, and come home
    after the last step, while the rank computes with the last half of its rows what its own keys get from them. Where
    K and V are gathered, each rank sends to each other one what it has of its keys.

    Args:
        do, o: for each local rank as q. lse: float32 (batch, heads, rows), as `ring_attention` returned it.
        q, k, v, causal, softmax_scale, schedule, comms: as they were passed to `ring_attention`.
        deterministic: the same bits in every run, and those of virtual ranks.

    Returns:
        (dq, dk, dv), each a list with one array for each local rank, as q, k and v.

    Raises:
        TypeError, ValueError, TimeoutError, RuntimeError: as `ring_attention`.
    """
    options = {"schedule": schedule, "causal": causal, "softmax_scale": softmax_scale, "deterministic": deterministic}
    own_arrays = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}
    with _refusal_told(comms):
        check_flags(deterministic=deterministic)
        plan = _plan(comms, schedule, causal, **own_arrays)
        scale = softmax_scale_of(softmax_scale, q[0].shape[-1])

        def halves_of(number: int, rank: int) -> Sequence[Product]:
            """Return the products of a step; those of a rank's own keys in halves, one of which is for the last step.

            It is computed while dK and dV come home.
            """
            products = plan[number].products[rank]
            split = number == 0 and 1 < comms.size == len(plan)
            return [half for product in products for half in product.halves()] if split else products

        def calls_of(number: int, i: int, at_hand: Sequence[Any], given: Mapping[str, Any]) -> Iterator[Attention]:
            """Yield the calls of a step of local rank i, with its arrays or with their specs."""
            for rows, keys, causal in halves_of(number, comms.ranks[i]):
                arrays = {name: _rows(given[name], rows) for name in ("do", "q", "o")}
                arrays |= {name: _rows(a, keys) for name, a in zip("kv", at_hand, strict=True)}
                arrays["lse"] = _rows(given["lse"], rows, 2)
                options = BackwardOptions(None, causal, scale, deterministic, out="float32")
                yield Attention({name: arrays[name] for name in own_arrays}, options)

        _compile_first(comms, plan, calls_of, options, **own_arrays)
    comms.agree(_form("ring_attention_backward", options, q, k))
    dq, own = [_Sum(a) for a in q], [(_Sum(a), _Sum(b)) for a, b in zip(k, v, strict=True)]

    def add_step(
        number: int, at_hand: Sequence[Sequence[Any]], sums: Sequence[Sequence[_Sum]], some: slice = slice(None)
    ) -> None:
        """Compute the products of a step: add dQ to that of the rows, dK and dV to the sums of the keys at hand.

        some: of the products, as `halves_of` returns them.
        """
        for i, rank in enumerate(comms.ranks):
            with comms.on(rank):
                given = {name: parts[i] for name, parts in own_arrays.items()}
                pairs = zip(halves_of(number, rank), calls_of(number, i, at_hand[i], given), strict=True)
                for (rows, keys, _), call in [*pairs][some]:
                    for total, part, where in zip((dq[i], *sums[i]), run(call), (rows, keys, keys), strict=True):
                        total.add(part, where)

    with _abort_on_error(comms):
        if schedule == "all_gather" and comms.size > 1:
            order = schedule if causal else "ring"
            at_hand = _gathered(comms, [*zip(k, v, strict=True)], order)
            sums = [tuple(map(_Sum, pair)) for pair in at_hand]
            add_step(0, at_hand, sums)
            _send_home(comms, sums, own, order)
        else:
            _round_the_ring(comms, [*zip(k, v, strict=True)], own, add_step)
        results = []
        for i, rank in enumerate(comms.ranks):
            with comms.on(rank):
                results.append([total.rounded() for total in (dq[i], *own[i])])
        comms.finish()
    of_q, of_k, of_v = ([each[which] for each in results] for which in range(3))
    return of_q, of_k, of_v


def _round_the_ring(
    comms: Comms,
    at_hand: Sequence[Sequence[Any]],
    own: Sequence[Sequence[_Sum]],
    add_step: Callable[..., None],
) -> None:
    """Compute all steps: K and V go round, and dK and dV a step behind them; the last step's go home, to `own`.

    A rank's own keys come first and last, so that there is work while K and V leave and while dK and dV come home.
    """
    if comms.size == 1:
        return add_step(0, at_hand, own)
    mine, sums = at_hand, []
    for number in range(comms.size):
        keys_move, sums_move = number + 1 < comms.size, number > 1
        leaving = [
            (*(at_hand[i] if keys_move else ()), *(_totals(comms, rank, sums[i]) if sums_move else ()))
            for i, rank in enumerate(comms.ranks)
        ]
        arrived = _pass_on(comms, leaving) if keys_move or sums_move else None
        here = [tuple(map(_Sum, pair)) for pair in at_hand] if number else own
        with limits.reserve_sms(comms.leave if arrived else 0):
            add_step(number, at_hand, here, slice(None) if number else slice(-1))
        received = arrived() if arrived else []
        if number:
            sums = here
            for i, rank in enumerate(comms.ranks):
                with comms.on(rank):
                    for total, before in zip(sums[i], received[i][-2:] if sums_move else (), strict=False):
                        total.add(before)
        at_hand = [arrays[:2] for arrays in received]
    arrived = _pass_on(comms, [_totals(comms, rank, sums[i]) for i, rank in enumerate(comms.ranks)])
    with limits.reserve_sms(comms.leave):
        add_step(0, mine, own, slice(-1, None))
    for i, (rank, arrays) in enumerate(zip(comms.ranks, arrived(), strict=True)):
        with comms.on(rank):
            for total, part in zip(own[i], arrays, strict=True):
                total.add(part)


def _totals(comms: Comms, rank: int, sums: Sequence[_Sum]) -> tuple[Any, ...]:
    with comms.on(rank):
        return tuple(total.so_far() for total in sums)


def _send_home(comms: Comms, sums: Sequence[Sequence[_Sum]], own: Sequence[Sequence[_Sum]], schedule: str) -> None:
    """Send each rank the parts of its keys from all, to be added in the order of the ranks."""
    cut = []
    for rank, pair in zip(comms.ranks, sums, strict=True):
        with comms.on(rank):
            cut.append([shard(total.so_far(), comms.size, schedule) for total in pair])
    like = [parts[0] for parts in cut[0]]
    received = _to_all(comms, lambda i, peer: [parts[peer] for parts in cut[i]], like)
    for i, rank in enumerate(comms.ranks):
        with comms.on(rank):
            for of_sender in received[i]:
                for total, part in zip(own[i], of_sender, strict=True):
                    total.add(part)


class _Sum:
    """The sum of float32 parts of a gradient, each of some rows of it. like: what it is the gradient of."""

    def __init__(self, like: Any) -> None:
        self._like, self._total, self._last = like, None, None
        self._whole = 0, like.shape[1]

    def add(self, part: Any, rows: tuple[int, int] | None = None) -> None:
        """Add a part. The last one waits, to be added in one pass with rounding."""
        self._flush()
        self._last = part, rows or self._whole

    def _flush(self, dtype: Any = None) -> Any:
        part, rows = self._last or (None, self._whole)
        self._last = None
        if self._total is None:
            if part is not None and rows == self._whole:
                self._total, part = part, None
            else:
                self._total = device.cp.zeros(self._like.shape, dtype=np.float32)
        return merge(self._total, part, rows, dtype=dtype)

    def so_far(self) -> Any:
        """Return the sum, float32, of the shape of `like`."""
        return self._flush()

    def rounded(self) -> Any:
        """Return the sum in the dtype of `like`. Nothing can be added after it."""
        return self._flush(self._like.dtype)
