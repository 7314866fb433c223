"""Barriers, branches, the end of a thread, and instructions that only steer the hardware."""

from __future__ import annotations

from .use import Unknown, Use, instruction


@instruction("bar{.cta}.{sync,arrive} number{, threads}", "barrier{.cta}.{sync,arrive}{.aligned} number{, threads}")
def _bar(use: Use) -> str:
    use.skip("cta", "aligned")
    kind = use.one("sync", "arrive", default=None)
    if use.flag("warp"):
        raise Unknown
    if kind == "arrive":
        use.expect_operands(2)
    else:
        use.expect_operands(1, 2)
    threads = use.read(1, "u32") if len(use.operands) == 2 else "$block_threads()"
    return f"$bar_sync({use.read(0, 'u32')}, {threads}, {'true' if kind == 'sync' else 'false'});"


@instruction(
    "bar{.cta}.red.{popc.u32,and.pred,or.pred} d, 0, p", "barrier{.cta}.red.{popc.u32,and.pred,or.pred} d, 0, p"
)
def _bar_red(use: Use) -> str:
    use.skip("cta", "aligned")
    use.one("red", default=None)
    how = use.one("popc", "and", "or", default=None)
    use.types("u32 pred")
    use.expect_operands(3)
    if use.operands[1].strip() != "0":
        raise Unknown  # the engine's numbered barriers do not count
    call = f"__syncthreads_{how.replace('popc', 'count')}({use.read(2, 'pred')})"
    return use.write(0, f"(unsigned){call}" if how == "popc" else f"({call} != 0)")


@instruction("bar.warp.sync mask")
def _bar_warp(use: Use) -> str:
    use.one("warp", default=None)
    use.one("sync", default=None)
    use.expect_operands(1)
    return f"__syncwarp({use.read(0, 'b32')});"


@instruction("barrier.cluster.arrive{.release,.relaxed}{.aligned}", "barrier.cluster.wait{.acquire}{.aligned}")
def _cluster(use: Use) -> str:
    use.one("cluster", default=None)
    what = use.one("arrive", "wait", default=None)
    order = use.one("release", "relaxed") if what == "arrive" else use.one("acquire", "relaxed")
    use.skip("aligned")
    use.expect_operands(0)
    return f"$cluster_{what}({'false' if order == 'relaxed' else 'true'});"


@instruction("bra{.uni} label")
def _bra(use: Use) -> str:
    use.skip("uni")
    use.expect_operands(1)
    return use.jump(0)


@instruction("exit", "ret{.uni}")
def _exit(use: Use) -> str:
    # (ret: functions are inlined into their kernel before the statement is assembled.)
    use.skip("uni")
    use.expect_operands(0)
    return "engine_exit();"


@instruction("trap")
def _trap(use: Use) -> str:
    use.expect_operands(0)
    return '$unknown("the kernel executed the instruction trap");'


@instruction("brkpt", "pmevent a", "griddepcontrol.{wait,launch_dependents}")
def _nothing(use: Use) -> str:
    use.matching(r"\w+")
    use.expect_operands(0, 1)
    return ""


@instruction("nanosleep.u32 t")
def _nanosleep(use: Use) -> str:
    use.types("u32")
    use.expect_operands(1)
    return f"__nanosleep({use.read(0, 'u32')});"
