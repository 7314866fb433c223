"""Why a launch failed, in words. The engine gives a reason with fields; only this module puts it into a sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import arithmetic
from .structures import Failure, Reason

_PLAIN = {
    Reason.WRONG_NAMED_BARRIER: (
        "bar.sync takes a number from 0 to 15, and a count of threads that is a multiple of 32 and not more than the "
        "block has"
    ),
    Reason.NO_SHARED_POINTER: "a generic address is converted to one of shared memory, but is not in shared memory",
    Reason.STACK_OVERFLOW: (
        "the thread's local arrays do not fit the engine's stack of 256 KB, or a recursion never ends"
    ),
    Reason.WRONG_DIVISION: (
        "integer division by zero or out of range (a GPU does not stop for it: the result is garbage)"
    ),
    Reason.TRAPPED: "the thread ran into a trap that the compiler put where the code's behaviour is undefined",
    Reason.MISALIGNED_ACCESS: (
        "misaligned address: a vector type (float4, int2, ...) is read or written at an address that is not a "
        "multiple of its size, or the pointer is not a valid address"
    ),
    Reason.EXPIRED: (
        "the block was still running when its time was up: an endless loop, or a wait for something that never happens"
    ),
    Reason.ABORTED: "the kernel was aborted: it called abort(), or a check of the C library stopped it",
}

# What each reason is called as a finding.
DIVERGENCE = (Reason.TWO_BARRIERS,)
DEADLOCK = (
    Reason.LANES_NEVER_COME,
    Reason.NAMED_BARRIER_STARVED,
    Reason.NOT_IN_OWN_MASK,
    Reason.DIFFERENT_OPERATIONS,
)
MISALIGNED = (Reason.MISALIGNED, Reason.SHARED_MISALIGNED, Reason.MISALIGNED_ACCESS)


def index(linear: int, sizes: Sequence[int]) -> tuple[int, int, int]:
    """(x, y, z) of a block or thread by its number, x fastest."""
    return linear % sizes[0], linear // sizes[0] % sizes[1], linear // sizes[0] // sizes[1]


def triple(of: tuple[int, int, int]) -> str:
    """An index as "(x,y,z)"."""
    return f"({of[0]},{of[1]},{of[2]})"


def place_of(failure: Failure) -> tuple[str, int] | None:
    """(file, line) where the engine itself knows them; None for a fault, whose address says where."""
    return (failure.file.decode(errors="replace"), failure.line) if failure.file else None


def other_place_of(failure: Failure) -> tuple[str, int] | None:
    """(file, line) of the other side, such as the barrier where other threads wait."""
    return (failure.other_file.decode(errors="replace"), failure.other_line) if failure.other_file else None


def words(failure: Failure, block: Sequence[int], describe: Callable[[int], str]) -> str:
    """What happened, without who and where.

    Args:
        block: its sizes, to name threads.
        describe: an address in terms of the arguments, such as "a[5], which has 4 elements".
    """
    reason = Reason(failure.reason)
    name, other_name, message = (
        raw.decode(errors="replace") for raw in (failure.name, failure.other_name, failure.message)
    )
    here, there = (f"{p[0]}:{p[1]}" if p else "?" for p in (place_of(failure), other_place_of(failure)))
    thread = f"thread {triple(index(failure.thread, block))}"
    other_thread = f"thread {triple(index(failure.other_thread, block))}"
    if reason in _PLAIN:
        return _PLAIN[reason]
    if reason == Reason.STATED:
        return arithmetic.original(message)
    if reason == Reason.MISALIGNED:
        return f"misaligned address: {message}"
    if reason == Reason.LEFT_BEFORE_GRID_SYNC:
        return (
            f"deadlock: {failure.count} blocks wait in grid.sync() at {here}, but {failure.other_count} have ended "
            "without it and will never arrive: every block of the grid must reach every grid.sync()"
        )
    if reason == Reason.TWO_BARRIERS:
        return (
            f"barrier divergence: {other_thread} waits in __syncthreads() at {here}, {thread} in another one at "
            f"{there}. All threads of a block that have not left the kernel must meet in the same barrier"
        )
    if reason == Reason.LANES_NEVER_COME:
        elsewhere = f": lane {failure.other_lane} waits in {other_name} at {there}" if failure.lanes else ""
        return (
            f"deadlock in warp {failure.thread // 32}: {thread} waits at {here} in {name} with mask "
            f"0x{failure.mask:08x}, and lanes 0x{failure.lanes:08x} of that mask never arrive{elsewhere}"
        )
    if reason == Reason.NAMED_BARRIER_STARVED:
        return (
            f"deadlock: {thread} waits in bar.sync {failure.number} at {here}, where {failure.count} threads have "
            "arrived, and no more will arrive"
        )
    if reason == Reason.NOT_IN_OWN_MASK:
        return f"lane {failure.lane} calls {name} with mask 0x{failure.mask:08x}, which does not name the lane itself"
    if reason == Reason.DIFFERENT_OPERATIONS:
        return (
            f"the lanes of a warp meet in different operations: lane {failure.other_lane} in {other_name} at {there}, "
            f"lane {failure.lane} in {name} at {here}"
        )
    if reason == Reason.INCOMPLETE_WARP:
        return (
            f"{name} needs all 32 lanes of the warp, and lanes 0x{failure.lanes:08x} have left the kernel or were "
            "never started"
        )
    if reason == Reason.SHARED_MISALIGNED:
        past = failure.address % failure.count
        return (
            f"misaligned address: {name} takes an address that is a multiple of {failure.count} bytes, and "
            f"0x{failure.address:x} is {past} past one"
        )
    if reason == Reason.OUTSIDE_SHARED:
        return (
            f"{name} takes an address within shared memory (__cvta_generic_to_shared), and 0x{failure.address:x} is "
            "none"
        )
    verb = {1: "write to", 0: "read of"}.get(failure.is_write, "access to")
    return f"illegal {verb} {describe(failure.address)}"
