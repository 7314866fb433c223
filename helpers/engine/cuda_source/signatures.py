"""Check a kernel's arguments against its signature, with the words a learner needs.

Used by the engine's own launches, where the compiler gives the signature, and by typed launches on a GPU, where it is
read from the source: CuPy itself checks neither the count nor the types of what it passes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from . import source, structs
from .c_types import ELEMENT_OF, SCALAR_OF, dtype_of, key_of, vector_of


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel. kind: 'p' pointer, 's' scalar, 'S' struct by value.

    dtype: NumPy's name of a scalar, or of a vector's elements; "void" for void*; "struct" for a type of which only the
    size is known, or not even that (size 0). size: in bytes; of a pointer's target, if the compiler reports it.
    type: the source's name of a struct or a vector. layout: the struct's fields, if the source declares a plain struct.
    """

    name: str
    kind: str
    dtype: str
    is_const: bool = False
    size: int = 0
    type: str = ""
    layout: np.dtype | None = None

    @cached_property
    def target_size(self) -> int:
        """Bytes that a pointer to numbers points to: of one number, or of a vector such as float4."""
        vector = vector_of(self.type)
        return self.size or (vector[0].itemsize * vector[1] if vector else dtype_of(self.dtype).itemsize)

    @cached_property
    def is_vector(self) -> bool:
        """Whether it points to vectors of numbers."""
        return (
            self.kind == "p"
            and self.dtype not in ("void", "struct")
            and (self.target_size > dtype_of(self.dtype).itemsize)
        )

    @cached_property
    def scalar(self) -> Any:
        """NumPy's type of a scalar."""
        return dtype_of(self.dtype).type

    @cached_property
    def accepted(self) -> set[np.dtype]:
        """The dtypes of arrays and structs that `check_all` has accepted so far, to skip the rules next time."""
        return set()

    def __str__(self) -> str:
        kind = self.type if self.type and (self.dtype == "struct" or self.is_vector) else self.dtype
        return f"{'const ' if self.is_const else ''}{kind}{'*' if self.kind == 'p' else ''} {self.name}".strip()


def from_source(code: str, name: str) -> list[Parameter] | None:
    """Read a kernel's parameters from its source; None if the source has no kernel of that name."""
    declared = source.kernels(code).get(re.sub(r"<.*", "", name).split("::")[-1])
    if declared is None:
        return None
    return [_parameter(code, raw) for raw in declared]


def _parameter(code: str, raw: source.Declared) -> Parameter:
    key = key_of(raw.type)
    dtype = SCALAR_OF.get(key) or ELEMENT_OF.get(key, "struct")
    if raw.pointer or key in SCALAR_OF:
        return Parameter(raw.name, "p" if raw.pointer else "s", dtype, raw.const, type=raw.type)
    layout = structs.dtype_of_struct(code, raw.type) if dtype == "struct" else None
    vector = vector_of(raw.type)
    size = layout.itemsize if layout is not None else vector[0].itemsize * vector[1] if vector else 0
    return Parameter(raw.name, "S", dtype, raw.const, size, raw.type, layout)


def sizes_of(what: str, sizes: Any) -> tuple[int, ...]:
    """Return the sizes of a launch's grid or block as Python ints.

    Raises:
        TypeError: they are not one to three whole numbers in a tuple; the message says what to write.
    """
    whole = (int, np.integer)
    if isinstance(sizes, whole) and not isinstance(sizes, bool):
        raise TypeError(f"{what} is the number {sizes}: expected a tuple of one to three sizes; write ({sizes},)")
    if not isinstance(sizes, (tuple, list)):
        raise TypeError(
            f"{what} is {sizes!r:.60}, a {type(sizes).__name__}: expected a tuple of one to three whole numbers"
            f"{_ROUND_UP if isinstance(sizes, (float, np.floating)) else ', such as (128,)'}"
        )
    if not 1 <= len(sizes) <= 3:
        raise TypeError(f"{what} is {tuple(sizes)!r:.60}: expected a tuple of one to three sizes, such as (128,)")
    for size in sizes:
        if not isinstance(size, whole) or isinstance(size, bool):
            raise TypeError(
                f"{what} holds {size!r:.60}, a {type(size).__name__}: expected whole numbers"
                f"{_ROUND_UP if isinstance(size, (float, np.floating)) else ''}"
            )
    return tuple(map(int, sizes))


_ROUND_UP = "; // divides to a whole number, and -(-n // size) rounds up"


