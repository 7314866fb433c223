"""Read asm statements as text: their places, templates, operands, and the statements of a template."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..cuda_source.source import matching_bracket

# asm, __asm or __asm__; the letters come first, so that a search goes from one "asm" to the next.
_ASM = re.compile(
    r"asm(?:(?<=\basm)|(?P<spelled>(?<=\b__asm)(?:__)?))\b"
    r"\s*(?P<volatile>(?:volatile|__volatile__|__volatile)\b\s*)?\("
)
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/|[()\[\]{}]|::|:|,|\s+|[^"()\[\]{}:,\s/]+|/', re.S)
_RAW = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\bR"([^()\\\s]{0,16})\((.*?)\)\1"', re.S)


class Unreadable(ValueError):
    """An asm statement's text is not what the language allows there, or depends on the preprocessor."""


class Refused(Exception):
    """An assembler may accept it, but the engine does not: a failure of the thread that reaches it."""


@dataclass(frozen=True)
class Operand:
    """One operand of an asm statement. constraint: with = or + if it is written."""

    constraint: str
    expression: str

    @property
    def letter(self) -> str:
        return self.constraint.lstrip("=+&")

    @property
    def is_written(self) -> bool:
        return self.constraint[:1] in ("=", "+")

    @property
    def is_read(self) -> bool:
        return self.constraint[:1] != "="


def statements(clean: str) -> Iterator[tuple[int, int, int, bool]]:
    """Find the asm statements of a source without comments: their begin, brackets and whether volatile."""
    for match in _ASM.finditer(clean):
        end = matching_bracket(clean, match.end() - 1)
        if end >= 0:
            begin = match.start() - (0 if match["spelled"] is None else len("__"))
            yield begin, match.end() - 1, end, match["volatile"] is not None


def raw_strings(code: str) -> str:
    """Spell raw string literals as plain ones, on as many lines."""

    def plain(match: re.Match[str]) -> str:
        if match.group(2) is None:
            return match.group(0)
        lines = match.group(2).replace("\\", "\\\\").replace('"', '\\"').split("\n")
        return '\\n"\n"'.join(lines).join('""')

    return _RAW.sub(plain, code) if 'R"' in code else code


def parts(inside: str) -> list[str]:
    """Split into template, outputs, inputs and clobbers, at the colons outside all brackets."""
    pieces, depth = [""], 0
    for token in _TOKEN.findall(inside):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(token, 0)
        if depth == 0 and token in (":", "::"):
            pieces += [""] * len(token)
        elif not token.startswith(("//", "/*")):
            pieces[-1] += token
    return pieces


def literal(text: str) -> str | None:
    """Return the contents of adjacent string literals, or None if there is something else."""
    if re.fullmatch(r'[\s\\]*(?:"(?:\\.|[^"\\])*"[\s\\]*)+', text, re.S) is None:
        return None
    pieces = re.findall(r'"((?:\\.|[^"\\])*)"', text, re.S)
    # A backslash and a newline are nothing; other escapes are Python's own.
    joined = "".join(pieces).replace("\\\n", "")
    return re.sub(r"\\(?:[0-7]{1,3}|x[0-9a-fA-F]+|.)", _unescaped, joined, flags=re.S)


def _unescaped(match: re.Match[str]) -> str:
    try:
        return ast.literal_eval(f'"{match.group(0)}"')
    except SyntaxError:
        return match.group(0)[1:]


def operands(text: str) -> list[Operand]:
    """Return the operands between two colons.

    Raises:
        Unreadable: there is something else.
    """
    every = []
    at = 0
    while match := re.compile(r'[\s,\\]*"([^"]*)"\s*\(').match(text, at):
        end = matching_bracket(text, match.end() - 1) + 1
        if end == 0:
            break
        inside = text[match.end() : end - 1].replace("\\\n", " ")
        every.append(Operand(match.group(1).replace(" ", ""), " ".join(inside.split())))
        at = end
    if rest := text[at:].strip(" \n\t\\,"):
        raise Unreadable(f"its operands cannot be read: {' '.join(rest.split())}")
    return every


def split(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    pieces, depth = [""], 0
    for char in text:
        depth += {"{": 1, "[": 1, "(": 1, "}": -1, "]": -1, ")": -1}.get(char, 0)
        if char == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += char
    return [part.strip() for part in pieces if part.strip()]


def items(template: str) -> Iterator[str]:
    """Return the template's parts in order: "{" and "}" of a scope, "name:" of a label, statements without ;."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", template, flags=re.S)
    at = 0
    while at < len(text):
        char = text[at]
        if char.isspace() or char == ";":
            at += 1
        elif char in "{}":
            yield char
            at += 1
        elif label := re.compile(r"([A-Za-z_$%][\w$%=]*)\s*:(?!:)").match(text, at):
            yield label.group(1) + ":"
            at = label.end()
        else:
            end, depth = at, 0
            while end < len(text) and (depth or text[end] not in ";}"):
                depth += {"{": 1, "}": -1}.get(text[end], 0)
                end += 1
            yield " ".join(text[at:end].split())
            at = end
