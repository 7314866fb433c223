"""A stage as one Python file: CuPy, NumPy, the kernel's text, its launches, and a check against NumPy."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

import numpy as np

from helpers.attention import kernel
from helpers.attention.export import python_check
from helpers.attention.export.plan import Argument, Field, Plan, PlannedLaunch
from helpers.attention.export.sizes import names, python
from helpers.attention.export.text import Sizes, about, kernel_text, licence
from helpers.attention.ladder import launches
from helpers.attention.ladder.params import STRIDES, UNLIMITED
from helpers.engine import nvrtc


def text(plan: Plan, sizes: Sizes) -> str:
    """The file. sizes: of the arrays that its check uses."""
    source = kernel_text(*plan.files)
    noqa = "  # noqa: E501" if max(map(len, source.splitlines())) > 120 else ""
    parts = [
        _opening(plan) + "\n" + _constants(plan),
        *_helpers(plan),
        _entry(plan),
        *python_check.reference(plan),
        python_check.main(plan, sizes),
        f'SOURCE = r"""\n{source}"""{noqa}',
        'if __name__ == "__main__":\n    sys.exit(main())',
    ]
    return "\n\n".join(part.strip("\n") + "\n" for part in parts)


def _opening(plan: Plan) -> str:
    request = plan.request
    entry = "flash_attention_backward(do, q, k, v, o, lse)" if request.backward else "flash_attention(q, k, v)"
    result = "dq, dk, dv" if request.backward else "o, lse" if request.return_lse else "o"
    modules = {"functools", "sys"}
    if plan.maps:
        modules.add("ctypes")
    if "<mma.h>" in kernel.source(request.stage.file):
        modules |= {"importlib.util", "os", "shutil"}
    imports = "\n".join(f"import {module}" for module in sorted(modules))
    if "shutil" in modules:
        imports += "\nfrom pathlib import Path"
    lines = about(plan)
    body = "\n".join(lines[1:])
    return (
        f'"""{lines[0]}\n\n    {result} = {entry}\n\n{body}\n\nRun the file: it checks itself against NumPy.\n"""\n\n'
        + "".join(f"# {line}\n" for line in licence())
        + f"\n{imports}\n\nimport cupy as cp\nimport numpy as np\n"
    )


def _constants(plan: Plan) -> str:
    defines = plan.defines
    lines = [f"{', '.join(defines)} = {', '.join(map(str, defines.values()))}  # compiled into the kernel"]
    if len(lines[0]) > 120:
        lines = [f"{name} = {value}" for name, value in defines.items()]
    options = ["-std=c++17", *(f"-D{name}={value}" for name, value in defines.items())]
    if plan.request.stage.only_cc:
        options.append(f"-arch={plan.request.stage.architecture(plan.request.stage.min_cc)}")
    lines += _tuple("OPTIONS = ", [f'"{option}"' for option in options], "", wide=True)
    names = [launch.kernel for launch in plan.launches]
    instances = [name for name in names if "<" in name]
    lines += _tuple("KERNELS = ", [f'"{name}"' for name in instances or names], "", wide=True)
    if plan.structs:
        lines += ["", "# The structs of the kernel, which a launch passes by value."]
        done: set[str] = set()
        for struct in plan.structs.values():
            lines += _dtypes(struct.dtype, _constant(struct.type), done)
    if plan.maps:
        lines += ["", 'TENSOR_MAP = np.dtype([("opaque", np.uint64, (16,))])']
    if plan.table and plan.request.masked:
        lines += [f"L2_SHARE = {launches.L2_SHARE}  # bytes of the L2 cache for the K and V in use"]
    if any("UNLIMITED" in _values(struct.fields) for struct in plan.structs.values()):
        lines += [f"UNLIMITED = {UNLIMITED}  # keys: a window without a limit"]
    return "\n".join(lines)


def _constant(type_: str) -> str:
    """A struct's name as a constant: AttentionParams is ATTENTION_PARAMS."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type_).upper()


def _dtypes(dtype: np.dtype, name: str, done: set[str]) -> list[str]:
    """Lines that define a struct's dtype, after those of the structs in it."""
    lines, fields = [], []
    for field in dtype.names or ():
        inner = dtype[field]
        if not inner.names:
            fields.append(f'("{field}", np.{inner.name})')
            continue
        kind = "STRIDES" if inner == STRIDES else field.upper()
        if kind not in done:
            lines += _dtypes(inner, kind, done)
            done.add(kind)
        fields.append(f'("{field}", {kind})')
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


