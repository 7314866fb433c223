"""Planning: from a call's arrays and options to launches that need nothing more than addresses, forward and backward.

    ready, arrays, in_place = plan(stage, arrays, options)
    ready.bind(arrays)()

What is expensive depends on no shape: a kernel is compiled for dtypes and tile sizes, and its signature is compared
with the forms of its arguments once. Shapes, strides and addresses fill a struct and a grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from helpers import device
from helpers.attention import kernel
from helpers.attention.ladder import extras
from helpers.attention.ladder.call import Call, Options, Spec
from helpers.attention.ladder.launch import DirectLaunch, Launch
from helpers.attention.ladder.layout import address, four_axes, is_aligned

if TYPE_CHECKING:
    from helpers.attention.ladder.contract import Stage

WITH_HEAD_DIM = frozenset({"q", "k", "v", "o", "do", "dq", "dk", "dv"})  # the others are lse, cu_seqlens and extras
GRADIENTS = ("dq", "dk", "dv")


class Planned(NamedTuple):
    """A call's launches; its arrays as the kernels read them; and whether they are the caller's, with no copy."""

    ready: Ready
    arrays: dict[str, Any]
    in_place: bool


def plan(
    stage: Stage,
    arrays: Mapping[str, Any],
    options: Options,
    *,
    longest: tuple[int | None, int | None] = (None, None),
    source: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Planned:
    """The launches of a call that this stage can do, compiled.

    Args:
        arrays: device arrays by name. q, k, v and o, for gradients also do, dq, dk and dv: (..., rows, head_dim). lse,
            cu_seqlens_q, cu_seqlens_k and those of `extras.NAMES`, where there are such; the last are checked here.
            What is written is there, in a layout that the stage writes.
        options: as `Options.checked` returns them.
        longest: rows and keys of the longest sequence, where they are packed; keys may be left out in a forward.
        source: another text of the kernel. sizes: in place of the stage's own, such as {"BLOCK_M": 32}.

    Raises:
        TypeError, ValueError: an extra input does not fit q and k; more heads or sequences than a grid has room for.
    """
    read = {name: four_axes(a) if name in WITH_HEAD_DIM else a for name, a in arrays.items()}
    given = dict(read)
    written = GRADIENTS if "do" in read else ("o",)
    for name, a in read.items():
        if name in WITH_HEAD_DIM:
            read[name] = a if name in written else stage.readable(a)
        elif name not in extras.NAMES and not a.flags.c_contiguous:
            read[name] = device.cp.ascontiguousarray(a)
    (batch, _, n, _), n_kv = read["q"].shape, read["k"].shape[2]
    packed = "cu_seqlens_q" in read
    sequences = len(read["cu_seqlens_q"]) - 1 if packed else batch
    rows, keys = longest if packed else (n, n_kv)
    how = {"sequences": sequences, "packed": packed, "longest_k": keys, "aligned": stage.needs_aligned}
    read |= extras.as_kernels_read(read, **how)
    call = Call(
        {name: Spec.of(a) for name, a in read.items()},
        options.softmax_scale,
        options.window,
        rows=rows,
        sequences=sequences,
        aligned=all(is_aligned(a) for name, a in read.items() if name in WITH_HEAD_DIM),
        keys=keys or 0,
        deterministic=options.deterministic,
        rotary_interleaved=bool(options.rotary_interleaved),
        bias_aligned="bias" in read and address(read["bias"]) % 16 == 0,
    )
    in_place = all(a is given[name] or address(a) == address(given[name]) for name, a in read.items())
    return Planned(Ready(stage, call, stage.sizes_for(call, sizes), source), read, in_place)


class Ready:
    """A call's launches, planned and compiled. It depends on no address: see `bind` and `direct`."""

    def __init__(self, stage: Stage, call: Call, sizes: Mapping[str, int], source: str | None = None) -> None:
        """
        Args:
            sizes: the -D options. source: another text of the kernel in place of the stage's file.

        Raises:
            ValueError: more heads or sequences than a grid has room for; the source has no such kernel.
        """
        self.scratch = stage.scratch(call, sizes)
        self.launches = list(stage.launches(stage, call, sizes))
        self._specs = {**call.arrays, **self.scratch}
        dtype = call.arrays["q"].dtype.name
        names = {launch.kernel: stage.kernel_name(dtype, launch.kernel) for launch in self.launches}
        loaded = kernel.load_all(source or stage.file, tuple(names.values()), defines=sizes)
        self._kernels = [loaded[names[launch.kernel]] for launch in self.launches]

    @property
    def checked(self) -> bool:
        """Whether launches of these forms were bound before on this device: signatures compared, memory opted into."""
        return all(form in compiled.accepted for form, compiled in zip(self._forms(), self._kernels, strict=True))

    def _forms(self) -> list[tuple[Any, ...]]:
        number = device.cp.cuda.runtime.getDevice() if device.ON_GPU else 0
        return [(number, *launch.form(self._specs)) for launch in self.launches]

    def bind(self, arrays: Mapping[str, Any]) -> Callable[[], None]:
        """A function that launches on these arrays. Every argument is compared with the kernel's signature, now.

        Raises:
            TypeError, ValueError: as `helpers.attention.kernel.Kernel.bind`.
        """
        bound = []
        for launch, compiled, args in self.filled(arrays):
            bound.append(compiled.bind(launch.grid, launch.block, args, shared_mem=launch.shared_bytes))
        for form, compiled in zip(self._forms(), self._kernels, strict=True):
            compiled.accepted.add(form)

        def run(alive: Mapping[str, Any] = arrays) -> None:  # a tensor map does not keep its array alive
            for each in bound:
                each()

        return run

    def filled(self, arrays: Mapping[str, Any]) -> list[tuple[Launch, kernel.Kernel, tuple[Any, ...]]]:
        """Each launch with its kernel, and its arguments with arrays in place of their names; scratch is made here."""
        every = {**arrays, **{name: device.cp.empty(s.shape, dtype=s.dtype) for name, s in self.scratch.items()}}
        pairs = zip(self.launches, self._kernels, strict=True)
        return [(launch, compiled, launch.arguments(every)) for launch, compiled in pairs]

    def direct(self, names: Sequence[str]) -> list[DirectLaunch]:
        """The launches for a GPU without any check, for arrays that are like those of an earlier `bind`.

        Args:
            names: of the arrays and of those of `scratch`, in the order in which their addresses will be given.
        """
        slots = {name: 8 * i for i, name in enumerate(names)}
        pairs = zip(self.launches, self._kernels, strict=True)
        return [DirectLaunch(launch, compiled.function, slots, self._specs) for launch, compiled in pairs]
