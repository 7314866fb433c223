"""Compare flash_cute and its first step with flash_mma: time, registers, instructions and seconds to compile.

At each shape the kernels are timed in turns, on the same 16,384 tokens of 2048 columns: 32 heads of 64 or 16 of 128.
Some rows of each result are compared with float64 first. "compiled": each kernel compiled by NVRTC without a cache,
many in parallel; with its SASS if nvdisasm is in PATH.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from helpers.attention import kernel
from helpers.attention.compile_report import program, read_log
from helpers.attention.ladder import LADDER, Rung
from helpers.attention.ladder.steps import CLIMBS
from helpers.bench import peers, records, sass_loop
from helpers.bench.cases import Case, shape_of_tokens
from helpers.bench.harness import Study, compare_jobs
from helpers.bench.job import of_peer, of_stage, tile_sizes
from helpers.bench.run import JobRunner, compile_all
from helpers.device import describe
from helpers.engine import nvrtc

recorded = records.reader("nvidia-h200-cute.json")
DTYPE, ARCH, ROUNDS = "bfloat16", "sm_90", 8
LENGTHS, HEAD_DIMS = (512, 4096, 16384), (64, 128)
SQUARE = (("BLOCK_M", 64), ("BLOCK_N", 64))  # the tile that notebook 12 begins with
PROCESSES = min(16, os.cpu_count() or 1)  # that compile in parallel
PEER = "SDPA flash"  # FlashAttention-2 in PyTorch


@dataclass(frozen=True)
class Way:
    """A kernel with its tiles: the stage's own, or others."""

    name: str
    stage: Rung
    sizes: tuple[tuple[str, int], ...] = ()

    def defines(self, head_dim: int) -> dict[str, int]:
        """Return all -D options, in the order in which a launch gives them, so that CuPy's cache knows them."""
        return {**tile_sizes(self.stage, Case((1, 2048, 16384, head_dim), DTYPE)), **dict(self.sizes)}


COMPARED_WITH = Way("07", LADDER["flash_mma"])
(_COPIES,) = (step for step in CLIMBS["flash_cute"] if step.idea == "TiledCopy")  # flash_mma's products
_KERNELS = (("07", LADDER["flash_mma"]), ("12, first step", _COPIES), ("12", LADDER["flash_cute"]))
WAYS = (
    *(Way(name, stage) for name, stage in _KERNELS),
    *(Way(f"{name}, 64 x 64", stage, SQUARE) for name, stage in _KERNELS),
)
CASES = tuple(
    Case(shape_of_tokens(n, d), DTYPE, causal) for d in HEAD_DIMS for n in LENGTHS for causal in (False, True)
)


# ---- what the compiler makes of the kernels


def cold(way: Way, head_dim: int) -> dict[str, Any]:
    """Compile a kernel with NVRTC and no cache: seconds, registers, spilled bytes, instructions of its tile loop.

    The instruction counts are None if nvdisasm is not in PATH.

    Raises:
        CuteMissing: it includes CuTe's headers, which are not installed.
    """
    from cupy.cuda import nvrtc as compiler

    code, name, defines = kernel.source(way.stage.file), way.stage.kernel_name(DTYPE), way.defines(head_dim)
    options = (*kernel.options(defines), *nvrtc.header_options(code))
    begin = time.perf_counter()
    with program(code, options, ARCH, (name,), log=True) as compiled:
        seconds = time.perf_counter() - begin
        cubin, symbol = compiler.getCUBIN(compiled), compiler.getLoweredName(compiled, name)
        report = read_log(compiler.getProgramLog(compiled), name, symbol, ARCH)
    return {
        "name": way.name,
        "file": way.stage.file,
        "head_dim": head_dim,
        "sizes": defines,
        "seconds": seconds,
        "registers": report.registers,
        "spill_bytes": report.spill_bytes,
        "cubin_bytes": len(cubin),
        **_instructions(cubin),
    }


