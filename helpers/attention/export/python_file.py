"""A stage as one Python file: CuPy, NumPy, the kernel's text, its launches, and a check against NumPy.

Its pieces take a `Form`, what differs where the arrays are PyTorch's: see torch_file.py.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from helpers.attention import kernel
from helpers.attention.export import python_check
from helpers.attention.export.plan import Argument, Field, Plan, PlannedLaunch
from helpers.attention.export.sizes import names, python
from helpers.attention.export.text import Sizes, about, kernel_text, licence
from helpers.attention.ladder.params import STRIDES, UNLIMITED
from helpers.attention.ladder.stages.hopper import group_of_heads
from helpers.engine import nvrtc


class Form(NamedTuple):
    """How a file writes what depends on the library of its arrays.

    empty: a new array of a shape and a type of NumPy's name. like: one like another. strides, bytes_of_strides: of an
    array, in elements and in bytes. contiguous: whether it is. pointer: its address.
    """

    empty: str
    like: str
    strides: str
    bytes_of_strides: str
    contiguous: str
    pointer: str


CUPY = Form(
    empty="cp.empty({shape}, cp.{dtype})",
    like="cp.empty({like}.shape, {like}.dtype)",
    strides="tuple(step // a.itemsize for step in a.strides[:3])",
    bytes_of_strides="a.strides",
    contiguous="a.flags.c_contiguous",
    pointer="a.data.ptr",
)


def text(plan: Plan, sizes: Sizes) -> str:
    """The file. sizes: of the arrays that its check uses."""
    request = plan.request
    entry = "flash_attention_backward(do, q, k, v, o, lse)" if request.backward else "flash_attention(q, k, v)"
    result = "dq, dk, dv" if request.backward else "o, lse" if request.return_lse else "o"
    parts = [
        opening(plan, f"{result} = {entry}", "NumPy", ["import cupy as cp", "import numpy as np"])
        + "\n"
        + constants(plan),
        *helpers(plan),
        CUPY_LAUNCH,
        *of_arrays(plan),
        _entry(plan),
        *python_check.reference(plan),
        python_check.HAS_GPU,
        python_check.main(plan, sizes),
        source(plan),
        RUN,
    ]
    return joined(parts)


RUN = 'if __name__ == "__main__":\n    sys.exit(main())'


def joined(parts: Iterable[str]) -> str:
    """The parts of a file, with two lines between them."""
    return "\n\n".join(part.strip("\n") + "\n" for part in parts)


def source(plan: Plan, prefix: str = "") -> str:
    """The constant with the kernels' text."""
    source = kernel_text(*plan.files)
    noqa = "  # noqa: E501" if max(map(len, source.splitlines())) > 120 else ""
    return f'{prefix}SOURCE = r"""\n{source}"""{noqa}'


def opening(plan: Plan, use: str, judge: str, libraries: Iterable[str], more: Iterable[str] = ()) -> str:
    """The docstring, the licence and the imports. use: a line that calls the file; judge: what checks it.

    libraries: lines that import them. more: modules of Python's own library.
    """
    modules = {"functools", "sys", *more}
    if plan.maps:
        modules.add("ctypes")
    if "<mma.h>" in kernel.source(plan.request.stage.file):
        modules |= {"importlib.util", "os", "shutil"}
    imports = "\n".join(f"import {module}" for module in sorted(modules))
    if "shutil" in modules:
        imports += "\nfrom pathlib import Path"
    lines = about(plan)
    body = "\n".join(lines[1:])
    return (
        f'"""{lines[0]}\n\n    {use}\n\n{body}\n\nRun the file: it checks itself against {judge}.\n"""\n\n'
        + "".join(f"# {line}\n" for line in licence())
        + "\n".join(["", imports, "", *libraries, ""])
    )


def constants(plan: Plan, done: dict[np.dtype, str] | None = None) -> str:
    """Sizes, options, kernels' names, structs. done: as `structs` has it."""
    defines = plan.defines
    lines = [f"{', '.join(defines)} = {', '.join(map(str, defines.values()))}  # compiled into the kernel"]
    if len(lines[0]) > 120:
        lines = [f"{name} = {value}" for name, value in defines.items()]
    lines += compiled_by(plan)
    if plan.structs:
        lines += [
            "",
            "# The structs of the kernel, which a launch passes by value.",
            *structs(plan, done if done is not None else {}),
        ]
    if plan.maps:
        lines += ["", 'TENSOR_MAP = np.dtype([("opaque", np.uint64, (16,))])']
    if any("UNLIMITED" in _values(struct.fields) for struct in plan.structs.values()):
        lines += [f"UNLIMITED = {UNLIMITED}  # keys: a window without a limit"]
    return "\n".join(lines)


