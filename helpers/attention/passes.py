"""Passes over results: partial outputs, gradients and attention to a prefix, which a kernel merges, mostly in place.

They are planned and cached like calls of attention: see run.py. Their callers, ring.py and shared_prefix.py, check
them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from helpers.attention.ladder import Stage, launches
from helpers.attention.ladder.call import ForwardOptions
from helpers.attention.ladder.launch import Launch, Part
from helpers.attention.ladder.layout import Spec, dense
from helpers.attention.ladder.stage import C_NAMES, Tuning
from helpers.attention.ladder.tiles import Sizes
from helpers.attention.run import Call, Output, Plan, compile_plan, run

SUM_PARTS = 3  # parts of a gradient that 17_sum.cu adds in one pass


class PassCall(NamedTuple):
    """A call of a pass, for its stage. numbers: what its launch depends on besides the arrays, including its result."""

    arrays: Mapping[str, Spec]
    numbers: tuple[Any, ...]
    mod: None = None


class Pass(Call):
    """A call of a pass, of device arrays, o first. lengths: the kernel's file or text, the result's shape and dtype, or
    None, and the numbers of a `PassCall`."""

    __slots__ = ()
    stage: ClassVar[Stage]

    @classmethod
    def launch(
        cls, arrays: Mapping[str, Any], file: str, result: tuple[tuple[int, ...], Any] | None, *numbers: Any
    ) -> Any:
        """Launch; return the result, or ()."""
        return run(cls(arrays, ForwardOptions(), lengths=(file, result, numbers)))

    def plan(self, specs: Mapping[str, Spec]) -> Plan:
        """See `Call.plan`."""
        how: Any = self.lengths
        file, result, numbers = how
        arrays = {**specs, **({"result": dense(*result)} if result else {})}
        compiled = compile_plan(self.stage.changed(file=file), PassCall(arrays, numbers), file)
        return Plan(compiled, tuple(specs), {"result": Output(*result)} if result else {})


def _stage(number: int, name: str, file: str, idea: str, launch: Any, sizes: Any) -> Stage:
    """Describe a pass. launch: (call, sizes) -> grid, the kernel's instance and its arguments."""

    def all_launches(stage: Stage, call: Any, sizes: Sizes) -> list[Launch]:
        grid, types, args = launch(call, sizes)
        whole = stage.launch(grid, sizes, args, f"{name}<{', '.join(types)}>")
        most = launches.MAX_GRID_YZ
        if len(grid) == 1 or grid[1] <= most:
            return [whole]
        return [
            whole._replace(
                grid=(grid[0], some.stop - some.start),
                args=tuple(Part(arg, (some,)) if isinstance(arg, str) else arg for arg in args),
            )
            for some in launches.slices(grid[1], most)
        ]

    return Stage(
        *(number, name, file, idea, Tuning(lambda head_dim, shared_limit: {}, variant=sizes), all_launches),
        direction="join",
        out_dtypes=("float32", "float16", "bfloat16"),
        threads=lambda sizes: sizes["THREADS"],
    )


# ---- 17: partial outputs


def merge_sizes(head_dim: int) -> dict[str, int]:
    """Return the -D options of 17_merge.cu."""
    return {"HEAD_DIM": head_dim, "THREADS": 256}


def rows_of_block(head_dim: int) -> int:
    """Return ROWS of kernels/17_merge.cu, the rows of a block."""
    chunks = head_dim if head_dim % 4 else head_dim // 4
    return merge_sizes(head_dim)["THREADS"] // (32 if chunks > 16 else 16 if chunks > 8 else 8)


