"""Attention: its kernels' ladder, how they are loaded, checked and called, and the entry points for models.

    from helpers.attention import flash_attention

The entry points are those of `calls`, which is imported when one of them is asked for: who wants `reference` alone
needs nothing but NumPy.
"""

from __future__ import annotations

from typing import Any

_ENTRY_POINTS = (
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_varlen",
    "flash_attention_varlen_backward",
    "forget",
    "warm_up",
)


def __getattr__(name: str) -> Any:
    if name in _ENTRY_POINTS:
        from helpers.attention import calls

        return getattr(calls, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ENTRY_POINTS})