def compiled_by(plan: Plan, prefix: str = "") -> list[str]:
    """Lines with what the compiler is told: options, and the instances of templates."""
    options = ["-std=c++17", *(f"-D{name}={value}" for name, value in plan.defines.items())]
    if plan.request.stage.only_cc:
        options.append(f"-arch={plan.request.stage.architecture(plan.request.stage.min_cc)}")
    lines = _tuple(f"{prefix}OPTIONS = ", [f'"{option}"' for option in options], "", wide=True)
    names = [launch.kernel for launch in plan.launches]
    instances = [name for name in names if "<" in name]
    return lines + _tuple(f"{prefix}KERNELS = ", [f'"{name}"' for name in instances or names], "", wide=True)


def structs(plan: Plan, done: dict[np.dtype, str]) -> list[str]:
    """Lines that define the dtypes of the structs. done: the names of those that are defined already."""
    lines = []
    for struct in plan.structs.values():
        lines += _dtypes(struct.dtype, _constant(struct.type), done)
        done[struct.dtype] = _constant(struct.type)
    return lines


def _constant(type_: str) -> str:
    """A struct's name as a constant: AttentionParams is ATTENTION_PARAMS."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type_).upper()


def _dtypes(dtype: np.dtype, name: str, done: dict[np.dtype, str]) -> list[str]:
    """Lines that define a struct's dtype, after those of the structs in it."""
    lines, fields = [], []
    for field in dtype.names or ():
        inner = dtype[field]
        if not inner.names:
            fields.append(f'("{field}", np.{inner.name})')
            continue
        if inner not in done:
            kind = "STRIDES" if inner == STRIDES else field.upper()
            lines += _dtypes(inner, kind, done)
            done[inner] = kind
        fields.append(f'("{field}", {done[inner]})')
    one = f"{name} = np.dtype([{', '.join(fields)}], align=True)"
    if len(one) <= 120:
        return [*lines, one]
    return [
        *lines,
        f"{name} = np.dtype(",
        "    [",
        *(f"        {field}," for field in fields),
        "    ],",
        "    align=True,",
        ")",
    ]


# ---- what the entry calls


def helpers(plan: Plan, prefix: str = "") -> Iterable[str]:
    """Functions that compile the kernels. prefix: of the module and of its constants, such as "BACKWARD_"."""
    headers = "<mma.h>" in kernel.source(plan.request.stage.file)
    options, folders = f"{prefix}OPTIONS", ""
    if headers:
        folders = '    folder = header_folder("crt/mma.h")  # which mma.h includes, and CuPy does not look for\n'
        options = f'(*{options}, f"-I{{folder}}") if folder else {options}'
        yield inspect.getsource(nvrtc.header_folder).replace(" -> Path | None", "").replace("header: str", "header")
    expressions = f", name_expressions={prefix}KERNELS" if any("<" in launch.kernel for launch in plan.launches) else ""
    yield f'''@functools.cache
def {prefix.lower()}module():
    """The compiled kernels. NVRTC compiles them at the first call."""
{folders}    return cp.RawModule(code={prefix}SOURCE, options={options}{expressions})
'''


CUPY_LAUNCH = '''def launch(name, grid, block, args, shared_bytes=0):
    """Launch a kernel on the current stream. CuPy does not compare the arguments with the kernel's parameters."""
    kernel = module().get_function(name)
    if shared_bytes > 48 * 1024:  # more has to be asked for
        kernel.max_dynamic_shared_size_bytes = shared_bytes
    kernel(grid, block, args, shared_mem=shared_bytes)
'''


