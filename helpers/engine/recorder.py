"""The recorder of a trace: it requests a launch's events from the engine, and reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from .structures import TracedEvent
from .tracing import KINDS, WARP, Recorded, TraceEvent, TraceOptions

NOBODY = 0xFFFFFFFF  # stands for no thread
OF_MBARRIER = ("init", "arrive", "expect_tx", "wait", "waited", "phase ends", "load", "landed")


class Recorder:
    """Record one launch on the engine, from construction to `stop`."""

    def __init__(self, lib: ctypes.CDLL, options: TraceOptions, grid: Sequence[int]) -> None:
        """Start recording.

        Raises:
            ValueError: the grid has no such block, no block is picked, a warp's number is above 31, or the limit is not
                positive.
        """
        n_blocks = grid[0] * grid[1] * grid[2]
        blocks = sorted(set(options.blocks or ()))
        if any(not 0 <= block < n_blocks for block in blocks) or (options.blocks is not None and not blocks):
            raise ValueError(f"the grid has blocks 0 to {n_blocks - 1}; the trace's options name {blocks}")
        if any(not 0 <= warp < WARP for warp in options.warps or ()):
            raise ValueError(f"a block has at most warps 0 to 31; the trace's options name {list(options.warps or ())}")
        if options.limit < 1:
            raise ValueError(f"a trace keeps at least one event; got limit={options.limit}")
        self._lib = lib
        mask = sum(1 << warp for warp in set(options.warps)) if options.warps is not None else NOBODY
        lib.engine_trace_start(
            (ctypes.c_uint64 * max(len(blocks), 1))(*blocks),
            ctypes.c_uint(len(blocks)),
            ctypes.c_uint(mask),
            ctypes.c_uint64(options.limit),
        )

    def stop(self) -> None:
        """Stop recording; the events stay until the next recorded launch."""
        self._out, is_cut = ctypes.POINTER(TracedEvent)(), ctypes.c_uint()
        self._count = self._lib.engine_trace_stop(ctypes.byref(self._out), ctypes.byref(is_cut))
        self._is_cut = bool(is_cut.value)

    def read(
        self, place_of: Callable[[int], tuple[str, int] | None], name_of: Callable[[int, int, int], str]
    ) -> Recorded:
        """Return the events.

        Args:
            place_of: returns (file, line) of a return address. name_of: names an mbarrier by its address and the
                addresses of the block's static and dynamic shared memory.
        """
        names: dict[tuple[int, int], str] = {}  # by block and number
        bases: dict[int, tuple[int, int]] = {}
        words: dict[tuple[int, int, int], str] = {}
        events = []
        for order, e in enumerate(self._out[: self._count]):
            kind = KINDS[e.kind]
            barrier, phase = "", None
            if kind == "block begins":
                bases[e.block] = e.value, e.phase
            elif kind == "init":
                at = (e.phase, *bases.get(e.block, (0, 0)))
                if at not in words:
                    words[at] = name_of(*at)
                names[e.block, e.number] = words[at]
            if kind in OF_MBARRIER:
                barrier = names.get((e.block, e.number), f"mbarrier {e.number}")
                phase = None if kind == "init" else e.phase
            elif kind.startswith("bar."):
                barrier = f"bar.sync {e.number}"
            elif kind in ("syncthreads", "synced"):
                barrier = "__syncthreads"
            elif kind.startswith("cluster."):
                barrier = "barrier.cluster"
            elif kind in ("wgmma.wait", "wgmma.waited") and e.number:
                kind = "setmaxnreg" if kind == "wgmma.wait" else "setmaxnreg done"
            warp = None if e.thread == NOBODY else e.thread // WARP
            value = 0 if kind == "block begins" else e.value
            place = place_of(e.pc) if e.pc else None
            events.append(TraceEvent(order, kind, e.block, warp, e.lanes, barrier, phase, value, e.number, place))
        return Recorded(tuple(events), self._is_cut)
