"""Attention: the ladder of kernels, loading, checking and calling them, and the entry points for models.

    from helpers.attention import flash_attention

An entry point is imported at its first use, so that `reference` alone needs only NumPy.
"""

from __future__ import annotations

import importlib
from typing import Any

_ENTRY_POINTS = {
    **dict.fromkeys(("flash_attention", "flash_attention_backward"), "calls"),
    **dict.fromkeys(("flash_attention_varlen", "flash_attention_varlen_backward"), "calls"),
    "forget": "run",
    "flash_attention_with_kvcache": "decoding",
    **dict.fromkeys(("ring_attention", "ring_attention_backward"), "ring"),
    "make_block_mask": "ladder.score_mod",
    "warm_up": "warming",
}


def __getattr__(name: str) -> Any:
    if name in _ENTRY_POINTS:
        return getattr(importlib.import_module(f"helpers.attention.{_ENTRY_POINTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ENTRY_POINTS})
