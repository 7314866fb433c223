"""The reference against a literal triple loop, against identities of attention, and against wrong use."""

import math
import subprocess
import sys
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.attention import reference
from helpers.attention.reference import attention, online_softmax_trace, softmax, visible


def literal(q, k, v, scale):
    """Compute o and lse by the formula, in plain Python floats without NumPy."""
    o, lse = [], []
    for i in range(len(q)):
        s = []
        for j in range(len(k)):
            dot = 0.0
            for t in range(len(q[i])):
                dot += float(q[i][t]) * float(k[j][t])
            s.append(scale * dot)
        m = max(s)
        e = [math.exp(x - m) for x in s]
        total = math.fsum(e)
        o.append([math.fsum(e[j] * float(v[j][c]) for j in range(len(k))) / total for c in range(len(v[0]))])
        lse.append(m + math.log(total))
    return np.array(o), np.array(lse)


def normal(*shape, seed=0, mean=0.25):
    return np.random.default_rng(seed).standard_normal(shape) + mean


@pytest.mark.parametrize("n, n_kv, d, d_v", [(1, 1, 1, 1), (1, 7, 3, 3), (5, 1, 2, 4), (3, 33, 8, 8), (17, 5, 13, 3)])
@pytest.mark.parametrize("scale", [None, 0.0, -0.7, 3.0])
def test_equals_the_literal_triple_loop(n, n_kv, d, d_v, scale):
    q, k, v = normal(n, d, seed=1), normal(n_kv, d, seed=2), normal(n_kv, d_v, seed=3)
    o, lse = attention(q, k, v, softmax_scale=scale, return_lse=True)
    np.testing.assert_array_equal(attention(q, k, v, softmax_scale=scale), o)
    o_loop, lse_loop = literal(q, k, v, 1 / math.sqrt(d) if scale is None else scale)
    assert o.shape == (n, d_v) and lse.shape == (n,) and o.dtype == lse.dtype == np.float64
    np.testing.assert_allclose(o, o_loop, rtol=0, atol=1e-14)
    np.testing.assert_allclose(lse, lse_loop, rtol=0, atol=1e-13)


@pytest.mark.parametrize("sign", [1, -1])
def test_logits_of_1e4_stay_finite_and_exact(sign):
    q, k, v = normal(9, 4), normal(11, 4, seed=1), normal(11, 4, seed=2)
    scale = sign * 1e4 / np.abs(q @ k.T).max()
    with np.errstate(all="raise", under="ignore"):
        o, lse = attention(q, k, v, softmax_scale=scale, return_lse=True)
    o_loop, lse_loop = literal(q, k, v, scale)
    # A logit of 1e4 has a rounding error of 1e-12 in float64: two summation orders agree no better.
    np.testing.assert_allclose(o, o_loop, rtol=0, atol=1e-10)
    np.testing.assert_allclose(lse, lse_loop, rtol=1e-14)
    assert np.abs(lse).max() > 1e3


def test_a_textbook_case():
    """Logits ln 1, ln 2, ln 5: the weights are 1/8, 2/8, 5/8."""
    q, k = np.ones((1, 1)), np.log([[1.0], [2.0], [5.0]])
    v = np.eye(3)
    o, lse = attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(o, [[1 / 8, 2 / 8, 5 / 8]], atol=1e-15)
    np.testing.assert_allclose(lse, [math.log(8)], atol=1e-15)


def test_leading_axes_broadcast():
    q, k, v = normal(2, 3, 4, 5), normal(3, 6, 5, seed=1), normal(2, 1, 6, 2, seed=2)
    o, lse = attention(q, k, v, return_lse=True)
    assert o.shape == (2, 3, 4, 2) and lse.shape == (2, 3, 4)
    for b in range(2):
        for h in range(3):
            o_one, lse_one = attention(q[b, h], k[h], v[b, 0], return_lse=True)
            np.testing.assert_allclose(o[b, h], o_one, rtol=0, atol=1e-14)
            np.testing.assert_allclose(lse[b, h], lse_one, rtol=0, atol=1e-14)


