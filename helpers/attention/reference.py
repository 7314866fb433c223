"""Attention in NumPy float64, which every kernel of the course is checked against.

Imports only NumPy. The definition is scaled dot-product attention (Vaswani et al. 2017, "Attention Is All
You Need", section 3.2.1):  O = softmax(softmax_scale * Q K^T) V.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

# Upper limit of the scores stored at one time. The scores of N = N_kv = 16384 would be 2 GiB in float64.
CHUNK_BYTES = 32 * 2**20


class OnlineSoftmaxTrace(NamedTuple):
    """The state of online softmax after each tile of keys. All arrays are float64.

    m_i:     (tiles, N), the running maximum of the scaled scores.
    l_i:     (tiles, N), the running sum of exp(score - m_i).
    rescale: (tiles, N), exp(m_old - m_i), by which l_i and acc of the tiles before were multiplied; 0 at the
    first tile.
    output:  (N, d_v), attention: acc divided by l_i once, after the last tile.
    lse:     (N,), m_i + log(l_i) after the last tile: the log-sum-exp of a row's scores.
    """

    m_i: np.ndarray
    l_i: np.ndarray
    rescale: np.ndarray
    output: np.ndarray
    lse: np.ndarray


def softmax(s: np.ndarray) -> np.ndarray:
    """Compute softmax over the last axis, with each row's maximum subtracted so that exp cannot overflow.

    s: any shape (..., n), real; -inf is a key that the query does not see. Returns float64 of the same shape.
    Raises ValueError for an empty last axis, and for a row with NaN, +inf or nothing but -inf: it has no
    softmax.
    """
    s = _real("s", s)
    if s.ndim == 0 or s.shape[-1] == 0:
        raise ValueError(f"softmax needs at least one score in a row: s has shape {s.shape}.")
    m = s.max(axis=-1, keepdims=True)
    if not np.isfinite(m).all():
        raise ValueError("softmax needs a finite maximum in each row: a row of s holds NaN or +inf, or only -inf.")
    p = np.exp(s - m)
    p /= p.sum(axis=-1, keepdims=True)
    return p


def exponentials(s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute exp(s - the maximum of its row), and the sums of rows, (..., 1). s: (..., n), float64, -inf for no score.

    A row of nothing but -inf has exponentials of 0 and the sum 1, by which 0 may be divided.
    """
    largest = s.max(axis=-1, keepdims=True)
    p = np.exp(s - np.where(np.isfinite(largest), largest, 0.0))
    total = p.sum(axis=-1, keepdims=True)
    return p, np.where(total > 0.0, total, 1.0)


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    return_lse: bool = False,
    bias: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    rotary_cos: np.ndarray | None = None,
    rotary_sin: np.ndarray | None = None,
    rotary_interleaved: bool = False,
    rotary_positions: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """Compute softmax(softmax_scale * q k^T + bias) v in float64 (Vaswani et al. 2017, section 3.2.1).

    q: (..., N, d), k: (..., N_kv, d), v: (..., N_kv, d_v), any real dtype, finite. Leading axes (batch,
    heads) broadcast against each other. softmax_scale: None for 1 / sqrt(d).

    causal, window: which keys a row sees, as visible() defines it. A row that sees none has o = 0, lse = -inf.

    bias: broadcasts to (..., N, N_kv); added to the scaled scores (-inf hides a key), or, of bool, True where a key may
    be seen. alibi_slopes: broadcasts to the leading axes; -slope |i + N_kv - N - j| is added (Press et al. 2022, "Train
    Short, Test Long"). sinks: broadcasts to the leading axes; exp(sink) is added to the sum of a row's weights, and so
    to lse. rotary_cos, rotary_sin, rotary_interleaved: q and k are rotated first, with rotary().
    rotary_positions: of q's rows, (N,) or (batch, N), and of k's; None: row i of q is at i + N_kv - N, row j of k at j.

    Returns o (..., N, d_v) float64; with return_lse=True (o, lse), where lse (..., N) is the natural
    logarithm of the sum of exp(scaled scores) of each row. Query rows go through in chunks: at most
    CHUNK_BYTES of scores (or one row's) are stored at one time, so N = 16384 does not need 2 GiB.

    Raises ValueError for shapes that do not match, for NaN or inf in an input, for a softmax_scale that is not finite,
    for an invalid window; TypeError for anything but a NumPy array of real numbers.
    """
    if rotary_cos is not None:
        form = {"rotary_interleaved": rotary_interleaved, "rotary_positions": rotary_positions}
        q, k = rotated(q, k, rotary_cos=rotary_cos, rotary_sin=rotary_sin, **form)
    q, k, v, batch, scale = _arguments(q, k, v, softmax_scale)
    (n, _), n_kv = q.shape[-2:], k.shape[-2]
    change = _what_changes_scores(batch, n, n_kv, window, causal, bias, alibi_slopes)
    sinks = np.broadcast_to(-np.inf if sinks is None else _real("sinks", sinks), batch)
    o = np.empty((*batch, n, v.shape[-1]))
    lse = np.empty((*batch, n))
    q = np.broadcast_to(q, batch + q.shape[-2:])
    k = np.broadcast_to(k, batch + k.shape[-2:])
    v = np.broadcast_to(v, batch + v.shape[-2:])
    step = min(n, max(1, CHUNK_BYTES // (8 * n_kv)))
    scores = np.empty((step, n_kv))  # the largest array here: made once, and turned into P in place
    for head in np.ndindex(batch):
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            s = np.matmul(q[head][rows], k[head].T, out=scores[: rows.stop - start])
            s *= scale
            change(s, head, rows)
            m = np.maximum(s.max(axis=-1, keepdims=True), sinks[head])
            m[m == -np.inf] = 0.0  # a row that sees nothing: exp(-inf - 0) is 0, where -inf - -inf would be NaN
            np.exp(np.subtract(s, m, out=s), out=s)
            l = s.sum(axis=-1, keepdims=True) + np.exp(sinks[head] - m)  # noqa: E741 - the name that the papers use
            empty = l == 0.0
            o[head][rows] = (s @ v[head]) / np.where(empty, 1.0, l)
            lse[head][rows] = np.where(empty, -np.inf, m + np.log(np.where(empty, 1.0, l)))[:, 0]
    return (o, lse) if return_lse else o


def attention_with_kvcache(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    cache_seqlens: np.ndarray,
    block_table: np.ndarray | None = None,
    *,
    k: np.ndarray | None = None,
    v: np.ndarray | None = None,
    prefix_k: np.ndarray | None = None,
    prefix_v: np.ndarray | None = None,
    tree: np.ndarray | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute attention of the newest tokens of each sequence to its cache, in float64, sequence by sequence.

    q: (batch, seq_q, heads, d); caches (batch, seq_max, kv_heads, d), or (pages, page_size, kv_heads, d) with
    block_table (batch, pages of a sequence); only the first cache_seqlens[i] keys of sequence i are used. k, v: (batch,
    seq_q, kv_heads, d), after those. prefix_k, prefix_v: (keys, kv_heads, d), before those of every sequence. tree:
    (seq_q,) or (batch, seq_q), which of the newest tokens each one follows, one before it or -1. options: those of
    attention(); causal is True if it is left out.

    Returns o, of q's shape, and lse (batch, heads, seq_q). A token that sees no key has o = 0 and lse = -inf.
    """
    batch, tokens, heads, _ = q.shape
    o, lse = np.zeros((*q.shape[:3], v_cache.shape[3])), np.full((batch, heads, tokens), -np.inf)
    options = {"causal": True, **options}
    for i, length in enumerate(map(int, cache_seqlens)):
        of_sequence = []
        for cache, new, prefix in ((k_cache, k, prefix_k), (v_cache, v, prefix_v)):
            if block_table is None:
                rows = cache[i, :length]
            else:
                pages = block_table[i, : -(-length // cache.shape[1])]
                rows = cache[pages].reshape(-1, *cache.shape[2:])[:length]
            rows = np.concatenate([each for each in (prefix, rows, new if new is None else new[i]) if each is not None])
            rows = rows.astype(np.float64)
            of_sequence.append(np.repeat(rows.swapaxes(0, 1), heads // rows.shape[1], axis=0))
        keys = of_sequence[0].shape[1]
        if tree is not None:
            options["bias"] = np.ones((tokens, keys), bool)
            drafts = _seen_in_tree(np.broadcast_to(tree, (batch, tokens))[i])
            options["bias"][:, max(keys - tokens, 0) :] = drafts[:, max(tokens - keys, 0) :]
        if keys:
            o_i, lse[i] = attention(q[i].astype(np.float64).swapaxes(0, 1), *of_sequence, return_lse=True, **options)
            o[i] = o_i.swapaxes(0, 1)
    return o, lse


def _seen_in_tree(tree: np.ndarray) -> np.ndarray:
    """Return which tokens of a tree each token sees, bool (tokens, tokens): its ancestors, and itself."""
    seen = np.eye(len(tree), dtype=bool)
    for token, follows in enumerate(tree):
        if follows >= 0:
            seen[token] |= seen[follows]
    return seen


def rotary(
    x: np.ndarray, cos: np.ndarray, sin: np.ndarray, positions: np.ndarray, *, interleaved: bool = False
) -> np.ndarray:
    """Apply rotary position embedding in float64 (Su et al. 2021, "RoFormer", section 3.4.2).

    Pair p of a row, (a, b), becomes (a cos - b sin, b cos + a sin), with the angle's cosine and sine of its position.

    x: (..., N, d), of which the first rotary_dim words are rotated. cos, sin: (positions, rotary_dim / 2), real.
    positions: ints that broadcast to x without its last axis, each a row of the tables. interleaved: words 2 p and
    2 p + 1 are pair p (GPT-J); else p and p + rotary_dim / 2 (GPT-NeoX, Llama).

    Returns float64 of x's shape. Raises ValueError for shapes that do not fit and for positions outside of the tables;
    TypeError for anything but an array of real numbers.
    """
    x, cos, sin = _real("x", x).copy(), _real("cos", cos), _real("sin", sin)
    positions = np.asarray(positions)
    if cos.shape != sin.shape or cos.ndim != 2 or not 1 <= cos.shape[1] <= x.shape[-1] // 2:
        form = f"expected (positions, rotary_dim / 2) twice, with rotary_dim up to {x.shape[-1]}"
        raise ValueError(f"cos has shape {cos.shape} and sin {sin.shape}: {form}.")
    if positions.dtype.kind not in "iu" or (positions.size and not 0 <= positions.min() <= positions.max() < len(cos)):
        raise ValueError(f"positions: expected ints from 0 to {len(cos) - 1}, got {positions!r:.80}")
    pairs = cos.shape[1]
    first, second = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
    if not interleaved:
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    a, b = x[..., first].copy(), x[..., second].copy()
    c, s = cos[positions], sin[positions]
    x[..., first], x[..., second] = a * c - b * s, b * c + a * s
    return x


def rotated(
    q: np.ndarray,
    k: np.ndarray,
    *,
    rotary_cos: np.ndarray,
    rotary_sin: np.ndarray,
    rotary_interleaved: bool = False,
    rotary_positions: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Rotate q (..., N, d) and k (..., N_kv, d) like attention(), in float64. Raises like rotary()."""
    n, n_kv = np.shape(q)[-2], np.shape(k)[-2]
    places = rotary_positions or (np.arange(n) + n_kv - n, np.arange(n_kv))
    of_heads = (np.asarray(place) if np.ndim(place) < 2 else np.asarray(place)[:, None] for place in places)
    q_rotated, k_rotated = (
        rotary(a, rotary_cos, rotary_sin, place, interleaved=rotary_interleaved)
        for a, place in zip((q, k), of_heads, strict=True)
    )
    return q_rotated, k_rotated


def scores(
    q: np.ndarray,
    k: np.ndarray,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    bias: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
) -> np.ndarray:
    """Compute the scores whose softmax attention() takes: (..., N, N_kv) float64, -inf for unseen keys.

    The arguments are those of attention(), and so are the errors.
    """
    q, k, _, batch, scale = _arguments(q, k, k, softmax_scale)
    n, n_kv = q.shape[-2], k.shape[-2]
    s = np.broadcast_to(scale * (q @ k.swapaxes(-1, -2)), (*batch, n, n_kv)).copy()
    change = _what_changes_scores(batch, n, n_kv, window, causal, bias, alibi_slopes)
    for head in np.ndindex(batch):
        change(s[head], head, slice(0, n))
    return s


def _what_changes_scores(
    batch: tuple[int, ...],
    n: int,
    n_kv: int,
    window: tuple[int, int] | None,
    causal: bool,
    bias: np.ndarray | None,
    alibi_slopes: np.ndarray | None,
) -> Callable[[np.ndarray, tuple[int, ...], slice], None]:
    """Return a function of scaled scores (rows, N_kv), their head and rows, which adds in place, and hides by -inf."""
    left, right = _window(window, causal)
    every_bias = None if bias is None else np.broadcast_to(_bias(bias), (*batch, n, n_kv))
    slopes = None if alibi_slopes is None else np.broadcast_to(_real("alibi_slopes", alibi_slopes), batch)

    def change(s: np.ndarray, head: tuple[int, ...], rows: slice) -> None:
        places = np.arange(rows.start, rows.stop)
        if every_bias is not None:
            s += every_bias[head][rows]
        if slopes is not None:
            s -= slopes[head] * np.abs(_offsets(places, n, n_kv))
        if (left, right) != (-1, -1):
            s[~_seen(places, n, n_kv, left, right)] = -np.inf

    return change


def attention_backward(
    do: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    bias: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    wrt: Sequence[str] = (),
) -> tuple[np.ndarray, ...]:
    """Compute the gradients of sum(do * attention(q, k, v)) with respect to q, k and v, in float64.

        dV = P^T dO    dS = P * (dO V^T - rowsum(dO * O))    dQ = softmax_scale dS K    dK = softmax_scale dS^T Q

    (Dao et al. 2022, "FlashAttention", appendix B.2.) The arguments are those of attention(), and do (..., N, d_v).
    If heads of q share heads of k and v (the axis before the rows has a multiple of their length), dk and dv are summed
    over the group; heads 0 .. group - 1 of q share head 0. A row that sees no key has zero gradients.

    wrt: any of "bias", "alibi_slopes" and "sinks", whose gradients follow. A term added to a score has the gradient dS;
    a number added to several scores, along a broadcast axis, has the sum of theirs. A slope is added times -|i + N_kv -
    N - j|. A sink has the weight exp(sink - lse) and the value 0 in each row, so that its gradient is -sum(exp(sink -
    lse) * rowsum(dO * O)).

    Returns (dq, dk, dv, *those of wrt), with the arguments' shapes. Raises like attention(), and ValueError if do does
    not match, and for a name in wrt without a gradient or an argument.
    """
    differentiable = {"bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
    for name in wrt:
        if differentiable.get(name) is None:
            raise ValueError(
                f"wrt has {name!r}: expected any of {', '.join(differentiable)}, each given as an argument"
            )
        if np.asarray(differentiable[name]).dtype == bool:
            raise ValueError(f"wrt has {name!r}, which is of bool: a mask has no gradient")
    heads, kv_heads = (np.shape(a)[-3] if np.ndim(a) > 2 else 1 for a in (q, k))
    group = heads // kv_heads if kv_heads and heads % kv_heads == 0 else 1
    if group > 1:
        k, v = (np.repeat(a, group, axis=-3) for a in (k, v))
    q, k, v, batch, scale = _arguments(q, k, v, softmax_scale)
    do = _real("do", do)
    n, n_kv = q.shape[-2], k.shape[-2]
    if q.shape[:-2] != batch or k.shape[:-2] != batch or v.shape[:-2] != batch:
        raise ValueError(f"the leading axes of q {q.shape}, k {k.shape} and v {v.shape} do not fit a backward.")
    if do.shape != (*batch, n, v.shape[-1]):
        raise ValueError(f"do has shape {do.shape}: expected that of the output, {(*batch, n, v.shape[-1])}.")
    if not np.isfinite(do).all():
        raise ValueError(f"do holds {int((~np.isfinite(do)).sum())} NaN or inf: the reference is for finite inputs.")
    change = _what_changes_scores(batch, n, n_kv, window, causal, bias, alibi_slopes)
    every_sink = np.broadcast_to(-np.inf if sinks is None else _real("sinks", sinks), batch)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    extra = {name: np.zeros(np.shape(differentiable[name])) for name in wrt}
    step = min(n, max(1, CHUNK_BYTES // (8 * n_kv)))
    for head in np.ndindex(batch):
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            s = q[head][rows] @ k[head].T * scale
            change(s, head, rows)
            m = np.maximum(s.max(axis=-1, keepdims=True), every_sink[head])
            m = np.where(m == -np.inf, 0.0, m)
            p, of_sink = np.exp(s - m), np.exp(every_sink[head] - m)
            total = p.sum(axis=-1, keepdims=True) + of_sink
            total = np.where(total == 0.0, 1.0, total)
            p /= total
            dp = do[head][rows] @ v[head].T
            delta = (p * dp).sum(axis=-1, keepdims=True)  # rowsum(P * dP) is rowsum(dO * O)
            ds = p * (dp - delta)
            dq[head][rows] = scale * ds @ k[head]
            dk[head] += scale * ds.T @ q[head][rows]
            dv[head] += p.T @ do[head][rows]
            if "bias" in extra:
                _add_broadcast(extra["bias"], head, ds, (rows,))
            if "alibi_slopes" in extra:
                distances = np.abs(_offsets(np.arange(rows.start, rows.stop), n, n_kv))
                _add_broadcast(extra["alibi_slopes"], head, np.sum(-distances * ds))
            if "sinks" in extra:
                _add_broadcast(extra["sinks"], head, -np.sum(of_sink / total * delta))
    if group > 1:
        dk, dv = (a.reshape(*a.shape[:-3], kv_heads, group, *a.shape[-2:]).sum(axis=-3) for a in (dk, dv))
    return dq, dk, dv, *extra.values()


def _add_broadcast(total: np.ndarray, head: tuple[int, ...], part: Any, rows: tuple[slice, ...] = ()) -> None:
    """Add a head's contribution to the gradient of an array that was broadcast: sum over the axes of length 1.

    part: (rows, N_kv), with `rows` their slice of N; or a number, for an array without these axes.
    """
    total = total.reshape((1,) * (len(head) + np.ndim(part) - total.ndim) + total.shape)  # a view of the same memory
    of_head = total[(*(i if size > 1 else 0 for i, size in zip(head, total.shape, strict=False)), ...)]
    at = tuple(rows if size > 1 else slice(None) for rows, size in zip(rows, of_head.shape, strict=False))
    of_head[at] += np.sum(part, axis=tuple(i for i, size in enumerate(of_head.shape) if size == 1), keepdims=True)


def distance_bias(table: np.ndarray, n: int, n_kv: int) -> np.ndarray:
    """Return the bias (heads, n, n_kv) from a table of distances, as in T5 (Raffel et al. 2020).

    table: (heads, 2 * reach + 1). Row i and key j, at the distance j - (i + n_kv - n), get table[:, reach + distance];
    beyond `reach` the nearest end. See also helpers.attention.score_mods.relative_bias.
    """
    return np.asarray(table)[:, _table_columns(np.shape(table)[1], n, n_kv)]


def distance_bias_gradient(dbias: np.ndarray, width: int) -> np.ndarray:
    """Sum the gradient of distance_bias(table, n, n_kv), (heads, n, n_kv), along diagonals, which gives the table's.

    Returns float64 (heads, width).
    """
    columns, dtable = _table_columns(width, *np.shape(dbias)[1:]), np.zeros((len(dbias), width))
    for head, of_head in enumerate(dbias):
        np.add.at(dtable[head], columns, of_head)
    return dtable


def _table_columns(width: int, n: int, n_kv: int) -> np.ndarray:
    """Return the column of a table of distances that each score reads: (n, n_kv)."""
    reach = width // 2
    return reach + np.clip(_offsets(np.arange(n), n, n_kv), -reach, reach)


def visible(n: int, n_kv: int, *, causal: bool = False, window: tuple[int, int] | None = None) -> np.ndarray:
    """Return which keys each query row sees: (n, n_kv) bool.

    The diagonal ends at the bottom right, as FlashAttention defines it: the last query is aligned with the last key,
    and row i with key i + n_kv - n. causal=True hides the keys after it. window=(left, right) leaves
    that many keys before it and after it; -1 is no limit. With both, no key after the diagonal is seen.

    Raises ValueError or TypeError for a window that is not a pair of ints of at least -1.
    """
    return _seen(np.arange(n), n, n_kv, *_window(window, causal))


def online_softmax_trace(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    block_n: int,
    *,
    softmax_scale: float | None = None,
) -> OnlineSoftmaxTrace:
    """Compute attention by online softmax over tiles of block_n keys, with m_i, l_i and rescaling of each tile.

    The recurrence of m_i and l_i is algorithm 3 of Milakov & Gimelshein 2018 ("Online normalizer calculation
    for softmax"); with the output carried along it is algorithm 1 of Dao et al. 2022 ("FlashAttention"). Here
    acc is divided by l_i once, at the end, as in Dao 2023 ("FlashAttention-2"), not at every tile.

    q: (N, d), k: (N_kv, d), v: (N_kv, d_v), one head, real, finite. block_n: keys in a tile, at least 1; the
    last tile may be shorter. Returns an OnlineSoftmaxTrace in float64, with ceil(N_kv / block_n) tiles.
    Raises ValueError and TypeError like attention(), and ValueError for more than one head or block_n < 1.
    """
    q, k, v, batch, scale = _arguments(q, k, v, softmax_scale)
    if batch:
        raise ValueError(f"the trace is of one head: expected q (N, d), k and v (N_kv, d), got leading axes {batch}.")
    if isinstance(block_n, bool) or not isinstance(block_n, int | np.integer) or block_n < 1:
        raise ValueError(f"block_n is the number of keys in a tile: expected an int of at least 1, got {block_n!r}.")
    n, n_kv = len(q), len(k)
    tiles = -(-n_kv // block_n)
    m_trace, l_trace, rescale_trace = (np.empty((tiles, n)) for _ in range(3))
    m_i = np.full(n, -np.inf)
    l_i = np.zeros(n)
    acc = np.zeros((n, v.shape[-1]))
    for tile in range(tiles):
        keys = slice(tile * block_n, (tile + 1) * block_n)
        s = q @ k[keys].T * scale
        m_new = np.maximum(m_i, s.max(axis=-1))
        rescale = np.exp(m_i - m_new)  # exp(-inf) = 0 at the first tile: there is nothing to keep yet
        p = np.exp(s - m_new[:, None])
        l_i = rescale * l_i + p.sum(axis=-1)
        acc = rescale[:, None] * acc + p @ v[keys]
        m_i = m_new
        m_trace[tile], l_trace[tile], rescale_trace[tile] = m_i, l_i, rescale
    return OnlineSoftmaxTrace(m_trace, l_trace, rescale_trace, acc / l_i[:, None], m_i + np.log(l_i))


def _window(window: tuple[int, int] | None, causal: bool) -> tuple[int, int]:
    """Return (left, right), -1 for no limit; causal is a right of 0."""
    if window is None:
        window = (-1, -1)
    form = "window is (left, right), ints of at least -1, or None"
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"{form}: got {window!r}.")
    for size in window:
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise TypeError(f"{form}: got {window!r}.")
        if size < -1:
            raise ValueError(f"{form}: got {window!r}.")
    return int(window[0]), 0 if causal else int(window[1])


def _offsets(rows: np.ndarray, n: int, n_kv: int) -> np.ndarray:
    """Return each key's offset from each row's own position: (rows, n_kv), 0 on the diagonal."""
    return np.arange(n_kv) - (rows[:, None] + n_kv - n)


def _bias(bias: np.ndarray) -> np.ndarray:
    """Return the terms added to the scores. Raises ValueError for NaN and +inf."""
    if np.asarray(bias).dtype == bool:
        return np.where(bias, 0.0, -np.inf)
    bias = _real("bias", bias)
    if np.isnan(bias).any() or np.isposinf(bias).any():
        raise ValueError("bias holds NaN or +inf: expected finite numbers, or -inf for a key that is hidden.")
    return bias


def _seen(rows: np.ndarray, n: int, n_kv: int, left: int, right: int) -> np.ndarray:
    """Return visible() for some of the rows."""
    offset = _offsets(rows, n, n_kv)
    seen = np.ones(offset.shape, bool)
    if left >= 0:
        seen &= offset >= -left
    if right >= 0:
        seen &= offset <= right
    return seen


def _real(name: str, a: np.ndarray) -> np.ndarray:
    """Convert to float64. Raises TypeError if that needs a loss or a copy from a device."""
    if not isinstance(a, np.ndarray) and hasattr(a, "get"):
        raise TypeError(f"{name} is a device array: expected a NumPy array. Pass cp.asnumpy({name}).")
    a = np.asarray(a)
    # "V" includes bfloat16 and the 8-bit floats of ml_dtypes, which NumPy does not know as floats.
    if a.dtype.kind not in "buifV" or a.dtype.names is not None:
        raise TypeError(f"{name} has dtype {a.dtype}: expected real numbers.")
    try:
        return a.astype(np.float64, copy=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} has dtype {a.dtype}: expected real numbers.") from error


def _arguments(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, softmax_scale: float | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, ...], float]:
    """Return q, k, v as float64, the leading axes and the scale, after all checks of attention()."""
    q, k, v = _real("q", q), _real("k", k), _real("v", v)
    for name, a, form in (("q", q, "(..., N, d)"), ("k", k, "(..., N_kv, d)"), ("v", v, "(..., N_kv, d_v)")):
        if a.ndim < 2:
            raise ValueError(f"{name} has shape {a.shape}: expected {form}, two axes or more.")
        if 0 in a.shape:
            raise ValueError(f"{name} has shape {a.shape}: expected {form} with no axis of length 0.")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q {q.shape} and k {k.shape} differ in d, their last axis: q k^T needs the same d.")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"k {k.shape} and v {v.shape} differ in N_kv, the axis before the last: each key has one value."
        )
    try:
        batch = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    except ValueError:
        raise ValueError(
            f"the leading axes of q {q.shape}, k {k.shape} and v {v.shape} do not broadcast: "
            "expected equal lengths, or 1, in each."
        ) from None
    for name, a in (("q", q), ("k", k), ("v", v)):
        if not np.isfinite(a).all():
            count = int((~np.isfinite(a)).sum())
            raise ValueError(f"{name} holds {count} NaN or inf: the reference is for finite inputs.")
    scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else float(softmax_scale)
    if not math.isfinite(scale):
        raise ValueError(f"softmax_scale is {scale}: expected a finite number, or None for 1 / sqrt(d).")
    return q, k, v, batch, scale
