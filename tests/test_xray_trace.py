"""The trace of a checked run: the order of waits, arrivals, copies and products, and its displays."""

from __future__ import annotations

import functools
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hopper_tiles import OPTIONS, map_of, x_rayed
from planted_files import planted

from helpers import engine
from helpers.engine.tracing import CUT, ENDS, NO_TIME
from helpers.lesson.exercises import exercise
from helpers.xray import Report, Trace, TraceOptions, xray

N = 120  # rows of V: eight tiles of 16, the last one with zeros past the end
RING = exercise.holes.complete(exercise.ours("10_ring"))
NAMES = {f"barriers[{i}]": f"{('full', 'empty')[i // 3]}[{i % 3}]" for i in range(6)}
PRODUCER, CONSUMER = "const int parity = (tile / STAGES & 1) ^ 1;", "const int parity = tile / STAGES & 1;"


def ring(code: str = RING, trace: bool | TraceOptions = True, grid: int = 1) -> tuple[Report, np.ndarray]:
    """Return the X-ray of the exercise's ring, and its sums of columns."""
    v = engine.asarray(np.random.default_rng(0).standard_normal((1, 1, N, 64)).astype(np.float16))
    o = engine.full(64, np.nan, np.float32)
    kernel = engine.RawModule(code=code, options=OPTIONS).get_function("sums")
    report = xray(kernel, (grid,), (96,), (map_of(v, (64, 16, 1, 1)), o, np.int32(N)), trace=trace)
    return report, engine.asnumpy(o)


@functools.cache
def right_ring() -> Trace:
    trace = ring()[0].trace
    assert trace is not None
    return trace.renamed(NAMES)


@functools.cache
def stage_trace() -> Trace:
    """Return the trace of notebook 10's finished kernel: rings of K and V, warpgroups, turns, products, stores."""
    trace = x_rayed("hopper", np.float16, trace=True).trace
    assert trace is not None and not trace.is_cut
    return trace


def check_order(trace: Trace) -> None:
    """Check the rules that every launch that ends obeys."""
    for block in trace.blocks():
        ended: dict[str, int] = defaultdict(int)  # phases of each mbarrier
        counts: dict[tuple[str, int | None], Counter[str]] = defaultdict(Counter)
        expects: dict[str, int] = {}
        for e in trace.of(block=block).events:
            if e.kind == "init":
                expects[e.barrier] = e.value
            elif e.kind == "phase ends":
                assert e.phase == ended[e.barrier]
                ended[e.barrier] += 1
                of_phase = counts[e.barrier, e.phase]
                assert of_phase["arrive"] == expects[e.barrier]
                assert of_phase["landed"] == of_phase["expect_tx"] == of_phase["load"]
            elif e.kind == "waited" and e.phase is not None:
                assert e.phase < ended[e.barrier], "the end of a wait comes after that of its phase"
            elif e.kind in ("arrive", "expect_tx", "load", "landed"):
                counts[e.barrier, e.phase][e.kind] += e.value * e.n_lanes
        for warp in {e.warp for e in trace.of(block=block).events}:
            waiting = None
            for e in trace.of(block=block, warp=warp).events if warp is not None else ():
                if e.kind in ENDS and e.n_lanes == 32:
                    waiting = ENDS[e.kind], e.barrier, e.phase
                elif waiting is not None and e.kind in ENDS.values() and e.n_lanes == 32:
                    assert (e.kind, e.barrier, e.phase) == waiting
                    waiting = None


def test_a_ring_in_order() -> None:
    trace = right_ring()
    check_order(trace)
    kinds = Counter(e.kind for e in trace.events)
    assert (kinds["load"], kinds["landed"], kinds["init"]) == (8, 8, 6)
    assert kinds["phase ends"] == 16  # each tile is full once and empty once
    assert sum(e.value for e in trace.of(kind="landed").events) == 8 * 2048
    arrivals = trace.of(kind="arrive", barrier="empty").events
    assert {(e.warp, e.n_lanes) for e in arrivals} == {(1, 32), (2, 32)} and len(arrivals) == 16
    own = exercise.ours("10_ring").splitlines()
    for kind, call in (("load", "tma_load"), ("wait", "mbarrier_wait"), ("init", "mbarrier_init")):
        for e in trace.of(kind=kind).events:
            assert e.place[0] == "cell" and call in own[e.place[1] - 2]  # line 1 of a cell is the magic
    assert [e.phase for e in trace.of(kind="wait", barrier="empty[0]").events] == [-1, 0, 1]


