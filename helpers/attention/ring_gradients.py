"""Gradients of ring attention by hopper_backward: work that depends only on a rank's rows is done once.

lse, delta and zeros come before the first product. Each product adds to the same dQ, which is rounded after the last.
"""

from __future__ import annotations

from collections.abc import Mapping

from helpers.attention.calls import Attention, check, of_shapes
from helpers.attention.ladder import launches, limits
from helpers.attention.ladder.call import BackwardOptions, Call
from helpers.attention.ladder.launch import Launch, Map
from helpers.attention.ladder.layout import Spec
from helpers.attention.ladder.stage import Stage
from helpers.attention.ladder.stages.backward import HOPPER_BACKWARD, backward_scratch, params_of_gradients
from helpers.attention.ladder.tiles import Sizes
from helpers.attention.ring_joined import is_half_in_chunks
from helpers.attention.run import Output, Plan, compile_plan

OF_ROWS = ("lse_delta", "dq_accum", "dq_semaphore")


def _tiles(call: Call, sizes: Sizes) -> int:
    """Return how many tiles of rows a head of a sequence has in the scratch arrays."""
    return int(call.arrays["lse_delta"].shape[0]) // (call.heads * call.sequences)


def _prepare(stage: Stage, call: Call, sizes: Sizes) -> list[Launch]:
    args = "o", "do", "lse", *OF_ROWS, None, params_of_gradients(call, _tiles(call, sizes))
    prepare, _, _ = stage.kernels
    return [Launch(prepare, launches.tile_grid(call, "q", sizes), (stage.threads(sizes),), 0, args)]


def _multiply(stage: Stage, call: Call, sizes: Sizes) -> list[Launch]:
    rows, keys = sizes["BLOCK_M"], sizes["BLOCK_N"]
    maps = Map("q", rows), Map("do", rows), Map("k", keys), Map("v", keys)
    args = *maps, *OF_ROWS, "dk", "dv", None, None, params_of_gradients(call, _tiles(call, sizes))
    grid = launches.tile_grid(call, "k", sizes)
    if sizes.get("PERSISTENT"):
        of_a_sequence = max(limits.persistent_blocks() // call.sequences, 1)
        grid = min(grid[0] * grid[1], of_a_sequence), 1, call.sequences
    _, multiply, _ = stage.kernels
    return [stage.launch(grid, sizes, args, multiply)]


def _round(stage: Stage, call: Call, sizes: Sizes) -> list[Launch]:
    args = "dq_accum", "dq", None, params_of_gradients(call, _tiles(call, sizes))
    _, _, convert = stage.kernels
    return [Launch(convert, launches.tile_grid(call, "q", sizes), (stage.threads(sizes),), 0, args)]


_STAGES = {
    part: HOPPER_BACKWARD.changed(launches=how, scratch=lambda call, sizes: {})
    for part, how in (("prepare", _prepare), ("multiply", _multiply), ("round", _round))
}
_OUTPUTS = {"prepare": OF_ROWS, "multiply": ("dk", "dv"), "round": ("dq",)}


class Part(Attention):
    """A part of a rank's gradients. `lengths` is ("prepare", "multiply" or "round", all rows of the rank).

    Its arrays are do, q, k, v, o and lse: all rows of a rank, or those of a product. "prepare" returns OF_ROWS, which
    are among the arrays of the others: from the tile of the product's first row on, but dq_semaphore from another
    number on for each product, which counts its tiles of keys where blocks persist. "multiply" returns dk and dv in
    float32, "round" dq.
    """

    __slots__ = ()
    options: BackwardOptions

    def plan(self, specs: Mapping[str, Spec]) -> Plan:
        """See `Call.plan`."""
        which, rows = self.lengths if isinstance(self.lengths, tuple) else ("", 0)
        given = {name: a for name, a in specs.items() if name not in OF_ROWS}
        options = self.options._replace(out="float32" if which == "multiply" else "")
        family, stage, outputs, call = of_shapes(given, options, (None, None))
        assert call is not None and stage.name == HOPPER_BACKWARD.name
        stage = _STAGES[which]
        sizes = stage.sizes_for(call)
        q = call.arrays["q"]
        whole = call._replace(arrays={**call.arrays, "q": Spec.dense((*q.shape[:2], rows, q.shape[3]), q.dtype)})
        more = backward_scratch(whole, sizes)
        outputs |= {name: Output(a.shape, a.dtype) for name, a in more.items()}
        call = call._replace(arrays={**call.arrays, **more})
        compiled = compile_plan(stage, call, family.key, which)
        return Plan(compiled, tuple(specs), {name: outputs[name] for name in _OUTPUTS[which]})


def tile_of(call: Attention, read: tuple[str, ...] = ("do", "q", "k", "v")) -> int:
    """Return the rows of a tile of a product's call, if it may be a `Part`; else 0. read: arrays that it reads."""
    specs, options = call.arrays, call.options
    if options.deterministic or not is_half_in_chunks(specs["q"]):
        return 0
    check(specs)
    _, stage, _, planned = of_shapes(specs, options, (None, None))
    if planned is None or stage.name != HOPPER_BACKWARD.name or {*stage.unreadable(planned)} & {*read}:
        return 0
    return stage.sizes_for(planned)["BLOCK_M"] if planned.heads <= launches.MAX_GRID_YZ else 0
