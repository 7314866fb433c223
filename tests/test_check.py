"""check(): what passes, what fails and what it says; the inputs; the tolerance for large logits."""

import math
import subprocess
import sys
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from helpers.attention import reference
from helpers.attention.check import (
    REAL_INPUTS,
    CheckFailed,
    check,
    make_inputs,
    real_inputs,
    real_provenance,
    real_tokens,
    tolerance_for,
)
from helpers.attention.reference import attention

F32 = np.float32


# ---------------------------------------------------------------------------------------------------- check()


def test_the_pass_line_exactly(capsys):
    expected = np.zeros((4, 2))
    out = expected.copy()
    out[2, 1] = 3.6e-7
    result = check("online_softmax", out, expected)
    line = "[PASS] online_softmax: output matches reference (max error: 3.6e-07 <= 1.0e-05)"
    assert capsys.readouterr().out == line + "\n" and result.message == line
    assert result.passed and result and result.max_error == 3.6e-7 and result.tolerance == 1e-5
    assert result.worst == (2, 1) and result.worst_row == 2
    assert result.wrong == result.nan == result.rows_wrong == 0 and result.total == 8


def test_the_fail_line_exactly(capsys):
    expected = np.full((64, 8), 0.5)
    out = expected.copy()
    out[7:10, 3] += [0.25, -0.125, 0.0625]
    out[20, 0] = -1.5
    with pytest.raises(CheckFailed) as caught:
        check("tiled", out, expected)
    line = (
        "[FAIL] tiled: max error 2.0e+00 > 1.0e-05 at row 20, column 0 (got -1.5, expected 0.5); "
        "4 of 512 elements wrong, in 4 of 64 rows (7-9, 20); 0 NaN"
    )
    assert capsys.readouterr().out == line + "\n" and str(caught.value) == line
    assert isinstance(caught.value, AssertionError)
    result = caught.value.result
    assert not result and result.max_error == 2.0 and result.worst == (20, 0) and result.worst_row == 20
    assert (result.wrong, result.rows_wrong, result.nan, result.total) == (4, 4, 0, 512)


def test_the_limit_itself_passes_and_the_next_number_fails(capsys):
    assert check("x", np.array([1e-5]), np.zeros(1)).passed
    result = check("x", np.array([np.nextafter(1e-5, 1)]), np.zeros(1), must_pass=False)
    assert not result.passed
    assert "max error 1.000000e-05 > 1.000000e-05" in capsys.readouterr().out
    check("x", np.array([1.04e-5]), np.zeros(1), must_pass=False)
    assert "max error 1.040000e-05 > 1.000000e-05 at row 0" in capsys.readouterr().out


def test_tolerance_is_absolute():
    """An error of 1e-3 next to 1000 is the same as next to 0."""
    for size in (0.0, 1e3):
        assert not check("x", np.array([size + 1e-3]), np.array([size]), must_pass=False)
        assert check("x", np.array([size + 1e-3]), np.array([size]), tolerance=2e-3)
    assert check("exact", np.arange(5), np.arange(5), tolerance=0)
    assert not check("sign", np.array([-1.0]), np.array([1.0]), tolerance=1.5, must_pass=False)


@pytest.mark.parametrize("everywhere", [False, True])
def test_nan_never_passes(capsys, everywhere):
    expected = np.ones((5, 3))
    out = expected.copy()
    out[0, 0] = np.inf  # not even an infinite error hides a NaN
    out[3:, 1] = np.nan
    if everywhere:
        out[:] = np.nan
    result = check("poisoned", out, expected, tolerance=1e30, must_pass=False)
    assert not result.passed and result.max_error == math.inf
    assert (result.nan, result.wrong) == ((15, 15) if everywhere else (2, 3))
    assert result.worst == ((0, 0) if everywhere else (3, 1)) and result.worst_row == result.worst[0]
    text = capsys.readouterr().out
    assert text.startswith(f"[FAIL] poisoned: NaN at row {result.worst_row}, column ") and f"; {result.nan} NaN" in text


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_inf_passes_only_where_it_is_expected(value):
    expected = np.array([[1.0, 2.0], [3.0, 4.0]])
    out = expected.copy()
    out[1, 0] = value
    result = check("x", out, expected, tolerance=1e300, must_pass=False)
    assert not result.passed and result.max_error == math.inf and result.worst == (1, 0) and result.nan == 0
    with np.errstate(all="raise"):
        assert check("x", out, out)  # a log-sum-exp without keys is -inf in both
        assert not check("x", out, -out, must_pass=False)
        assert not check("x", expected, out, must_pass=False)


