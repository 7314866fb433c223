"""Loads, stores, atomics, copies and fences, and conversions of addresses."""

from __future__ import annotations

from .names import TYPES
from .use import Unknown, Use, instruction

# Where the data go in the caches, and for how long they stay: no matter here.
_HINTS = (r"ca|cg|cs|lu|cv|wb|wt|nc|L1::\w+|L2::(?!cache_hint)\w+", r"L2::cache_hint")
_SPACES = ("global", "shared::cta", "shared::cluster", "shared", "local", "const")
_SCOPES = {"cta": "cta", "cluster": "gpu", "gpu": "gpu", "sys": "gpu", "": "gpu"}
_BITS = "u8 s8 b8 u16 s16 b16 u32 s32 b32 u64 s64 b64 b128 f16 bf16 f32 f64 f16x2 bf16x2"


def size_of(kind: str) -> int:
    """Return the bytes of a type of PTX."""
    digits = kind.strip("usbf").split("x")
    return int(digits[0]) * int([*digits, "1"][1]) // 8


def _space(use: Use) -> str:
    space = use.one(*_SPACES)
    return "cluster" if space == "shared::cluster" else "shared" if space.startswith("shared") else "generic"


def _hints(use: Use) -> int:
    """Drop cache hints, and return how many operands they take."""
    use.matching(_HINTS[0])
    return len(use.matching(_HINTS[1]))


def _vector(use: Use, kind: str) -> int:
    count = int(use.one("v2", "v4", "v8", default="v1")[1:])
    if count * size_of(kind) > 16:
        raise Unknown
    return count


@instruction(
    "ld{.volatile,.relaxed,.acquire}{.cta,.gpu,.sys}{.global,.shared,.local,.const}{.ca,.nc,...}{.v2,.v4}.type d, [a]"
)
def _load(use: Use) -> str:
    order = use.one("weak", "volatile", "relaxed", "acquire", "mmio")
    scope = _SCOPES[use.one("cta", "cluster", "gpu", "sys")]
    hints, space = _hints(use), _space(use)
    (kind,) = use.types(_BITS)
    count = _vector(use, kind)
    use.expect_operands(2 + hints)
    how = {"": "weak", "weak": "weak", "volatile": "is_volatile"}.get(order, "relaxed")
    after = scope if order == "acquire" else "none"
    call = (
        f"$load<{TYPES[kind]}, {count}, $Space::{space}, $Order::{how}, $Scope::{after}>"
        f'({use.address(1)}, "{use.name.partition(".")[0]}")'
    )
    targets = use.targets(0, count)
    return f"const auto engine_v = {call}; " + " ".join(
        f"$assign_wide({target}, engine_v.v[{i}]);" for i, target in enumerate(targets)
    )


@instruction("ldu{.global}{.v2,.v4}.type d, [a]")
def _load_uniform(use: Use) -> str:
    return _load(use)


@instruction(
    "st{.volatile,.relaxed,.release}{.cta,.gpu,.sys}{.global,.shared,.local}{.wb,.cg,...}{.v2,.v4}.type [a], b"
)
def _store(use: Use) -> str:
    order = use.one("weak", "volatile", "relaxed", "release", "mmio")
    scope = _SCOPES[use.one("cta", "cluster", "gpu", "sys")]
    hints, space = _hints(use), _space(use)
    (kind,) = use.types(_BITS)
    count = _vector(use, kind)
    use.expect_operands(2 + hints)
    how = {"": "weak", "weak": "weak", "volatile": "is_volatile"}.get(order, "relaxed")
    before = scope if order == "release" else "none"
    values = ", ".join(use.values(1, count, kind, wide=True))
    return (
        f"$store<{TYPES[kind]}, {count}, $Space::{space}, $Order::{how}, $Scope::{before}>"
        f'({use.address(0)}, "st", $Vector<{TYPES[kind]}, {count}>{{{{{values}}}}});'
    )


