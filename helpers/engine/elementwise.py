"""CuPy's ElementwiseKernel and ReductionKernel: a line of C++ for each element, put into a kernel and compiled.

    squared_difference = ElementwiseKernel("T x, T y", "T z", "z = (x - y) * (x - y)", "squared_difference")
    norm = ReductionKernel("T x", "T y", "x * x", "a + b", "y = sqrt(a)", "0", "norm")

Arguments are broadcast as CuPy does it. A sum is one thread's, in order, so that its last bits may differ from a GPU's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .array import array, ascontiguousarray, empty, ndarray
from .cuda_source.signatures import dtype_of
from .module import RawKernel

_BLOCK = 128
_C_NAMES = {
    **{"bool": "bool", "int8": "signed char", "int16": "short", "int32": "int", "int64": "long long"},
    **{"uint8": "unsigned char", "uint16": "unsigned short", "uint32": "unsigned int", "uint64": "unsigned long long"},
    **{"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double"},
}
# What an operation may ask: of a raw array its elements, by a flat index or one for each axis, and its shape.
_PRELUDE = """\
#include <cuda_fp16.h>
#include <cuda_bf16.h>
typedef long long ptrdiff_of_engine;
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
struct IndexOfElement {
  ptrdiff_of_engine n, at[8];
  __device__ ptrdiff_of_engine size() const { return n; }
  __device__ const ptrdiff_of_engine *get() const { return at; }
  __device__ void set(ptrdiff_of_engine i, const ptrdiff_of_engine *sizes, int axes) {
    for (int axis = axes - 1; axis >= 0; --axis) at[axis] = i % sizes[axis], i /= sizes[axis];
  }
};
"""


class _Parameter(NamedTuple):
    """One of "raw T x, float32 y"."""

    name: str
    type: str
    is_raw: bool


def _parameters(text: str) -> list[_Parameter]:
    parameters = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        words = [word for word in part.split() if word != "_non_const"]
        is_raw = words[0] == "raw"
        if len(words) - is_raw != 2 or not all(word.isidentifier() for word in words):
            raise ValueError(f"{part!r} is no parameter, a type and a name, such as 'raw T x' or 'float32 y'")
        parameters.append(_Parameter(words[-1], words[-2], is_raw))
    return parameters


def _named_dtype(name: str) -> np.dtype | None:
    """The dtype of that name; None for the name of a type that the arguments decide."""
    known = name in _C_NAMES or name in ("int", "float", "complex64", "complex128")
    return (np.dtype(name) if name in ("int", "float") else dtype_of(name)) if known else None


def _c_name(dtype: Any) -> str:
    if dtype.name not in _C_NAMES:
        raise TypeError(f"{dtype}: the CPU engine compiles no operation on it; it takes {', '.join(_C_NAMES)}")
    return _C_NAMES[dtype.name]


def _types(parameters: Sequence[_Parameter], args: Sequence[Any]) -> dict[str, np.dtype]:
    """What each type name stands for. TypeError where arguments disagree. Arrays decide before Python's numbers."""
    types: dict[str, np.dtype] = {}
    for from_arrays in (True, False):
        for parameter, value in zip(parameters, args, strict=False):
            has_dtype = isinstance(value, (ndarray, np.generic))
            if isinstance(value, np.ndarray) and not isinstance(value, ndarray):
                raise TypeError(f"{parameter.name} is a NumPy array: expected a device array; write cp.asarray(...)")
            if has_dtype != from_arrays or (not has_dtype and parameter.type in types):
                continue
            dtype = value.dtype if has_dtype else np.asarray(value).dtype
            wanted = _named_dtype(parameter.type) or types.setdefault(parameter.type, dtype)
            if wanted != dtype and isinstance(value, ndarray):
                raise TypeError(f"{parameter.name} is {dtype}, and its type {parameter.type} is {wanted} here")
    for parameter in parameters:
        dtype = _named_dtype(parameter.type) or types.get(parameter.type)
        if dtype is None:
            raise TypeError(f"no argument says what the type {parameter.type} of {parameter.name} is")
        types[parameter.type] = dtype
    return types


