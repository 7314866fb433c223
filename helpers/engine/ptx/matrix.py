"""Matrices between shared memory and registers, and products on tensor cores."""

from __future__ import annotations

from .use import Unknown, Use, instruction


def _matrices(use: Use) -> tuple[int, str]:
    """Return the number of matrices and whether they are transposed, as an argument of C++."""
    use.one("sync", default=None)
    use.one("aligned", default=None)
    use.one("m8n8", default=None)
    count = int(use.one("x1", "x2", "x4", default=None)[1:])
    transposed = use.flag("trans")
    use.skip("shared", "shared::cta")
    use.types("b16")
    use.expect_operands(2)
    return count, "true" if transposed else "false"


@instruction("ldmatrix.sync.aligned.m8n8.{x1,x2,x4}{.trans}.shared{::cta}.b16 {d...}, [a]")
def _ldmatrix(use: Use) -> str:
    count, transposed = _matrices(use)
    return f"$take($ldmatrix<{count}, {transposed}>({use.address(1)}), {', '.join(use.targets(0, count))});"


@instruction("stmatrix.sync.aligned.m8n8.{x1,x2,x4}{.trans}.shared{::cta}.b16 [a], {b...}")
def _stmatrix(use: Use) -> str:
    count, transposed = _matrices(use)
    words = f"$words({', '.join(use.values(1, count))})"
    return f"$stmatrix<{count}, {transposed}>({use.address(0)}, {words});"


@instruction("movmatrix.sync.aligned.m8n8.trans.b16 d, a")
def _movmatrix(use: Use) -> str:
    for name in ("sync", "aligned", "m8n8", "trans"):
        use.one(name, default=None)
    use.types("b16")
    use.expect_operands(2)
    return use.write(0, f"$movmatrix({use.read(1, 'b32')})")


# By shape, and the types of D, A, B and C: the engine's name for them.
_FLOATS = {
    ("m16n8k16", "f32.f16.f16.f32"): "K16_F16",
    ("m16n8k16", "f32.bf16.bf16.f32"): "K16_BF16",
    ("m16n8k16", "f16.f16.f16.f16"): "K16_HALF",
    ("m16n8k8", "f32.f16.f16.f32"): "K8_F16",
    ("m16n8k8", "f32.bf16.bf16.f32"): "K8_BF16",
    ("m16n8k8", "f16.f16.f16.f16"): "K8_HALF",
    ("m16n8k8", "f32.tf32.tf32.f32"): "K8_TF32",
    ("m16n8k4", "f32.tf32.tf32.f32"): "K4_TF32",
}
_EIGHTS = {"e4m3": "$E4m3", "e5m2": "$E5m2"}
_BITS = {"s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1}
_SHAPES = {8: (16, 32), 4: (32, 64), 1: (128, 256)}  # K of one register of B and of two


def _numbers(shape: str) -> tuple[int, int]:
    """Return M and K; N is 8."""
    m, _, k = shape[1:].partition("n8k")
    return int(m), int(k)


def _registers(use: Use, d: int, a: int, b: int, c: int, call: str) -> str:
    """Call with the registers of A, B and C, and write the result to those of D."""
    use.expect_operands(4)
    addend = "f32" if "f32" in use.modifiers else "b32"
    registers = use.values(1, a, "b32"), use.values(2, b, "b32"), use.values(3, c, addend)
    factors = [f"$words({', '.join(group)})" for group in registers]
    return f"$take({call.format(*factors)}, {', '.join(use.targets(0, d))});"


@instruction(
    *(f"mma.sync.aligned.{shape}.row.col.{types} d, a, b, c" for shape, types in _FLOATS),
    "mma.sync.aligned.m16n8k32.row.col.f32.{e4m3,e5m2}.{e4m3,e5m2}.f32 d, a, b, c",
    "mma.sync.aligned.m16n8k32.row.col.f16.{e4m3,e5m2}.{e4m3,e5m2}.f16 d, a, b, c",
    "mma.sync.aligned.{m8n8k16,m16n8k16,m16n8k32}.row.col{.satfinite}.s32.{u8,s8}.{u8,s8}.s32 d, a, b, c",
    "mma.sync.aligned.{m8n8k32,m16n8k32,m16n8k64}.row.col{.satfinite}.s32.{u4,s4}.{u4,s4}.s32 d, a, b, c",
    "mma.sync.aligned.{m8n8k128,m16n8k128,m16n8k256}.row.col.s32.b1.b1.s32.{xor,and}.popc d, a, b, c",
    "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 d, a, b, c",
)
def _mma(use: Use) -> str:
    for name in ("sync", "aligned", "row", "col"):
        use.one(name, default=None)
    shape = (use.matching(r"m\d+n8k\d+") or [""])[0]
    types = use.matching(r"[a-z]+\d+|e\dm\d")
    if len(types) != 4 or not shape:
        raise Unknown
    d, a, b, c = types
    m, k = _numbers(shape)
    if kind := _FLOATS.get((shape, ".".join(types))):
        small, per = d == "f16", 2 if a in ("f16", "bf16") else 1
        tiles = k // (4 * per)
        call = f"engine_mma(engine::{kind}, {{}}, {{}}, {{}}, __FILE__, __LINE__)"
        return _registers(use, 2 if small else 4, 2 * tiles, tiles, 2 if small else 4, call)
    if a in _EIGHTS and b in _EIGHTS and shape == "m16n8k32" and d == c and d in ("f32", "f16"):
        count = 4 if d == "f32" else 2
        name = "$mma_eight" if d == "f32" else "$mma_eight_half"
        call = f"{name}<{_EIGHTS[a]}, {_EIGHTS[b]}>({{}}, {{}}, {{}}, __FILE__, __LINE__)"
        return _registers(use, count, 4, 2, count, call)
    if types == ["f64"] * 4 and shape == "m8n8k4":
        return _double(use)
    bits = _BITS.get(a)
    if d != "s32" or c != "s32" or bits is None or _BITS.get(b) != bits or k not in _SHAPES[bits]:
        raise Unknown
    if m not in (8, 16) or (m == 8 and k != _SHAPES[bits][0]):
        raise Unknown
    how = "*"
    if bits == 1:
        use.one("popc", default=None)
        how = {"xor": "^", "and": "&"}[use.one("xor", "and", default=None)]
    chunks, tall = _SHAPES[bits].index(k) + 1, m // 8
    signs = ", ".join("true" if kind.startswith("s") else "false" for kind in (a, b))
    saturated = "true" if use.flag("satfinite") else "false"
    call = f"$mma_other<{m}, {k}, {bits}, {signs}, {saturated}, '{how}'>({{}}, {{}}, {{}})"
    return _registers(use, 2 * tall, chunks * tall, chunks, 2 * tall, call)


def _double(use: Use) -> str:
    use.expect_operands(4)
    targets = use.targets(0, 2)
    a, b, c = (
        f"$pack<engine::Words>({', '.join(use.values(i, n))}{pad})"
        for i, n, pad in ((1, 1, ", 0ull"), (2, 1, ", 0ull"), (3, 2, ""))
    )
    return f"$unpack($mma_other<8, 4, 64, true, true, false, '*'>({a}, {b}, {c}), {', '.join(targets)});"
