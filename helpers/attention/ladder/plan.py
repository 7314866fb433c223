"""Planning: from a call's arrays and options to launches that lack only addresses, for any direction.

    ready, arrays = plan_arrays(stage, inputs, outputs, options, cu_seqlens)
    ready.bind(arrays)()

The expensive steps do not depend on shapes: a kernel is compiled for dtypes and tile sizes, and its signature is
compared with its arguments once. Shapes and strides fill structs and a grid, and addresses come last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np

from helpers import device
from helpers.attention import kernel
from helpers.attention.ladder.call import CU_SEQLENS, ROTATED, WITH_HEAD_DIM, AttentionOptions, Call, ForwardOptions
from helpers.attention.ladder.extras import NAMES, check_positions, extra_inputs
from helpers.attention.ladder.launch import Arguments, DirectLaunch, EngineLaunch, Launch
from helpers.attention.ladder.launches import block_mask_scratch, renamed, rotated
from helpers.attention.ladder.layout import Spec, dense_copy, four_axes, negative
from helpers.attention.ladder.score_mod import ScoreMod, parse_score_mod
from helpers.attention.ladder.stage import Stage
from helpers.engine.cuda_source.signatures import dtype_of

DIAGONALS = 2  # FORM of a kernel for gradients of a bias whose tiles lie along diagonals


def plan_arrays(
    stage: Stage,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    options: AttentionOptions,
    cu_seqlens: tuple[Any, Any] | None,
    *,
    source: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> tuple[CompiledPlan, dict[str, Any]]:
    """Compile the launches of a call that `Stage.check` has accepted; return them, and its arrays as the kernels read
    them.

    Args:
        inputs: NumPy or device arrays by name. q, k and v, for gradients also do and o: (..., rows, head_dim). lse, if
            the call has it, and those of `extras.NAMES`, which are checked here. outputs: device arrays by name, in a
            layout that the stage can write.
        options: as `Options.checked` returns them.
        source: kernel code to use instead of the stage's file. sizes: -D options that override the stage's own, such as
            {"BLOCK_M": 32}.

    Raises:
        TypeError, ValueError: an extra input does not match q and k; the call has more tiles than a grid can hold.
    """
    cp, longest = device.cp, (None, None)
    arrays = {**{name: cp.asarray(a) for name, a in inputs.items()}, **outputs}
    if cu_seqlens is not None:
        longest = tuple(int(np.diff(cp.asnumpy(cu)).max(initial=0)) for cu in cu_seqlens)
        arrays |= zip(CU_SEQLENS, map(cp.asarray, cu_seqlens), strict=True)
    read = {name: four_axes(a) if name in WITH_HEAD_DIM else a for name, a in arrays.items()}
    call = Call.of({name: Spec.of(a) for name, a in read.items()}, options, longest)
    copies = {name: dense_copy(read[name]) for name in stage.unreadable(call)}
    if stage.negates(call):
        copies["q"] = negative(read["q"])
        options = options._replace(softmax_scale=-call.softmax_scale)
    if copies:
        read |= copies
        call = Call.of({name: Spec.of(a) for name, a in read.items()}, options, longest)
    return CompiledPlan(stage, call, stage.sizes_for(call, sizes), source), read


def _prepend_functions(mod: ScoreMod, stage: Stage, pairs: bool, file_or_code: str) -> str:
    """Return a kernel's source, preceded by the caller's functions of scores if it has hooks for them."""
    code = file_or_code if "\n" in file_or_code else kernel.source(file_or_code)
    if "HOOK_PARAMETERS" not in code:
        return code
    backward = stage.direction == "backward"
    return mod.text(backward=backward, pairs=pairs and not backward and "float32" not in stage.dtypes) + code


# The arrays of a call that models have in another layout than stages, by the stage's direction.
_IN_MODELS_LAYOUT = {
    **dict.fromkeys(("forward", "backward", "project"), WITH_HEAD_DIM),
    "rotate": ROTATED | {"q", "k"},
}


class CompiledPlan:
    """The planned and compiled launches of a call of any direction. They lack only addresses: see `bind` and `direct`.

    is_compared: whether arguments have been compared with the kernels' signatures, for this call or for one like it.
    """

    def __init__(
        self,
        stage: Stage,
        call: Any,
        sizes: Mapping[str, int],
        source: str | None = None,
        like: CompiledPlan | None = None,
    ) -> None:
        """
        Args:
            call: of the stage's direction. sizes: the -D options. source: kernel code to use instead of the stage's
                file.
            like: the plan of a call with the same sizes, whose arrays differ only in shapes and strides. Its kernels
                are reused, unless this call launches one that it lacks.

        Raises:
            ValueError: more tiles than a grid can hold; the source has no such kernel.
        """
        kernel.COUNTS["planned"] += 1
        before: list[Launch] = []
        self.stage, self.scratch, given = stage, {}, call
        if "rotary_cos" in call.arrays and "rotates" not in stage.features:
            before, self.scratch, call = rotated(call)
        self.scratch |= {**stage.scratch(call, sizes), **block_mask_scratch(stage, call, sizes)}
        launches = stage.launches(stage, call, sizes)
        names = {"q": "rotated_q", "k": "rotated_k"} if before else {}
        self.launches = [*before, *(renamed(launch, names) if names else launch for launch in launches)]
        self._specs: Mapping[str, Spec] = {**given.arrays, **self.scratch}
        if like is not None and not all(launch.kernel in like.kernels for launch in self.launches):
            like = None
        self.kernels: dict[str, kernel.Kernel] = like.kernels if like else self._compiled(call, sizes, source)
        self.arguments: dict[tuple[Any, ...], Arguments] = like.arguments if like else {}
        self.is_compared: bool = like.is_compared if like else False

    def _compiled(self, call: Any, sizes: Mapping[str, int], source: str | None) -> dict[str, kernel.Kernel]:
        """Compile the kernels of the launches in parallel."""
        stage = self.stage
        dtype = call.arrays["o" if stage.out_dtypes else "q"].dtype.name
        names = {each.kernel: stage.kernel_name(dtype, each.kernel) for each in self.launches if not each.file}
        others = {each.kernel: (each.file, dict(each.sizes)) for each in self.launches if each.file}
        pairs = stage.direction != "bias" or sizes["FORM"] != DIAGONALS  # tiles may begin at an odd key
        text = (lambda file: file) if call.mod is None else partial(_prepend_functions, call.mod, stage, pairs)
        jobs = [partial(kernel.load_all, text(source or stage.file), tuple(names.values()), defines=sizes)]
        jobs += [partial(kernel.load, text(file), name, defines=of) for name, (file, of) in others.items()]
        with call.mod.compile_errors_as_value_errors() if call.mod else contextlib.nullcontext():
            loaded, *loaded_others = kernel.side_by_side(jobs)
        return {name: loaded[instance] for name, instance in names.items()} | dict(
            zip(others, loaded_others, strict=True)
        )

    def views(self, named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """View a model's arrays in the stage's layout, (batch, heads, rows, head_dim); others' stay as they are."""
        names = _IN_MODELS_LAYOUT.get(self.stage.direction, ())
        return {name: four_axes(a.swapaxes(-3, -2)) if name in names else a for name, a in named}

    def bind(self, arrays: Mapping[str, Any]) -> Callable[[], None]:
        """Compare every argument with its kernel's signature, and return a function that launches on these arrays.

        Raises:
            TypeError, ValueError: as for `helpers.attention.kernel.Kernel.bind`.
        """
        bound = []
        for launch, compiled, args in self.resolve_arguments(arrays):
            bound.append(compiled.bind(launch.grid, launch.block, args, shared_mem=launch.shared_bytes))

        def run(alive: Mapping[str, Any] = arrays) -> None:  # a tensor map does not keep its array alive
            for each in bound:
                each()

        return run

    def resolve_arguments(self, arrays: Mapping[str, Any]) -> list[tuple[Launch, kernel.Kernel, tuple[Any, ...]]]:
        """List each launch with its kernel, and its arguments with arrays instead of their names.

        Scratch that is not among the arrays is made here.
        """
        every = {**{name: self.empty(name, s) for name, s in self.scratch.items() if name not in arrays}, **arrays}
        return [(launch, self.kernels[launch.kernel], launch.arguments(every)) for launch in self.launches]

    def empty(self, name: str, spec: Spec) -> Any:
        """Make a scratch array."""
        return (device.cp.zeros if name in self.stage.zeroed else device.cp.empty)(spec.shape, dtype=spec.dtype)

    def direct(self, names: Sequence[str]) -> list[DirectLaunch]:
        """Return launches for a GPU that check nothing, for calls like one whose arguments `bind` has compared.

        Args:
            names: those of the call's arrays and of `scratch`, in the order of their addresses.
        """
        names = tuple(names)
        slots = {name: 8 * i for i, name in enumerate(names)}
        direct = []
        for launch in self.launches:
            # Arrays by name, because another length may have no partial sums. With many heads a launch gets parts of
            # arrays.
            form = launch.kernel, names, *[arg if type(arg) is str else type(arg) for arg in launch.args]
            if form not in self.arguments:
                self.arguments[form] = Arguments(launch, self.kernels[launch.kernel].function, slots)
            direct.append(DirectLaunch(self.arguments[form], launch, slots, self._specs))
        return direct

    def on_engine(self, names: Sequence[str]) -> list[EngineLaunch]:
        """Return launches for the CPU engine, which take a model's arrays, not addresses. names: as for `direct`."""
        slots = {name: i for i, name in enumerate(names)}
        return [EngineLaunch(each, self.kernels[each.kernel], slots, self.views) for each in self.launches]