@pytest.mark.parametrize("shape", [(4,), (1, 4), (4, 1), (2, 2), (4, 4), (1,), ()])
def test_a_wrong_shape_never_passes(capsys, shape):
    """Not even a shape that NumPy would broadcast."""
    expected = np.ones((4, 5))[:, :4] if shape == (4,) else np.ones(4 if shape != (4, 4) else (2, 8))
    result = check("x", np.ones(shape), expected, must_pass=False)
    assert not result.passed and result.max_error == math.inf and result.worst is result.worst_row is None
    assert result.wrong == result.total == expected.size
    assert capsys.readouterr().out == f"[FAIL] x: shape {shape}, expected {expected.shape}\n"
    with pytest.raises(CheckFailed, match="shape"):
        check("x", np.ones(shape), expected)


def test_must_pass_false_prints_and_goes_on(capsys):
    result = check("broken", np.ones((2, 2)), np.zeros((2, 2)), must_pass=False)
    assert not result.passed and capsys.readouterr().out.startswith("[FAIL] broken: max error 1.0e+00 > 1.0e-05")
    assert check("whole", np.ones(2), np.ones(2), must_pass=False).passed


@pytest.mark.parametrize("row", [0, 31, 64])
def test_one_wrong_row_is_found(row):
    """Row `row` has its neighbour's result, as after an off-by-one error in the row index."""
    q, k, v = make_inputs(65, 33, 8)
    expected = attention(q, k, v)
    out = expected.astype(F32)
    out[row] = expected[row - 1]
    result = check("wrong row", out, expected, must_pass=False)
    assert not result.passed and result.worst_row == row and result.rows_wrong == 1
    assert f"in 1 of 65 rows ({row}); 0 NaN" in result.message


@pytest.mark.parametrize(
    "shape, index, words",
    [
        ((), (), "max error 1.0e+00 > 1.0e-05 (got 1, expected 0); 1 of 1 elements wrong; 0 NaN"),
        ((7,), (5,), "at row 5 (got 1, expected 0); 1 of 7 elements wrong, in 1 of 7 rows (5); 0 NaN"),
        (
            (2, 3, 7, 4),
            (1, 2, 5, 3),
            "at [1, 2] row 5, column 3 (got 1, expected 0); 1 of 168 elements wrong, in 1 of 7 ",
        ),
    ],
)
def test_any_number_of_axes(shape, index, words):
    out = np.zeros(shape)
    out[index] = 1
    result = check("x", out, np.zeros(shape), must_pass=False)
    assert words in result.message and result.worst == index
    assert result.worst_row == (5 if shape else None)
    assert check("x", np.zeros(shape), np.zeros(shape))


def test_many_wrong_rows_are_shortened():
    out = np.zeros((40, 2))
    out[::4, 1] = 1
    assert "in 10 of 40 rows (0, 4, 8, 12, ...)" in check("x", out, np.zeros((40, 2)), must_pass=False).message


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int32])
def test_types_are_compared_in_float64(dtype):
    out = np.array([[1, 2], [3, 4]]).astype(dtype)
    before = out.copy()
    assert check("x", out, [[1.0, 2.0], [3.0, 4.0]], tolerance=0)
    assert not check("x", out, [[1.0, 2.0], [3.0, 4.5]], tolerance=0.4, must_pass=False)
    np.testing.assert_array_equal(out, before)
    # float32 would round this expected value to 1 and hide the error.
    assert check("x", np.ones(1, F32), np.array([1 + 1e-9]), must_pass=False, tolerance=0).max_error > 0.9e-9


