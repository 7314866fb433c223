"""Measure fused attention's promises on a GPU: against plain attention, at N = 2^17, and for small calls.

Its record has rows of these kinds, whose names are in brackets: plain attention, three calls of PyTorch in its inputs'
type ("plain"); one launch at N = 131,072 ("stage", "peer"), where N x N scores may not fit; and small calls, from the
call to the result ("latency") and on the device only ("device"). `helpers.bench.climb` shows them with the ladder.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from helpers.attention import flash_attention
from helpers.bench import peers, records
from helpers.bench.cases import TYPES, Case, Inputs, Shape, as_numpy
from helpers.bench.job import Job, of_peer, of_stage, why_not
from helpers.bench.plan import forward
from helpers.bench.results import Measurement, Record, results_table
from helpers.bench.run import device_facts, how_measured, run_all
from helpers.bench.timing import measure
from helpers.device import ON_GPU, cp

RECORD = records.MEASURED / "nvidia-h200-promises.json"


def recorded() -> Record | None:
    """Read the committed record; None if there is none."""
    return Record.load(RECORD) if RECORD.is_file() else None


_shown = records.table_of(lambda: recorded())
LONG = 2**17
# One head in float32, whose scores take 64 GiB; 16 heads in a half type, whose scores exceed every GPU's memory.
LONG_CASES = (Case((1, 1, LONG, 128)), Case((1, 16, LONG, 128), "bfloat16"))
PLAIN_CASES = tuple(Case((4, 16, 4096, d), dtype) for dtype in ("float32", "bfloat16") for d in (64, 128))
BUDGET_S = 0.3
WAITS = 200  # calls that are waited for, one after the other


@dataclass(frozen=True)
class Small:
    """A call so small that the host and the slowest block determine its time, as a model's user experiences it.

    rows: queries of each head, one or as many as keys: SDPA aligns a causal mask at the first key, ours at the last.
    keys: of each head of k and v, all seen by the last query.
    """

    name: str
    rows: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"

    @property
    def shape(self) -> Shape:
        """q's shape: (batch, heads, rows, head_dim)."""
        return (1, self.heads, self.rows, self.head_dim)

    def arrays(self) -> list[np.ndarray]:
        """Make q, k and v, (1, rows, heads, head_dim), in float32, not yet rounded to the type."""
        rng = np.random.default_rng(0)
        sizes = ((self.rows, self.heads), (self.keys, self.kv_heads), (self.keys, self.kv_heads))
        return [rng.standard_normal((1, *size, self.head_dim), dtype=np.float32) + np.float32(0.25) for size in sizes]


SMALL = (
    Small("a prompt of 512 tokens", 512, 512, 16, 16, 64),
    Small("one token after 8192", 1, 8192, 32, 8, 128),
)


def jobs(cases: Sequence[Case] = LONG_CASES) -> list[Job]:
    """List the launches at large N, case by case. naive, whose scratch fills half of a GPU, is last in its case."""
    planned = []
    for case in cases:
        torch = peers.torch_on_gpu()
        others = [peer for peer in peers.TORCH if torch and peer.why_not(case.dtype, case.causal) is None]
        stages = [stage for stage in forward().values() if why_not(stage, case) is None]
        planned += [of_peer(peer, case, compared_with=case) for peer in others]
        planned += [of_stage(stage, case, compared_with=case) for stage in reversed(stages)]
    return planned


def plain(case: Case) -> Measurement:
    """Time plain attention in PyTorch, whose steps write N x N results, in the type of the inputs.

    A stage's tolerance does not apply, because a half type rounds the scores.
    """
    import torch

    inputs = Inputs(case.shape, case.dtype)
    q, k, v = inputs.torch

    def launch() -> Any:
        return torch.softmax(q @ k.transpose(-1, -2) * case.shape[3] ** -0.5, dim=-1) @ v

    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.no_grad():
        sample, o = inputs.sample(), launch()
        timed = asdict(measure(launch, budget_s=BUDGET_S))
    tflops = case.flops / timed["ms"] / 1e9
    checked = {"max_error": sample.error(o), "tolerance": sample.tolerance}
    return Measurement("plain attention", "plain", list(case.shape), case.dtype, **timed, tflops=tflops, **checked)


