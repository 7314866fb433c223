"""What the lanes of a warp do together, except for matrices."""

from __future__ import annotations

from .names import TYPES
from .use import Use, instruction


def _split_pair(use: Use) -> list[str]:
    """Split a first operand `d|p`: keep d as the operand, and return [p], or [] if there is no p."""
    first, *others = (part.strip() for part in use.operands[0].split("|"))
    use.operands[0] = first
    return others


@instruction("shfl.sync.{up,down,bfly,idx}.b32 d{|p}, a, b, c, mask")
def _shfl(use: Use) -> str:
    use.one("sync", default=None)
    how = use.one("up", "down", "bfly", "idx", default=None)
    use.types("b32")
    use.expect_operands(5)
    others = _split_pair(use)
    values = ", ".join(use.read(i, "b32") for i in (1, 2, 3, 4))
    if not others:
        return use.write(0, f"$shfl<$Shuffle::{how}>({values})")
    use.operands.append(others[0])
    call = f"bool engine_p; const unsigned engine_v = $shfl<$Shuffle::{how}>({values}, engine_p); "
    return call + use.write(0, "engine_v") + use.write(5, "engine_p")


@instruction("vote.sync.{all,any,uni}.pred p, q, mask", "vote.sync.ballot.b32 d, q, mask")
def _vote(use: Use) -> str:
    use.one("sync", default=None)
    how = use.one("all", "any", "uni", "ballot", default=None)
    use.types("b32 pred")
    use.expect_operands(3)
    call = f"__{how}_sync({use.read(2, 'b32')}, {use.read(1, 'pred')})"
    return use.write(0, call if how == "ballot" else f"({call} != 0)")


@instruction("match.any.sync.{b32,b64} d, a, mask", "match.all.sync.{b32,b64} d{|p}, a, mask")
def _match(use: Use) -> str:
    use.one("sync", default=None)
    how = use.one("any", "all", default=None)
    (kind,) = use.types("b32 b64")
    use.expect_operands(3)
    others = _split_pair(use)
    value, mask = use.read(1, kind), use.read(2, "b32")
    if how == "any":
        return use.write(0, f"__match_any_sync<{TYPES[kind]}>({mask}, {value})")
    call = f"bool engine_p; const unsigned engine_v = $match_all<{TYPES[kind]}>({value}, engine_p, {mask}); "
    use.operands += others
    return call + use.write(0, "engine_v") + (use.write(3, "engine_p") if others else "")


@instruction("redux.sync.{add,min,max}.{u32,s32} d, a, mask", "redux.sync.{and,or,xor}.b32 d, a, mask")
def _redux(use: Use) -> str:
    use.one("sync", default=None)
    how = use.one("add", "min", "max", "and", "or", "xor", default=None)
    (kind,) = use.types("b32" if how in ("and", "or", "xor") else "u32 s32")
    use.expect_operands(3)
    # (Sums of signed numbers wrap around, as those of unsigned ones do.)
    cpp = TYPES["u32" if how == "add" else kind]
    return use.write(0, f"$redux<engine::{how.capitalize()}, {cpp}>({use.read(1, cpp)}, {use.read(2, 'b32')})")


@instruction("activemask.b32 d")
def _activemask(use: Use) -> str:
    use.types("b32")
    use.expect_operands(1)
    return use.write(0, "__activemask()")


@instruction("elect.sync d|p, mask")
def _elect(use: Use) -> str:
    use.one("sync", default=None)
    use.expect_operands(2)
    others = _split_pair(use)
    use.operands += others
    call = f"bool engine_p; const unsigned engine_v = $elect({use.read(1, 'b32')}, engine_p); (void)engine_v; "
    return call + use.write(0, "engine_v") + (use.write(2, "engine_p") if others else "")
