"""Render a stage as one file from the templates: for CuPy, for PyTorch, or for nvcc.

templates/ holds each file as it will read: cupy.py.jinja and torch.py.jinja, both inside python.py.jinja, which repeats
launches.py.jinja for each plan; and nvcc.cu.jinja. This module has what a template cannot express: the sizes of
launches as Python and as C++, and line breaks after 120 characters.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np

from helpers.attention import kernel
from helpers.attention.export.plan import Argument, CannotExport, Field, Plan, PlannedLaunch, Request, plan
from helpers.attention.export.sizes import Tree, cpp, python
from helpers.attention.ladder import BACKWARD, FORWARD, Stage
from helpers.attention.ladder.params import STRIDES, UNLIMITED
from helpers.attention.ladder.stages.hopper import group_of_heads, heads_that_fit, in_order, longest_block
from helpers.attention.ladder.tiles import KB
from helpers.engine import nvrtc

_WIDTH = 120
_ROOT = Path(__file__).resolve().parents[3]
_CPP_TYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16", "int32": "int"}
_TO_FLOAT = {"float32": "%s", "float16": "__half2float(%s)", "bfloat16": "__bfloat162float(%s)"}
_FROM_FLOAT = {"float32": "%s", "float16": "__float2half(%s)", "bfloat16": "__float2bfloat16(%s)"}


class Sizes(NamedTuple):
    """Sizes of the arrays that a file checks itself with."""

    batch: int
    n: int
    n_kv: int
    heads: int
    kv_heads: int


def for_cupy(request: Request, sizes: Sizes) -> str:
    """Render the Python file for CuPy's arrays, which checks itself against NumPy.

    Raises:
        CannotExport: see `helpers.attention.export.plan.plan`; the same for the other forms.
    """
    return _python("cupy.py.jinja", plan(request), sizes)


def for_torch(request: Request, sizes: Sizes) -> str:
    """Render the Python file for PyTorch's tensors, which checks itself against PyTorch's math attention.

    A forward stage comes with the last backward stage that has its gradients, and vice versa. CuPy compiles the kernels
    and launches them, on PyTorch's current stream; all memory comes from PyTorch's allocator.

    Raises:
        CannotExport: see `for_cupy`; or no forward stage keeps the lse that a backward pass needs.
    """
    forward, backward = _both(request)
    return _python("torch.py.jinja", forward, sizes, backward=backward, with_lse=request.return_lse)


def for_nvcc(request: Request, sizes: Sizes) -> str:
    """Render the .cu file: the kernel, its launches, and a main() that compares with loops in double.

    Raises:
        CannotExport: see `for_cupy`; or a launch takes tensor maps or a table of tiles.
    """
    planned = plan(request)
    if planned.maps or planned.table:
        raise CannotExport(
            f"the .cu form has no host code for the tensor maps and the table of tiles of {request.stage.name}; "
            "the Python form has (leave --cpp out)"
        )
    rows = {name: f"n_kv, {_kv_heads(request)}" if name in ("k", "v", "dk", "dv") else "n, heads" for name in _ARRAYS}
    return _render(
        "nvcc.cu.jinja",
        planned,
        sizes,
        kernel_text=_kernel_text(request.stage.file),
        types=_CPP_TYPES,
        to_float=_TO_FLOAT[request.dtype],
        from_float=_FROM_FLOAT[request.dtype],
        field_lines=partial(_fields, tree=cpp, rows=rows, brackets="{}", comment="//"),
        elements=_elements,
        geometry=_geometry,
        arguments=lambda launch: ", ".join(map(_cpp_argument, launch.args)),
    )


_ARRAYS = ("q", "k", "v", "o", "do", "dq", "dk", "dv")


def _python(template: str, planned: Plan, sizes: Sizes, *, backward: Plan | None = None, **more: Any) -> str:
    dtypes: dict[np.dtype, str] = {}  # the forward's are also the backward's
    return _render(
        template,
        planned,
        sizes,
        torch=template == "torch.py.jinja",
        backward=backward,
        defines=_defines(planned),
        structs=_struct_dtypes(planned, dtypes),
        backward_structs=_struct_dtypes(backward, dtypes) if backward else [],
        header_folder=re.sub(" -> [^:]+|: str", "", inspect.getsource(nvrtc.header_folder)),  # without types
        group_of_heads="\n\n".join(map(inspect.getsource, (group_of_heads, heads_that_fit, longest_block, in_order))),
        numbers=sizes if planned.request.gqa else sizes[:4],
        field_lines=partial(_fields, tree=python, rows=dict(zip(_ARRAYS, _ARRAYS, strict=True))),
        **more,
    )


def _render(template: str, planned: Plan, sizes: Sizes, **more: Any) -> str:
    request = planned.request
    text = _TEMPLATES.get_template(template).render(
        plan=planned,
        request=request,
        sizes=sizes,
        about=_about(planned),
        licence=_licence(),
        q_shape=_shape(request, "n", "heads"),
        k_shape=_shape(request, "n_kv", _kv_heads(request)),
        window=partial(_window, request),
        **more,
    )
    return text.strip("\n") + "\n"


def _kv_heads(request: Request) -> str:
    return "kv_heads" if request.gqa else "heads"


def _shape(request: Request, rows: str, heads: str) -> str:
    return f"(batch, {rows}, {heads}, HEAD_DIM)" if request.model_layout else f"(batch, {heads}, {rows}, HEAD_DIM)"


def _both(request: Request) -> tuple[Plan, Plan | None]:
    """Plan the forward pass, which keeps lse if there is a backward pass; and the backward pass, if there is one."""
    if request.backward:
        backward = plan(replace(request, return_lse=False))
        forward = _last(FORWARD, replace(request, return_lse=True, deterministic=False))
        if forward is None:
            raise CannotExport(f"no stage that can be exported keeps the lse that {request.stage.name} starts from")
        return forward, backward
    backward = None
    if "lse" in request.stage.features:
        anywhere = {name: stage for name, stage in BACKWARD.items() if stage.only_cc <= request.stage.only_cc}
        backward = _last(anywhere, replace(request, return_lse=False))
    if backward is None:
        return plan(request), None
    return plan(replace(request, return_lse=True, deterministic=False)), backward


def _last(stages: Mapping[str, Stage], request: Request) -> Plan | None:
    """Plan the request with the last of these stages that can be exported for it."""
    for stage in reversed(stages.values()):
        try:
            return plan(replace(request, stage=stage))
        except CannotExport:
            continue
    return None


# ---- common to all forms


def _about(planned: Plan) -> list[str]:
    """Write the first lines of a file: what it computes, from which file, and for which GPUs."""
    request = planned.request
    stage = request.stage
    left, right = request.window
    mask = "no mask"
    if (left, right) == (-1, 0):
        mask = "causal: the last row sees all keys, each row before it one key less"
    elif request.masked:
        sides = [f"{size} keys {word}" for size, word in ((left, "before"), (right, "after")) if size >= 0]
        mask = f"a row sees its own position and at most {' and '.join(sides)} it"
    least = max(stage.min_cc, 80 if request.dtype == "bfloat16" else 0)
    needs = [f"compute capability {least / 10}{' and no other' if stage.only_cc else ' or newer'}"] if least else []
    shared = max(launch.shared_bytes for launch in planned.launches)
    if shared > 48 * KB:
        needs.append(f"{shared:,} bytes of shared memory for a block")
    tiles = f"with tiles for sm_{request.target.compute_capability}"
    return [
        f"{stage.idea[:1].upper()}{stage.idea[1:]}." if request.backward else f"Attention in CUDA: {stage.idea}.",
        f"{request.dtype}, head dimension {request.head_dim}; {mask}.",
        *([f"Needs {' and '.join(needs)}."] if needs else []),
        f"The kernel is {stage.file}, stage {stage.number} of the course, {tiles}.",
    ]


def _licence() -> list[str]:
    """Return two lines: the licence's name and its holder."""
    owner = re.search(r"^Copyright.*$", (_ROOT / "LICENSE").read_text(encoding="utf-8"), re.M)
    return ["SPDX-License-Identifier: MIT", owner.group(0) if owner else ""]