def waited(call: Callable[[], Any], calls: int = WAITS) -> dict[str, Any]:
    """Time a call until its result is ready, in milliseconds: the median; ms_min and ms_max are deciles."""
    times = []
    for _ in range(calls + 20):
        began = time.perf_counter_ns()
        call()
        cp.cuda.Device().synchronize()
        times.append((time.perf_counter_ns() - began) / 1e6)
    times = sorted(times[20:])  # the first ones were warm-ups
    low, high = (times[min(round(share * len(times)), len(times) - 1)] for share in (0.1, 0.9))
    return {"ms": statistics.median(times), "ms_min": low, "ms_max": high, "launches": calls}


def latencies(small: Small, calls: int = WAITS) -> Iterator[Measurement]:
    """Time one small call with each implementation: until its result is ready, and on the device with a cold L2."""
    host = small.arrays()
    for name, call in _small_calls(small, host):
        for kind, timed in (("latency", waited(call, calls)), ("device", asdict(measure(call, budget_s=BUDGET_S)))):
            note = f"{small.name}: {small.keys} keys of {small.kv_heads} heads"
            yield Measurement(name, kind, list(small.shape), small.dtype, **timed, note=note, causal=True)


def _small_calls(small: Small, host: Sequence[np.ndarray]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield (name, call), each checked against the first."""
    dtype = small.dtype if ON_GPU else "float32"
    ours = [cp.asarray(a.astype(TYPES[dtype])) for a in host]
    first = as_numpy(flash_attention(*ours, causal=True)).astype(np.float32)
    yield "flash_attention, CuPy arrays", lambda: flash_attention(*ours, causal=True)
    torch = peers.torch_on_gpu()
    if not torch:
        return
    tensors = [torch.from_numpy(a).cuda().to(getattr(torch, dtype)) for a in host]
    q, k, v = (a.transpose(1, 2) for a in tensors)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    more = {"enable_gqa": True} if small.heads != small.kv_heads else {}
    is_causal = small.rows > 1  # PyTorch aligns its mask top-left: a single query would see one key
    calls = {
        "flash_attention, torch tensors": lambda: flash_attention(*tensors, causal=True),
        "SDPA, torch tensors": lambda: sdpa(q, k, v, is_causal=is_causal, **more).transpose(1, 2),
    }
    for name, call in calls.items():
        with torch.no_grad():
            if not np.allclose(as_numpy(call()), first, atol=0.03):
                raise ValueError(f"{name} returns another result for {small.name}")
            yield name, call


def take(
    path: Path, words: Sequence[str] = (), *, cases: Sequence[Case] = LONG_CASES, smalls: Sequence[Small] = SMALL
) -> Record:
    """Measure everything, and save on the way. words: must be empty."""
    records.check_single_file("promises", words)
    record = Record({}, how_measured() | {"command": "python3 -m helpers.bench.study promises FILE"})
    todo = jobs(cases)
    record.device = device_facts()
    if peers.torch_on_gpu():
        record.results += [plain(case) for case in PLAIN_CASES]
    for small in smalls:
        record.results += latencies(small)
    run_all(todo, record, BUDGET_S, path)
    record.save(path)
    return record


@_shown
def table(record: Record | None = None) -> str:
    """Format a record, by default the committed one, as text."""
    waits = [r for r in record.results if r.kind in ("latency", "device")]
    rest = Record(record.device, record.how, [r for r in record.results if r not in waits], record.notes)
    lines = [results_table(rest), "", f"{'':34}{'µs':>9}{'spread':>8}"]
    for r in waits:
        lines.append(f"{r.name:34}{1e3 * r.ms:9.1f}{(r.ms_max - r.ms_min) / r.ms:8.0%}  {r.kind}; {r.note}")
    return "\n".join(lines)


def scores_bytes(case: Case) -> int:
    """Count the bytes of the N x N scores of all heads, in the type of the inputs."""
    batch, heads, n, _ = case.shape
    return math.prod((batch, heads, n, n)) * np.dtype(TYPES[case.dtype]).itemsize
