"""A stage as one Python file for PyTorch: tensors in and out, autograd, and a check against PyTorch's math attention.

A stage of the forward comes with the last stage of the backward that has its gradients, and the other way round. CuPy
compiles the kernels and launches them, on PyTorch's current stream; all memory is of PyTorch's allocator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from helpers.attention.export import python_file
from helpers.attention.export.plan import CannotExport, Plan, Request, plan
from helpers.attention.export.python_check import STEP
from helpers.attention.export.python_file import Form
from helpers.attention.export.text import Sizes
from helpers.attention.ladder import BACKWARD, FORWARD, Stage

TORCH = Form(
    empty="empty({shape}, torch.{dtype}, q)",
    like="empty({like}.shape, {like}.dtype, {like})",
    strides="a.stride()[:3]",
    bytes_of_strides="[step * a.itemsize for step in a.stride()]",
    contiguous="a.is_contiguous()",
    pointer="a.data_ptr()",
)
_LAUNCH = '''@contextlib.contextmanager
def on_stream_of(a):
    """PyTorch's current stream on a tensor's GPU, for CuPy too."""
    if a.device.type != "cuda":
        raise ValueError(f"the kernels need an NVIDIA GPU; the tensors are on {a.device}")
    with torch.cuda.device(a.device):
        stream = torch.cuda.current_stream()
        cp.cuda.runtime.setDevice(stream.device_index)  # a new thread, as autograd's, gets its context
        with cp.cuda.ExternalStream(stream.cuda_stream, stream.device_index):
            yield


def empty(shape, dtype, like):
    """A new tensor on the GPU of another."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def address(a):
    """Of a tensor's first element."""
    return a.data_ptr()


def launch(name, grid, block, args, shared_bytes=0, module=module):
    """Launch a kernel on CuPy's current stream. CuPy does not compare the arguments with the kernel's parameters."""
    kernel = module().get_function(name)
    if shared_bytes > 48 * 1024:  # more has to be asked for
        kernel.max_dynamic_shared_size_bytes = shared_bytes
    args = tuple(address(a) if isinstance(a, torch.Tensor) else a for a in args)
    kernel(grid, block, args, shared_mem=shared_bytes)
'''


def text(request: Request, sizes: Sizes) -> str:
    """The file. sizes: of the tensors that its check uses.

    Raises:
        CannotExport: as `helpers.attention.export.plan.plan`; a backward without a forward that keeps lse.
    """
    forward, backward = _both(request)
    alone = backward is None
    use = "o, lse = flash_attention(q, k, v)" if request.return_lse else "o = flash_attention(q, k, v)"
    use += "  # tensors; no gradients" if alone else "  # tensors, with autograd"
    libraries = ["import cupy as cp", "import numpy as np", "import torch"]
    libraries.append("from torch.nn.attention import SDPBackend, sdpa_kernel")
    libraries.append("from torch.nn.functional import scaled_dot_product_attention")
    opening = python_file.opening(forward, use, "PyTorch's math attention", libraries, {"contextlib"})
    parts = [
        "\n".join([opening, *_constants(forward, backward)]),
        *python_file.helpers(forward),
        *([] if backward is None else list(python_file.helpers(backward, "BACKWARD_"))[-1:]),
        _LAUNCH,
        *python_file.of_arrays(forward, TORCH),
        *_entries(forward, backward, with_lse=request.return_lse),
        *_check(forward, sizes, with_lse=request.return_lse, gradients=not alone),
        python_file.source(forward),
        *([] if backward is None else [python_file.source(backward, "BACKWARD_")]),
        python_file.RUN,
    ]
    return python_file.joined(parts)


def _both(request: Request) -> tuple[Plan, Plan | None]:
    """The forward, which keeps lse if there is a backward; and the backward, if there is one."""
    if request.backward:
        backward = plan(request)
        forward = _first(FORWARD, replace(request, return_lse=True, deterministic=False))
        if forward is None:
            raise CannotExport(f"no stage that can be exported keeps the lse that {request.stage.name} starts from")
        return forward, backward
    backward = None
    if "lse" in request.stage.features:
        anywhere = {name: stage for name, stage in BACKWARD.items() if stage.only_cc <= request.stage.only_cc}
        backward = _first(anywhere, replace(request, return_lse=False))
    if backward is None:
        return plan(request), None
    return plan(replace(request, return_lse=True, deterministic=False)), backward


def _first(stages: dict[str, Stage], request: Request) -> Plan | None:
    """The plan of the last of the stages that can be exported for this."""
    for stage in reversed(stages.values()):
        try:
            return plan(replace(request, stage=stage))
        except CannotExport:
            continue
    return None


def _constants(forward: Plan, backward: Plan | None) -> Iterator[str]:
    yield f"DTYPE = torch.{forward.request.dtype}"
    yield python_file.constants(forward, done := {})
    if backward is not None:
        yield "\n# The same of the gradients, whose functions name the sizes of their tiles themselves."
        yield from python_file.compiled_by(backward, "BACKWARD_")
        yield from python_file.structs(backward, done)


# ---- the entries


def _entries(forward: Plan, backward: Plan | None, *, with_lse: bool) -> Iterator[str]:
    request = forward.request
    yield _readable(forward)
    outputs = "o, lse" if request.return_lse else "o"
    lines = [
        "def forward(q, k, v, softmax_scale):",
        f'    """{outputs} of tensors that the kernel can read."""',
        *python_file.shape_checks(forward),
        *python_file.launched(forward, TORCH),
        f"    return {outputs}",
    ]
    yield "\n".join(lines)
    if backward is not None:
        lines = [
            "def backward(do, q, k, v, o, lse, softmax_scale):",
            '    """dq, dk, dv of tensors that the kernels can read."""',
            *python_file.launched(backward, TORCH, prefix="BACKWARD_", sizes=True),
            "    return dq, dk, dv",
        ]
        yield "\n".join(lines)
        result, more = ("o, lse", ", _") if with_lse else ("o", "")
        mark = "        ctx.mark_non_differentiable(lse)\n" * with_lse
        yield f'''class FlashAttention(torch.autograd.Function):
    """The kernels as one operation of autograd.{" lse has no gradient." if with_lse else ""}"""

    @staticmethod
    def forward(ctx, q, k, v, softmax_scale):
        """{result}; what the gradients start from is kept."""
        as_read = [readable(a.detach()) for a in (q, k, v)]
        with on_stream_of(q):
            o, lse = forward(*as_read, softmax_scale)
        ctx.save_for_backward(q, k, v, o.detach(), lse)
{mark}        ctx.softmax_scale = softmax_scale
        return {result}

    @staticmethod
    def backward(ctx, do{more}):
        """A gradient for each argument of forward."""
        return *Gradients.apply(do, *ctx.saved_tensors, ctx.softmax_scale), None
