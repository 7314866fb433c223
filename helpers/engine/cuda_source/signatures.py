"""Check a kernel's arguments against its signature, with the words a learner needs.

Used by the engine's own launches, where the compiler gives the signature, and by typed launches on a GPU, where it is
read from the source: CuPy itself checks neither the count nor the types of what it passes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import source, structs
from .c_types import ELEMENT_OF, SCALAR_OF, dtype_of, key_of, vector_of


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel: kind 'p' pointer, 's' scalar, 'S' struct by value.

    dtype is NumPy's name, of vectors that of an element, "void" for void*, or "struct" for a type of which only the
    size (0: not even that) is known. size: of what a pointer points to, too, where the compiler has told it.
    type: what the source calls a struct or a vector. layout: its fields, where the source declares it and it is plain.
    """

    name: str
    kind: str
    dtype: str
    is_const: bool = False
    size: int = 0
    type: str = ""
    layout: np.dtype | None = None

    @property
    def target_size(self) -> int:
        """Bytes of what a pointer to numbers points to: of one number, or of a vector such as float4."""
        vector = vector_of(self.type)
        return self.size or (vector[0].itemsize * vector[1] if vector else dtype_of(self.dtype).itemsize)

    @property
    def is_vector(self) -> bool:
        """Whether it points to vectors of numbers."""
        return (
            self.kind == "p"
            and self.dtype not in ("void", "struct")
            and (self.target_size > dtype_of(self.dtype).itemsize)
        )

    def __str__(self) -> str:
        kind = self.type if self.type and (self.dtype == "struct" or self.is_vector) else self.dtype
        return f"{'const ' if self.is_const else ''}{kind}{'*' if self.kind == 'p' else ''} {self.name}".strip()


def from_source(code: str, name: str) -> list[Parameter] | None:
    """The parameters of the kernel as its source spells them; None where the source has no kernel of that name."""
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
    """The sizes of a launch's grid or block as whole numbers.

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
        one = "; for one argument, write (x,), with the comma" if len(parameters) == 1 else ""
        raise TypeError(
            f"args is of type {type(args).__name__}: expected a tuple with one value for each parameter of "
            f"{signature}{one}"
        )
    if len(args) != len(parameters):
        missing = ", ".join(str(p) for p in parameters[len(args) :])
        raise TypeError(
            f"{kernel} takes {len(parameters)} arguments, got {len(args)}{f': missing {missing}' if missing else ''}. "
            f"(CuPy does not count them: the kernel would read garbage.) The signature is {signature}"
        )
    for index, (parameter, value) in enumerate(zip(parameters, args, strict=True)):
        where = f"argument {index} ({parameter}) of {kernel}"
        _check_byte_order(where, value)
        if parameter.kind == "p":
            _check_pointer(where, parameter, value, array_type, contiguous)
        elif parameter.kind == "s":
            _check_scalar(where, parameter, value, array_type)
        elif parameter.type and parameter.size:  # else nothing is known, as of a typedef: the engine compares sizes
            _check_struct(where, parameter, value, array_type)


def _check_pointer(where: str, parameter: Parameter, value: Any, array_type: Any, contiguous: bool) -> None:
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
    """A pointer as a number of 8 bytes, such as `array.data.ptr`, or 0; other small ones are in the wrong place."""
    is_number = isinstance(value, (int, np.int64, np.uint64)) and not isinstance(value, bool)
    return hasattr(value, "ptr") or (is_number and (int(value) == 0 or int(value) >= 1 << 16))


def _check_byte_order(where: str, value: Any) -> None:
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, np.dtype) and not dtype.isnative:
        raise TypeError(
            f"{where}: the bytes of its numbers ({dtype}) are in the order of other machines, and a device would "
            "read them in its own; write cp.asarray(...) of NumPy's array, which converts"
        )


def _may_read(parameter: Parameter, given: np.dtype) -> bool:
    """Whether a kernel that reads elements of the parameter's type may be given an array of that dtype.

    What is let through reads the array's values, or bits that were meant as such: vectors move whatever they hold,
    bytes are room for anything, 16 bits may be a half number, and of an integer neither its sign nor whether it is
    called a truth value matters. What is not is a number taken for another one: that, and NumPy's defaults of 8 bytes
    where the kernel reads 4, is what goes wrong in silence on a GPU.
    """
    if parameter.dtype in ("void", "struct") or given == np.dtype("V1"):
        return True
    reads, size = dtype_of(parameter.dtype), parameter.target_size
    if given == reads:
        return True
    if parameter.is_vector:
        is_default = given.name in ("float64", "int64") and given.kind == reads.kind and given.itemsize > reads.itemsize
        return not is_default and size % given.itemsize == 0
    if given.name == "uint8":
        return True
    if given.itemsize != reads.itemsize:
        return False
    integers, halves = "iub", ("float16", "bfloat16")
    if given.kind in integers:
        return reads.kind in integers or reads.name in halves
    return given.name in halves and reads.kind in integers


def _check_scalar(where: str, parameter: Parameter, value: Any, array_type: type) -> None:
    dtype = dtype_of(parameter.dtype)
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


def _check_struct(where: str, parameter: Parameter, value: Any, array_type: type) -> None:
    expected = (
        f"{where} is a struct of {parameter.size} bytes by value: give it a NumPy array of size 1 with its fields"
    )
    if isinstance(value, array_type):
        raise TypeError(f"{expected}; of a device array a kernel gets the address")
    if not isinstance(value, np.ndarray):  # a NumPy scalar neither: CuPy passes those of 1, 2, 4, 8 and 16 bytes only
        raise TypeError(f"{expected}; got {type(value).__name__} {value!r:.60}")
    if value.size != 1:
        raise TypeError(f"{expected}; got one of shape {value.shape}")
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
