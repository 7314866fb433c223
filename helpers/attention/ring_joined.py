"""Products of ring attention whose kernel merges its results with earlier ones: see kernels/ring_continue.cuh.

Without them each product writes a partial O in float32, and a pass reads two of these and writes one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from helpers.attention import kernel
from helpers.attention.calls import Attention, check, of_shapes, whole_chunks
from helpers.attention.ladder.call import Call
from helpers.attention.ladder.layout import Spec
from helpers.attention.ladder.stage import C_NAMES
from helpers.attention.run import Plan, compile_plan

_DEFINITIONS = """\
#define CONTINUES 1
#define CONTINUE_PARAMETERS , const float *before, float *after, float *all_lse, int step, int open
#define CONTINUE_ARGUMENTS before, after, all_lse, step, open
"""


class Place(NamedTuple):
    """A product among others: if its rows have an earlier result, and from which row on a later product has some."""

    before: bool
    first_open: int


def places(rows: Sequence[Sequence[tuple[int, int]]], count: int) -> list[list[Place]] | None:
    """Find the places of a rank's products, by step; None if a kernel cannot join them.

    Args:
        rows: (first, end) of each product of each step. count: of all rows.
    """
    every = [(step, product) for step, of_step in enumerate(rows) for product in of_step]
    made: list[list[Place]] = [[] for _ in rows]
    for i, (step, (first, end)) in enumerate(every):
        had, later = (
            [(max(first, a), min(end, b)) for _, (a, b) in some if a < end and first < b]
            for some in (every[:i], every[i + 1 :])
        )
        if any(each != (first, end) for each in had) or any(b != end for _, b in later):
            return None
        made[step].append(Place(bool(had), min((a for a, _ in later), default=end)))
    covered = sorted(product for _, product in every)
    reached = 0
    for first, end in covered:
        if first > reached:
            return None
        reached = max(reached, end)
    return made if reached == count else None


class Joined(Attention):
    """A product that changes o, o_so_far and lse_so_far in place.

    Its arrays are q, k and v; o (batch, rows, heads, head_dim); lse_so_far, float32 (batch, heads, rows); o_before and
    o_after, float32 with the strides of o: all rows, if they have an earlier result, and the last ones, if a later
    product has some of their keys.
    """

    __slots__ = ()

    def call(self, specs: Mapping[str, Spec]) -> tuple[Any, Any, Call | None]:
        """Return the family, the stage and the call; its arrays are q, k, v and o. None: no stage can join it."""
        inputs = {name: specs[name] for name in "qkv"}
        check(inputs)
        family, stage, _, call = of_shapes(inputs, self.options, self.longest)
        if call is None or "continues" not in stage.features or stage.unreadable(call) or stage.negates(call):
            return family, stage, None
        return family, stage, call

    def plan(self, specs: Mapping[str, Spec]) -> Plan:
        """See `Call.plan`."""
        family, stage, call = self.call(specs)
        assert call is not None
        more = {name: a for name, a in specs.items() if name not in "qkv"}
        more["o"] = specs["o"].heads_first
        call = call._replace(arrays={**call.arrays, **more})
        stage = stage.changed(file=_DEFINITIONS + kernel.source(stage.file))
        return Plan(compile_plan(stage, call, family.key), tuple(specs), {})


def joins(specs: Mapping[str, Spec], options: Any) -> bool:
    """Return True if a product of these q, k and v may be a `Joined`."""
    if not is_half_in_chunks(specs["q"]):
        return False
    _, _, call = Joined(specs, options).call(specs)
    return call is not None


def is_half_in_chunks(q: Spec) -> bool:
    """Return True for a half type whose rows are whole chunks of 16 bytes, which kernels join without a copy."""
    return q.dtype.name in C_NAMES and q.dtype.itemsize == 2 and whole_chunks(q.shape[-1], 2) == q.shape[-1]
