"""The second half of an exported Python file: attention in NumPy, and the main() that compares."""

from __future__ import annotations

from collections.abc import Iterator

from helpers.attention.export.plan import Plan, Request
from helpers.attention.export.text import Sizes

STEP = {"float16": "2**-10", "bfloat16": "2**-7"}  # from 1 to the next number
_DRAWN = "rng.standard_normal(shape, dtype=np.float32) + np.float32(0.25)"
_BFLOAT16 = '''def to_bfloat16(x):
    """float32 to the bits of bfloat16, in uint16, rounded to the nearest and to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits):
    """The bits of bfloat16 to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
'''


HAS_GPU = '''def has_gpu():
    """Whether there is an NVIDIA GPU that CuPy can use."""
    try:
        return cp.cuda.runtime.getDeviceCount() > 0
    except cp.cuda.runtime.CUDARuntimeError:  # no driver, or one that is too old
        return False
'''
NO_GPU = 'print("needs an NVIDIA GPU, with a driver for this CuPy")'


def reference(plan: Plan) -> Iterator[str]:
    """The functions that main() compares with."""
    if plan.request.dtype == "bfloat16":
        yield _BFLOAT16
    yield "\n".join(_gradients(plan.request) if plan.request.backward else _attention(plan.request))


def _attention(request: Request) -> list[str]:
    back = "(p @ v).swapaxes(1, 2)" if request.model_layout else "p @ v"
    return [
        "def attention_in_numpy(q, k, v, softmax_scale):",
        f'    """The same in NumPy, float64: o{", and lse" if request.return_lse else ""}."""',
        *_to_heads(request, "q, k, v"),
        *_softmax(request, with_lse=request.return_lse),
        f"    return {back}{', lse' if request.return_lse else ''}",
    ]


def _gradients(request: Request) -> list[str]:
    return [
        "def gradients_in_numpy(do, q, k, v, softmax_scale):",
        '    """dq, dk, dv, o and lse in NumPy, float64."""',
        *_to_heads(request, "do, q, k, v"),
        *_softmax(request, with_lse=True),
        "    dp = do @ v.swapaxes(-1, -2)",
        "    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))",
        "    dq, o = softmax_scale * ds @ k, p @ v",
        "    dk, dv = softmax_scale * ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do",
        "    # Heads of q that share a head of k and v: their gradients are added up.",
        "    dk, dv = (a.reshape(a.shape[0], -1, group, *a.shape[2:]).sum(axis=2) for a in (dk, dv))",
        "    return *(a.swapaxes(1, 2) for a in (dq, dk, dv, o)), lse",
    ]


def _to_heads(request: Request, arrays: str) -> list[str]:
    """Arrays in float64, (batch, heads, rows, HEAD_DIM), with as many heads of k and v as of q."""
    swap, note = (".swapaxes(1, 2)", "  # to (batch, heads, rows, HEAD_DIM)") if request.model_layout else ("", "")
    lines = [f"    {arrays} = (a.astype(np.float64){swap} for a in ({arrays})){note}"]
    if "gqa" in request.stage.features:
        lines += [
            "    group = q.shape[1] // k.shape[1]",
            "    k, v = (np.repeat(a, group, axis=1) for a in (k, v))",
        ]
    return lines


def _softmax(request: Request, *, with_lse: bool) -> list[str]:
    """Lines for p, and lse."""
    left, right = request.window
    tests = [f"j < i - {left}" if left else "j < i"] * (left >= 0)
    tests += [f"j > i + {right}" if right else "j > i"] * (right >= 0)
    hidden = " | ".join(f"({test})" for test in tests) if len(tests) > 1 else "".join(tests)
    lines = ["    s = softmax_scale * q @ k.swapaxes(-1, -2)"]
    if hidden:
        lines += [
            "    n, n_kv = s.shape[-2:]",
            "    i, j = np.arange(n)[:, None] + n_kv - n, np.arange(n_kv)  # the last row is aligned with the last key",
            f"    s[..., {hidden}] = -np.inf",
            "    m = np.maximum(s.max(axis=-1, keepdims=True), -1e300)  # finite in a row that sees no key",
        ]
    else:
        lines.append("    m = s.max(axis=-1, keepdims=True)")
    lines += [
        "    p = np.exp(s - m)",
        "    l = p.sum(axis=-1, keepdims=True)  # noqa: E741",
    ]
    if with_lse and hidden:
        lines += ['    with np.errstate(divide="ignore"):', "        lse = (m + np.log(l))[..., 0]"]
    elif with_lse:
        lines.append("    lse = (m + np.log(l))[..., 0]")
    return [*lines, "    p /= np.where(l > 0, l, 1)" if hidden else "    p /= l"]


