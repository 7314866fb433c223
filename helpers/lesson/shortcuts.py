"""Shortcuts for steps that notebooks have already shown: run a kernel, look inside.

    from helpers.lesson.shortcuts import run, xray_stage
    o = run("flash_mma", q, k, v, causal=True)                    # one launch; the output as a NumPy array
    report = xray_stage("flash_mma", q, k, v, code=changed)             # its X-ray, with no GPU

A stage is given by its name, or is itself a `Rung`, such as a step of a climb. `code` is another text of its kernel;
among the options of a call are `sizes`, other tile sizes. Arrays are (rows, head_dim), (heads, rows, head_dim), or
(batch, seq, heads, head_dim).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from helpers.attention import kernel, reference
from helpers.attention.check import TOLERANCE
from helpers.attention.ladder import LADDER, Launch, Rung, backward, params, tensor_maps
from helpers.attention.ladder.call import Spec
from helpers.attention.ladder.layout import address
from helpers.attention.ladder.plan import CompiledPlan
from helpers.attention.ladder.steps import BEFORE, CLIMBS, LAST_IDEAS, by_number
from helpers.device import cp
from helpers.draw import sources
from helpers.draw.picture import Html
from helpers.engine.cuda_source.edit import edit
from helpers.xray import Report, TraceOptions, xray


def stage_of(stage: str | Rung) -> Rung:
    """Look a stage up by name. Raises ValueError, which lists the names."""
    if isinstance(stage, Rung):
        return stage
    if stage not in LADDER:
        raise ValueError(f"no stage {stage!r}; there are: {', '.join(LADDER)}")
    return LADDER[stage]


def run(stage: str | Rung, q: Any, k: Any, v: Any, *, code: str | None = None, **options: Any) -> np.ndarray:
    """Return the output of one call on this device, a NumPy array of q's shape. options: those of `Rung.prepare`."""
    launch, o = stage_of(stage).prepare(*map(_heads_first, (q, k, v)), source=code, **options)
    launch()
    return cp.asnumpy(_heads_first(o))  # transpose back


def xray_stage(
    stage: str | Rung,
    q: Any,
    k: Any,
    v: Any,
    *,
    code: str | None = None,
    trace: bool | TraceOptions = False,
    **options: Any,
) -> Report:
    """X-ray one launch on the CPU: the last one, if others prepare it. trace: see `xray`.

    Raises:
        ValueError: the stage needs several launches of its kernel for these arrays.
    """
    with kernel.built_when_launched():
        ready, arrays, _ = stage_of(stage).plan(*map(_heads_first, (q, k, v)), source=code, **options)
    if ready is None or [launch.kernel for launch in ready.launches].count(ready.launches[-1].kernel) != 1:
        count = 0 if ready is None else len(ready.launches)
        raise ValueError(f"{count} launches, and only one can be X-rayed: pass the arrays of a single head")
    *_, (launch, compiled, args) = prepared_launches(ready, arrays)
    return xray(compiled, launch.grid, launch.block, args, launch.shared_bytes, trace=trace)


def prepared_launches(
    ready: CompiledPlan, arrays: Mapping[str, Any]
) -> list[tuple[Launch, kernel.Kernel, tuple[Any, ...]]]:
    """List a plan's launches with their kernels and arguments, and run all but the last, which they prepare.

    Keep the whole list: a tensor map of the last launch does not keep its array alive.
    """
    launches = ready.resolve_arguments(arrays)
    for launch, compiled, args in launches[:-1]:
        compiled(launch.grid, launch.block, args, shared_mem=launch.shared_bytes)
    return launches


def _heads_first(a: Any) -> Any:
    """Exchange the middle axes of (batch, seq, heads, head_dim); return arrays of fewer axes as they are."""
    return cp.asarray(a).transpose(0, 2, 1, 3) if a.ndim == 4 else cp.asarray(a)


def first_finding(
    stage: Rung,
    q: Any,
    k: Any,
    v: Any,
    *changes: tuple[str, str],
    sizes: Mapping[str, int],
    mbarriers: Sequence[str] = (),
) -> tuple[str, str]:
    """X-ray a kernel with changes to its text, and return the kind and the summary of its first finding.

    Args:
        changes: (old, new) pieces of the text. mbarriers: names of the last 8-byte words in shared memory, which
            replace their addresses in messages.
    """
    code = edit(kernel.source(stage.file), *changes)
    finding = xray_stage(stage, q, k, v, sizes=sizes, code=code).findings[0]
    text = str(finding).partition(" Waiting: ")[0].replace("by block (0,0,0) ", "by ")
    begin = stage.shared_bytes(sizes) - 8 * len(mbarriers)
    for i, name in enumerate(mbarriers):
        text = text.replace(f"the mbarrier at byte {begin + 8 * i} of dynamic shared memory", name)
    return finding.kind, text.replace(" of dynamic shared memory", "").replace("steps/", "").rstrip(".")