def check_all(kernel: str, parameters: Sequence[Parameter], args: Any, array_type: Any, contiguous: bool) -> None:
    """Refuse arguments that the kernel would misread.

    Args:
        kernel: its name, for messages.
        args: the arguments of a launch.
        array_type: the class of device arrays.
        contiguous: refuse a view with gaps (a kernel sees a pointer, never the strides).

    Raises:
        TypeError: wrong count, dtype or kind of argument.
        ValueError: a view that is not C-contiguous.
    """
    if not isinstance(args, (tuple, list)) or len(args) != len(parameters):
        raise _count_error(kernel, parameters, args)
    for index, (parameter, value) in enumerate(zip(parameters, args, strict=True)):
        if parameter.kind == "s":
            known = type(value) is parameter.scalar
        elif parameter.kind == "p":
            known = value is None or (isinstance(value, array_type) and value.dtype in parameter.accepted)
            known = known and (not contiguous or value is None or value.flags.c_contiguous)
        else:
            known = type(value) is np.ndarray and value.size == 1 and value.dtype in parameter.accepted
        if not known:
            _check(_Argument(index, parameter, kernel), value, array_type, contiguous)


class _Argument(NamedTuple):
    """One argument of a launch, for messages: they begin with its text, which is made when there is an error."""

    index: int
    parameter: Parameter
    kernel: str

    def __str__(self) -> str:
        return f"argument {self.index} ({self.parameter}) of {self.kernel}"


def _count_error(kernel: str, parameters: Sequence[Parameter], args: Any) -> TypeError:
    signature = f"{kernel}({', '.join(map(str, parameters))})"
    if not isinstance(args, (tuple, list)):
        one = "; for one argument, write (x,), with the comma" if len(parameters) == 1 else ""
        return TypeError(
            f"args is of type {type(args).__name__}: expected a tuple with one value for each parameter of "
            f"{signature}{one}"
        )
    missing = ", ".join(map(str, parameters[len(args) :]))
    return TypeError(
        f"{kernel} takes {len(parameters)} arguments, got {len(args)}{f': missing {missing}' if missing else ''}. "
        f"(CuPy does not count them: the kernel would read garbage.) The signature is {signature}"
    )


def _check(where: _Argument, value: Any, array_type: Any, contiguous: bool) -> None:
    """Apply the rules to one argument, and note the dtype of an array or a struct that they accept."""
    parameter = where.parameter
    _check_byte_order(where, value)
    if parameter.kind == "p":
        _check_pointer(where, value, array_type, contiguous)
        if isinstance(value, array_type):
            parameter.accepted.add(value.dtype)
    elif parameter.kind == "s":
        _check_scalar(where, value, array_type)
    else:
        if parameter.type and parameter.size:  # else nothing is known, as for a typedef: the engine compares sizes
            _check_struct(where, value, array_type)
        if isinstance(value, np.ndarray):
            parameter.accepted.add(value.dtype)


def _check_pointer(where: _Argument, value: Any, array_type: Any, contiguous: bool) -> None:
    parameter = where.parameter
    if value is None or is_address(value):
        return
    if not isinstance(value, array_type):
        if isinstance(value, np.ndarray):
            raise TypeError(f"{where} is a NumPy array: expected a device array; write cp.asarray(...)")
        hint = "; write cp.asarray(...)" if isinstance(value, (list, tuple)) else ""
        raise TypeError(f"{where}: expected a device array; got {type(value).__name__} {value!r:.60}{hint}")
    if not _may_read(parameter, value.dtype):
        dtype = dtype_of(parameter.dtype)
        name = "ml_dtypes.bfloat16" if dtype.name == "bfloat16" else f"cp.{dtype.name}"
        same_bits = value.dtype.itemsize == dtype.itemsize or parameter.is_vector
        bits = f", where its values are meant, or array.view({name}), where its bits are" if same_bits else ""
        reads = f"{dtype.name} (its type is {parameter.type})" if parameter.is_vector and parameter.type else dtype.name
        raise TypeError(
            f"{where}: the array's dtype is {value.dtype.name}, the kernel reads {reads}; "
            f"give it array.astype({name}){bits}"
        )
    if contiguous and not value.flags.c_contiguous:
        raise ValueError(
            f"{where} is a view with gaps (shape {value.shape}, strides {value.strides} bytes); a kernel gets only its "
            "pointer and would read the wrong elements; write cp.ascontiguousarray(...)"
        )


def is_address(value: Any) -> bool:
    """Return True if a value is an address of 8 bytes, such as `array.data.ptr`, or 0; small numbers are mistakes."""
    is_number = isinstance(value, (int, np.int64, np.uint64)) and not isinstance(value, bool)
    return hasattr(value, "ptr") or (is_number and (int(value) == 0 or int(value) >= 1 << 16))


