"""Warpgroups of Hopper: products of four warps from shared memory, and the redistribution of registers."""

from __future__ import annotations

from .reading import Refused, Unreadable
from .use import Unknown, Use, instruction

_PLACE = "__FILE__, __LINE__"


_K = {"f16": 16, "bf16": 16, "e4m3": 32, "e5m2": 32}


@instruction(
    "wgmma.mma_async.sync.aligned.m64n{8,...,256}k16.f32.{f16.f16,bf16.bf16} {d...}, a, b, p, 1, 1, trans a, trans b",
    "wgmma.mma_async.sync.aligned.m64n{8,...,256}k16.f32.{f16.f16,bf16.bf16} {d...}, {a...}, b, p, 1, 1, trans b",
    "wgmma.mma_async.sync.aligned.m64n{8,...,256}k32.f32.{e4m3,e5m2}.{e4m3,e5m2} {d...}, a, b, p, 1, 1",
    "wgmma.mma_async.sync.aligned.m64n{8,...,256}k32.f32.{e4m3,e5m2}.{e4m3,e5m2} {d...}, {a...}, b, p, 1, 1",
)
def _wgmma(use: Use) -> str:
    for name in ("mma_async", "sync", "aligned"):
        use.one(name, default=None)
    shape = (use.matching(r"m64n\d+k\d+") or [""])[0]
    types = use.matching(r"[a-z]+\d+|e\dm\d")
    if not shape or len(types) != 3 or not {types[1], types[2]} <= set(_K):
        raise Unknown
    sums, *factors = types
    n, k = map(int, shape[4:].split("k"))
    of_eights = k == 32
    _check_types(use.name, sums, factors, k)
    in_registers = use.operands[1].startswith("{")
    wanted = 6 if of_eights else 7 if in_registers else 8
    if of_eights and len(use.operands) > wanted:
        raise Unreadable(f"{use.name} has no transposition bits: rows of A and columns of B are along K")
    use.expect_operands(wanted)
    use.in_place()
    places = ", ".join(f"&{target}" for target in use.targets(0, n // 2))
    a = f"$words({', '.join(use.values(1, 4, 'b32'))})" if in_registers else f"$descriptor({use.read(1, 'b64')})"
    last = [f"({use.immediate(i)})" for i in range(4, wanted)]  # negations, transpositions
    if in_registers and not of_eights:
        last.insert(2, "0")
    form = [str(n), *(f"engine::Factor::{name}" for name in factors), "true" if in_registers else "false", *last]
    call = f"$wgmma<{', '.join(form)}>(engine_d, {a}, {use.read(2, 'b64')}, {use.read(3, 'pred')}, {_PLACE});"
    return f"float *const engine_d[] = {{{places}}}; {call}"


def _check_types(name: str, sums: str, factors: list[str], k: int) -> None:
    """Check that the types of wgmma go together.

    Raises:
        Unreadable: an assembler refuses them as well.
        Refused: the engine does not have them.
    """
    if any(_K[factor] != k for factor in factors):
        raise Unreadable(f"{name}: wgmma has k16 for f16 and bf16, k32 for e4m3 and e5m2")
    if k == 16 and factors[0] != factors[1]:
        raise Unreadable(f"{name}: wgmma takes A and B both of f16 or both of bf16; e4m3 and e5m2 may be mixed")
    if sums != "f32":
        if sums != "f16" or "bf16" in factors:
            raise Unreadable(f"{name}: wgmma of these factors adds in f32{'' if 'bf16' in factors else ' or f16'}")
        raise Refused(f"{name}: the CPU engine has wgmma with accumulators of float32, not of float16")


@instruction("wgmma.{fence,commit_group}.sync.aligned", "wgmma.wait_group.sync.aligned n")
def _order(use: Use) -> str:
    what = use.one("fence", "commit_group", "wait_group", default=None)
    for name in ("sync", "aligned"):
        use.one(name, default=None)
    use.expect_operands(1 if what == "wait_group" else 0)
    if what == "wait_group":
        return f"engine_wgmma_wait({use.immediate(0)}, {_PLACE});"
    return f"engine_wgmma_{what.partition('_')[0]}();"


@instruction("setmaxnreg.{inc,dec}.sync.aligned.u32 n")
def _setmaxnreg(use: Use) -> str:
    how = use.one("inc", "dec", default=None)
    for name in ("sync", "aligned"):
        use.one(name, default=None)
    use.types("u32")
    use.expect_operands(1)
    return f"$setmaxnreg<{use.immediate(0)}, {'true' if how == 'inc' else 'false'}>({_PLACE});"
