"""Planning: from a call's arrays and options to launches that need nothing more than addresses, forward and backward.

    ready, arrays = plan(stage, arrays, options)
    ready.bind(arrays)()

What is expensive depends on no shape: a kernel is compiled for dtypes and tile sizes, and its signature is compared
with its arguments once. Shapes and strides fill structs and a grid, and addresses come last.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from helpers import device
from helpers.attention import kernel
from helpers.attention.ladder.call import WITH_HEAD_DIM, Call, Options
from helpers.attention.ladder.launch import Arguments, DirectLaunch, Launch
from helpers.attention.ladder.launches import of_rotated, rotated
from helpers.attention.ladder.layout import Spec, dense_copy, four_axes, negative
from helpers.attention.ladder.score_mod import ScoreMod, block_mask

if TYPE_CHECKING:
    from helpers.attention.ladder.contract import Stage

GRADIENTS = ("dq", "dk", "dv")
T = TypeVar("T")


class Latest(OrderedDict[tuple[Hashable, ...], T]):
    """What was planned, by key, the latest alone: lengths that change at every call would else fill the memory."""

    most = 256

    def keep(self, key: tuple[Hashable, ...], planned: T) -> None:
        """Add it, and forget the oldest where there are too many."""
        self[key] = planned
        if len(self) > self.most:
            with contextlib.suppress(KeyError):  # another thread has just forgotten them
                self.popitem(last=False)


def plan(
    stage: Stage,
    arrays: Mapping[str, Any],
    options: Options,
    *,
    longest: tuple[int | None, int | None] = (None, None),
    source: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> tuple[Ready, dict[str, Any]]:
    """The launches of a call that this stage can do, compiled; and its arrays as the kernels read them.

    Args:
        arrays: device arrays by name. q, k, v and o, for gradients also do, dq, dk and dv: (..., rows, head_dim). lse,
            cu_seqlens_q, cu_seqlens_k and those of `extras.NAMES`, where there are such; the last are checked here.
            What is written is there, in a layout that the stage writes.
        options: as `Options.checked` returns them.
        longest: rows and keys of the longest sequence, where they are packed; keys may be left out in a forward.
        source: another text of the kernel. sizes: in place of the stage's own, such as {"BLOCK_M": 32}.

    Raises:
        TypeError, ValueError: an extra input does not fit q and k; the call has more tiles than a grid has room for.
    """
    read = {name: four_axes(a) if name in WITH_HEAD_DIM else a for name, a in arrays.items()}
    call = Call.of({name: Spec.of(a) for name, a in read.items()}, options, longest)
    copies = {name: dense_copy(read[name]) for name in stage.unreadable(call)}
    if stage.direction == "forward" and call.softmax_scale < 0:  # kernels find maxima before they scale the scores
        copies["q"] = negative(read["q"])
        options = options._replace(softmax_scale=-call.softmax_scale)
    if copies:
        return plan(stage, read | copies, options, longest=longest, source=source, sizes=sizes)
    return Ready(stage, call, stage.sizes_for(call, sizes), source), read


def _with_functions(mod: ScoreMod, stage: Stage, file_or_code: str) -> str:
    """The text of a kernel behind the caller's functions, if it has a place for them."""
    code = file_or_code if "\n" in file_or_code else kernel.source(file_or_code)
    if "HOOK_PARAMETERS" not in code:
        return code
    backward = stage.direction == "backward"
    return mod.text(backward=backward, pairs=not backward and "float32" not in stage.dtypes) + code


class Ready:
    """A call's launches, planned and compiled. It depends on no address: see `bind` and `direct`."""

    def __init__(
        self,
        stage: Stage,
        call: Call,
        sizes: Mapping[str, int],
        source: str | None = None,
        like: Ready | None = None,
    ) -> None:
        """
        Args:
            sizes: the -D options. source: another text of the kernel in place of the stage's file.
            like: another call's, of the same arrays but for shapes and strides, and sizes: then nothing is compiled.

        Raises:
            ValueError: more tiles than a grid has room for; the source has no such kernel.
        """
        kernel.COUNTS["planned"] += 1
        before: list[Launch] = []
        self.scratch: dict[str, Spec] = {}
        given = call
        if "rotary_cos" in call.arrays and "rotates" not in stage.features:
            before, self.scratch, call = rotated(call)
        self.scratch |= {**stage.scratch(call, sizes), **block_mask(stage, call, sizes)}
        launches = stage.launches(stage, call, sizes)
        self.launches = [*before, *(map(of_rotated, launches) if before else launches)]
        self._specs = {**given.arrays, **self.scratch}
        self.kernels: dict[str, kernel.Kernel] = like.kernels if like else {}
        self.arguments: dict[tuple[Any, ...], Arguments] = like.arguments if like else {}
        if like is None:
            dtype = call.arrays["q"].dtype.name
            names = {each.kernel: stage.kernel_name(dtype, each.kernel) for each in self.launches if not each.file}
            others = {each.kernel: (each.file, dict(each.sizes)) for each in self.launches if each.file}
            text = (lambda file: file) if call.mod is None else partial(_with_functions, call.mod, stage)
            jobs = [partial(kernel.load_all, text(source or stage.file), tuple(names.values()), defines=sizes)]
            jobs += [partial(kernel.load, text(file), name, defines=of) for name, (file, of) in others.items()]
            with call.mod.explained() if call.mod else contextlib.nullcontext():
                loaded, *loaded_others = kernel.side_by_side(jobs)
            self.kernels = {name: loaded[instance] for name, instance in names.items()}
            self.kernels |= zip(others, loaded_others, strict=True)

    def bind(self, arrays: Mapping[str, Any]) -> Callable[[], None]:
        """A function that launches on these arrays. Every argument is compared with the kernel's signature, now.

        Raises:
            TypeError, ValueError: as `helpers.attention.kernel.Kernel.bind`.
        """
        bound = []
        for launch, compiled, args in self.filled(arrays):
            bound.append(compiled.bind(launch.grid, launch.block, args, shared_mem=launch.shared_bytes))

        def run(alive: Mapping[str, Any] = arrays) -> None:  # a tensor map does not keep its array alive
            for each in bound:
                each()

        return run

    def filled(self, arrays: Mapping[str, Any]) -> list[tuple[Launch, kernel.Kernel, tuple[Any, ...]]]:
        """Each launch with its kernel, and its arguments with arrays in place of their names; scratch is made here."""
        every = {**arrays, **{name: device.cp.empty(s.shape, dtype=s.dtype) for name, s in self.scratch.items()}}
        return [(launch, self.kernels[launch.kernel], launch.arguments(every)) for launch in self.launches]

    def direct(self, names: Sequence[str]) -> list[DirectLaunch]:
        """The launches for a GPU without any check, for calls like one whose arguments `bind` has compared.

        Args:
            names: of the arrays and of those of `scratch`, in the order in which their addresses will be given.
        """
        slots = {name: 8 * i for i, name in enumerate(names)}
        direct = []
        for launch in self.launches:
            form = launch.kernel, *map(type, launch.args)  # of many heads a launch takes parts of arrays
            if form not in self.arguments:
                self.arguments[form] = Arguments(launch, self.kernels[launch.kernel].function, slots)
            direct.append(DirectLaunch(self.arguments[form], launch, slots, self._specs))
        return direct
