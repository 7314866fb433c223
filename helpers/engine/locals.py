"""Which arrays of a source are a thread's own, by what the text says where an index stands."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .cuda_source.source import blank_comments, line_table

# Names from one to its member: `fragment.x` of `fragment.x[i]`, `row` of `row[j][i]`.
_CHAIN = re.compile(r"[A-Za-z_]\w*(?:\s*(?:\.|->)\s*[A-Za-z_]\w*|\s*\[[^\[\]]*\])*\s*$")


class OwnArrays:
    """The arrays of a source that each thread has for itself, and constants that the compiler keeps.

    Args:
        others: names of what has an address for the checker to judge by: `__shared__` arrays, variables, parameters.
    """

    def __init__(self, code: str, file: str, others: Iterable[str]) -> None:
        self._lines = line_table(code, file)
        self._clean = blank_comments(code)
        self._others = set(others)

    def name_at(self, file: str, line: int, column: int) -> str | None:
        """The array that is indexed there, None where it is not a thread's own.

        g++ gives the column of the closing bracket, clang that of the array's first letter; both count from 1.
        """
        text = self._lines.get((file, line), "")
        if not 0 < column <= len(text):
            return None
        if text[column - 1] == "]":
            chain = _CHAIN.search(text[: self._opening(text, column - 1)])
            names = re.findall(r"[A-Za-z_]\w*(?![^\[]*\])", chain.group()) if chain else []
        else:
            names = re.findall(r"^[A-Za-z_]\w*(?:(?:\.|->)\w+)*", text[column - 1 :])
            names = re.split(r"\.|->", names[0]) if names else []
        if not names or names[0] in self._others or names[-1] in self._others or not self._is_declared(names[-1]):
            return None
        return names[-1]

    @staticmethod
    def _opening(text: str, closing: int) -> int:
        """Where the bracket is opened that is closed there."""
        depth = 0
        for at in range(closing, -1, -1):
            depth += (text[at] == "]") - (text[at] == "[")
            if depth == 0:
                return at
        return 0

    def _is_declared(self, name: str) -> bool:
        """Whether the source has `T name[n]` that is not shared, or a parameter `T (&name)[n]`."""
        if re.search(rf"\(\s*&\s*{name}\s*\)\s*\[", self._clean):
            return True
        matches = re.finditer(
            rf"(?:^|[;{{}}()])(?P<head>[^;{{}}()]*\w[\s*&>,][^;{{}}()]*?)\b{name}\s*\[[^;]*?[;={{]", self._clean
        )
        return any(not re.search(r"\b(__shared__|extern|return|else)\b|=", match["head"]) for match in matches)
