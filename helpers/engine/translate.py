"""Change in CUDA C++ what a host compiler needs and headers cannot provide."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from . import compiler, ptx
from .cuda_source.source import blank_comments, line_table, matching_bracket

_EXTERN_SHARED = re.compile(
    r"\b(?:extern\b(?=[^;{}=]*\b__shared__\b)|__shared__\b(?=[^;{}=]*\bextern\b))"
    r"(?P<head>[^;{}=]*?)\b(?P<name>\w+)\s*(?P<array>\[\s*\](?P<rest>(?:\s*\[[^\]]*\])*)\s*)?;"
)


_DEFINE = re.compile(r"^[ \t]*#[ \t]*define\b(?:\\\n|[^\n])*", re.M)
_EXTERN_IN_MACRO = re.compile(
    r"\bextern\b(?P<head>(?:(?!\bextern\b)[^;{}=])*?\b__shared__\b[^;{}=]*?)(?P<name>\w+(?:\s*##\s*\w+)*)\s*\[\s*\]"
)
_ALIGNMENT = re.compile(r"\b(__align__|alignas|__attribute__)\s*\([^;]*?\)+|\b(__shared__|extern)\b")


def _extern_in_macros(code: str, clean: str) -> list[tuple[int, int, str]]:
    """Return edits for each `extern __shared__ T name[]` in a macro: they make a pointer of it.

    Where the macro is used outside of a function, ENGINE_EXTERN_SHARED does not compile.
    """
    edits: list[tuple[int, int, str]] = []
    if "define" not in clean or "__shared__" not in clean:
        return edits
    for define in _DEFINE.finditer(clean):
        if "__shared__" not in define.group():
            continue
        for match in _EXTERN_IN_MACRO.finditer(clean, define.start(), define.end()):
            kind = " ".join(_ALIGNMENT.sub(" ", match.group("head").replace("\\\n", " ")).split())
            broken = "\\\n" * code.count("\n", match.start(), match.end())
            new = f"{kind} *const {match.group('name')} = ENGINE_EXTERN_SHARED({kind}){broken}"
            edits.append((match.start(), match.end(), new))
    return edits


_LONG_LONG = re.compile(
    r"\btypedef\b[\w\s]*\blong\s+long\b[\w\s]*?\b(u?int64_t)\s*;|\busing\s+(u?int64_t)\s*=[\w\s]*\blong\s+long\b[\w\s]*;"
)


def _with_own_integers(code: str) -> str:
    """Rename int64_t and uint64_t if the code declares them as long long.

    NVRTC has neither without a header, and sources for it bring theirs. A host's are of another type, of the same size.
    """
    if "int64_t" not in code:
        return code
    names = {match[1] or match[2] for match in _LONG_LONG.finditer(blank_comments(code))}
    if not names:
        return code
    words = re.compile(rf"(?<!std::)\b({'|'.join(names)})\b")
    pieces, end = [], 0
    for match in words.finditer(blank_comments(code)):
        pieces += [code[end : match.start()], f"engine_{match[1]}"]
        end = match.end()
    return "".join(pieces) + code[end:]


_NO_VARIABLE = re.compile(
    r"\b(?:constexpr|using|typedef|template|namespace|enum|operator|__shared__|extern|friend|return|asm|constinit|"
    r"thread_local|__constinit|goto|case|static_assert)\b"
)
_NAMESPACE = re.compile(r"\bnamespace\b[^;{}()=]*$|\bextern\s*\"[^\"]*\"\s*$")
_DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.M)  # a macro's text is no declaration
_COMPUTED = re.compile(r"\b(?!true\b|false\b|nullptr\b|sizeof\b)[A-Za-z_]\w*")


def _constant_initialisers(clean: str) -> list[tuple[int, int, str]]:
    """Return edits for file-scope and static variables whose initial value is more than a number.

    Nothing computes it on a GPU before a kernel runs, so the compiler has to know it.
    """
    edits: list[tuple[int, int, str]] = []
    clean = _DIRECTIVE.sub(lambda line: re.sub(r"[^\n]", " ", line[0]), clean)
    scopes: list[str] = []  # of the braces that are open: "file", "class" or "function"
    before = 0
    for match in re.finditer(r"[{};]", clean):
        at, end = match.start(), match.end()
        head = clean[before:at]
        begin = before + len(head) - len(head.lstrip())
        head, before = clean[begin:at], end
        scope = scopes[-1] if scopes else "file"
        if match.group() == "}":
            del scopes[-1:]
            continue
        is_static = scope == "function" and head.startswith("static ")
        if (scope == "file" or is_static) and not _NO_VARIABLE.search(head):
            value = ""
            declared = re.match(r"[\w:<>,\s*&]*[\w>*&]\s*[\s*&](\w+)\s*(?:\[[^\]]*\]\s*)*(=|\(|$)", head)
            if declared and declared[2] == "=":
                value = head[declared.end() :]
            elif declared and declared[2] == "(" and match.group() == ";":
                is_value = is_static or re.match(r"\s*[-+\"'\d.]", head[declared.end() :])
                value = "call()" if is_value else ""
            is_type = re.match(r"(?:\w+\s+)*?(?:struct|class|union)\b(?![^{};=]*=)", head)
            if match.group() == "{" and declared and declared[2] in ("=", "") and not is_type:
                value += clean[at : matching_bracket(clean, at, "{", "}") + 1]
            if _COMPUTED.search(re.sub(r"\b(?:0[xX][\da-fA-F.pP+-]+|[\d.]+(?:[eE][-+]?\d+)?)\w*", " ", value)):
                edits.append((begin, begin, "ENGINE_CONSTINIT "))
        if match.group() == "{":
            inside = "function" if scope == "function" or _FUNCTION_HEAD.search(head) else "class"
            scopes.append("file" if scope == "file" and _NAMESPACE.search(head) else inside)
    return edits


_FUNCTION_HEAD = re.compile(r"\)\s*(?:(?:const|noexcept|override|final)\b\s*)*(?:->[^;{}]*|:[^;{}]*)?\s*$")


@functools.lru_cache(maxsize=64)
def function_bodies(clean: str) -> tuple[tuple[int, int, str], ...]:
    """Return for each outermost function its body's braces, and the text before with its parameters."""
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
    return tuple(bodies)


