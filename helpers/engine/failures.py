"""Why a launch failed: the error, its fields and its message. Only this module puts reasons into words."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence

from . import arithmetic
from .structures import DEADLOCK as DEADLOCK
from .structures import Failure, Reason

HEADERS = (".cuh", ".h", ".hpp")  # a place in one of these is reported as the line that calls it


class LaunchError(RuntimeError):
    """A launch that a GPU would refuse, or that failed while running; the message explains it.

    reason: why it failed; None if it was refused before it began.
    file, line: the place in the source, if known. block, thread: (x, y, z) of the thread that failed.
    array, index: for an illegal access, the parameter or `__shared__` array nearest to it, and the element in it (in
    shared memory, the byte).
    address: that of the access; below 4096 it came from a null pointer, see `is_null`.
    waits: for a deadlock, which threads wait for which; also shown in tracebacks from Python 3.11 on.
    """

    waits = ""

    def __init__(
        self,
        message: str,
        *,
        reason: Reason | None = None,
        file: str | None = None,
        line: int | None = None,
        block: tuple[int, int, int] | None = None,
        thread: tuple[int, int, int] | None = None,
        array: str | None = None,
        index: int | None = None,
        address: int | None = None,
    ) -> None:
        super().__init__(message)
        self.reason, self.file, self.line = reason, file, line
        self.block, self.thread = block, thread
        self.array, self.index, self.address = array, index, address

    @property
    def is_null(self) -> bool:
        """True if the kernel read or wrote through a null pointer."""
        return self.address is not None and self.address < NULL_PAGE


NULL_PAGE = 4096  # bytes from address 0 on that belong to null pointers

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

# The name of each reason as a finding.
DIVERGENCE = (Reason.TWO_BARRIERS,)
MISALIGNED = (Reason.MISALIGNED, Reason.SHARED_MISALIGNED, Reason.MISALIGNED_ACCESS)


def index(linear: int, sizes: Sequence[int]) -> tuple[int, int, int]:
    """Return (x, y, z) of a block or thread by its number; x varies fastest."""
    return linear % sizes[0], linear // sizes[0] % sizes[1], linear // sizes[0] // sizes[1]


def format_dim3(of: tuple[int, int, int]) -> str:
    """Format an index as "(x,y,z)"."""
    return f"({of[0]},{of[1]},{of[2]})"


def place_of(
    failure: Failure, line_at: Callable[[int], tuple[str, int] | None] = lambda place: None
) -> tuple[str, int] | None:
    """Return (file, line) if the engine itself knows them; None for a fault, whose address identifies it.

    line_at: as for `describe`. For a header's function it is the line that calls it.
    """
    if not failure.file:
        return None
    file = failure.file.decode(errors="replace")
    better = line_at(failure.place) if failure.place and file.endswith(HEADERS) else None
    return better or (file, failure.line)


def other_place_of(failure: Failure) -> tuple[str, int] | None:
    """Return (file, line) of the other side, such as the barrier where other threads wait."""
    return (failure.other_file.decode(errors="replace"), failure.other_line) if failure.other_file else None


def _everyone(waiting: str) -> str:
    return f"Waiting: {waiting}"


def _missing(failure: Failure) -> str:
    """Describe the arrivals and bytes that an mbarrier's phase waits for."""
    arrivals, size = failure.count, ctypes.c_int(failure.other_count).value
    parts = [f"{arrivals} more arrival{'' if arrivals == 1 else 's'}"] if arrivals else []
    if size > 0:
        parts.append(f"{size:,} more bytes of copies than were sent to it (expect_tx said so)")
    sentences = [f"It expects {' and '.join(parts)}"] if parts else []
    if size < 0:
        sentences.append(f"{-size:,} more bytes arrived than expect_tx announced")
    return ". ".join(sentences) or "Its phase has another parity, and no one will end the next"


