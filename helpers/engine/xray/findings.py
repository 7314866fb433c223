"""Describe a launch's errors: findings of a checked run, one per bug."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import failures, observed
from ..failures import format_dim3

KINDS = {
    observed.RACE: "race",
    observed.OUT_OF_BOUNDS: "out of bounds",
    observed.UNINITIALISED: "uninitialised",
    observed.MISALIGNED: "misaligned",
    observed.IN_FLIGHT: "not waited for",
    observed.NEVER_WAITED: "never waited for",
    observed.SAME_VALUE: "same value",
    observed.CONST_WRITTEN: "write to const",
    observed.INACTIVE_LANE: "inactive lane",
    observed.LOCAL_BOUNDS: "out of bounds",
    observed.UNSET_LOCAL: "uninitialised",
    observed.NO_PROXY_FENCE: "no proxy fence",
    observed.SUMS_TOUCHED: "not waited for",
    observed.NO_PRODUCT_FENCE: "no wgmma fence",
    observed.BYTES: "wrong byte count",
    observed.OVERTAKEN: "overtaken wait",
    observed.PEER_NOT_STARTED: "peer not started",
    observed.PEER_EXITED: "peer exited",
}

_NOTED = {
    observed.SHIFT: "shift",
    observed.CONVERSION: "conversion",
    observed.DIVISION: "division by zero",
    observed.WMMA: "misaligned",
}

_STOPPED = {
    **dict.fromkeys(failures.DIVERGENCE, "barrier divergence"),
    **dict.fromkeys(failures.DEADLOCK, "deadlock"),
    **dict.fromkeys(failures.MISALIGNED, "misaligned"),
    failures.Reason.ILLEGAL_ACCESS: "out of bounds",
    failures.Reason.OUTSIDE_TILE: "out of bounds",
    failures.Reason.EXPIRED: "endless loop",
}


EVERY_KIND = frozenset({*KINDS.values(), *_NOTED.values(), *_STOPPED.values()})
EVERY_KIND |= {"never written", "skipped barrier", "stopped"}


@dataclass(frozen=True)
class Finding:
    """One error. file, line: those of the access; other_*: those of the earlier access that it conflicts with.

    kind: race, same value (a race of writes of one value: the result is the same), out of bounds, uninitialised,
    write to const, inactive lane (of a shuffle), misaligned, not waited for, never waited for (asynchronous copies and
    products of warpgroups), no proxy fence, no wgmma fence, wrong byte count (of an mbarrier's phase), overtaken wait
    (the mbarrier's next phase can end before a late thread waits for this one),
    peer not started, peer exited (a block of the cluster whose shared memory another one accesses),
    never written, skipped barrier (by threads that ended without it), barrier divergence, deadlock, endless loop,
    division by zero, shift or conversion (out of range), or stopped (a failed assertion).
    block, thread: (x, y, z). array, index: what was accessed, in elements (of 4 bytes in shared memory). count: how
    often the same two lines did the same. explanation: for a deadlock, which threads wait for which.
    """

    kind: str
    message: str
    file: str | None = None
    line: int | None = None
    block: tuple[int, int, int] | None = None
    thread: tuple[int, int, int] | None = None
    array: str | None = None
    index: int | None = None
    other_file: str | None = None
    other_line: int | None = None
    other_block: tuple[int, int, int] | None = None
    other_thread: tuple[int, int, int] | None = None
    count: int = 1
    explanation: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" + (f" ({self.count:,} times)" if self.count > 1 else "")


def of_run(seen: observed.Observed) -> list[Finding]:
    """Return everything that a checked run found, why it stopped, and what it left unwritten; [] if clean."""
    total = seen.block[0] * seen.block[1] * seen.block[2]
    findings = _merged(seen)
    read_inactive = {(f.file, f.line) for f in findings if f.kind == "inactive lane"}
    skipped = (b for b in seen.partial_barriers if b.was_skipped and not (b.mask and b.place in read_inactive))
    findings += [_skipped(b, total) for b in skipped]
    if seen.abort is None:
        return findings + [f for r in seen.regions for part in r.parts if (f := _never_written(part))]
    end = end_of(seen)
    forgotten = _is_forgotten(_region(seen, seen.abort.region))
    known = {(f.kind, f.array if forgotten else f.line) for f in findings}
    if (end.kind, end.array if forgotten else end.line) in known:  # reported as an access already
        return findings
    return [*findings, end]


def notes(seen: observed.Observed) -> list[str]:
    """Return notes, which are not errors: threads that were elsewhere when their block met at a barrier."""
    total = seen.block[0] * seen.block[1] * seen.block[2]
    return [_note(b, total) for b in seen.partial_barriers if not b.was_skipped]


def _skipped(barrier: observed.PartialBarrier, total: int) -> Finding:
    """Return the finding for barriers that some threads went around, by an `if` or a shorter loop, until they exited.

    total: threads per block.
    """
    block, thread, (file, line) = format_dim3(barrier.block), format_dim3(barrier.thread), barrier.place
    if barrier.mask:
        message = (
            f"{barrier.count} of the {barrier.mask.bit_count()} lanes in the mask 0x{barrier.mask:08x} never came to "
            f"{barrier.name} at {file}:{line}, the first is block {block} thread {thread}: an if or a loop led them "
            "around it. CUDA requires that all of them call it; a GPU goes on once they have ended, or takes their "
            "next call of the kind for this one"
        )
        return Finding("inactive lane", message, file, line, barrier.block, barrier.thread)
    message = (
        f"{barrier.count} of {total} threads of block {block} never came to the barrier at {file}:{line}, the first is "
        f"thread {thread}: an if or a loop led them around it. CUDA requires barriers that all "
        "threads reach (compute-sanitizer's synccheck); a GPU goes on once those threads have ended, and hangs or lets "
        "others pass too early where they have not"
    )
    return Finding("skipped barrier", message, file, line, barrier.block, barrier.thread)


def _note(barrier: observed.PartialBarrier, total: int) -> str:
    block, thread, (file, line) = format_dim3(barrier.block), format_dim3(barrier.thread), barrier.place
    if not barrier.count:
        return (
            f"block {block} met in __syncthreads() at {file}:{line} and, thread {thread} among others, at line "
            f"{barrier.other_line}. A GPU counts the warps that arrive; CUDA requires one barrier, which all threads "
            "reach"
        )
    return (
        f"{barrier.count} of {total} threads of block {block} had left the kernel before the barrier at {file}:{line}, "
        f"the first is thread {thread}. A GPU does not wait for them (since Volta, sm_70). A thread that stays, "
        "without a row of its own, can still help to load"
    )


def _merged(seen: observed.Observed) -> list[Finding]:
    """Merge findings to one per bug, with a count.

    Inlined copies of a line count as one line. Two lines that race are reported once, whichever came first.
    A read that races with the write it should have waited for may also read unwritten memory: the race is the bug. An
    access that overlaps an asynchronous copy in flight races with its completion: the missing wait is the bug. Two
    lines that write the same value in one place and different ones in another are a race. A stage that is refilled too
    early is read too late, and its wait may be overtaken: the former is the bug. All uses of dynamic shared
    memory that the launch did not give are one bug.
    """
    merged: dict[tuple[Any, ...], Finding] = {}
    racing, refilled = set(), set()
    for issue in seen.issues:
        f = _finding(seen, issue)
        sides = (f.file, f.line), (f.other_file, f.other_line)
        key = (f.kind, f.array, frozenset(() if _is_forgotten(_region(seen, issue.region)) else sides))
        known = merged.get(key)
        merged[key] = f if known is None else replace(known, count=known.count + f.count)
        region = _region(seen, issue.region)
        if f.kind in ("not waited for", "wrong byte count") or (f.kind == "race" and region and region.is_shared):
            refilled.add(key)
        if f.kind == "race":
            racing |= {(f.array, side) for side in sides}
    for kind, array, sides in list(merged):
        if kind == "not waited for":
            merged.pop(("race", array, sides), None)
        elif kind == "race":
            merged.pop(("same value", array, sides), None)
    # Bytes sent beyond an mbarrier's count may not have arrived when they are read.
    miscounted = {(f.file, f.line) for f in merged.values() if f.kind == "wrong byte count"}
    late = ("not waited for", "never waited for")
    is_refilled = bool(refilled & merged.keys())
    return [
        f
        for f in merged.values()
        if not (f.kind == "uninitialised" and (f.array, (f.file, f.line)) in racing)
        and not (f.kind == "overtaken wait" and is_refilled)
        and not (f.kind in late and {(f.file, f.line), (f.other_file, f.other_line)} & miscounted)
    ]


def _region(seen: observed.Observed, number: int | None) -> observed.Region | None:
    return seen.regions[number] if number is not None and 0 <= number < len(seen.regions) else None


def _is_forgotten(region: observed.Region | None) -> bool:
    """Return True if it is the dynamic shared memory of a launch that gave none."""
    return region is not None and region.size == 0


def _at(access: observed.Access) -> str:
    place = f"{access.place[0]}:{access.place[1]}" if access.place else "an unknown line"
    return f"block {format_dim3(access.block)} thread {format_dim3(access.thread)} at {place}"


def _element(region: observed.Region | None, offset: int) -> tuple[str, int, int | None]:
    """Return a byte of a region as an array, an index in it and the number of elements that it spans.

    For shared memory: its name, the index of the word, and None.
    """
    part = region.part_at(offset) if region else None
    if part is None:
        return region.name if region else "memory", offset // 4, None
    return part.name, (offset - part.begin) // part.itemsize, (part.end - part.begin) // part.itemsize


def _of_issue(
    issue: observed.Issue, kind: str, message: str, array: str | None = None, index: int | None = None
) -> Finding:
    """Return a finding with the places, blocks and threads of both sides of an issue."""
    access, other = issue.access, issue.other
    file, line = access.place or (None, None)
    other_file, other_line = (other.place if other else None) or (None, None)
    theirs = (other.block, other.thread) if other else (None, None)
    ours = (file, line, access.block, access.thread)
    return Finding(kind, message, *ours, array, index, other_file, other_line, *theirs, issue.count)


def _noted(issue: observed.Issue) -> Finding:
    """Return the finding for arithmetic undefined in C++, or for an address that hardware accepts anyway."""
    if issue.size == observed.SHIFT:
        count = issue.offset if abs(issue.offset) < 1 << 31 else issue.offset & 0xFFFFFFFF
        message = f"by {count} bits, the width or more: a GPU gives 0 (of a negative number -1), this run may not"
    elif issue.size == observed.CONVERSION:
        (value,) = struct.unpack("<d", struct.pack("<q", issue.offset))
        message = f"of {value:g} to an integer that has no such number: a GPU gives the nearest there is"
        if value != value:
            message = "of NaN to an integer: a GPU gives 0 (of a double, or in 64 bits, only the top bit is set)"
        message += ", this run may not"
    elif issue.size == observed.DIVISION:
        message = "of an integer; neither C++ nor PTX says what it gives (an H200's quotient has all bits set)"
    else:
        message = "a matrix of wmma at a multiple of 16 bytes: GPUs take it, but CUDA requires multiples of 32"
    return _of_issue(issue, _NOTED[issue.size], f"{message}, by {_at(issue.access)}")


def _inactive_lane(issue: observed.Issue, name: str, source: int, mask: int) -> Finding:
    """Return the finding for a lane that reads from an inactive one."""
    why = "takes no part in it" if mask >> source & 1 else f"is not in its mask 0x{mask:08x}"
    message = f"{name} reads from lane {source}, which {why}, so its value is undefined: it must not be used"
    return _of_issue(issue, "inactive lane", f"{message}, by {_at(issue.access)}")


def _outside_local(issue: observed.Issue, array: str, elements: str) -> Finding:
    """Return the finding for an index past the end of a thread's own array."""
    if not array:
        message = f"access by a pointer past the end of a local array of the thread, by {_at(issue.access)}"
        return _of_issue(issue, "out of bounds", message)
    message = f"access of {array}[{issue.offset}], which has {elements} elements, by {_at(issue.access)}"
    return _of_issue(issue, "out of bounds", message, array, issue.offset)


_GROUPS = " (a wait_group counts only what a commit_group has closed before it)"
_OF_PRODUCTS = (observed.SUMS_TOUCHED, observed.NO_PRODUCT_FENCE, observed.BYTES, observed.OVERTAKEN)


def _of_products(issue: observed.Issue) -> Finding:
    """Return the finding for wgmma's registers or an mbarrier's byte count, which are not places in memory."""
    access, other = issue.access, issue.other
    if issue.kind == observed.SUMS_TOUCHED and other is not None:
        verb = "write to" if access.is_write else "read of"
        message = (
            f"{verb} an accumulator of a wgmma before a wgmma.wait_group that counts it, by {_at(access)}: it is "
            f"undefined from the wgmma on, by {_at(other)}, until that wait, which has to come after its commit_group"
        )
    elif issue.kind == observed.NO_PRODUCT_FENCE:
        message = (
            "this wgmma has no wgmma.fence before it: there has to be one before the first product, and again after "
            f"ordinary instructions have used its registers, by {_at(access)}"
        )
    elif issue.kind == observed.BYTES:
        message = (
            f"the phase of an mbarrier ended while {issue.offset:,} bytes of copies were still under way to it: more "
            f"were sent than expect_tx said, by {_at(access)}"
        )
    elif issue.kind == observed.OVERTAKEN and other is not None:
        message = (
            f"nothing orders this wait for an mbarrier's phase, by {_at(access)}, before the end of the next phase, "
            f"which comes with the arrival by {_at(other)}: on a GPU both phases can end while the thread is on its "
            "way, and it waits forever. Let all threads that wait meet before one of them releases the stage"
        )
    else:
        message = f"the wgmma was not waited for when its threads ended, by {_at(access)}{_GROUPS}"
    return _of_issue(issue, KINDS[issue.kind], message)


_OF_PEERS = {
    observed.PEER_NOT_STARTED: "of which its cluster does not know yet that it has started: cluster.sync() says so",
    observed.PEER_EXITED: (
        "and nothing keeps that block from ending before, and its shared memory with it: a cluster.sync() after the "
        "last access does"
    ),
}


def _finding(seen: observed.Observed, issue: observed.Issue) -> Finding:
    if issue.kind == observed.NOTED:
        return _noted(issue)
    if issue.shuffle is not None:
        return _inactive_lane(issue, *issue.shuffle)
    if issue.local is not None:
        return _outside_local(issue, *issue.local)
    if issue.kind in _OF_PRODUCTS or (issue.kind == observed.NEVER_WAITED and _region(seen, issue.region) is None):
        return _of_products(issue)
    region = _region(seen, issue.region)
    verb = "write of" if issue.access.is_write else "read of"
    name, index, elements = _element(region, issue.offset)
    what = f"{verb} {name}[{index}]"
    if elements is None:
        piece = f"word {index}" if issue.offset % 4 == 0 else f"byte {issue.offset}"
        what = f"{verb} {piece} of {region.label if region else name}"
    if issue.owner is not None:
        what += f" of block {format_dim3(issue.owner)}"
    kind = KINDS[issue.kind]
    if issue.kind in _OF_PEERS:
        message = f"{what} by {_at(issue.access)}, {_OF_PEERS[issue.kind]}"
    elif issue.kind == observed.RACE and issue.other is not None:
        theirs = "write" if issue.other.is_write else "read"
        message = f"{what} by {_at(issue.access)} races with {theirs} by {_at(issue.other)}"
        if issue.is_volatile:
            message += "; both are volatile, which orders nothing between threads: a barrier has to"
    elif issue.kind == observed.SAME_VALUE and issue.other is not None:
        message = f"{what} by {_at(issue.access)} races with write by {_at(issue.other)}"
        message += "; both wrote the same value, so it is the same whichever comes last"
    elif issue.kind == observed.OUT_OF_BOUNDS:
        size = f"{elements:,} elements" if elements is not None else f"{region.size if region else 0:,} bytes"
        size += ", as the launch gave no shared_mem" if _is_forgotten(region) else ""
        message = f"{what}, which has {size}, by {_at(issue.access)}"
    elif issue.kind == observed.IN_FLIGHT and issue.other is not None:
        message = f"{what} by {_at(issue.access)}, while the asynchronous copy to it by {_at(issue.other)} is in flight"
    elif issue.kind == observed.NO_PROXY_FENCE and issue.other is not None:
        message = (
            f"{what} through TMA or wgmma by {_at(issue.access)}, with no fence.proxy.async after the ordinary write "
            f"by {_at(issue.other)}: they may read what was there before"
        )
        if issue.is_volatile:  # the mark of an mbarrier
            message = (
                f"{what} by the TMA copy by {_at(issue.access)}: with no fence.mbarrier_init after the mbarrier's "
                f"initialisation by {_at(issue.other)}, the copy may not see it"
            )
    elif issue.kind == observed.NEVER_WAITED:
        what = what.replace("write of", "the asynchronous copy to").replace("read of", "the asynchronous copy from")
        ended = "its thread" if issue.owner is None else "that block"
        message = f"{what} was not waited for when {ended} ended, by {_at(issue.access)}{_GROUPS}"
    elif issue.kind == observed.UNSET_LOCAL:
        what = f"the {what}" if region else "whether the launch fails"
        message = f"{what} depends on a local variable that nobody has given a value, by {_at(issue.access)}"
    elif issue.kind == observed.CONST_WRITTEN:
        why = "which no kernel may write" if region.kind == observed.VARIABLE else "which the kernel takes as const"
        message = f"{what}, {why}, by {_at(issue.access)}"
    elif issue.kind == observed.UNINITIALISED:
        message = f"{what}, which nobody has written, by {_at(issue.access)}"
    else:
        size = f"{issue.size} bytes at an address that is no multiple of {issue.size}"
        message = f"{what}: {size}, by {_at(issue.access)}"
    return _of_issue(issue, kind, message, name, index)


def _never_written(part: observed.Part) -> Finding | None:
    """Return the finding for a kernel's array with elements that never got a value."""
    if not part.writable or part.state is None:
        return None
    left = np.flatnonzero(part.state == observed.UNWRITTEN)
    if left.size == 0:
        return None
    count = f"{left.size:,} of {part.state.size:,} elements of {part.name}"
    message = f"{count} were never written, the first is {part.name}[{left[0]}]"
    return Finding("never written", message, array=part.name, index=int(left[0]))


def end_of(seen: observed.Observed) -> Finding:
    """Return the finding for what stopped a launch early."""
    abort = seen.abort
    assert abort is not None
    kind = _STOPPED.get(abort.reason, "stopped")
    region = _region(seen, abort.region)
    name = index = None
    if region is not None and abort.offset is not None:
        name, index, _ = _element(region, abort.offset)
    who = _at(observed.Access(abort.place, abort.block, abort.thread, False))
    message = f"{abort.message.removeprefix(f'{kind}: ')}, in {who}"
    file, line = abort.place or (None, None)
    other_file, other_line = abort.other_place or (None, None)
    place = (file, line, abort.block, abort.thread, name, index, other_file, other_line)
    return Finding(kind, message, *place, explanation=abort.explanation)