def _asm_error(code: str, original: str, name: str, at: int, message: str) -> str:
    """Write the error message for the asm statement at index `at` of `code`, with its line and text in `original`."""
    table = line_table(code[:at] + "\0" + code[at:], name)
    file, line = next(place for place, text in table.items() if "\0" in text)
    text = line_table(original, name).get((file, line), table[file, line]).replace("\0", "").strip()
    return f"{file}:{line}: `{text}` is inline PTX, and {message}"


def _in_macro(code: str, at: int) -> bool:
    """Return True if the place is in a #define."""
    begin = code.rfind("\n", 0, at) + 1
    while begin > 1 and code[begin - 2] == "\\":
        begin = code.rfind("\n", 0, begin - 1) + 1
    return bool(re.match(r"\s*#\s*define\b", code[begin:at]))


@functools.lru_cache(maxsize=64)  # a kernel's checked builds ask again
def _asm_edits(code: str, original: str, name: str) -> tuple[tuple[int, int, str], ...]:
    """Return the edits that make asm statements calls of the engine: begin, end, new text."""
    edits = []
    for number, (begin, opening, end, is_volatile) in enumerate(ptx.statements(blank_comments(code))):
        if compiler.OF_THE_SYSTEM in code[(at := code.rfind("\n#line", 0, begin) + 1) : code.find("\n", at)]:
            continue
        try:
            if _in_macro(code, begin):
                raise ptx.Unreadable("it stands in a macro")
            new = ptx.rewrite(code[opening + 1 : end], number, is_volatile=is_volatile)
        except ptx.Unreadable as error:
            raise ptx.Unreadable(_asm_error(code, original, name, begin, str(error))) from None
        edits.append((begin, end + 1, new + "\n" * code.count("\n", begin, end)))
    return tuple(edits)


def _includes_more(code: str, folders: Sequence[Path]) -> bool:
    """Return True if the source includes headers outside the folders: they may hold asm statements."""
    names = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', code, re.M)
    return not all(any((folder / name).is_file() for folder in folders) for name in names)


def translate(
    code: str,
    expanded: Callable[[str], str | None] = lambda code: None,
    name: str = "kernel.cu",
    *,
    keep_asm: bool = False,
    folders: Sequence[Path] = (compiler.INCLUDE,),
) -> str:
    """Return the source for a host compiler; its lines keep their numbers.

    Some constructs have no spelling in C++. `extern __shared__ T name[];`, an array whose size is chosen at the launch,
    becomes a pointer to the launch's dynamic shared memory, and an object a reference: in the function that declares
    it, or, where the file declares it, in each function that uses it; a macro that declares it declares the pointer.
    `__shared__ alignas(n)` gets an attribute that may stand after __shared__. An asm statement becomes calls of the
    engine. Everything else is done by the headers.

    Args:
        expanded: the source after the preprocessor, with its lines given by #line; None if there is none. It is
            needed if asm statements depend on it: in macros, in headers, with macros among their strings.
        name: what the source is called in messages.
        folders: of headers whose asm statements the engine has dealt with, or that have none.
        keep_asm: asm statements stay for a later hand: libraries.py rewrites them together with those of libraries.

    Raises:
        ValueError: an asm statement that the engine cannot follow, see ptx.
    """
    original = code
    code = ptx.raw_strings(_with_own_integers(code))
    if not keep_asm and _includes_more(code, folders) and (whole := expanded(code)) is not None:
        whole = ptx.raw_strings(whole)
        code = whole if any(ptx.statements(blank_comments(whole))) or _EXTERN_SHARED.search(whole) else code
    try:
        edits = [] if keep_asm else [*_asm_edits(code, original, name)]
    except ptx.Unreadable:
        code = expanded(code)
        if code is None:
            raise
        code = ptx.raw_strings(code)
        edits = [*_asm_edits(code, original, name)]
    clean = blank_comments(code)
    edits += _constant_initialisers(clean)
    for match in re.finditer(r"__shared__(?<=\b__shared__)\s+(alignas)\s*\(", clean):
        edits.append((match.start(1), match.end(1), "ENGINE_ALIGNAS"))
    in_macros = _extern_in_macros(code, clean)
    edits += in_macros
    declared = [
        match
        for match in _EXTERN_SHARED.finditer(clean)
        if not any(begin <= match.start() < end for begin, end, _ in in_macros)
    ]
    bodies = function_bodies(clean) if declared else ()
    for match in declared:
        edits = [edit for edit in edits if not match.start() <= edit[0] < match.end()]
        kind = _ALIGNMENT.sub(" ", match.group("head"))
        kind, name, rest = " ".join(kind.split()), match.group("name"), (match.group("rest") or "").strip()
        pointer = f"(*const {name}){rest}" if rest else f"*const {name}"
        new = f"{kind} {pointer} = ({kind} (*){rest})engine_dynamic_shared();"
        if not match.group("array"):
            new = f"{kind} &{name} = *({kind} *)engine_dynamic_shared();"
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