def describe(
    failure: Failure,
    block: Sequence[int],
    describe_address: Callable[[int], str],
    name_of: Callable[[int], str],
    line_at: Callable[[int], tuple[str, int] | None] = lambda place: None,
) -> str:
    """Describe what happened; the caller adds the block, the thread and the place.

    Args:
        block: its sizes, to name threads.
        describe_address: relates an address to the arguments, such as "a[5], which has 4 elements".
        name_of: names an mbarrier, such as "mbarrier full[1]".
        line_at: (file, line) of a place in the kernel's code, if it is in the source and not in a header.
    """
    reason = Reason(failure.reason)
    name, other_name, message = (
        raw.decode(errors="replace") for raw in (failure.name, failure.other_name, failure.message)
    )
    places = place_of(failure, line_at), other_place_of(failure)
    here, other = (f"{p[0]}:{p[1]}" if p else "?" for p in places)
    message = re.sub(
        "@([0-9]+)/([0-9a-f]+)@", lambda m: str((line_at(int(m.group(2), 16)) or (0, m.group(1)))[1]), message
    )
    message = re.sub("#([0-9a-f]+)#", lambda m: name_of(int(m.group(1), 16)), message)
    thread = f"thread {format_dim3(index(failure.thread, block))}"
    other_thread = f"thread {format_dim3(index(failure.other_thread, block))}"
    if reason in _PLAIN:
        return _PLAIN[reason]
    if reason == Reason.STATED:
        return arithmetic.original(message)
    if reason == Reason.OUTSIDE_TILE:
        return f"outside of the block's shared memory: {message}"
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
            f"{other}. All threads of a block that have not left the kernel must meet in the same barrier"
        )
    if reason == Reason.LANES_NEVER_COME:
        elsewhere = f": lane {failure.other_lane} waits in {other_name} at {other}" if failure.lanes else ""
        return (
            f"deadlock in warp {failure.thread // 32}: {thread} waits at {here} in {name} with mask "
            f"0x{failure.mask:08x}, and lanes 0x{failure.lanes:08x} of that mask never arrive{elsewhere}"
        )
    if reason == Reason.NAMED_BARRIER_STARVED:
        return (
            f"deadlock: {thread} waits in bar.sync {failure.number} at {here}, where {failure.count} of "
            f"{failure.other_count} threads have arrived, and no more will. {_everyone(message)}"
        )
    if reason == Reason.MBARRIER_STARVED:
        return (
            f"deadlock: {thread} waits at {here} for the end of the phase of parity {failure.number} of "
            f"{name_of(failure.address)}. {_missing(failure)}. {_everyone(message)}"
        )
    if reason == Reason.WARPGROUP_STARVED:
        return (
            f"deadlock: {thread} waits in {name} at {here} for its warpgroup, and of its 128 threads {failure.count} "
            f"have come. {_everyone(message)}"
        )
    if reason == Reason.REGISTERS_STARVED:
        return (
            f"deadlock: {thread} waits at {here} in {name} {failure.number}: its warpgroup has {failure.other_count} "
            f"registers for each thread, and the pool has {failure.count} more, until another warpgroup gives some "
            f"back with setmaxnreg.dec. {_everyone(message)}"
        )
    if reason == Reason.CLUSTER_STARVED:
        return (
            f"deadlock: {thread} waits in barrier.cluster at {here}, where {failure.count} of the "
            f"{failure.other_count} threads that the cluster still has have arrived, and no more will. "
            f"{_everyone(message)}"
        )
    if reason == Reason.NOT_IN_OWN_MASK:
        return f"lane {failure.lane} calls {name} with mask 0x{failure.mask:08x}, which does not name the lane itself"
    if reason == Reason.DIFFERENT_OPERATIONS:
        return (
            f"the lanes of a warp meet in different operations: lane {failure.other_lane} in {other_name} at {other}, "
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
    return f"illegal {verb} {describe_address(failure.address)}"
