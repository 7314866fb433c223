"""Warpgroups of Hopper: products of four warps from shared memory, and the redistribution of registers."""

from __future__ import annotations

from .use import Unknown, Use, instruction

_PLACE = "__FILE__, __LINE__"


@instruction(
    "wgmma.mma_async.sync.aligned.m64n{8,...,256}k16.f32.{f16.f16,bf16.bf16} {d...}, a, b, p, 1, 1, trans a, trans b",
    "wgmma.mma_async.sync.aligned.m64n{8,...,256}k16.f32.{f16.f16,bf16.bf16} {d...}, {a...}, b, p, 1, 1, trans b",
)
def _wgmma(use: Use) -> str:
    for name in ("mma_async", "sync", "aligned"):
        use.one(name, default=None)
    shape = (use.matching(r"m64n\d+k16") or [""])[0]
    types = use.matching(r"[a-z]+\d+|e\dm\d")
    if not shape or types[:1] != ["f32"] or len(types) != 3 or types[1] != types[2]:
        raise Unknown
    if types[1] not in ("f16", "bf16"):
        raise Unknown
    n = int(shape[4:-3])
    in_registers = use.operands[1].startswith("{")
    use.expect_operands(7 if in_registers else 8)
    use.in_place()
    sums = ", ".join(f"&{target}" for target in use.targets(0, n // 2))
    a = f"$words({', '.join(use.values(1, 4, 'b32'))})" if in_registers else f"$descriptor({use.read(1, 'b64')})"
    scales = [f"({use.immediate(i)})" for i in (4, 5)]
    transposed = ["0", f"({use.immediate(6)})"] if in_registers else [f"({use.immediate(i)})" for i in (6, 7)]
    form = [str(n), *("true" if yes else "false" for yes in (types[1] == "bf16", in_registers)), *scales, *transposed]
    call = f"$wgmma<{', '.join(form)}>(engine_d, {a}, {use.read(2, 'b64')}, {use.read(3, 'pred')}, {_PLACE});"
    return f"float *const engine_d[] = {{{sums}}}; {call}"


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
