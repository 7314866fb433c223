"""mov and cvt."""

from __future__ import annotations

from .names import TYPES
from .use import ROUND, Unknown, Use, instruction

_INTEGERS = "u8 s8 u16 s16 u32 s32 u64 s64"
_FLOATS = "f16 bf16 f32 f64"
_WHOLE = {"rni": "nearest", "rzi": "zero", "rmi": "down", "rpi": "up"}
_EIGHTS = {"e4m3x2": "$E4m3", "e5m2x2": "$E5m2"}


@instruction("mov.{b,u,s,f}{16,32,64,128} d, a", "mov.pred p, q", "mov.{b32,b64,b128} {low, high}, a")
@instruction("mov.{b32,b64,b128} d, {low, high}")
def _mov(use: Use) -> str:
    (kind,) = use.types("pred b16 u16 s16 b32 u32 s32 b64 u64 s64 b128 f16 bf16 f16x2 bf16x2 f32 f64")
    use.expect_operands(2)
    if use.operands[0].startswith("{"):
        return f"$unpack({use.read(1, kind)}, {', '.join(use.targets(0))});"
    if use.operands[1].startswith("{"):
        parts = use.group(1)
        bits = {"b32": 32, "b64": 64, "b128": 128}.get(kind)
        if bits is None:
            raise Unknown
        each = f"b{bits // len(parts)}"
        return use.write(0, f"$pack<{TYPES[kind]}>({', '.join(use.value(part, each) for part in parts)})")
    if kind == "pred":
        return use.write(0, use.read(1, "pred"))
    return use.write(0, use.read(1, kind))


@instruction("cvt{.rnd}{.ftz}{.sat}.{u8,s8,...,f64}.{u8,s8,...,f64} d, a")
def _cvt(use: Use) -> str:
    to, source = use.types(f"{_INTEGERS} {_FLOATS}", 2)
    if use.flag("pack"):
        raise Unknown
    whole = use.one(*_WHOLE)
    mode = use.one("rn", "rz", "rm", "rp")
    limit = use.one("sat", "relu") or "none"
    ftz = "true" if use.flag("ftz") else "false"
    use.expect_operands(2)
    call = (
        f"$convert<{TYPES[to]}, {TYPES[source]}, $To::{ROUND[mode]}, $Whole::{_WHOLE.get(whole, 'no')}, "
        f"$Limit::{limit}, {ftz}>({use.read(1, source, wide=True)})"
    )
    return use.write(0, call, wide=True)


@instruction("cvt.{rn,rz}{.relu}.{f16x2,bf16x2}.f32 d, high, low")
def _cvt_pair(use: Use) -> str:
    pair, _ = use.types("f16x2 bf16x2 f32", 2)
    mode = use.one("rn", "rz", default=None)
    limit = use.one("relu") or "none"
    use.expect_operands(3)
    values = f"{use.read(1, 'f32')}, {use.read(2, 'f32')}"
    return use.write(0, f"$convert_pair<{TYPES[pair]}, $To::{ROUND[mode]}, $Limit::{limit}>({values})")


@instruction("cvt.{rna,rn,rz}{.relu}.tf32.f32 d, a")
def _cvt_tf32(use: Use) -> str:
    use.one("tf32", default=None)
    use.types("f32")
    mode = use.one("rna", "rn", "rz", default=None)
    limit = use.one("relu") or "none"
    use.expect_operands(2)
    return use.write(0, f"$tf32<$To::{ROUND[mode]}, $Limit::{limit}>({use.read(1, 'f32')})")


@instruction("cvt.rn.satfinite{.relu}.{e4m3x2,e5m2x2}.f32 d, high, low")
@instruction("cvt.rn.satfinite{.relu}.{e4m3x2,e5m2x2}.f16x2 d, a", "cvt.rn{.relu}.f16x2.{e4m3x2,e5m2x2} d, a")
def _cvt_eights(use: Use) -> str:
    eight = _EIGHTS[use.one(*_EIGHTS, default=None)]
    decodes = use.modifiers[-1] in _EIGHTS
    (kind,) = use.types("f32 f16x2")
    use.one("rn", default=None)
    if not decodes:
        use.one("satfinite", default=None)
    form = f"{eight}, $Limit::{use.one('relu') or 'none'}"
    if decodes:
        use.expect_operands(2)
        return use.write(0, f"$decode_pair<{form}>({use.read(1, 'b16')})")
    if kind == "f16x2":
        use.expect_operands(2)
        return use.write(0, f"$encode_halves<{form}>({use.read(1, 'f16x2')})")
    use.expect_operands(3)
    return use.write(0, f"$encode_pair<{form}>({use.read(1, 'f32')}, {use.read(2, 'f32')})")


@instruction("cvt.pack.sat.{u8,s8,u16,s16}.s32{.b32} d, a, b{, c}")
def _cvt_pack(use: Use) -> str:
    use.one("pack", default=None)
    use.one("sat", default=None)
    use.skip("b32")
    to, source = use.types("u16 s16 u8 s8 s32", 2)
    use.expect_operands(3, 4)
    third = use.read(3, "b32") if len(use.operands) == 4 else "0u"
    values = f"{use.read(1, source)}, {use.read(2, source)}, {third}"
    return use.write(0, f"$pack_saturated<{TYPES[to]}, {TYPES[source]}, {to[1:]}>({values})")