@pytest.mark.parametrize("limit", [1, 8 * 29 * 3, 8 * 29 * 7 + 5])
def test_chunks_give_the_same(monkeypatch, limit):
    q, k, v = normal(2, 31, 8), normal(2, 29, 8, seed=1), normal(2, 29, 8, seed=2)
    whole = attention(q, k, v, return_lse=True)
    monkeypatch.setattr(reference, "CHUNK_BYTES", limit)
    for a, b in zip(attention(q, k, v, return_lse=True), whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-14)


def test_sixteen_thousand_rows_do_not_need_all_scores_at_once():
    n, n_kv, d = 16384, 1024, 4
    q, k, v = normal(n, d), normal(n_kv, d, seed=1), normal(n_kv, d, seed=2)
    tracemalloc.start()
    try:
        o = attention(q, k, v)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * reference.CHUNK_BYTES < 8 * n * n_kv / 2
    np.testing.assert_allclose(o[-3:], literal(q[-3:], k, v, 0.5)[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8])
def test_input_types_are_widened_and_left_alone(dtype):
    q, k, v = (normal(4, 3, seed=s, mean=2).astype(dtype) for s in range(3))
    before = q.copy(), k.copy(), v.copy()
    o = attention(q, k, v)
    assert o.dtype == np.float64
    wide = [a.astype(np.float64) for a in (q, k, v)]
    np.testing.assert_allclose(o, literal(*wide, 1 / math.sqrt(3))[0], rtol=0, atol=1e-14)
    for a, b in zip((q, k, v), before, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(wide, before, strict=True):  # float64 inputs are not copied, so they must not be written either
        np.testing.assert_array_equal(a, b.astype(np.float64))


def test_lists_and_views_are_arrays_too():
    q, k, v = normal(4, 6)[:, ::2], normal(3, 10, seed=1).T[:7], normal(7, 3, seed=2)[::-1]
    copies = q.copy(), k.copy(), v.copy()
    np.testing.assert_allclose(attention(q, k, v), attention(*copies), rtol=0, atol=1e-14)
    np.testing.assert_array_equal(attention([[1, 2]], [[3, 4]], [[5, 6]]), [[5.0, 6.0]])


def test_softmax_rows():
    s = normal(3, 4, 9)
    p = softmax(s)
    np.testing.assert_allclose(p.sum(-1), 1, atol=1e-15)
    e = [math.exp(x) for x in s[1, 2]]
    np.testing.assert_allclose(p[1, 2], np.array(e) / math.fsum(e), atol=1e-15)
    np.testing.assert_array_equal(softmax(np.array([1000.0, 1000.0, -np.inf])), [0.5, 0.5, 0.0])
    np.testing.assert_allclose(softmax(s + 700), p, atol=1e-13)


@pytest.mark.parametrize(
    "s, words",
    [
        (np.float64(1.0), "at least one score"),
        (np.empty((3, 0)), "at least one score"),
        ([0.0, np.nan], "NaN"),
        ([0.0, np.inf], "finite maximum"),
        ([[0.0, 1.0], [-np.inf, -np.inf]], "only -inf"),
    ],
)
def test_softmax_refuses_rows_that_have_none(s, words):
    with pytest.raises(ValueError, match=words):
        softmax(np.asarray(s))


@pytest.mark.parametrize(
    "n, n_kv, d, block_n", [(1, 1, 1, 1), (5, 33, 8, 32), (5, 64, 3, 32), (7, 20, 4, 1), (3, 20, 4, 999)]
)
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_online_trace_equals_the_direct_result(n, n_kv, d, block_n, size):
    q, k, v = normal(n, d), normal(n_kv, d, seed=1), normal(n_kv, d + 1, seed=2)
    scale = size / np.abs(q @ k.T).max()
    trace = online_softmax_trace(q, k, v, block_n, softmax_scale=scale)
    tiles = math.ceil(n_kv / block_n)
    assert trace.m_i.shape == trace.l_i.shape == trace.rescale.shape == (tiles, n)
    s = scale * (q @ k.T)
    for tile in range(tiles):
        seen = s[:, : (tile + 1) * block_n]
        m = seen.max(1)
        np.testing.assert_allclose(trace.m_i[tile], m, rtol=1e-14, atol=1e-12)
        np.testing.assert_allclose(trace.l_i[tile], np.exp(seen - m[:, None]).sum(1), rtol=1e-10)
        before = np.exp(s[:, : tile * block_n].max(1) - m) if tile else np.zeros(n)
        np.testing.assert_allclose(trace.rescale[tile], before, rtol=0, atol=1e-10)
    o, lse = attention(q, k, v, softmax_scale=scale, return_lse=True)
    np.testing.assert_allclose(trace.output, o, rtol=0, atol=1e-10)
    np.testing.assert_allclose(trace.lse, lse, rtol=1e-13, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 6), n_kv=st.integers(1, 9), d=st.integers(1, 6), block_n=st.integers(1, 10),
    size=st.floats(1e-3, 1e3), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_any_shape_against_the_loop_and_the_trace(n, n_kv, d, block_n, size, seed):
    q, k, v = size * normal(n, d, seed=seed), normal(n_kv, d, seed=seed + 1), normal(n_kv, d, seed=seed + 2)
    o_loop, _ = literal(q, k, v, 1 / math.sqrt(d))
    np.testing.assert_allclose(attention(q, k, v), o_loop, rtol=0, atol=1e-10)
    np.testing.assert_allclose(online_softmax_trace(q, k, v, block_n).output, o_loop, rtol=0, atol=1e-10)


def sees(i, j, n, n_kv, causal, window):
    """Return whether query i sees key j, following FlashAttention's documentation."""
    at = i + n_kv - n  # the query's position: the last query is at the last key
    left, right = window or (-1, -1)
    return not (causal and j > at) and (left == -1 or j >= at - left) and (right == -1 or j <= at + right)


MASKS = [(causal, w) for causal in (False, True) for w in (None, (-1, -1), (2, 3), (0, 0), (-1, 1), (4, -1), (99, 99))]


@pytest.mark.parametrize("n, n_kv", [(1, 1), (5, 5), (4, 9), (9, 4), (1, 7), (7, 1), (13, 12)])
@pytest.mark.parametrize("causal, window", MASKS)
def test_masks_equal_the_literal_loop(n, n_kv, causal, window, monkeypatch):
    """The loop runs over exactly the keys that a row sees."""
    q, k, v = normal(2, n, 3, seed=1), normal(2, n_kv, 3, seed=2), normal(2, n_kv, 4, seed=3)
    mask = np.array([[sees(i, j, n, n_kv, causal, window) for j in range(n_kv)] for i in range(n)])
    np.testing.assert_array_equal(visible(n, n_kv, causal=causal, window=window), mask)
    expected, expected_lse = np.zeros((2, n, 4)), np.full((2, n), -np.inf)
    for head, i in np.ndindex(2, n):
        if mask[i].any():
            one = literal(q[head, i : i + 1], k[head, mask[i]], v[head, mask[i]], 0.7)
            expected[head, i], expected_lse[head, i] = one[0][0], one[1][0]
    for limit in (reference.CHUNK_BYTES, 1):  # also row by row: a chunk must know where it begins
        monkeypatch.setattr(reference, "CHUNK_BYTES", limit)
        with np.errstate(all="raise", under="ignore"):
            o, lse = attention(q, k, v, softmax_scale=0.7, causal=causal, window=window, return_lse=True)
        np.testing.assert_allclose(o, expected, rtol=0, atol=1e-14)
        np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-13)