# Of atomics: the types, and the operation on old and new.
_INTEGERS, _WORDS = "u32 s32 u64 s64", "b16 b32 b64 b128 u32 s32 u64 s64 f32 f64"
_ATOMICS = {
    "add": ("u32 s32 u64 s64 f32 f64 f16 bf16 f16x2 bf16x2", "$Add_"),
    "min": (f"{_INTEGERS} f16 bf16 f16x2 bf16x2", "$Min_"),
    "max": (f"{_INTEGERS} f16 bf16 f16x2 bf16x2", "$Max_"),
    "inc": ("u32", "$Increment"),
    "dec": ("u32", "$Decrement"),
    "and": ("b32 b64", "$And_"),
    "or": ("b32 b64", "$Or_"),
    "xor": ("b32 b64", "$Xor_"),
    "exch": (_WORDS, "$Exchange_"),
}


def _atomic(use: Use, with_result: bool) -> str:
    first = int(with_result)
    order = use.one("relaxed", "acquire", "release", "acq_rel", "volatile")
    scope = _SCOPES[use.one("cta", "cluster", "gpu", "sys")]
    hints, space = _hints(use), _space(use)
    use.skip("noftz", "ftz")
    operation = use.one(*_ATOMICS, "cas", default=None)
    kinds, how = _ATOMICS.get(operation, ("b16 b32 b64 u32 s32 u64 s64", ""))
    (kind,) = use.types(kinds)
    count = _vector(use, kind)
    before = scope if order in ("release", "acq_rel") else "none"
    after = scope if order in ("acquire", "acq_rel") else "none"
    where = f"$Space::{space}, $Scope::{before}, $Scope::{after}"
    if operation == "cas":
        if not with_result or count > 1:
            raise Unknown
        use.expect_operands(4 + hints)
        values = f"{use.read(2, kind)}, {use.read(3, kind)}"
        return use.write(0, f'$compare_and_swap<{TYPES[kind]}, {where}>({use.address(1)}, "atom", {values})')
    use.expect_operands(2 + first + hints)
    values = ", ".join(use.values(1 + first, count, kind))
    call = (
        f"$atomic<{how}, {TYPES[kind]}, {count}, {where}>"
        f'({use.address(first)}, "{use.opcode}", $Vector<{TYPES[kind]}, {count}>{{{{{values}}}}})'
    )
    if not with_result:
        return f"{call};"
    targets = use.targets(0, count)
    return f"const auto engine_v = {call}; " + " ".join(
        f"$assign({target}, engine_v.v[{i}]);" for i, target in enumerate(targets)
    )


@instruction(
    "atom{.relaxed,.acquire,.release,.acq_rel}{.cta,.gpu,.sys}{.global,.shared}.{add,min,max,inc,dec,and,or,xor,exch}"
    "{.noftz}{.v2,.v4}.type d, [a], b",
    "atom{.relaxed,.acquire,.release,.acq_rel}{.cta,.gpu,.sys}{.global,.shared}.cas.type d, [a], b, c",
)
def _atom(use: Use) -> str:
    return _atomic(use, True)


@instruction(
    "red{.relaxed,.release}{.cta,.gpu,.sys}{.global,.shared}.{add,min,max,inc,dec,and,or,xor}{.noftz}"
    "{.v2,.v4}.type [a], b"
)
def _red(use: Use) -> str:
    if "async" in use.modifiers:
        raise Unknown
    return _atomic(use, False)


# ---------------------------------------------------------------- order


@instruction("fence{.sc,.acq_rel}.{cta,gpu,sys}", "fence.proxy.{async,alias}", "fence.mbarrier_init.release.cluster")
def _fence(use: Use) -> str:
    if use.flag("proxy"):  # before what TMA and wgmma do with ordinary writes
        kind = use.one("alias", "async", "async::global", "async::generic", default=None)
        use.matching(r"global|shared::(cta|cluster)|sync_restrict::.*|acquire|release|cluster")
        use.expect_operands(0)
        return "engine_proxy_fence(0);" if kind == "async" else ""
    if use.flag("mbarrier_init"):
        use.one("release", default=None)
        use.one("cluster", default=None)
        use.expect_operands(0)
        return "engine_proxy_fence(1);"
    use.one("sc", "acq_rel", "acquire", "release")
    scope = use.one("cta", "cluster", "gpu", "sys", default=None)
    use.expect_operands(0)
    return f"$fence($Scope::{_SCOPES[scope]});"


