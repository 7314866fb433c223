"""The engine's arrays behave like NumPy's where CuPy's do: the same random calls on both.

Apart from the numbers: results are device arrays, even 0-dimensional ones, and element-wise results have C order.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from helpers import engine

DTYPES = [np.float32, np.float64, np.float16, np.int32, np.int64, np.uint8, np.int8, np.bool_, np.complex64]
OF_ONE = ["negative", "absolute", "sqrt", "exp", "square", "sign", "floor", "isnan", "logical_not", "conj"]
OF_TWO = ["add", "subtract", "multiply", "maximum", "power", "true_divide", "floor_divide", "less", "equal", "arctan2"]
REDUCTIONS = ["sum", "prod", "max", "min", "mean", "any", "all", "std", "argmax", "argmin", "cumsum"]
OPERATORS = [operator.add, operator.sub, operator.mul, operator.lt, operator.eq, operator.iadd, operator.imul]
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "where": lambda m, x: m.where(x > 0, x, 0),
    "concatenate": lambda m, x: m.concatenate([x, x]),
    "stack": lambda m, x: m.stack([x, x], axis=-1),
    "clip": lambda m, x: m.clip(x, 0, 2),
    "tile": lambda m, x: m.tile(x, 2),
    "roll": lambda m, x: m.roll(x, 1),
    "sort": lambda m, x: m.sort(x),
    "isfinite": lambda m, x: m.isfinite(x),
    "broadcast_to": lambda m, x: m.broadcast_to(x, (2, *x.shape)),
    "matmul": lambda m, x: x @ x.T if x.ndim == 2 else x,
    "reshape": lambda m, x: x.reshape(-1),
    "ravel": lambda m, x: x.ravel(),
    "flatten": lambda m, x: x.flatten(),
    "mask": lambda m, x: x[x > 0],
    "dot": lambda m, x: x.reshape(-1).dot(x.reshape(-1)),
}
IN_C_ORDER = {*OF_ONE, *OF_TWO, "where", "clip", "isfinite", "concatenate", "stack"}


class Drawn:
    """One array, on the host and on the device with the same strides, and matching choices."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        shape = tuple(self.draw.choice([0, 1, 2, 3, 4]) for _ in range(self.draw.randint(0, 4)))
        self.dtype = self.draw.choice(DTYPES)
        self.host, self.there = self.pair(shape, self.draw.choice(DTYPES), permuted=True)

    def pair(self, shape: tuple[int, ...], dtype: Any, *, permuted: bool = False) -> tuple[Any, Any]:
        values = np.array([self.draw.randint(-5, 5) for _ in range(int(np.prod(shape)))]).reshape(shape).astype(dtype)
        there = engine.asarray(values)
        axes = self.draw.sample(range(len(shape)), len(shape)) if permuted else range(len(shape))
        return values.transpose(axes), there.transpose(axes)

    def other(self) -> tuple[Any, Any]:
        """Draw a second operand: a number, or an array that may be broadcast."""
        if self.draw.random() < 0.3:
            number = self.draw.choice([2, 2.5, np.float32(3), np.int8(1), True])
            return number, number
        shape = tuple(n if self.draw.random() < 0.7 else 1 for n in self.host.shape)
        return self.pair(shape[self.draw.randint(0, len(shape)) :], self.draw.choice(DTYPES))


def one_function(drawn: Drawn) -> tuple[str, Callable[[Any, Any], Any]]:
    name = drawn.draw.choice(OF_ONE)
    return name, lambda m, x: getattr(m, name)(x)


def out_and_casting(drawn: Drawn) -> tuple[str, Callable[[Any, Any], Any]]:
    name, casting = drawn.draw.choice(OF_ONE), drawn.draw.choice(["same_kind", "unsafe", "safe"])
    return f"{name}(out=)", lambda m, x: getattr(m, name)(x, out=m.zeros(x.shape, drawn.dtype), casting=casting)


def two_operands(drawn: Drawn) -> tuple[str, Callable[[Any, Any], Any]]:
    name, (host, there) = drawn.draw.choice(OF_TWO), drawn.other()
    return name, lambda m, x: getattr(m, name)(x, host if m is np else there)


def an_operator(drawn: Drawn) -> tuple[str, Callable[[Any, Any], Any]]:
    operation, (host, there) = drawn.draw.choice(OPERATORS), drawn.other()
    return operation.__name__, lambda m, x: operation(x.copy(), host if m is np else there)


def a_part(drawn: Drawn) -> tuple[str, Callable[[Any, Any], Any]]:
    mask = np.array([drawn.draw.random() < 0.5 for _ in range(drawn.host.size)], bool).reshape(drawn.host.shape)
    masks = {np: mask, engine: engine.asarray(mask)}
    if drawn.draw.random() < 0.5:
        return "sum(where=)", lambda m, x: m.sum(x, where=masks[m])
    return "add(where=)", lambda m, x: m.add(x, x, out=m.zeros(x.shape, x.dtype), where=masks[m])