def of_arrays(plan: Plan, form: Form = CUPY) -> Iterable[str]:
    """Functions that an entry calls: strides, tensor maps, and the order of tiles."""
    request = plan.request
    if plan.structs:
        yield f'''def strides(a):
    """From one batch, row and head to the next, in elements, of an array (batch, rows, heads, HEAD_DIM)."""
    return {form.strides}
'''
    if plan.maps:
        yield _tensor_map(plan, form)
    if plan.table:
        yield '''@functools.cache
def multiprocessors_here():
    """How many multiprocessors the GPU has."""
    return cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)["multiProcessorCount"]
'''
    if plan.table and request.masked:
        yield inspect.getsource(group_of_heads)
        yield f'''def heads_together(batch, heads, kv_heads, n, n_kv, multiprocessors):
    """How many heads are worked on together, longest tiles first."""
    more = -n % BLOCK_M
    of_head = n + more, n_kv + more, HEAD_DIM, {tuple(request.window)}, BLOCK_M, BLOCK_N
    return group_of_heads(batch * heads, heads // kv_heads, *of_head, multiprocessors)
'''


def _tensor_map(plan: Plan, form: Form) -> str:
    mapped = {arg.name for launch in plan.launches for arg in launch.args if arg.kind == "map"}
    dtypes = {plan.scratch[name][1].name if name in plan.scratch else plan.request.dtype for name in mapped}
    (dtype,) = dtypes
    kind = {"float16": 6, "bfloat16": 9}[dtype]
    return f'''@functools.cache
def driver():
    """The CUDA driver, which makes tensor maps; CuPy has no such function."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def tensor_map(a, box_rows):
    """What TMA is told of an array (batch, rows, heads, HEAD_DIM): copies of 64 columns and box_rows rows, swizzled."""
    batch, rows, heads, columns = a.shape
    by_batch, by_row, by_head, _ = steps = {form.bytes_of_strides}
    room = np.empty(192, np.uint8)
    made = room[-room.ctypes.data % 64 :][:128]  # at a multiple of 64 bytes, as the driver wants it
    error = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(made.ctypes.data),
        {kind},  # {dtype}
        4,  # dimensions, the fastest first
        ctypes.c_void_p({form.pointer}),
        (ctypes.c_uint64 * 4)(columns, rows, heads, batch),
        (ctypes.c_uint64 * 3)(by_row, by_head, by_batch),
        (ctypes.c_uint32 * 4)(64, box_rows, 1, 1),
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),
        0,  # not interleaved
        3,  # swizzled by 128 bytes
        2,  # L2 promotion by 128 bytes
        0,  # zeros out of bounds
    )
    if error:
        raise RuntimeError(f"cuTensorMapEncodeTiled returned {{error}} for shape {{a.shape}}, strides {{steps}}")
    return made.view(TENSOR_MAP)
'''


# ---- the entry


def _entry(plan: Plan) -> str:
    """The function that is called."""
    request = plan.request
    given = ["do", "q", "k", "v", "o"] if request.backward else ["q", "k", "v"]
    like_q, like_k = ("do, q, o, dq", "k, v, dk, dv") if request.backward else ("q, o", "k, v")
    rows = ("(batch, {}, {}, HEAD_DIM)" if request.model_layout else "(batch, {1}, {0}, HEAD_DIM)").format
    kv_heads = "kv_heads" if "gqa" in request.stage.features else "heads"
    name = "flash_attention_backward" if request.backward else "flash_attention"
    lse = ", lse" if request.backward else ""
    kind = f"{request.dtype}, or its bits as uint16" if request.dtype == "bfloat16" else request.dtype
    returns = "dq, dk, dv" if request.backward else "o, lse" if request.return_lse else "o"
    what = (
        "The gradients of sum(do * o), where o and lse are what the forward pass returned."
        if request.backward
        else "softmax(softmax_scale q k^T) v for each head."
    )
    lines = [
        f"def {name}({', '.join(given)}{lse}, softmax_scale=HEAD_DIM**-0.5):",
        f'    """{what} Returns {returns}.',
        "",
        f"    {like_q}  {rows('n', 'heads')}, {kind}",
        f"    {like_k}  {rows('n_kv', kv_heads)}; heads is a multiple of kv_heads"
        if kv_heads == "kv_heads"
        else f"    {like_k}  {rows('n_kv', kv_heads)}",
    ]
    if request.backward or request.return_lse:
        lines.append("    lse  (batch, heads, n), float32: the log of the sum of exp(scores) of each row")
    rule = (
        "Rows are contiguous and start at multiples of 16 bytes; other layouts with such rows are views, by transpose."
        if any_rows(plan)
        else "Arrays are C-contiguous."
    )
    lines += [f"    {rule}", '    """']
    lines += _checks(plan, given)
    lines += launched(plan)
    lines.append(f"    return {returns}")
    return "\n".join(lines)