def fetched_keys(stage: str | Rung, q: Any, k: Any, v: Any, *, sizes: Mapping[str, int], **options: Any) -> np.ndarray:
    """Map (rows of q, rows of k) to 1 if the row's block fetches the key, else 0, by the X-ray.

    The launch runs with one block, with two, and so on: what each further block fetches is what its rows need.

    Args:
        q, k, v: of one head, (rows, head_dim). sizes: the tile sizes, BLOCK_M among them.

    Raises:
        ValueError: arrays of several heads.
    """
    if q.ndim != 2:
        raise ValueError(f"q has shape {q.shape}: pass the arrays of a single head")
    with kernel.built_when_launched():
        ready, arrays, _ = stage_of(stage).plan(*map(cp.asarray, (q, k, v)), sizes=sizes, **options)
    ((launch, compiled, args),) = ready.resolve_arguments(arrays)
    keys, before, rows = np.zeros((len(q), len(k)), int), 0, sizes["BLOCK_M"]
    for block in range(launch.grid[0]):
        report = xray(compiled, (block + 1, 1, 1), launch.block, args, launch.shared_bytes)
        now = report.fetches["K"].reshape(len(k), -1)[:, 0]
        keys[block * rows : (block + 1) * rows] = now - before
        before = now
    return keys


