"""Spell a kernel's shifts and conversions so that they do what a GPU does where C++ leaves the result undefined.

A shift by the width or more clamps on a GPU, and a real number that does not fit an integer saturates. On a host, the
result depends on the processor and the compiler. C++ cannot redefine the operators of numbers, so names of
include/arithmetic.h are put between the source's tokens, such that each expression keeps its structure:

    a << b       a << ::engine_left << b
    (int)x       (int)(::engine_to<int>)x

A checked run reports what is left unchanged (in the user's own headers, or where the text alone does not decide) if it
matters: see engine/checker_notes.cpp. Line numbers stay the same.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import re
from collections.abc import Iterator

from .cuda_source.source import blank_comments, matching_bracket

Edit = tuple[int, int, str]  # begin, end, new text

LEFT, RIGHT = "::engine_left", "::engine_right"

_DIRECTIVE = re.compile(r"#[^\n\\]*(?:\\(?:\r?\n)?[^\n\\]*)*")

_WORD = r"(?:unsigned|signed|long|short|int|char)"
_FIXED = r"(?:std\s*::\s*)?(?:u?int(?:8|16|32|64)_t|size_t|ptrdiff_t|uintptr_t|intptr_t)|uint|uchar|ushort|ulong"
_INTEGER = rf"(?:{_WORD}(?:\s+{_WORD})*|{_FIXED})"
_BEFORE_A_CAST = {"return", "case", "else", "do"}  # words; any other before "(int)" makes it no cast
_NO_INTEGERS = {"void", "bool", "float", "double", "half", "__half", "half2", "__half2", "__nv_bfloat16", "dim3"}
_NO_OPERAND = {"const", "noexcept", "override", "final", "volatile", "__restrict__", "throw", "mutable"} | {"and", "or"}


class _Unpaired(Exception):
    """A piece of the source has a bracket whose partner is in another piece."""


def _last_word(clean: str, at: int) -> str:
    """Return the word or the character before an index, "" at the beginning."""
    end = at
    while end > 0 and clean[end - 1].isspace():
        end -= 1
    begin = end
    while begin > 0 and (clean[begin - 1].isalnum() or clean[begin - 1] == "_"):
        begin -= 1
    return clean[begin:end] or clean[end - 1 : end]


def _is_word(text: str) -> bool:
    return bool(re.match(r"\w", text))


def _hidden(clean: str) -> list[tuple[int, int]]:
    """Return the ranges that the preprocessor itself reads: directives, and the #define of what an #if tests."""
    lines = []
    at = clean.find("#")
    while at >= 0:
        begin = clean.rfind("\n", 0, at) + 1
        if clean[begin:at].strip(" \t"):
            at = clean.find("#", at + 1)
            continue
        end = _DIRECTIVE.match(clean, at).end()
        lines.append((begin, end))
        at = clean.find("#", end)
    asked = " ".join(clean[b:e] for b, e in lines if re.match(r"\s*#\s*(?:el)?if", clean[b:e]))
    names = set(re.findall(r"[A-Za-z_]\w*", asked))
    spans = []
    for begin, end in lines:
        define = re.match(r"\s*#\s*define\s+(\w+)", clean[begin:end])
        if define is None or define.group(1) in names:
            spans.append((begin, end))
    return spans


def _shifts(clean: str, *, is_piece: bool = False) -> Iterator[Edit]:
    """Yield each << and >> that is an operator.

    `>>` also closes two template lists. It is taken for that wherever two `<` after names are open beside it: of a real
    shift in such a place, the text stays as it is.
    """
    open_angles = [0]
    for token in re.finditer(r"<<<|>>>|<<=|>>=|<<|>>|<=|>=|->|<|>|[()\[\]{};]", clean):
        text, at = token.group(), token.start()
        if text in ("(", "[", "{"):
            open_angles.append(0)
        elif text in (")", "]", "}"):
            if is_piece and text != "}" and len(open_angles) == 1:
                raise _Unpaired
            open_angles[1:] = open_angles[1:-1]
            if text == "}":
                open_angles[-1] = 0
        elif text == ";":
            open_angles[-1] = 0
        elif text == "<":
            open_angles[-1] += _is_word(_last_word(clean, at))
        elif text == ">":
            open_angles[-1] = max(0, open_angles[-1] - 1)
        elif text in ("<<", "<<=", ">>", ">>="):
            before = _last_word(clean, at)
            if before == "operator" or not (_is_word(before) or before in (")", "]", '"', "'")):
                continue
            if text[0] == ">" and open_angles[-1] >= 2:
                open_angles[-1] -= 2
                continue
            name = LEFT if text[0] == "<" else RIGHT
            yield token.end(), token.end(), f" {name} =" if text.endswith("=") else f" {name} {text}"