def _kernel_text(*files: str) -> str:
    """Paste the kernels' files and their headers together, each once, without what only pasting needs."""
    first, *others = files
    text = kernel.source(first)
    if others:
        text = kernel.with_headers("".join(f'#include "{file}"\n' for file in files), "all")
    lines = []
    for line in text.splitlines():
        begin = re.match(r'#line (\d+) "(.*)"', line)
        if begin:
            opened = begin.group(1) == "1" and begin.group(2) not in (first, "all")
            lines += ["", f"// ---- {begin.group(2)}"] if opened else []
        elif line.strip() != "#pragma once":
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines).strip("\n")) + "\n"


def _window(request: Request, before: str, after: str, both: str) -> str:
    """Write the condition of a window. before, after: its two sides, "%d" for a number of keys; both: joins them."""
    left, right = request.window
    sides = [form % size for form, size in ((before, left), (after, right)) if size >= 0]
    sides = [re.sub(" [+-] 0$", "", side) for side in sides]
    return f" {both} ".join(f"({side})" if len(sides) > 1 and both != "&&" else side for side in sides)


def _fields(
    fields: Iterable[Field],
    *,
    tree: Callable[[Tree], str],
    rows: Mapping[str, str],
    brackets: str = "()",
    comment: str = "#",
) -> list[str]:
    """Write the values of a struct's fields, one a line, with the field's name if the value does not show it."""
    lines = []
    for field in fields:
        if field.kind == "struct":
            inner = _fields(field.fields, tree=tree, rows=rows, brackets=brackets, comment=comment)
            named = f"  # {field.name}" if comment == "#" else ""
            lines += [brackets[0], *(f"    {line}" for line in inner), f"{brackets[1]},{named}"]
        elif field.kind == "int" and field.tree[0] == "number":
            lines.append(f"{_value(field, tree, rows)},  {comment} {field.name}")
        else:
            lines.append(f"{_value(field, tree, rows)},")
    return lines