def test_causal_is_aligned_at_the_bottom_right():
    """The two pictures of FlashAttention's documentation: (2, 5) and (5, 2)."""
    np.testing.assert_array_equal(visible(2, 5, causal=True), [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    np.testing.assert_array_equal(visible(5, 2, causal=True), [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]])
    q, k, v = normal(5, 3), normal(2, 3, seed=1), normal(2, 3, seed=2)
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    np.testing.assert_array_equal(o[:3], 0)
    np.testing.assert_array_equal(lse[:3], -np.inf)
    np.testing.assert_array_equal(o[3], v[0])


@pytest.mark.parametrize(
    "window, error",
    [((1,), TypeError), ((1, 2, 3), TypeError), (4, TypeError), ("ab", TypeError), ((1.0, 2), TypeError),
     ((True, 1), TypeError), ((None, 1), TypeError), ((-2, 0), ValueError), ((0, -5), ValueError)],
)  # fmt: skip
def test_a_window_is_a_pair_of_ints(window, error):
    for function in (lambda: attention(ONES, ONES, ONES, window=window), lambda: visible(3, 3, window=window)):
        with pytest.raises(error, match=r"window is \(left, right\), ints of at least -1, or None: got"):
            function()


ONES = np.ones((4, 3))


@pytest.mark.parametrize(
    "q, k, v, words",
    [
        (np.ones(3), ONES, ONES, r"q has shape \(3,\): expected \(\.\.\., N, d\)"),
        (ONES, np.ones(3), ONES, r"k has shape \(3,\): expected \(\.\.\., N_kv, d\)"),
        (ONES, ONES, np.float64(1), r"v has shape \(\): expected \(\.\.\., N_kv, d_v\)"),
        (np.ones((4, 2)), ONES, ONES, r"q \(4, 2\) and k \(4, 3\) differ in d"),
        (ONES, ONES, np.ones((5, 3)), r"k \(4, 3\) and v \(5, 3\) differ in N_kv"),
        (np.ones((0, 3)), ONES, ONES, r"q has shape \(0, 3\).*no axis of length 0"),
        (ONES, np.ones((0, 3)), np.ones((0, 3)), r"k has shape \(0, 3\).*no axis of length 0"),
        (np.ones((2, 4, 3)), np.ones((3, 4, 3)), ONES, r"leading axes of q \(2, 4, 3\), k \(3, 4, 3\)"),
        (np.where(np.eye(4, 3) > 0, np.nan, 1), ONES, ONES, "q holds 3 NaN or inf"),
        (ONES, ONES, np.where(np.eye(4, 3) > 0, -np.inf, 1), "v holds 3 NaN or inf"),
    ],
)
def test_wrong_shapes_and_values_are_named(q, k, v, words):
    with pytest.raises(ValueError, match=words):
        attention(q, k, v)
    with pytest.raises(ValueError, match=words):
        online_softmax_trace(q, k, v, 2)


@pytest.mark.parametrize("scale", [math.inf, math.nan])
def test_scale_must_be_finite(scale):
    with pytest.raises(ValueError, match="softmax_scale is"):
        attention(ONES, ONES, ONES, softmax_scale=scale)


@pytest.mark.parametrize("block_n", [0, -1, 2.0, None, True])
def test_trace_block_n(block_n):
    with pytest.raises(ValueError, match="block_n is the number of keys in a tile"):
        online_softmax_trace(ONES, ONES, ONES, block_n)


def test_trace_is_of_one_head():
    with pytest.raises(ValueError, match="one head"):
        online_softmax_trace(np.ones((2, 4, 3)), ONES, ONES, 2)


def test_wrong_kinds_are_type_errors():
    class OnDevice:
        def get(self):
            return ONES

    with pytest.raises(TypeError, match=r"k is a device array.*cp\.asnumpy\(k\)"):
        attention(ONES, OnDevice(), ONES)
    for bad in (
        ONES.astype(complex),
        ONES.astype(object),
        ONES.astype(str),
        np.zeros((4, 3), "V8"),
        np.zeros((4, 3), "f4,f4"),
    ):
        with pytest.raises(TypeError, match="v has dtype"):
            attention(ONES, ONES, bad)


def test_imports_numpy_alone():
    """In a fresh interpreter: importing the reference imports nothing of the course and no CuPy."""
    code = (
        "import sys, helpers.attention.reference; "
        "print([m for m in sys.modules if m.startswith(('helpers.', 'cupy', 'ml_dtypes'))])"
    )
    root = Path(reference.__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['helpers.attention', 'helpers.attention.reference']"


# ---- gradients


def literal_gradients(do, q, k, v, scale, seen):
    """Apply the chain rule in plain Python floats: through O = P V, the softmax, and S = scale q k^T."""
    dq, dk, dv = ([[0.0] * len(a[0]) for _ in a] for a in (q, k, v))
    for i in range(len(q)):
        keys = [j for j in range(len(k)) if seen[i][j]]
        if not keys:
            continue
        s = [scale * math.fsum(float(a) * float(b) for a, b in zip(q[i], k[j], strict=True)) for j in keys]
        e = [math.exp(x - max(s)) for x in s]
        p = [x / math.fsum(e) for x in e]
        dp = [math.fsum(float(a) * float(b) for a, b in zip(do[i], v[j], strict=True)) for j in keys]
        for a, j in enumerate(keys):
            # The softmax's derivative: dp_b / ds_a = p_b ((a == b) - p_a).
            ds = math.fsum(dp[b] * p[b] * ((a == b) - p[a]) for b in range(len(keys)))
            for c in range(len(q[i])):
                dq[i][c] += scale * ds * float(k[j][c])
                dk[j][c] += scale * ds * float(q[i][c])
            for c in range(len(v[j])):
                dv[j][c] += p[a] * float(do[i][c])
    return np.array(dq), np.array(dk), np.array(dv)


MASKS = [{}, {"causal": True}, {"window": (2, 1)}, {"window": (0, -1)}]


@pytest.mark.parametrize("n, n_kv, d, d_v", [(1, 1, 1, 1), (1, 7, 3, 3), (9, 4, 2, 4), (5, 13, 8, 3)])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("scale", [None, -0.7])
def test_gradients_equal_the_literal_loop(n, n_kv, d, d_v, mask, scale):
    do, q = normal(n, d_v, seed=4), normal(n, d, seed=1)
    k, v = normal(n_kv, d, seed=2), normal(n_kv, d_v, seed=3)
    got = reference.attention_backward(do, q, k, v, softmax_scale=scale, **mask)
    seen = visible(n, n_kv, **mask)
    loop = literal_gradients(do, q, k, v, 1 / math.sqrt(d) if scale is None else scale, seen)
    for a, b in zip(got, loop, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)
    assert (got[0][~seen.any(axis=1)] == 0).all() and (got[1][~seen.any(axis=0)] == 0).all()


ALIBI = {"window": (3, 1), "alibi_slopes": np.array([[0.7], [-0.2]])}


@pytest.mark.parametrize("mask", [*MASKS, ALIBI], ids=str)
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2), (3, 1)])
def test_gradients_are_finite_differences(mask, heads, kv_heads):
    """The loss is sum(do * attention), with shared K and V repeated for each query head."""
    do, q = normal(2, heads, 6, 3, seed=4), normal(2, heads, 6, 3, seed=1)
    k, v = normal(2, kv_heads, 5, 3, seed=2), normal(2, kv_heads, 5, 3, seed=3)

    def loss(q, k, v):
        return float((do * attention(q, *(np.repeat(a, heads // kv_heads, axis=1) for a in (k, v)), **mask)).sum())

    arrays, step = [q, k, v], 1e-5
    for which, got in enumerate(reference.attention_backward(do, q, k, v, **mask)):
        assert got.shape == arrays[which].shape
        for at in [(0, 0, 0, 0), (1, -1, 4, 2), (0, -1, 2, 1), (1, 0, 3, 0)]:
            ends = []
            for sign in (1, -1):
                moved = [a.copy() for a in arrays]
                moved[which][at] += sign * step
                ends.append(loss(*moved))
            assert got[at] == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-8)


def test_gradients_in_chunks_are_the_same(monkeypatch):
    arrays = [normal(2, 50, 8, seed=seed) for seed in range(4)]
    whole = reference.attention_backward(*arrays, causal=True)
    monkeypatch.setattr(reference, "CHUNK_BYTES", 8 * 50 * 7)
    for a, b in zip(reference.attention_backward(*arrays, causal=True), whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"do": normal(5, 3)}, "do has shape"),
        ({"do": np.full((4, 3), np.nan)}, "do holds 12 NaN or inf"),
        ({"q": normal(2, 4, 3), "k": normal(3, 6, 3)}, "do not broadcast"),
        ({"k": normal(2, 6, 3)}, "do not fit a backward"),
    ],
)
def test_gradients_of_what_does_not_fit(change, message):
    call = {"do": normal(4, 3), "q": normal(4, 3), "k": normal(6, 3), "v": normal(6, 3), **change}
    with pytest.raises(ValueError, match=message):
        reference.attention_backward(**call)


BIAS_SHAPES = [
    (),
    (5,),
    (6, 1),
    (1, 5),
    (4, 1, 5),
    (4, 6, 1),
    (4, 1, 1),
    (2, 1, 6, 5),
    (1, 4, 6, 5),
    (2, 1, 1, 5),
    (2, 4, 6, 5),
]


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (2, 0)}], ids=str)
@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
def test_gradients_of_what_is_added_are_finite_differences(shape, mask):
    """Each number of a bias in each broadcast, slopes and sinks is varied, also in rows that see no key."""
    do, q = normal(2, 4, 6, 3, seed=4), normal(2, 4, 6, 3, seed=1)
    k, v = normal(2, 2, 5, 3, seed=2), normal(2, 2, 5, 3, seed=3)
    moved = {"bias": normal(*shape, seed=5), "alibi_slopes": normal(2, 4, seed=6), "sinks": normal(4, seed=7)}
    got = reference.attention_backward(do, q, k, v, **moved, **mask, wrt=tuple(moved))[3:]

    def loss(**changed):
        wide = (np.repeat(a, 2, axis=1) for a in (k, v))
        return float((do * attention(q, *wide, **{**moved, **changed}, **mask)).sum())

    for (name, a), of_name in zip(moved.items(), got, strict=True):
        assert of_name.shape == a.shape
        for at in np.ndindex(a.shape):
            ends = []
            for sign in (1, -1):
                changed = np.array(a)
                changed[at] += sign * 1e-5
                ends.append(loss(**{name: changed}))
            assert of_name[at] == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-8), (name, at)