def test_a_stage_in_order() -> None:
    check_order(stage_trace())
    trace = stage_trace().of(block=0)
    kinds = {e.kind for e in trace.events}
    assert {"wgmma", "wgmma.commit", "wgmma.wait", "wgmma.waited", "wgmma done"} <= kinds
    assert {"setmaxnreg", "setmaxnreg done", "bar.arrive", "bar.sync", "bar.synced", "syncthreads"} <= kinds
    issued, done = (trace.of(kind=kind).events for kind in ("wgmma", "wgmma done"))
    assert len(issued) == sum(e.value for e in done)
    for warp in {e.warp for e in issued}:  # products complete during the wait for them
        numbers = [(e.order, e.number) for e in issued if e.warp == warp]
        for end in (e for e in done if e.warp == warp):
            assert all(order < end.order for order, number in numbers if number < end.number)


def test_a_trace_changes_nothing_else() -> None:
    (off, sums), (on, traced) = ring(trace=False), ring()
    assert off.trace is None and on.trace is not None
    assert np.array_equal(sums, traced)
    for name in vars(off):
        if name not in ("trace", "fetches"):
            assert getattr(off, name) == getattr(on, name), name
    assert all(np.array_equal(off.fetches[name], on.fetches[name]) for name in off.fetches)
    wrong = RING.replace(CONSUMER, PRODUCER)
    assert wrong != RING
    assert ring(wrong, trace=False)[0].findings == ring(wrong)[0].findings != []


def test_a_wrong_parity_goes_on_before_the_copy() -> None:
    """The consumers wait for parity 1 while phase 0 runs: they continue, and read what has not arrived."""
    report, _ = ring(RING.replace(CONSUMER, PRODUCER))
    assert report.findings[0].kind == "not waited for"
    trace = report.trace.renamed(NAMES)
    first = trace.of(kind="waited", barrier="full[0]").events[0]
    assert first.phase == -1 and "in phase 0, so parity 1 counts as ended" in first.what
    assert first.order < trace.of(kind="landed", barrier="full[0]").events[0].order


@pytest.mark.parametrize(
    ("old", "new", "who"),
    [
        (PRODUCER, CONSUMER, {0: "empty[0], phase 0", 1: "full[0], phase 0", 2: "full[0], phase 0"}),
        ("    mbarrier_arrive(empty + 8 * stage);\n", "", {0: "empty[0], phase 0", 1: "full[0], phase 1"}),
    ],
)
def test_a_hang_ends_with_those_who_wait(old: str, new: str, who: dict[int, str]) -> None:
    assert RING.count(old) == 1
    report, _ = ring(RING.replace(old, new))
    assert report.findings[0].kind == "deadlock"
    state = report.trace.renamed(NAMES).at(-1)
    assert state.is_stuck and "did not end" in state.event.what
    for warp, what in who.items():
        assert state.warps[warp].waits.startswith(what)
    assert "forever" in str(state)


COPIES = r"""
#line 1 "copies.cu"
extern "C" __global__ void copies(const float4* in, float4* out) {
  __shared__ float4 s[64];
  unsigned to = (unsigned)__cvta_generic_to_shared(&s[threadIdx.x]);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(in + threadIdx.x));
  asm volatile("cp.async.commit_group;");
  asm volatile("cp.async.wait_group 0;");
  __syncthreads();
  out[threadIdx.x] = s[63 - threadIdx.x];
}
"""


