"""ElementwiseKernel and ReductionKernel by CuPy's rules: types, axes, shapes, what an operation sees."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from backends import on_each_device

from helpers import engine
from helpers.engine import elementwise, libraries

AxisError = (np.exceptions if hasattr(np, "exceptions") else np).AxisError


def arange(cp: Any, *shape: int, dtype: Any = np.float32) -> Any:
    return cp.asarray(np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape))


# ------------------------------------------------------------------------------------------------- types

NAMES = ["single", "double", "half", "float", "int", "long", "uint", "byte", "short", "bool", "f4", "float32", "intp"]


@on_each_device
@pytest.mark.parametrize("name", NAMES)
def test_names_of_more_than_a_letter_are_numpys(name: str, cp: Any) -> None:
    kernel = cp.ElementwiseKernel(f"{name} x", f"{name} z", "z = x", "named")
    result = kernel(cp.asarray(np.arange(4).astype(name)))
    assert result.dtype == np.dtype(name)
    np.testing.assert_array_equal(cp.asnumpy(result), np.arange(4).astype(name))
    with pytest.raises(TypeError, match=r"Type is mismatched.*x"):
        kernel(cp.zeros(4, np.complex128))


@on_each_device
def test_a_name_is_the_dtype_of_what_is_made(cp: Any) -> None:
    result = cp.ElementwiseKernel("float64 x", "double z, uint u", "z = x; u = 2", "both")(cp.ones(3))
    assert [a.dtype for a in result] == [np.float64, np.dtype("uint")]


@on_each_device
@pytest.mark.parametrize("number", [np.float64(2), 2, 2.0, np.int8(2), True], ids=repr)
def test_numbers_do_not_decide_types(number: Any, cp: Any) -> None:
    x = arange(cp, 5)
    scaled = cp.ElementwiseKernel("T a, T x", "T y", "y = a * x", "scaled")(number, x)
    assert scaled.dtype == np.float32
    np.testing.assert_array_equal(cp.asnumpy(scaled), np.float32(number) * np.arange(5, dtype=np.float32))
    total = cp.ReductionKernel("T a, T x", "T y", "a * x", "a + b", "y = a", "0", "scaled_total")
    # Within the sum, `a` is the sum itself: CuPy's macro has its name.
    assert total(number, x).dtype == np.float32


@on_each_device
def test_a_letter_that_numbers_alone_decide(cp: Any) -> None:
    for kernel, numbers in (
        (cp.ElementwiseKernel("T x, U b", "T z", "z = x + b", "mixed"), (2.0,)),
        (cp.ElementwiseKernel("T x", "U z", "z = x", "unknown"), ()),
        (cp.ReductionKernel("T x, U b", "T z", "x + b", "a + b", "z = a", "0", "mixed_sum"), (2.0,)),
    ):
        with pytest.raises(KeyError, match="U"):
            kernel(arange(cp, 3), *numbers)


@on_each_device
def test_outputs_decide_before_inputs(cp: Any) -> None:
    half = cp.ElementwiseKernel("float32 x", "T z", "z = x / 2", "halved")
    assert half(arange(cp, 4), cp.zeros(4, np.float16)).dtype == np.float16
    same = cp.ElementwiseKernel("T x", "T z", "z = x", "same")
    with pytest.raises(TypeError, match=r"Type is mismatched.*x"):
        same(arange(cp, 4), cp.zeros(4, np.float64))


@on_each_device
@pytest.mark.parametrize("params", ["foo x", "char x", "T i", "x", "rawT T x", "U  T x"])
def test_parameters_that_are_none(params: str, cp: Any) -> None:
    with pytest.raises((TypeError, ValueError, Exception)) as raised:
        cp.ElementwiseKernel(params, "T y", "y = 0")
    assert cp is not engine or isinstance(raised.value, (TypeError, ValueError))


@pytest.mark.skipif(libraries.folder() is None, reason="CuPy is not installed")
def test_types_are_decided_as_cupy_decides_them() -> None:
    """CuPy's own function, which needs no GPU, against ours, for random parameters and arguments."""
    from cupy._core import _kernel

    draw = random.Random(4)
    kinds = ["T", "U", "float32", "double", "int", "uint8", "half", "long"]
    dtypes = [np.float32, np.float64, np.int64, np.uint8, np.float16]
    outcomes = set()
    for _ in range(3000):
        ins = [f"{draw.choice(kinds)} x{n}" for n in range(draw.randint(1, 3))]
        outs = [f"{draw.choice(kinds)} y{n}" for n in range(draw.randint(1, 2))]
        given = [None if draw.random() < 0.3 else np.dtype(draw.choice(dtypes)) for _ in ins]
        made = [np.dtype(draw.choice(dtypes)) for _ in outs] if draw.random() < 0.4 else []
        theirs: Any
        try:
            params = [_kernel._get_param_info(", ".join(part), True) for part in (ins, outs)]
            types = _kernel._decide_params_type(*params, tuple(given), tuple(made))
            theirs = [[np.dtype(one) for one in part] for part in types[:2]]
        except (TypeError, KeyError) as error:
            theirs = type(error)
        ours: Any
        args = [2 if dtype is None else engine.zeros(1, dtype) for dtype in (*given, *made)]
        try:
            inputs = elementwise._parameters(", ".join(ins), const=True)
            outputs = elementwise._parameters(", ".join(outs), const=False)
            letters = elementwise._types(inputs, outputs, args)
            ours = [[p.dtype or letters[p.type] for p in part] for part in (inputs, outputs)]
        except (TypeError, KeyError) as error:
            ours = type(error)
        assert ours == theirs, (ins, outs, given, made)
        outcomes.add(ours if isinstance(ours, type) else "types")
    assert outcomes == {TypeError, KeyError, "types"}