'''
        yield '''class Gradients(torch.autograd.Function):
    """The gradients as an operation of their own: with create_graph=True they depend on q, k and v."""

    @staticmethod
    def forward(ctx, do, q, k, v, o, lse, softmax_scale):
        """dq, dk, dv."""
        do, q, k, v = (readable(a.detach()) for a in (do, q, k, v))
        with on_stream_of(q):
            return backward(do, q, k, v, o, lse, softmax_scale)

    @staticmethod
    def backward(ctx, *_):
        """There is no kernel for this."""
        raise NotImplementedError("no second derivatives: SDPBackend.MATH of torch.nn.attention.sdpa_kernel has them")
'''
    yield _entry(forward, with_gradients=backward is not None, with_lse=with_lse)


def _readable(plan: Plan) -> str:
    as_it_is, what = TORCH.contiguous, "The tensor, or a contiguous copy"
    if python_file.any_rows(plan):
        as_it_is = "a.stride(-1) == 1 and not any(step * a.itemsize % 16 for step in a.stride()[:-1])"
        what = "The tensor if its rows are contiguous and at multiples of 16 bytes, or a copy"
    return f'''def readable(a):
    """{what}."""
    if a.ndim != 4 or a.shape[-1] != HEAD_DIM or a.dtype != DTYPE:
        raise ValueError(f"four axes, HEAD_DIM last, {{DTYPE}}; got {{a.dtype}} {{tuple(a.shape)}}")
    as_it_is = {as_it_is}
    return a if as_it_is and a.data_ptr() % 16 == 0 else a.clone(memory_format=torch.contiguous_format)
