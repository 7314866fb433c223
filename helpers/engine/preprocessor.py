"""A source after the preprocessor, found without asking a compiler where its directives are plain ones.

For refusals.py, which reads each source that is built: to start a compiler takes longer than to read a kernel. Followed
are the directives that kernels have: #define, #undef, #if and its kin with whole numbers, #line, #pragma unroll. Lines
that call macros with parameters are given to the compiler, once for all sources that have the same lines and macros.
Whatever else there is makes the answer None: ask the compiler.

Comments, the contents of strings and the numbers of lines are lost on the way.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator

from .cuda_source.source import blank_comments, comments

# (text, options) -> the text after the preprocessor, "" where it refuses.
Compiler = Callable[[str, list[str]], str]


class _NotPlain(Exception):
    """Something that only a compiler's own preprocessor knows."""


_WORD = re.compile(r"(\.?\d(?:[eEpP][+-]|[\w.])*)|[A-Za-z_]\w*")
_DIRECTIVE = re.compile(r"[ \t]*#[ \t]*(\w*)[ \t]*(.*)")
_CONTINUED = re.compile(r"\\[ \t\r\f\v]*\n")
# The other spellings of # and of [, raw strings, and names that have another meaning at each place.
_NOT_PLAIN = (
    "??",
    "%:",
    "<:",
    ":>",
    "$",
    'R"',
    "_Pragma",
    "__has_",
    "__VA_OPT__",
    "__LINE__",
    "__FILE__",
    "__FILE_NAME__",
)
_NOT_PLAIN += ("__COUNTER__", "__DATE__", "__TIME__", "__TIMESTAMP__", "__INCLUDE_LEVEL__", "__BASE_FILE__")
_NOT_PLAIN += ("engine_host_header",)  # see refusals.py
_PREFIXED = re.compile(r"""["'](?:(?<=\b[LuU].)|(?<=\bu8.)|(?<=[0-9a-fA-F]'))""")  # strings; or digits in groups
_OPERATORS = {"and", "and_eq", "bitand", "bitor", "compl", "not", "not_eq", "or", "or_eq", "xor", "xor_eq"}
_PARTS_OF_OPERATORS = set("+-*/%&|^!=<>:.#")


class _Macros:
    """The macros at a place of the source."""

    def __init__(self, predefined: dict[str, str | None]) -> None:
        self._all = dict(predefined)  # None: with parameters
        self.directives: list[str] = []  # of the source, that led here

    def __contains__(self, name: str) -> bool:
        return name in self._all

    def define(self, rest: str, whole: str) -> None:
        match = re.fullmatch(r"([A-Za-z_]\w*)(\(|\s|$)(.*)", rest, re.S)
        if match is None or match[1] in _OPERATORS or match[1] == "defined":
            raise _NotPlain
        self._all[match[1]] = None if match[2] == "(" else match[3].strip()
        self.directives.append(whole)

    def undefine(self, rest: str, whole: str) -> None:
        if not re.fullmatch(r"[A-Za-z_]\w*", rest):
            raise _NotPlain
        self._all.pop(rest, None)
        self.directives.append(whole)

    def mentioned(self, text: str) -> bool:
        """Whether there is a macro in the text."""
        return any(match[0] in self._all for match in _WORD.finditer(text))

    def expanded(self, text: str, inside: frozenset[str] = frozenset()) -> str | None:
        """The text with its macros replaced; None where one of them has parameters."""
        pieces, done = [], 0
        for match in _WORD.finditer(text):
            name = match[0]
            if name in inside or name not in self._all:
                continue
            body = self._all[name]
            if body is None or "##" in body:
                return None
            new = self.expanded(body, inside | {name})
            if new is None:
                return None
            before, after = text[done : match.start()][-1:], text[match.end() : match.end() + 1]
            left = " " if new[:1] in _PARTS_OF_OPERATORS and before in _PARTS_OF_OPERATORS else ""
            right = " " if new[-1:] in _PARTS_OF_OPERATORS and after in _PARTS_OF_OPERATORS else ""
            pieces += [text[done : match.start()], left, new or " ", right]
            done = match.end()
        return "".join([*pieces, text[done:]]) if pieces else text