@functools.lru_cache(maxsize=1024)  # pieces
def _type_names(clean: str) -> frozenset[str]:
    """Return the names that a text gives to types which may be integers."""
    names = set(re.findall(r"\b(?:typename|class)\s+(\w+)\s*(?=[,>=])", clean))
    names |= set(re.findall(r"\busing\s+(\w+)\s*=", clean))
    return frozenset(names | set(re.findall(rf"\btypedef\s+{_INTEGER}\s+(\w+)\s*;", clean)))


def _casts(clean: str, names: frozenset[str], *, is_piece: bool = False) -> Iterator[Edit]:
    # A pattern of types that may be integers: the language's, and names of types as the source shows them.
    types = "|".join([_INTEGER, *sorted(names, key=lambda name: (-len(name), name))])
    # Of a name that is not known: only a cast may stand right before a name or a number.
    name = rf"(?:((?:const\s+)?(?:{types}))|([A-Za-z_]\w*))"
    for match in re.finditer(rf"\(\s*{name}\s*\)(?=\s*([\w(~!+*&-]|\.\d)(.?))", clean):
        before, operator = _last_word(clean, match.start()), match.group(1)
        operand = re.compile(r"\s*(\w*)").match(clean, match.end()).group(1)
        if operand in _NO_OPERAND or match.group(3) + match.group(4) == "->":
            continue
        if (_is_word(before) and before not in _BEFORE_A_CAST) or before in ("]", ""):
            continue
        if operator or (operand and match.group(2) not in _NO_INTEGERS and before != ")"):
            yield match.end(), match.end(), f"(::engine_to<{' '.join((operator or match.group(2)).split())}>)"
    calls = [rf"\bstatic_cast\s*<\s*((?:const\s+)?(?:{types}|[A-Za-z_]\w*))\s*>\s*(\()"]
    calls.append(rf"\b({_WORD}|{_FIXED})\s*(\()(?=\s*[^\s)*&])")  # int (&row)[4] declares
    for number, pattern in enumerate(calls):
        for match in re.finditer(pattern, clean):
            before = _last_word(clean, match.start())
            if number == 1 and not (before and (before in "=(,+-*/%&|^!?:[{;" or before == "return")):
                continue
            closing = matching_bracket(clean, match.start(2))
            if is_piece and closing < 0:
                raise _Unpaired
            if closing > 0 and match.group(1) not in _NO_INTEGERS:
                yield match.end(), match.end(), f"(::engine_in<{' '.join(match.group(1).split())}>)("
                yield closing, closing, ")"


# Where a function ends, as sources are usually written: nothing before is open but namespaces and the like.
_END_OF_A_PIECE = re.compile(r"\n(?=\})")


@functools.lru_cache(maxsize=1024)  # of a source that differs from another one in a line, one piece is new
def _edits_of_piece(clean: str, names: frozenset[str]) -> tuple[Edit, ...]:
    return *_shifts(clean, is_piece=True), *_casts(clean, names, is_piece=True)


def _edits(clean: str) -> list[Edit]:
    """Return the edits of all shifts and casts; pieces of source that were met before are looked up.

    A piece begins with the } that ends the one before and ends with such a } itself. No token and no cast goes over
    it, `_shifts` has no open < behind it, so looking back to it is enough.
    """
    ends = [match.end() for match in _END_OF_A_PIECE.finditer(clean)]
    pieces = [(begin, clean[begin : end + 1]) for begin, end in itertools.pairwise([0, *ends, len(clean)])]
    names = frozenset().union(*(_type_names(piece) for _, piece in pieces))
    try:
        return [
            (begin + first, begin + last, new)
            for begin, piece in pieces
            for first, last, new in _edits_of_piece(piece, names)
        ]
    except _Unpaired:
        return [*_shifts(clean), *_casts(clean, names)]


@functools.lru_cache(maxsize=64)  # a kernel's checked builds ask again
def edited(code: str) -> str:
    """Put the engine's names between the source's tokens; its lines keep their numbers."""
    clean = blank_comments(code)
    hidden = _hidden(clean)
    starts = [first for first, _ in hidden]
    pieces, done = [], 0
    for begin, end, new in sorted(_edits(clean)):
        before = bisect.bisect_right(starts, begin) - 1
        if before < 0 or begin >= hidden[before][1]:
            pieces += [code[done:begin], new]
            done = end
    return "".join([*pieces, code[done:]])


