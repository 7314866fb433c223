"""Read CUDA C++ as text: comments, brackets, the kernels that it declares, the lines that compilers report."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Declared:
    """One parameter of a kernel as its source spells it."""

    name: str
    type: str  # without const, __restrict__ and the star: "float", "int", "__half", ...
    pointer: bool
    const: bool


_BLANKED = re.compile(r"""//[^\n]*|/\*.*?\*/|"[^"\\\n]*(?:\\.[^"\\\n]*)*"|'[^'\\\n]*(?:\\.[^'\\\n]*)*'""", flags=re.S)


def _blank(match: re.Match[str]) -> str:
    text = match.group()
    spaces = "\n".join(" " * len(line) for line in text.split("\n")) if "\n" in text else " " * len(text)
    return spaces if text[0] == "/" else text[0] + spaces[1:-1] + text[-1]


@functools.lru_cache(maxsize=32)  # a source is read for its kernels, its includes and its translation
def blank_comments(code: str) -> str:
    """Replace comments and string contents by spaces; every other character keeps its place."""
    return _BLANKED.sub(_blank, code)


def comments(code: str) -> Iterator[tuple[int, int]]:
    """Yield the beginning and the end of each comment between /* and */."""
    if "/*" in code:
        for match in _BLANKED.finditer(code):
            if match.group().startswith("/*"):
                yield match.span()


@functools.cache
def _brackets(pair: str) -> re.Pattern[str]:
    return re.compile(f"[{re.escape(pair)}]")


def matching_bracket(text: str, start: int, opening: str = "(", closing: str = ")") -> int:
    """Return the index of the bracket that closes the one at `start`, or -1."""
    depth = 0
    for match in _brackets(opening + closing).finditer(text, start):
        depth += 1 if match.group() == opening else -1
        if depth == 0 and match.group() == closing:
            return match.start()
    return -1


def _split_commas(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        if char in "(<[{":
            depth += 1
        elif char in ")>]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip() and part.strip() != "void"]


def _parameter(text: str) -> Declared:
    text = re.sub(r"\b(__restrict__|__restrict|restrict|__grid_constant__|volatile)\b", " ", text.split("=")[0])
    array = "[" in text
    text = re.sub(r"\[[^\]]*\]", " ", text)
    pointer = "*" in text or array
    const = bool(re.search(r"\bconst\b[^*]*\*", text)) or (array and "const" in text)
    words = re.sub(r"\bconst\b|\*|&", " ", text)
    match = re.fullmatch(r"\s*(.*?[\s>])\s*(\w+)\s*", words, flags=re.S)
    if match is None:
        return Declared("", " ".join(words.split()), pointer, const)
    return Declared(match.group(2), " ".join(match.group(1).split()), pointer, const)


def kernels(code: str) -> dict[str, list[Declared]]:
    """Return each `__global__` function of the source with its parameters, in the order of the text.

    A template is found under its plain name; `is_template` tells it apart.
    """
    return {name: list(parameters) for name, parameters in _kernels(code)}


@functools.lru_cache(maxsize=64)  # a build asks four times, and the same source may have many builds
def _kernels(code: str) -> tuple[tuple[str, tuple[Declared, ...]], ...]:
    text = blank_comments(code)
    declared: dict[str, tuple[Declared, ...]] = {}
    for start in re.finditer(r"__global__(?<=\b__global__)\b", text):
        at = start.end()
        while True:  # step over __launch_bounds__(...) and attributes to the name before its parameters
            opening = text.find("(", at)
            if opening < 0:
                break
            name = re.search(r"(\w+)\s*$", text[at:opening])
            closing = matching_bracket(text, opening)
            if name is None or closing < 0:
                break
            if name.group(1) in (
                "__launch_bounds__",
                "__cluster_dims__",
                "__block_size__",
                "__attribute__",
                "__align__",
                "__maxnreg__",
            ):
                at = closing + 1
                continue
            if ";" not in text[at:opening] and "{" not in text[at:opening]:
                if text[closing + 1 :].lstrip().startswith(";") and name.group(1) in declared:
                    break
                parameters = _without_macros(text, text[opening + 1 : closing])
                declared[name.group(1)] = tuple(_parameter(part) for part in _split_commas(parameters))
            break
    return tuple(declared.items())


_DEFINED = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)((?:\\\n|[^\n])*)", re.M)