def test_lanes_that_do_the_same_share_an_event() -> None:
    function = engine.RawModule(code=COPIES).get_function("copies")
    given = engine.asarray(np.arange(256, dtype=np.float32))
    trace = xray(function, (2,), (64,), (given, engine.empty(256, np.float32)), trace=True).trace
    assert trace.blocks() == [0, 1]
    one = [e for e in trace.of(block=1, warp=1).events]
    assert [e.kind for e in one] == [
        *("cp.async", "cp.async.commit", "cp.async.wait", "syncthreads", "synced", "exit"),
    ]
    assert {e.lanes for e in one} == {0xFFFFFFFF}
    assert one[0].what == "issues cp.async, 512 bytes" and one[2].what == "waits for cp.async: 512 bytes land"
    assert [e.place[1] for e in one[:4]] == [4, 5, 6, 7]
    arrived, passed = (trace.of(block=0, kind=kind).events for kind in ("syncthreads", "synced"))
    assert max(e.order for e in arrived) < min(e.order for e in passed)


def test_blocks_and_warps_are_picked_and_the_limit_is_told() -> None:
    whole = ring(grid=3)[0].trace
    assert whole.blocks() == [0, 1, 2] and NO_TIME in str(whole)
    picked = ring(trace=TraceOptions(blocks=[1], warps=[2]), grid=3)[0].trace
    assert picked.blocks() == [1]
    assert {e.warp for e in picked.events if e.kind in ("wait", "waited", "syncthreads")} == {2}
    check_order(picked)
    few = ring(trace=TraceOptions(limit=10), grid=3)[0].trace
    assert few.events == whole.events[:10] and few.is_cut and not whole.is_cut
    assert CUT in str(few) and CUT in few.stepper().frame
    for wrong, words in (
        (TraceOptions(blocks=[3]), "blocks 0 to 2"),
        (TraceOptions(blocks=[]), "blocks 0 to 2"),
        (TraceOptions(warps=[32]), "warps 0 to 31"),
    ):
        with pytest.raises(ValueError, match=words):
            ring(trace=wrong, grid=3)
    with pytest.raises(ValueError, match="at least one event"):
        ring(trace=TraceOptions(limit=0))
    with pytest.raises(KeyError, match=r"no barrier 'fill'; there are: .*full\[0\]"):
        right_ring().of(barrier="fill")
    with pytest.raises(IndexError, match="events; got step"):
        right_ring().at(10_000)