def launched(plan: Plan, form: Form = CUPY, *, prefix: str = "", sizes: bool = False) -> list[str]:
    """Lines that make what is written, and launch. prefix: of the module; sizes: whether they name their own sizes."""
    request = plan.request
    written = {"dq": "q", "dk": "k", "dv": "v"} if request.backward else {"o": "q"}
    lines, used = [], _used(plan)
    if sizes and (own := {name: value for name, value in plan.defines.items() if name in used - {"HEAD_DIM"}}):
        lines.append(f"    {', '.join(own)} = {', '.join(map(str, own.values()))}")
    shape = ("batch", "n", "heads", "_") if request.model_layout else ("batch", "heads", "n", "_")
    kv_shape = ("_", "n_kv", "kv_heads", "_") if request.model_layout else ("_", "_", "n_kv", "_")
    for array, axes in (("q", shape), ("k", kv_shape)):
        axes = tuple(axis if axis in used else "_" for axis in axes)
        if set(axes) != {"_"}:
            lines.append(f"    {', '.join(axes)} = {array}.shape")
    lines += [f"    {a} = {form.like.format(like=b)}" for a, b in written.items()]
    if request.return_lse:
        lines.append(f"    lse = {form.empty.format(shape='(batch, heads, n)', dtype='float32')}")
    if plan.table:
        lines.append("    multiprocessors = multiprocessors_here()")
        if request.masked:
            lines.append("    together = heads_together(batch, heads, kv_heads, n, n_kv, multiprocessors)")
    for array, (trees, dtype) in plan.scratch.items():
        lines.append(f"    {array} = {form.empty.format(shape=_row(trees), dtype=dtype.name)}")
    if plan.table:
        lines.append("    rounds = len(schedule)")
    for parameter, struct in plan.structs.items():
        lines.append(f"    {parameter} = np.zeros(1, {_constant(struct.type)})")
        lines += _tuple(f"    {parameter}[0] = ", _struct_items(struct.fields), "    ")
    for launch in plan.launches:
        lines += _launch(launch, prefix)
    return lines


def _checks(plan: Plan, given: list[str]) -> list[str]:
    """Lines that refuse arrays which the kernel would misread."""
    dtype = plan.request.dtype
    other = 'a.dtype.name not in ("bfloat16", "uint16")' if dtype == "bfloat16" else f'a.dtype.name != "{dtype}"'
    wrong, needed = "not a.flags.c_contiguous", "C-contiguous arrays"
    if any_rows(plan):
        wrong = "a.strides[-1] != a.itemsize or any(step % 16 for step in a.strides[:-1])"
        needed = "rows contiguous and at multiples of 16 bytes"
    return [
        f"    for a in ({', '.join(given)}):",
        f"        if a.ndim != 4 or a.shape[-1] != HEAD_DIM or {other}:",
        f'            raise ValueError(f"four axes, the last HEAD_DIM, {dtype}; got {{a.dtype}} {{a.shape}}")',
        f"        if {wrong}:",
        f'            raise ValueError(f"{needed}; got shape {{a.shape}}, strides {{a.strides}}")',
        *shape_checks(plan),
        "    if softmax_scale < 0:",
        '        raise ValueError(f"softmax_scale = {softmax_scale}; it is 0 or above (negate q and the scale)")',
    ]


def shape_checks(plan: Plan) -> list[str]:
    """Lines that refuse arrays of four axes whose shapes do not fit each other."""
    request = plan.request
    heads, rows = (2, 1) if request.model_layout else (1, 2)
    gqa = "gqa" in request.stage.features
    differ = f"q.shape[{heads}] % k.shape[{heads}]" if gqa else f"q.shape[{heads}] != k.shape[{heads}]"
    needed = "k and v of one shape, with q's batch and " + ("heads that divide q's" if gqa else "q's heads")
    lines = [
        f"    if k.shape != v.shape or q.shape[0] != k.shape[0] or {differ}:",
        '        shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"',
        f'        raise ValueError(f"{needed}; got {{shapes}}")',
    ]
    if request.backward:
        lines += [
            "    if not do.shape == o.shape == q.shape:",
            '        raise ValueError(f"do and o have q\'s shape, {q.shape}; got do {do.shape}, o {o.shape}")',
            f"    of_rows = (q.shape[0], q.shape[{heads}], q.shape[{rows}])",
            '    if lse.dtype.name != "float32" or lse.shape != of_rows or not lse.flags.c_contiguous:',
            '        got = f"{lse.dtype} {lse.shape}, strides {lse.strides}"',
            '        raise ValueError(f"lse is float32, (batch, heads, n), C-contiguous; got {got}")',
        ]
    return lines