class _Text:
    """A kernel's text: its parameters, its arguments, and what stands before and in the loop."""

    def __init__(self, types: Mapping[str, np.dtype], preamble: str) -> None:
        self.parameters: list[str] = []
        self.args: list[Any] = []
        self.before: list[str] = []
        self.inside: list[str] = []
        self._write_back: list[tuple[Any, ndarray]] = []
        names = (f"typedef {_c_name(dtype)} {name};\n" for name, dtype in types.items() if name != _c_name(dtype))
        self.head = _PRELUDE + "".join(names) + preamble

    def add(self, declared: str, value: Any) -> None:
        self.parameters.append(declared)
        self.args.append(value)

    def sizes(self, name: str, shape: Sequence[int]) -> None:
        """An array of the sizes of some axes."""
        self.add(f"const ptrdiff_of_engine *{name}", array(np.array(shape or (1,), np.int64)))

    def raw(self, parameter: _Parameter, value: ndarray) -> None:
        """An array that the operation indexes itself, and may write."""
        dense = ascontiguousarray(value)
        if dense is not value:
            self._write_back.append((value, dense))
        self.add(f"{parameter.type} *_raw_{parameter.name}", dense)
        self.sizes(f"_sizes_{parameter.name}", value.shape)
        axes = max(value.ndim, 1)
        declared = f"RawArray<{parameter.type}, {axes}> {parameter.name}"
        self.before.append(f"const {declared}{{_raw_{parameter.name}, _sizes_{parameter.name}}};")

    def element(self, parameter: _Parameter, value: ndarray, *, written: bool) -> None:
        """An array of which each thread sees one element at a time."""
        const = "" if written else "const "
        self.add(f"{const}{parameter.type} *_raw_{parameter.name}", value)
        self.inside.append(f"{const}{parameter.type} &{parameter.name} = _raw_{parameter.name}[i];")

    def run(self, name: str, count: int, body: str, options: tuple[str, ...]) -> None:
        """Compile and launch, with so many threads. Of the body, CuPy's lines are what messages are about."""
        self.add("ptrdiff_of_engine _n", np.int64(count))
        name = f"{name}_kernel"  # norm, and others, are functions of CUDA's
        code = f'{self.head}\nextern "C" __global__ void {name}({", ".join(self.parameters)}) {{\n{body}\n}}\n'
        if count:
            kernel = RawKernel(code, name, options=("-std=c++17", *options))
            kernel((-(-count // _BLOCK),), (_BLOCK,), tuple(self.args))
        for value, dense in self._write_back:
            value[...] = dense


_LOOP = "for (ptrdiff_of_engine i = blockIdx.x * (ptrdiff_of_engine)blockDim.x + threadIdx.x; i < _n; i += _n)"


class ElementwiseKernel:
    """`cupy.ElementwiseKernel`: its parameters are CuPy's. Complex numbers and textures are not taken."""

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
        self._in, self._out, self.operation, self.name = (
            _parameters(in_params),
            _parameters(out_params),
            operation,
            name,
        )
        self._preamble, self._options, self._around = preamble, tuple(options), (loop_prep, after_loop)
        self._no_return, self._return_tuple = no_return, return_tuple

    def __call__(self, *args: Any, size: int | None = None, block_size: int = -1, stream: Any = None) -> Any:
        """Launch over the broadcast shape of the arrays that are not raw, or over `size` elements.

        Returns:
            The outputs, new ones where they are not given: an array, or a tuple of several.

        Raises:
            TypeError, ValueError: arguments that do not fit the parameters or each other.
            CompileError, LaunchError: as `RawKernel`.
        """
        parameters, n_in = [*self._in, *self._out], len(self._in)
        if len(args) not in (n_in, len(parameters)):
            raise TypeError(f"{self.name} takes {n_in} or {len(parameters)} arguments, got {len(args)}")
        types = _types(parameters, args)
        values = [
            a if isinstance(a, ndarray) else array(a, types[p.type]) for p, a in zip(parameters, args, strict=False)
        ]
        seen = [a for p, a in zip(parameters, values, strict=False) if not p.is_raw]
        has_array = any(isinstance(a, ndarray) and not p.is_raw for p, a in zip(parameters, args, strict=False))
        if size is not None and has_array:
            raise ValueError("size is for calls whose arrays are all raw")
        if size is None and not has_array:
            raise ValueError(f"{self.name} has no array that is not raw: how many elements? Give size=")
        shape = (size,) if size is not None else np.broadcast_shapes(*(a.shape for a in seen))
        outputs = values[n_in:] or [empty(shape, types[p.type]) for p in self._out]
        text = _Text(types, self._preamble)
        written: list[tuple[ndarray, ndarray]] = []
        for i, (parameter, value) in enumerate(zip(parameters, [*values[:n_in], *outputs], strict=True)):
            if parameter.is_raw:
                text.raw(parameter, value)
                continue
            if i >= n_in and value.shape != shape:
                raise ValueError(f"{parameter.name} has shape {value.shape}; what is computed has {shape}")
            dense = ascontiguousarray(value if i >= n_in else np.broadcast_to(value, shape, subok=True))
            written += [(value, dense)] if i >= n_in and dense is not value else []
            text.element(parameter, dense, written=i >= n_in)
        text.sizes("_sizes", shape)
        prep, after = self._around
        body = [
            *text.before,
            "IndexOfElement _ind{_n};",
            f"{prep};",
            f"{_LOOP} {{",
            f"_ind.set(i, _sizes, {len(shape)});",
        ]
        lines = "\n".join([*body, *text.inside, f'#line 1 "{self.name}"', f"{self.operation};", "}", f"{after};"])
        text.run(self.name, math.prod(shape), lines, self._options)
        for value, dense in written:
            value[...] = dense
        if self._no_return:
            return None
        return outputs[0] if len(outputs) == 1 and not self._return_tuple else tuple(outputs)


class ReductionKernel:
    """`cupy.ReductionKernel`: its parameters are CuPy's. Raw parameters and complex numbers are not taken."""

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
        self._in, self._out, self.name = _parameters(in_params), _parameters(out_params), name
        if any(parameter.is_raw for parameter in (*self._in, *self._out)):
            raise ValueError("raw parameters of a ReductionKernel: the CPU engine has none; use a RawKernel")
        self._map, self._reduce, self._post, self._identity = map_expr, reduce_expr, post_map_expr, identity
        self._type, self._preamble, self._options = reduce_type, preamble, tuple(options)

    def __call__(
        self, *args: Any, out: Any = None, axis: Any = None, keepdims: bool = False, stream: Any = None
    ) -> Any:
        """Reduce the broadcast arguments along the axes, all of them where none is named.

        Returns:
            The output: an array of the axes that are left, or a tuple of several outputs.

        Raises:
            TypeError, ValueError: arguments that do not fit; nothing to reduce, and no identity.
            CompileError, LaunchError: as `RawKernel`.
        """
        n_in = len(self._in)
        if out is not None:
            args = (*args, *(out if isinstance(out, tuple) else (out,)))
        if len(args) not in (n_in, n_in + len(self._out)):
            raise TypeError(f"{self.name} takes {n_in} or {n_in + len(self._out)} arguments, got {len(args)}")
        types = _types([*self._in, *self._out], args)
        values = [
            a if isinstance(a, ndarray) else array(a, types[p.type]) for p, a in zip(self._in, args, strict=False)
        ]
        shape = np.broadcast_shapes(*(a.shape for a in values))
        axes = range(len(shape)) if axis is None else (axis,) if isinstance(axis, int) else axis
        reduced = sorted(a % len(shape) for a in axes)
        kept = [a for a in range(len(shape)) if a not in reduced]
        left = tuple(shape[a] for a in kept)
        count, each = math.prod(left), math.prod(shape[a] for a in reduced)
        if not each and self._identity is None:
            raise ValueError(f"{self.name} has no identity, and nothing to reduce along axes {reduced}")
        text = _Text(types, self._preamble)
        elements = []
        for parameter, value in zip(self._in, values, strict=True):
            dense = ascontiguousarray(np.broadcast_to(value, shape, subok=True).transpose(*kept, *reduced))
            text.add(f"const {parameter.type} *_raw_{parameter.name}", dense)
            elements.append(f"const {parameter.type} &{parameter.name} = _raw_{parameter.name}[i * {each}ll + j];")
        kept_shape = tuple(1 if a in reduced else shape[a] for a in range(len(shape))) if keepdims else left
        outputs = [*args[n_in:]] or [empty(kept_shape, types[p.type]) for p in self._out]
        dense_outputs = [ascontiguousarray(a) for a in outputs]
        for parameter, given, value in zip(self._out, outputs, dense_outputs, strict=True):
            if given.size != count:
                raise ValueError(f"{parameter.name} has shape {given.shape}; {kept_shape} is what is left")
            text.element(parameter, value, written=True)
        type_ = self._type or self._out[0].type
        start, first = ("0", 1) if self._identity is None else (str(self._identity), 0)
        mapped = "\n".join(
            [*elements, f'#line 1 "{self.name}"', f"const _type_reduce b = static_cast<_type_reduce>({self._map});"]
        )
        begin = f"ptrdiff_of_engine j = 0; {mapped} a = b;" if first else ""
        lines = [
            f"typedef {_C_NAMES.get(type_, type_)} _type_reduce;",
            f"{_LOOP} {{",
            f"_type_reduce a = static_cast<_type_reduce>({start});",
            f"{{ {begin} }}",
            f"for (ptrdiff_of_engine j = {first}; j < {each}ll; ++j) {{",
            mapped,
            f"a = {self._reduce};",
            "}",
            *text.inside,
            f"{self._post};",
            "}",
        ]
        text.run(self.name, count, "\n".join(lines), self._options)
        for given, dense in zip(outputs, dense_outputs, strict=True):
            if given is not dense:
                given[...] = dense
        return outputs[0] if len(outputs) == 1 else tuple(outputs)
