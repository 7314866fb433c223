"""What a stage is: one or more launches of one or more kernels of a file, and a table entry that says all the rest.

    o = LADDER["online_softmax"](q, k, v)

A stage is a `Stage`; the table of them is in table.py, how they are launched in launches.py. A call is checked in
call.py, becomes a `Call`, and a `Ready` of it needs nothing more than the arrays.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from helpers import device
from helpers.attention import kernel
from helpers.attention.ladder import fused, limits, tensor_maps
from helpers.attention.ladder.call import Call, Spec, check_stage_arrays, mask_window, softmax_scale_of
from helpers.attention.ladder.layout import address, four_axes, is_aligned, span

MAX_HEAD_DIM = 128
_C_NAMES = {"float16": "__half", "bfloat16": "__nv_bfloat16"}


@dataclass(frozen=True)
class Part:
    """An argument that is a part of an array: array[index]."""

    name: str
    index: tuple[int, ...]


@dataclass(frozen=True)
class Map:
    """An argument that is the tensor map of an array, for copies of `box_rows` rows: see tensor_maps.py."""

    name: str
    box_rows: int


@dataclass(frozen=True, eq=False)
class Constant:
    """An argument that is an array of what depends on the call's sizes alone: copied to the device once."""

    values: np.ndarray

    @functools.cached_property
    def there(self) -> Any:
        """The array on the device. The copy has ended: launches on any stream may read it."""
        copied = device.cp.asarray(self.values)
        if device.ON_GPU:
            device.cp.cuda.get_current_stream().synchronize()
        return copied


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel.

    args: an array by its name, or as a `Part` or a `Map`; a `Constant`; None for a null pointer; NumPy scalars and
        structs as they are.
    """

    kernel: str  # its name in the file, or the name of an instance of a template
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Stage:
    """One rung of the ladder: attention by one kernel file. See `__call__` and `prepare`.

    features: what it can beyond plain attention, out of
        gqa      fewer heads in k and v than in q
        causal, window, varlen (packed sequences), lse (the log-sum-exp)
        strides  any array whose rows are contiguous, with no copy
        bias, alibi, rotary  as helpers.attention.ladder.fused has them
    """

    number: int
    name: str  # of the stage, and of its kernel where it has one
    file: str
    idea: str
    tiles: Callable[[int], dict[str, int]]  # HEAD_DIM -> the sizes it is compiled with
    launches: Callable[[Stage, Call, Mapping[str, int]], Sequence[Launch]]
    scratch: Callable[[Call, Mapping[str, int]], Mapping[str, Spec]] = lambda call, sizes: {}  # arrays between launches
    direction: str = "forward"  # or backward, decode
    kernels: tuple[str, ...] = ()  # their names in the file, where there are several
    features: frozenset[str] = frozenset()
    dtypes: tuple[str, ...] = ("float32",)
    min_cc: int = 0  # compute capability, 80 for 8.0; 0 is any
    only_cc: bool = False  # it uses what GPUs of this compute capability have and later ones have not
    max_head_dim: int = MAX_HEAD_DIM
    head_dim_step: int = 1  # head_dim is a multiple of it
    threads: Callable[[Mapping[str, int]], int] = lambda sizes: sizes["BLOCK_M"]
    shared_bytes: Callable[[Mapping[str, int]], int] = lambda sizes: 0  # dynamic shared memory
    few_blocks: Callable[[int], Mapping[str, int]] = lambda head_dim: {}  # sizes, where its own leave half a GPU idle
    fewest_blocks: Callable[[int], Mapping[str, int]] = lambda head_dim: {}  # where those of few_blocks do so too
    lone_blocks: Callable[[int], Mapping[str, int]] = lambda head_dim: {}  # where no multiprocessor has two blocks
    variant: Callable[[Call], Mapping[str, int]] = lambda call: {}  # -D options that a call needs, such as VECTOR=0
    # Whether a call that names no stage may get it here: (rows, rows of all heads, head_dim) of Q.
    by_default: Callable[[int, int, int], bool] = lambda rows, all_rows, head_dim: True
    # A call that names no stage gets it only for one of these features; empty: for any call.
    only_for: frozenset[str] = frozenset()
    rotary_step: int = 2  # rotary_dim is a multiple of it
    needs_aligned: bool = False  # rows that do not start at multiples of 16 bytes are copied
    missing: Callable[[], str | None] = lambda: None  # what its source includes and this machine lacks
    slow_to_compile: bool = False  # NVRTC takes half a minute for each size, dtype and architecture: tests take few

    # ---- what it is compiled with

    def defines(self, head_dim: int) -> dict[str, int]:
        """The -D options for a head dimension: HEAD_DIM and the tile sizes."""
        return {"HEAD_DIM": head_dim, **self.tiles(head_dim)}

    def defines_for(self, head_dim: int, rows: int, heads: int, *, uneven: bool = False) -> dict[str, int]:
        """The -D options for one launch: other sizes where its own give few blocks, or each multiprocessor one.

        Args:
            rows: of the longest sequence: of q, where blocks have tiles of rows; of k, in the backward, where they have
                tiles of keys. heads: of all sequences together, of q or of k likewise.
            uneven: a mask such as causal=True, which leaves half of the blocks less than half of the work.
        """
        defines = self.defines(head_dim)
        tile = "BLOCK_N" if self.direction == "backward" else "BLOCK_M"

        def blocks() -> int:
            return -(-rows // defines[tile]) * heads

        idle = limits.multiprocessors() // (1 if uneven else 2)  # with so many blocks half of the GPU is idle
        if blocks() <= idle:
            defines.update(self.few_blocks(head_dim))
            if blocks() <= idle:
                defines.update(self.fewest_blocks(head_dim))
        elif blocks() <= limits.multiprocessors():
            defines.update(self.lone_blocks(head_dim))
        return defines

    def architecture(self, cc: int) -> str:
        """What its file is compiled for on a GPU of compute capability `cc`: "sm_90", or "sm_90a"."""
        return f"sm_{cc}{'a' if self.only_cc else ''}"

    def kernel_name(self, dtype: str = "float32", name: str | None = None) -> str:
        """A kernel's name, the stage's own if none is given; for a template, the instance of a dtype."""
        name = name or self.name
        return f"{name}<{_C_NAMES[dtype]}>" if dtype in _C_NAMES else name

    def kernel_names(self, dtype: str = "float32") -> tuple[str, ...]:
        """The names of all its kernels, as `kernel_name` has them."""
        return tuple(self.kernel_name(dtype, name) for name in self.kernels or (self.name,))

    def launch(
        self, grid: tuple[int, ...], sizes: Mapping[str, int], args: tuple[Any, ...], name: str | None = None
    ) -> Launch:
        """A launch with the stage's own block and shared memory. name: of another kernel than the stage's own."""
        block, shared = (self.threads(sizes),), self.shared_bytes(sizes)
        return Launch(name or self.name, grid, block, shared, args)

    # ---- what it can do

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
        bias: bool = False,
        alibi: bool = False,
        rotary_dim: int = 0,
    ) -> str | None:
        """The reason it cannot do this, on this device; None where it can."""
        if dtype not in self.dtypes:
            return f"it takes {' or '.join(self.dtypes)}, not {dtype}"
        if not 1 <= head_dim <= self.max_head_dim or head_dim % self.head_dim_step:
            multiples = f", multiples of {self.head_dim_step}" if self.head_dim_step > 1 else ""
            return f"head_dim = {head_dim}; this stage takes {self.head_dim_step} to {self.max_head_dim}{multiples}"
        wishes = {
            "gqa": gqa and "k and v with fewer heads than q",
            "causal": causal and "causal=True",
            "window": window is not None and tuple(window) != (-1, -1) and f"window={window}",
            "varlen": varlen and "packed sequences of several lengths",
            "lse": return_lse and "return_lse=True",
            "deterministic": deterministic and "deterministic=True",
            "bias": bias and "bias",
            "alibi": alibi and "alibi_slopes",
            "rotary": rotary_dim and "rotary_cos and rotary_sin",
        }
        for feature, wish in wishes.items():
            if wish and feature not in self.features:
                return f"it has no {wish}"
        if rotary_dim % self.rotary_step:
            return f"rotary_dim = {rotary_dim}; this stage takes multiples of {self.rotary_step}"
        here, needed = limits.compute_capability(), max(self.min_cc, 80 if dtype == "bfloat16" else 0)
        if here < needed:
            return f"it needs compute capability {needed / 10} for {dtype}; this GPU has {here / 10}"
        if self.only_cc and here != self.min_cc:
            needed_arch = f"sm_{self.min_cc}a, which only compute capability {self.min_cc / 10} runs"
            return f"it is compiled for {needed_arch}; this GPU has {here / 10}"
        return self.missing()

    def reads(self, a: Any) -> bool:
        """Whether the kernel can read (or write) an array where it is, with no copy."""
        if a.size == 0:
            return True
        if "strides" in self.features:
            rows = a.strides[-1] == a.itemsize or a.shape[-1] == 1
            as_it_is = rows and min(a.strides) >= 0
        else:
            as_it_is = a.flags.c_contiguous
        return as_it_is and not (self.needs_aligned and not is_aligned(a))

    def readable(self, a: Any) -> Any:
        """The array as the kernel can read it: itself wherever that is possible, else a copy."""
        if self.reads(a):
            return a
        dense = device.cp.ascontiguousarray(a)
        return device.cp.array(a) if dense is a else dense

    # ---- a call

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        return_lse: bool = False,
        **beside: Any,
    ) -> Any:
        """softmax(softmax_scale * q k^T) v, for each head.

        Args:
            q: (N, d), (heads, N, d) or (batch, heads, N, d), NumPy or device array, of a dtype of the stage; N >= 1
                and 1 <= d <= its max_head_dim.
            k, v: the same with N_kv >= 1 rows. With the feature gqa, heads may be any divisor of q's.
            softmax_scale: 1 / sqrt(d) where it is not given.
            causal: row i sees keys up to i + N_kv - N: the last row sees all (bottom-right, as in FlashAttention).
            window: (left, right): how many keys before and after that diagonal a row sees; -1 for all of them.
            return_lse: also the log of the sum of exp(scaled scores) of each row, float32 without the axis d.
            beside: bias, alibi_slopes, rotary_cos, rotary_sin, rotary_interleaved and rotary_positions, with the
                features bias, alibi and rotary, as `helpers.attention.flash_attention` has them.

        Returns:
            The output, of q's shape and dtype, a device array; with return_lse, (o, lse). A row that sees no key is 0,
            and its lse -inf.

        Raises:
            TypeError: an array of another dtype; a softmax_scale that is no number; a window that is no pair of ints.
            ValueError: shapes that do not fit each other or the stage; something the stage cannot do; a
                softmax_scale that float32 cannot hold.
        """
        run, result = self.prepare(
            q, k, v, softmax_scale=softmax_scale, causal=causal, window=window, return_lse=return_lse, **beside
        )
        run()
        return result

    def prepare(
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
        **beside: Any,
    ) -> tuple[Callable[[], None], Any]:
        """Everything but the launch: a function that launches, and what it writes. For timing and experiments.

        Args, where `__call__` does not have them:
            cu_seqlens: (cu_seqlens_q, cu_seqlens_k), where each sequence of the packed tokens begins and the last one
                ends; NumPy int32, as `helpers.attention.flash_attention_varlen` has checked them. q is then
                (heads, tokens, d).
            out: a device array to write, in a layout that the stage reads without a copy. Without it a new one, filled
                with NaN, so that a row nobody writes shows.
            source: another text of the kernel in place of the file's.
            sizes: tile sizes in place of the stage's own, such as {"BLOCK_M": 32}.
        """
        ready, arrays, result = self.plan(
            q,
            k,
            v,
            softmax_scale=softmax_scale,
            causal=causal,
            window=window,
            return_lse=return_lse,
            cu_seqlens=cu_seqlens,
            out=out,
            source=source,
            sizes=sizes,
            **beside,
        )
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
        **beside: Any,
    ) -> tuple[Ready | None, dict[str, Any], Any]:
        """What `prepare` binds: the launches (None where nothing is to do), the arrays by name, and what is written."""
        asked = {"causal": causal, "window": window, "varlen": cu_seqlens is not None, "return_lse": return_lse}
        if unknown := beside.keys() - fused.OPTIONS:
            raise TypeError(f"stage {self.name} got an unexpected keyword argument {min(unknown)!r}")
        given = fused.options_of(**beside)
        limits_of_mask = self.check(q, k, v, **asked, **given.asked)
        scale = softmax_scale_of(softmax_scale, q.shape[-1])
        cp = device.cp
        if q.size == 0:  # packed sequences without a token
            o = cp.empty(q.shape, dtype=q.dtype) if out is None else out
            return None, {}, (o, cp.empty(q.shape[:-1], dtype=cp.float32)) if return_lse else o
        o = cp.full(q.shape, cp.nan, dtype=q.dtype) if out is None else out
        if o.shape != q.shape or o.dtype != q.dtype or not self.reads(o):
            got = f"shape {o.shape}, strides {o.strides}, dtype {o.dtype}"
            raise ValueError(f"out is written in place, so it must be as stage {self.name} takes q; got {got}")
        lse = cp.full(q.shape[:-1], cp.nan, dtype=cp.float32) if return_lse else None
        rows = keys = None
        if cu_seqlens is not None:
            rows, keys = (int(np.diff(cp.asnumpy(cu)).max(initial=0)) for cu in cu_seqlens)
            cu_seqlens = tuple(cp.asarray(cu) for cu in cu_seqlens)
        ready, arrays = self.ready(
            *(cp.asarray(a) for a in (q, k, v)),
            *(o, lse, cu_seqlens, rows),
            softmax_scale=scale,
            window=limits_of_mask,
            source=source,
            sizes=sizes,
            beside=given,
            keys=keys,
        )
        return ready, arrays, (o, lse) if return_lse else o

    def check(self, q: Any, k: Any, v: Any, **asked: Any) -> tuple[int, int]:
        """The mask's (left, right), for a call that this stage can do.

        Args:
            q, k, v: arrays (..., rows, head_dim). asked: the options of the call, as `why_not` has them.

        Raises:
            TypeError, ValueError: as `__call__`.
        """
        check_stage_arrays(self.name, self.dtypes, q, k, v, empty=asked["varlen"])
        limits_of_mask = mask_window(asked["window"], asked["causal"])
        of_arrays = {"head_dim": q.shape[-1], "dtype": q.dtype.name, "gqa": q.shape[:-2] != k.shape[:-2]}
        if reason := self.why_not(**of_arrays, **asked):
            raise ValueError(reason if reason.startswith("head_dim") else f"stage {self.name} cannot: {reason}")
        return limits_of_mask

    def ready(
        self,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        lse: Any,
        cu_seqlens: tuple[Any, Any] | None,
        rows: int | None,
        *,
        softmax_scale: float,
        window: tuple[int, int],
        source: str | None = None,
        sizes: Mapping[str, int] | None = None,
        beside: fused.Fused = fused.NOTHING,
        keys: int | None = None,
    ) -> tuple[Ready, dict[str, Any]]:
        """A forward call that has been checked, compiled; and its arrays by name.

        Args:
            q, k, v, o: device arrays (..., rows, head_dim). lse, cu_seqlens: device arrays, or None.
            rows, keys: of the longest sequence, where they are packed; keys may be left out.
            beside: its arrays, on the device or in NumPy, are checked here.

        Raises:
            TypeError, ValueError: an array of beside does not fit q and k.
        """
        arrays = {name: four_axes(self.readable(a)) for name, a in zip("qkv", (q, k, v), strict=True)}
        arrays["o"] = four_axes(o)
        if lse is not None:
            arrays["lse"] = lse
        if cu_seqlens is not None:
            arrays["cu_seqlens_q"], arrays["cu_seqlens_k"] = cu_seqlens
        batch, heads, n, head_dim = arrays["q"].shape
        sequences = batch if cu_seqlens is None else len(cu_seqlens[0]) - 1
        if beside.arrays:
            packed = cu_seqlens is not None
            of_call = {"sequences": sequences, "packed": packed, "longest_k": keys, "aligned": self.needs_aligned}
            arrays.update(fused.check(beside.on_device(), arrays["q"], arrays["k"], **of_call))
        call = Call(
            {name: Spec.of(a) for name, a in arrays.items()},
            softmax_scale,
            window,
            rows=n if rows is None else rows,
            sequences=sequences,
            aligned=all(is_aligned(arrays[name]) for name in "qkvo"),
            rotary_interleaved=beside.interleaved,
            bias_aligned="bias" in arrays and address(arrays["bias"]) % 16 == 0,
        )
        defines = self.defines_for(head_dim, call.rows, heads * call.sequences, uneven=call.uneven)
        defines.update(self.variant(call))
        defines.update(sizes or {})
        return Ready(self, call, defines, source), arrays


class Ready:
    """A call's launches, planned and compiled. It depends on no address: see `bind` and `launch`."""

    def __init__(self, stage: Stage, call: Call, sizes: Mapping[str, int], source: str | None = None) -> None:
        """
        Args:
            sizes: the -D options. source: another text of the kernel in place of the stage's file.

        Raises:
            ValueError: more heads or sequences than a grid has room for; the source has no such kernel.
        """
        self.scratch = stage.scratch(call, sizes)
        self.launches = list(stage.launches(stage, call, sizes))
        self._arrays = call.arrays
        dtype = call.arrays["q"].dtype.name
        text = source or stage.file
        names = {launch.kernel: stage.kernel_name(dtype, launch.kernel) for launch in self.launches}
        loaded = kernel.load_all(text, tuple(names.values()), defines=sizes)
        self._kernels = [loaded[names[launch.kernel]] for launch in self.launches]

    def bind(self, arrays: Mapping[str, Any]) -> Callable[[], None]:
        """A function that launches on these arrays. Every argument is compared with the kernel's signature, now.

        Raises:
            TypeError, ValueError: as `helpers.attention.kernel.Kernel.bind`.
        """
        bound = [
            compiled.bind(launch.grid, launch.block, args, shared_mem=launch.shared_bytes)
            for launch, compiled, args in self.filled(arrays)
        ]

        def run(alive: Mapping[str, Any] = arrays) -> None:  # a tensor map does not keep its array alive
            for each in bound:
                each()

        return run

    def filled(self, arrays: Mapping[str, Any]) -> list[tuple[Launch, kernel.Kernel, tuple[Any, ...]]]:
        """Each launch with its kernel, and its arguments with arrays in place of their names; scratch is made here."""
        held = {**arrays, **{name: device.cp.empty(s.shape, dtype=s.dtype) for name, s in self.scratch.items()}}
        return [
            (launch, compiled, tuple(_argument(arg, held) for arg in launch.args))
            for launch, compiled in zip(self.launches, self._kernels, strict=True)
        ]

    def direct(self, names: Sequence[str]) -> list[DirectLaunch]:
        """The launches for a GPU without any check, for arrays that are like those of an earlier `bind`.

        Args:
            names: of the arrays and of those of `scratch`, in the order in which their addresses will be given.
        """
        slots = {name: 8 * i for i, name in enumerate(names)}
        return [
            DirectLaunch(launch, compiled.function, slots, self._arrays)
            for launch, compiled in zip(self.launches, self._kernels, strict=True)
        ]


