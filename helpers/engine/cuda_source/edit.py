"""Edit the text of a kernel for an experiment, and raise an error if the expected text is not there."""

from __future__ import annotations

import bisect
import difflib
import functools
import itertools
import re

# A string, which is kept, or a comment: alone on its line it takes the line with it, behind code the spaces before it.
_COMMENT = re.compile(
    r'"(?:\\.|[^"\\\n])*"|(?P<comment>^[ \t]*//[^\n]*\n|[ \t]*//[^\n]*|[ \t]*/\*.*?\*/)', re.MULTILINE | re.DOTALL
)


def edit(text: str, *changes: tuple[str, str], count: int = 1, only: int | None = None) -> str:
    """Make each change (old, new) in the text, one after the other.

    Comments are not looked at: `old` is code alone, and is found although a comment stands inside or behind it. Nor are
    line breaks and spaces between its tokens, so that a pattern outlives a change of the line length; those at its ends
    count. What is replaced is the text from its first character to its last, comments in between included.

    Args:
        count: how often each `old` is there; all of them are replaced.
        only: replace the one with this number alone, counted from 0.

    Raises:
        ValueError: an `old` that is not there exactly `count` times, with the nearest line of the text; an empty one;
            one with a comment.
    """
    for old, new in changes:
        if "//" in old or "/*" in old or not old.strip():
            raise ValueError(f"{old!r}: a pattern is code, without a comment")
        code, begins, places = _code(text)
        hits = _hits(code, old)
        if len(hits) != count:
            times = "once" if count == 1 else f"{count} times"
            wrong = f"is there {len(hits)} times, and not {times}" if hits else "is not there"
            raise ValueError(f"{old!r} {wrong}; the nearest line: {_nearest(old, code)!r}")
        for hit in reversed(hits if only is None else [hits[only]]):
            first, last = (
                places[piece] + at - begins[piece]
                for at in (hit.start(), hit.end() - 1)
                for piece in (bisect.bisect(begins, at) - 1,)
            )
            text = text[:first] + new + text[last + 1 :]
    return text


@functools.lru_cache(maxsize=32)  # many changes are of one text
def _code(text: str) -> tuple[str, list[int], list[int]]:
    """Return what is outside comments, where each piece of it begins there, and where it begins in the text."""
    ends = [(match.start(), match.end()) for match in _COMMENT.finditer(text) if match["comment"]]
    places = [0, *(end for _, end in ends)]
    pieces = [text[begin:end] for begin, end in zip(places, [*(begin for begin, _ in ends), len(text)], strict=True)]
    return "".join(pieces), [0, *itertools.accumulate(map(len, pieces[:-1]))], places


def _hits(code: str, old: str) -> list[re.Match[str]]:
    core = old.strip()
    before, after = (re.escape(end) for end in old.split(core, 1))
    tokens = [re.escape(token) for token in re.findall(r"\w+|[^\w\s]", core)]
    pattern = tokens[0]
    for left, right in itertools.pairwise(tokens):
        pattern += (r"\s+" if re.match(r"\w", left[-1]) and re.match(r"\w", right) else r"\s*") + right
    return list(re.finditer(before + pattern + after, code))


def _nearest(old: str, code: str) -> str:
    """Find the line of the code that is most like the first line of `old` that the code lacks."""
    lines = [line.strip() for line in code.splitlines() if line.strip()]
    wanted = [line.strip() for line in old.splitlines() if line.strip()]
    missing = next((line for line in wanted if not any(line in other for other in lines)), wanted[0])
    return (difflib.get_close_matches(missing, lines, n=1, cutoff=0.0) or [""])[0]