def macros_make_kernels(code: str, macros: str = "") -> bool:
    """Return True if kernels must be looked for after the preprocessor, because macros define them.

    Args:
        macros: lines of #define that come before the source.
    """
    defined = dict(_DEFINED.findall(f"{macros}{blank_comments(code)}"))
    if any("__global__" in body or "__launch_bounds__" in body for body in defined.values()):
        return True
    return any(name in defined for name in kernels(code))


def _without_macros(text: str, part: str) -> str:
    """Expand macros in a part of the text by the first `#define` of each in the text.

    Only macros without parameters whose names begin with a capital are expanded.
    """
    for name in set(re.findall(r"\b[A-Z]\w*\b", part)):
        if (value := _plain_macros(text).get(name)) is not None:
            part = re.sub(rf"\b{name}\b", value.replace("\\", r"\\"), part)
    return part


@functools.lru_cache(maxsize=8)
def _plain_macros(text: str) -> dict[str, str]:
    """Return the first value of each macro without parameters."""
    defined = re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+)\b(?!\()((?:\\\n|[^\n])*)$", text, re.M)
    return {name: body.replace("\\\n", "") for name, body in reversed(defined)}


# What begins with letters is searched for faster than what begins with a boundary.
_BOUNDS = r"__launch_bounds__(?<=\b__launch_bounds__)"


def launch_bounds(code: str, name: str, macros: Mapping[str, str]) -> int | None:
    """Return the most threads of a block by a kernel's `__launch_bounds__`; None if that is not a plain number.

    Args:
        macros: those given to the compiler. Of the source's own names, `#define` and constexpr integers are followed.
    """
    text = blank_comments(code)
    bounds = re.findall(rf"{_BOUNDS}\s*(\((?:[^()]|\([^()]*\))*\))[^;{{}}()]*\b{re.escape(name)}\s*\(", text)
    if len(bounds) != 1 or is_template(code, name):
        return None
    first = _split_commas(bounds[0][1:-1])[:1]
    defined: dict[str, set[str]] = {}
    constant = r"constexpr(?<=\bconstexpr)\s+(?:unsigned\s+)?(?:int|unsigned|size_t)\s+(\w+)\s*=\s*([^;]+);"
    for pattern in (r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+([^\n]+)$", constant):
        for match in re.finditer(pattern, text, re.M):
            defined.setdefault(match.group(1), set()).add(match.group(2).strip())
    constants = {name: values.pop() for name, values in defined.items() if len(values) == 1} | dict(macros)
    expression = first[0] if first else ""
    for _ in range(8):
        expression = re.sub(r"\b[A-Za-z_]\w*\b", lambda m: f"({constants.get(m.group(), m.group())})", expression)
    expression = re.sub(r"(?<=\d)[uUlL]+\b", "", expression)
    if not re.fullmatch(r"[\d\s()+*/-]+", expression) or "**" in expression:
        return None
    try:
        value = eval(expression.replace("/", "//"), {"__builtins__": {}})  # digits, brackets and + - * / alone
    except (SyntaxError, ArithmeticError, TypeError):
        return None
    return value if isinstance(value, int) and value > 0 else None


def least_blocks(code: str, name: str) -> int:
    """Return the second argument of a kernel's `__launch_bounds__`, blocks on a multiprocessor; 0 if absent.

    1 where it is no plain number, or left out.
    """
    text = blank_comments(code)
    bounds = re.search(rf"{_BOUNDS}\s*(\((?:[^()]|\([^()]*\))*\))[^;{{}}()]*\b{re.escape(name)}\s*\(", text)
    arguments = [part.strip() for part in _split_commas(bounds.group(1)[1:-1])] if bounds else []
    if not arguments:
        return 0
    return int(arguments[1]) if arguments[1:] and arguments[1].isdecimal() else 1


def cluster_dims(code: str, name: str) -> tuple[str, str]:
    """Return the C++ of a kernel's `__cluster_dims__`: what to declare behind the source, and the value.

    The compiler evaluates it, so it may be any constant expression, also of a template's parameters.
    name: of the kernel, or a name expression.
    """
    plain, _, arguments = name.partition("<")
    text, plain = blank_comments(code), plain.split("::")[-1].strip()
    if "__cluster_dims__" not in text:
        return "", "engine::cluster()"
    for start in re.finditer(r"__global__(?<=\b__global__)\b", text):
        head = re.compile(r"[^;{}]*?\b" + re.escape(plain) + r"\s*\(").match(text, start.end())
        dims = re.search(r"\b__cluster_dims__\s*\(", head.group()) if head else None
        begin = max(text.rfind(end, 0, start.start()) for end in ";{}") + 1
        if dims is None:
            before = re.search(r"\b__cluster_dims__\s*\(", text[begin : start.start()])
            if not head or before is None:
                continue
            opening = begin + before.end() - 1
        else:
            opening = start.end() + dims.end() - 1
        value = f"engine::cluster({text[opening + 1 : matching_bracket(text, opening)]})"
        template = re.search(r"\btemplate\s*<", text[begin : start.start()])
        if template is None:
            return "", value
        angle, depth = begin + template.end(), 1
        while depth and angle < start.start():
            depth += {"<": 1, ">": -1}.get(text[angle], 0)
            angle += 1
        own = f"engine_cluster_of_{plain}"
        declared = " ".join(f"{text[begin + template.start() : angle]} struct {own} {{".split())
        return f"{declared} static constexpr engine::Cluster value = {value}; }};\n", f"{own}<{arguments}::value"
    return "", "engine::cluster()"


def is_template(code: str, name: str) -> bool:
    """Return True if the kernel `name` is a template, which only a name expression can call."""
    text = blank_comments(code)
    match = re.search(r"__global__(?<=\b__global__)\b[^;{}]*?\b" + re.escape(name) + r"\s*\(", text)
    if match is None:
        return False
    begin = max(text.rfind(end, 0, match.start()) for end in ";{}") + 1
    return bool(re.search(r"\btemplate\s*<", text[begin : match.start()]))


def has_dynamic_shared(code: str) -> bool:
    """Return True if the source declares an `extern __shared__` array, sized by the launch."""
    either = r"\bextern\b[^;{}=]*\b__shared__|\b__shared__[^;{}=]*\bextern\b"
    return bool(re.search(either, blank_comments(code)))


def is_only_declared(code: str, name: str) -> bool:
    """Return True if a name occurs once, where a `__shared__` array is declared: a GPU's compiler drops it."""
    text = blank_comments(code)
    is_alone = len(re.findall(rf"{name}(?<=\b{name})\b", text)) == 1
    return is_alone and bool(re.search(rf"__shared__[^;(]*\b{name}\b", text))


def line_table(code: str, name: str) -> dict[tuple[str, int], str]:
    """Return the text of each line by the file and number that compilers report; `#line` is followed."""
    table: dict[tuple[str, int], str] = {}
    number, file = 1, name
    for text in code.splitlines():
        directive = re.match(r'\s*#\s*line\s+(\d+)(?:\s+"([^"]*)")?', text) if "#" in text else None
        if directive:
            number = int(directive.group(1))
            file = directive.group(2) or file
            continue
        table[file, number] = text
        number += 1
    return table