def main(plan: Plan, sizes: Sizes) -> str:
    """The function main(). sizes: of its arrays."""
    request = plan.request
    gqa, half = "gqa" in request.stage.features, STEP.get(request.dtype)
    given = ["do", "q", "k", "v"] if request.backward else ["q", "k", "v"]
    arrays, kv_heads = ", ".join(given), "kv_heads" if gqa else "heads"
    shapes = ", ".join(["rows"] * (len(given) - 2) + ["keys", "keys"])
    numbers = dict(zip(("batch", "n", "n_kv", "heads", "kv_heads"), sizes, strict=True))
    if not gqa:
        del numbers["kv_heads"]
    form = "(batch, {rows}, {heads}, HEAD_DIM)" if request.model_layout else "(batch, {heads}, {rows}, HEAD_DIM)"
    rows, keys = form.format(rows="n", heads="heads"), form.format(rows="n_kv", heads=kv_heads)
    lines = [
        "def main():",
        '    """Random arrays through the kernel and through NumPy. 0 where they agree, else 1."""',
        "    if not has_gpu():",
        f"        {NO_GPU}",
        "        return 2",
        f"    {', '.join(numbers)} = {', '.join(map(str, numbers.values()))}",
        f"    rows, keys = {rows}, {keys}",
        "    rng = np.random.default_rng(0)",
        f"    {arrays} = ({_DRAWN} for shape in ({shapes}))",
    ]
    if len(lines[-1]) > 120:
        lines[-1:] = [f"    {arrays} = (", f"        {_DRAWN} for shape in ({shapes})", "    )"]
    if half:
        rounded = "from_bfloat16(to_bfloat16(a))" if request.dtype == "bfloat16" else "a.astype(np.float16)"
        lines.append(f"    {arrays} = ({rounded} for a in ({arrays}))")
    return "\n".join(
        [*lines, *(_compare_gradients(request, arrays) if request.backward else _compare_output(request, arrays))]
    )


def _copies(request: Request) -> tuple[str, str]:
    """How an array gets to the device, and a result from it."""
    if request.dtype == "bfloat16":
        return "cp.asarray(to_bfloat16({}))", "from_bfloat16(cp.asnumpy({}))"
    return f"cp.asarray({{}}.astype(np.{request.dtype}))", "cp.asnumpy({})"


def _verdict(name: str) -> str:
    verdict = "{'PASS' if right else 'FAIL'}"
    return f'print(f"[{verdict}] {name}: max error {{error:.1e}}, {{tolerance:.1e}} allowed")'


def _compare_output(request: Request, arrays: str) -> list[str]:
    to_device, from_device = _copies(request)
    step = STEP.get(request.dtype)
    o, want = ("o, lse", "want, want_lse") if request.return_lse else ("o", "want")
    allowed = f"{step} * np.abs(want).max()  # one step of the type at the largest output" if step else "1e-5"
    lines = [
        f"    {o} = flash_attention(*({to_device.format('a')} for a in ({arrays})))",
        f"    {want} = attention_in_numpy({arrays}, HEAD_DIM**-0.5)",
        f"    error = np.abs({from_device.format('o')} - want).max()",
        f"    tolerance = {allowed}",
        "    right = error <= tolerance  # NaN is not",
    ]
    if request.return_lse:
        lines.append("    right = right and np.allclose(cp.asnumpy(lse), want_lse, rtol=0, atol=1e-4)")
    return [*lines, f"    {_verdict(request.stage.name)}", "    return 0 if right else 1"]


def _compare_gradients(request: Request, arrays: str) -> list[str]:
    to_device, from_device = _copies(request)
    step = STEP.get(request.dtype)
    largest = "np.abs(want).max()"
    allowed = (
        f"{step} * {largest}  # one step of the type at the largest gradient" if step else f"1e-5 * max({largest}, 1)"
    )
    return [
        f"    *wanted, o, lse = gradients_in_numpy({arrays}, HEAD_DIM**-0.5)",
        f"    given = ({to_device.format('a')} for a in ({arrays}, o))",
        "    gradients = flash_attention_backward(*given, cp.asarray(lse.astype(np.float32)))",
        "    passed = True",
        '    for which, a, want in zip(("dq", "dk", "dv"), gradients, wanted, strict=True):',
        f"        error = np.abs({from_device.format('a')} - want).max()",
        f"        tolerance = {allowed}",
        "        right = error <= tolerance  # NaN is not",
        f"        {_verdict(f'{request.stage.name}, {{which}}')}",
        "        passed = passed and right",
        "    return 0 if passed else 1",
    ]
