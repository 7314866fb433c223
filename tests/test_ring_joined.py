"""Ring attention whose kernels join results: O and lse in 10's epilogue, dQ in 13; sums in one pass; replays."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from planted import Bug, check_all_can_be_planted
from test_ring import TYPES, around, in_heads, inputs, on_cpu, on_host

from helpers import device, engine
from helpers.attention import (
    check,
    comms,
    forget,
    kernel,
    reference,
    ring,
    ring_attention,
    ring_attention_backward,
    ring_gradients,
    ring_joined,
)
from helpers.attention.comms import Message, virtual_ranks
from helpers.attention.ladder import LADDER, limits
from helpers.attention.ladder.stages import backward
from helpers.attention.ring_joined import Place, places
from helpers.attention.ring_schedules import shard
from helpers.device import cp
from helpers.xray import xray


@pytest.fixture(autouse=True)
def by_wgmma(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the stages that join, which the CPU engine does not choose by itself."""
    monkeypatch.setattr(ring, "STAGE", "hopper")
    monkeypatch.setattr(ring, "BACKWARD_STAGE", "hopper_backward")


def exact(host: list[np.ndarray], *, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Compute o (batch, rows, heads, d) and lse (batch, heads, rows) in float64."""
    q, k, v = in_heads(*host[:3])
    o, lse = reference.attention(q, k, v, causal=causal, return_lse=True)
    return o.swapaxes(1, 2), lse


def joined(causal: bool = True, schedule: str = "zigzag", size: int = 2, rows: int = 75, d: int = 64) -> None:
    """Compare virtual ranks with float64."""
    host = inputs(2 * size * rows, d, "bfloat16", heads=2, kv_heads=1)
    ranks = virtual_ranks(size)
    order = "ring" if schedule == "all_gather" and not causal else schedule
    q, k, v = (ranks.put(shard(a, size, order)) for a in host[:3])
    o, lse = ring_attention(q, k, v, causal=causal, schedule=schedule, return_lse=True, comms=ranks)
    want, want_lse = exact(host, causal=causal)
    check.check("o", on_host(o, order), want, tolerance=1.2e-2)
    check.check("lse", on_host(lse, order, axis=2), want_lse, tolerance=2e-5)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the merges launched from now on."""
    seen: list[int] = []
    merge = ring.merge
    monkeypatch.setattr(ring, "merge", lambda *args: seen.append(1) or merge(*args))
    return seen


@pytest.mark.parametrize(
    ("causal", "schedule", "size", "d"),
    [
        *((True, "zigzag", 2, 64), (True, "zigzag", 3, 128), (True, "ring", 3, 64), (False, "ring", 2, 64)),
        (True, "all_gather", 2, 64),
    ],
)
def test_kernels_join_their_results(
    causal: bool, schedule: str, size: int, d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 75 rows, so that a tile contains complete rows and others."""
    merges = counted(monkeypatch)
    joined(causal, schedule, size, d=d)
    assert not merges


def test_what_no_kernel_joins_is_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example with a head_dim that has to be padded."""
    merges = counted(monkeypatch)
    joined(d=20)
    assert merges


def test_the_places_of_products() -> None:
    assert places([[(0, 8)]], 8) == [[Place(False, 8)]]
    assert places([[(0, 8)], [(4, 8)], [(4, 8)]], 8) == [[Place(False, 4)], [Place(True, 4)], [Place(True, 8)]]
    assert places([[(0, 4), (4, 8)]], 8) == [[Place(False, 4), Place(False, 8)]]
    assert places([[(0, 8)], [(0, 4)]], 8) is None, "rows that stay open end before the others"
    assert places([[(0, 4)], [(0, 8)]], 8) is None, "some rows of a product have a result"
    assert places([[(4, 8)]], 8) is None, "rows of no product"
    for size in (2, 3, 5):
        for schedule, causal in (("zigzag", True), ("ring", True), ("ring", False), ("all_gather", True)):
            plan = ring.steps(schedule, size, causal=causal, rows=8)
            for rank in range(size):
                found = places([[p.rows for p in step.products[rank]] for step in plan], 8)
                assert found is not None and found[0][0].before is False


JOIN_BUGS = (
    Bug("the weights exchanged", "inverse[i] *= join * share;", "inverse[i] *= keep[i];"),
    Bug("what was there keeps its weight", "keep[i] *= share;", ""),
    Bug("lse of the last keys alone", "own = base + logf(both);", ""),
    Bug("the last complete row is not stored", "min(tile.rows, open);", "min(tile.rows, open - 1);"),
    Bug("one row too many is open", "r >= open &&", "r > open &&", cpu_only=True),
    Bug("the part begins at the tile", "(r - first_open) * params.o.row", "r * params.o.row", cpu_only=True),
    Bug("lse of another head", "+ tile.head) * lse_step", ") * lse_step"),
)


def plant(monkeypatch: pytest.MonkeyPatch, module: Any, bug: Bug) -> None:
    """Plant a bug in the kernel that a module's plans launch."""
    plan = module.compile_plan

    def planted(of: Any, call: Any, family: Any) -> Any:
        return plan(of.changed(file=bug.plant(of.file)), call, (bug.name, family))

    forget()
    monkeypatch.setattr(module, "compile_plan", planted)


def test_the_bugs_can_be_planted() -> None:
    check_all_can_be_planted((kernel.source(LADDER["hopper"].file), bug) for bug in JOIN_BUGS)
    check_all_can_be_planted((kernel.source(ring.SUM), bug) for bug in SUM_BUGS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("bug", JOIN_BUGS, ids=lambda bug: bug.name)
def test_planted_bugs_of_a_join_are_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.ON_GPU and bug.cpu_only:
        pytest.skip("shows on the CPU engine for certain")
    plant(monkeypatch, ring_joined, bug)
    with pytest.raises((check.CheckFailed, engine.LaunchError)):
        joined()
    forget()


# ---- gradients


@pytest.mark.parametrize(
    ("causal", "schedule", "size", "chunk", "d"),
    [
        *((True, "zigzag", 2, 64, 128), (False, "ring", 2, 64, 128), (True, "zigzag", 2, 128, 64)),
        (True, "zigzag", 2, 24, 128),
    ],
)
@pytest.mark.parametrize("blocks", [0, 3])
def test_rows_are_prepared_once(
    causal: bool, schedule: str, size: int, chunk: int, d: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a product's rows begin within a tile. blocks: the number of persistent blocks; 0: none."""
    if blocks:
        monkeypatch.setattr(limits, "multiprocessors", lambda: blocks)
        monkeypatch.setattr(backward, "_PERSISTENT_BLOCKS", 1)
    parts: list[str] = []
    plan = ring_gradients.Part.plan
    monkeypatch.setattr(
        ring_gradients.Part, "plan", lambda self, specs: parts.append(self.lengths[0]) or plan(self, specs)
    )
    forget()
    host = inputs(2 * size * chunk, d, "bfloat16", heads=2, kv_heads=1)
    _, _, *gradients = around(virtual_ranks(size), host, schedule, causal=causal)
    assert ({*parts} == {"prepare", "multiply", "round"}) == (chunk != 24)
    q, k, v, do = in_heads(*host)
    want = reference.attention_backward(do, q, k, v, causal=causal)
    for name, got, whole in zip(("dq", "dk", "dv"), gradients, want, strict=True):
        whole = whole.swapaxes(1, 2)
        if name != "dq":
            whole = whole.sum(axis=2, keepdims=True)
        check.check(name, on_host(got, schedule), whole, tolerance=4e-2)


def test_gradients_in_order_after_others_of_the_same_shapes() -> None:
    """The preparation of rows is cached for a form of call, which includes a fixed order."""
    host, ranks = inputs(256, 128, "bfloat16", heads=2, kv_heads=1), virtual_ranks(2)
    q, k, v, do = (ranks.put(shard(a, 2, "zigzag")) for a in host)
    o, lse = ring_attention(q, k, v, causal=True, return_lse=True, comms=ranks)

    def gradients(comms: Any, deterministic: bool) -> list[np.ndarray]:
        got = ring_attention_backward(do, q, k, v, o, lse, causal=True, deterministic=deterministic, comms=comms)
        return [on_host(a, "zigzag") for a in got]

    gradients(ranks, False)
    for a, b in zip(gradients(ranks, True), gradients(virtual_ranks(2), True), strict=True):
        assert np.array_equal(a, b)


# ---- sums


def summed(case: str) -> None:
    """Compare sums of parts of some rows, of all, and of none with NumPy."""
    rng = np.random.default_rng(3)
    batch, n, heads, d = 2, 21, 3, 6 if case == "odd" else 16
    whole, some = (0, n), (5, 12)
    spans = {"three": [some, whole, (0, 9)], "odd": [some, (9, 20)], "none": [], "in place": [(3, 9), some]}[case]
    rows = some if case == "in place" else whole
    spans = [(max(a, rows[0]), min(b, rows[1])) for a, b in spans]
    parts = [rng.standard_normal((batch, b - a, heads, d)).astype(np.float32) for a, b in spans]
    want = np.zeros((batch, n, heads, d))
    for part, (a, b) in zip(parts, spans, strict=True):
        want[:, a:b] += part
    like = cp.asarray(np.zeros((batch, n, heads, d), np.float32))
    dtype = np.dtype(np.float32 if case in ("odd", "in place") else TYPES["bfloat16"])
    there = [(cp.asarray(part), span) for part, span in zip(parts, spans, strict=True)]
    got = ring.sum_parts(like, there, rows, dtype)
    assert got.dtype == dtype and (case != "in place" or any(got is a for a, _ in there))
    tolerance = 1e-6 if dtype == np.float32 else 2e-2
    check.check("sum", cp.asnumpy(got).astype(np.float64), want[:, slice(*rows)], tolerance=tolerance)


@pytest.mark.parametrize("case", ["three", "odd", "none", "in place"])
def test_parts_are_added_in_one_pass(case: str) -> None:
    summed(case)


@on_cpu
def test_the_x_ray_of_a_sum_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def observed(compiled: kernel.Kernel, grid: Any, block: Any, args: Any, *, shared_mem: int) -> None:
        found.extend(xray(compiled, grid, block, args, shared_mem).findings)

    with kernel.launches_replaced(observed):
        summed("three")
    assert not found


SUM_BUGS = (
    Bug("a part is left out", "add(part_2, first_2, rows_2);", "", inputs="three"),
    Bug("the part begins with the whole", "first + row - first_part;", "first + row;", inputs="three", cpu_only=True),
    Bug("rows before the whole's", "first + row - first_part;", "row - first_part;", inputs="in place", cpu_only=True),
    Bug("the first batch's part", "(batch * rows_part + part_row)", "(part_row)", inputs="three"),
    Bug("the last row is left out", "part_row >= rows_part", "part_row + 1 >= rows_part", inputs="odd"),
)


@pytest.mark.parametrize("bug", SUM_BUGS, ids=lambda bug: bug.name)
def test_planted_bugs_of_a_sum_are_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.ON_GPU and bug.cpu_only:
        pytest.skip("shows on the CPU engine for certain")
    monkeypatch.setattr(ring, "SUM", bug.plant(kernel.source(ring.SUM)))
    with pytest.raises((AssertionError, check.CheckFailed, engine.LaunchError)):
        summed(bug.inputs)


# ---- replays


class FakeCuda:
    """Streams whose graphs list what was queued while they were captured; the current stream is None."""

    def __init__(self) -> None:
        self.queued: list[str] = []
        self.log: list[str] = []
        outer = self

        class Stream:
            device_id = 0

            def __init__(self, non_blocking: bool = False) -> None:
                self.captured: list[str] | None = None

            def begin_capture(self) -> None:
                assert self.captured is None
                self.captured, outer.queued = [], []

            def end_capture(self) -> Any:
                held, self.captured = [*outer.queued], None
                return SimpleNamespace(launch=lambda stream: outer.log.append(f"graph {held}"))

            def __enter__(self) -> None:
                pass

            def __exit__(self, *_: Any) -> None:
                pass

        self.Stream = Stream
        self.Device = lambda: SimpleNamespace(id=0, synchronize=lambda: None)
        self.MemoryPool = lambda: SimpleNamespace(malloc=None)
        self.using_allocator = lambda malloc: Stream()
        self.get_current_stream = lambda: None


class Recording(comms.Comms):
    """Ranks whose messages are recorded."""

    cuda: FakeCuda

    def start(self, sends: Any, receives: Any) -> Callable[[], None]:
        if self.recorded:
            return self.recorded.messages(lambda: self._start("again"))
        return self._start("now")

    def _start(self, when: str) -> Callable[[], None]:
        self.cuda.log.append(f"start {when}")
        return lambda: self.cuda.log.append(f"arrived {when}")


@on_cpu
def test_a_replay_makes_messages_between_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the calls; captured launches do not run, and messages are not sent, before it is called."""
    ranks = Recording(2, (0, 1))
    ranks.cuda = cuda = FakeCuda()
    monkeypatch.setattr(device, "ON_GPU", True)
    monkeypatch.setattr(device, "cp", SimpleNamespace(cuda=cuda))

    def work() -> str:
        cuda.queued.append("first")
        arrived = ranks.start([Message(0, 1, None)], [])
        cuda.queued.append("meanwhile")
        arrived()
        cuda.queued.append("last")
        return "results"

    again = ranks.captured(work)
    assert cuda.log == ["start now", "arrived now"] * 2 and not ranks.capturing and ranks.recorded is None
    for _ in range(2):
        cuda.log.clear()
        assert again() == "results"
        assert cuda.log == [
            *("graph ['first']", "start again", "graph ['meanwhile']", "arrived again", "graph ['last']"),
        ]

    def fails() -> None:
        cuda.queued.append("first")
        if ranks.recorded:
            raise KeyError("in a capture")

    with pytest.raises(KeyError, match="in a capture"):
        ranks.captured(fails)
    assert not ranks.capturing and ranks.recorded is None
