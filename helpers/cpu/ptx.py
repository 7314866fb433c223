"""Inline PTX for a host compiler: asm statements become calls of what `include/ptx_instructions.h` defines.

    asm volatile("cp.async.wait_group %0;" :: "n"(1) : "memory");

becomes a statement of C++ on the same line. Each operand is evaluated once, in the order of the statement.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_SPACE = "engine::ptx::"


@dataclass(frozen=True)
class _Instruction:
    """How an instruction is written and what it becomes.

    shown: in messages. pattern: of its name with all modifiers. operands: d is a register that is written, r one
    that is read or an immediate, i an immediate, m an address in brackets; {d4} is four registers in braces.
    code: the C++, with the operands by number, and the groups of the pattern by name; $ is the engine's namespace.
    """

    shown: str
    pattern: str
    operands: str
    code: str

    def cpp(self, match: re.Match[str], operands: list[list[str]]) -> str:
        """The C++ of one use: its match of the pattern, and its operands in groups."""
        named = {name: _CPP.get(found, found) for name, found in match.groupdict().items()}
        return self.code.replace("$", _SPACE).format(*(", ".join(group) for group in operands), **named)


# What modifiers are in C++. None: one that was left out.
_CPP = {
    None: "false",
    **dict.fromkeys((".trans", ".relu", ".ftz"), "true"),
    **{"f16": "engine::Binary16", "bf16": "engine::Bfloat16"},
    **{"rn": "engine::Round::nearest", "rz": "engine::Round::zero"},
    **{"ca": "4", "cg": "16"},  # the fewest bytes of a copy
    **{"sqrt": "sqrt_", "sin": "sin_", "cos": "cos_", "tanh": "tanh_"},  # not the host's
}
_SHARED = r"\.shared(?:::cta)?"
_MATRICES = r"\.sync\.aligned\.m8n8\.x(?P<n>{n})(?P<trans>\.trans)?" + _SHARED + r"\.b16"
_CONVERT = r"cvt\.(?P<mode>rn|rz)(?P<relu>\.relu)?\.(?P<f>f16|bf16)"


def _products() -> list[_Instruction]:
    """mma.sync: the engine's name, registers of D, A, B and C, and the types."""
    found = []
    for kind, (d, a, b, c), types in (
        ("K16_F16", (4, 4, 2, 4), "m16n8k16.row.col.f32.f16.f16.f32"),
        ("K16_BF16", (4, 4, 2, 4), "m16n8k16.row.col.f32.bf16.bf16.f32"),
        ("K16_HALF", (2, 4, 2, 2), "m16n8k16.row.col.f16.f16.f16.f16"),
        ("K8_F16", (4, 2, 1, 4), "m16n8k8.row.col.f32.f16.f16.f32"),
        ("K8_BF16", (4, 2, 1, 4), "m16n8k8.row.col.f32.bf16.bf16.f32"),
        ("K8_HALF", (2, 2, 1, 2), "m16n8k8.row.col.f16.f16.f16.f16"),
        ("K8_TF32", (4, 4, 2, 4), "m16n8k8.row.col.f32.tf32.tf32.f32"),
        ("K4_TF32", (4, 2, 1, 4), "m16n8k4.row.col.f32.tf32.tf32.f32"),
    ):
        name = f"mma.sync.aligned.{types}"
        call = f"engine_mma(engine::{kind}, $words({{1}}), $words({{2}}), $words({{3}}), __FILE__, __LINE__)"
        code = f"$take({call}, {{0}});"
        found.append(_Instruction(name, re.escape(name), f"{{d{d}}} {{r{a}}} {{r{b}}} {{r{c}}}", code))
    return found