def test_a_device_array_is_copied_by_cp_asnumpy(monkeypatch):
    class OnDevice:
        def __init__(self, a):
            self.a = a

        def get(self):
            raise AssertionError("asnumpy is the one way back")

    def asnumpy(x):
        assert isinstance(x, OnDevice)
        return x.a

    fake = types.ModuleType("helpers.device")
    fake.cp = types.SimpleNamespace(asnumpy=asnumpy)
    monkeypatch.setitem(sys.modules, "helpers.device", fake)
    q, k, v = make_inputs(3, 4, 2)
    expected = attention(q, k, v)
    assert check("x", OnDevice(expected.astype(F32)), expected)
    assert check("x", expected, OnDevice(expected))
    assert not check("x", OnDevice(expected + 1), expected, must_pass=False)
    assert tolerance_for(OnDevice(q), OnDevice(k)) == pytest.approx(tolerance_for(q, k), rel=1e-12)


def test_numpy_arrays_start_no_device():
    """In a fresh interpreter, neither the import nor a check of NumPy arrays touches the device or CuPy."""
    code = (
        "import sys, numpy as np, helpers.attention.check as c; c.check('x', np.ones(2), np.ones(2)); c.real_inputs(); "
        "print([m for m in sys.modules if m == 'helpers.device' or m.split('.')[0] == 'cupy'])"
    )
    root = Path(reference.__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("tolerance", [math.nan, math.inf, -1e-9, None, "1e-5", True, 1j])
def test_a_tolerance_that_could_pass_anything_is_refused(tolerance):
    with pytest.raises(ValueError, match=r"tolerance is .*: expected a finite number, 0 or more"):
        check("x", np.ones(2), np.ones(2), tolerance=tolerance)


def test_a_reference_that_means_nothing_is_refused():
    with pytest.raises(ValueError, match="expected holds 1 NaN"):
        check("x", np.array([1.0, np.nan]), np.array([1.0, np.nan]), must_pass=False)
    with pytest.raises(ValueError, match=r"shape \(0, 4\): there is nothing to compare"):
        check("x", np.empty((0, 4)), np.empty((0, 4)), must_pass=False)


@pytest.mark.parametrize("bad", [None, "text", object(), np.ones(2) * 1j, [[1.0], [1.0, 2.0]], np.zeros(2, "f4,f4")])
def test_what_is_no_array_is_a_type_error(bad):
    with pytest.raises(TypeError, match=r"^out "):
        check("x", bad, np.ones(2), must_pass=False)
    with pytest.raises(TypeError, match=r"^expected "):
        check("x", np.ones(2), bad, must_pass=False)


# ----------------------------------------------------------------------------------------------------- inputs


def test_make_inputs():
    q, k, v = make_inputs(300, 400, 64)
    assert q.shape == (300, 64) and k.shape == v.shape == (400, 64)
    for a in (q, k, v):
        assert a.dtype == F32 and a.flags.c_contiguous
        assert abs(a.mean() - 0.25) < 0.03 and abs(a.std() - 1) < 0.03
    for a, b in zip(make_inputs(300, 400, 64), (q, k, v), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.abs(np.corrcoef([q.ravel()[:19200], k.ravel()[:19200], v.ravel()[:19200]]) - np.eye(3)).max() < 0.05
    assert not np.array_equal(make_inputs(300, 400, 64, seed=1)[0], q)
    assert abs(make_inputs(300, 400, 64, mean=-2.0)[2].mean() + 2) < 0.03
    # Zeros, a forgotten key, or the mean of V must exceed the tolerance.
    o = attention(q, k, v)
    for wrong in (np.zeros_like(o), attention(q, k[:-1], v[:-1]), np.broadcast_to(v.mean(0), o.shape)):
        assert not check("wrong", wrong, o, must_pass=False)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, -1, 1), (1, 1, 0), (1.0, 1, 1), (1, True, 1)])
def test_make_inputs_refuses_sizes(sizes):
    with pytest.raises(ValueError, match="expected an int of at least 1"):
        make_inputs(*sizes)