@functools.lru_cache(maxsize=8)
def _predefined(preprocess: Compiler, options: tuple[str, ...]) -> dict[str, str | None]:
    """The macros that there are before the source begins; {} where the compiler does not tell them."""
    found: dict[str, str | None] = {}
    for match in re.finditer(r"^#define (\w+)(\(?)(.*)$", preprocess("", [*options, "-dM"]), re.M):
        found[match[1]] = None if match[2] else match[3].strip()
    return found


@functools.lru_cache(maxsize=32)
def _by_compiler(
    preprocess: Compiler, options: tuple[str, ...], macros: str, lines: tuple[str, ...]
) -> tuple[str, ...]:
    """Lines in which macros with parameters may be, as the compiler's preprocessor leaves each of them."""
    text = macros + "".join(f"@{number}@\n{line}\n" for number, line in enumerate(lines))
    told = re.sub(r"^#.*\n", "", preprocess(text, [*options, "-P"]), flags=re.M)
    found = re.split(r"@ ?\d+ ?@", blank_comments(told))
    if len(found) != len(lines) + 1:
        raise _NotPlain
    return tuple(re.sub(r"\s+", " ", piece) for piece in found[1:])


def _logical_lines(code: str) -> Iterator[tuple[str, str]]:
    """The lines without comments and strings, and as they are; of a #define that goes on, all of it as one."""
    clean = blank_comments(code)
    if any(text in clean for text in _NOT_PLAIN) or _PREFIXED.search(clean) or not clean.isascii():
        raise _NotPlain
    for begin, end in comments(code):
        if "\n" in code[begin:end]:
            either_side = clean[clean.rfind("\n", 0, begin) + 1 : begin], clean[end:].partition("\n")[0]
            if any("#" in text for text in either_side):
                raise _NotPlain  # a directive may begin before a comment, and go on in another line behind it
    if "\\" not in code:
        yield from zip(clean.split("\n"), code.split("\n"), strict=True)
        return
    continued, whole, raw = 0, "", ""
    for line, text in zip(clean.split("\n"), code.split("\n"), strict=True):
        whole, raw = whole + line, raw + text
        if line.endswith("\\") and re.match(r"\s*#\s*define\b", whole):
            whole, raw = whole[:-1], raw + "\n"
            continued += 1
            continue
        yield whole, raw
        whole = raw = ""
    if whole or continued != len(_CONTINUED.findall(code)):
        raise _NotPlain


def resolved(code: str, options: list[str], preprocess: Compiler) -> str | None:
    """The source after the preprocessor, without comments and the contents of strings; None: ask the compiler.

    Args:
        options: the compiler's, such that the source includes nothing and `preprocess` knows their macros.
    """
    try:
        return _resolved(code, tuple(options), preprocess)
    except _NotPlain:
        return None


def _resolved(code: str, options: tuple[str, ...], preprocess: Compiler) -> str:
    macros = _Macros(_predefined(preprocess, options))
    if "__cplusplus" not in macros:
        raise _NotPlain
    groups: list[tuple[bool, bool]] = []  # of each #if: whether it is read, and whether one of its parts was
    kept: list[str] = []
    waiting: list[tuple[str, str]] = []  # lines since the last directive
    is_read = True
    for line, raw in _logical_lines(code):
        directive = _DIRECTIVE.match(line) if "#" in line else None
        if directive is None:
            if "#" in line and re.match(r"\s*#", line):
                raise _NotPlain
            if is_read:
                waiting.append((line, raw))
            continue
        word, rest = directive[1], directive[2].strip()
        if is_read and waiting:
            kept += _text(waiting, macros, options, preprocess)
            waiting = []
        if word in ("if", "ifdef", "ifndef"):
            truth = is_read and _holds(word, rest, macros)
            groups.append((is_read, truth))
            is_read = truth
        elif word in ("elif", "else") and groups:
            outer, done = groups[-1]
            is_read = outer and not done and (word == "else" or _holds("if", rest, macros))
            groups[-1] = outer, done or is_read
        elif word == "endif" and groups:
            is_read = groups.pop()[0]
        elif not is_read:
            continue
        elif word == "define":
            macros.define(rest, raw)
        elif word == "undef":
            macros.undefine(rest, raw)
        elif word == "pragma" and re.match(r"(?:no)?unroll\b|once$", rest) and not macros.mentioned(rest):
            kept.append(line)
        elif word != "line" or not re.match(r'\d+(?:\s+"|$)', rest):
            raise _NotPlain
    if groups:
        raise _NotPlain
    return "\n".join([*kept, *_text(waiting, macros, options, preprocess)])