def _instructions(cubin: bytes) -> dict[str, Any]:
    """Return the instructions of the kernel and of its tile loop, and the loop's by opcode; Nones without nvdisasm."""
    if shutil.which("nvdisasm") is None:
        return {"instructions": None, "loop": None, "opcodes": None}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin + b"\0")  # CuPy's getCUBIN leaves out the last byte, a zero
        made = subprocess.run(["nvdisasm", "-c", str(file)], check=True, capture_output=True, text=True)
    listed, labels = sass_loop.parsed(made.stdout)
    loop = sass_loop.tile_loop(listed, labels)
    opcodes = collections.Counter("moves" if sass_loop.is_move(i) else i.opcode for i in loop)
    return {"instructions": len(listed), "loop": len(loop), "opcodes": dict(opcodes.most_common())}


def lines(file: str) -> dict[str, int]:
    """Count lines of a kernel and of the course's headers that it includes: {"code": all but comments, "all": ...}.

    attention_params.cuh, which all kernels from heads_and_masks on share, does not count.
    """
    text = (kernel.KERNELS / file).read_text(encoding="utf-8")
    if '#include "ptx.cuh"' in text:
        text += (kernel.KERNELS / "ptx.cuh").read_text(encoding="utf-8")
    every = [line.strip() for line in text.splitlines()]
    return {"code": sum(1 for line in every if line and not line.startswith("//")), "all": len(every)}


# ---- time and memory


def timed(
    cases: Sequence[Case] = CASES, ways: Sequence[Way] = WAYS, rounds: int = ROUNDS
) -> Iterator[list[dict[str, Any]]]:
    """Time each way at each case: check first, then in turns. Yield milliseconds, TFLOP/s and memory.

    extra_bytes: a call's memory beyond q, k, v and its output; None on the CPU engine.

    Raises:
        WrongOutput: a result is wrong.
    """
    installed = [peer for peer in (peers.attentions() if peers.torch_on_gpu() else ()) if peer.name == PEER]
    jobs = {
        case: [
            *(of_stage(way.stage, case, dict(way.sizes), name=way.name) for way in ways),
            *(of_peer(peer, case) for peer in installed),
        ]
        for case in cases
    }
    compile_all(list(itertools.chain.from_iterable(jobs.values())))
    runner = JobRunner(0.0)
    for of_case in jobs.values():
        yield compare_jobs(runner, of_case, rounds, over=COMPARED_WITH.name)


# ---- the record


def _cold(index: int, head_dim: int) -> dict[str, Any]:
    """Run `cold` for WAYS[index] in another process, to which a stage's functions cannot be sent."""
    return cold(WAYS[index], head_dim)


def compiled() -> list[list[dict[str, Any]]]:
    """Compile everything in parallel without a cache."""
    which = [(i, head_dim) for head_dim in HEAD_DIMS for i in reversed(range(len(WAYS)))]  # slowest compilations first
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        rows = dict(zip(which, pool.map(_cold, *zip(*which, strict=True)), strict=True))
    return [[rows[i, head_dim] for head_dim in HEAD_DIMS for i in range(len(WAYS))]]


def _head() -> dict[str, Any]:
    how = {"machine": _processor(), "processes": PROCESSES, "nvrtc": ".".join(map(str, nvrtc.version() or ()))}
    return {"device": describe(), "how": {**how, "architecture": ARCH, "cutlass": nvrtc.cute_version()}}


def _processor() -> str:
    """Name this machine's processor, if Linux reports it."""
    with contextlib.suppress(OSError):
        if name := re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8")):
            return f"{name[1]}, {os.cpu_count()} cores"
    return f"{os.cpu_count()} cores"


STUDY = Study("cute", {"compiled": compiled, "timed": timed}, _head)
take = STUDY.take


def row(name: str, n: int, head_dim: int, *, causal: bool = False) -> dict[str, Any] | None:
    """Return one recorded time, or None."""
    for each in (recorded() or {}).get("timed", ()):
        if (each["name"], *each["shape"][2:], each["causal"]) == (name, n, head_dim, causal):
            return each
    return None


