"""The variables of a module that outlive a launch: `__device__`, `__constant__`, and statics of functions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .cuda_source.source import blank_comments
from .symbols import Table, plain_name


@dataclass(frozen=True)
class Variable:
    """One variable. offset: in the library. is_constant: it is `__constant__`, so kernels must not write it."""

    name: str
    offset: int
    size: int
    is_constant: bool


def of_module(symbols: Table, code: str) -> list[Variable]:
    """Return the source's writable variables, without those of the engine or a compiler.

    Constants with values known to the compiler are not variables: they have no memory.
    """
    clean = blank_comments(code)
    variables = []
    for symbol in symbols.symbols:
        if not symbol.is_variable or not symbol.is_writable or not symbol.size:
            continue
        name = plain_name(symbol.name)
        if symbol.name.startswith(("_ZGV", "_ZN6engine")) or not re.search(rf"\b{re.escape(name)}\b", clean):
            continue
        is_constant = re.search(rf"\b__constant__\b[^;{{}}]*\b{re.escape(name)}\b", clean) is not None
        variables.append(Variable(name, symbol.value, symbol.size, is_constant))
    return variables
