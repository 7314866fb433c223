"""Inline PTX for a host compiler: asm statements become calls of functions in `include/ptx_instructions.h`.

    asm volatile("cp.async.wait_group %0;" :: "n"(1) : "memory");

becomes a statement of C++ on the same line. Each operand is evaluated once, in the order of the statement. An unknown
instruction becomes a failure of the thread that reaches it, with its line.

`reading` takes a statement apart, `statement` puts it together again; `use` is one instruction with its operands. The
instructions are in `memory`, `arithmetic`, `conversion`, `control`, `warp`, `matrix`, `mbarriers` and `warpgroup`.
"""

from __future__ import annotations

from . import arithmetic, control, conversion, matrix, mbarriers, memory, warp, warpgroup  # noqa: F401  (each tells `use`)
from .reading import Unreadable, raw_strings, statements
from .statement import rewrite
from .use import known

__all__ = ["Unreadable", "known", "raw_strings", "rewrite", "statements"]
