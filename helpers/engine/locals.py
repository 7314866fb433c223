"""Tell from the text at the place of an index which arrays of a source are a thread's own."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable
from pathlib import Path

from .cuda_source.source import blank_comments, matching_bracket

_LINE = re.compile(r'\s*#\s*line\s+(\d+)(?:\s+"([^"]*)")?')
_DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.M)
_OPENING = {")": "(", "]": "[", "}": "{"}

# The text before the first name of a declaration: specifiers, and a type with its template arguments.
_TYPE = r"(?:[A-Za-z_][\w:]*(?:<>)?[\s*&]+)*[A-Za-z_][\w:]*(?:<>)?[\s*&]+"
_ONLY = re.compile(rf"\s*{_TYPE}")
_FIRST_OF_MORE = re.compile(rf"\s*{_TYPE}[A-Za-z_]\w*\s*(?:=.*)?", re.S)
_NO_TYPE = re.compile(
    r"\b(?:return|else|extern|new|delete|throw|goto|case|typedef|using|sizeof|if|while|for|switch|do|operator)\b|="
)
_ELSEWHERE = re.compile(r"\b__(?:shared|device|constant|managed)__\b")  # never in a thread's registers


class OwnArrays:
    """The arrays of a source that each thread has for itself, and constants that the compiler keeps.

    Args:
        text: the compiler's input; its #line directives name the source's own lines.
        others: names with an address that the checker sees: `__shared__` arrays, variables, parameters.
    """

    def __init__(self, text: str, others: Iterable[str]) -> None:
        self._text, self._others = Text(text, ""), set(others)

    def has(self, file: str, line: int) -> bool:
        """Return True for a line of the source, or of a user's header."""
        return (file, line) in self._text.lines or (file, line) in _header(file).lines

    def name_at(self, file: str, line: int, column: int, elements: str) -> str | None:
        """Return the name of the array that is indexed there; None if no thread owns it.

        g++ gives the column of the closing bracket, in templates that of the opening one, in macros that of the
        macro's name; clang gives that of the array's first letter. All count from 1.

        Args:
            elements: how many the array has.
        """
        text = self._text if (file, line) in self._text.lines else _header(file)
        begin, code = text.lines.get((file, line), (0, ""))
        at = column - 1
        if not 0 <= at < len(code):
            return None
        if code[at] in "[]":
            chains = [_chain(code, at if code[at] == "[" else _opening(code, at))]
        else:
            here = re.match(r"\w+(?:(?:\.|->)\w+)*", code[at:])
            inside = text.macro_at(begin + at)
            opened = re.finditer(r"\[", inside)
            chains = [_chain(inside, o.start()) for o in opened] or [re.split(r"\.|->", here[0]) if here else []]
        names = {chain[-1] for chain in chains if chain and self._is_own(chain, text, begin + at, elements)}
        return names.pop() if len(names) == 1 else None

    def _is_own(self, chain: list[str], text: Text, at: int, elements: str) -> bool:
        *bases, name = chain
        declared = text.declarations(name)
        if not declared or (bases and bases[0] in self._others):
            return False
        if name in self._others and len(declared) == 1 and not bases:
            return False
        before = [is_own for place, is_own in declared if place < at]
        # An array of one element, or of none, may extend as far as its struct's memory does.
        return (before[-1] if before else declared[0][1]) and elements not in ("0", "1")


def declares_arrays(code: str) -> bool:
    """Return True if a source declares an array that each thread has for itself."""
    text = Text(code, "")
    names = dict.fromkeys(re.findall(r"\b([A-Za-z_]\w*)\s*\)?\s*\[", blank_comments(code)))
    return any(is_own for name in names for _, is_own in text.declarations(name))


