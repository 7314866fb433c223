"""One asm statement on its way to C++: its operands and registers, scopes, labels and predicates."""

from __future__ import annotations

import functools
import re

from . import reading
from .reading import Operand, Refused, Unreadable
from .use import SPACE, TYPES, Use, nearest, written

_LANES = {"eq": "1u << engine::lane_id()", "lt": "$lanes_below()", "le": "$lanes_below() * 2 + 1"}
_LANES |= {"ge": "~$lanes_below()", "gt": "~($lanes_below() * 2 + 1)"}
_SPECIAL = {
    "laneid": "engine::lane_id()",
    "warpid": "$warp_id()",
    "nwarpid": "2048u / 32",
    "smid": "$sm_id()",
    "nsmid": "$sm_count()",
    **{
        f"{ptx}.{axis}": f"{cuda}.{axis}"
        for ptx, cuda in (("tid", "threadIdx"), ("ntid", "blockDim"), ("ctaid", "blockIdx"), ("nctaid", "gridDim"))
        for axis in "xyz"
    },
    **{f"lanemask_{name}": f"({code})" for name, code in _LANES.items()},
    "clock": "(unsigned)engine_clock()",
    "clock_hi": "(unsigned)(engine_clock() >> 32)",
    "clock64": "engine_clock()",
    "globaltimer": "engine_clock()",
    "globaltimer_lo": "(unsigned)engine_clock()",
    "globaltimer_hi": "(unsigned)(engine_clock() >> 32)",
    "dynamic_smem_size": "engine_dynamic_shared_size()",
    "gridid": "1ull",
}
_BARRIER = '__asm__ __volatile__("" ::: "memory");'
_CONSTANT = re.compile(
    r"(?P<f32>0[fF][0-9a-fA-F]{8}\b)|(?P<f64>0[dD][0-9a-fA-F]{16}\b)|(?P<decimal>\d+\.\d*(?:[eE][+-]?\d+)?)"
    r"|(?P<whole>(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)[uU]?\b)|(?P<operand>%\d+)|(?P<warp>WARP_SZ\b)"
    r"|(?P<sign><<|>>|[-+*/&|^~()]|\s)"
)


