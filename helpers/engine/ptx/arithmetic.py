"""Integers, bits, floats and their pairs, comparisons, functions."""

from __future__ import annotations

from .names import TYPES
from .use import ROUND, Unknown, Use, instruction

_INTEGERS = "u16 s16 u32 s32 u64 s64"
_FLOATS = "f32 f64 f16 bf16 f16x2 bf16x2"
_ROUNDS = ("rn", "rz", "rm", "rp")


def _cpp(kind: str) -> str:
    return TYPES[kind]


def _call(use: Use, name: str, kind: str, count: int) -> str:
    """Call a function of that many operands of one type, after the register that is written."""
    use.expect_operands(count + 1)
    return use.write(0, f"{name}({', '.join(use.read(i + 1, kind) for i in range(count))})")


def _limit(use: Use) -> str:
    return f"$Limit::{use.one('sat', 'relu') or 'none'}"


def _truth(value: object) -> str:
    return "true" if value else "false"


# ---------------------------------------------------------------- sums and products


@instruction("add{.sat}.{u,s}{16,32,64} d, a, b", "sub{.sat}.{u,s}{16,32,64} d, a, b")
@instruction("add{.cc}.{u,s}{32,64} d, a, b", "sub{.cc}.{u,s}{32,64} d, a, b")
@instruction("addc{.cc}.{u,s}{32,64} d, a, b", "subc{.cc}.{u,s}{32,64} d, a, b")
def _sum(use: Use) -> str:
    (kind,) = use.types(f"{_INTEGERS} b32 b64")
    saturated, gives, takes = use.flag("sat"), use.flag("cc"), use.opcode.endswith("c")
    adds = use.opcode.startswith("add")
    if gives or takes:
        use.expect_operands(3)
        name = "$add_carry" if adds else "$sub_borrow"
        values = f"{use.read(1, kind)}, {use.read(2, kind)}"
        return use.write(0, f"{name}<{_cpp(kind)}>({values}, {_truth(takes)}, {_truth(gives)})")
    name = ("$plus" if adds else "$minus") + ("_saturated" if saturated else "")
    return _call(use, f"{name}<{_cpp(kind)}>", kind, 2)


@instruction(
    "add{.rnd}{.ftz}{.sat}.f32 d, a, b", "sub{.rnd}{.ftz}{.sat}.f32 d, a, b", "mul{.rnd}{.ftz}{.sat}.f32 d, a, b"
)
@instruction("add{.rn}{.sat}.{f16,f16x2,bf16,bf16x2,f64} d, a, b", "sub{.rn}{.sat}.{f16,f16x2,bf16,bf16x2,f64} d, a, b")
@instruction("mul{.rn}{.sat}.{f16,f16x2,bf16,bf16x2,f64} d, a, b")
def _float_sum(use: Use) -> str:
    (kind,) = use.types(_FLOATS)
    if (mode := use.one(*_ROUNDS)) not in ("", "rn") and kind != "f32":
        raise Unknown
    limit, ftz = _limit(use), use.flag("ftz")
    return _call(use, f"${use.opcode}<{_cpp(kind)}, $To::{ROUND[mode]}, {limit}, {_truth(ftz)}>", kind, 2)


@instruction("fma{.rnd}{.ftz}{.sat,.relu}.{f32,f64,f16,f16x2,bf16,bf16x2} d, a, b, c", "mad{.rnd}.{f32,f64} d, a, b, c")
def _fma(use: Use) -> str:
    (kind,) = use.types(_FLOATS)
    if (mode := use.one(*_ROUNDS, default="rn")) != "rn" and kind != "f32":
        raise Unknown
    limit, ftz = _limit(use), use.flag("ftz")
    return _call(use, f"$multiply_add<{_cpp(kind)}, $To::{ROUND[mode]}, {limit}, {_truth(ftz)}>", kind, 3)


