"""Check a kernel's arguments against its signature, with the words a learner needs.

Used by the engine's own launches, where the compiler gives the signature, and by typed launches on a GPU, where it is
read from the source: CuPy itself checks neither the count nor the types of what it passes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from . import source


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel: kind 'p' pointer, 's' scalar, 'S' struct by value.

    dtype is NumPy's name, "void" for void*, or "struct" for a type of which only the size (0: not even that) is known.
    """

    name: str
    kind: str
    dtype: str
    is_const: bool = False
    size: int = 0

    def __str__(self) -> str:
        return f"{'const ' if self.is_const else ''}{self.dtype}{'*' if self.kind == 'p' else ''} {self.name}".strip()


_SCALARS = {
    "float32": "float",
    "float64": "double",
    "float16": "half __half",
    "bfloat16": "__nv_bfloat16 nv_bfloat16",
    "int8": "char signed_char int8_t",
    "uint8": "unsigned_char uint8_t",
    "int16": "short int16_t",
    "uint16": "unsigned_short uint16_t",
    "int32": "int int32_t signed",
    "uint32": "unsigned unsigned_int uint32_t uint",
    "int64": "long long_long int64_t ptrdiff_t",
    "uint64": "unsigned_long unsigned_long_long uint64_t size_t",
    "bool": "bool",
    "void": "void",
}
_VECTORS = {  # with 1 to 4 elements
    "float32": "float",
    "float64": "double",
    "int8": "char",
    "uint8": "uchar",
    "int16": "short",
    "uint16": "ushort",
    "int32": "int",
    "uint32": "uint",
    "int64": "long longlong",
    "uint64": "ulong ulonglong",
}
_PAIRS = {"float16": "half2 __half2", "bfloat16": "nv_bfloat162 __nv_bfloat162"}
_SCALAR_OF = {c_name: dtype for dtype, names in _SCALARS.items() for c_name in names.split()}
_ELEMENT_OF = {f"{name}{n}": dtype for dtype, names in _VECTORS.items() for name in names.split() for n in (1, 2, 3, 4)}
_ELEMENT_OF |= {c_name: dtype for dtype, names in _PAIRS.items() for c_name in names.split()}


def dtype_of(name: str) -> np.dtype:
    """The dtype of a parameter's name for it; NumPy alone does not know bfloat16."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def from_source(code: str, name: str) -> list[Parameter] | None:
    """The parameters of the kernel as its source spells them; None where the source has no kernel of that name."""
    found = source.kernels(code).get(re.sub(r"<.*", "", name).split("::")[-1])
    if found is None:
        return None
    parameters = []
    for raw in found:
        c_name = re.sub(r"\s+", "_", raw.type.removeprefix("cuda::").removeprefix("std::"))
        dtype = _SCALAR_OF.get(c_name) or _ELEMENT_OF.get(c_name, "struct")
        kind = "p" if raw.pointer else "s" if c_name in _SCALAR_OF else "S"
        parameters.append(Parameter(raw.name, kind, dtype, raw.const))
    return parameters


def check_all(kernel: str, parameters: Sequence[Parameter], args: Any, array_type: type, contiguous: bool) -> None:
    """Refuse arguments that the kernel would misread.

    Args:
        kernel: its name, for messages.
        args: what a launch was given.
        array_type: the class of device arrays.
        contiguous: whether a view with gaps is refused (a kernel sees a pointer, never the strides).

    Raises:
        TypeError: wrong count, dtype or kind of argument.
        ValueError: a view that is not C-contiguous.
    """
    signature = f"{kernel}({', '.join(map(str, parameters))})"
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args is a tuple with one value for each parameter of {signature}; got {type(args).__name__}")
    if len(args) != len(parameters):
        missing = ", ".join(str(p) for p in parameters[len(args) :])
        raise TypeError(
            f"{kernel} takes {len(parameters)} arguments, got {len(args)}{f': missing {missing}' if missing else ''}. "
            f"(CuPy does not count them: the kernel would read garbage.) The signature is {signature}"
        )
    for index, (parameter, value) in enumerate(zip(parameters, args, strict=True)):
        where = f"argument {index} ({parameter}) of {kernel}"
        if parameter.kind == "p":
            _check_pointer(where, parameter, value, array_type, contiguous)
        elif parameter.kind == "s":
            _check_scalar(where, parameter, value)


def _check_pointer(where: str, parameter: Parameter, value: Any, array_type: type, contiguous: bool) -> None:
    if value is None:
        return
    if not isinstance(value, array_type):
        if isinstance(value, np.ndarray):
            raise TypeError(f"{where} is a NumPy array; a kernel takes device arrays: cp.asarray(...)")
        raise TypeError(f"{where} must be a device array; got {type(value).__name__} {value!r:.60}")
    if parameter.dtype not in ("void", "struct") and value.dtype.name != parameter.dtype:
        raise TypeError(
            f"{where}: the array's dtype is {value.dtype.name}, the kernel reads {parameter.dtype}; "
            f"give it array.astype(cp.{parameter.dtype})"
        )
    if contiguous and not value.flags.c_contiguous:
        raise ValueError(
            f"{where} is a view with gaps (shape {value.shape}, strides {value.strides} bytes); a kernel gets only its "
            "pointer and would read the wrong elements: give it cp.ascontiguousarray(...)"
        )


def _check_scalar(where: str, parameter: Parameter, value: Any) -> None:
    dtype = dtype_of(parameter.dtype)
    if isinstance(value, (bool, np.bool_)):
        got = "bool"
    elif isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        got = value.dtype.name
    elif isinstance(value, int):
        got = "Python int"
    elif isinstance(value, float):
        got = "Python float"
    else:
        raise TypeError(f"{where} is a scalar: give it cp.{dtype.name}(...); got {type(value).__name__} {value!r:.60}")
    if got == "Python int" and dtype.kind in "iu":  # 8 bytes are passed; a 4-byte parameter reads the low half
        limits = np.iinfo(dtype)
        if not limits.min <= value <= limits.max:
            raise TypeError(f"{where}: {value} does not fit {dtype.name}")
        return
    if got == dtype.name or (got == "Python float" and dtype == np.float64):
        return
    passed = {"Python float": " (CuPy passes a Python float as 8 bytes of float64: the kernel would read garbage)"}
    passed["Python int"] = " (CuPy passes a Python int as int64: the kernel would read garbage)"
    shown = value.item() if isinstance(value, (np.generic, np.ndarray)) else value
    article = "an" if got[0] in "ai" else "a"
    raise TypeError(f"{where} got {article} {got}{passed.get(got, '')}; write cp.{dtype.name}({shown!r:.40})")
