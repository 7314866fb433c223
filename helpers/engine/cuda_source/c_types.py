"""What CUDA C++ calls its types, and what NumPy calls them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

try:
    import ml_dtypes
except ImportError:  # then arrays have no bfloat16
    ml_dtypes = None

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
SCALAR_OF = {c_name: dtype for dtype, names in _SCALARS.items() for c_name in names.split()}
ELEMENT_OF = {f"{name}{n}": dtype for dtype, names in _VECTORS.items() for name in names.split() for n in (1, 2, 3, 4)}
_PAIR_NAMES = {c_name: dtype for dtype, names in _PAIRS.items() for c_name in names.split()}
ELEMENT_OF |= _PAIR_NAMES


def dtype_of(name: str) -> np.dtype:
    """Return the dtype of a NumPy name, or of bfloat16: TypeError if ml_dtypes is not installed."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" and ml_dtypes else name)


bfloat16: Any = dtype_of("bfloat16") if ml_dtypes else None


def key_of(c_name: str) -> str:
    """Spell a type as the tables do: "std::uint8_t" is "uint8_t", "unsigned int" is "unsigned_int"."""
    plain = re.sub(r"^(struct|class|enum)\s+", "", " ".join(c_name.split()))
    return plain.removeprefix("cuda::").removeprefix("std::").replace(" ", "_")


def vector_of(c_name: str) -> tuple[np.dtype, int, int] | None:
    """Return a vector type's element dtype, number of elements and alignment in bytes, as for float4 or half2.

    None where it is no vector type.
    """
    key = key_of(c_name)
    if key not in ELEMENT_OF:
        return None
    element, count = dtype_of(ELEMENT_OF[key]), 2 if key in _PAIR_NAMES else int(key[-1])
    return element, count, element.itemsize if count == 3 else min(element.itemsize * count, 16)
