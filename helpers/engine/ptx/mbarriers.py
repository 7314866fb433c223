"""mbarrier, the basis of cuda::barrier and cuda::pipeline, and TMA: copies that signal an mbarrier, and stores."""

from __future__ import annotations

from .names import TYPES
from .reading import split
from .use import Unknown, Use, instruction

_NAMES = "$mbarrier::"
_PLACE = "__FILE__, __LINE__"


def _at(use: Use, number: int, space: str) -> str:
    return f"{_NAMES}at<$Space::{space}>({use.address(number)}, {_PLACE})"


def _space(use: Use) -> str:
    space = use.one("shared::cta", "shared::cluster", "shared")
    return "cluster" if space == "shared::cluster" else "shared" if space else "generic"


@instruction("mbarrier.{init,inval,expect_tx,complete_tx}{.shared}.b64 [a]{, n}")
def _change(use: Use) -> str:
    what = use.one("init", "inval", "expect_tx", "complete_tx", default=None)
    use.skip("relaxed", "cta", "cluster")
    space = _space(use)
    use.types("b64")
    use.expect_operands(1 if what == "inval" else 2)
    word = _at(use, 0, space)
    if what == "inval":
        return f"engine_mbarrier_inval({word});"
    count = use.read(1, "u32")
    if what == "init":
        return f"engine_mbarrier_init({word}, {count}, {_PLACE});"
    sign = "-" if what == "complete_tx" else ""
    return f"engine_mbarrier_bytes({word}, {sign}(long long){count}, {_PLACE});"


@instruction("mbarrier.{arrive,arrive_drop}{.noComplete}{.expect_tx}{.shared}.b64 {state,_}, [a]{, count}")
def _arrive(use: Use) -> str:
    what = use.one("arrive", "arrive_drop", default=None)
    expects = use.flag("expect_tx")
    use.skip("noComplete", "release", "relaxed", "cta", "cluster")
    space = _space(use)
    use.types("b64")
    if use.operands and use.operands[0].startswith("["):  # the state is not needed
        use.operands.insert(0, "_")
    use.expect_operands(2, 3)
    given = use.read(2, "u32") if len(use.operands) == 3 else "1u"
    count, extra = ("1u", given) if expects else (given, "0u")
    call = f"engine_mbarrier_arrive({_at(use, 1, space)}, {count}, {extra}, {int(what == 'arrive_drop')}, {_PLACE})"
    return f"(void){call};" if use.operands[0].strip() == "_" else use.write(0, call)


@instruction("mbarrier.{test_wait,try_wait}{.parity}{.acquire}{.cta}{.shared}.b64 p, [a], state{, time}")
def _wait(use: Use) -> str:
    blocks = use.one("test_wait", "try_wait", default=None) == "try_wait"
    parity = use.flag("parity")
    use.skip("acquire", "relaxed", "cta", "cluster")
    space = _space(use)
    use.types("b64")
    use.expect_operands(3, 4)
    phase = f"({use.read(2, 'u32')} & 1ull) << 63" if parity else use.read(2, "b64")
    call = f"engine_mbarrier_wait({_at(use, 1, space)}, {phase}, {int(blocks)}, {_PLACE})"
    return use.write(0, f"({call} != 0)")


@instruction("mbarrier.pending_count.b64 n, state")
def _pending(use: Use) -> str:
    use.one("pending_count", default=None)
    use.types("b64")
    use.expect_operands(2)
    return use.write(0, f"(unsigned)({use.read(1, 'b64')} & {_NAMES}COUNT)")


@instruction("cp.async.mbarrier.arrive{.noinc}{.shared}.b64 [a]")
def _copies_arrive(use: Use) -> str:
    use.one("async", default=None)
    use.one("mbarrier", default=None)
    use.one("arrive", default=None)
    noinc, space = use.flag("noinc"), _space(use)
    use.types("b64")
    use.expect_operands(1)
    # The copies so far arrive now. Without .noinc the arrival was not counted before: it cancels itself.
    arrive = f" (void)engine_mbarrier_arrive({_at(use, 0, space)}, 1u, 0u, 0, {_PLACE});" if noinc else ""
    return f"engine_async_wait(~0u);{arrive}"


def _blocks(use: Use, number: int) -> str:
    """Return the mask of the blocks that a multicast goes to; none is a failure, as 0 stands for no multicast."""
    return f"{_NAMES}mask_of({use.read(number)}, {_PLACE})"