@pytest.mark.parametrize("make", [right_ring, stage_trace])
def test_a_saved_trace_is_in_the_trace_event_format(make: Any, tmp_path: Path) -> None:
    """Each event has the fields that the format requires for its phase, and the slices of a thread nest."""
    trace = make()
    trace.save(tmp_path / "launch.json")
    read = json.loads((tmp_path / "launch.json").read_text(encoding="utf-8"))
    assert NO_TIME in read["otherData"]["note"]
    pairs: dict[tuple[str, str], list[float]] = defaultdict(list)
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    named = set()
    for e in read["traceEvents"]:
        assert {"name", "ph", "pid", "tid"} <= set(e)
        if e["ph"] == "M":
            named.add((e["name"], e["pid"], e["tid"]))
            continue
        assert ("thread_name", e["pid"], e["tid"]) in named and ("process_name", e["pid"], 0) in named
        if e["ph"] == "X":
            assert e["dur"] > 0
            threads[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
        else:
            assert e["ph"] in "besf" and {"id", "cat", "ts"} <= set(e)
            pairs["flow" if e["ph"] in "sf" else "copy", f"{e['pid']} {e['id']}"].append(e["ts"])
    for ends in pairs.values():
        assert len(ends) == 2 and ends[0] < ends[1]
    for slices in threads.values():
        open_until: list[float] = []
        for begin, end in sorted(slices, key=lambda s: (s[0], -s[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)
    loads = trace.of(kind="load").events
    assert sum(kind == "copy" for kind, _ in pairs) == len(loads)
    assert sum(kind == "flow" for kind, _ in pairs) >= len(loads)


def test_the_stepper_shows_the_states() -> None:
    trace = right_ring()
    figure = trace.stepper(at=40)
    data = figure.data
    count = len(trace.events)
    assert len(data["steps"]) == count and data["first"] == 40
    names = [name for pair in range(3) for name in (f"full[{pair}]", f"empty[{pair}]")]
    now: dict[int, int] = defaultdict(int)
    tiles = set()
    for state, changes, sentence in zip(trace.states(), data["steps"], data["sentences"], strict=True):
        now.update(zip(changes[::2], changes[1::2], strict=True))
        assert data["texts"][sentence][0] == str(state.event)
        for i, name in enumerate(names):
            tile, phase, _, _, waiting = (data["texts"][now[5 * i + k]][0] for k in range(5))
            if one := state.mbarriers.get(name):
                assert phase == f"{one.phase}, parity {one.phase % 2}"
                assert waiting == ", ".join(f"warp {warp}" for warp in sorted(one.waiting))
            tiles |= {tile} if name.startswith("full") else set()
        for i, (_, warp) in enumerate(sorted(state.warps.items())):
            line, doing = (data["texts"][now[5 * len(names) + 2 * i + k]][0] for k in range(2))
            assert (warp.waits in doing) if warp.waits else doing == warp.doing
            assert line == (str(warp.place[1]) if warp.place and warp.alive else "")
    assert tiles == {"", "no tile", "copy in flight", "full"}
    assert [name for name, _ in data["walks"]] == ["the block", "warp 0", "warp 1", "warp 2"]
    for name, walk in data["walks"][1:]:
        assert {f"warp {trace.events[i].warp}" for i in walk} == {name}
    part = trace.stepper(first=10, steps=20)
    assert len(part.data["steps"]) == 20 and f"Steps 10 to 29 of {count}" in part.frame
    with pytest.raises(IndexError, match="got first="):
        trace.stepper(first=count)
    with pytest.raises(KeyError, match="block 7 has no events"):
        trace.stepper(7)


def test_any_launch_has_a_stepper() -> None:
    """A launch without mbarriers, and one with unnamed memory."""
    report = planted("turn_that_nobody_gives").look(trace=True)
    figure = report.trace.stepper()
    assert "forever" in figure.frame and "bar.sync" in figure.frame
    assert "mbarrier</th>" not in figure.frame
    assert "step" in repr(stage_trace().stepper(steps=50))


CLUSTER = r"""
#include <cooperative_groups.h>
extern "C" __global__ void __cluster_dims__(2, 1, 1) meet(int *out) {
  __shared__ int own;
  cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
  if (threadIdx.x == 0) own = 3 + cluster.block_rank();
  cluster.sync();  // met
  if (threadIdx.x == 0) out[blockIdx.x] = *cluster.map_shared_rank(&own, 1 - cluster.block_rank());
  if (cluster.block_rank() == 0 || threadIdx.x < 32) cluster.sync();
}
"""


def test_blocks_of_a_cluster_meet_in_a_trace() -> None:
    """Each warp arrives, waits and continues, none before the last has arrived. Warps that have left do not count."""
    kernel = engine.RawKernel(CLUSTER, "meet")
    trace = xray(kernel, (2,), (64,), (engine.zeros(2, np.int32),), trace=True).trace
    assert trace is not None
    met = trace.of(barrier="barrier.cluster").events
    first = [e for e in met if e.place and "met" in trace.lines()[e.place]]
    assert Counter((e.kind, e.n_lanes) for e in first) == {
        (f"cluster.{what}", 32): 4 for what in ("arrive", "wait", "waited")
    }
    assert max(e.order for e in first if e.kind == "cluster.arrive") < min(
        e.order for e in first if e.kind == "cluster.waited"
    )
    assert [e.what for e in first][:2] == ["arrives at barrier.cluster, of 128 threads", "waits for barrier.cluster"]
    assert {(e.block, e.warp) for e in met if e not in first} == {(0, 0), (0, 1), (1, 0)}
    waits = trace.at([e.order for e in trace.of(block=0).events].index(first[1].order)).warps
    assert waits[0].waits == "barrier.cluster"