def launch_params(q: Any, k: Any, v: Any, o: Any, *gradients: Any, window: tuple[int, int] = (-1, -1)) -> Any:
    """Fill the struct of a launch for arrays (batch, seq, heads, head_dim) in any layout, scaled by head_dim^-0.5.

    Args:
        gradients: do, dq, dk and dv: the struct is then that of the backward kernels. window: as in `attention_params`.
    """
    arrays = zip(("q", "k", "v", "o", *params.GRADIENTS), (q, k, v, o, *gradients), strict=False)
    strides = {name: tuple(stride // a.itemsize for stride in a.strides[:3]) for name, a in arrays}
    (_, n, heads, head_dim), (_, n_kv, kv_heads, _) = q.shape, k.shape
    counts = {"n": n, "n_kv": n_kv, "heads": heads, "kv_heads": kv_heads}
    forward = params.attention_params(strides, **counts, window=window, softmax_scale=head_dim**-0.5)
    return params.backward_params(forward, strides) if gradients else forward


def tensor_map(a: Any, box_rows: int) -> np.ndarray:
    """Encode the tensor map of a device array (rows, columns) of a half type, for swizzled copies of 64 columns."""
    spec = Spec.dense((1, 1, *a.shape), a.dtype)
    return tensor_maps.tensor_map(spec, address(a), box_rows=box_rows)


# A CuTe expression with two modes, and the rows and columns of its shape.
Asked = tuple[str, int, int]


def layout_source(layouts: Mapping[str, Asked]) -> str:
    """Write a kernel that asks CuTe for the offset of each coordinate of each layout, one layout after the other.

    Args:
        layouts: {name: (expression, rows, columns)}, such as ("Layout<Shape<_4, _8>>{}", 4, 8).
    """
    lines = ["#include <cute/tensor.hpp>", "using namespace cute;", 'extern "C" __global__ void ask(int* offsets) {']
    for name, (expression, rows, columns) in layouts.items():
        lines += [f"  const auto {name} = {expression};"]
        lines += [f"  for (int i = 0; i < {rows}; ++i)"]
        lines += [f"    for (int j = 0; j < {columns}; ++j) *offsets++ = {name}(i, j);"]
    return "\n".join([*lines, "}\n"])


def cute_offsets(layouts: Mapping[str, Asked]) -> dict[str, np.ndarray]:
    """Return the offsets of each layout, (rows, columns), as CuTe computes them in the kernel of `layout_source`.

    Raises:
        CuteMissing: its headers are not installed.
    """
    sizes = [rows * columns for _, rows, columns in layouts.values()]
    offsets = cp.zeros(sum(sizes), dtype=np.int32)
    kernel.load(layout_source(layouts), "ask")((1,), (1,), (offsets,))
    parts = np.split(cp.asnumpy(offsets), np.cumsum(sizes)[:-1])
    return {name: part.reshape(layouts[name][1:]) for name, part in zip(layouts, parts, strict=True)}


def step_diff(stage: str, n: int, *, context: int = 1, folded: bool = False) -> Html:
    """Show what step n of the climb to a stage changes. folded: a click on the step's own summary opens it.

    Shows the whole file of a first step that is not made from a stage.
    """
    numbers = list(by_number(stage))
    if n not in numbers:
        raise ValueError(f"no step {n} to {stage}; there are: {', '.join(map(str, numbers))}")
    at = numbers.index(n)
    before, after = [BEFORE[stage], *(step.file for step in CLIMBS[stage])][at : at + 2]
    changes = sources.whole(after) if before == after else sources.diff(before, after, context=context)
    if not folded:
        return changes
    own = sources.about(after) or [f"Step {n}, {LAST_IDEAS[stage]}"]  # the last step is a stage: no summary
    return sources.folded(changes, own[0])


# ---- the same for stages that compute gradients


def gradients(
    stage: str | Rung, do: Any, q: Any, k: Any, v: Any, *, code: str | None = None, **options: Any
) -> tuple[np.ndarray, ...]:
    """Return (dq, dk, dv) of one call on this device, as NumPy arrays; o and lse are made in float64 and rounded.

    options: those of `backward.prepare`.
    """
    arrays = _with_output(do, q, k, v, **options)
    launch, outputs = backward.prepare(stage_of(stage), *arrays, source=code, **options)
    launch()
    return tuple(cp.asnumpy(_heads_first(a)) for a in outputs)


def xray_gradients(
    stage: str | Rung, do: Any, q: Any, k: Any, v: Any, *, code: str | None = None, **options: Any
) -> dict[str, Report]:
    """X-ray each launch, by the name of its kernel; each starts with the results of the one before."""
    return {
        launch.kernel: xray(compiled, launch.grid, launch.block, args, launch.shared_bytes)
        for launch, compiled, args in _launches(stage, do, q, k, v, source=code, **options)
    }


def writers(
    do: Any, q: Any, k: Any, v: Any, *, sizes: Mapping[str, int], stage: str = "backward", **options: Any
) -> dict[str, np.ndarray]:
    """Map which block writes which tile, by the X-ray: (tiles, blocks) for each kernel and gradient.

    1 is a tile that the block stores, 2 one that it adds to atomically. The launches run with one block, with two, and
    so on: what each further block changes is what it writes.

    Args:
        do, q, k, v: of one head, (rows, head_dim). sizes: the tile sizes, BLOCK_M and BLOCK_N among them.
    """
    tables: dict[str, np.ndarray] = {}
    for launch, compiled, args in _launches(stage, do, q, k, v, sizes=sizes, **options):
        named = zip(launch.args, args, strict=True)
        outputs = {name: a for name, a in named if isinstance(name, str) and name in ("dq", "dk", "dv")}
        start = {name: _matrix(a) for name, a in outputs.items()}
        before, written = start, {name: [] for name in outputs}
        for block in range(launch.grid[0] if launch.kernel != f"{stage}_preprocess" else 0):
            for name, a in outputs.items():
                a[...] = cp.asarray(start[name].reshape(a.shape))
            report = xray(compiled, (block + 1, 1, 1), launch.block, args, launch.shared_bytes)
            now = {name: _matrix(a) for name, a in outputs.items()}
            for name in outputs:
                same = (now[name] == before[name]) | (np.isnan(now[name]) & np.isnan(before[name]))
                how = 2 if report.traffic[_written(name)].atomics else 1
                tiles = range(0, len(same), sizes["BLOCK_M" if name == "dq" else "BLOCK_N"])
                written[name].append(how * np.logical_or.reduceat(~same.all(axis=1), tiles))
            before = now
        if launch.kernel == f"{stage}_preprocess":
            xray(compiled, launch.grid, launch.block, args, launch.shared_bytes)
        tables.update({f"{launch.kernel}: {_written(name)}": np.stack(w, axis=1) for name, w in written.items() if w})
    return tables


def _matrix(a: Any) -> np.ndarray:
    """Copy an array of one head, (rows, head_dim)."""
    return np.array(cp.asnumpy(a)).reshape(a.shape[-2:])


def _written(name: str) -> str:
    """Write dq as kernels do: dQ."""
    return name[0] + name[1:].upper()


class ExpectedGradients(NamedTuple):
    """The gradients that a kernel should return, in float64, and the absolute error allowed for each."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    tolerance: tuple[float, float, float]


def expect_gradients(do: Any, q: Any, k: Any, v: Any, **options: Any) -> ExpectedGradients:
    """Compute the gradients in float64, and their tolerances.

    float32: 1e-5 of the largest value. In a half type, NumPy rounds O, P, dS and the results, and nothing else; the
    kernel may have twice this error, or one unit in the last place of the largest value. Where dP - D cancels, as with
    a single key, float32's rounding of dP is allowed.

    Args:
        do, q, k, v: (rows, head_dim), or (batch, seq, heads, head_dim). options: of `reference.attention_backward`.
    """
    dtype = np.asarray(q).dtype
    exact = [_swapped(np.asarray(a).astype(np.float64)) for a in (do, q, k, v)]
    expected = reference.attention_backward(*exact, **options)
    tolerance = tuple(TOLERANCE * max(1.0, float(np.abs(a).max())) for a in expected)
    if dtype.itemsize == 2:
        near = _rounded_gradients(exact[0], exact[1], exact[2], exact[3], dtype, **options)
        step = float(ml_dtypes.finfo(dtype).eps)
        length = np.linalg.norm(exact[0], axis=-1).max() * np.linalg.norm(exact[3], axis=-1).max()  # bounds |dP|
        of_float32 = 4e-7 * float(length * max(np.abs(exact[1]).max(), np.abs(exact[2]).max()))
        tolerance = tuple(
            max(2 * float(np.abs(a - b).max()), step * float(np.abs(b).max()), of_float32)
            for a, b in zip(near, expected, strict=True)
        )
    dq, dk, dv = map(_swapped, expected)
    return ExpectedGradients(dq, dk, dv, tolerance)


def _rounded_gradients(
    do: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: Any, **options: Any
) -> tuple[np.ndarray, ...]:
    """Compute dq, dk, dv of (..., heads, rows, head_dim), with O, P, dS and the results rounded to a type."""

    def rounded(a: np.ndarray) -> np.ndarray:
        return a.astype(dtype).astype(np.float64)

    scale = options.pop("softmax_scale", None)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kv_heads = k.shape[-3] if k.ndim > 2 else 1
    share = q.shape[-3] // kv_heads if q.ndim > 2 else 1
    k, v = (a.repeat(share, axis=-3) if share > 1 else a for a in (k, v))
    o, lse = reference.attention(q, k, v, softmax_scale=scale, return_lse=True, **options)
    seen = reference.visible(q.shape[-2], k.shape[-2], **options)
    s = np.where(seen, scale * q @ k.swapaxes(-1, -2), -np.inf)
    p = np.exp(s - np.where(np.isfinite(lse), lse, 0.0)[..., None])
    ds = rounded(p * (do @ v.swapaxes(-1, -2) - (do * rounded(o)).sum(axis=-1, keepdims=True)))
    results = [scale * ds @ k, scale * ds.swapaxes(-1, -2) @ q, rounded(p).swapaxes(-1, -2) @ do]
    if share > 1:
        results[1:] = [a.reshape(*a.shape[:-3], kv_heads, share, *a.shape[-2:]).sum(axis=-3) for a in results[1:]]
    return tuple(map(rounded, results))


def _launches(
    stage: str | Rung, do: Any, q: Any, k: Any, v: Any, **options: Any
) -> Iterator[tuple[Any, kernel.Kernel, tuple[Any, ...]]]:
    """List the launches of one call with their arguments; gradients start as NaN.

    The arrays of tensor maps live until the last launch has been taken.
    """
    arrays = _with_output(do, q, k, v, **options)
    with kernel.built_when_launched():
        ready, planned, _ = backward.plan(stage_of(stage), *arrays, **options)
    yield from ready.resolve_arguments(planned)


def _with_output(do: Any, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, ...]:
    """Return do, q, k, v, o and lse on the device in a stage's layout; o and lse are made in float64 and rounded."""
    of_plan = ("deterministic", "sizes", "source")
    of_forward = {name: value for name, value in options.items() if name not in of_plan}
    do, q, k, v = map(_heads_first, (do, q, k, v))
    exact = [cp.asnumpy(a).astype(np.float64) for a in (q, k, v)]
    share = q.shape[-3] // k.shape[-3] if q.ndim > 2 else 1
    exact[1:] = [a.repeat(share, axis=-3) if share > 1 else a for a in exact[1:]]
    o, lse = reference.attention(*exact, return_lse=True, **of_forward)
    return do, q, k, v, cp.asarray(o.astype(q.dtype)), cp.asarray(lse.astype(np.float32))


def _swapped(a: np.ndarray) -> np.ndarray:
    """Put heads before rows in (batch, seq, heads, head_dim); return arrays of one head as they are."""
    return a.swapaxes(-3, -2) if a.ndim > 2 else a
