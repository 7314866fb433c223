"""Tell from the source whether a thread that missed a barrier may have returned before it."""

from __future__ import annotations

import re

from .cuda_source.source import blank_comments
from .locals import Text
from .messages import SOURCE_NAME
from .translate import function_bodies

_END = re.compile(r"\breturn\b|\bexit\b|\basm\b|\b__trap\b|\bgoto\b")
_HIDDEN = re.compile(r'#[ \t]*include[ \t]*"|#[ \t]*define\b(?:\\\n|[^\n])*\b(?:return|exit|asm|goto)\b')


def may_come_before(code: str, kernel: str, place: tuple[str, int]) -> bool:
    """Return True if a thread may return before it reaches a place, or reaches it again in a loop.

    True also if the text does not tell. If the result is False, an `if` or a loop led the thread around the barrier.

    Args:
        kernel: its name; a template's may have its arguments.
    """
    clean = blank_comments(code)
    line = Text(code, SOURCE_NAME).lines.get(place)
    if line is None or _HIDDEN.search(clean):
        return True
    at, end = line[0], line[0] + len(line[1])
    name = re.sub(r"<.*", "", kernel, flags=re.S).split("::")[-1].strip()
    own = [body for body in function_bodies(clean) if re.search(rf"\b__global__\b.*\b{name}\s*\(", body[2], re.S)]
    around = [body for body in function_bodies(clean) if body[0] < end and at <= body[1]]
    if len(own) != 1 or not around:
        return True
    before = clean[own[0][0] : own[0][1]], *(clean[body[0] : end] for body in around if body != own[0])
    return any(_END.search(text) for text in before)