@instruction("membar.{cta,gl,sys}")
def _membar(use: Use) -> str:
    scope = use.one("cta", "gl", "sys", "gpu", default=None)
    use.expect_operands(0)
    return f"$fence($Scope::{'cta' if scope == 'cta' else 'gpu'});"


# ---------------------------------------------------------------- addresses and caches


@instruction("cvta{.to}.{global,shared,local,const}.{u32,u64} d, a")
def _cvta(use: Use) -> str:
    to, space = use.flag("to"), _space(use)
    (kind,) = use.types("u32 u64")
    use.expect_operands(2)
    call = f"${'to' if to else 'from'}_shared({use.read(1)})" if space != "generic" else f"$number({use.read(1)})"
    return use.write(0, f"({TYPES[kind]}){call}")


@instruction("isspacep.{global,shared,local,const} p, a")
def _isspacep(use: Use) -> str:
    space = use.one("global", "shared", "shared::cta", "shared::cluster", default=None)
    use.expect_operands(2)
    test = "$is_shared" if space in ("shared", "shared::cta") else "$is_cluster_shared"
    return use.write(0, f"{'!' if space == 'global' else ''}{test}({use.read(1)})")


@instruction("mapa{.shared::cluster}.{u32,u64} d, a, rank")
def _mapa(use: Use) -> str:
    space = _space(use)
    (kind,) = use.types("u32 u64")
    use.expect_operands(3)
    call = f"$map_shared<$Space::{space}>({use.read(1)}, {use.read(2, 'u32')})"
    return use.write(0, f"({TYPES[kind]}){call}")


@instruction("getctarank{.shared::cluster}.{u32,u64} d, a")
def _getctarank(use: Use) -> str:
    space = _space(use)
    use.types("u32 u64")
    use.expect_operands(2)
    return use.write(0, f"$shared_rank<$Space::{space}>({use.read(1)})")


@instruction("prefetch{.global,.local}.{L1,L2} [a]", "prefetchu.L1 [a]", "discard{.global}.L2 [a], 128")
@instruction("prefetch{.param}.tensormap [map]")
def _prefetch(use: Use) -> str:
    use.skip("global", "local", "param")
    use.one("L1", "L2", "tensormap", "L2::evict_last", "L2::evict_normal", default=None)
    use.expect_operands(1, 2)
    use.address(0)
    return ""


@instruction("createpolicy.fractional.L2::{evict_first,evict_last,...}.b64 d{, fraction}")
def _createpolicy(use: Use) -> str:
    use.one("fractional", default=None)
    use.matching(r"L2::\w+")
    use.types("b64")
    use.expect_operands(1, 2)
    return use.write(0, "0ull")


# ---------------------------------------------------------------- asynchronous copies


@instruction(
    "cp.async.{ca,cg}.shared{::cta}.global{.L2::128B} [to], [from], bytes{, bytes read}", "cp.async.commit_group"
)
@instruction("cp.async.wait_group n", "cp.async.wait_all")
def _cp(use: Use) -> str:
    use.one("async", default=None)
    if use.flag("commit_group"):
        use.expect_operands(0)
        return "engine_async_commit();"
    if use.flag("wait_all"):
        use.expect_operands(0)
        return "engine_async_wait(~0u);"
    if use.flag("wait_group"):
        use.expect_operands(1)
        return f"engine_async_wait({use.immediate(0)});"
    least = {"ca": 4, "cg": 16}[use.one("ca", "cg", default=None)]
    use.one("shared", "shared::cta", default=None)
    use.one("global", default=None)
    use.matching(r"L2::\d+B")
    hint = len(use.matching("L2::cache_hint"))
    use.expect_operands(3 + hint, 4 + hint)
    given = ""
    if len(use.operands) == 4 + hint:  # how many bytes are read; of a predicate: whether none is
        is_predicate = use.is_predicate(3)
        given = f", {use.read(3, 'pred')} ? 0 : {use.immediate(2)}" if is_predicate else f", {use.read(3, 'u32')}"
    return f"$cp_async_at<{use.immediate(2)}, {least}>({use.address(0)}, {use.address(1)}{given});"