def _helpers(plan: Plan) -> Iterable[str]:
    request = plan.request
    headers = "<mma.h>" in kernel.source(request.stage.file)
    options, folders = "OPTIONS", ""
    if headers:
        folders = '    folder = header_folder("crt/mma.h")  # which mma.h includes, and CuPy does not look for\n'
        options = '(*OPTIONS, f"-I{folder}") if folder else OPTIONS'
        yield inspect.getsource(nvrtc.header_folder).replace(" -> Path | None", "").replace("header: str", "header")
    expressions = ", name_expressions=KERNELS" if any("<" in launch.kernel for launch in plan.launches) else ""
    yield f'''@functools.cache
def module():
    """The compiled kernels. NVRTC compiles them at the first call."""
{folders}    return cp.RawModule(code=SOURCE, options={options}{expressions})
'''
    yield '''def launch(name, grid, block, args, shared_bytes=0):
    """Launch a kernel on the current stream. CuPy does not compare the arguments with the kernel's parameters."""
    kernel = module().get_function(name)
    if shared_bytes > 48 * 1024:  # more has to be asked for
        kernel.max_dynamic_shared_size_bytes = shared_bytes
    kernel(grid, block, args, shared_mem=shared_bytes)
'''
    if plan.structs:
        yield '''def strides(a):
    """From one batch, row and head to the next, in elements, of an array (batch, rows, heads, HEAD_DIM)."""
    return tuple(step // a.itemsize for step in a.strides[:3])
'''
    if plan.maps:
        yield _tensor_map(plan)
    if plan.table:
        yield '''@functools.cache
def multiprocessors_here():
    """How many multiprocessors the GPU has."""
    return cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)["multiProcessorCount"]
'''
    if plan.table and request.masked:
        yield inspect.getsource(launches.without_resonance)
        left, right = request.window
        keys = "n_kv" if min(left, right) < 0 else f"min(n_kv, {left + right} + BLOCK_M)"
        yield f'''def heads_together(batch, heads, kv_heads, n, n_kv, multiprocessors):
    """How many heads are worked on together, longest tiles first: those whose K and V are in the L2 cache."""
    fit = max(L2_SHARE // (4 * {keys} * HEAD_DIM), 1) * (heads // kv_heads)
    return without_resonance(min(fit, heads * batch), -(-n // BLOCK_M), multiprocessors)
'''


def _tensor_map(plan: Plan) -> str:
    kind = {"float16": 6, "bfloat16": 9}[plan.request.dtype]
    return f'''@functools.cache
def driver():
    """The CUDA driver, which makes tensor maps; CuPy has no such function."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def tensor_map(a, box_rows):
    """What TMA is told of an array (batch, rows, heads, HEAD_DIM): copies of 64 columns and box_rows rows, swizzled."""
    batch, rows, heads, columns = a.shape
    by_batch, by_row, by_head, _ = a.strides
    room = np.empty(192, np.uint8)
    made = room[-room.ctypes.data % 64 :][:128]  # at a multiple of 64 bytes, as the driver wants it
    error = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(made.ctypes.data),
        {kind},  # {plan.request.dtype}
        4,  # dimensions, the fastest first
        ctypes.c_void_p(a.data.ptr),
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
        raise RuntimeError(f"cuTensorMapEncodeTiled returned {{error}} for shape {{a.shape}}, strides {{a.strides}}")
    return made.view(TENSOR_MAP)
'''


# ---- the entry


