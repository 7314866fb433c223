"""Plan an exported file: a stage's launches, with the sizes of a call as names instead of numbers.

The stage's own planner runs twice, on two sets of sizes that remember how they were computed. Values that are equal
both times are constants; those that differ must be sizes, or be computed from them, or else the export is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from helpers.attention import kernel
from helpers.attention.export.sizes import Size, Tree, names, tree_of, value
from helpers.attention.ladder import Stage, limits
from helpers.attention.ladder.call import Call, Spec
from helpers.attention.ladder.launch import Launch, Map, Part
from helpers.attention.ladder.layout import titles
from helpers.attention.ladder.limits import Limits
from helpers.attention.ladder.params import STRIDES, UNLIMITED
from helpers.attention.ladder.stages import hopper
from helpers.attention.ladder.tiles import KB
from helpers.engine.cuda_source import signatures
from helpers.engine.cuda_source.signatures import dtype_of

# Shared memory per block, and multiprocessors of a large GPU, by compute capability.
TARGETS: Mapping[str, Limits] = {
    "sm_75": Limits(64 * KB, 40, 75),
    "sm_80": Limits(163 * KB, 108, 80),
    "sm_86": Limits(99 * KB, 82, 86),
    "sm_89": Limits(99 * KB, 128, 89),
    "sm_90": Limits(227 * KB, 132, 90),
    "sm_100": Limits(227 * KB, 148, 100),
    "sm_120": Limits(99 * KB, 170, 120),
}
HEADERS = {"cuda_fp16.h", "cuda_bf16.h", "mma.h"}
NAMES = ("batch", "heads", "kv_heads", "n", "n_kv")
_PROBES = ((7, 22, 11, 5003, 6007), (5, 26, 13, 4801, 7001))
_SCALES = (0.0625, 0.125)
_LONG = 8192  # rows and keys of the call that chooses a variant's tiles
BACKWARD_ARRAYS = ("do", "dq", "dk", "dv")


class CannotExport(ValueError):
    """A stage or an option that cannot be exported to a single file; the message says why."""


@dataclass(frozen=True)
class Request:
    """The options of an export.

    window: (left, right), -1 for unlimited; causal is right = 0. target: the GPU that tiles are chosen for.
    """

    stage: Stage
    head_dim: int = 64
    dtype: str = "float32"
    window: tuple[int, int] = (-1, -1)
    return_lse: bool = False
    deterministic: bool = False
    target: Limits = TARGETS["sm_90"]

    @property
    def masked(self) -> bool:
        """True if some key is hidden from some row."""
        return self.window != (-1, -1)

    @property
    def backward(self) -> bool:
        """True if the stage computes gradients."""
        return self.stage.direction == "backward"

    @property
    def gqa(self) -> bool:
        """True if k and v may have fewer heads than q."""
        return "gqa" in self.stage.features

    @property
    def step(self) -> int | None:
        """The exponent of a half type's spacing above 1, 2**step; None for float32."""
        return {"float16": -10, "bfloat16": -7}.get(self.dtype)

    @property
    def model_layout(self) -> bool:
        """True for strided arrays (batch, rows, heads, head_dim); False for (batch, heads, rows, head_dim)."""
        return "strides" in self.stage.features


@dataclass(frozen=True)
class Argument:
    """One argument of a launch.

    kind: "array", "head" (the array's part for one head), "map" (its tensor map for copies of `box_rows` rows), "null",
        "int", "scale", "struct". heads_first: of a map's array, (batch, heads, rows, head_dim).
    """

    kind: str
    name: str = ""
    tree: Tree = ()
    box_rows: int = 0
    heads_first: bool = False


@dataclass(frozen=True)
class Field:
    """One field of the struct that a kernel takes by value.

    kind: "strides" of the array `array`, "int", "scale", "struct" with `fields`.
    """

    name: str
    kind: str
    array: str = ""
    tree: Tree = ()
    fields: tuple[Field, ...] = ()

    @property
    def trees(self) -> tuple[Tree, ...]:
        """The sizes that the argument depends on, including its fields'."""
        return tuple(tree for field in self.fields for tree in field.trees) + ((self.tree,) if self.tree else ())


@dataclass(frozen=True)
class Struct:
    """A struct that a kernel takes by value. type: its name in the kernel's file. dtype: NumPy's."""

    type: str
    dtype: np.dtype
    fields: tuple[Field, ...]

    @property
    def trees(self) -> tuple[Tree, ...]:
        """Sizes that the fields depend on."""
        return tuple(tree for field in self.fields for tree in field.trees)


