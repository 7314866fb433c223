"""Reading CUDA C++ as text: the kernels it declares, their parameters, and what a host compiler needs changed."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel as its source spells it."""

    name: str
    type: str  # without const, __restrict__ and the star: "float", "int", "__half", ...
    pointer: bool
    const: bool


def blank_comments(code: str) -> str:
    """The code with comments and string contents replaced by spaces; every other character keeps its place."""

    def blank(match: re.Match[str]) -> str:
        text = match.group(0)
        if text[0] in "\"'":
            return text[0] + re.sub(r"[^\n]", " ", text[1:-1]) + text[-1]
        return re.sub(r"[^\n]", " ", text)

    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
    return re.sub(pattern, blank, code, flags=re.S)


def _matching(text: str, start: int, opening: str = "(", closing: str = ")") -> int:
    """Index of the bracket that closes the one at `start`, or -1."""
    depth = 0
    for index in range(start, len(text)):
        if text[index] == opening:
            depth += 1
        elif text[index] == closing:
            depth -= 1
            if depth == 0:
                return index
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


def _parameter(text: str) -> Parameter:
    text = re.sub(r"\b(__restrict__|__restrict|restrict|__grid_constant__|volatile)\b", " ", text.split("=")[0])
    array = "[" in text
    text = re.sub(r"\[[^\]]*\]", " ", text)
    pointer = "*" in text or array
    const = bool(re.search(r"\bconst\b[^*]*\*", text)) or (array and "const" in text)
    words = re.sub(r"\bconst\b|\*|&", " ", text)
    match = re.fullmatch(r"\s*(.*?[\s>])\s*(\w+)\s*", words, flags=re.S)
    if match is None:
        return Parameter("", " ".join(words.split()), pointer, const)
    return Parameter(match.group(2), " ".join(match.group(1).split()), pointer, const)


def kernels(code: str) -> dict[str, list[Parameter]]:
    """Each `__global__` function of the source with its parameters, in the order of the text.

    A template is found under its plain name; `is_template` tells it apart.
    """
    text = blank_comments(code)
    found: dict[str, list[Parameter]] = {}
    for start in re.finditer(r"\b__global__\b", text):
        at = start.end()
        while True:  # step over __launch_bounds__(...) and attributes to the name before its parameters
            opening = text.find("(", at)
            if opening < 0:
                break
            name = re.search(r"(\w+)\s*$", text[at:opening])
            closing = _matching(text, opening)
            if name is None or closing < 0:
                break
            if name.group(1) in ("__launch_bounds__", "__cluster_dims__", "__attribute__", "__align__", "__maxnreg__"):
                at = closing + 1
                continue
            if ";" not in text[at:opening] and "{" not in text[at:opening]:
                found[name.group(1)] = [_parameter(part) for part in _split_commas(text[opening + 1 : closing])]
            break
    return found


def is_template(code: str, name: str) -> bool:
    """Whether the kernel `name` is a template, which only a name expression can call."""
    text = blank_comments(code)
    match = re.search(r"(\btemplate\s*<[^;{}]*)?\b__global__\b[^;{}]*?\b" + re.escape(name) + r"\s*\(", text)
    return bool(match and match.group(1))


_EXTERN_SHARED = re.compile(
    r"\bextern\s+(?P<before>(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?)__shared__\s+"
    r"(?P<type>(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?[\w:<>,\s]+?)\s*(?P<middle>(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?)"
    r"(?P<name>\b\w+)\s*\[\s*\]\s*;"
)


def _in_function(clean: str, position: int) -> bool:
    """Whether `position` lies inside a function; the braces of a namespace or of extern "C" do not count."""
    open_braces: list[bool] = []
    for index in range(position):
        if clean[index] == "{":
            head = clean[max(0, index - 200) : index]
            open_braces.append(not re.search(r'(\bnamespace(\s+[\w:]+)?|\bextern\s*"[^"]*")\s*$', head))
        elif clean[index] == "}" and open_braces:
            open_braces.pop()
    return any(open_braces)


def translate(code: str) -> tuple[str, str]:
    """The source as a host compiler takes it.

    Only one construct has no spelling in C++: `extern __shared__ T name[];`, an array whose size is chosen at the
    launch. It becomes a pointer to the launch's dynamic shared memory. Everything else is done by the headers.

    Returns:
        (prelude, code): lines to put before the code, and the code, whose lines keep their numbers.

    Raises:
        ValueError: the source uses inline PTX, which no host compiler understands.
    """
    clean = blank_comments(code)
    asm = re.search(r"\b(asm|__asm__|__asm)\b\s*(volatile|__volatile__)?\s*\(", clean)
    if asm:
        line = clean.count("\n", 0, asm.start()) + 1
        text = code.splitlines()[line - 1].strip()
        raise ValueError(
            f"line {line}: `{text}` is inline PTX, which runs on a GPU only; the CPU engine executes C++. "
            "Say the same in CUDA C++, or run this kernel on a GPU"
        )
    prelude, pieces, last = [], [], 0
    for match in _EXTERN_SHARED.finditer(clean):
        kind = re.sub(r"(__align__|alignas)\s*\([^)]*\)", " ", match.group("type")).strip()
        name = match.group("name")
        if _in_function(clean, match.start()):
            new = f"{kind} *const {name} = ({kind} *)engine_dynamic_shared();"
        else:  # no launch yet where it is declared: a macro looks the memory up where the name is used
            prelude.append(f"#define {name} (({kind} *)engine_dynamic_shared())")
            new = ""
        pieces += [code[last : match.start()], new, "\n" * match.group(0).count("\n")]
        last = match.end()
    return "\n".join(prelude), "".join([*pieces, code[last:]])


def line_table(code: str, name: str) -> dict[tuple[str, int], str]:
    """The text of each line under the name and number that compilers report, `#line` directives followed."""
    table: dict[tuple[str, int], str] = {}
    number, file = 1, name
    for text in code.splitlines():
        directive = re.match(r'\s*#\s*line\s+(\d+)(?:\s+"([^"]*)")?', text)
        if directive:
            number = int(directive.group(1))
            file = directive.group(2) or file
            continue
        table[file, number] = text
        number += 1
    return table