def _text(
    lines: list[tuple[str, str]], macros: _Macros, options: tuple[str, ...], preprocess: Compiler
) -> Iterator[str]:
    """Lines between two directives with their macros replaced."""
    block = "\n".join(line for line, _ in lines)
    if block.lstrip().startswith("("):
        raise _NotPlain  # of a macro before the directive
    found = macros.expanded(block)
    if found is not None:
        yield found
        return
    each = [macros.expanded(line) for line, _ in lines]
    for number, new in enumerate(each):
        after = next((line.lstrip() for line, _ in lines[number + 1 :] if line.strip()), "")
        line = lines[number][0]
        if new is None and (line.count("(") != line.count(")") or after.startswith("(")):
            raise _NotPlain  # what the macro is given may be in other lines
    asked = [number for number, new in enumerate(each) if new is None]
    raw = tuple(lines[number][1] for number in asked)
    if any("@" in text for text in raw):
        raise _NotPlain
    new = _by_compiler(preprocess, options, "\n".join([*macros.directives, ""]), raw)
    for number, text in zip(asked, new, strict=True):
        each[number] = text
    yield "\n".join(text or "" for text in each)


# ---------------------------------------------------------------- conditions

_TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]+|0|[1-9]\d*)(?:[lL]{0,2})\b(?!\.)|(&&|\|\||[=!<>]=|[-+*/%<>!()](?![<>])))"
)
_BINARY = {"||": 1, "&&": 2, "==": 3, "!=": 3, "<": 4, ">": 4, "<=": 4, ">=": 4, "+": 5, "-": 5, "*": 6, "/": 6, "%": 6}


def _holds(word: str, rest: str, macros: _Macros) -> bool:
    """Whether the condition of an #if, #ifdef or #ifndef holds."""
    if word != "if":
        if not re.fullmatch(r"[A-Za-z_]\w*", rest):
            raise _NotPlain
        return (rest in macros) == (word == "ifdef")
    names = re.compile(r"\bdefined\s*(?:\(\s*([A-Za-z_]\w*)\s*\)|([A-Za-z_]\w*))")
    text = macros.expanded(names.sub(lambda match: str(int((match[1] or match[2]) in macros)), rest))
    if text is None or re.search(r"\bdefined\b", text):
        raise _NotPlain
    words = {match[0] for match in _WORD.finditer(text) if match[1] is None}
    if words & (_OPERATORS | {"true", "false"}):
        raise _NotPlain
    text = _WORD.sub(lambda match: match[0] if match[1] else "0", text)  # what is no macro is 0
    tokens, at = [], 0
    while at < len(text.rstrip()):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _NotPlain
        tokens.append(match[1] or match[2])
        at = match.end()
    value = _value(tokens, 0)
    if tokens:
        raise _NotPlain
    return value != 0


def _value(tokens: list[str], least: int) -> int:
    """The value of an expression whose operators bind at least so much; its tokens are taken away."""
    left = _operand(tokens)
    while tokens and _BINARY.get(tokens[0], -1) > least:
        operator = tokens.pop(0)
        right = _value(tokens, _BINARY[operator])
        if operator in ("/", "%"):
            if left < 0 or right <= 0:
                raise _NotPlain
            left = left // right if operator == "/" else left % right
        else:
            left = {
                "||": int(bool(left or right)),
                "&&": int(bool(left and right)),
                "==": int(left == right),
                "!=": int(left != right),
                "<": int(left < right),
                ">": int(left > right),
                "<=": int(left <= right),
                ">=": int(left >= right),
                "+": left + right,
                "-": left - right,
                "*": left * right,
            }[operator]
        if abs(left) >= 1 << 62:
            raise _NotPlain
    return left


def _operand(tokens: list[str]) -> int:
    token = tokens.pop(0) if tokens else ""
    if token in ("!", "-", "+"):
        value = _operand(tokens)
        return {"!": int(not value), "-": -value, "+": value}[token]
    if token == "(":
        value = _value(tokens, 0)
        if not tokens or tokens.pop(0) != ")":
            raise _NotPlain
        return value
    if not token[:1].isdigit() or (value := int(token, 0)) >= 1 << 62:
        raise _NotPlain
    return value
