"""CuPy's ElementwiseKernel and ReductionKernel: a line of C++ per element, put into a kernel and compiled.

    squared_difference = ElementwiseKernel("T x, T y", "T z", "z = (x - y) * (x - y)", "squared_difference")
    norm = ReductionKernel("T x", "T y", "x * x", "a + b", "y = sqrt(a)", "0", "norm")

Broadcasting and types follow CuPy's rules. One thread computes each sum, in order, so its last bits may differ from a
GPU's.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .array import array, empty, ndarray
from .cuda_source.signatures import dtype_of
from .module import RawKernel

_BLOCK = 128
_C_NAMES = {
    **{"bool": "bool", "int8": "signed char", "int16": "short", "int32": "int", "int64": "long long"},
    **{"uint8": "unsigned char", "uint16": "unsigned short", "uint32": "unsigned int", "uint64": "unsigned long long"},
    **{"float16": "float16", "bfloat16": "bfloat16", "float32": "float", "float64": "double"},
}
# What an operation may use of a raw array: its elements, by a flat index or one per axis, and its shape. Half numbers
# are CuPy's classes, which every computation converts to float.
_PRELUDE = """\
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#ifndef M_PI
#define M_PI 3.1415926535897932384626433832795
#endif
typedef long long ptrdiff_of_engine;
template <typename Raw>
struct HalfOfCupy {
  Raw data;
  __device__ HalfOfCupy() {}
  __device__ HalfOfCupy(float v) : data(v) {}
  __device__ HalfOfCupy(const Raw &v) : data(v) {}
  template <typename Other>
  explicit __device__ HalfOfCupy(const Other &v) : data((float)v) {}
  __device__ operator float() const { return (float)data; }
  HalfOfCupy &operator=(const HalfOfCupy &) = default;
  template <typename Other>
  __device__ HalfOfCupy &operator=(const Other &v) { return *this = static_cast<HalfOfCupy>(v); }
  template <typename Other>
  __device__ HalfOfCupy &operator+=(const Other &v) { return *this = *this + v; }
  template <typename Other>
  __device__ HalfOfCupy &operator-=(const Other &v) { return *this = *this - v; }
  template <typename Other>
  __device__ HalfOfCupy &operator*=(const Other &v) { return *this = *this * v; }
  template <typename Other>
  __device__ HalfOfCupy &operator/=(const Other &v) { return *this = *this / v; }
  friend __device__ HalfOfCupy min(HalfOfCupy x, HalfOfCupy y) { return ::min((float)x, (float)y); }
  friend __device__ HalfOfCupy max(HalfOfCupy x, HalfOfCupy y) { return ::max((float)x, (float)y); }
};
typedef HalfOfCupy<__half> float16;
typedef HalfOfCupy<__nv_bfloat16> bfloat16;
template <typename Type, int Axes>
struct RawArray {
  Type *data;
  const ptrdiff_of_engine *sizes;
  static constexpr int ndim = Axes;
  __device__ Type &operator[](ptrdiff_of_engine i) const { return data[i]; }
  template <typename Index>
  __device__ Type &operator[](const Index (&index)[Axes]) const {
    ptrdiff_of_engine flat = 0;
    for (int axis = 0; axis < Axes; ++axis) flat = flat * sizes[axis] + index[axis];
    return data[flat];
  }
  __device__ const ptrdiff_of_engine *shape() const { return sizes; }
  __device__ ptrdiff_of_engine size() const {
    ptrdiff_of_engine n = 1;
    for (int axis = 0; axis < Axes; ++axis) n *= sizes[axis];
    return n;
  }
};
template <int Axes>
struct IndexOfElement {
  ptrdiff_of_engine n, at[Axes ? Axes : 1];
  static constexpr int ndim = Axes;
  __device__ ptrdiff_of_engine size() const { return n; }
  __device__ const ptrdiff_of_engine *get() const { return at; }
  __device__ void set(ptrdiff_of_engine i, const ptrdiff_of_engine *sizes) {
    for (int axis = Axes - 1; axis >= 0; --axis) at[axis] = i % sizes[axis], i /= sizes[axis];
  }
};
"""


class _Parameter(NamedTuple):
    """One of "raw T x, float32 y". dtype: None if its type is a letter, which the arrays determine."""

    name: str
    type: str
    dtype: np.dtype | None
    is_raw: bool
    is_const: bool

    @property
    def c_type(self) -> str:
        """The type's name in the operation: the letter, or C's name."""
        return self.type if self.dtype is None else _c_name(self.dtype)


def _parameters(text: str, *, const: bool) -> list[_Parameter]:
    """Read the parameters from a text. One-letter types are free, all others are NumPy's, as in CuPy.

    Raises:
        ValueError: a part is not a type and a name. TypeError: NumPy has no such type.
    """
    parameters = []
    for part in text.split(",") if text.strip() else ():
        *words, type_, name = part.split() if len(part.split()) > 1 else ("?", "", "")
        if set(words) - {"raw", "_non_const"} or not name.isidentifier():
            raise ValueError(f"{part.strip()!r} is not a parameter such as 'raw T x' or 'float32 y': a type and a name")
        if name == "i":
            raise ValueError("a parameter cannot be called i, which is the loop's index")
        try:
            dtype = None if len(type_) == 1 else dtype_of(type_)
        except TypeError:
            known = f"a letter, which the arrays decide, or a dtype of NumPy's: {', '.join(_C_NAMES)}"
            raise TypeError(f"data type {type_!r} of {name} not understood: expected {known}") from None
        parameters.append(_Parameter(name, type_, dtype, "raw" in words, const and "_non_const" not in words))
    return parameters


def _c_name(dtype: Any) -> str:
    if dtype.name not in _C_NAMES:
        raise TypeError(f"{dtype}: the CPU engine does not support this type; it supports {', '.join(_C_NAMES)}")
    return _C_NAMES[dtype.name]


def _check(parameter: _Parameter, value: Any, *, is_output: bool) -> None:
    if isinstance(value, ndarray):
        if not value.dtype.isnative:
            raise TypeError(
                f"{parameter.name}: its byte order ({value.dtype}) is not this machine's; write "
                "cp.asarray(...) of the NumPy array, which converts it"
            )
    elif isinstance(value, np.ndarray):
        raise TypeError(f"{parameter.name} is a NumPy array: expected a device array; write cp.asarray(...)")
    elif is_output or not isinstance(value, (bool, int, float, complex, np.generic)):
        kind = "a device array" if is_output else "a device array or a number"
        raise TypeError(f"{parameter.name}: expected {kind}; got {type(value).__name__} {value!r:.60}")


def _types(inputs: Sequence[_Parameter], outputs: Sequence[_Parameter], args: Sequence[Any]) -> dict[str, np.dtype]:
    """Return the type of each letter, from the arrays: outputs come first, and scalars do not count.

    Raises:
        TypeError: an argument is not a device array or a number, or arrays disagree. KeyError: no array determines it.
    """
    types: dict[str, np.dtype] = {}
    given = [*zip(outputs, args[len(inputs) :], strict=False), *zip(inputs, args, strict=False)]
    for parameter, value in given:
        _check(parameter, value, is_output=any(parameter is one for one in outputs))
        if isinstance(value, ndarray):
            wanted = parameter.dtype or types.setdefault(parameter.type, value.dtype)
            if wanted != value.dtype:
                raise TypeError(
                    f"Type is mismatched: {parameter.name} is {value.dtype}, and its type {parameter.type} is {wanted} "
                    "here"
                )
    for parameter in (*inputs, *outputs):
        if parameter.dtype is None and parameter.type not in types:
            raise KeyError(
                f"no array says what the type {parameter.type} of {parameter.name} is, and scalars do not count: "
                f"write it out, such as 'float32 {parameter.name}'"
            )
    return types


def _number(value: Any, dtype: np.dtype) -> np.ndarray:
    """Convert a number to that dtype, for passing it to a kernel by value."""
    number = np.empty((), dtype)
    number[()] = value
    return number


def _reduced_shape(shape: tuple[int, ...], arrays: Sequence[ndarray]) -> tuple[int, ...]:
    """Return the sizes of `_ind`: as in CuPy, axes that are adjacent in all arrays become one."""
    if len(shape) <= 1 or not arrays:
        return shape
    gaps = [a for a in arrays if not a.flags.c_contiguous]
    if not gaps:
        return (math.prod(shape),)
    if len(shape) == 2:
        return shape
    sizes: list[int] = []
    last = -1
    for axis in (axis for axis, n in enumerate(shape) if n != 1):
        joins = last >= 0 and all(a.strides[axis] * shape[axis] == a.strides[last] for a in gaps)
        sizes[-1:] = [sizes[-1] * shape[axis]] if joins else [*sizes[-1:], shape[axis]]
        last = axis
    return tuple(sizes)


class _Text:
    """A kernel's text: its parameters, its arguments, and the code before and in the loop."""

    def __init__(self, name: str, types: Mapping[str, np.dtype], preamble: str) -> None:
        self.name = name
        self.parameters: list[str] = []
        self.args: list[Any] = []
        self.before: list[str] = []
        self.inside: list[str] = []
        self._types = types
        self._write_back: list[tuple[Any, ndarray]] = []
        letters = "".join(f"typedef {_c_name(dtype)} {name};\n" for name, dtype in sorted(types.items()))
        self.head = f"{_PRELUDE}{letters}{self.of_caller('preamble', preamble)}"

    def of_caller(self, what: str, text: str) -> str:
        """Return the caller's lines, marked so that a compiler's messages attribute them to the caller."""
        return f'\n#line 1 "{self.name}{what and "."}{what}"\n{text}\n' if text else ""

    def dtype(self, parameter: _Parameter) -> np.dtype:
        """Return the type that a parameter has in this call."""
        return parameter.dtype or self._types[parameter.type]

    def add(self, declared: str, value: Any) -> None:
        self.parameters.append(declared)
        self.args.append(value)

    def sizes(self, name: str, shape: Sequence[int]) -> None:
        """Make an array of the sizes of some axes."""
        self.add(f"const ptrdiff_of_engine *{name}", array(np.array(shape or (1,), np.int64)))

    def number(self, parameter: _Parameter, value: Any) -> None:
        """Declare a number under its name, which is known in the whole kernel, also before and after the loop."""
        self.add(f"const {parameter.c_type} {parameter.name}", _number(value, self.dtype(parameter)))

    def dense(self, value: ndarray, *, written: bool) -> ndarray:
        """Return the array without gaps. If it is a written copy, the kernel's results go to the original."""
        dense = array(value, copy=None, order="C")
        if written and dense is not value:
            self._write_back.append((value, dense))
        return dense

    def raw(self, parameter: _Parameter, value: ndarray) -> None:
        """Declare an array that the operation indexes itself; outputs may be written."""
        const = "const " if parameter.is_const else ""
        self.add(f"{const}{parameter.c_type} *_raw_{parameter.name}", self.dense(value, written=not const))
        self.sizes(f"_sizes_{parameter.name}", value.shape)
        declared = f"RawArray<{const}{parameter.c_type}, {max(value.ndim, 1)}> {parameter.name}"
        self.before.append(f"const {declared}{{_raw_{parameter.name}, _sizes_{parameter.name}}};")

    def element(self, parameter: _Parameter, value: ndarray, shape: tuple[int, ...]) -> None:
        """Declare an array that each thread accesses one element at a time."""
        const = "const " if parameter.is_const else ""
        whole = np.broadcast_to(value, shape, subok=True) if const else value
        self.add(f"{const}{parameter.c_type} *_raw_{parameter.name}", self.dense(whole, written=not const))
        self.inside.append(f"{const}{parameter.c_type} &{parameter.name} = _raw_{parameter.name}[i];")

    def run(self, count: int, body: str, options: tuple[str, ...], block: int = _BLOCK) -> None:
        """Compile, and launch that many threads. Messages refer only to CuPy's lines in the body."""
        self.add("ptrdiff_of_engine _n", np.int64(count))
        name = f"{self.name}_kernel"  # norm, and others, are CUDA functions
        code = f'{self.head}\nextern "C" __global__ void {name}({", ".join(self.parameters)}) {{\n{body}\n}}\n'
        kernel = RawKernel(code, name, options=("-std=c++17", *options))
        block = min(block, count)
        kernel((-(-count // block),), (block,), tuple(self.args))
        for value, dense in self._write_back:
            value[...] = dense


_LOOP = "for (ptrdiff_of_engine i = blockIdx.x * (ptrdiff_of_engine)blockDim.x + threadIdx.x; i < _n; i += _n)"


class ElementwiseKernel:
    """`cupy.ElementwiseKernel`, with CuPy's parameters. Complex numbers and textures are not supported.

    Raises:
        TypeError, ValueError: malformed parameters.
    """

    def __init__(
        self,
        in_params: str,
        out_params: str,
        operation: str,
        name: str = "kernel",
        reduce_dims: bool = True,
        preamble: str = "",
        no_return: bool = False,
        return_tuple: bool = False,
        *,
        options: tuple[str, ...] = (),
        loop_prep: str = "",
        after_loop: str = "",
    ) -> None:
        self._in, self._out = _parameters(in_params, const=True), _parameters(out_params, const=False)
        self.operation, self.name, self.reduce_dims = operation, name, reduce_dims
        self._preamble, self._options, self._around = preamble, tuple(options), (loop_prep, after_loop)
        self._no_return, self._return_tuple = no_return, return_tuple

    def __call__(self, *args: Any, size: int | None = None, block_size: int = _BLOCK, stream: Any = None) -> Any:
        """Launch over the broadcast shape of the arrays that are not raw, or over `size` elements.

        Returns:
            The outputs, new arrays unless they are given: an array, or a tuple of several.

        Raises:
            TypeError, ValueError: arguments that do not match the parameters or each other.
            KeyError: no array determines a letter's type.
            CompileError, LaunchError: as for `RawKernel`.
        """
        parameters, n_in = [*self._in, *self._out], len(self._in)
        if block_size <= 0:
            raise ValueError(f"block_size is {block_size}: it must be greater than zero")
        if len(args) not in (n_in, len(parameters)):
            raise TypeError(f"{self.name} takes {n_in} or {len(parameters)} arguments, got {len(args)}")
        types = _types(self._in, self._out, args)
        seen = [a for p, a in zip(parameters, args, strict=False) if isinstance(a, ndarray) and not p.is_raw]
        if size is not None and seen:
            raise ValueError("size is for calls whose arrays are all raw")
        if size is None and not seen:
            raise ValueError(f"{self.name} has no array that is not raw: how many elements? Give size=")
        shape = (int(size),) if size is not None else np.broadcast_shapes(*(a.shape for a in seen))
        text = _Text(self.name, types, self._preamble)
        outputs = list(args[n_in:])
        if not outputs:
            if size is None and any(p.is_raw for p in self._out):
                raise ValueError(f"{self.name} has a raw output: how many elements? Give it, or size=")
            outputs = [empty(shape, text.dtype(p)) for p in self._out]
        for parameter, value in zip(self._out, outputs, strict=True):
            if not parameter.is_raw and value.shape != shape:
                raise ValueError(f"{parameter.name} has shape {value.shape}; the result has {shape}")
        if math.prod(shape):
            self._launch(text, zip(parameters, [*args[:n_in], *outputs], strict=True), shape, block_size)
        if self._no_return:
            return None
        return outputs[0] if len(outputs) == 1 and not self._return_tuple else tuple(outputs)

    def _launch(self, text: _Text, values: Any, shape: tuple[int, ...], block_size: int) -> None:
        elements = []
        for parameter, value in values:
            if not isinstance(value, ndarray):
                text.number(parameter, value)
            elif parameter.is_raw:
                text.raw(parameter, value)
            else:
                elements.append(np.broadcast_to(value, shape, subok=True) if value.shape != shape else value)
                text.element(parameter, value, shape)
        sizes = _reduced_shape(shape, elements) if self.reduce_dims else shape
        text.sizes("_sizes", sizes)
        prep, after = self._around
        lines = [
            *text.before,
            f"IndexOfElement<{len(sizes)}> _ind{{_n}};",
            text.of_caller("loop_prep", f"{prep};"),
            f"{_LOOP} {{",
            "_ind.set(i, _sizes);",
            *text.inside,
            text.of_caller("", f"{self.operation};"),
            "}",
            text.of_caller("after_loop", f"{after};"),
        ]
        text.run(math.prod(shape), "\n".join(lines), self._options, block_size)


class ReductionKernel:
    """`cupy.ReductionKernel`, with CuPy's parameters. Raw parameters and complex numbers are not supported.

    Without an identity, a sum begins with the type's own zero, as in CuPy.

    Raises:
        TypeError, ValueError: malformed or raw parameters.
    """

    def __init__(
        self,
        in_params: str,
        out_params: str,
        map_expr: str,
        reduce_expr: str,
        post_map_expr: str,
        identity: Any,
        name: str = "reduce_kernel",
        reduce_type: str | None = None,
        reduce_dims: bool = True,
        preamble: str = "",
        options: tuple[str, ...] = (),
    ) -> None:
        self._in, self._out = _parameters(in_params, const=True), _parameters(out_params, const=False)
        self.name = name
        if any(parameter.is_raw for parameter in (*self._in, *self._out)):
            raise ValueError("the CPU engine does not support raw parameters of a ReductionKernel; use a RawKernel")
        self._map, self._reduce, self._post = map_expr, reduce_expr, post_map_expr
        self._identity = "" if identity is None else str(identity)
        self._type, self._preamble, self._options = reduce_type, preamble, tuple(options)

    def __call__(
        self, *args: Any, out: Any = None, axis: Any = None, keepdims: bool = False, stream: Any = None
    ) -> ndarray:
        """Reduce the broadcast arguments along the given axes, or all axes.

        Returns:
            The first output: an array of the remaining axes.

        Raises:
            TypeError, ValueError: arguments that do not match; nothing to reduce without an identity. `AxisError`, a
                ValueError: an axis that the arguments do not have.
            KeyError: no array determines a letter's type.
            CompileError, LaunchError: as for `RawKernel`.
        """
        n_in = len(self._in)
        if len(args) not in (n_in, n_in + len(self._out)):
            raise TypeError(f"{self.name} takes {n_in} or {n_in + len(self._out)} arguments, got {len(args)}")
        if out is not None:
            if len(self._out) != 1:
                raise NotImplementedError("out= takes a single output: pass several as arguments, after the inputs")
            if len(args) != n_in:
                raise ValueError("cannot specify 'out' as both a positional and keyword argument")
            args = (*args, out)
        types = _types(self._in, self._out, args)
        arrays = [a for a in args[:n_in] if isinstance(a, ndarray)]
        if not arrays:
            raise ValueError(f"{self.name} has no array among its inputs: how many elements?")
        shape = np.broadcast_shapes(*(a.shape for a in arrays))
        reduced = _axes(axis, len(shape))
        kept = [a for a in range(len(shape)) if a not in reduced]
        left = tuple(1 if a in reduced else shape[a] for a in range(len(shape)) if keepdims or a in kept)
        text = _Text(self.name, types, self._preamble)
        outputs = list(args[n_in:]) or [empty(left, text.dtype(p)) for p in self._out]
        for parameter, value in zip(self._out, outputs, strict=True):
            if value.shape != left:
                raise ValueError(f"Out shape is mismatched: {parameter.name} has {value.shape}; expected {left}")
        if not math.prod(left):
            return outputs[0]
        each = math.prod(shape[a] for a in reduced)
        if not each and not self._identity:
            raise ValueError(f"{self.name} has no identity, and nothing to reduce along axes {reduced}")
        elements = []
        for parameter, value in zip(self._in, args, strict=False):
            if not isinstance(value, ndarray):
                text.number(parameter, value)
                continue
            whole = np.broadcast_to(value, shape, subok=True).transpose(*kept, *reduced)
            text.add(f"const {parameter.c_type} *_raw_{parameter.name}", text.dense(whole, written=False))
            where = f"_raw_{parameter.name}[i * {each}ll + _J]"
            elements.append(f"const {parameter.c_type} &{parameter.name} = {where};")
        for parameter, value in zip(self._out, outputs, strict=True):
            text.element(parameter, value, left)
        lines = [
            f"typedef {self._type or self._out[0].c_type} _type_reduce;",
            f"{_LOOP} {{",
            f"_type_reduce a = _type_reduce({self._identity});",
            f"for (ptrdiff_of_engine _J = 0; _J < {each}ll; ++_J) {{",
            *elements,
            text.of_caller("", f"const _type_reduce b = static_cast<_type_reduce>({self._map});"),
            f"a = ({self._reduce});",
            "}",
            *text.inside,
            f"({self._post});",
            "}",
        ]
        text.run(math.prod(left), "\n".join(lines), self._options)
        return outputs[0]


def _axes(axis: Any, ndim: int) -> tuple[int, ...]:
    """Return the given axes in order; all of them for None.

    Raises:
        AxisError: there is no such axis. TypeError: one is not an integer. ValueError: one occurs twice.
    """
    if axis is None:
        return tuple(range(ndim))
    named = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    axes = sorted(_axis(operator.index(a), ndim) for a in named)
    if len(set(axes)) < len(axes):
        raise ValueError("duplicate value in 'axis'")
    return tuple(axes)


def _axis(axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise _AxisError(axis, ndim)
    return axis % ndim


_AxisError = (np.exceptions if hasattr(np, "exceptions") else np).AxisError  # moved in NumPy 1.25