def a_reduction(drawn: Drawn) -> tuple[str, Callable[[Any, Any], Any]]:
    name, axis = drawn.draw.choice(REDUCTIONS), drawn.draw.choice([None, 0, 1, -1, 2, (0, 1), (1, 0), (0, -1), 5])
    takes_several = name not in REDUCTIONS[-3:]
    how: dict[str, Any] = {"keepdims": drawn.draw.random() < 0.5} if takes_several else {}
    how["axis"] = axis if takes_several or not isinstance(axis, tuple) else 0
    if drawn.draw.random() < 0.5:
        return f"{name}({how})", lambda m, x: getattr(m, name)(x, **how)
    return f".{name}({how})", lambda m, x: getattr(x, name)(**how)


def an_index(drawn: Drawn) -> tuple[str, Callable[[Any, Any], Any]]:
    parts = [0, -1, slice(None), slice(1, None), None, ..., slice(None, None, -1)]
    key = tuple(drawn.draw.choice(parts) for _ in range(drawn.draw.randint(0, 4)))
    if drawn.draw.random() < 0.5:
        return f"[{key}]", lambda m, x: x[key]

    def put(m: Any, x: Any) -> Any:
        changed = x.copy()
        changed[key] = 3
        return changed

    return f"[{key}] =", put


def made_alike(drawn: Drawn) -> tuple[str, Callable[[Any, Any], Any]]:
    shape, order = drawn.draw.choice([None, (2, 3), drawn.host.shape, 5]), drawn.draw.choice("CFK")
    name, dtype = drawn.draw.choice(["zeros_like", "ones_like"]), drawn.draw.choice([None, *DTYPES])
    return name, lambda m, x: getattr(m, name)(x, dtype=dtype, order=order, shape=shape)


def made_of_it(drawn: Drawn) -> tuple[str, Callable[[Any, Any], Any]]:
    order, dtype = drawn.draw.choice("CFK"), drawn.draw.choice([None, *DTYPES])
    if drawn.draw.random() < 0.3:
        return "astype", lambda m, x: x.astype(drawn.dtype, order=order)
    least = drawn.draw.choice([0, 0, 3])
    return "array", lambda m, x: m.array(x, dtype=dtype, order=order, ndmin=least)


def a_function(drawn: Drawn) -> tuple[str, Callable[[Any, Any], Any]]:
    name = drawn.draw.choice(list(FUNCTIONS))
    return name, FUNCTIONS[name]


KINDS = [one_function, out_and_casting, two_operands, an_operator, a_part, a_reduction, an_index, made_alike]
KINDS += [made_of_it, a_function]


def outcome(call: Callable[[Any, Any], Any], module: Any, x: Any) -> Any:
    try:
        return call(module, x)
    except (TypeError, ValueError, IndexError) as error:
        return error


def steps(a: Any) -> list[int]:
    """Return the strides of the axes with more than one element."""
    return [stride for stride, n in zip(a.strides, a.shape, strict=True) if n > 1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_as_numpy(kind: Callable[[Drawn], tuple[str, Callable[[Any, Any], Any]]]) -> None:
    raised = 0
    for seed in range(300):
        drawn = Drawn(seed)
        name, call = kind(drawn)
        theirs, ours = outcome(call, np, drawn.host), outcome(call, engine, drawn.there)
        about = f"seed {seed}: {name} of {drawn.host.dtype}{drawn.host.shape}, strides {drawn.host.strides}"
        if isinstance(theirs, Exception):
            assert isinstance(ours, (type(theirs), *type(theirs).__mro__[1:2])), f"{about}: {theirs!r}, {ours!r}"
            raised += 1
            continue
        assert type(ours) is engine.ndarray, f"{about}: {type(ours)} {ours}"
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), about
        np.testing.assert_array_equal(engine.asnumpy(ours), np.asarray(theirs), err_msg=about)
        if name in IN_C_ORDER:
            assert ours.flags.c_contiguous, about
        if kind in (made_alike, made_of_it) and theirs.size > 1:
            assert steps(ours) == steps(theirs), about
    assert raised < 200


def test_an_element_is_no_number() -> None:
    """CuPy keeps it on the device, and passes a kernel its address."""
    code = 'extern "C" __global__ void put(float* o, float x) { o[0] = x; }'
    x, out = engine.asarray(np.float32([1, 2])), engine.zeros(1, np.float32)
    for element in (x[1], x[-1, ...], x.max(), x[x.argmax()], next(iter(x))):
        assert type(element) is engine.ndarray and element.shape == ()
        with pytest.raises(TypeError, match=r"is a scalar, and of a device array.* CuPy passes the address"):
            engine.RawKernel(code, "put")((1,), (1,), (out, element))
    assert x[1] == 2 and float(x[1]) == 2 and f"{x[1]:.2f}" == "2.00" and range(4)[engine.asarray([2])[0]] == 2
    view = x[0]
    view[...] = 5
    assert x[0] == 5