def _launch_merge(call: PassCall, sizes: Sizes) -> tuple[Any, ...]:
    """Launch over the rows that change, or over all if they are rounded into a result. numbers: the part's rows."""
    (batch, n, heads, head_dim), result = call.arrays["o"].shape, call.arrays.get("result")
    part_first, part_end = call.numbers
    first, end = (0, n) if result else (part_first, part_end)
    numbers = n, heads, first, end - first, part_first, part_end - part_first
    args = "o", "lse", "part", "part_lse", "result" if result else None, *map(np.int32, numbers)
    grid = -(-(end - first) * heads // rows_of_block(head_dim)), batch
    return grid, [C_NAMES[result.dtype.name if result else "float32"]], args


class Merge(Pass):
    """A call of 17_merge.cu."""

    __slots__ = ()
    stage = _stage(
        *(17, "merge_partial", "17_merge.cu", "a partial output joined to what there is", _launch_merge),
        lambda call: merge_sizes(call.arrays["o"].shape[3]),
    )


# ---- 17: gradients


def sum_sizes(columns: int) -> dict[str, int]:
    """Return the -D options of 17_sum.cu. columns: of all heads."""
    return {"WIDTH": 1 if columns % 4 else 4, "THREADS": 256}


def _launch_sum(call: PassCall, sizes: Sizes) -> tuple[Any, ...]:
    """Plan the launch. numbers: rows of the whole, the name of the written array, and the rows of each part."""
    (first, end), written, places = call.numbers
    batch, _, heads, head_dim = call.arrays["o"].shape
    columns, more = heads * head_dim, [(0, 0)] * (SUM_PARTS - len(places))
    parts = launches.given(call, *(f"part_{i}" for i in range(SUM_PARTS)))  # type: ignore[arg-type]
    numbers = columns, first, end - first, *(n for a, b in (*places, *more) for n in (a, b - a))
    grid = -(-(end - first) * (columns // sizes["WIDTH"]) // sizes["THREADS"]), batch
    return grid, [C_NAMES[call.arrays[written].dtype.name]], (written, *parts, *map(np.int32, numbers))


class Sum(Pass):
    """A call of 17_sum.cu. Its o is the array whose gradient is summed, which the kernel does not read."""

    __slots__ = ()
    stage = _stage(
        *(17, "sum_parts", "17_sum.cu", "parts of a gradient added in one pass", _launch_sum),
        lambda call: sum_sizes(call.arrays["o"].shape[2] * call.arrays["o"].shape[3]),
    )


# ---- 14: attention to a prefix


def join_sizes(head_dim: int) -> dict[str, int]:
    """Return the -D options of 14_join.cu."""
    return {"HEAD_DIM": head_dim, "THREADS": 128}


_STEPS = [f"{of}_{to}" for of in ("o", "lse") for to in ("part", "row", "kv_head", "head")]
_NUMBERS = [(name, np.int32) for name in ("parts", "N", "rows", "heads", "group")]
JOIN_PARAMS = np.dtype([*((name, np.int64) for name in _STEPS), *_NUMBERS], align=True)
_JOIN = struct.Struct("=8q5i4x")


def _launch_join(call: PassCall, sizes: Sizes) -> tuple[Any, ...]:
    """Plan the launch. numbers: KV heads."""
    batch, tokens, heads, head_dim = call.arrays["o"].shape
    parts, their_rows, their_heads, _ = call.arrays["of_prefix"].shape
    (kv_heads,), rows = call.numbers, batch * tokens
    group = heads // kv_heads
    packs = their_rows != rows  # a row is a token and one of the heads of a group
    to_token, to_kv_head, to_head = (group * kv_heads, 1, kv_heads) if packs else (heads, group, 1)
    of_o = their_rows * their_heads, to_token, to_kv_head, to_head
    of_lses = (
        (their_rows * their_heads, group, their_rows, 1) if packs else (rows * heads, 1, group * their_rows, their_rows)
    )
    numbers = *(step * head_dim for step in of_o), *of_lses, parts, tokens, rows, heads, group
    params = np.frombuffer(bytearray(_JOIN.pack(*numbers)), JOIN_PARAMS)
    grid = (-(-rows * heads // (sizes["THREADS"] // (32 if head_dim > 64 else 16))),)
    types = [C_NAMES[call.arrays[name].dtype.name] for name in ("o", "of_prefix")]
    return grid, types, ("o", "lse", "of_prefix", "of_lse", params)


class Join(Pass):
    """A call of 14_join.cu."""

    __slots__ = ()
    stage = _stage(
        *(14, "join_prefix", "14_join.cu", "attention to a prefix joined to that to own keys", _launch_join),
        lambda call: join_sizes(call.arrays["o"].shape[3]),
    )
