"""Compare ring attention on all GPUs of a machine with independent runs of the same work.

    python3 -m helpers.bench.study ring FILE [PART ...]    # of PARTS, below

bfloat16. First the results are compared: those of GPUs with those of virtual ranks on one GPU, bit for bit, and both
with float64. Then one process per GPU does the same, and ranks fail on purpose. Times are those of all GPUs together:
several calls are queued, the clock runs from the first to the end of the last, and all ways take turns. An independent
run has a rank's rows and as many keys as make its share of the work, in one launch and with no other GPU: with a causal
mask (R + 1) / 2 times its rows. TFLOP/s are per GPU. NCCL uses NCCL_MAX_P2P_NCHANNELS blocks. "short" parts compare
calls with their graphs. "gathered" measures the pieces of an all-gather; they also run repeatedly, at the clock that
their power allows. Without words all parts are measured. "processes" also joins ranks by MPI, if that is installed:
pip install mpi4py
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from helpers import device
from helpers.attention import (
    flash_attention,
    flash_attention_backward,
    reference,
    ring,
    ring_attention,
    ring_attention_backward,
)
from helpers.attention.comms import (
    Comms,
    Message,
    nccl,
    nccl_library,
    nccl_of_id,
    nccl_of_mpi,
    nccl_of_torch,
    peer_copies,
    virtual_ranks,
)
from helpers.attention.ladder.launches import slices
from helpers.attention.ladder.layout import bits
from helpers.attention.ring_schedules import SCHEDULES, positions, unshard
from helpers.bench import records
from helpers.bench.harness import Row, Study, Way, figures, words_of_process
from helpers.bench.run import device_facts
from helpers.bench.timing import Sensors, sm_mhz, speed_range, speeds
from helpers.engine.cuda_source.signatures import dtype_of

cp = device.cp
HEADS = ((16, 16), (32, 8))  # of q, and of k and v
D = 128
LOCAL = tuple(2**i * 1024 for i in range(1, 6))  # tokens per GPU
BACKWARD_LOCAL = LOCAL[:-1]
LOCAL_OF_MORE, BACKWARD_OF_MORE = LOCAL[2:5], LOCAL[3:4]  # for more than two GPUs, whose independent runs take longer
SHORT = LOCAL[:3]
LEFT = (0, 4, 8)  # multiprocessors
LONG = 2**20  # tokens on all GPUs
ROUNDS = 7
AT_LEAST_MS = 18.0  # for calls that are timed together
SHORT_AT_LEAST_MS = 24.0  # the same for short steps
ON_AND_ON_MS = 250.0  # for calls at the clock that their power allows
LIMIT_S = 8.0  # for ranks that wait for one that fails


# ---- the model


def tokens_to_hide_copies(
    heads: int, kv_heads: int, *, tflops: float = 600.0, gb_per_s: float = 400.0, causal: bool = False
) -> float:
    """Return the tokens per GPU from which a step takes longer than the copy of the next K and V in a half type.

    A step has 4 N^2 heads d FLOP and copies 4 N kv_heads d bytes; with a causal mask, zigzag, half the FLOP.
    """
    return (2 if causal else 1) * 1e3 * tflops / gb_per_s * kv_heads / heads


def efficiency(
    size: int,
    rows: int,
    heads: int,
    kv_heads: int,
    *,
    causal: bool = False,
    schedule: str = "zigzag",
    tflops: float = 600.0,
    gb_per_s: float = 400.0,
    t0_ms: float = 0.0,
) -> float:
    """Model the speed relative to independent runs, from work and copies only, at d = 128.

    Args:
        rows: per GPU. tflops, gb_per_s: of one GPU while it computes, and of its link in one direction. t0_ms: each
            copy's fixed time.
    """
    product = 4 * rows * rows * heads * D / (1e12 * tflops)  # seconds of a step without a mask
    copy = 1e-3 * t0_ms + 4 * rows * kv_heads * D / (1e9 * gb_per_s)
    work = product * size * (0.5 if causal else 1.0)
    if schedule == "all_gather":
        return work / (work + (size - 1) * copy)
    # The last step has no copy. In a plain causal ring some rank has a whole product in every step but the first.
    step = product / 2 if causal and schedule == "zigzag" else product
    first = product / 2 if causal else product
    times = [first, *[step] * (size - 1)]
    return work / (sum(max(each, copy) for each in times[:-1]) + times[-1])


def calculated() -> list[str]:
    """Format the calculated figures, a line each."""
    lines = ["tokens a GPU from which the copy of K and V hides, at 600 TFLOP/s:"]
    for heads, kv_heads in HEADS:
        for gb_per_s in (400, 50):
            full, causal = (
                tokens_to_hide_copies(heads, kv_heads, gb_per_s=gb_per_s, causal=each) for each in (False, True)
            )
            what = f"{heads:3} heads of q, {kv_heads:2} of k, {gb_per_s:3} GB/s"
            lines.append(f"  {what}: {full:7,.0f}; causal, zigzag {causal:7,.0f}")
    lines.append("share of the time that is work, causal, 16,384 tokens a GPU, 32 heads of q, 8 of k:")
    for size in (2, 4, 8, 64, 1024):
        shares = {name: efficiency(size, 16384, 32, 8, causal=True, schedule=name) for name in SCHEDULES}
        lines.append(f"  {size:5} GPUs: " + ", ".join(f"{name} {share:.2f}" for name, share in shares.items()))
    return lines


# ---- inputs


def numbers(shape: Sequence[int], seed: int) -> Any:
    """Make a bfloat16 array of normal numbers with a mean of 0.25 on the current device: the same on every GPU."""
    if not device.ON_GPU:
        return cp.asarray((np.random.default_rng(seed).standard_normal(shape) + 0.25).astype(dtype_of("bfloat16")))
    made, random = cp.empty(tuple(shape), "uint16"), cp.random.RandomState(seed)
    for rows in slices(shape[1], max(2**26 // (made.size // shape[1]), 1)):  # these need twice as many bytes each
        part = made[:, rows]
        part[...] = (random.standard_normal(part.shape, dtype=np.float32) + np.float32(0.25)).view("uint32") >> 16
    return made.view(dtype_of("bfloat16"))


class RankInputs:
    """q, k, v and do of the local ranks, and the same for independent runs."""

    def __init__(self, ranks: Comms, rows: int, heads: int, kv_heads: int, d: int = D) -> None:
        self.ranks, self.rows, self.heads, self.kv_heads, self.d = ranks, rows, heads, kv_heads, d
        made = []
        for rank in ranks.ranks:
            with ranks.on(rank):
                of = [(heads, 0), (kv_heads, 1), (kv_heads, 2), (heads, 3)]
                made.append([numbers((1, rows, h, d), 4 * rank + which) for h, which in of])
        self.q, self.k, self.v, self.do = ([each[i] for each in made] for i in range(4))

    def forward(self, ranks: Comms, schedule: str, causal: bool, **options: Any) -> Any:
        return ring_attention(self.q, self.k, self.v, causal=causal, schedule=schedule, comms=ranks, **options)

    def backward(self, ranks: Comms, schedule: str, causal: bool, results: Any, **options: Any) -> Any:
        given = self.do, self.q, self.k, self.v, *results
        return ring_attention_backward(*given, causal=causal, schedule=schedule, comms=ranks, **options)

    def both(self, ranks: Comms, schedule: str, causal: bool) -> list[list[Any]]:
        """Return o, lse, dq, dk and dv of all local ranks; the gradients have the same bits every time."""
        results = self.forward(ranks, schedule, causal, return_lse=True)
        return [*results, *self.backward(ranks, schedule, causal, results, deterministic=True)]

    def call(self, causal: bool, *, backward: bool) -> Callable[..., Any]:
        """Make the timed call, with ranks and a schedule. The forward pass before gradients runs now."""
        if not backward:
            return lambda ranks, schedule="zigzag": self.forward(ranks, schedule, causal)
        results = self.forward(self.ranks, "zigzag", causal, return_lse=True)
        return lambda ranks, schedule="zigzag": self.backward(ranks, schedule, causal, results)

    def independent(self, causal: bool, *, backward: bool) -> Way:
        """Make each GPU's own run: its rows, and as many keys as make its share of the work."""
        ranks, size = self.ranks, self.ranks.size
        keys = self.rows * (size + 1) // 2 if causal else self.rows * size
        runs: list[Way] = []
        for i, rank in enumerate(ranks.ranks):
            with ranks.on(rank):
                k, v = (numbers((1, keys, self.kv_heads, self.d), 4 * rank + which) for which in (1, 2))
                way = functools.partial(flash_attention, self.q[i], k, v, causal=causal)
                if backward:
                    o, lse = way(return_lse=True)
                    way = functools.partial(
                        flash_attention_backward, self.do[i], self.q[i], k, v, o, lse, causal=causal
                    )
                runs.append(way)

        def run() -> None:
            for rank, way in zip(ranks.ranks, runs, strict=True):
                with ranks.on(rank):
                    way()

        return run

    def flop(self, causal: bool, *, backward: bool) -> float:
        """Count the FLOP of one rank."""
        pairs = self.rows * self.rows * self.ranks.size * (0.5 if causal else 1.0)
        return (10 if backward else 4) * pairs * self.heads * self.d

    @property
    def what(self) -> Row:
        return {"gpus": self.ranks.size, "rows": self.rows, "heads": self.heads, "kv_heads": self.kv_heads}