@dataclass(frozen=True)
class PlannedLaunch:
    """One launch, or one per head. kernel: as the compiler names it, with an instance's type."""

    kernel: str
    grid: tuple[Tree, ...]
    block: tuple[Tree, ...]
    shared_bytes: int
    args: tuple[Argument, ...]
    each_head: bool = False


@dataclass(frozen=True)
class Plan:
    """Everything that an exported file launches.

    defines: the -D options. files: the kernels' source files. scratch: name -> (shape, dtype) of arrays used between
        launches. structs: parameter name -> struct.
    """

    request: Request
    defines: Mapping[str, int]
    launches: tuple[PlannedLaunch, ...]
    files: tuple[str, ...]
    scratch: Mapping[str, tuple[tuple[Tree, ...], np.dtype]] = field(default_factory=dict)
    structs: Mapping[str, Struct] = field(default_factory=dict)

    @property
    def table(self) -> bool:
        """True if a launch takes a table of tiles."""
        return "schedule" in self.scratch

    @property
    def maps(self) -> set[str]:
        """Names of the arrays that launches read or write by tensor maps."""
        return {arg.name for launch in self.launches for arg in launch.args if arg.kind == "map"}

    @property
    def mapped_dtype(self) -> str:
        """The common dtype of all `maps`."""
        (dtype,) = {self.scratch[name][1].name if name in self.scratch else self.request.dtype for name in self.maps}
        return dtype

    @property
    def vectors(self) -> bool:
        """True if the kernels read 16 bytes at a time, so that rows have to start at multiples of 16 bytes."""
        stage = self.request.stage
        known = stage.needs_aligned or "VECTOR" in kernel.source(stage.file)
        return known and bool(self.defines.get("VECTOR", 1))

    @property
    def any_rows(self) -> bool:
        """True if views are read in place, as long as their rows are contiguous and aligned."""
        return self.request.model_layout and self.vectors

    @property
    def wmma(self) -> bool:
        """True if the kernel includes mma.h, which includes a header that CuPy does not pass to NVRTC."""
        return "<mma.h>" in kernel.source(self.request.stage.file)

    @property
    def options(self) -> list[str]:
        """The compiler's options."""
        stage = self.request.stage
        arch = [f"-arch={stage.architecture(stage.min_cc)}"] if stage.only_cc else []
        return ["-std=c++17", *(f"-D{name}={value}" for name, value in self.defines.items()), *arch]

    @property
    def templates(self) -> list[str]:
        """The kernels that are instances of templates, by name."""
        return [launch.kernel for launch in self.launches if "<" in launch.kernel]

    @property
    def kernels(self) -> list[str]:
        """The kernels by name; only the instances if there are some."""
        return self.templates or [launch.kernel for launch in self.launches]

    @property
    def unlimited(self) -> bool:
        """True if a struct has a window without a limit on one side."""
        return ("number", UNLIMITED) in (tree for struct in self.structs.values() for tree in struct.trees)

    @property
    def used(self) -> set[str]:
        """The sizes and the constants that the launches name."""
        trees = [tree for launch in self.launches for tree in (*launch.grid, *launch.block)]
        trees += [arg.tree for launch in self.launches for arg in launch.args if arg.tree]
        trees += [tree for sizes, _ in self.scratch.values() for tree in sizes]
        trees += [tree for struct in self.structs.values() for tree in struct.trees]
        used = set().union(*map(names, trees))
        if self.table:
            used |= {"batch", "heads", "kv_heads", "n", "n_kv"}
        if self.request.return_lse or any(launch.each_head for launch in self.launches):
            used |= {"batch", "heads"} | ({"n"} if self.request.return_lse else set())
        return used

    @property
    def own_sizes(self) -> dict[str, int]:
        """The sizes of tiles that the launches name, with their values."""
        return {name: value for name, value in self.defines.items() if name in self.used - {"HEAD_DIM"}}