class Rung(Stage):
    """A stage of the ladder that can be called: `LADDER["online_softmax"](q, k, v)`."""

    @classmethod
    def of(cls, stage: Stage) -> Rung:
        """Make a stage callable."""
        return cls(**{field.name: getattr(stage, field.name) for field in fields(stage)})

    def __call__(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """Compute softmax(softmax_scale * q k^T) v for each head.

        Args:
            q: (N, d), (heads, N, d) or (batch, heads, N, d), NumPy or device array, of a dtype of the stage; N >= 1
                and 1 <= d <= its max_head_dim.
            k, v: the same with N_kv >= 1 rows. With the feature gqa, heads may be any divisor of q's.
            softmax_scale: by default 1 / sqrt(d).
            causal: row i sees keys up to i + N_kv - N: the last row sees all (bottom-right, as in FlashAttention).
            window: (left, right): how many keys before and after that diagonal a row sees; -1 for all of them.
            return_lse: return also the log of the sum of exp(scaled scores) of each row, float32 without the axis d.
            score_mod, mask_mod, mod_args, score_mod_grad, bias, alibi_slopes, sinks, rotary_cos, rotary_sin,
                rotary_interleaved, rotary_positions, q_descale, k_descale, v_descale: as in
                `helpers.attention.flash_attention`, for stages with the features mod, rotary and descale.

        Returns:
            The output, of q's shape and of q's dtype or the first of the stage's `out_dtypes`, a device array; with
            return_lse, (o, lse). A row that sees no key is 0, and its lse -inf.

        Raises:
            TypeError: an array of another dtype; a softmax_scale that is not a number; a window that is not a pair of
                ints.
            ValueError: shapes that do not fit each other or the stage; something the stage cannot do; a
                softmax_scale that float32 cannot hold.
        """
        run, result = self.prepare(q, k, v, **options)
        run()
        return result

    def prepare(self, q: Any, k: Any, v: Any, **options: Any) -> tuple[Callable[[], None], Any]:
        """Do all but launch: return a function that launches, and the array that it writes. For timing and experiments.

        Args: see `plan`.
        """
        ready, arrays, result = self.plan(q, k, v, **options)
        return (lambda: None) if ready is None else ready.bind(arrays), result

    def plan(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        return_lse: bool = False,
        cu_seqlens: tuple[Any, Any] | None = None,
        out: Any = None,
        source: str | None = None,
        sizes: Mapping[str, int] | None = None,
        rotary_interleaved: bool = False,
        score_mod: str | None = None,
        mask_mod: Any = None,
        mod_args: Mapping[str, Any] | None = None,
        score_mod_grad: str | None = None,
        **extras: Any,
    ) -> tuple[CompiledPlan | None, dict[str, Any], Any]:
        """Plan: return the launches (None if there is nothing to do), the arrays by name, and the written ones.

        Args, in addition to those of `__call__`:
            cu_seqlens: (cu_seqlens_q, cu_seqlens_k), where each packed sequence begins and the last one ends; NumPy
                int32, checked as in `helpers.attention.flash_attention_varlen`. q is then (heads, tokens, d).
            out: a device array to write, in a layout that the stage reads without a copy; by default a new one, filled
                with NaN to reveal rows that no thread writes.
            source: kernel code to use instead of the stage's file.
            sizes: -D options that override the stage's own, such as {"BLOCK_M": 32}.
        """
        if unknown := extras.keys() - {*NAMES, "rotary_positions"}:
            raise TypeError(f"stage {self.name} got an unexpected keyword argument {min(unknown)!r}")
        mod, of_mod = parse_score_mod(score_mod, mask_mod, mod_args, score_mod_grad)
        given = extra_inputs(**extras, rotary_interleaved=rotary_interleaved) | of_mod
        options = ForwardOptions(window, causal, softmax_scale, return_lse, rotary_interleaved, mod=mod)
        options = self.check(q, k, v, options, packed=cu_seqlens is not None, extras=given)
        cp = device.cp
        if 0 in (q.size, k.size):  # packed sequences without a token
            o = cp.empty(q.shape, dtype=q.dtype) if out is None else out
            o[...] = 0
            return None, {}, (o, cp.full(q.shape[:-1], -cp.inf, dtype=cp.float32)) if return_lse else o
        dtypes = [dtype_of(name) for name in self.out_dtypes] or [q.dtype]
        o = cp.full(q.shape, cp.nan, dtype=dtypes[0]) if out is None else out
        if o.shape != q.shape or o.dtype not in dtypes or not self.reads(o):
            got = f"shape {o.shape}, strides {o.strides}, dtype {o.dtype}"
            raise ValueError(f"out is written in place, so it must be as stage {self.name} takes q; got {got}")
        outputs = {"o": o, **({"lse": cp.full(q.shape[:-1], cp.nan, dtype=cp.float32)} if return_lse else {})}
        check_positions(given)
        inputs = {"q": q, "k": k, "v": v, **given}
        ready, arrays = plan_arrays(self, inputs, outputs, options, cu_seqlens, source=source, sizes=sizes)
        return ready, arrays, (o, outputs["lse"]) if return_lse else o