def _tensor(use: Use, hint: int) -> str:
    """Copy a box of a tensor. The map and the first coordinates are one operand: [map, {x, y}]."""
    rank = int((use.matching("[1-5]d") or ["0d"])[0][0])
    use.skip("tile")
    to_global = use.modifiers[3:5] == ["global", "shared::cta"] or use.modifiers[4:6] == ["global", "shared::cta"]
    if to_global:
        use.skip("global", "shared::cta")
        use.one("bulk_group", default=None)
        use.expect_operands(2 + hint)
    else:
        use.one("shared::cluster", "shared::cta", default=None)
        use.one("global", default=None)
        use.one("mbarrier::complete_tx::bytes", default=None)
        multicast = use.flag("multicast::cluster")
        use.expect_operands(3 + multicast + hint)
        blocks = _blocks(use, 3) if multicast else "0u"
    number = 0 if to_global else 1
    parts = split(use.operands[number][1:-1])
    if not rank or len(parts) != 2:
        raise Unknown
    use.operands[number] = f"[{parts[0]}]"
    use.operands.append(parts[1])
    at = ", ".join(use.values(len(use.operands) - 1, rank, "b32"))
    if to_global:
        return f"{_NAMES}tensor_store({use.address(0)}, {use.address(1)}, {_PLACE}, {at});"
    return f"{_NAMES}tensor_load({use.address(0)}, {use.address(1)}, {use.address(2)}, {blocks}, {_PLACE}, {at});"


@instruction(
    "cp.async.bulk.shared::{cta,cluster}.global.mbarrier::complete_tx::bytes{.multicast::cluster} "
    "[to], [from], size, [mbarrier]{, mask}",
    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [from], size, [mbarrier]",
    "cp.async.bulk.global.shared::cta.bulk_group [to], [from], size",
    "cp.async.bulk.tensor.{1,...,5}d.shared::cluster.global.mbarrier::complete_tx::bytes{.multicast::cluster} "
    "[to], [map, {x...}], [mbarrier]{, mask}",
    "cp.async.bulk.tensor.{1,...,5}d.global.shared::cta.bulk_group [map, {x...}], [from]",
    "cp.async.bulk.commit_group",
    "cp.async.bulk.wait_group{.read} n",
)
def _bulk(use: Use) -> str:
    use.one("async", default=None)
    use.one("bulk", default=None)
    hint = 1 if use.flag("L2::cache_hint") else 0
    if use.flag("commit_group"):
        use.expect_operands(0)
        return "engine_bulk_commit();"
    if use.flag("wait_group"):
        reads = int(use.flag("read"))
        use.expect_operands(1)
        return f"engine_bulk_wait({use.immediate(0)}, {reads});"
    if use.flag("tensor"):
        return _tensor(use, hint)
    if use.modifiers[2:4] == ["global", "shared::cta"]:
        use.skip("global", "shared::cta")
        use.one("bulk_group", default=None)
        use.expect_operands(3 + hint)
        return f"{_NAMES}bulk_store({use.address(0)}, {use.address(1)}, {use.read(2, 'u32')}, {_PLACE});"
    source = "shared" if use.modifiers[2:4] == ["shared::cluster", "shared::cta"] else "generic"
    use.one("shared::cluster", "shared::cta", default=None)
    use.one("shared::cta" if source == "shared" else "global", default=None)
    use.one("mbarrier::complete_tx::bytes", default=None)
    multicast = source == "generic" and use.flag("multicast::cluster")
    use.expect_operands(4 + multicast + hint)
    size, blocks = use.read(2, "u32"), _blocks(use, 4) if multicast else "0u"
    places = f"{use.address(0)}, {use.address(1)}, {size}, {use.address(3)}, {blocks}, {_PLACE}"
    return f"{_NAMES}bulk_copy<$Space::{source}>({places});"


@instruction("st.async{.weak}.shared::cluster.mbarrier::complete_tx::bytes{.v2,.v4}.type [to], b, [mbarrier]")
def _store_async(use: Use) -> str:
    use.one("async", default=None)
    use.skip("weak")
    use.one("shared::cluster", default=None)
    use.one("mbarrier::complete_tx::bytes", default=None)
    count = int(use.one("v2", "v4", default="v1")[1:])
    (kind,) = use.types("b32 b64 u32 u64 s32 s64 f32 f64")
    if count * int(kind[1:]) > 128:
        raise Unknown
    use.expect_operands(3)
    values = ", ".join(use.values(1, count, kind))
    value = f"$Vector<{TYPES[kind]}, {count}>{{{{{values}}}}}"
    return f"{_NAMES}store_async({use.address(0)}, {value}, {use.address(2)}, {_PLACE});"


@instruction("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [to], [from], size")
def _bulk_add(use: Use) -> str:
    use.one("reduce", default=None)
    use.one("async", default=None)
    use.one("bulk", default=None)
    hint = 1 if use.flag("L2::cache_hint") else 0
    if use.modifiers[3:5] != ["global", "shared::cta"]:
        raise Unknown
    use.skip("global", "shared::cta")
    use.one("bulk_group", default=None)
    use.one("add", default=None)
    use.types("f32")
    use.expect_operands(3 + hint)
    return f"{_NAMES}bulk_add({use.address(0)}, {use.address(1)}, {use.read(2, 'u32')}, {_PLACE});"
