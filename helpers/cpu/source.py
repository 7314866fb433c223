"""Reading CUDA C++ as text: the kernels it declares, their parameters, and what a host compiler needs changed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from . import ptx


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
    r"\bextern\b(?P<head>[^;{}=]*?\b__shared__\b[^;{}=]*?)\b(?P<name>\w+)\s*\[\s*\](?P<rest>(?:\s*\[[^\]]*\])*)\s*;"
)


_FUNCTION_HEAD = re.compile(r"\)\s*(?:(?:const|noexcept|override|final)\b\s*)*(?:->[^;{}]*|:[^;{}]*)?\s*$")


def _function_bodies(clean: str) -> list[tuple[int, int, str]]:
    """Of each outermost function: where its body's brace opens and closes, and the text before, with its parameters."""
    bodies, open_braces, before = [], [], 0
    for match in re.finditer(r"[{};]", clean):
        at = match.start()
        if match.group() == "{":
            head = clean[before:at]
            inside = bool(open_braces) and open_braces[-1] is not None
            open_braces.append((at, head) if inside or _FUNCTION_HEAD.search(head) else None)
        elif match.group() == "}" and open_braces:
            opened = open_braces.pop()
            if opened is not None and not (open_braces and open_braces[-1] is not None):
                bodies.append((opened[0], at, opened[1]))
        before = at + 1
    return bodies


_ASM = re.compile(r"\b(?:asm|__asm__|__asm)\b\s*(?:volatile\b|__volatile__\b)?\s*\(")


def _asm_error(code: str, at: int, message: str) -> str:
    """What is wrong with the asm statement at an index of the code, with its place and what could be written."""
    table = line_table(code[:at] + "\0" + code[at:], "")
    file, line = next(place for place, text in table.items() if "\0" in text)
    text = table[file, line].replace("\0", "").strip()
    return (
        f"{file + ':' if file else 'line '}{line}: `{text}` is inline PTX, and "
        f"{message}. The engine knows: {', '.join(ptx.known())}. Say the same with one of these or in CUDA C++, or run "
        "this kernel on a GPU"
    )


def translate(code: str) -> str:
    """The source as a host compiler takes it; its lines keep their numbers.

    Some constructs have no spelling in C++. `extern __shared__ T name[];`, an array whose size is chosen at the launch,
    becomes a pointer to the launch's dynamic shared memory, in the function that declares it, or, where the file
    declares it, in each function that uses it. `__shared__ alignas(n)` gets an attribute that may stand after
    __shared__. An asm statement becomes calls of the engine. Everything else is done by the headers.

    Raises:
        ValueError: an asm statement that the engine cannot follow, see ptx.py.
    """
    clean = blank_comments(code)
    edits: list[tuple[int, int, str]] = []  # begin, end, new text
    for match in _ASM.finditer(clean):
        end = _matching(clean, match.end() - 1)
        try:
            new = ptx.rewrite(code[match.end() : end])
        except ValueError as error:
            raise ValueError(_asm_error(code, match.start(), str(error))) from None
        broken = "\\\n" if "\\\n" in code[match.start() : end] else "\n"  # in a macro, lines go on
        edits.append((match.start(), end + 1, new + broken * code.count("\n", match.start(), end)))
    for match in re.finditer(r"\b__shared__\s+(alignas)\s*\(", clean):
        edits.append((match.start(1), match.end(1), "ENGINE_ALIGNAS"))
    declared = list(_EXTERN_SHARED.finditer(clean))
    bodies = _function_bodies(clean) if declared else []
    for match in declared:
        edits = [edit for edit in edits if not match.start() <= edit[0] < match.end()]
        kind = re.sub(r"\b(__align__|alignas|__attribute__)\s*\([^;]*?\)+|\b__shared__\b", " ", match.group("head"))
        kind, name, rest = " ".join(kind.split()), match.group("name"), match.group("rest").strip()
        pointer = f"(*const {name}){rest}" if rest else f"*const {name}"
        new = f"{kind} {pointer} = ({kind} (*){rest})engine_dynamic_shared();"
        if not any(begin < match.start() < end for begin, end, _ in bodies):
            for begin, end, head in bodies:
                word = rf"\b{name}\b"
                if re.search(word, clean[begin:end]) and not re.search(word, head):
                    edits.append((begin + 1, begin + 1, f" {new}"))
            new = ""
        edits.append((match.start(), match.end(), new + "\n" * match.group(0).count("\n")))
    for begin, end, new in sorted(edits, reverse=True):
        code = code[:begin] + new + code[end:]
    return code


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