_KNOWN = [
    *(
        _Instruction(
            "ldmatrix.sync.aligned.m8n8.{x1,x2,x4}{.trans}.shared{::cta}.b16",
            "ldmatrix" + _MATRICES.format(n=n),
            f"{{d{n}}} m",
            "$take($ldmatrix<{n}, {trans}>({1}), {0});",
        )
        for n in (1, 2, 4)
    ),
    *(
        _Instruction(
            "stmatrix.sync.aligned.m8n8.{x1,x2,x4}{.trans}.shared{::cta}.b16",
            "stmatrix" + _MATRICES.format(n=n),
            f"m {{r{n}}}",
            "$stmatrix<{n}, {trans}>({0}, $words({1}));",
        )
        for n in (1, 2, 4)
    ),
    *_products(),
    *(
        _Instruction(
            "cp.async.{ca,cg}.shared{::cta}.global{.L2::128B} [to], [from], bytes{, bytes read}",
            rf"cp\.async\.(?P<least>ca|cg){_SHARED}\.global(?:\.L2::(?:64|128|256)B)?",
            operands,
            code,
        )
        for operands, code in (
            ("m m i", "$cp_async<{2}, {least}>({0}, {1});"),
            ("m m i r", "$cp_async<{2}, {least}>({0}, {1}, {3});"),
        )
    ),
    _Instruction("cp.async.commit_group", r"cp\.async\.commit_group", "", "engine_async_commit();"),
    _Instruction("cp.async.wait_group", r"cp\.async\.wait_group", "i", "engine_async_wait({0});"),
    _Instruction("cp.async.wait_all", r"cp\.async\.wait_all", "", "engine_async_wait(~0u);"),
    _Instruction(
        "{ex2,lg2,rcp,rsqrt,sqrt,sin,cos}.approx{.ftz}.f32",
        r"(?P<f>ex2|lg2|rcp|rsqrt|sqrt|sin|cos)\.approx(?P<ftz>\.ftz)?\.f32",
        "d r",
        "$set({0}, ${f}<{ftz}>({1}));",
    ),
    _Instruction("tanh.approx.f32", r"tanh\.approx\.f32", "d r", "$set({0}, $tanh_<false>({1}));"),
    _Instruction("ex2.approx.f16x2", r"ex2\.approx\.(?P<f>f16)x2", "d r", "$set({0}, $ex2_pair<{f}, false>({1}));"),
    _Instruction(
        "ex2.approx.ftz.bf16x2", r"ex2\.approx\.ftz\.(?P<f>bf16)x2", "d r", "$set({0}, $ex2_pair<{f}, true>({1}));"
    ),
    _Instruction(
        "tanh.approx.{f16x2,bf16x2}", r"tanh\.approx\.(?P<f>f16|bf16)x2", "d r", "$set({0}, $tanh_pair<{f}>({1}));"
    ),
    _Instruction(
        "cvt.{rn,rz}{.relu}.{f16x2,bf16x2}.f32",
        rf"{_CONVERT}x2\.f32",
        "d r r",
        "$set({0}, $cvt_pair<{f}, {mode}, {relu}>({1}, {2}));",
    ),
    _Instruction(
        "cvt.{rn,rz}{.relu}.{f16,bf16}.f32",
        rf"{_CONVERT}\.f32",
        "d r",
        "$set({0}, $cvt_one<{f}, {mode}, {relu}>({1}));",
    ),
    _Instruction("mov.{b,u,s,f}{16,32,64}", r"mov\.(?:[bus](?:16|32|64)|f32|f64)", "d r", "$set({0}, {1});"),
    _Instruction("prmt.b32", r"prmt\.b32", "d r r r", "$set({0}, $prmt({1}, {2}, {3}));"),
    _Instruction("lop3.b32", r"lop3\.b32", "d r r r i", "$set({0}, $lop3<{4}>({1}, {2}, {3}));"),
    *(
        _Instruction(
            "{bar,barrier}{.cta}.{sync,arrive}{.aligned} number{, threads}",
            rf"(?:bar|barrier)(?:\.cta)?\.{kind}(?:\.aligned)?",
            operands,
            code,
        )
        for kind, operands, code in (
            ("sync", "r", "$bar_sync({0}, $block_threads(), true);"),
            ("sync", "r r", "$bar_sync({0}, {1}, true);"),
            ("arrive", "r r", "$bar_sync({0}, {1}, false);"),
        )
    ),
    _Instruction("bar.warp.sync", r"bar\.warp\.sync", "r", "__syncwarp({0});"),
]
_SPECIAL = {
    "laneid": "engine::lane_id()",
    "warpid": "$warp_id()",
    "smid": "$sm_id()",
    **{
        f"{ptx}.{axis}": f"{cuda}.{axis}"
        for ptx, cuda in (("tid", "threadIdx"), ("ntid", "blockDim"), ("ctaid", "blockIdx"), ("nctaid", "gridDim"))
        for axis in "xyz"
    },
    "clock": "(unsigned)engine_clock()",
    "clock64": "engine_clock()",
    "globaltimer": "engine_clock()",
}