def to_host(parts: Sequence[Any]) -> list[np.ndarray]:
    """Copy all ranks' arrays, one after the other, each on its own GPU's current stream."""
    made = []
    for a in parts:
        with a.device if device.ON_GPU else contextlib.nullcontext():
            made.append(cp.asnumpy(a))
    return made


# ---- checking


def virtual_like(ranks: Comms) -> Comms:
    """Make virtual ranks, as many as these and with the same grids."""
    made = virtual_ranks(ranks.size)
    made.leave = ranks.leave
    return made


def same_bits(mine: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return True if two lists of arrays are the same, bit for bit."""
    pairs = zip(to_host(mine), to_host(others), strict=True)
    return all(np.array_equal(a.view("uint8"), b.view("uint8")) for a, b in pairs)


def error(inputs: RankInputs, o: Sequence[Any], schedule: str, causal: bool) -> float:
    """Return the largest error of some rows of the first and the last head, compared with float64."""
    q, k, v, o = ([a.astype(np.float64) for a in to_host(each)] for each in (inputs.q, inputs.k, inputs.v, o))
    k, v = unshard(k, schedule), unshard(v, schedule)
    worst, size = 0.0, inputs.ranks.size
    for rank in range(size):
        where = positions(schedule, size, rank, inputs.rows)
        for head in (0, inputs.heads - 1):
            kv_head = head * inputs.kv_heads // inputs.heads
            for row in (0, inputs.rows // 2 - 1, inputs.rows // 2, inputs.rows - 1):
                seen = slice(where[row] + 1 if causal else None)
                exact = reference.attention(q[rank][0, row : row + 1, head], k[0, seen, kv_head], v[0, seen, kv_head])
                worst = max(worst, float(np.abs(o[rank][0, row, head] - exact[0]).max()))
    return worst


TOLERANCE = 2e-2


def correct(ranks: Comms, name: str, rows: int = 2048, heads: tuple[int, int] = (16, 8), d: int = D) -> Iterator[Row]:
    """Compare GPUs with virtual ranks on the first of them, and with float64."""
    inputs = RankInputs(ranks, rows, *heads, d)
    virtual = virtual_like(ranks)
    together = RankInputs(virtual, rows, *heads, d)
    for schedule in SCHEDULES:
        for causal in (False, True):
            order = "ring" if schedule == "all_gather" and not causal else schedule
            mine, want = inputs.both(ranks, schedule, causal), together.both(virtual, schedule, causal)
            same = [same_bits(*pair) for pair in zip(mine, want, strict=True)]
            row = {"part": "correct", "comms": name, "schedule": schedule, "causal": causal, **inputs.what}
            row |= {"forward_bits": all(same[:2]), "backward_bits": all(same[2:])}
            row["error"] = error(inputs, mine[0], order, causal)
            row["ok"] = row["forward_bits"] and row["backward_bits"] and row["error"] < TOLERANCE
            yield row


# ---- one process per GPU


def work(kind: str, rank: int, size: int, folder: Path) -> None:
    """Run a rank's process: join by an id in a file, mpi4py or torch.distributed, compute, and compare.

    kind: "id", "mpi" or "torch"; "leaves": rank 1 leaves before the second call; "never": rank 1 never comes.
    """
    if kind == "never" and rank:
        return
    if kind == "mpi":
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.Get_rank()
    with cp.cuda.Device(rank % cp.cuda.runtime.getDeviceCount()):
        limit = LIMIT_S if kind in ("leaves", "never") else 60.0
        began = time.monotonic()
        try:
            if kind == "mpi":
                ranks: Comms = nccl_of_mpi(MPI.COMM_WORLD, timeout=limit)
            elif kind == "torch":
                from torch import distributed

                distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
                ranks = nccl_of_torch(timeout=limit)
            else:
                ranks = nccl_of_id(size, rank, _shared_id(rank, folder), timeout=limit)
            for row in correct_of_a_process(ranks):
                print(json.dumps(row), flush=True)
            if kind == "leaves":
                inputs = RankInputs(ranks, 4096, 16, 16)
                inputs.forward(ranks, "zigzag", True)
                synchronize(ranks)
                if rank:
                    os._exit(3)
                began = time.monotonic()
                inputs.forward(ranks, "zigzag", True)
        except (TimeoutError, RuntimeError) as failure:
            said = {"error": f"{type(failure).__name__}: {failure}", "seconds": time.monotonic() - began}
            print(json.dumps(said), flush=True)
            os._exit(4)  # NCCL's threads may not end


def _shared_id(rank: int, folder: Path) -> bytes:
    path = folder / "id"
    if rank == 0:
        (folder / "part").write_bytes(nccl_library().get_unique_id())
        (folder / "part").rename(path)  # atomically
    while not path.is_file():
        time.sleep(0.01)
    return path.read_bytes()


def correct_of_a_process(ranks: Comms) -> Iterator[Row]:
    """Compare this process's rank with virtual ranks, all on its own GPU."""
    virtual = virtual_like(ranks)
    mine, together = RankInputs(ranks, 1024, 16, 8), RankInputs(virtual, 1024, 16, 8)
    (rank,) = ranks.ranks
    for schedule in SCHEDULES:
        pairs = zip(mine.both(ranks, schedule, True), together.both(virtual, schedule, True), strict=True)
        yield {"rank": rank, "schedule": schedule, "bits": all(same_bits(a, b[rank : rank + 1]) for a, b in pairs)}


def processes(kind: str, size: int) -> tuple[list[list[Row]], list[str]]:
    """Start the processes of all ranks; return their output, and the ends of their errors."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "helpers.bench.studies.ring", kind]
        environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if kind == "mpi":
            commands = [["mpirun", "-n", str(size), *command, "0", str(size), folder]]
        else:
            commands = [[*command, str(rank), str(size), folder] for rank in range(size)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
        started = [subprocess.Popen(each, **pipes) for each in commands]
        printed, complaints = [], []
        for each in started:
            try:
                out, err = each.communicate(timeout=90)
            except subprocess.TimeoutExpired:
                each.kill()
                out, err = each.communicate()
                err += "\nkilled after 90 s"
            printed.append([json.loads(line) for line in out.splitlines() if line.startswith("{")])
            complaints.append(err[-600:])
    return printed, complaints


def measure_processes(size: int) -> Iterator[Row]:
    """Measure with each process launcher (an id in a file, MPI, torch.distributed)."""
    for kind in ("id", "mpi", "torch"):
        row: Row = {"part": "processes", "joined_by": kind, "gpus": size}
        try:
            printed, complaints = processes(kind, size)
        except OSError as failure:  # no mpirun
            yield {**row, "skipped": str(failure)}
            continue
        said = [each for of_process in printed for each in of_process]
        row["ok"] = len(said) == size * len(SCHEDULES) and all(each.get("bits") for each in said)
        if not row["ok"]:
            row["said"] = [*said, *complaints]
            if any(f"No module named '{name}'" in text for text in complaints for name in ("mpi4py", "torch")):
                row["skipped"] = "not installed"
                del row["ok"]
        yield row


def measure_failures(size: int) -> Iterator[Row]:
    """Measure a rank that never comes, and one that leaves: the first rank's error, and how long it takes."""
    for kind in ("never", "leaves"):
        printed, complaints = processes(kind, size)
        ends = [each for each in printed[0] if "error" in each]
        row: Row = {"part": "fails", "case": kind, "gpus": size, "limit_s": LIMIT_S}
        row |= ends[0] if ends else {"said": [*printed[0], *complaints]}
        yield {**row, "ok": bool(ends) and ends[0]["seconds"] < LIMIT_S + 5}


# ---- times


def synchronize(ranks: Comms) -> None:
    for rank in ranks.ranks:
        with ranks.on(rank):
            cp.cuda.Device().synchronize()


def seconds(ranks: Comms, run: Way, calls: int) -> float:
    """Time a call in seconds, from several that are queued one after the other."""
    synchronize(ranks)
    began = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(ranks)
    return (time.perf_counter() - began) / calls


def timed(
    ranks: Comms, ways: Mapping[str, Way], at_least_ms: float | None = None
) -> dict[str, tuple[list[float], float]]:
    """Time all ways in turns: milliseconds of each way, one for each round, and a call's host time.

    at_least_ms: for calls that are timed together; by default AT_LEAST_MS.
    """
    at_least = 1e-3 * (AT_LEAST_MS if at_least_ms is None else at_least_ms)
    calls, host = {}, {}
    for name, run in ways.items():
        run()
        synchronize(ranks)
        began = time.perf_counter()
        run()
        host[name] = 1e3 * (time.perf_counter() - began)
        synchronize(ranks)
        calls[name] = max(1, min(50, round(at_least / (time.perf_counter() - began))))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, run in ways.items():
            seconds(ranks, run, (calls[name] + 1) // 2)  # so that the clock is the one that its power allows
            times[name].append(1e3 * seconds(ranks, run, calls[name]))
    return {name: (taken, host[name]) for name, taken in times.items()}


def measure_ways(
    what: Row, ranks: Comms, ways: Mapping[str, Way], flop: float, at_least_ms: float | None = None
) -> Iterator[Row]:
    """Time ways in turns, like `timed`: a row each, with its speed relative to the independent runs."""
    all_times = timed(ranks, ways, at_least_ms)
    for name, (taken, host) in all_times.items():
        row = {**what, "name": name, **figures(taken, flop), "host_ms": host}
        if name != "independent":
            row |= speeds(taken, all_times["independent"][0])
        yield row


def ways_of(
    comms: Mapping[str, Comms], call: Callable[[Comms, str], Any], causal: bool, left_to_nccl: Sequence[int]
) -> dict[str, Way]:
    """Make the schedules with NCCL, with several numbers of multiprocessors left to it, and with peer copies."""
    ways: dict[str, Way] = {}

    def left(ranks: Comms, count: int, schedule: str) -> None:
        ranks.leave = count
        call(ranks, schedule)

    for name, ranks in comms.items():
        counts = left_to_nccl if name == "nccl" else (0,)
        for count in counts:
            ways[f"zigzag, {name}{f', {count} left' if len(counts) > 1 else ''}"] = functools.partial(
                left, ranks, count, "zigzag"
            )
        if causal:
            ways[f"ring, {name}"] = functools.partial(left, ranks, counts[-1], "ring")
        ways[f"all_gather, {name}"] = functools.partial(left, ranks, 0, "all_gather")
    return ways


def _shapes(
    part: str, ranks: Comms, heads: Sequence[tuple[int, int]], local: Sequence[int], *, backward: bool = False
) -> Iterator[tuple[Row, RankInputs, Callable[..., Any], dict[str, Way], float]]:
    """Yield for each shape and mask the row's fields, the inputs, the call, the ways to compare, and its FLOP."""
    for (of_q, of_kv), rows in itertools.product(heads, local):
        inputs = RankInputs(ranks, rows, of_q, of_kv)
        for causal in (False, True):
            ways = {"independent": inputs.independent(causal, backward=backward)}
            what = {"part": part, "causal": causal, **inputs.what}
            flop = inputs.flop(causal, backward=backward)
            yield what, inputs, inputs.call(causal, backward=backward), ways, flop
        free(ranks)


def measure_times(comms: Mapping[str, Comms], *, backward: bool, local: Sequence[int]) -> Iterator[Row]:
    """Measure all shapes, with and without a mask."""
    ranks, part = next(iter(comms.values())), "backward" if backward else "forward"
    left = (0,) if backward else LEFT  # hopper_backward's grid is not persistent
    for what, _, call, ways, flop in _shapes(part, ranks, HEADS, local, backward=backward):
        yield from measure_ways(what, ranks, ways | ways_of(comms, call, what["causal"], left), flop)


def measure_short(ranks: Comms, *, backward: bool) -> Iterator[Row]:
    """Measure short steps, whose launches take the host longer than the GPUs: call by call, and as a graph.

    In "graph, joined after", separate passes do the merging and adding of the kernels. "no messages" is the graph of a
    call whose ranks send nothing, so that no GPU waits for another; "products alone" adds no parts either. Their
    results are wrong. An all-gather computes products with its own keys while the others' arrive.
    """
    part = "short backward" if backward else "short forward"
    for what, _, call, ways, flop in _shapes(part, ranks, HEADS, SHORT, backward=backward):
        by_calls = functools.partial(call, ranks)
        ways |= {"calls, peer copies": by_calls, "graph, peer copies": ranks.captured(by_calls)}
        with patch.object(ring, "_joined", nothing), patch.object(ring, "_once", nothing):
            ways["graph, joined after"] = ranks.captured(by_calls)
        silent, held = mute(ranks)
        ways["graph, no messages"] = silent.captured(functools.partial(call, silent))
        if not backward:
            ways["all-gather, graph"] = ranks.captured(functools.partial(call, ranks, "all_gather"))
        else:
            with patch.object(ring, "sum_parts", unadded):
                ways["graph, products alone"] = silent.captured(functools.partial(call, silent))
        for rank, arrived, sent in held:
            with ranks.on(rank):
                fill(bits(arrived).reshape(-1), bits(sent).reshape(-1))
        yield from measure_ways(what, ranks, ways, flop, SHORT_AT_LEAST_MS)


def fill(target: Any, values: Any) -> None:
    """Repeat values over an array, both with one axis."""
    for part in slices(target.size, values.size):
        target[part] = values[: part.stop - part.start]


def mute(ranks: Comms) -> tuple[Comms, list[tuple[int, Any, Any]]]:
    """Return a copy of the ranks that sends nothing, and a list of (rank, what would arrive, what the rank would send).

    Fill the former with the latter before timing: a product of zeros takes less power, and is faster.
    """
    made, held = copy.copy(ranks), []

    def start(sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        held.extend((sent.rank, arrived.array, sent.array) for sent, arrived in zip(sends, receives, strict=True))
        return lambda: None

    made.start = start  # type: ignore[method-assign]
    return made, held


def nothing(*args: Any, **named: Any) -> tuple[()]:
    """Return the result of `ring._joined` and `ring._once` when no kernel joins results."""
    return ()


def unadded(like: Any, parts: Sequence[Any], rows: tuple[int, int], dtype: Any = np.float32) -> Any:
    """Return an array like `ring.sum_parts`, without adding anything."""
    return cp.empty((len(like), rows[1] - rows[0], *like.shape[2:]), dtype=dtype)


def measure_gathered(ranks: Comms) -> Iterator[Row]:
    """Measure the pieces of an all-gather by peer copies: each alone, and its clock and power when repeated."""
    for what, inputs, of_schedule, ways, flop in _shapes("gathered", ranks, HEADS[:1], LOCAL[3:4]):
        order, call = "zigzag" if what["causal"] else "ring", functools.partial(of_schedule, ranks, "all_gather")
        at_hand = [*zip(inputs.k, inputs.v, strict=True)]

        def gather(order: str = order, at_hand: Any = at_hand) -> Any:
            return ring._gathered(ranks, at_hand, order)()

        ready = gather()

        def products(call: Way = call, ready: Any = ready) -> None:
            with patch.object(ring, "_gathered", lambda *_: lambda: ready):
                call()

        def in_order(ready: Any = ready, order: str = order, rows: int = inputs.rows) -> None:
            for rank, pair in zip(ranks.ranks, ready, strict=True):
                with ranks.on(rank):
                    for a in pair:
                        unshard([a[:, i * rows : (i + 1) * rows] for i in range(ranks.size)], order)

        ways |= {"all-gather": call, "its copies alone": gather, "its products alone": products}
        ways |= {"chunks put in order": in_order, "as a graph": ranks.captured(call)}
        for row in measure_ways(what, ranks, ways, flop):
            yield {**row, **under_way(ranks, ways[row["name"]], row["ms"])}


def under_way(ranks: Comms, run: Way, ms: float) -> Row:
    """Run a way repeatedly at the clock that its power allows: milliseconds per call, clocks, watts.

    Clocks are those of each GPU, in MHz, counted by a kernel after the last call; watts, the first one's.
    """
    calls = max(2, round(ON_AND_ON_MS / ms))
    with ranks.on(ranks.ranks[0]), Sensors() as sensors:
        for _ in range(calls // 2):
            run()
        synchronize(ranks)
        began = time.perf_counter()
        for _ in range(calls):
            run()
        clocks = []
        for rank in ranks.ranks:
            with ranks.on(rank):
                clocks.append(round(sm_mhz()))
        end = time.perf_counter()
    return {"sustained_ms": 1e3 * (end - began) / calls, "sm_mhz": clocks, **sensors.between(began, end)}


def free(ranks: Comms) -> None:
    """Return the memory in CuPy's pools."""
    for rank in ranks.ranks:
        with ranks.on(rank):
            cp.get_default_memory_pool().free_all_blocks()


def measure_copies(comms: Mapping[str, Comms]) -> Iterator[Row]:
    """Time copies of K and V with 8 heads to the next rank, alone: GB/s per GPU in one direction."""
    for rows in LOCAL:
        for name, ranks in comms.items():
            made = []
            for rank in ranks.ranks:
                with ranks.on(rank):
                    made.append([cp.zeros((2, rows, 8, D), "uint16") for _ in range(2)])
            size = ranks.size
            sends = [Message(rank, (rank + 1) % size, a[0]) for rank, a in zip(ranks.ranks, made, strict=True)]
            receives = [Message(rank, (rank - 1) % size, a[1]) for rank, a in zip(ranks.ranks, made, strict=True)]

            def run(ranks: Comms = ranks, sends: Any = sends, receives: Any = receives) -> None:
                ranks.start(sends, receives)()

            ((taken, _),) = timed(ranks, {name: run}).values()
            bytes_moved = sends[0].array.nbytes
            row = {"part": "copies", "name": name, "gpus": size, "rows": rows, "bytes": bytes_moved}
            yield {**row, "ms": statistics.median(taken), "gb_per_s": bytes_moved / statistics.median(taken) / 1e6}


def measure_long(comms: Mapping[str, Comms]) -> Iterator[Row]:
    """Measure 2^20 tokens, 32 query heads and 8 KV heads, causal, once with each communicator."""
    ranks = next(iter(comms.values()))
    for each in comms.values():  # already compiled and connected
        RankInputs(ranks, 4096, 32, 8).forward(each, "zigzag", True)
    inputs = RankInputs(ranks, LONG // ranks.size, 32, 8)
    for name, each in comms.items():
        each.leave = LEFT[-1] if name == "nccl" else 0
        taken = 1e3 * seconds(ranks, lambda each=each: inputs.forward(each, "zigzag", True), 1)
        row = {"part": "long", "causal": True, **inputs.what, "name": f"zigzag, {name}", "ms": taken}
        yield {**row, "tflops": inputs.flop(True, backward=False) / taken / 1e9}
        free(ranks)


@functools.cache
def _comms() -> tuple[dict[str, Comms], dict[str, str]]:
    """Make the communicators that this machine supports; return them, and the reasons why others are missing."""
    comms: dict[str, Comms] = {}
    failed: dict[str, str] = {}
    for name, make in (("nccl", nccl), ("peer copies", peer_copies)):
        try:
            comms[name] = make()
        except RuntimeError as failure:
            failed[name] = str(failure)
    return comms, failed


def _gpus() -> int:
    return cp.cuda.runtime.getDeviceCount()


def _head() -> Row:
    environment = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    facts = {**device_facts(), "nccl": nccl_library().get_version()}
    return {"device": facts, "environment": environment, "how": __doc__, "failed": dict(_comms()[1])}


def _agreed(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield rows, then raise if one of them reports an error."""
    wrong = []
    for row in rows:
        yield row
        if row.get("ok") is False:
            wrong.append(line(row))
    if wrong:
        raise AssertionError(wrong[-1])


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "correct": lambda: _agreed(row for name, each in _comms()[0].items() for row in correct(each, name)),
    "processes": lambda: _agreed(measure_processes(_gpus())),
    "fails": lambda: _agreed(measure_failures(_gpus())),
    "copies": lambda: measure_copies(_comms()[0]),
    "forward": lambda: measure_times(_comms()[0], backward=False, local=LOCAL if _gpus() <= 2 else LOCAL_OF_MORE),
    "backward": lambda: measure_times(
        _comms()[0], backward=True, local=BACKWARD_LOCAL if _gpus() <= 2 else BACKWARD_OF_MORE
    ),
    "short forward": lambda: measure_short(_comms()[0]["peer copies"], backward=False),
    "short backward": lambda: measure_short(_comms()[0]["peer copies"], backward=True),
    "gathered": lambda: measure_gathered(_comms()[0]["peer copies"]),
    "long": lambda: measure_long(_comms()[0]),
}
STUDY = Study("ring", PARTS, _head, line=lambda row: line(row), replaces=lambda row: row["gpus"] == _gpus())
take = STUDY.take


# ---- the study's text


def line(row: Mapping[str, Any]) -> str:
    """Format one row of a record."""
    part, gpus = row["part"], f"{row['gpus']} GPUs  "
    if part == "correct":
        verdict = "ok" if row["ok"] else "WRONG"
        mask = "causal" if row["causal"] else "full"
        bits = f"bits of virtual ranks: {row['forward_bits']}, gradients {row['backward_bits']}; error"
        return f"{gpus}{part:11}{row['comms']:12}{row['schedule']:11}{mask:7}{bits} {row['error']:.1e}: {verdict}"
    if part in ("processes", "fails"):
        said = row.get("skipped") or row.get("error") or ("ok" if row["ok"] else f"WRONG: {row.get('said')}")
        after = f" after {row['seconds']:.1f} s" if "seconds" in row else ""
        return f"{gpus}{part:11}{row.get('joined_by') or row['case']:12}{said}{after}"
    if "gb_per_s" in row:
        return f"{gpus}{part:11}{row['rows']:7} tokens  {row['name']:26}{row['ms']:9.3f} ms {row['gb_per_s']:6.0f} GB/s"
    mask = "causal" if row["causal"] else "full"
    what = f"{gpus}{part:15}{row['rows']:7} tokens, {row['heads']}/{row['kv_heads']} heads, {mask:6}"
    more = ""
    if "speed" in row:
        low, high = speed_range(row)
        more = f"  {row['speed']:.3f} ({low:.3f} .. {high:.3f})"
    host = f"  host {row['host_ms']:.2f} ms" if "host_ms" in row else ""
    if "sm_mhz" in row:
        clocks = "/".join(map(str, row["sm_mhz"]))
        more += f"  on and on {row.get('sustained_ms', row['ms']):.2f} ms {clocks} MHz {row.get('watts', 0):.0f} W"
    return f"{what} {row['name']:24}{row['ms']:10.2f} ms {row['tflops']:5.0f} TFLOP/s{more}{host}"


recorded = records.reader("nvidia-h200-ring.json", "nvidia-h100-80gb-hbm3-ring.json")


def table(record: Mapping[str, Any] | None = None) -> str:
    """Format the calculated figures, and the rows of a record, by default the committed one, as text."""
    record = record or recorded()
    return "\n".join([*calculated(), *map(line, record["rows"] if record else ())])


if __name__ == "__main__":
    # A process started by a part of the study.
    _kind, _rank, _size, _folder = words_of_process("ring", 4)
    work(_kind, int(_rank), int(_size), Path(_folder))