class DirectLaunch:
    """A launch whose arguments are laid out but for the addresses of its arrays: the driver's call, and little else."""

    def __init__(self, launch: Launch, function: Any, slots: Mapping[str, int], arrays: Mapping[str, Spec]) -> None:
        """
        Args:
            slots: where the address of each array will be, in bytes from the first. arrays: what they are like.
        """
        self._function = function.kernel  # CuPy's, which holds the module
        grid, block = (tuple(size) + (1,) * (3 - len(size)) for size in (launch.grid, launch.block))
        self._sizes = (*grid, *block, launch.shared_bytes)
        self._launch = device.cp.cuda.driver.launchKernel
        self._kept: list[np.ndarray] = []  # what constant arguments point to
        self._arguments: list[tuple[bool, int]] = []  # (in the slots?, offset or address)
        self._parts: list[tuple[int, int]] = []  # (slot of the array, bytes to the part)
        self._maps: list[tuple[int, int, tensor_maps.Kept]] = []  # (argument, slot of the array, its maps)
        extra = 8 * len(slots)
        for arg in launch.args:
            if isinstance(arg, str):
                self._arguments.append((True, slots[arg]))
            elif isinstance(arg, Part):
                self._arguments.append((True, extra + 8 * len(self._parts)))
                steps = sum(i * step for i, step in zip(arg.index, arrays[arg.name].strides, strict=False))
                self._parts.append((slots[arg.name] // 8, steps))
            elif isinstance(arg, Map):
                kept = tensor_maps.Kept(arrays[arg.name], arg.box_rows)
                self._maps.append((len(self._arguments), slots[arg.name] // 8, kept))
                self._arguments.append((False, 0))
            else:
                if isinstance(arg, Constant):
                    arg = np.int64(address(arg.there))
                self._kept.append(np.zeros(1, np.int64) if arg is None else np.array(arg, copy=True))
                self._arguments.append((False, self._kept[-1].ctypes.data))
        self._values = ctypes.c_int64 * (len(slots) + len(self._parts))
        self._pointers = ctypes.c_int64 * len(self._arguments)

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launch on the arrays at these addresses, in the order of the names, on the stream of this handle."""
        values = self._values(*addresses, *[addresses[slot] + offset for slot, offset in self._parts])
        first = ctypes.addressof(values)
        pointers = self._pointers(*[first + place if in_slots else place for in_slots, place in self._arguments])
        for argument, slot, kept in self._maps:
            pointers[argument] = kept.pointer(addresses[slot])
        self._launch(self._function.ptr, *self._sizes, stream, ctypes.addressof(pointers), 0)


def _argument(arg: Any, arrays: Mapping[str, Any]) -> Any:
    """An argument of a launch, with the arrays in place of their names."""
    if isinstance(arg, str):
        return span(arrays[arg])
    if isinstance(arg, Part):
        return arrays[arg.name][arg.index]
    if isinstance(arg, Map):
        array = arrays[arg.name]
        return tensor_maps.tensor_map(Spec.of(array), address(array), box_rows=arg.box_rows)
    if isinstance(arg, Constant):
        return arg.there
    return arg