def compiled_row(name: str, head_dim: int) -> dict[str, Any] | None:
    """Return the recorded compilation of one kernel, or None."""
    return records.first((recorded() or {}).get("compiled", ()), name=name, head_dim=head_dim)


def times_table(record: Mapping[str, Any] | None = None, *, names: Sequence[str] = ()) -> str:
    """Format TFLOP/s of each kernel and its speed relative to flash_mma as text: a case a line.

    Args:
        names: the kernels to show; all recorded ones if empty.
    """

    def cell(row: Mapping[str, Any]) -> str:
        return f"{row['tflops']:.0f}  {row['speed']:.2f}×"

    return _by_case("TFLOP/s, and times as fast as 07", cell, record, names)


def memory_table(record: Mapping[str, Any] | None = None) -> str:
    """Format the MiB of a call beyond q, k, v and its output as text, like `times_table`."""

    def cell(row: Mapping[str, Any]) -> str:
        return "" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 2**20:.1f}"

    return _by_case("MiB beyond q, k, v and o", cell, record, ())


@records.shown
def _by_case(
    title: str, cell: Callable[[Mapping[str, Any]], str], record: Mapping[str, Any] | None, names: Sequence[str]
) -> str:
    """Format a line for each recorded case, a column for each kernel."""
    columns = {name: max(len(name), 10) + 2 for name in names or dict.fromkeys(r["name"] for r in record["timed"])}
    table = [f"{title:34}" + "".join(f"{name:>{width}}" for name, width in columns.items())]
    for shape, causal in dict.fromkeys((tuple(r["shape"]), r["causal"]) for r in record["timed"]):
        rows = {r["name"]: r for r in record["timed"] if (tuple(r["shape"]), r["causal"]) == (shape, causal)}
        cells = [f"{cell(rows[name]) if name in rows else '':>{width}}" for name, width in columns.items()]
        table.append(f"d = {shape[3]:3}, N = {shape[2]:5}{', causal' * causal}".ljust(34) + "".join(cells))
    return "\n".join(table)


@records.shown
def compiled_table(record: Mapping[str, Any] | None = None) -> str:
    """Format lines of code, seconds to compile, registers, spills and instructions of each kernel, as text."""
    heads = ("lines", "seconds", "registers", "spills", "instructions", "a tile", "integer")
    table = [f"{'':30}" + "".join(f"{head:>14}" for head in heads)]
    for row in record["compiled"]:
        integer = None if row["opcodes"] is None else integer_instructions(row["opcodes"])
        cells = (
            lines(row["file"])["code"],
            f"{row['seconds']:.1f}",
            *(row[key] for key in ("registers", "spill_bytes", "instructions", "loop")),
            integer,
        )
        what = f"d = {row['head_dim']:3}, {row['name']}"
        table.append(f"{what:30}" + "".join(f"{'' if cell is None else cell:>14}" for cell in cells))
    return "\n".join(table)


# Opcodes of integer arithmetic and moves, in vector and in uniform registers: addresses, counters, predicates.
_INTEGER = re.compile(
    r"U?(IADD3|IMAD|VIADD|LEA|LOP3|SHF|ISETP|MOV|SEL|PLOP3|IABS|IMNMX|P2R|R2P|R2UR|S2R)|moves|VIADDMNMX"
)


def integer_instructions(opcodes: Mapping[str, int]) -> int:
    """Count a loop's instructions that compute addresses, counters and predicates."""
    return sum(count for name, count in opcodes.items() if _INTEGER.fullmatch(name))


@records.shown
def table(record: Mapping[str, Any] | None = None) -> str:
    """Format a record, by default the committed one, as text."""
    how = record["how"]
    compiler = (
        f"compiled by NVRTC {how['nvrtc']} for {how['architecture']}, {how['processes']} at a time: {how['machine']}"
    )
    return "\n\n".join(
        [record["device"], times_table(record), memory_table(record), f"{compiler}\n{compiled_table(record)}"]
    )