def test_real_inputs_are_what_the_file_says():
    tokens, facts = real_tokens(), real_provenance()
    assert len(tokens) == 272 and tokens[0] == "[CLS]" and tokens[-1] == "[SEP]" and "[UNK]" not in tokens
    text = REAL_INPUTS.with_name("darwin_1859.txt").read_text(encoding="utf-8")
    whole = "".join(t.removeprefix("##") for t in tokens[1:-1])
    assert whole == "".join(text.lower().split())
    assert REAL_INPUTS.stat().st_size < 1_500_000
    assert set(facts) == {"model", "model_sha256", "licence", "layer", "text_source", "made_by"}
    assert "all-MiniLM-L6-v2" in facts["model"] and "Apache-2.0" in facts["licence"] and "1859" in facts["text_source"]
    assert Path(REAL_INPUTS.parents[2], facts["made_by"]).is_file()
    seen = set()
    for head in range(12):
        for a in real_inputs(head):
            assert a.shape == (272, 32) and a.dtype == F32 and a.flags.c_contiguous and a.flags.writeable
            assert np.isfinite(a).all() and 0.1 < a.std() < 10
            seen.add(a.tobytes())
    assert len(seen) == 36
    np.testing.assert_array_equal(real_inputs()[0], real_inputs(0)[0])


def test_real_heads_do_what_their_notes_say():
    """The weights attend to what the model's notes say: a mix-up of heads, axes, or q and k would fail."""
    n, eye = 272, np.eye(272)
    p = {h: attention(*real_inputs(h)[:2], eye) for h in (1, 5, 8, 9, 10)}
    at = {h: w.argmax(1) - np.arange(n) for h, w in p.items()}
    assert (at[8] == 1).mean() > 0.85 and p[8].max(1).mean() > 0.6
    assert (at[9] == -1).mean() > 0.55 and p[9].max(1).mean() > 0.5
    assert (p[10].argmax(1) == 0).mean() > 0.9
    entropy = {h: -(w * np.log(w)).sum(1).mean() for h, w in p.items()}
    assert entropy[8] < 1.5 < 4 < entropy[5]
    words = np.array(real_tokens())
    elsewhere = (words[p[1].argmax(1)] == words) & (at[1] != 0)
    assert elsewhere.mean() > 0.25


@pytest.mark.parametrize("head", [-1, 12, 1.0, None, True])
def test_real_inputs_refuse_a_head(head):
    with pytest.raises(ValueError, match=r"head is .*: expected an int from 0 to 11"):
        real_inputs(head)


def test_real_inputs_without_the_file(monkeypatch, tmp_path):
    monkeypatch.setattr("helpers.attention.check.REAL_INPUTS", tmp_path / "minilm_qkv.npz")
    with pytest.raises(FileNotFoundError, match=r"minilm_qkv\.npz is missing.*make_minilm_qkv\.py"):
        real_inputs()


# --------------------------------------------------------------------------- the tolerance for large logits
# Float32 attention in NumPy, in the orders of summing that kernels use.


def sequential(q, k, scale):
    """One product and one sum at a time, the scale at the end: a thread that owns a row, nothing fused."""
    s = np.zeros((len(q), len(k)), F32)
    for t in range(q.shape[1]):
        s += q[:, t, None] * k[None, :, t]
    return s * F32(scale)


def fused(q, k, scale):
    """Fused multiply-adds from the last column to the first, with q scaled beforehand."""
    q = q * F32(scale)
    s = np.zeros((len(q), len(k)), F32)
    for t in reversed(range(q.shape[1])):
        s = (s + q[:, t, None].astype(np.float64) * k[None, :, t]).astype(F32)
    return s