def _value(field: Field, tree: Callable[[Tree], str], rows: Mapping[str, str]) -> str:
    if field.kind == "strides":
        return f"strides({rows[field.array]})"
    if field.kind == "scale":
        return "softmax_scale"
    return "UNLIMITED" if field.tree == ("number", UNLIMITED) else tree(field.tree)


# ---- Python


def _fit(opening: str, items: Iterable[str], closing: str, *, call: bool = False) -> str:
    """Lay out the contents of brackets like ruff: on one line if they fit, else one item a line.

    call: the items are arguments, which may also share a separate line.
    """
    items = list(items)
    inside, indent = ", ".join(items), re.match(" *", opening).group(0)
    comma = "," if len(items) == 1 and not call else ""
    if len(one := f"{opening}{inside}{comma}{closing}") <= _WIDTH:
        return one
    inner = [f"{indent}    {inside}"] if call else []
    if not call or len(inner[0]) > _WIDTH:
        inner = [f"{indent}    {item}," for item in items]
    return "\n".join([opening, *inner, f"{indent}{closing}"])


def _defines(planned: Plan) -> str:
    names, values = ", ".join(planned.defines), ", ".join(map(str, planned.defines.values()))
    if len(one := f"{names} = {values}  # compiled into the kernel") <= _WIDTH:
        return one
    return "\n".join(f"{name} = {value}" for name, value in planned.defines.items())


def _struct_dtypes(planned: Plan, done: dict[np.dtype, str]) -> list[str]:
    """Define the dtypes of the structs that are not defined yet, by their constants' names."""
    lines = []
    for struct in planned.structs.values():
        lines += _dtypes(struct.dtype, _constant(struct.type), done)
        done[struct.dtype] = _constant(struct.type)
    return lines


def _dtypes(dtype: np.dtype, name: str, done: dict[np.dtype, str]) -> list[str]:
    """Define a struct's dtype, after those of the structs in it."""
    lines, fields = [], []
    for field in dtype.names or ():
        inner = dtype[field]
        if inner.names and inner not in done:
            kind = "STRIDES" if inner == STRIDES else field.upper()
            lines += _dtypes(inner, kind, done)
            done[inner] = kind
        fields.append(f'("{field}", {done[inner] if inner.names else f"np.{inner.name}"})')
    one = f"{name} = np.dtype([{', '.join(fields)}], align=True)"
    if len(one) <= _WIDTH:
        return [*lines, one]
    rows = [f"        {field}," for field in fields]
    return [*lines, f"{name} = np.dtype(", "    [", *rows, "    ],", "    align=True,", ")"]


