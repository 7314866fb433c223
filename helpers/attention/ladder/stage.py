"""Describe a stage by a `Stage`: what it supports, its sizes, and its launches of the kernels of one file.

    o = LADDER["online_softmax"](q, k, v)

The stages are in stages/, their order in table.py, how a call is planned in plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

from helpers.attention.ladder import limits
from helpers.attention.ladder.call import WITH_HEAD_DIM, Asked, Call, Spec, check_stage_arrays
from helpers.attention.ladder.extras import is_readable, needs
from helpers.attention.ladder.launch import Launch
from helpers.attention.ladder.layout import titles

S = TypeVar("S", bound="Stage")
C_NAMES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}

_WRITTEN = ("o", "lse", "rotated_q", "rotated_k", "k_cache", "v_cache")  # never copied: caches are too large


def _usual_sizes(head_dim: int, shared_limit: int) -> Mapping[str, int]:
    return {}


class CallSize(NamedTuple):
    """Describe a call by what decides which of the stages that support it is fastest.

    rows: of Q; for packed sequences, a typical length. all_rows: those of all heads together; for gradients, keys, once
    for each head of Q. masked: causal or with a window. grouped: several heads of Q share one of K and V. packed: with
    cu_seqlens. functions: of scores, among them a bias or ALiBi's slopes. derivative: one of them has one other than 1.
    """

    rows: int
    all_rows: int
    head_dim: int
    masked: bool = False
    grouped: bool = False
    deterministic: bool = False
    packed: bool = False
    functions: bool = False
    derivative: bool = False


@dataclass(frozen=True)
class Tuning:
    """The tuning of a stage: its -D options by head_dim, for few blocks, for a call; which calls default to it."""

    # -D options by HEAD_DIM and the bytes of shared memory per block. small_grid: if the usual tiles would leave half a
    # GPU idle; tiny_grid: if those of small_grid would do so too; single_wave: if no multiprocessor would get two
    # blocks.
    tiles: Callable[[int, int], Mapping[str, int]]
    small_grid: Callable[[int, int], Mapping[str, int]] = _usual_sizes
    tiny_grid: Callable[[int, int], Mapping[str, int]] = _usual_sizes
    single_wave: Callable[[int, int], Mapping[str, int]] = _usual_sizes
    variant: Callable[[Call], Mapping[str, int]] = lambda call: {}  # what a call needs, such as VECTOR=0
    # Whether a call of this size that names no stage may get it here.
    by_default: Callable[[CallSize], bool] = lambda size: True

    def of_one_size(self) -> Tuning:
        """Return this tuning with one set of sizes for all grids."""
        return replace(self, **dict.fromkeys(("small_grid", "tiny_grid", "single_wave"), _usual_sizes))


@dataclass(frozen=True)
class Stage:
    """Attention by one kernel file: its features, and how it is compiled and launched. `plan.Rung` also runs it.

    features: supported beyond plain attention; any of
        gqa      fewer heads in k and v than in q
        causal, window, varlen (packed sequences), lse (the log-sum-exp)
        strides  any array whose rows are contiguous, with no copy
        mod      functions of scores, and features made of them: bias, ALiBi, sinks
        rotary   the rotary embedding of helpers.attention.ladder.extras
        float    results in float32 when q is of a half type
        continues  results merged with those of other keys, for ring attention
        descale  q_descale, k_descale and v_descale, for e4m3; block_descale: also for blocks of rows
    """

    number: int
    name: str  # the stage's, and its kernel's if it has one
    file: str
    idea: str
    tuning: Tuning
    launches: Callable[[Stage, Call, Mapping[str, int]], Sequence[Launch]]
    scratch: Callable[[Call, Mapping[str, int]], Mapping[str, Spec]] = lambda call, sizes: {}  # arrays between launches
    direction: str = "forward"  # or backward, bias, decode, rotate, project
    kernels: tuple[str, ...] = ()  # their names in the file, if there are several
    features: frozenset[str] = frozenset()
    dtypes: tuple[str, ...] = ("float32",)
    out_dtypes: tuple[str, ...] = ()  # those of the results, the default first; empty for the inputs'
    min_cc: int = 0  # compute capability, 80 for 8.0; 0 is any
    only_cc: bool = False  # it uses features that only GPUs of this compute capability have, not later ones
    max_head_dim: int = 128
    head_dim_step: int = 1  # head_dim is a multiple of it
    threads: Callable[[Mapping[str, int]], int] = lambda sizes: sizes["BLOCK_M"]
    shared_bytes: Callable[[Mapping[str, int]], int] = lambda sizes: 0  # dynamic shared memory
    slots: Callable[[Call, Mapping[str, int]], bool] = lambda call, sizes: False  # a call is compiled with SLOTS=1
    needs_aligned: bool = False  # rows that do not start at multiples of 16 bytes are copied
    unavailable: Callable[[], str | None] = lambda: None  # why headers that it includes are not installed, or None
    error_factor: float = 1.0  # multiplies the bench's tolerance; for steps before compensated sums
    zeroed: frozenset[str] = frozenset()  # scratch that is 0 before a launch, and after it
    slow_to_compile: bool = False  # NVRTC takes half a minute for each size, dtype and architecture: tests use few

    def changed(self: S, **fields_of_both: Any) -> S:
        """Return a copy of the stage with some fields replaced, its own or those of its tuning."""
        names = {field.name for field in fields(Tuning)}
        tuned = {name: fields_of_both.pop(name) for name in names & fields_of_both.keys()}
        return replace(self, tuning=replace(self.tuning, **tuned), **fields_of_both)

    # ---- how it is compiled

    def tiles(self, head_dim: int) -> Mapping[str, int]:
        """Return the tile sizes for a head dimension on this device, in grids that fill it."""
        return self.tuning.tiles(head_dim, limits.most_shared())

    @property
    def variant(self) -> Callable[[Call], Mapping[str, int]]:
        """The function from a call to the -D options that the call needs."""
        return self.tuning.variant

    def defines(self, head_dim: int) -> dict[str, int]:
        """Return the -D options for a head dimension: HEAD_DIM and the tile sizes."""
        return {"HEAD_DIM": head_dim, **self.tiles(head_dim)}

    def defines_for(self, head_dim: int, rows: int, heads: int, *, uneven: bool = False) -> dict[str, int]:
        """Return the -D options for one launch: with other tiles if the usual ones would give too few blocks.

        Args:
            rows: those of the longest sequence: of q, or of k in the backward pass, whose blocks have tiles of keys.
            heads: those of all sequences together: of q, or of k in the backward pass.
            uneven: the mask, such as a causal one, leaves half of the blocks with less than half of the work.
        """
        defines = self.defines(head_dim)
        tile = "BLOCK_N" if self.direction == "backward" else "BLOCK_M"

        def blocks() -> int:
            return -(-rows // defines[tile]) * heads

        idle = limits.multiprocessors() // (1 if uneven else 2)  # with this many blocks half of the GPU is idle
        if blocks() <= idle:
            defines.update(self.tuning.small_grid(head_dim, limits.most_shared()))
            if blocks() <= idle:
                defines.update(self.tuning.tiny_grid(head_dim, limits.most_shared()))
        elif blocks() <= limits.multiprocessors():
            defines.update(self.tuning.single_wave(head_dim, limits.most_shared()))
        return defines

    def sizes_for(self, call: Call, sizes: Mapping[str, int] | None = None) -> dict[str, int]:
        """Return all -D options for a call; `sizes` override the stage's own."""
        if self.direction not in ("forward", "backward"):  # the sizes decide the grid, not the other way round
            return {**self.tuning.variant(call), **(sizes or {})}
        heads = call.arrays["k" if self.direction == "backward" else "q"].shape[1]
        rows = call.keys if self.direction == "backward" else call.rows
        defines = self.defines_for(call.head_dim, rows, heads * call.sequences, uneven=call.uneven)
        chosen = {**defines, **self.tuning.variant(call), **(sizes or {})}
        if not self.out_dtypes and call.arrays.get("dq", call.arrays["o"]).dtype != call.arrays["q"].dtype:
            chosen["FLOAT_OUT"] = 1
        return {**chosen, "SLOTS": 1} if "SLOTS" not in chosen and self.slots(call, chosen) else chosen

    def architecture(self, cc: int) -> str:
        """Name the architecture to compile for, on compute capability `cc`: "sm_90", or "sm_90a" with `only_cc`."""
        return f"sm_{cc}{'a' if self.only_cc else ''}"

    def result_dtype(self, dtype: str) -> str:
        """Name the results' dtype for an inputs' dtype, if the call does not specify it."""
        return self.out_dtypes[0] if self.out_dtypes else dtype

    def kernel_name(self, dtype: str = "float32", name: str | None = None) -> str:
        """Return a kernel's name, by default the stage's own; a template's with the type: "flash_mma<__half>".

        An instance's name is returned unchanged.

        Args:
            dtype: the inputs', or the results' if the stage has `out_dtypes`.
        """
        name = name or self.name
        of = self.result_dtype(dtype) if dtype in self.dtypes else dtype
        is_template = of in (self.out_dtypes or self.dtypes) and self.dtypes != ("float32",)
        return f"{name}<{C_NAMES[of]}>" if is_template and "<" not in name else name

    def kernel_names(self, dtype: str = "float32") -> tuple[str, ...]:
        """Return the names of all its kernels, as `kernel_name` makes them."""
        return tuple(self.kernel_name(dtype, name) for name in self.kernels or (self.name,))

    def launch(
        self, grid: tuple[int, ...], sizes: Mapping[str, int], args: tuple[Any, ...], name: str | None = None
    ) -> Launch:
        """Make a launch with the stage's own block and shared memory. name: the kernel's; by default the stage's."""
        block, shared = (self.threads(sizes),), self.shared_bytes(sizes)
        return Launch(name or self.name, grid, block, shared, args)

    # ---- what it supports

    def why_not(
        self,
        *,
        head_dim: int,
        dtype: str = "float32",
        gqa: bool = False,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        varlen: bool = False,
        return_lse: bool = False,
        deterministic: bool = False,
        mod: str = "",
        rotary_dim: int = 0,
        out: str = "",
        descale: str = "",
        block_descale: str = "",
        unpadded: int = 0,
    ) -> str | None:
        """Return the reason why it does not support this on this device, or None. unpadded: the caller's head_dim."""
        if dtype not in self.dtypes:
            return f"it takes {titles(*self.dtypes)}, not {titles(dtype)}"
        if not 1 <= head_dim <= self.max_head_dim or head_dim % self.head_dim_step:
            multiples = f", multiples of {self.head_dim_step}" if self.head_dim_step > 1 else ""
            takes = f"{self.head_dim_step} to {self.max_head_dim}{multiples}"
            return f"head_dim = {unpadded or head_dim}; this stage takes {takes}"
        features = {
            "gqa": gqa and "k and v with fewer heads than q",
            "causal": causal and "causal=True",
            "window": window is not None and tuple(window) != (-1, -1) and f"window={window}",
            "varlen": varlen and "packed sequences of several lengths",
            "lse": return_lse and "return_lse=True",
            "deterministic": deterministic and "deterministic=True",
            "mod": mod,
            "rotary": rotary_dim and "rotary_cos and rotary_sin",
            "float": out == "float32" and not self.out_dtypes and "results in float32 of another type",
            "descale": descale,
            "block_descale": block_descale,
        }
        for feature, wanted in features.items():
            if wanted and feature not in self.features:
                return f"it has no {wanted}"
        if out and out not in (*self.out_dtypes, "float32"):
            return f"its results are {' or '.join(self.out_dtypes) or f'{dtype} or float32'}, not {out}"
        here, needed = limits.compute_capability(), max(self.min_cc, 80 if dtype == "bfloat16" else 0)
        if here < needed:
            return f"it needs compute capability {needed / 10} for {titles(dtype)}; this GPU has {here / 10}"
        if self.only_cc and here != self.min_cc:
            needed_arch = f"sm_{self.min_cc}a, which only compute capability {self.min_cc / 10} runs"
            return f"it is compiled for {needed_arch}; this GPU has {here / 10}"
        return self.unavailable()

    def reads(self, a: Any) -> bool:
        """Return True if the kernel can read (or write) an array, or one that a `Spec` describes, in place."""
        spec = a if type(a) is Spec else Spec.of(a)
        if 0 in spec.shape:
            return True
        as_it_is = spec.in_rows if "strides" in self.features else spec.contiguous
        return as_it_is and (not self.needs_aligned or spec.aligned)

    def unreadable(self, call: Call) -> list[str]:
        """List the inputs of a call that have to be copied: this stage cannot read them where they are."""
        written = ("dq", "dk", "dv") if "do" in call.arrays else _WRITTEN
        return [name for name, a in call.arrays.items() if name not in written and not self._can_read(name, a, call)]

    def negates(self, call: Call) -> bool:
        """Return True if a call needs -q for its negative scale: kernels find maxima before they scale the scores."""
        return self.direction not in ("backward", "bias") and call.softmax_scale < 0

    def _can_read(self, name: str, a: Spec, call: Call) -> bool:
        if name in ("q", "k") and "rotary_cos" in call.arrays:  # the pass that rotates them reads 16 bytes at a time
            return a.in_rows and a.aligned
        if name in WITH_HEAD_DIM:
            return self.reads(a)
        return is_readable(name, a)

    def check(
        self, q: Any, k: Any, v: Any, options: Asked, *, packed: bool = False, extras: Mapping[str, Any] | None = None
    ) -> Asked:
        """Check that this stage supports a call, and return the options from `Options.checked`.

        Args:
            q, k, v: arrays (..., rows, head_dim). packed: with cu_seqlens. extras: from `extras.extra_inputs`.

        Raises:
            TypeError, ValueError: as for `plan.Rung.__call__`.
        """
        check_stage_arrays(self.name, self.dtypes, q, k, v, empty=packed)
        if reason := self.why_not(**{**options.needs(q, k, packed=packed), **needs(extras or {})}):
            raise ValueError(reason if reason.startswith("head_dim") else f"stage {self.name} cannot: {reason}")
        return options.checked(q.shape[-1])