@instruction("mul.{lo,hi,wide}.{u,s}{16,32,64} d, a, b", "mul24.{lo,hi}.{u32,s32} d, a, b")
@instruction("mad.{lo,hi,wide}{.sat}.{u,s}{16,32,64} d, a, b, c", "mad24.{lo,hi}.{u32,s32} d, a, b, c")
@instruction("mad.{lo,hi}{.cc}.{u32,s32,u64,s64} d, a, b, c", "madc.{lo,hi}{.cc}.{u32,s32,u64,s64} d, a, b, c")
def _product(use: Use) -> str:
    part = use.one("lo", "hi", "wide", default=None)
    (kind,) = use.types(_INTEGERS if part == "wide" or "24" not in use.opcode else "u32 s32")
    cpp, factors = _cpp(kind), f"{use.read(1, kind)}, {use.read(2, kind)}" if len(use.operands) > 2 else ""
    if use.opcode.startswith("mul"):
        use.expect_operands(3)
        return use.write(0, f"${use.opcode}_{part}<{cpp}>({factors})")
    if part == "wide" and kind.endswith("64"):
        raise Unknown
    gives, takes, saturated = use.flag("cc"), use.opcode == "madc", use.flag("sat")
    use.expect_operands(4)
    if gives or takes:
        carry = f"{_truth(takes)}, {_truth(gives)}"
        return use.write(0, f"$add_carry<{cpp}>($mul_{part}<{cpp}>({factors}), {use.read(3, kind)}, {carry})")
    addend = use.read(3, f"typename $Twice<{cpp}>::type" if part == "wide" else kind)
    if saturated and (part, kind) != ("hi", "s32"):
        raise Unknown
    return use.write(0, f"${use.opcode}_{part}{'_saturated' if saturated else ''}<{cpp}>({factors}, {addend})")


@instruction("div.{u,s}{16,32,64} d, a, b", "rem.{u,s}{16,32,64} d, a, b")
@instruction("min.{u,s}{16,32,64} d, a, b", "max.{u,s}{16,32,64} d, a, b", "sad.{u,s}{16,32,64} d, a, b, c")
@instruction("abs.{s16,s32,s64} d, a", "neg.{s16,s32,s64} d, a")
def _integer(use: Use) -> str:
    (kind,) = use.types(_INTEGERS)
    name = {"min": "least_of", "max": "most_of"}.get(use.opcode, use.opcode)
    count = {"sad": 3, "abs": 1, "neg": 1}.get(use.opcode, 2)
    return _call(use, f"${name}<{_cpp(kind)}>", kind, count)


# ---------------------------------------------------------------- floats


@instruction("div.{approx,full}{.ftz}.f32 d, a, b", "div{.rnd}{.ftz}.{f32,f64} d, a, b")
def _divide(use: Use) -> str:
    (kind,) = use.types("f32 f64")
    how, ftz = use.one("approx", "full", *_ROUNDS), use.flag("ftz")
    if how in ("approx", "full") and kind == "f32":
        name = f"$divide_approx<{_truth(ftz)}>" if how == "approx" else f"$divide<float, $To::nearest, {_truth(ftz)}>"
        return _call(use, name, kind, 2)
    if how not in _ROUNDS or (how != "rn" and kind == "f64"):
        raise Unknown
    return _call(use, f"$divide<{_cpp(kind)}, $To::{ROUND[how]}, {_truth(ftz)}>", kind, 2)


@instruction("rcp{.rnd}{.ftz}.{f32,f64} d, a", "sqrt{.rnd}{.ftz}.{f32,f64} d, a")
def _root(use: Use) -> str:
    (kind,) = use.types("f32 f64")
    how, ftz = use.one(*_ROUNDS, default=None), use.flag("ftz")
    if how != "rn" and kind == "f64":
        raise Unknown
    name = "reciprocal" if use.opcode == "rcp" else "root"
    return _call(use, f"${name}<{_cpp(kind)}, $To::{ROUND[how]}, {_truth(ftz)}>", kind, 1)