class Statement:
    """The template of an asm statement, translated. code: C++; labels, registers: what is to be declared before it."""

    def __init__(self, template: str, operands: list[Operand], unique: int) -> None:
        self.operands = operands
        self.labels: list[str] = []
        self.registers: list[str] = []
        self.is_in_place = False
        self._scopes: list[dict[str, tuple[str, str]]] = [{}]  # of a register: its name in C++ and its type in PTX
        items = list(reading.items(template.replace("%=", f"_{unique}")))
        # Then results are kept in copies until all is done.
        self.has_several = sum(item not in "{}" and not re.match(r"\.|.*:$", item) for item in items) > 1
        self._known_labels = [item[:-1] for item in items if item.endswith(":")]
        code = [self._item(item) for item in items]
        self.code = " ".join(part for part in code if part)

    def _item(self, text: str) -> str:
        if text == "{":
            self._scopes.append({})
            return ""
        if text == "}":
            if len(self._scopes) == 1:
                raise Unreadable("it has a } without a {")
            self._scopes.pop()
            return ""
        if text.endswith(":"):
            return f"{self._label(text[:-1])}:;"
        if text.startswith(".reg"):
            self._declare(text)
            return ""
        if re.match(r"\.(pragma|loc)\b", text):
            return ""
        guard = ""
        if guarded := re.match(r"@\s*(!?\s*[\w$%]+)\s+", text):
            guard, text = f"if ({self.predicate(guarded.group(1))}) ", text[guarded.end() :]
        use = Use(text, self)
        try:
            code = written(use)
            said = _unknown(use.name or text)
        except Refused as error:
            code, said = None, str(error)
        if code is None:
            code = _failure(said)
        return f"{guard}{{ {code.replace('$', SPACE)} }}"

    # ------------------------------------------------------------ registers and labels

    def _declare(self, text: str) -> None:
        match = re.fullmatch(r"\.reg\s*\.(\w+)\s+(.*)", text)
        if match is None or match.group(1) not in TYPES:
            raise Unreadable(f"the engine cannot read the declaration {text}")
        for name in match.group(2).split(","):
            name = name.strip().replace("%%", "%")
            many = re.fullmatch(r"([\w$%]+)<(\d+)>", name)
            names = [f"{many.group(1)}{i}" for i in range(int(many.group(2)))] if many else [name]
            for one in names:
                cpp = f"engine_r{len(self.registers)}_" + re.sub(r"\W", "_", one)
                self._scopes[-1][one] = cpp, match.group(1)
                self.registers.append(f"{TYPES[match.group(1)].replace('$', SPACE)} {cpp};")

    def _find(self, name: str) -> tuple[str, str] | None:
        name = name.replace("%%", "%")
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), None)

    def _register(self, name: str) -> str:
        found = self._find(name)
        if found is None:
            raise Unreadable(f"{name} is no operand and no register of the statement")
        return found[0]

    def _label(self, name: str) -> str:
        if name not in self._known_labels:
            raise Unreadable(f"it has no label {name} to jump to")
        cpp = "engine_label_" + re.sub(r"\W", "_", name)
        if cpp not in self.labels:
            self.labels.append(cpp)
        return cpp

    def jump(self, name: str) -> str:
        return f"goto {self._label(name)};"

    # ------------------------------------------------------------ operands of instructions

    def _operand(self, text: str) -> Operand | None:
        if not re.fullmatch(r"%\d+", text):
            return None
        if int(text[1:]) >= len(self.operands):
            raise Unreadable(f"it has no operand {text}")
        return self.operands[int(text[1:])]

    def target(self, text: str) -> str:
        """The register that is written."""
        text = text.strip()
        if text == "_":
            return f"{SPACE}Nowhere()"
        operand = self._operand(text)
        if operand is None:
            return self._register(text)
        if not operand.is_written:
            raise Unreadable(f'it writes to {text}, whose constraint is "{operand.constraint}"')
        return f"engine_{text[1:]}"

    def value(self, text: str) -> str:
        """A register that is read. What an asm statement has written itself, it may read as well."""
        text = text.strip()
        operand = self._operand(text)
        if operand is not None:
            if not operand.is_read and not self.has_several:
                raise Unreadable(f'it reads {text}, whose constraint is "{operand.constraint}"')
            return f"engine_{text[1:]}"
        if self._find(text):
            return self._register(text)
        if special := re.fullmatch(r"%%?([a-z]\w*(?:\.\w)?)", text):
            if special.group(1) not in _SPECIAL:
                raise Refused(f"the CPU engine does not know the special register {text}")
            return _SPECIAL[special.group(1)].replace("$", SPACE)
        return self._register(text)

    def predicate(self, text: str) -> str:
        """A predicate that is read, ! for its opposite."""
        text = text.strip()
        name = text.lstrip("! ")
        found = self._find(name)
        if found is None or found[1] != "pred":
            if name in ("0", "1"):
                return "true" if (name == "1") != text.startswith("!") else "false"
            raise Unreadable(f"{name} is no predicate of the statement")
        return f"!{found[0]}" if text.startswith("!") else found[0]

    def is_predicate(self, text: str) -> bool:
        found = self._find(text.lstrip("! "))
        return found is not None and found[1] == "pred"

    def constant(self, text: str) -> str | None:
        """A constant expression as C++; None where it is none."""
        found, at, kinds = "", 0, set()
        while at < len(text):
            match = _CONSTANT.match(text, at)
            if match is None:
                return None
            kind, piece = match.lastgroup, match.group()
            if kind == "f32":
                piece = f"__int_as_float(0x{piece[2:]})"
            elif kind == "f64":
                piece = f"__longlong_as_double(0x{piece[2:]}ll)"
            elif kind == "warp":
                piece = "32"
            elif kind == "operand":
                operand = self._operand(piece)
                if operand is None or operand.letter != "n":
                    return None
                piece = f"engine_{piece[1:]}"
            kinds.add(kind)
            found += piece
            at = match.end()
        if not kinds - {"sign"}:
            return None
        return f"({found.strip()})" if len(kinds) > 1 else found.strip()


def _unknown(name: str) -> str:
    """What the engine says of an instruction that it does not know."""
    like = nearest(name)
    return f"the CPU engine does not know the instruction {name}" + (
        f". The nearest that it knows: {like}" if like else ""
    )


def _failure(said: str) -> str:
    """A statement of C++ that stops the thread, with its line."""
    text = f"inline PTX: {said}. Say it in another way, in CUDA C++ perhaps, or run this kernel on a GPU"
    return '$unknown("' + re.sub(r'["\\]', r"\\\g<0>", text) + '");'


def rewrite(inside: str, unique: int = 0, *, is_volatile: bool = True) -> str:
    """What stands between the parentheses of an asm statement, as one C++ statement without its semicolon.

    unique: a number that no other statement of the source has. is_volatile: it is done as often as it is met.

    Raises:
        Unreadable: what the engine cannot follow.
    """
    parts, template = _read(inside)
    return _rewritten(parts, template, unique if "%=" in template else 0, is_volatile)


# Of sources that differ in a line or two, such as a kernel and one with a planted bug, the others are asked for again.
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
                said = f'the constraint "{operand.constraint}" is none of r, l, f, d, h, q, n'
                return "({ " + _failure(said).replace("$", SPACE) + " })"
            return f"({{ {_BARRIER} }})"
    statement = Statement(template, operands, unique)
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
        elif not statement.has_several or statement.is_in_place:
            before.append(f"auto &{mine} = {SPACE}out<'{letter}'>({operand.expression});")
        else:  # written once, when all is done
            before.append(f"auto &engine_out_{number} = {SPACE}out<'{letter}'>({operand.expression});")
            start = f"= engine_out_{number}" if operand.is_read else "{}"
            before.append(f"typename {SPACE}Bare<decltype(engine_out_{number})>::type {mine} {start};")
            after.append(f"engine_out_{number} = {mine};")
    labels = [f"__label__ {', '.join(statement.labels)};"] if statement.labels else []
    return " ".join(["({", *labels, *before, *statement.registers, statement.code, *after, "})"])
