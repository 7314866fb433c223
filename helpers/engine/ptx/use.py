"""One use of an instruction: its name and modifiers, its operands as C++, and the table of the functions that write it.

Assemblers accept modifiers in any order, so the writers of instructions take those that they know, by name.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable

from .names import TYPES, Names
from .reading import Refused, Unreadable, split

ROUND = {"rn": "nearest", "rz": "zero", "rp": "up", "rm": "down", "rna": "away", "": "any"}


class Unknown(Exception):
    """The engine does not have this form of the instruction."""


class Use:
    """An instruction in a statement: for `add.rn.f32 %0, %1, %2`, the opcode "add", modifiers and operands.

    Operands are counted from 0. A written operand becomes a statement of C++, a read one an expression.
    """

    def __init__(self, text: str, names: Names) -> None:
        # The name ends where the operands begin; `{`, `[` may stand right behind it.
        name, self._rest = re.fullmatch(r"([\w.:]*)\s*(.*)", text, re.S).groups()
        self.name = name
        self.opcode, *self.modifiers = name.split(".")
        self._left = list(self.modifiers)
        self.operands = split(self._rest)
        self._names = names

    # ------------------------------------------------------------ modifiers

    def one(self, *names: str, default: str | None = "") -> str:
        """Take the modifier that is there; `default` if none is, and Unknown if that is None."""
        for name in names:
            if name in self._left:
                self._left.remove(name)
                return name
        if default is None:
            raise Unknown
        return default

    def flag(self, name: str) -> bool:
        """Take a modifier, and return whether it was there."""
        return bool(self.one(name))

    def skip(self, *names: str) -> None:
        """Take modifiers that change nothing here."""
        for name in names:
            self.one(name)

    def matching(self, pattern: str) -> list[str]:
        """Take all modifiers of this form, in their order."""
        matches = [name for name in self._left if re.fullmatch(pattern, name)]
        self._left = [name for name in self._left if name not in matches]
        return matches

    def types(self, allowed: str = "", count: int = 1) -> list[str]:
        """Take that many modifiers that are types. allowed: their names; empty: all."""
        names = allowed.split() or list(TYPES)
        types = [name for name in self._left if name in names]
        if len(types) != count:
            raise Unknown
        for name in types:
            self._left.remove(name)
        return types

    def expect_operands(self, *counts: int) -> None:
        """Check that no modifier is left over, and that the number of operands is one of `counts`, if any are given.

        Raises:
            Unknown: a modifier is left over.
            Refused: the number of operands is another one.
        """
        if self._left:
            raise Unknown
        if counts and len(self.operands) not in counts:
            wanted = " or ".join(map(str, counts))
            raise Refused(f"{self.name} takes {wanted} operands, not {len(self.operands)}")

    # ------------------------------------------------------------ operands

    def read(self, number: int, kind: str = "", *, wide: bool = False) -> str:
        """Return an operand as an expression of a type of PTX; without a type, as its register has it.

        wide: the register may be wider than the type.
        """
        return self.value(self.operands[number], kind, wide=wide)

    def value(self, text: str, kind: str = "", *, wide: bool = False) -> str:
        """Return a part of an operand in the same way."""
        if kind == "pred":
            return self._names.predicate(text)
        number = self._names.constant(text)
        if not kind:
            return self._names.value(text) if number is None else number
        cpp = TYPES.get(kind, kind)
        if number is not None:
            return f"$constant<{cpp}>({number})"
        return f"${'low_as' if wide else 'as'}<{cpp}>({self._names.value(text)})"

    def immediate(self, number: int) -> str:
        """Return an operand that must be a constant."""
        text = self.operands[number]
        constant = self._names.constant(text)
        if constant is None:
            raise Unreadable(f"{self.name} takes a constant where it has {text}")
        return constant

    def target(self, number: int) -> str:
        """Return the register that an operand names."""
        return self._names.target(self.operands[number])

    def in_place(self) -> None:
        """Keep the written operands where they are: the instruction writes them later than here."""
        self._names.is_in_place = True

    def write(self, number: int, expression: str, *, wide: bool = False) -> str:
        return f"$assign{'_wide' if wide else ''}({self.target(number)}, {expression});"

    def group(self, number: int, count: int | None = None) -> list[str]:
        """Return the parts of an operand in braces. A single register needs no braces."""
        text = self.operands[number]
        pieces = split(text[1:-1]) if text.startswith("{") else [text]
        if count is not None and len(pieces) != count:
            raise Refused(f"{self.name} takes {count} registers where it has {text}")
        return pieces

    def targets(self, number: int, count: int | None = None) -> list[str]:
        return [self._names.target(part) for part in self.group(number, count)]

    def values(self, number: int, count: int | None = None, kind: str = "", *, wide: bool = False) -> list[str]:
        return [self.value(part, kind, wide=wide) for part in self.group(number, count)]

    def address(self, number: int) -> str:
        """Return an operand in brackets as two arguments, base and offset."""
        text = self.operands[number]
        if not (text.startswith("[") and text.endswith("]")):
            raise Unreadable(f"{self.name} takes an address in brackets where it has {text}")
        match = re.fullmatch(r"\s*([\w%$]+)\s*(?:([+-])\s*(.*?))?\s*", text[1:-1], re.S)
        if match is None:
            raise Unknown
        base, sign, offset = match.groups()
        number_of = self._names.constant(offset) if offset else "0"
        if number_of is None:
            raise Unreadable(f"the address {text} is no register and a constant")
        value = self._names.constant(base)
        value = self._names.value(base) if value is None else f"(unsigned long long)({value})"
        return f"{value}, {'-' if sign == '-' else ''}(long long)({number_of})"

    def is_predicate(self, number: int) -> bool:
        return self._names.is_predicate(self.operands[number])

    def jump(self, number: int) -> str:
        """Jump to the label that an operand names."""
        return self._names.jump(self.operands[number])


# ---------------------------------------------------------------- the table

Writer = Callable[[Use], str]
_WRITERS: dict[str, list[Writer]] = {}
_SHOWN: dict[str, list[str]] = {}


def instruction(*shown: str, opcodes: str = "") -> Callable[[Writer], Writer]:
    """Register a function that writes the C++ of instructions; it raises Unknown for forms that it lacks.

    shown: how the instructions are written, for messages: "add{.sat}.type d, a, b". opcodes: of them, where the
    first words of `shown` do not say it.
    """

    def registered(writer: Writer) -> Writer:
        for text in shown:
            name = re.match(r"\w+", text)
            for opcode in opcodes.split() or ([name.group()] if name else []):
                if writer not in _WRITERS.setdefault(opcode, []):
                    _WRITERS[opcode].append(writer)
                _SHOWN.setdefault(opcode, []).append(text.replace("*", opcode, 1))
        return writer

    return registered


def known() -> list[str]:
    """Return the instructions that the engine knows, as they are written."""
    return list(dict.fromkeys(text for texts in _SHOWN.values() for text in texts))


@functools.cache  # CUB's headers hold hundreds of instructions, and each kernel that includes them asks
def nearest(name: str) -> str:
    """Return the known instruction most similar to `name`, or "" if none is similar."""
    opcode = name.split(".")[0]
    shown = _SHOWN.get(opcode, [])
    if shown:
        return max(shown, key=lambda text: difflib.SequenceMatcher(None, text.split(" ")[0], name).ratio())
    whole = {text.split(" ")[0]: text for text in known()}
    if close := difflib.get_close_matches(name, whole, 1, 0.7):
        return whole[close[0]]
    if close := difflib.get_close_matches(opcode, _SHOWN, 1, 0.6):
        return _SHOWN[close[0]][0]
    return ""


def written(use: Use) -> str | None:
    """Return the C++ of an instruction; None if the engine does not know it.

    Raises:
        Refused: it knows the instruction, but not with these operands.
    """
    refused = None
    for writer in _WRITERS.get(use.opcode, ()):
        before = list(use._left), list(use.operands)
        try:
            return writer(use)
        except Unknown:
            pass
        except Refused as error:
            refused = error
        use._left, use.operands = before
    if refused is not None:
        raise refused
    return None