def test_a_bias_that_is_the_same_for_all_keys_has_no_gradient_without_a_sink():
    do, q, k, v = (normal(3, 6, 4, seed=seed) for seed in range(4))
    bias, sinks = normal(3, 6, 1, seed=5), np.zeros(3)
    without = reference.attention_backward(do, q, k, v, bias=bias, wrt=["bias"])[3]
    np.testing.assert_allclose(without, 0, atol=1e-14)
    assert np.abs(reference.attention_backward(do, q, k, v, bias=bias, sinks=sinks, wrt=["bias"])[3]).min() > 1e-4


@pytest.mark.parametrize("n, n_kv, width", [(6, 5, 21), (6, 9, 5), (9, 6, 3), (4, 4, 1)])
def test_gradient_of_a_table_of_distances_is_a_sum_along_diagonals(n, n_kv, width):
    do, q, k, v = (normal(3, rows, 4, seed=seed) for seed, rows in enumerate((n, n, n_kv, n_kv)))
    table = normal(3, width, seed=5)
    bias = reference.distance_bias(table, n, n_kv)
    for i, j in np.ndindex(n, n_kv):
        column = width // 2 + min(max(j - (i + n_kv - n), -(width // 2)), width // 2)
        np.testing.assert_array_equal(bias[:, i, j], table[:, column])
    dbias = reference.attention_backward(do, q, k, v, bias=bias, wrt=["bias"])[3]
    got = reference.distance_bias_gradient(dbias, width)
    for at in np.ndindex(table.shape):
        ends = []
        for sign in (1, -1):
            moved = table.copy()
            moved[at] += sign * 1e-5
            ends.append(float((do * attention(q, k, v, bias=reference.distance_bias(moved, n, n_kv))).sum()))
        assert got[at] == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-8)


@pytest.mark.parametrize(
    "more, message",
    [
        ({"wrt": ["bias"]}, "wrt has 'bias'"),
        ({"wrt": ["scale"]}, "wrt has 'scale'"),
        ({"wrt": ["bias"], "bias": np.ones((4, 6), bool)}, "of bool: a mask has no gradient"),
    ],
)
def test_gradients_that_there_are_not(more, message):
    with pytest.raises(ValueError, match=message):
        reference.attention_backward(normal(4, 3), normal(4, 3), normal(6, 3), normal(6, 3), **more)
