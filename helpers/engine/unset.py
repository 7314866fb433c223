"""Find local variables that are read without having been given a value.

A local variable is in a register, so no access of it can be observed. But a compiler can fill each variable without a
value with a chosen one: if the results of two fill values differ beyond rounding, a variable was read uninitialised.

A build costs more than a run. So the first build fills with a pattern that no kernel expects, and its result is
compared with that of the checked run. The two builds may also round differently; only if they differ does a third
build, which differs from the second in the fill value alone, decide.

These builds also compare each index with the size of its array, if its type has one: see engine/checker_local.cpp.

A variable whose value makes no difference, such as an operand of a maximum, is not found. One that is multiplied by 0
is, because the pattern is NaN for floats.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from . import compiler, runtime
from .copies import Copies
from .cuda_source.source import blank_comments
from .launch import CompiledKernel
from .locals import declares_arrays
from .structures import Failure

# A declaration whose variables, or some of them, have no value: `float acc[N];`, `int i, j = 0;`, `Fragment<half> f;`.
_UNSET = re.compile(
    r"[;{}]\s*(?!(?:return|extern|goto|typedef|using|static|struct|class|union|template|break|continue|asm)\b)"
    r"(?![^;{}]*\b__shared__)(?:[A-Za-z_][\w:]*(?:\s*<[^;{}]*>)?[\s*]+)+[A-Za-z_]\w*\s*(?:\[[^;{}]*\]\s*)*(?:,[^;(){}]*)?;"
)


@dataclass(frozen=True)
class Difference:
    """A difference of two launches: memory (the number of the array's region) and the byte in it; or how one failed."""

    memory: int | None
    offset: int
    failure: Failure | None


_HEADER = re.compile(r'#\s*include\s*"')
_ARRAY_TYPE = re.compile(r"\b(?:typedef\b|using\b[^;{}=]*=)[^;{}]*\]\s*;")


@functools.lru_cache(maxsize=64)
def has_candidates(code: str) -> bool:
    """Return True if a source declares an array or a variable without a value, or includes a header that may."""
    clean = blank_comments(code)
    return any(pattern.search(clean) for pattern in (_UNSET, _HEADER, _ARRAY_TYPE)) or declares_arrays(code)


def find(
    build: Callable[[str], CompiledKernel],
    make_copies: Callable[[], Copies],
    checked: Copies,
    launch: Sequence,
    timeout: float,
    is_enough: Callable[[str], bool],
) -> Difference | None:
    """Find where the results depend on an uninitialised local variable; None if they do not.

    Args:
        build: compiles the kernel so that uninitialised locals begin with "pattern" or "zero", see `compiler.filling`.
        make_copies: copies the arrays as they were before the launch.
        checked: the arrays after the checked run. launch: its grid, block, args and shared_mem.
        timeout: seconds for each launch.
        is_enough: called after the first launch, with the compiled text: whether there is nothing else to look for.
    """
    pattern = build("pattern")

    def run(twin: CompiledKernel) -> tuple[Copies, Failure | None]:
        copies = make_copies()
        grid, block, args, shared_mem = launch
        prepared = twin.prepare(grid, block, args, shared_mem, copies.address)
        return copies, runtime.launch(prepared.request, workers=1, timeout=timeout).failure

    other, failure = run(pattern)
    if is_enough(compiler.compiled_text(pattern.library.path)) or (failure is None and _are_near(other, checked)):
        return None
    zero = build("zero")
    plain, plain_failure = run(zero)
    again, _ = run(zero)
    if plain_failure is not None or _first_difference(plain, again) is not None:
        return None  # it fails by itself, or reads a clock
    if failure is not None:
        return Difference(None, 0, failure)
    place = _first_difference(plain, other)
    return None if place is None else Difference(*place, None)


def _are_near(a: Copies, b: Copies) -> bool:
    """Return True if the results of two builds are equal up to rounding."""
    for mine, theirs in zip(a.memories, b.memories, strict=True):
        if not mine.writable:
            continue
        size = mine.size // mine.dtype.itemsize * mine.dtype.itemsize
        left, right = (np.frombuffer(ctypes.string_at(m.address, size), mine.dtype) for m in (mine, theirs))
        if mine.dtype.kind != "f":
            if left.tobytes() != right.tobytes():
                return False
            continue
        scale = np.nanmax(np.abs(left), initial=0.0, where=np.isfinite(left)) if left.size else 0.0
        # NaNs count as equal: compilers choose their bits.
        if not np.allclose(left, right, rtol=1e-3, atol=1e-3 * float(scale)):
            return False
    return True


def _first_difference(a: Copies, b: Copies) -> tuple[int, int] | None:
    for number, (mine, theirs) in enumerate(zip(a.memories, b.memories, strict=True)):
        left, right = (np.frombuffer(ctypes.string_at(m.address, m.size), np.uint8) for m in (mine, theirs))
        unequal = left != right
        if mine.dtype.kind == "f" and unequal.any():  # all NaNs are equivalent
            item, whole = mine.dtype.itemsize, mine.size // mine.dtype.itemsize * mine.dtype.itemsize
            nan = np.isnan(left[:whole].view(mine.dtype)) & np.isnan(right[:whole].view(mine.dtype))
            unequal[:whole] &= ~np.repeat(nan, item)
        different = np.flatnonzero(unequal)
        if different.size:
            return number, int(different[0])
    return None