def plan(request: Request) -> Plan:
    """Plan the launches of a stage for calls of any size.

    Raises:
        CannotExport: the stage does not support the request, on that GPU or at all; or needs an argument that exported
            files cannot express.
    """
    stage = request.stage
    if request.backward and request.return_lse:
        raise CannotExport(f"stage {stage.name} cannot: gradients start from lse and do not return it; leave --lse out")
    with limits.pretend_gpu(request.target):
        left, right = request.window
        window = (left, right) if request.masked and (left, right) != (-1, 0) else None
        needs: dict[str, Any] = {"head_dim": request.head_dim, "dtype": request.dtype, "return_lse": request.return_lse}
        reason = stage.why_not(**needs, causal=right == 0, window=window, deterministic=request.deterministic)
        if reason:
            raise CannotExport(f"stage {stage.name} cannot: {reason}")
        if stage.out_dtypes:
            types = f"{titles(*stage.dtypes)} and returns {titles(*stage.out_dtypes)}"
            raise CannotExport(f"stage {stage.name} takes {types}: an exported file has one type for all arrays")
        if others := set(re.findall(r"^#include <([^>]+)>", kernel.source(stage.file), re.M)) - HEADERS:
            raise CannotExport(f"{stage.file} includes <{min(others)}>, which does not come with CUDA")
        defines = dict(stage.defines(request.head_dim))
        long = dict(zip(NAMES, (1, 16, 16, _LONG, _LONG), strict=True))
        defines.update(stage.variant(call_of(request, long, 1.0)))
        defines.pop("PERSISTENT", None)  # for a grid sized by the GPU's multiprocessors, which a file does not know
    sizes = {name: Size.constant(name, size) for name, size in defines.items()}
    probes = [_Probe(request, sizes, numbers, scale) for numbers, scale in zip(_PROBES, _SCALES, strict=True)]
    return _explain(request, defines, *probes)


class _Probe:
    """The stage's plan for one set of sizes."""

    def __init__(self, request: Request, sizes: Mapping[str, int], numbers: tuple[int, ...], scale: float) -> None:
        self.numbers = dict(zip(NAMES, numbers, strict=True))
        self.scale = scale
        if "gqa" not in request.stage.features:
            self.numbers["kv_heads"] = self.numbers["heads"]
        named = {name: Size.named(name, number) for name, number in self.numbers.items()}
        if "gqa" not in request.stage.features:
            named["kv_heads"] = named["heads"]
        self.call = call_of(request, named, scale)
        blocks = request.target.multiprocessors + self.numbers["batch"]  # differs between the probes
        multiprocessors = Size.named("multiprocessors", blocks)
        with limits.pretend_gpu(request.target._replace(multiprocessors=multiprocessors)):
            self.launches = list(request.stage.launches(request.stage, self.call, sizes))
            self.scratch = dict(request.stage.scratch(self.call, sizes))
            if "schedule" in self.scratch:
                together = hopper.heads_together(self.call, sizes)
                rounds = self.scratch["schedule"].shape[0]
                self.numbers |= {"multiprocessors": blocks, "together": int(together), "rounds": int(rounds)}


def call_of(request: Request, named: Mapping[str, int], scale: float) -> Call:
    """Make a call with these sizes. No two of its arrays have the same strides."""
    batch, heads, kv_heads, n, n_kv = (named[name] for name in NAMES)
    d, dtype = request.head_dim, dtype_of(request.dtype)
    rows = {name: (batch, heads, n, d) for name in ("q", "o", "do", "dq")}
    rows |= {name: (batch, kv_heads, n_kv, d) for name in ("k", "v", "dk", "dv")}
    names = ["q", "k", "v", "o", *(BACKWARD_ARRAYS if request.backward else ())]
    arrays = {}
    for i, name in enumerate(names):
        steps = (10**12 + 16 * i, 10**6 + 16 * i, 10**9 + 16 * i, 1)
        arrays[name] = Spec(rows[name], tuple(step * dtype.itemsize for step in steps), dtype)
    if request.return_lse or request.backward:
        arrays["lse"] = Spec.dense((batch, heads, n), np.float32)
    return Call(
        arrays,
        scale,
        request.window,
        rows=n,
        sequences=batch,
        aligned=d * dtype.itemsize % 16 == 0,
        keys=n_kv,
        deterministic=request.deterministic,
    )


def _explain(request: Request, defines: Mapping[str, int], a: _Probe, b: _Probe) -> Plan:
    """Combine the two probes' plans; a number that differs becomes a size by name."""
    if any(isinstance(arg, Part) for launch in a.launches for arg in launch.args):
        pairs = [(_one_of_all_heads(request, a), _one_of_all_heads(request, b))]
    else:
        pairs = list(zip(a.launches, b.launches, strict=True))
    text = kernel.source(request.stage.file)
    structs: dict[str, Struct] = {}
    planned = []
    for first, second in pairs:
        where = f"{request.stage.name}: a launch of {first.kernel}"
        args = []
        parameters = signatures.from_source(kernel.source(first.file) if first.file else text, first.kernel) or []
        for parameter, x, y in zip(parameters, first.args, second.args, strict=True):
            here = f"{where}, argument {parameter.name}"
            if isinstance(x, np.ndarray) and x.dtype.names and x.size == 1:
                struct = Struct(parameter.type, x.dtype, _fields(x[0], y[0], a, b, here))
                if structs.setdefault(parameter.name, struct) != struct:
                    raise CannotExport(f"{here} is not what another launch takes under that name")
                args.append(Argument("struct", parameter.name))
            else:
                args.append(_argument(x, y, a, b, here))
        if first.shared_bytes != second.shared_bytes:
            raise CannotExport(f"{where} has shared memory that depends on the call")
        planned.append(
            PlannedLaunch(
                first.kernel if first.file else request.stage.kernel_name(request.dtype, first.kernel),
                tuple(_size(x, y, a, b, f"{where}, grid") for x, y in zip(first.grid, second.grid, strict=True)),
                tuple(_size(x, y, a, b, f"{where}, block") for x, y in zip(first.block, second.block, strict=True)),
                int(first.shared_bytes),
                tuple(args),
                each_head=any(isinstance(arg, Part) for arg in first.args),
            )
        )
    scratch = {
        name: (
            tuple(
                _size(x, y, a, b, f"{request.stage.name}: {name}")
                for x, y in zip(spec.shape, b.scratch[name].shape, strict=True)
            ),
            np.dtype(spec.dtype),
        )
        for name, spec in a.scratch.items()
    }
    files = dict.fromkeys([request.stage.file, *(first.file for first, _ in pairs if first.file)])
    return Plan(request, defines, tuple(planned), tuple(files), scratch, structs)