def _check_byte_order(where: _Argument, value: Any) -> None:
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, np.dtype) and not dtype.isnative:
        raise TypeError(
            f"{where}: the bytes of its numbers ({dtype}) are in the order of other machines, and a device would "
            "read them in its own; write cp.asarray(...) of NumPy's array, which converts"
        )


def _may_read(parameter: Parameter, given: np.dtype) -> bool:
    """Return True if a kernel that reads the parameter's type may be given an array of another dtype.

    Accepted are dtypes whose bits keep their meaning: vectors move any contents, bytes (arrays of uint8, a kernel's
    char*) hold anything, 16 bits may be a half-precision number, and integers may differ in sign or be truth values.
    Refused are numbers that would be read as other numbers, and NumPy's 8-byte defaults where the kernel reads 4 bytes:
    on a GPU both go wrong silently.
    """
    if parameter.dtype in ("void", "struct") or given == np.dtype("V1"):
        return True
    reads, size = dtype_of(parameter.dtype), parameter.target_size
    if given == reads:
        return True
    if parameter.is_vector:
        is_default = given.name in ("float64", "int64") and given.kind == reads.kind and given.itemsize > reads.itemsize
        return not is_default and size % given.itemsize == 0
    if given.name == "uint8" or parameter.type == "char":  # what a source calls char are bytes of anything
        return True
    if given.itemsize != reads.itemsize:
        return False
    integers, halves = "iub", ("float16", "bfloat16")
    if given.kind in integers:
        return reads.kind in integers or reads.name in halves
    return given.name in halves and reads.kind in integers


def _check_scalar(where: _Argument, value: Any, array_type: type) -> None:
    dtype = dtype_of(where.parameter.dtype)
    if isinstance(value, array_type) and not isinstance(value, np.generic):
        raise TypeError(
            f"{where} is a scalar, and of a device array, also of one without axes, CuPy passes the address: write "
            f"cp.{dtype.name}(...) of its value, which float(x) or int(x) brings to the host"
        )
    if isinstance(value, (bool, np.bool_)):
        got = "bool"
    elif isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        got = value.dtype.name
    elif isinstance(value, int):
        got = "Python int"
    elif isinstance(value, float):
        got = "Python float"
    else:
        raise TypeError(f"{where} is a scalar; got {type(value).__name__} {value!r:.60}; write cp.{dtype.name}(...)")
    if got in ("Python int", "int64", "uint64") and dtype.kind in "iu":  # of the 8 bytes that are passed, the low ones
        limits = np.iinfo(dtype)
        if not limits.min <= value <= limits.max:
            raise TypeError(f"{where}: {value} does not fit {dtype.name}")
        return
    if got == dtype.name or (got == "Python float" and dtype == np.float64):
        return
    passed = {"Python float": " (CuPy passes a Python float as 8 bytes of float64: the kernel would read garbage)"}
    passed["Python int"] = " (CuPy passes a Python int as int64: the kernel would read garbage)"
    shown = value.item() if isinstance(value, (np.generic, np.ndarray)) else value
    if dtype.kind in "iu" and isinstance(shown, float) and shown.is_integer():
        shown = int(shown)
    article = "an" if got[0] in "ai" else "a"
    raise TypeError(f"{where} got {article} {got}{passed.get(got, '')}; write cp.{dtype.name}({shown!r:.40})")


def _check_struct(where: _Argument, value: Any, array_type: type) -> None:
    parameter, wrong = where.parameter, None
    if isinstance(value, array_type):
        wrong = "of a device array a kernel gets the address"
    elif not isinstance(value, np.ndarray):  # nor a NumPy scalar: CuPy passes those of 1, 2, 4, 8 and 16 bytes only
        wrong = f"got {type(value).__name__} {value!r:.60}"
    elif value.size != 1:
        wrong = f"got one of shape {value.shape}"
    if wrong is not None:
        raise TypeError(
            f"{where} is a struct of {parameter.size} bytes by value: give it a NumPy array of size 1 with its fields; "
            f"{wrong}"
        )
    if parameter.layout is not None:
        difference = structs.difference(parameter.layout, value.dtype)
        if difference:
            raise TypeError(
                f"{where}: the array's dtype is not the struct of the source: {difference}. "
                "Write np.dtype([...], align=True) with the struct's fields in their order"
            )
    elif value.nbytes != parameter.size:
        raise TypeError(
            f"{where} is a struct of {parameter.size} bytes; got {type(value).__name__} of {value.nbytes} bytes"
        )