@instruction(
    *(f"{name}.approx{{.ftz}}.f32 d, a" for name in ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos")),
    "tanh.approx.f32 d, a",
)
def _function(use: Use) -> str:
    use.types("f32")
    use.one("approx", default=None)
    ftz = use.opcode != "tanh" and use.flag("ftz")
    name = use.opcode if use.opcode in ("ex2", "lg2", "rcp") else use.opcode + "_"
    return _call(use, f"${name}<{_truth(ftz)}>", "f32", 1)


@instruction("rsqrt.approx.f64 d, a")
def _function_of_double(use: Use) -> str:
    use.types("f64")
    use.one("approx", default=None)
    use.skip("ftz")
    return _call(use, "$rsqrt_double", "f64", 1)


@instruction(
    "ex2.approx.{f16,f16x2} d, a", "ex2.approx.ftz.{bf16,bf16x2} d, a", "tanh.approx.{f16,f16x2,bf16,bf16x2} d, a"
)
def _function_of_small(use: Use) -> str:
    (kind,) = use.types("f16 f16x2 bf16 bf16x2")
    use.one("approx", default=None)
    ftz = use.opcode == "ex2" and use.flag("ftz")
    return _call(use, f"${use.opcode}_small<{_truth(ftz)}>", kind, 1)


@instruction("abs{.ftz}.{f32,f64,f16,f16x2,bf16,bf16x2} d, a", "neg{.ftz}.{f32,f64,f16,f16x2,bf16,bf16x2} d, a")
def _sign(use: Use) -> str:
    (kind,) = use.types(_FLOATS)
    ftz, name = use.flag("ftz"), {"abs": "absolute", "neg": "negated"}[use.opcode]
    return _call(use, f"${name}<{_cpp(kind)}, {_truth(ftz)}>", kind, 1)


@instruction(
    "min{.ftz}{.NaN}{.xorsign.abs}.{f32,f64,f16,f16x2,bf16,bf16x2} d, a, b",
    "max{.ftz}{.NaN}{.xorsign.abs}.{f32,f64,f16,f16x2,bf16,bf16x2} d, a, b",
)
def _extreme(use: Use) -> str:
    (kind,) = use.types(_FLOATS)
    flags = ", ".join(map(_truth, (use.opcode == "max", use.flag("NaN"), use.flag("xorsign"), use.flag("ftz"))))
    use.skip("abs")
    return _call(use, f"$extreme<{_cpp(kind)}, {flags}>", kind, 2)


@instruction("copysign.{f32,f64} d, a, b")
def _copysign(use: Use) -> str:
    (kind,) = use.types("f32 f64")
    return _call(use, f"$with_sign<{_cpp(kind)}>", kind, 2)


# ---------------------------------------------------------------- bits


@instruction("and.{pred,b16,b32,b64} d, a, b", "or.{pred,b16,b32,b64} d, a, b", "xor.{pred,b16,b32,b64} d, a, b")
@instruction("not.{pred,b16,b32,b64} d, a", "cnot.{b16,b32,b64} d, a")
def _logic(use: Use) -> str:
    (kind,) = use.types("pred b16 b32 b64")
    name = {"and": "both", "or": "either", "xor": "differ", "not": "invert"}.get(use.opcode, use.opcode)
    return _call(use, f"${name}<{_cpp(kind)}>", kind, 1 if use.opcode in ("not", "cnot") else 2)


@instruction("shl.{b16,b32,b64} d, a, bits", "shr.{b,u,s}{16,32,64} d, a, bits")
def _shift(use: Use) -> str:
    (kind,) = use.types(f"{_INTEGERS} b16 b32 b64")
    use.expect_operands(3)
    return use.write(0, f"${use.opcode}<{_cpp(kind)}>({use.read(1, kind)}, {use.read(2, 'u32')})")


@instruction("shf.{l,r}.{clamp,wrap}.b32 d, low, high, bits")
def _funnel(use: Use) -> str:
    use.types("b32 u32")
    left = use.one("l", "r", default=None) == "l"
    clamp = use.one("clamp", "wrap", default=None) == "clamp"
    return _call(use, f"$shf<{_truth(left)}, {_truth(clamp)}>", "u32", 3)


@instruction("popc.{b32,b64} d, a", "clz.{b32,b64} d, a", "brev.{b32,b64} d, a", "bfind{.shiftamt}.{u,s}{32,64} d, a")
def _bits(use: Use) -> str:
    (kind,) = use.types("b32 b64" if use.opcode != "bfind" else "u32 s32 u64 s64")
    shift = f", {_truth(use.flag('shiftamt'))}" if use.opcode == "bfind" else ""
    return _call(use, f"${use.opcode}<{_cpp(kind)}{shift}>", kind, 1)


@instruction("vshl.{u,s}32.{u,s}32.u32.{clamp,wrap} d, a, bits", "vshr.{u,s}32.{u,s}32.u32.{clamp,wrap} d, a, bits")
def _video_shift(use: Use) -> str:
    """Shift whole words; the type of the result matters only for saturation."""
    _, kind, _ = use.types("u32 s32", 3)
    how = use.one("clamp", "wrap", default=None)
    use.expect_operands(3)
    bits = f"({use.read(2, 'u32')}{' & 31' if how == 'wrap' else ''})"
    return use.write(0, f"${use.opcode[1:]}<{_cpp(kind)}>({use.read(1, kind)}, {bits})")


@instruction("bfe.{u,s}{32,64} d, a, position, length", "bfi.{b32,b64} d, a, into, position, length")
def _field(use: Use) -> str:
    (kind,) = use.types("u32 s32 u64 s64" if use.opcode == "bfe" else "b32 b64")
    count = 2 if use.opcode == "bfi" else 1
    use.expect_operands(count + 3)
    values = [use.read(i, kind) for i in range(1, count + 1)] + [use.read(count + i, "u32") for i in (1, 2)]
    return use.write(0, f"${use.opcode}<{_cpp(kind)}>({', '.join(values)})")


@instruction("bmsk.{clamp,wrap}.b32 d, position, length", "szext.{clamp,wrap}.{u32,s32} d, a, length")
def _mask(use: Use) -> str:
    clamp = _truth(use.one("clamp", "wrap", default=None) == "clamp")
    (kind,) = use.types("b32" if use.opcode == "bmsk" else "u32 s32")
    use.expect_operands(3)
    kinds = clamp if use.opcode == "bmsk" else f"{_cpp(kind)}, {clamp}"
    return use.write(0, f"${use.opcode}<{kinds}>({use.read(1, kind)}, {use.read(2, 'u32')})")


@instruction("lop3.b32 d, a, b, c, table")
def _lop3(use: Use) -> str:
    use.types("b32")
    use.expect_operands(5)
    values = ", ".join(use.read(i, "b32") for i in (1, 2, 3))
    return use.write(0, f"$lop3<(unsigned)({use.immediate(4)})>({values})")


@instruction("prmt.b32{.f4e,.b4e,.rc8,.ecl,.ecr,.rc16} d, a, b, selector")
def _prmt(use: Use) -> str:
    use.types("b32")
    modes = {"f4e": "forward", "b4e": "backward", "rc8": "replicate", "ecl": "clamp_left", "ecr": "clamp_right"}
    mode = use.one(*modes, "rc16")
    return _call(use, f"$prmt_mode<$Pick::{modes.get(mode, 'replicate16')}>" if mode else "$prmt", "b32", 3)


@instruction("dp4a.{u32,s32}.{u32,s32} d, a, b, c", "dp2a.{lo,hi}.{u32,s32}.{u32,s32} d, a, b, c")
def _dot(use: Use) -> str:
    high = use.one("lo", "hi", default=None) == "hi" if use.opcode == "dp2a" else None
    a, b = use.types("u32 s32", 2)
    use.expect_operands(4)
    result = "s32" if "s32" in (a, b) else "u32"
    first = "8" if high is None else "16"
    kinds = f"{_cpp(a[0] + first)}, {_cpp(b[0] + '8')}, {_cpp(result)}" + ("" if high is None else f", {_truth(high)}")
    return use.write(0, f"${use.opcode}<{kinds}>({use.read(1, 'b32')}, {use.read(2, 'b32')}, {use.read(3, result)})")


# ---------------------------------------------------------------- comparisons and choices

_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def _compared(use: Use, kind: str, left: str, right: str) -> str:
    ftz = use.flag("ftz")
    how = use.one(*_COMPARE, *_UNSIGNED, default=None)
    return f"$compare<$Compare::{_UNSIGNED.get(how, how)}, {_truth(ftz)}, {_cpp(kind)}>({left}, {right})"


def _joined(use: Use, join: str, comparison: str, third: int) -> str:
    if not join:
        return comparison
    operator = {"and": "&&", "or": "||", "xor": "!="}[join]
    return f"({comparison} {operator} {use.read(third, 'pred')})"


@instruction("setp.{eq,ne,lt,le,gt,ge,...}{.and,.or,.xor}{.ftz}.type p{|q}, a, b{, c}")
def _setp(use: Use) -> str:
    (kind,) = use.types(f"{_INTEGERS} b16 b32 b64 {_FLOATS}")
    join = use.one("and", "or", "xor")
    use_pair = kind.endswith("x2")
    to, *others = (part.strip() for part in use.operands[0].split("|"))
    use.operands[:1] = [to]
    if use_pair:
        if join or len(others) != 1:
            raise Unknown
        half = kind[:-2]
        left, right = use.read(1, kind), use.read(2, kind)
        compared = _compared(use, half, "engine_a.{0}", "engine_b.{0}")
        use.expect_operands(3)
        use.operands.append(others[0])
        writes = use.write(0, compared.format("low")) + use.write(3, compared.format("high"))
        return f"const auto engine_a = {left}, engine_b = {right}; {writes}"
    comparison = _compared(use, kind, use.read(1, kind), use.read(2, kind))
    use.expect_operands(3 + bool(join))
    if not others:
        return use.write(0, _joined(use, join, comparison, 3))
    use.operands.append(others[0])
    last = len(use.operands) - 1
    yes, no = (_joined(use, join, name, 3) for name in ("engine_c", "!engine_c"))
    return (
        f"const bool engine_c = {comparison}, engine_d = {yes}, engine_e = {no}; "
        + use.write(0, "engine_d")
        + use.write(last, "engine_e")
    )


_ONE = {"f32": "0x3f800000u", "f16": "0x3c00u", "bf16": "0x3f80u"}


@instruction("set.{eq,ne,lt,...}{.ftz}.{u32,f16x2}.f16x2 d, a, b", "set.{eq,ne,lt,...}.{u32,bf16x2}.bf16x2 d, a, b")
def _set_pair(use: Use) -> str:
    """Set each half to all ones, or to 1."""
    to, kind = use.types("u32 s32 f16x2 bf16x2", 2)
    if not kind.endswith("x2") or to not in ("u32", "s32", kind):
        raise Unknown
    half = kind[:-2]
    yes = _ONE[half] if to == kind else "0xffffu"
    compared = _compared(use, half, "engine_a.{0}", "engine_b.{0}")
    use.expect_operands(3)
    high, low = (compared.format(part) for part in ("high", "low"))
    result = use.write(0, f"(({high} ? {yes} : 0u) << 16 | ({low} ? {yes} : 0u))")
    return f"const auto engine_a = {use.read(1, kind)}, engine_b = {use.read(2, kind)}; {result}"


@instruction("set.{eq,ne,lt,...}{.and,.or,.xor}{.ftz}.{u32,s32,f32}.type d, a, b{, c}")
def _set(use: Use) -> str:
    to, kind = use.types(f"{_INTEGERS} b16 b32 b64 {_FLOATS}", 2)
    join = use.one("and", "or", "xor")
    if to not in ("u32", "s32", "f32") or kind.endswith("x2"):
        raise Unknown
    comparison = _compared(use, kind, use.read(1, kind), use.read(2, kind))
    use.expect_operands(3 + bool(join))
    yes, no = ("1.0f", "0.0f") if to == "f32" else ("~0u", "0u")
    return use.write(0, f"({_joined(use, join, comparison, 3)} ? {yes} : {no})")


@instruction("selp.{b,u,s}{16,32,64} d, a, b, p", "selp.{f32,f64} d, a, b, p")
def _selp(use: Use) -> str:
    (kind,) = use.types(f"{_INTEGERS} b16 b32 b64 f32 f64")
    use.expect_operands(4)
    return use.write(0, f"({use.read(3, 'pred')} ? {use.read(1, kind)} : {use.read(2, kind)})")


@instruction("slct{.ftz}.{b,u,s,f}{16,32,64}.{s32,f32} d, a, b, c")
def _slct(use: Use) -> str:
    kind, by = use.types(f"{_INTEGERS} b16 b32 b64 f32 f64", 2)
    use.skip("ftz")
    if by not in ("s32", "f32"):
        raise Unknown
    use.expect_operands(4)
    return use.write(0, f"({use.read(3, by)} >= 0 ? {use.read(1, kind)} : {use.read(2, kind)})")


@instruction("testp.{finite,infinite,number,notanumber,normal,subnormal}.{f32,f64} p, a")
def _testp(use: Use) -> str:
    kind_of = use.one("finite", "infinite", "number", "notanumber", "normal", "subnormal", default=None)
    (kind,) = use.types("f32 f64")
    return _call(use, f"$testp<$Test::{kind_of}, {_cpp(kind)}>", kind, 1)