'''


def _entry(plan: Plan, *, with_gradients: bool, with_lse: bool) -> str:
    request = plan.request
    rows = ("(batch, {}, {}, HEAD_DIM)" if request.model_layout else "(batch, {1}, {0}, HEAD_DIM)").format
    gqa = "gqa" in request.stage.features
    lines = [
        "def flash_attention(q, k, v, softmax_scale=HEAD_DIM**-0.5):",
        f'    """softmax(softmax_scale q k^T) v for each head. Returns {"o, lse" if with_lse else "o"}.',
        "",
        f"    q, o  {rows('n', 'heads')}, {request.dtype}, on a GPU",
        f"    k, v  {rows('n_kv', 'kv_heads')}; heads is a multiple of kv_heads"
        if gqa
        else f"    k, v  {rows('n_kv', 'heads')}",
        *(["    lse  (batch, heads, n), float32: the log of the sum of exp(scores) of each row"] * with_lse),
        "    Heads before rows is a view, by transpose."
        if python_file.any_rows(plan)
        else "    Tensors that are not contiguous are copied.",
        '    """',
        "    if softmax_scale < 0:",
        '        raise ValueError(f"softmax_scale = {softmax_scale}; it is 0 or above (negate q and the scale)")',
        "    if not q.device == k.device == v.device:",
        '        raise ValueError(f"q is on {q.device}, k on {k.device} and v on {v.device}; one GPU is needed")',
    ]
    if with_gradients:
        return "\n".join([*lines, "    return FlashAttention.apply(q, k, v, softmax_scale)"])
    lines += [
        "    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):",
        '        raise NotImplementedError("this file has no gradients: call it under torch.no_grad()")',
        "    if any(torch.autograd.forward_ad.unpack_dual(a).tangent is not None for a in (q, k, v)):",
        '        raise NotImplementedError("this file has no forward-mode derivatives")',
        "    q, k, v = (readable(a.detach()) for a in (q, k, v))",
        "    with on_stream_of(q):",
        "        return forward(q, k, v, softmax_scale)",
    ]
    return "\n".join(lines)


# ---- the check


def _check(plan: Plan, sizes: Sizes, *, with_lse: bool, gradients: bool) -> Iterator[str]:
    """The function that main() compares with, and main()."""
    request = plan.request
    gqa = "gqa" in request.stage.features
    swap, note = (".transpose(1, 2)", "  # to (batch, heads, rows, HEAD_DIM)") if request.model_layout else ("", "")
    lines = [
        "def attention_in_torch(q, k, v, softmax_scale):",
        '    """The same by PyTorch\'s math backend."""',
    ]
    if swap:
        lines.append(f"    q, k, v = (a{swap} for a in (q, k, v)){note}")
    hidden = ""
    if request.masked:
        left, right = request.window
        tests = [f"j >= i - {left}" if left else "j >= i"] * (left >= 0)
        tests += [f"j <= i + {right}" if right else "j <= i"] * (right >= 0)
        lines += [
            "    i, j = (torch.arange(a.shape[-2], device=q.device) for a in (q, k))",
            "    i = i[:, None] + len(j) - len(i)  # the last row is aligned with the last key",
            f"    seen = {' & '.join(f'({test})' for test in tests) if len(tests) > 1 else tests[0]}",
        ]
        hidden = ", attn_mask=seen"
    more = f"{hidden}, scale=softmax_scale{', enable_gqa=True' if gqa else ''}"
    lines += [
        "    with sdpa_kernel(SDPBackend.MATH):",
        f"        o = scaled_dot_product_attention(q, k, v{more})",
        f"    return o{swap}",
    ]
    yield "\n".join(lines)
    numbers = dict(zip(("batch", "n", "n_kv", "heads", "kv_heads"), sizes, strict=True))
    if not gqa:
        del numbers["kv_heads"]
    form = "(batch, {rows}, {heads}, HEAD_DIM)" if request.model_layout else "(batch, {heads}, {rows}, HEAD_DIM)"
    rows = form.format(rows="n", heads="heads")
    keys = form.format(rows="n_kv", heads="kv_heads" if gqa else "heads")
    step = STEP.get(request.dtype)
    allowed = f"{step} * largest  # one step of the type" if step else "1e-5 * max(largest, 1)"
    lines = [
        'def main(device="cuda"):',
        '    """Random tensors through the kernels and through PyTorch in float64. 0 where they agree, else 1."""',
        '    if device == "cuda" and not torch.cuda.is_available():',
        '        print("needs an NVIDIA GPU, with a driver for this PyTorch")',
        "        return 2",
        f"    {', '.join(numbers)} = {', '.join(map(str, numbers.values()))}",
        f"    rows, keys = {rows}, {keys}",
        "    torch.manual_seed(0)",
        "    q, k, v = ((torch.randn(shape) + 0.25).to(device, DTYPE) for shape in (rows, keys, keys))",
        "    wide = [a.double().requires_grad_() for a in (q, k, v)]",
        "    want = attention_in_torch(*wide, HEAD_DIM**-0.5)",
    ]
    if gradients:
        lines += [
            "    given = [a.requires_grad_() for a in (q, k, v)]",
            f"    {'o, _' if with_lse else 'o'} = flash_attention(*given)",
            "    do = torch.randn(rows).to(device, DTYPE)",
            "    got = (o, *torch.autograd.grad(o, given, do))",
            "    wanted = (want, *torch.autograd.grad(want, wide, do.double()))",
        ]
    else:
        output = "flash_attention(q, k, v)"
        lines.append(f"    got, wanted = ({output + '[0]' if with_lse else output},), (want,)")
    lines += [
        "    passed = True",
        '    for name, a, b in zip(("o", "dq", "dk", "dv"), got, wanted, strict=False):',
        "        largest = b.abs().max().item()",
        "        error = (a.double() - b).abs().max().item()",
        f"        tolerance = {allowed}",
        "        right = error <= tolerance  # NaN is not",
        '        verdict = "PASS" if right else "FAIL"',
        f'        print(f"[{{verdict}}] {request.stage.name}, {{name}}: max error {{error:.1e}}, '
        '{tolerance:.1e} allowed")',
        "        passed = passed and right",
        "    return 0 if passed else 1",
    ]
    yield "\n".join(lines)