def known() -> list[str]:
    """The instructions the engine knows."""
    return list(dict.fromkeys(instruction.shown for instruction in _KNOWN))


# ---------------------------------------------------------------- reading an asm statement

_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/|[()\[\]{}]|::|:|,|\s+|[^"()\[\]{}:,\s/]+|/', re.S)


@dataclass(frozen=True)
class _Operand:
    constraint: str  # with = or + where it is written
    expression: str


def _parts(inside: str) -> list[str]:
    """Template, outputs, inputs, clobbers: split at the colons that stand outside of all brackets."""
    parts, depth = [""], 0
    for token in _TOKEN.findall(inside):
        if token in "([{":
            depth += 1
        elif token in ")]}":
            depth -= 1
        if depth == 0 and token in (":", "::"):
            parts += [""] * len(token)
        elif not token.startswith(("//", "/*")):
            parts[-1] += token
    return parts


def _literal(text: str) -> str | None:
    """The contents of adjacent string literals, or None where there is something else."""
    if re.fullmatch(r'\s*(?:"(?:\\.|[^"\\])*"[\s\\]*)+', text, re.S) is None:
        return None
    pieces = re.findall(r'"((?:\\.|[^"\\])*)"', text, re.S)
    return "".join(pieces).replace("\\n", "\n").replace("\\t", "\t").replace('\\"', '"')


def _operands(text: str) -> list[_Operand]:
    found = []
    at = 0
    while match := re.compile(r'[\s,\\]*"([^"]*)"\s*\(').match(text, at):
        depth, end = 1, match.end()
        while end < len(text) and depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        found.append(_Operand(match.group(1), " ".join(text[match.end() : end - 1].replace("\\\n", " ").split())))
        at = end
    if text[at:].strip(" \n\t\\,"):
        raise ValueError(f"its operands cannot be read: {' '.join(text[at:].split())}")
    return found


def _split(text: str) -> list[str]:
    """At the commas outside of brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += {"{": 1, "[": 1, "(": 1, "}": -1, "]": -1, ")": -1}.get(char, 0)
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


class _Statement:
    """One asm statement on its way to C++."""

    def __init__(self, template: str, operands: list[_Operand]) -> None:
        self.operands = operands
        self.locals: set[str] = set()
        # Braces around everything are a scope of PTX.
        text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", template, flags=re.S).strip()
        while text.startswith("{") and text.endswith("}"):
            text = text[1:-1].strip()
        self.calls = " ".join(self._one(piece.strip()) for piece in text.split(";") if piece.strip())

    def _one(self, text: str) -> str:
        if declared := re.fullmatch(r"\.reg\s*\.(pred|[bus]32|f32|[bus]64|[bus]16)\s+([\w\s,%$]+)", text):
            kind = {"pred": "bool", "f32": "float"}.get(declared.group(1)) or {
                "16": "unsigned short",
                "32": "unsigned",
                "64": "unsigned long long",
            }[declared.group(1)[1:]]
            names = [name.strip() for name in declared.group(2).split(",")]
            self.locals |= set(names)
            return f"{kind} {', '.join(f'engine_reg_{name}{{}}' for name in names)};"
        guard = ""
        if guarded := re.match(r"@(!?)(\w+)\s+", text):
            guard, text = f"if ({guarded.group(1)}{self._register(guarded.group(2))}) ", text[guarded.end() :]
        if compared := re.fullmatch(r"setp\.(eq|ne|lt|le|gt|ge)\.([bus]32|f32)\s+(\w+)\s*,(.*)", text, re.S):
            operator = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}[compared.group(1)]
            kind = {"s": "int", "f": "float"}.get(compared.group(2)[0], "unsigned")
            left, right = (f"{_SPACE}as<{kind}>({self._value(part)})" for part in _split(compared.group(4)))
            return f"{guard}{self._register(compared.group(3))} = {left} {operator} {right};"
        name, _, rest = " ".join(text.split()).partition(" ")
        given = _split(rest)
        forms = [(match, form) for form in _KNOWN if (match := re.fullmatch(form.pattern, name))]
        if not forms:
            raise ValueError(f"the CPU engine does not know the instruction {name}")
        for match, form in forms:
            if len(form.operands.split()) == len(given):
                return f"{guard}{{ {form.cpp(match, self._shape(name, form.operands.split(), given))} }}"
        counts = " or ".join(str(len(form.operands.split())) for _, form in forms)
        raise ValueError(f"{name} takes {counts} operands, not {len(given)}")

    def _shape(self, name: str, wanted: list[str], given: list[str]) -> list[list[str]]:
        """The operands of an instruction as C++, in groups."""
        found = []
        for want, text in zip(wanted, given, strict=True):
            kind, count = want.strip("{}")[0], int(want.strip("{}")[1:] or 1)
            if kind == "m":
                if not (text.startswith("[") and text.endswith("]")):
                    raise ValueError(f"{name} takes an address in brackets where it has {text}")
                base, plus, offset = text[1:-1].partition("+")
                value = self._value(base)
                found.append([f"({value} + ({offset.strip()}))" if plus else value])
                continue
            parts = _split(text.strip("{}")) if text.startswith("{") else [text]
            if len(parts) != count:
                raise ValueError(f"{name} takes {count} registers where it has {text}")
            found.append([self._target(part) if kind == "d" else self._value(part) for part in parts])
        return found

    def _register(self, name: str) -> str:
        if name not in self.locals:
            raise ValueError(f"{name} is no operand and no register of the statement")
        return f"engine_reg_{name}"

    def _number(self, text: str) -> int:
        number = int(text[1:])
        if number >= len(self.operands):
            raise ValueError(f"it has no operand {text}")
        return number

    def _target(self, text: str) -> str:
        text = text.strip()
        if re.fullmatch(r"%\d+", text):
            number = self._number(text)
            if self.operands[number].constraint[0] not in "=+":
                raise ValueError(f'it writes to {text}, whose constraint is "{self.operands[number].constraint}"')
            return f"engine_{number}"
        return self._register(text)

    def _value(self, text: str) -> str:
        text = text.strip()
        if re.fullmatch(r"%\d+", text):
            number = self._number(text)
            if self.operands[number].constraint[0] == "=":
                raise ValueError(f'it reads {text}, whose constraint is "{self.operands[number].constraint}"')
            return f"engine_{number}"
        if special := re.fullmatch(r"%%?([a-z]\w*(?:\.\w)?)", text):
            if special.group(1) not in _SPECIAL or (self.operands and not text.startswith("%%")):
                raise ValueError(f"{text} is no special register that the engine knows, written as %%name")
            return _SPECIAL[special.group(1)].replace("$", _SPACE)
        if re.fullmatch(r"-?(?:\d+|0[xX][0-9a-fA-F]+)[uU]?", text):
            return text
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
            return f"__int_as_float(0x{match.group(1)})"
        return self._register(text)


def rewrite(inside: str) -> str:
    """What stands between the parentheses of an asm statement, as one C++ statement.

    Raises:
        ValueError: what the engine cannot follow.
    """
    parts = _parts(inside)
    template = _literal(parts[0])
    if template is None:
        raise ValueError(f"its text is no string literal: {' '.join(parts[0].split())}")
    operands = [operand for part in parts[1:3] for operand in _operands(part)]
    setup = []
    for number, operand in enumerate(operands):
        letter = operand.constraint.lstrip("=+")
        if letter not in ("r", "l", "f", "d", "h", "n"):
            raise ValueError(f'the constraint "{operand.constraint}" is none of r, l, f, d, h, n')
        if letter == "n":
            setup.append(f"constexpr auto engine_{number} = {operand.expression};")
        elif operand.constraint[0] in "=+":
            setup.append(f"auto &engine_{number} = {_SPACE}out<'{letter}'>({operand.expression});")
        else:
            setup.append(f"const auto engine_{number} = {_SPACE}in<'{letter}'>({operand.expression});")
    return " ".join(["({", *setup, _Statement(template, operands).calls, "})"])  # one statement, with its own ;