@on_each_device
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["half", "bfloat16"])
def test_half_numbers_are_floats_in_what_is_computed(dtype: Any, cp: Any) -> None:
    """An operation mixes half types with any numbers, like CuPy's classes."""
    x = np.linspace(-2, 2, 9).astype(dtype)
    mixed = cp.ElementwiseKernel(
        "T x, float32 by", "T y", "y = x > 0 ? x * 2.0 + 1 : sqrt(-x) * by; y = y + 1; y = min(y, T(3))", "mixed"
    )
    wide = x.astype(np.float64)
    expected = np.where(wide > 0, wide * 2 + 1, np.sqrt(np.maximum(-wide, 0)) * 0.5).astype(dtype)
    expected = np.minimum((expected.astype(np.float32) + 1).astype(dtype), dtype(3))
    np.testing.assert_array_equal(cp.asnumpy(mixed(cp.asarray(x), 0.5)).astype(np.float32), expected.astype(np.float32))


# ------------------------------------------------------------------------------------------------- what is seen


@on_each_device
def test_numbers_are_seen_around_the_loop(cp: Any) -> None:
    scaled = cp.ElementwiseKernel(
        *("T x, T alpha, raw T table", "T y", "y = x * twice + last", "around"),
        loop_prep="const T twice = 2 * alpha; const T last = table[2];",
        after_loop="if (alpha < 0) __trap();",
    )
    result = scaled(arange(cp, 4), 2, cp.zeros(3, np.float32))
    np.testing.assert_array_equal(cp.asnumpy(result), [0, 4, 8, 12])
    window = cp.ElementwiseKernel("", "T w", "w = exp(-i / std)", "of_std")
    with pytest.raises(engine.CompileError if cp is engine else Exception):
        window(cp.zeros(3, np.float32))
    named = cp.ElementwiseKernel("float32 std", "T w", "w = i / s2", "of_std", loop_prep="const float s2 = std * std")
    np.testing.assert_array_equal(cp.asnumpy(named(2, cp.zeros(3, np.float32))), np.arange(3, dtype=np.float32) / 4)