class Text:
    """A text, its lines by the names and numbers that compilers report, and what it declares."""

    def __init__(self, text: str, file: str) -> None:
        self._text = text
        self.lines: dict[tuple[str, int], tuple[int, str]] = {}
        number, at = 1, 0
        for line in text.splitlines(keepends=True):
            if directive := _LINE.match(line):
                number, file = int(directive[1]), directive[2] or file
            else:
                self.lines[file, number] = at, line
                number += 1
            at += len(line)

    @functools.cached_property
    def _clean(self) -> str:
        """The text without comments and directives; all other characters keep their places."""
        return _DIRECTIVE.sub(lambda line: re.sub(r"[^\n]", ";", line[0]), blank_comments(self._text))

    def macro_at(self, at: int) -> str:
        """Return the expansion of the macro whose name begins there, arguments substituted; "" if there is none."""
        name = re.compile(r"\w*").match(self._text, at)[0]
        define = re.search(
            rf"^[ \t]*#[ \t]*define[ \t]+{name}\b(\([^)]*\))?((?:\\\n|[^\n])*)", blank_comments(self._text), re.M
        )
        if not name or define is None:
            return ""
        body, parameters, end = define[2], re.findall(r"\w+", define[1] or ""), at + len(name)
        closing = matching_bracket(self._text, end) if self._text[end : end + 1] == "(" else -1
        arguments = (
            dict(zip(parameters, _at_commas(self._text[end + 1 : closing]), strict=False)) if closing > 0 else {}
        )
        return re.sub(r"\w+", lambda word: arguments.get(word[0], word[0]), body)

    @functools.cache  # noqa: B019 (as long as one look at findings)
    def declarations(self, name: str) -> list[tuple[int, bool]]:
        """Yield where the text declares an array with that name, and whether each thread has its own."""
        found = []
        for match in re.finditer(rf"\b{name}\s*\[|\(\s*&\s*{name}\s*\)\s*\[", self._clean):
            head = _head(self._clean, match.start())
            if match[0][0] == "(" or _declares(head):
                found.append((match.start(), _ELSEWHERE.search(head) is None))
        return found


@functools.lru_cache(maxsize=8)
def _header(file: str) -> Text:
    """Return the text of a user's header that the source includes from the current folder."""
    path = Path(os.path.abspath(file))
    if not path.is_relative_to(os.getcwd()) or not path.is_file():
        return Text("", file)
    return Text(path.read_text(errors="replace"), file)


def _opening(text: str, closing: int) -> int:
    """Return the index of the opening bracket that matches the one at `closing`; 0 if there is none."""
    depth = 0
    for at in range(closing, -1, -1):
        depth += (text[at] in _OPENING) - (text[at] in "([{")
        if depth == 0:
            return at
    return 0


def _chain(text: str, end: int) -> list[str]:
    """Return the names from an object to its member, before an index: `tile` and `row` of `tile.row[j]`.

    [] if there is none; the base is left out if it is a call's result.
    """
    names: list[str] = []
    while True:
        text = text[:end].rstrip()
        while text.endswith("]"):
            text = text[: _opening(text, len(text) - 1)].rstrip()
        if text.endswith(")"):
            opening = _opening(text, len(text) - 1)
            if not re.search(r"\w\s*$", text[:opening]):  # (*tile).row
                names = [*re.findall(r"[A-Za-z_]\w*", text[opening:]), *names]
            return names
        word = re.search(r"[A-Za-z_]\w*$", text)
        if word is None:
            return names
        names.insert(0, word[0])
        before = text[: word.start()].rstrip()
        if not before.endswith((".", "->")):
            return names
        end = len(before) - (2 if before.endswith("->") else 1)


def _head(clean: str, at: int) -> str:
    """Return the statement's text before a place, without the contents of brackets; "" within an open bracket."""
    pieces, end = [], at
    while at > 0:
        char = clean[at - 1]
        if char in "([":
            return "" if clean[: at - 1].rstrip()[-3:] != "for" else "".join([clean[at:end], *pieces])
        if char in ";{" or (char == "}" and not re.match(r"\s*,", clean[at:])):
            break
        if char == ":" and "::" not in clean[max(0, at - 2) : at + 1]:
            break
        at -= 1
        if char in _OPENING:
            opening = _opening(clean, at)
            pieces.insert(0, clean[at + 1 : end])
            at = end = opening
    return "".join([clean[at:end], *pieces])


def _declares(head: str) -> bool:
    """Return True if the next name is a declaration's: after `float x = 1, ` or `const T<4> *`, not after `return `."""
    while (shorter := re.sub(r"<[^<>]*>", "\0", head)) != head:
        head = shorter
    *before, last = _at_commas(re.sub("\0+", "<>", head))
    first = before[0] if before else last
    if _NO_TYPE.search(first.partition("=")[0] if before else first):
        return False
    if not before:
        return _ONLY.fullmatch(last) is not None
    return _FIRST_OF_MORE.fullmatch(first) is not None and re.fullmatch(r"[\s*&]*", last) is not None


def _at_commas(text: str) -> list[str]:
    """Split a text at the commas outside brackets."""
    parts, depth, begin = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(text[begin:at])
            begin = at + 1
    return [*parts, text[begin:]]