def original(text: str) -> str:
    """Undo the edits in a piece of the source, such as the text of an assertion."""
    text = re.sub(r" ::engine_(?:left|right) (?:<<|>>|=)", "", text)
    text = re.sub(r"\(::engine_to<[^<>]*>\)", "", text)
    while match := re.search(r"\(::engine_in<[^<>]*>\)\(", text):
        closing = matching_bracket(text, match.end() - 1)
        text = text[: match.start()] + text[match.end() : closing] + text[closing + 1 :] if closing > 0 else text
        if closing < 0:
            break
    return text


SILENT = "-Wfloat-conversion"  # a compiler's name for what `with_soft_conversions` edits


def _line_starts(text: str) -> dict[tuple[str, int], int]:
    """Return the index of each line by the file and number that compilers report, and by ("", number).

    A place that the text has twice is left out.
    """
    starts: dict[tuple[str, int], int] = {}
    twice = set()
    file, number, at = "", 1, 0
    for whole, line in enumerate(text.splitlines(keepends=True), start=1):
        starts["", whole] = at
        directive = re.match(r'\s*#\s*(?:line)?\s*(\d+)(?:\s+"([^"]*)")?', line)
        if directive:
            number, file = int(directive.group(1)), directive.group(2) or file
        elif file:
            twice |= {(file, number)} & starts.keys()
            starts[file, number] = at
            number += 1
        at += len(line)
    return {place: start for place, start in starts.items() if place not in twice}


_OF_CLANG = re.compile(
    r"^.+?:\d+:(?P<caret>\d+):\{(?P<line>\d+):(?P<first>\d+)-(?P=line):(?P<last>\d+)\}.*turns floating-point.*"
    rf"\[{SILENT}\]$",
    re.M,
)


def _locations(diagnostics: str) -> Iterator[tuple[tuple[str, int], tuple[int, int, int]]]:
    """Yield for each such expression its line, and in it the columns of its begin, its operator and its end."""
    if not diagnostics.startswith("["):
        for match in _OF_CLANG.finditer(diagnostics):
            yield ("", int(match["line"])), (int(match["first"]) - 1, int(match["caret"]) - 1, int(match["last"]) - 1)
        return
    for warning in json.loads(diagnostics):
        if warning.get("option") != SILENT or "may change value" not in warning["message"]:
            continue
        place = warning["locations"][0]
        caret = place["caret"]
        first, last = place.get("start", caret), place.get("finish", caret)
        if first["line"] == last["line"] == caret["line"]:
            columns = first["byte-column"] - 1, caret["byte-column"] - 1, last["byte-column"]
            yield (caret["file"], caret["line"]), columns


def with_soft_conversions(text: str, diagnostics: str) -> str:
    """Wrap each real number that silently becomes an integer.

    Args:
        diagnostics: a compiler's of this text. g++'s in its JSON format, clang's with the ranges of sources: they tell
            where such an expression begins and ends.
    """
    starts = _line_starts(text)
    edits: set[Edit] = set()
    for place, columns in _locations(diagnostics):
        start = starts.get(place)
        line = text[start : text.find("\n", start)] if start is not None else ""
        if line and line.isascii():  # columns are bytes
            edits |= set(_soft(line, start, *columns))
    for begin, end, new in sorted(edits, reverse=True):
        text = text[:begin] + new + text[end:]
    return text


def _soft(line: str, start: int, first: int, caret: int, last: int) -> list[Edit]:
    """Return the edits for line[first:last], whose operator is at `caret`; none if it spans several lines."""
    if line[last - 1] in "([":  # g++ leaves out what the brackets hold, where a template's parameters are in it
        pair = "()" if line[last - 1] == "(" else "[]"
        last = matching_bracket(line, last - 1, *pair) + 1 or last
    expression, after = line[first:last], line[last : last + 1]
    if line.lstrip().startswith("#") or any(expression.count(a) != expression.count(b) for a, b in ("()", "[]", "{}")):
        return []
    if (re.match(r"\w", after) and re.search(r"\w$", expression)) or (last - first == 1 and after in ("(", "[")):
        return []  # a macro: its text is elsewhere
    if re.match(r"[-+*/]=", line[caret:]):
        begin, middle, end = start + first, start + caret, start + last
        return [(begin, begin, "::engine_at("), (middle, middle, ")"), (end, end, ")"), (middle + 2, middle + 2, "(")]
    if re.match(r"[&|^%]=|<<=|>>=|=(?!=)", line[caret:]):
        return []
    return [(start + first, start + first, "::engine_soft("), (start + last, start + last, ")")]