def test_messages_name_the_callers_lines() -> None:
    for part in ("loop_prep", "after_loop", "preamble"):
        kernel = engine.ElementwiseKernel(
            "T x", "T y", "y = x", "mine", **{part: "const int two = 2;\nconst int z = zwei;"}
        )
        with pytest.raises(engine.CompileError, match=rf"mine\.{part}:2: error: .*zwei"):
            kernel(arange(engine, 3))
    with pytest.raises(engine.CompileError, match=r"mine:2: error: .*zwei"):
        engine.ElementwiseKernel("T x", "T y", "y = x;\nint z = zwei", "mine")(arange(engine, 3))


@on_each_device
def test_as_many_threads_as_elements(cp: Any) -> None:
    """Each of them runs `after_loop`."""
    count = cp.zeros(1, np.int32)
    counting = cp.ElementwiseKernel("T x, raw int32 n", "T y", "y = x", "n", after_loop="atomicAdd((int*)&n[0], 1)")
    counting(arange(cp, 5), count)
    assert int(count[0]) == 5


@on_each_device
def test_inputs_that_are_written(cp: Any) -> None:
    swap = cp.ElementwiseKernel("_non_const T x", "T y", "const T t = x; x = y; y = t", "swap")
    x, y = arange(cp, 2, 3).T, cp.zeros((2, 3), np.float32).T
    swap(x, y)
    assert not cp.asnumpy(x).any() and cp.asnumpy(y).tolist() == [[0, 3], [1, 4], [2, 5]]
    with pytest.raises(engine.CompileError if cp is engine else Exception):
        cp.ElementwiseKernel("raw T x", "T y", "y = 1; x[i] = 2", "const_raw")(x, y)


# ------------------------------------------------------------------------------------------------- axes


@on_each_device
@pytest.mark.parametrize("axes", [0, 1, 8, 9, 12, 30])
def test_many_axes(axes: int, cp: Any) -> None:
    shape = tuple(3 if axis in (0, axes - 2) else 1 for axis in range(axes))
    x = arange(cp, *shape)
    last = cp.ElementwiseKernel(
        *("T x", "T y", f"y = x + {'100 * _ind.get()[0]' if axes else 0}", "of_axes"), reduce_dims=False
    )
    at_first = np.indices(shape)[0] if axes else 0
    np.testing.assert_array_equal(cp.asnumpy(last(x)), cp.asnumpy(x) + 100 * at_first)
    total = cp.ReductionKernel("T x", "T y", "x", "a + b", "y = a", "0", "total")
    assert float(total(x)) == float(cp.asnumpy(x).sum())


@on_each_device
def test_axes_that_cupy_joins(cp: Any) -> None:
    """The index has as many axes as remain: arrays without gaps have one."""
    index = cp.ElementwiseKernel("T x", "int32 y", "y = 100 * _ind.ndim + _ind.get()[0]", "index")
    kept = cp.ElementwiseKernel("T x", "int32 y", "y = 100 * _ind.ndim + _ind.get()[0]", "kept", reduce_dims=False)
    x = arange(cp, 2, 3, 4)
    first = np.indices((2, 3, 4))[0]
    np.testing.assert_array_equal(cp.asnumpy(index(x)), 100 + np.arange(24).reshape(2, 3, 4))
    np.testing.assert_array_equal(cp.asnumpy(kept(x)), 300 + first)
    every_other, half = arange(cp, 2, 3, 8)[:, :, ::2], arange(cp, 2, 3, 8)[:, :, :4]
    np.testing.assert_array_equal(cp.asnumpy(index(every_other)), 100 + np.arange(24).reshape(2, 3, 4))
    np.testing.assert_array_equal(cp.asnumpy(index(half)), np.tile(200 + np.arange(6).reshape(2, 3, 1), 4))
    np.testing.assert_array_equal(cp.asnumpy(index(x[:1, :, :3])), np.tile(200 + np.arange(3)[None, :, None], 3))


