"""Translate the names in instructions: operands, registers and labels of an asm statement, as C++."""

from __future__ import annotations

import re

from .reading import Operand, Refused, Unreadable

SPACE = "engine::ptx::"

# The types of PTX in C++; $ is the namespace.
TYPES = {
    "pred": "bool",
    **{f"{kind}8": name for kind, name in (("u", "unsigned char"), ("s", "signed char"), ("b", "unsigned char"))},
    **{f"{kind}16": name for kind, name in (("u", "unsigned short"), ("s", "short"), ("b", "unsigned short"))},
    **{f"{kind}32": name for kind, name in (("u", "unsigned"), ("s", "int"), ("b", "unsigned"))},
    **{f"{kind}64": name for kind, name in (("u", "unsigned long long"), ("s", "long long"))},
    "b64": "unsigned long long",
    "b128": "$B128",
    "f32": "float",
    "f64": "double",
    "f16": "$F16",
    "bf16": "$Bf16",
    "f16x2": "$F16x2",
    "bf16x2": "$Bf16x2",
}

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
    **{
        f"{ptx}.{axis}": f"$cluster_{cuda}().{axis}"
        for ptx, cuda in (
            ("clusterid", "index"),
            ("nclusterid", "count"),
            ("cluster_ctaid", "block_index"),
            ("cluster_nctaid", "size"),
        )
        for axis in "xyz"
    },
    "cluster_ctarank": "$cluster_rank()",
    "cluster_nctarank": "$cluster_blocks()",
    "is_explicit_cluster": "($cluster_blocks() > 1)",
}
_CONSTANT = re.compile(
    r"(?P<f32>0[fF][0-9a-fA-F]{8}\b)|(?P<f64>0[dD][0-9a-fA-F]{16}\b)|(?P<decimal>\d+\.\d*(?:[eE][+-]?\d+)?)"
    r"|(?P<whole>(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)[uU]?\b)|(?P<operand>%\d+)|(?P<warp>WARP_SZ\b)"
    r"|(?P<sign><<|>>|[-+*/&|^~()]|\s)"
)


class Names:
    """The names of one asm statement.

    labels, registers: to be declared before its code. has_several: it has several instructions, so results are kept in
    copies until all are done; is_in_place: not even then.
    """

    def __init__(self, operands: list[Operand], items: list[str]) -> None:
        self.operands = operands
        self.labels: list[str] = []
        self.registers: list[str] = []
        self.is_in_place = False
        self.has_several = sum(item not in "{}" and not re.match(r"\.|.*:$", item) for item in items) > 1
        self._scopes: list[dict[str, tuple[str, str]]] = [{}]  # of a register: its name in C++ and its type in PTX
        self._known_labels = [item[:-1] for item in items if item.endswith(":")]

    def open_scope(self) -> None:
        """Enter a scope, at a { of the statement."""
        self._scopes.append({})

    def close_scope(self) -> None:
        """Leave a scope, at a } of the statement.

        Raises:
            Unreadable: it closes nothing.
        """
        if len(self._scopes) == 1:
            raise Unreadable("it has a } without a {")
        self._scopes.pop()

    # ------------------------------------------------------------ registers and labels

    def declare(self, text: str) -> None:
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
        register = self._find(name)
        if register is None:
            raise Unreadable(f"{name} is no operand and no register of the statement")
        return register[0]

    def label(self, name: str) -> str:
        if name not in self._known_labels:
            raise Unreadable(f"it has no label {name} to jump to")
        cpp = "engine_label_" + re.sub(r"\W", "_", name)
        if cpp not in self.labels:
            self.labels.append(cpp)
        return cpp

    def jump(self, name: str) -> str:
        return f"goto {self.label(name)};"

    # ------------------------------------------------------------ operands of instructions

    def _operand(self, text: str) -> Operand | None:
        if not re.fullmatch(r"%\d+", text):
            return None
        if int(text[1:]) >= len(self.operands):
            raise Unreadable(f"it has no operand {text}")
        return self.operands[int(text[1:])]

    def target(self, text: str) -> str:
        """Return a register to write."""
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
        """Return a register to read. A register that the asm statement has written may also be read."""
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
        """Return a predicate to read; ! negates it."""
        text = text.strip()
        name = text.lstrip("! ")
        register = self._find(name)
        if register is None or register[1] != "pred":
            if (constant := self.constant(name)) is not None:  # ptxas takes numbers, so also those of "n" operands
                return f"({constant} {'==' if text.startswith('!') else '!='} 0)"
            raise Unreadable(f"{name} is no predicate of the statement")
        return f"!{register[0]}" if text.startswith("!") else register[0]

    def is_predicate(self, text: str) -> bool:
        register = self._find(text.lstrip("! "))
        return register is not None and register[1] == "pred"

    def constant(self, text: str) -> str | None:
        """Translate a constant expression to C++; None if it is not one."""
        expression, at, kinds = "", 0, set()
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
            expression += piece
            at = match.end()
        if not kinds - {"sign"}:
            return None
        return f"({expression.strip()})" if len(kinds) > 1 else expression.strip()
