"""One asm statement as C++."""

from __future__ import annotations

import functools
import re

from . import reading
from .names import SPACE, Names
from .reading import Refused, Unreadable
from .use import Use, nearest, written

_BARRIER = '__asm__ __volatile__("" ::: "memory");'


def _code(names: Names, item: str) -> str:
    """Translate one item of a template to C++."""
    if item == "{":
        names.open_scope()
    elif item == "}":
        names.close_scope()
    elif item.endswith(":"):
        return f"{names.label(item[:-1])}:;"
    elif item.startswith(".reg"):
        names.declare(item)
    elif not re.match(r"\.(pragma|loc)\b", item):
        return _instruction(names, item)
    return ""


def _instruction(names: Names, text: str) -> str:
    guard = ""
    if guarded := re.match(r"@\s*(!?\s*[\w$%]+)\s+", text):
        guard, text = f"if ({names.predicate(guarded.group(1))}) ", text[guarded.end() :]
    use = Use(text, names)
    try:
        code = written(use)
        message = _unknown(use.name or text)
    except Refused as error:
        code, message = None, str(error)
    if code is None:
        code = _failure(message)
    return f"{guard}{{ {code.replace('$', SPACE)} }}"


def _unknown(name: str) -> str:
    """Return the message for an instruction that the engine does not know."""
    like = nearest(name)
    return f"the CPU engine does not know the instruction {name}" + (
        f". The nearest that it knows: {like}" if like else ""
    )


_INSTEAD = "Say it in another way, in CUDA C++ perhaps"


def _failure(message: str) -> str:
    """Return a statement of C++ that stops the thread, with its line."""
    text = f"inline PTX: {message}. {_INSTEAD}, or run this kernel on a GPU"
    return '$unknown("' + re.sub(r'["\\]', r"\\\g<0>", text) + '");'


def rewrite(inside: str, unique: int = 0, *, is_volatile: bool = True) -> str:
    """Translate the inside of an asm statement's parentheses to one C++ statement without its semicolon.

    unique: a number that no other statement of the source has. is_volatile: it is done as often as it is met.

    Raises:
        Unreadable: what the engine cannot follow.
    """
    parts, template = _read(inside)
    return _rewritten(parts, template, unique if "%=" in template else 0, is_volatile)


# Sources that differ in a line or two, such as a kernel and one with a planted bug, share most of their statements.
@functools.lru_cache(maxsize=512)
def _read(inside: str) -> tuple[tuple[str, ...], str]:
    parts = tuple(reading.parts(inside))
    template = reading.literal(parts[0])
    if template is None:
        raise Unreadable(f"its text is no string literal: {' '.join(parts[0].split())}")
    return parts, template


@functools.lru_cache(maxsize=512)
def _rewritten(parts: tuple[str, ...], template: str, unique: int, is_volatile: bool) -> str:
    operands = [operand for part in parts[1:3] for operand in reading.operands(part)]
    for operand in operands:
        if operand.letter not in ("r", "l", "f", "d", "h", "n", "q"):
            if template.strip():  # a host's own assembly, in a function that is none of a kernel's
                message = f'the constraint "{operand.constraint}" is none of r, l, f, d, h, q, n'
                return "({ " + _failure(message).replace("$", SPACE) + " })"
            return f"({{ {_BARRIER} }})"
    items = list(reading.items(template.replace("%=", f"_{unique}")))
    names = Names(operands, items)
    code = " ".join(filter(None, [_code(names, item) for item in items]))
    before, after = [], []
    if "memory" in "".join(parts[3:]) or (is_volatile and re.search(r"\bldu?\.", template)):
        # No access is moved over it, and a loop that waits for another block's store reads again.
        before, after = [_BARRIER], [_BARRIER]
    for number, operand in enumerate(operands):
        letter, mine = operand.letter, f"engine_{number}"
        if letter == "n":
            before.append(f"constexpr auto {mine} = {operand.expression};")
        elif not operand.is_written:
            before.append(f"auto {mine} = {SPACE}in<'{letter}'>({operand.expression});")
        elif not names.has_several or names.is_in_place:
            before.append(f"auto &{mine} = {SPACE}out<'{letter}'>({operand.expression});")
        else:  # written once, when all is done
            before.append(f"auto &engine_out_{number} = {SPACE}out<'{letter}'>({operand.expression});")
            start = f"= engine_out_{number}" if operand.is_read else "{}"
            before.append(f"typename {SPACE}Bare<decltype(engine_out_{number})>::type {mine} {start};")
            after.append(f"engine_out_{number} = {mine};")
    labels = [f"__label__ {', '.join(names.labels)};"] if names.labels else []
    return " ".join(["({", *labels, *before, *names.registers, code, *after, "})"])