@on_each_device
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize(
    "axis", [0, 1, 2, -1, -3, (0, 2), (2, 0), [1], (), None, np.int64(1), (np.int8(-1), 0)], ids=str
)
def test_axes_of_a_reduction(axis: Any, keepdims: bool, cp: Any) -> None:
    total = cp.ReductionKernel("T x", "T y", "2 * x", "a + b", "y = a + 1", "0", "total")
    x = arange(cp, 2, 3, 4)
    named = tuple(axis) if isinstance(axis, list) else axis
    expected = 2 * cp.asnumpy(x).sum(named, keepdims=keepdims) + 1
    for given in (x, x.copy(order="F")):
        result = total(given, axis=axis, keepdims=keepdims)
        assert result.shape == expected.shape
        np.testing.assert_array_equal(cp.asnumpy(result), expected)
        out = cp.zeros(expected.shape, np.float32)
        assert total(given, axis=axis, keepdims=keepdims, out=out) is out
        np.testing.assert_array_equal(cp.asnumpy(out), expected)


WRONG: dict[str, tuple[Callable[[Any, Any], Any], type[Exception]]] = {
    "axis past the last": (lambda total, cp: total(arange(cp, 2, 3), axis=2), AxisError),
    "axis before the first": (lambda total, cp: total(arange(cp, 2, 3), axis=-3), AxisError),
    "axis of a number": (lambda total, cp: total(cp.asarray(np.float32(5)), axis=0), AxisError),
    "an axis twice": (lambda total, cp: total(arange(cp, 2, 3), axis=(0, -2)), ValueError),
    "no whole number": (lambda total, cp: total(arange(cp, 2, 3), axis=1.0), TypeError),
    "another shape": (lambda total, cp: total(arange(cp, 2, 3, 4), cp.empty((3, 2), np.float32), axis=2), ValueError),
    "keepdims": (
        lambda total, cp: total(arange(cp, 2, 3), cp.empty(2, np.float32), axis=1, keepdims=True),
        ValueError,
    ),
    "as many elements": (
        lambda total, cp: total(arange(cp, 2, 3), out=cp.empty((3, 1), np.float32), axis=1),
        ValueError,
    ),
    "two outputs": (lambda total, cp: total(arange(cp, 3), cp.empty(()), out=cp.empty(())), ValueError),
    "NumPy's output": (
        lambda total, cp: total(arange(cp, 3), out=np.empty((), np.float32)),
        (TypeError, AttributeError),
    ),
    "numbers alone": (lambda total, cp: total(5.0), (KeyError, ValueError)),
}


@on_each_device
@pytest.mark.parametrize("name", WRONG)
def test_reductions_that_are_refused(name: str, cp: Any) -> None:
    call, error = WRONG[name]
    with pytest.raises(error):
        call(cp.ReductionKernel("T x", "T y", "x", "a + b", "y = a", "0", "total"), cp)


@on_each_device
def test_a_reduction_of_nothing(cp: Any) -> None:
    total = cp.ReductionKernel("T x", "T y", "x", "a + b", "y = a", "7", "total")
    assert cp.asnumpy(total(cp.zeros((2, 0), np.float32), axis=1)).tolist() == [7, 7]
    most = cp.ReductionKernel("T x", "T y", "x", "max(a, b)", "y = a", None, "most")
    assert most(cp.zeros((0, 3), np.float32), axis=1).shape == (0,)
    with pytest.raises(ValueError, match="no identity"):
        most(cp.zeros((3, 0), np.float32), axis=1)
    # Without an identity CuPy begins with the type's own zero.
    assert float(most(cp.asarray(np.float32([-3, -2])))) == 0


@on_each_device
@pytest.mark.parametrize("outer", [3, 5])
def test_elementwise_outputs_of_another_shape(outer: int, cp: Any) -> None:
    same = cp.ElementwiseKernel("T x", "T y", "y = x", "same")
    x = arange(cp, 5)
    if outer == 5:  # an output argument is broadcast to it
        np.testing.assert_array_equal(cp.asnumpy(same(x[:1], cp.zeros(5, np.float32))), np.zeros(5))
        np.testing.assert_array_equal(cp.asnumpy(same(x, cp.zeros((2, 5), np.float32))), [np.arange(5)] * 2)
    else:
        with pytest.raises(ValueError, match=r"."):
            same(x, cp.zeros(3, np.float32))
        with pytest.raises(ValueError, match=r"shape"):
            same(arange(cp, 2, 5), cp.zeros(5, np.float32))