def _constant(type_: str) -> str:
    """Write a struct's name as a constant: AttentionParams is ATTENTION_PARAMS."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type_).upper()


def _unpacked(planned: Plan) -> list[tuple[str, str]]:
    """Return the sizes that a launch takes from q's and from k's shape, such as ("batch, n, heads, _", "q")."""
    of_q, of_k = ["batch", "n", "heads", "_"], ["_", "n_kv", "kv_heads", "_"]
    lines = []
    for array, axes in (("q", of_q), ("k", of_k)):
        if not planned.request.model_layout:
            axes = [axes[0], axes[2] if array == "q" else "_", axes[1], axes[3]]
        axes = [axis if axis in planned.used else "_" for axis in axes]
        if set(axes) != {"_"}:
            lines.append((", ".join(axes), array))
    return lines


def _launches(planned: Plan, prefix: str) -> str:
    """Write the launches. prefix: that of the module with the kernels."""
    lines = []
    for launch in planned.launches:
        indent = "    "
        if launch.each_head:
            lines.append("    for head in np.ndindex(batch, heads):")
            indent += "    "
        args = [_python_argument(arg) for arg in launch.args]
        one = f"{indent}args = {', '.join(args)}"
        lines.append(one if len(one) <= _WIDTH else _fit(f"{indent}args = (", args, ")"))
        items = [f'"{launch.kernel}"', _row(launch.grid), _row(launch.block[:1]), "args"]
        items += [str(launch.shared_bytes)] * bool(launch.shared_bytes)
        items += [f"module={prefix.lower()}module"] * bool(prefix)
        lines.append(_fit(f"{indent}launch(", items, ")", call=True))
    return "\n".join(lines)


def _python_argument(arg: Argument) -> str:
    if arg.kind == "head":
        return f"{arg.name}[head]"
    if arg.kind == "map":
        swapped = ".swapaxes(1, 2)" if arg.heads_first else ""
        return f"tensor_map({arg.name}{swapped}, {arg.box_rows})"
    if arg.kind == "null":
        return "None"
    if arg.kind == "int":
        return f"np.int32({python(arg.tree)})"
    return "np.float32(softmax_scale)" if arg.kind == "scale" else arg.name


def _row(trees: Sequence[Tree]) -> str:
    """Write sizes as a tuple."""
    return f"({', '.join(map(python, trees))}{',' if len(trees) == 1 else ''})"


def _source(planned: Plan, prefix: str = "") -> str:
    """Write the constant with the kernels' text."""
    text = _kernel_text(*planned.files)
    noqa = "  # noqa: E501" if max(map(len, text.splitlines())) > _WIDTH else ""
    return f'{prefix}SOURCE = r"""\n{text}"""{noqa}'


# ---- C++


def _elements(trees: Iterable[Tree]) -> str:
    """Write the number of elements of a scratch array, in size_t."""
    first, *others = map(cpp, trees)
    return " * ".join([f"(size_t)({first})" if " " in first else f"(size_t){first}", *others])


def _geometry(launch: PlannedLaunch) -> str:
    """Write the text between <<< and >>>."""
    shared = [str(launch.shared_bytes)] if launch.shared_bytes else []
    return ", ".join([f"dim3({', '.join(map(cpp, launch.grid))})", cpp(launch.block[0]), *shared])


def _cpp_argument(arg: Argument) -> str:
    if arg.kind == "head":
        return f"{arg.name} + {'rows' if arg.name in ('q', 'o') else 'keys'}"
    if arg.kind == "null":
        return "nullptr"
    if arg.kind == "int":
        return cpp(arg.tree)
    return "do_" if arg.name == "do" else arg.name  # `do` is a C++ keyword


_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    auto_reload=False,
    finalize=lambda value: value.rstrip("\n") if isinstance(value, str) else value,  # the template ends it
)
_TEMPLATES.globals |= {
    "fit": _fit,
    "unpacked": _unpacked,
    "launch_lines": _launches,
    "source": _source,
    "unlimited": UNLIMITED,
}
_TEMPLATES.filters |= {"row": _row, "constant": _constant, "quoted": '"{}"'.format}