def pairwise(q, k, scale):
    """Halves, then quarters, like a reduction over lanes."""
    s = [q[:, t, None] * k[None, :, t] for t in range(q.shape[1])]
    while len(s) > 1:
        s = [a + b for a, b in zip(s[::2], s[1::2], strict=False)] + s[len(s) // 2 * 2 :]
    return s[0] * F32(scale)


def library(q, k, scale):
    return (q @ k.T) * F32(scale)


def one_pass(s, v, exp=np.exp):
    p = exp(s - s.max(1, keepdims=True))
    return (p @ v) / p.sum(1, keepdims=True)


def base_two(s, v):
    """exp2 with log2(e) multiplied into the logits, as in FlashAttention-2."""
    return one_pass(s * F32(math.log2(math.e)), v, np.exp2)


def online(s, v, block_n=32, bug=""):
    """Online softmax, key by key within a tile; `bug` plants one."""
    n, n_kv = s.shape
    m, total, acc = np.full(n, -np.inf, F32), np.zeros(n, F32), np.zeros((n, v.shape[1]), F32)
    for start in range(0, n_kv, block_n):
        stop = min(start + block_n, n_kv)
        if bug == "tail" and stop == n_kv:
            stop -= 1
        tile = s[:, start:stop]
        new = np.maximum(m, tile.max(1, initial=-np.inf))
        rescale = np.exp(m - new)
        p = np.exp(tile - new[:, None])
        total = (total if bug == "l_i" else total * rescale) + p.sum(1, dtype=F32)
        acc = acc if bug == "acc" else acc * rescale[:, None]
        for j in range(stop - start):
            acc = acc + p[:, j, None] * v[start + j]
        m = new
    return acc / total[:, None]


def case(d, n_kv, size, seed=0, rows="random", n=32):
    """q, k, v with the largest scaled logit `size` (None: unit-normal)."""
    q, k, v = make_inputs(n, n_kv, d, seed=seed)
    if rows == "constant":  # all elements of a row are equal: the roundings of a sum all go one way
        q, k = np.repeat(q[:, :1], d, axis=1), np.repeat(k[:, :1], d, axis=1)
    if size:
        q = q * F32(size * math.sqrt(d) / np.abs(q.astype(np.float64) @ k.T).max())
    return q, k, v


@pytest.mark.parametrize("rows", ["random", "constant"])
@pytest.mark.parametrize("d", [1, 8, 64, 128])
def test_float32_attention_stays_within_the_tolerance_but_not_far_within(d, rows):
    scale = 1 / math.sqrt(d)
    shares = []
    for n_kv in (2, 65, 1000):
        for size in (None, 1e3, 1e4):
            q, k, v = case(d, n_kv, size, seed=d + n_kv, rows=rows)
            expected, tolerance = attention(q, k, v), tolerance_for(q, k)
            assert 1e-5 <= tolerance < 0.1
            for form in (sequential, fused, pairwise, library):
                s = form(q, k, scale)
                assert s.dtype == F32
                for finish in (one_pass, base_two, online):
                    out = finish(s, v)
                    assert out.dtype == F32
                    share = np.abs(out - expected).max() / tolerance
                    assert share <= 1, (n_kv, size, form.__name__, finish.__name__)
                    if tolerance > 2e-5 and form is sequential:
                        shares.append(share)
    # If large logits set the tolerance, the error is usually at least a hundredth of it.
    assert len(shares) >= 6 and np.median(shares) > 0.01 and min(shares) > 0.001, sorted(shares)


@pytest.mark.parametrize("d", [1, 8, 64, 128])
@pytest.mark.parametrize("size", [None, 30, 1e3, 1e4])
def test_planted_bugs_stay_outside_the_tolerance(d, size):
    scale = 1 / math.sqrt(d)
    q, k, v = case(d, 97, size, seed=3, n=200)
    k[-1] *= 3  # among large logits a forgotten last key shows only if it had weight
    expected, tolerance = attention(q, k, v), tolerance_for(q, k)
    s = sequential(q, k, scale)
    assert check("good", online(s, v), expected, tolerance=tolerance)
    assert check("good", online(s, v, block_n=64), expected, tolerance=tolerance)
    assert not check("row", np.roll(online(s, v), 1, axis=0), expected, tolerance=tolerance, must_pass=False)
    assert not check("acc", online(s, v, bug="acc"), expected, tolerance=tolerance, must_pass=False)
    assert not check("l_i", online(s, v, bug="l_i"), expected, tolerance=tolerance, must_pass=False)
    assert not check("tail", online(s, v, bug="tail"), expected, tolerance=tolerance, must_pass=False)
    # At d = 1 the scale is 1; at logits of 1e3 one key has all the weight, scaled or not.
    if d > 1 and size in (None, 30):
        assert not check("no scale", online(sequential(q, k, 1), v), expected, tolerance=tolerance, must_pass=False)


def test_unit_normal_inputs_need_no_more_than_1e_5():
    """The course's tolerance for them is 1e-5, and tolerance_for is not far above it."""
    for d in (1, 8, 32, 64, 128):
        q, k, v = make_inputs(100, 333, d, seed=d)
        for finish in (one_pass, base_two, online):
            assert check("float32", finish(sequential(q, k, 1 / math.sqrt(d)), v), attention(q, k, v)).max_error < 3e-6
        assert 1e-5 <= tolerance_for(q, k) < 2.5e-5


@pytest.mark.parametrize("head", range(12))
def test_real_inputs_need_no_more_than_1e_5(head):
    q, k, v = real_inputs(head)
    expected = attention(q, k, v)
    for finish in (one_pass, base_two, online):
        assert check("float32", finish(sequential(q, k, 1 / math.sqrt(32)), v), expected).max_error < 5e-6


def test_tolerance_follows_the_derivation():
    """A case computed by hand: two keys that tie. d = 1, S = s = q k, T = S^2, p = 1/2."""
    q, k = np.array([[100.0]]), np.array([[50.0], [50.0]])
    s, u = 5000.0, 2.0**-24
    sigma = u / math.sqrt(3) * math.sqrt(s**2 / 3 + (1 + 1 / 6) * s**2 + 3 * s**2)
    bias = u * s / 3
    assert tolerance_for(q, k) == pytest.approx(8 * 2 * 0.25 * (3 * sigma + bias), rel=1e-12)
    # Grows with the scale, whatever its sign; falls to 1e-5 if one key has all the weight.
    assert tolerance_for(q, k, 3.0) == pytest.approx(3 * tolerance_for(q, k), rel=1e-12)
    assert tolerance_for(q, k, -1.0) == tolerance_for(q, k)
    assert tolerance_for(q, np.array([[50.0], [49.0]])) == 1e-5
    assert tolerance_for(np.zeros((3, 4)), np.zeros((5, 4))) == 1e-5


def test_tolerance_over_heads_and_chunks(monkeypatch):
    q = np.stack([case(8, 40, size, seed=i)[0] for i, size in enumerate((1e2, 1e3, 1e4))])
    k = np.stack([case(8, 40, size, seed=i)[1] for i, size in enumerate((1e2, 1e3, 1e4))])
    each = [tolerance_for(q[i], k[i]) for i in range(3)]
    assert tolerance_for(q, k) == pytest.approx(max(each), rel=1e-12) and max(each) > 2 * min(each)
    one_q = max(tolerance_for(q[0], k[i]) for i in range(3))
    assert tolerance_for(q[0], k) == pytest.approx(one_q, rel=1e-12)
    monkeypatch.setattr(reference, "CHUNK_BYTES", 8 * 40 * 7)
    assert tolerance_for(q, k) == pytest.approx(max(each), rel=1e-12)


def test_tolerance_refuses_what_it_cannot_judge():
    ones = np.ones((4, 3))
    with pytest.raises(ValueError, match="float32 cannot hold their softmax"):
        tolerance_for([[1e4]], [[1e3], [1e3]])
    with pytest.raises(ValueError, match="differ in d"):
        tolerance_for(ones, np.ones((4, 2)))
    with pytest.raises(ValueError, match=r"q has shape \(3,\)"):
        tolerance_for(np.ones(3), ones)
    with pytest.raises(ValueError, match="no NaN and no inf"):
        tolerance_for(np.full((4, 3), np.nan), ones)
    with pytest.raises(ValueError, match="k holds 12 NaN or inf"):
        tolerance_for(ones, np.full((4, 3), np.inf))
    with pytest.raises(TypeError, match=r"^k (has|is) "):
        tolerance_for(ones, "text")