def _entry(plan: Plan) -> str:
    request = plan.request
    given = ["do", "q", "k", "v", "o"] if request.backward else ["q", "k", "v"]
    written = {"dq": "q", "dk": "k", "dv": "v"} if request.backward else {"o": "q"}
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
        if _any_rows(plan)
        else "Arrays are C-contiguous."
    )
    lines += [f"    {rule}", '    """']
    lines += _checks(plan, given)
    used = _used(plan)
    shape = ("batch", "n", "heads", "_") if request.model_layout else ("batch", "heads", "n", "_")
    kv_shape = ("_", "n_kv", "kv_heads", "_") if request.model_layout else ("_", "_", "n_kv", "_")
    for array, axes in (("q", shape), ("k", kv_shape)):
        axes = tuple(axis if axis in used else "_" for axis in axes)
        if set(axes) != {"_"}:
            lines.append(f"    {', '.join(axes)} = {array}.shape")
    lines += [f"    {a} = cp.empty({b}.shape, {b}.dtype)" for a, b in written.items()]
    if request.return_lse:
        lines.append("    lse = cp.empty((batch, heads, n), cp.float32)")
    if plan.table:
        lines.append("    multiprocessors = multiprocessors_here()")
        if request.masked:
            lines.append("    together = heads_together(batch, heads, kv_heads, n, n_kv, multiprocessors)")
    for array, (sizes, dtype) in plan.scratch.items():
        inside = ", ".join(map(python, sizes)) + ("," if len(sizes) == 1 else "")
        lines.append(f"    {array} = cp.empty(({inside}), cp.{dtype.name})")
    if plan.table:
        lines.append("    rounds = len(schedule)")
    for parameter, struct in plan.structs.items():
        lines.append(f"    {parameter} = np.zeros(1, {_constant(struct.type)})")
        lines += _tuple(f"    {parameter}[0] = ", _struct_items(struct.fields), "    ")
    for launch in plan.launches:
        lines += _launch(launch)
    lines.append(f"    return {returns}")
    return "\n".join(lines)


def _checks(plan: Plan, given: list[str]) -> list[str]:
    """Lines that refuse arrays which the kernel would misread."""
    itemsize = 4 if plan.request.dtype == "float32" else 2
    wrong, needed = "not a.flags.c_contiguous", "C-contiguous arrays"
    if _any_rows(plan):
        wrong = "a.strides[-1] != a.itemsize or any(step % 16 for step in a.strides[:-1])"
        needed = "rows contiguous and at multiples of 16 bytes"
    form = f"four axes, HEAD_DIM last, {itemsize} bytes an element"
    return [
        f"    for a in ({', '.join(given)}):",
        f"        if a.ndim != 4 or a.shape[-1] != HEAD_DIM or a.itemsize != {itemsize}:",
        f'            raise ValueError(f"{form}; got {{a.dtype}} {{a.shape}}")',
        f"        if {wrong}:",
        f'            raise ValueError(f"{needed}; got shape {{a.shape}}, strides {{a.strides}}")',
        "    if softmax_scale < 0:",
        '        raise ValueError(f"softmax_scale = {softmax_scale}; it is 0 or above (negate q and the scale)")',
    ]


def _any_rows(plan: Plan) -> bool:
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


def _launch(launch: PlannedLaunch) -> list[str]:
    indent = "    "
    lines = []
    if launch.each_head:
        lines.append("    for head in np.ndindex(batch, heads):")
        indent += "    "
    args = ", ".join(map(_argument, launch.args))
    block = python(launch.block[0])
    call = f'"{launch.kernel}", {_row(launch.grid)}, ({block},), args'
    shared = f", {launch.shared_bytes}" if launch.shared_bytes else ""
    one = f"{indent}args = {args}"
    if len(one) <= 120:
        lines.append(one)
    else:
        lines += _tuple(f"{indent}args = ", [f"{_argument(arg)}," for arg in launch.args], indent)
    return [*lines, f"{indent}launch({call}{shared})"]


def _row(trees: Iterable[tuple]) -> str:
    inside = [python(tree) for tree in trees]
    return f"({', '.join(inside)}{',' if len(inside) == 1 else ''})"


def _argument(arg: Argument) -> str:
    if arg.kind == "head":
        return f"{arg.name}[head]"
    if arg.kind == "map":
        return f"tensor_map({arg.name}, {arg.box_rows})"
    if arg.kind == "null":
        return "None"
    if arg.kind == "int":
        return f"cp.int32({python(arg.tree)})"
    return "cp.float32(softmax_scale)" if arg.kind == "scale" else arg.name


def _tuple(opening: str, items: list[str], indent: str, *, wide: bool = False) -> list[str]:
    """A tuple, one item a line; on one line where it fits and `wide` is asked for."""
    one = f"{opening}({', '.join(items)}{',' if len(items) == 1 else ''})"
    if wide and len(one) <= 120:
        return [one]
    ends = [item if not wide else f"{item}," for item in items]
    return [f"{opening}(", *(f"{indent}    {item}" for item in ends), f"{indent})"]