def any_rows(plan: Plan) -> bool:
    """Whether views are taken as they are, if their rows are contiguous and aligned."""
    return plan.request.model_layout and bool(plan.defines.get("VECTOR", 1))


def _used(plan: Plan) -> set[str]:
    """The sizes that the entry's lines name."""
    trees = [tree for launch in plan.launches for tree in (*launch.grid, *launch.block)]
    trees += [arg.tree for launch in plan.launches for arg in launch.args if arg.tree]
    trees += [tree for sizes, _ in plan.scratch.values() for tree in sizes]
    fields = [_field_names(field) for struct in plan.structs.values() for field in struct.fields]
    used = set().union(*map(names, trees), *fields)
    if plan.table:
        used |= {"batch", "heads", "kv_heads", "n", "n_kv"}
    if plan.request.return_lse or any(launch.each_head for launch in plan.launches):
        used |= {"batch", "heads"} | ({"n"} if plan.request.return_lse else set())
    return used


def _field_names(field: Field) -> set[str]:
    inner = set().union(*map(_field_names, field.fields), set())
    return inner | (names(field.tree) if field.tree else set())


def _values(fields: Iterable[Field]) -> Iterable[str]:
    for field in fields:
        if field.kind == "struct":
            yield from _values(field.fields)
        else:
            yield _value(field)


def _value(field: Field) -> str:
    if field.kind == "strides":
        return f"strides({field.array})"
    if field.kind == "scale":
        return "softmax_scale"
    return "UNLIMITED" if field.tree == ("number", UNLIMITED) else python(field.tree)


def _struct_items(fields: Iterable[Field], indent: str = "") -> list[str]:
    """The values of a struct's fields, one a line, with the field's name where the value does not say it."""
    items = []
    for field in fields:
        if field.kind == "struct":
            items += [f"{indent}(", *_struct_items(field.fields, indent + "    "), f"{indent}),  # {field.name}"]
            continue
        plain = field.kind != "int" or field.tree[0] != "number"
        items.append(f"{indent}{_value(field)}," + ("" if plain else f"  # {field.name}"))
    return items


def _launch(launch: PlannedLaunch, prefix: str) -> list[str]:
    indent = "    "
    lines = []
    if launch.each_head:
        lines.append("    for head in np.ndindex(batch, heads):")
        indent += "    "
    args = ", ".join(map(_argument, launch.args))
    block = python(launch.block[0])
    items = [f'"{launch.kernel}"', _row(launch.grid), f"({block},)", "args"]
    items += [str(launch.shared_bytes)] * bool(launch.shared_bytes)
    items += [f"module={prefix.lower()}module"] * bool(prefix)
    one = f"{indent}args = {args}"
    if len(one) <= 120:
        lines.append(one)
    else:
        lines += _tuple(f"{indent}args = ", [f"{_argument(arg)}," for arg in launch.args], indent)
    return [*lines, *_called("launch", items, indent)]


def _called(function: str, items: list[str], indent: str) -> list[str]:
    """A call, in lines of at most 120 characters."""
    inside = ", ".join(items)
    if len(one := f"{indent}{function}({inside})") <= 120:
        return [one]
    inner = [f"{indent}    {inside}"]
    if len(inner[0]) > 120:
        inner = [f"{indent}    {item}," for item in items]
    return [f"{indent}{function}(", *inner, f"{indent})"]


def _row(trees: Iterable[tuple]) -> str:
    inside = [python(tree) for tree in trees]
    return f"({', '.join(inside)}{',' if len(inside) == 1 else ''})"


def _argument(arg: Argument) -> str:
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


def _tuple(opening: str, items: list[str], indent: str, *, wide: bool = False) -> list[str]:
    """A tuple, one item a line; on one line where it fits and `wide` is asked for."""
    one = f"{opening}({', '.join(items)}{',' if len(items) == 1 else ''})"
    if wide and len(one) <= 120:
        return [one]
    ends = [item if not wide else f"{item}," for item in items]
    return [f"{opening}(", *(f"{indent}    {item}" for item in ends), f"{indent})"]