def _one_of_all_heads(request: Request, probe: _Probe) -> Launch:
    """Return the first head's launch of a stage that launches per head, if the others differ only in the head."""
    heads = list(np.ndindex(probe.numbers["batch"], probe.numbers["heads"]))
    first, same = probe.launches[0], len(heads) == len(probe.launches)
    for head, launch in zip(heads, probe.launches, strict=False):
        args = tuple(
            Part(arg.name, heads[0]) if arg == Part(getattr(arg, "name", ""), head) else arg for arg in launch.args
        )
        same &= (launch.kernel, launch.grid, launch.block, args) == (first.kernel, first.grid, first.block, first.args)
    if not same:
        raise CannotExport(f"stage {request.stage.name} has launches for parts of arrays, and not one for each head")
    return first


def _size(x: int, y: int, a: _Probe, b: _Probe, where: str) -> Tree:
    """Find the tree of a size that is x in one probe and y in the other. Raises CannotExport if there is none."""
    tree = tree_of(x)
    if _agrees(tree, x, y, a, b):
        return tree
    for name in (*NAMES, *a.numbers):
        if _agrees(("name", name), x, y, a, b):
            return "name", name
    raise CannotExport(f"{where}: {int(x)} for one call and {int(y)} for another; no size of the call explains it")


def _agrees(tree: Tree, x: int, y: int, a: _Probe, b: _Probe) -> bool:
    return (value(tree, a.numbers), value(tree, b.numbers)) == (x, y)


def _argument(x: Any, y: Any, a: _Probe, b: _Probe, where: str) -> Argument:
    if x is None or isinstance(x, str):
        return Argument("null" if x is None else "array", x or "")
    if isinstance(x, Part):
        return Argument("head", x.name)
    if isinstance(x, Map):
        return Argument("map", x.name, box_rows=int(x.box_rows), heads_first=x.name in a.scratch)
    if isinstance(x, np.float32) and (x, y) == (np.float32(a.scale), np.float32(b.scale)):
        return Argument("scale", "softmax_scale")
    if isinstance(x, np.int32):
        return Argument("int", tree=_size(int(x), int(y), a, b, where))
    raise CannotExport(f"{where} is a {type(x).__name__}; an exported file does not know what to give for it")


def _fields(x: Any, y: Any, a: _Probe, b: _Probe, where: str) -> tuple[Field, ...]:
    """Find the source of each value in a struct."""
    described = []
    for name in x.dtype.names:
        mine, other = x[name], y[name]
        if x.dtype[name] == STRIDES:
            described.append(Field(name, "strides", array=_array_with(mine, name, a, where)))
        elif x.dtype[name].names:
            described.append(Field(name, "struct", fields=_fields(mine, other, a, b, where)))
        elif x.dtype[name] == np.float32:
            if (mine, other) != (np.float32(a.scale), np.float32(b.scale)):
                raise CannotExport(f"{where}: the field {name} is a number that is not softmax_scale")
            described.append(Field(name, "scale"))
        else:
            described.append(Field(name, "int", tree=_size(int(mine), int(other), a, b, f"{where}, field {name}")))
    return tuple(described)


def _array_with(strides: Any, name: str, a: _Probe, where: str) -> str:
    """Find the array with these (batch, row, head) strides."""
    for array, spec in a.call.arrays.items():
        batch, head, row, *_ = (step // np.dtype(spec.dtype).itemsize for step in spec.strides)
        if (batch, row, head) == tuple(map(int, strides)):
            return array
    raise CannotExport(f"{where}: the strides in field {name} are those of no array")
