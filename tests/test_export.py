"""`course.py export`: files that run without the course, and compute what the stage computes."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from backends import needs_nvrtc

from helpers import engine
from helpers.attention.compile_report import compile_report
from helpers.attention.export import command
from helpers.attention.export import plan as plans
from helpers.attention.export.plan import TARGETS, CannotExport, Request, call_of, plan
from helpers.attention.export.sizes import Size, cpp, python, tree_of, value
from helpers.attention.ladder import LADDER, launches, limits, tensor_maps
from helpers.attention.ladder.call import Spec
from helpers.attention.ladder.stages.hopper import heads_together
from helpers.device import ON_GPU
from helpers.engine import compiler

ROOT = Path(__file__).resolve().parent.parent
SIZES = ["--batch", "2", "--heads", "4", "--seq", "131", "--seq-kv", "147"]  # larger than the largest tiles
# Every stage, and every option once where the stages do not differ in it.
EXPORTS = {
    "naive": "naive",
    "tiled": "02 --head-dim 32",
    "online_softmax": "03_online_softmax.cu --head-dim 20",
    "register_tiles": "register_tiles --arch sm_75",
    "heads_and_masks": "heads_and_masks --causal --lse --kv-heads 1",
    "heads_and_masks, odd head_dim": "5 --head-dim 37 --window 40 -1 --arch sm_86",
    "flash_wmma": "flash_wmma --dtype bfloat16 --window 100 30",
    "flash_mma": "flash_mma --head-dim 128 --causal --seq 150 --seq-kv 131 --lse",
    "flash_mma, bfloat16": "7 --dtype bfloat16 --window 60 0 --kv-heads 4",
    "backward": "backward --causal",
    "backward, deterministic": "backward --head-dim 32 --deterministic",
    "backward_mma": "backward_mma --dtype float16",
    "backward_mma, deterministic": "backward_mma --dtype bfloat16 --causal --deterministic --seq 150 --seq-kv 131",
    "backward_mma, one key": "backward_mma --dtype float16 --seq 65 --seq-kv 1",
    "hopper": "hopper --lse",
    "hopper, bfloat16": "10 --dtype bfloat16 --causal --head-dim 128",
    "fp16x3": "fp16x3 --causal --lse --seq 150 --seq-kv 131",
}
each_export = pytest.mark.parametrize("words", EXPORTS.values(), ids=EXPORTS.keys())
# The PyTorch form: with gradients and without, each variant of an entry, and two with everything.
TORCH = {
    "naive": "naive --torch",
    "register_tiles": "register_tiles --torch",
    "heads_and_masks": "heads_and_masks --causal --lse --torch",
    "odd head_dim": "5 --head-dim 37 --window 40 -1 --arch sm_86 --torch",
    "flash_wmma": "flash_wmma --dtype bfloat16 --window 100 30 --torch",
    "flash_mma, deterministic": "flash_mma --causal --deterministic --seq 150 --seq-kv 131 --torch",
    "flash_mma, one key": "flash_mma --seq 65 --seq-kv 1 --torch",
    "hopper": "hopper --dtype bfloat16 --causal --torch",
    "hopper, 128": "hopper --dtype bfloat16 --head-dim 128 --torch",
    "fp16x3": "fp16x3 --lse --torch",
    "backward": "backward --lse --torch",
}
each_torch = pytest.mark.parametrize("words", TORCH.values(), ids=TORCH.keys())
COMPILED = ("naive", "heads_and_masks", "flash_wmma", "flash_mma", "backward", "backward_mma")
each_cpp = pytest.mark.parametrize("words", [EXPORTS[name] for name in COMPILED], ids=COMPILED)


def exported(words: str, *more: str) -> str:
    """Return the text. Sizes in `words` come after the usual ones, and so override them."""
    return command.export([*words.split()[:1], *SIZES, *words.split()[1:], *more])


def imported(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import the file as a module, with the engine as cupy."""
    file = folder / "exported.py"
    file.write_text(text)
    monkeypatch.setitem(sys.modules, "cupy", engine)
    spec = importlib.util.spec_from_file_location("exported", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if hasattr(module, "tensor_map"):  # the driver makes it, and here there is no driver
        monkeypatch.setattr(module, "tensor_map", _tensor_map)
    if hasattr(module, "on_stream_of"):  # PyTorch's form: arrays of the tensors' memory instead of addresses on a GPU
        monkeypatch.setattr(module, "on_stream_of", lambda a: contextlib.nullcontext())
        monkeypatch.setattr(module, "address", _array)
        mapped: list[Any] = []  # copies for the engine; a tensor map does not keep its array alive

        def tensor_map(a: Any, box_rows: int) -> np.ndarray:
            mapped.append(engine.asarray(np.array(_array(a))))
            return _tensor_map(mapped[-1], box_rows)

        if hasattr(module, "tensor_map"):
            monkeypatch.setattr(module, "tensor_map", tensor_map)
    return module


def _array(a: Any) -> Any:
    """View a tensor's memory, a view's from its first element on. bfloat16's bits have their own type."""
    torch = sys.modules["torch"]
    if a.dtype == torch.bfloat16:
        return a.view(torch.int16).numpy().view(ml_dtypes.bfloat16).view(engine.ndarray)
    return a.numpy().view(engine.ndarray)


def _tensor_map(a: Any, box_rows: int) -> np.ndarray:
    there = (a.view(ml_dtypes.bfloat16) if a.dtype == np.uint16 else a).swapaxes(1, 2)
    return tensor_maps.tensor_map(Spec.of(there), there.ctypes.data, box_rows=box_rows)


@pytest.mark.skipif(
    ON_GPU, reason="the stand-in for CuPy is the CPU engine; on a GPU the next test runs the file alone"
)
@pytest.mark.exhaustive(one_of_each=lambda words: words.split()[0])
@each_export
def test_computes_what_numpy_does(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = imported(exported(words), tmp_path, monkeypatch)
    assert module.main() == 0
    told = capsys.readouterr().out.splitlines()
    assert len(told) == (3 if "backward" in words else 1) and all(line.startswith("[PASS]") for line in told)


def _displaced(a: Any) -> Any:
    """A copy whose first element is the second of its memory."""
    return engine.zeros(a.size + 1, a.dtype)[1:].reshape(a.shape)


REFUSED = {  # for (2, 30, 4, d) arrays: which one, its replacement, and part of the message
    "v shorter than k": ("v", lambda a: a[:, :-1].copy(), r"k and v of one shape, .*; got q \(2, 30, 4, \d+\), k "),
    "another batch": ("q", lambda a: a[:1], "with q's batch"),
    "heads that do not divide": ("q", lambda a: a[:, :, :3].copy(), "heads that divide q's"),
    "integers of as many bytes": ("q", lambda a: a.view(f"i{a.itemsize}"), "four axes, the last HEAD_DIM, .*; got int"),
    "three axes": ("k", lambda a: a[0], "four axes"),
    "no rows": ("q", lambda a: a[:, :0].copy(), r"at least one batch, row, key and head; got q \(2, 0, 4, \d+\), k "),
    "no keys": ("k", lambda a: a[:, :0].copy(), "at least one batch, row, key and head"),
    "an odd address": ("v", _displaced, "at multiples of 16 bytes; got .*, from address 0x[0-9a-f]+ on"),
}


@pytest.mark.skipif(ON_GPU, reason="the stand-in for CuPy is the CPU engine")
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("words", ["heads_and_masks", "flash_mma --dtype bfloat16"])
def test_what_the_kernel_would_misread_is_refused(
    words: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = imported(exported(words), tmp_path, monkeypatch)
    half = "bfloat16" in words
    given = {name: engine.zeros((2, 30, 4, 64), np.uint16 if half else np.float32) for name in "qkv"}
    module.flash_attention(**given)
    name, change, said = REFUSED[case]
    with pytest.raises(ValueError, match=said):
        module.flash_attention(**{**given, name: change(given[name])})
    if half:
        with pytest.raises(ValueError, match="bfloat16; got float16"):
            module.flash_attention(*(a.view(np.float16) for a in given.values()))


@pytest.mark.skipif(ON_GPU, reason="the stand-in for CuPy is the CPU engine")
@pytest.mark.parametrize(
    ("words", "change", "said"),
    [
        ("hopper", lambda a: a[:, ::-1], "rows contiguous, forward, and at multiples of 16 bytes"),
        ("register_tiles", _displaced, "C-contiguous arrays that start at a multiple of 16 bytes"),
        ("naive", lambda a: a[:, :, :0].copy(), "at least one batch, row, key and head"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_memory_that_a_launch_cannot_read_is_refused(
    words: str, change: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = imported(exported(words), tmp_path, monkeypatch)
    a = engine.zeros((2, 4, 4, 64), np.float16 if words == "hopper" else np.float32)
    with pytest.raises(ValueError, match=said):
        module.flash_attention(a, change(a), change(a))


@pytest.mark.skipif(ON_GPU, reason="the stand-in for CuPy is the CPU engine")
def test_gradients_are_refused_for_shapes_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = imported(exported("backward"), tmp_path, monkeypatch)
    a, lse = engine.zeros((2, 30, 4, 64), np.float32), engine.zeros((2, 4, 30), np.float32)
    module.flash_attention_backward(a, a, a, a, a, lse)
    with pytest.raises(ValueError, match="do and o have q's shape"):
        module.flash_attention_backward(a[:, :-1].copy(), a, a, a, a, lse)
    gaps = engine.zeros((2, 4, 60), np.float32)[..., ::2]
    for wrong in (lse[:, :, :-1].copy(), lse.view(np.int32), lse.swapaxes(1, 2).copy(), gaps):
        with pytest.raises(ValueError, match=r"lse is float32, \(batch, heads, n\), C-contiguous; got "):
            module.flash_attention_backward(a, a, a, a, a, wrong)
    naive = imported(exported("naive"), tmp_path, monkeypatch)
    with pytest.raises(ValueError, match="with q's batch and q's heads"):
        naive.flash_attention(a, a[:, :15].copy(), a[:, :15].copy())


@pytest.mark.skipif(ON_GPU, reason="the stand-in for CuPy is the CPU engine")
def test_without_a_gpu_the_check_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = imported(exported("naive"), tmp_path, monkeypatch)

    class CUDARuntimeError(RuntimeError):
        pass

    def none() -> int:
        raise CUDARuntimeError

    runtime = SimpleNamespace(getDeviceCount=none, CUDARuntimeError=CUDARuntimeError)
    monkeypatch.setattr(module, "cp", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    assert module.main() == 2
    assert capsys.readouterr().out == "needs an NVIDIA GPU, with a driver for this CuPy\n"


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU and CuPy: there, each file runs alone, in a folder of its own")
@each_export
def test_runs_alone(words: str, tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(exported(words))
    done = subprocess.run([sys.executable, "-I", "alone.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "[PASS]" in done.stdout and "[FAIL]" not in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(ON_GPU, reason="the stand-in for CuPy is the CPU engine")
@pytest.mark.parametrize(
    ("words", "right", "wrong"),
    [
        ("naive", "acc[c] / l_i;", "acc[c];"),
        ("heads_and_masks --causal", "        0,  # window_right", "        1,  # window_right"),
        ("flash_mma --lse", "strides(v),", "strides(q),"),
        ("backward", "args = q, k, v, do, lse", "args = q, k, v, o, lse"),
    ],
    ids=["kernel", "mask", "strides", "argument"],
)
def test_its_check_finds_a_fault(
    words: str,
    right: str,
    wrong: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = exported(words)
    assert text.count(right) == 1
    module = imported(text.replace(right, wrong), tmp_path, monkeypatch)
    try:
        assert module.main() == 1
    except engine.LaunchError as error:  # the engine stops a kernel that reads beyond an array
        assert "illegal read" in str(error)
    else:
        assert "[FAIL]" in capsys.readouterr().out


@pytest.mark.skipif(ON_GPU, reason="the stand-in for CuPy is the CPU engine")
@pytest.mark.exhaustive(one_of_each=lambda words: ("backward" in words, "hopper" in words))
@each_torch
def test_the_form_for_torch_computes_what_torch_does(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output, and its gradients by autograd if the stage has them; no other derivative silently becomes 0."""
    torch = pytest.importorskip("torch", reason="PyTorch is optional, and not installed here")
    forward_ad = torch.autograd.forward_ad
    module = imported(exported(words), tmp_path, monkeypatch)
    assert module.main("cpu") == 0
    told = capsys.readouterr().out.splitlines()
    alone = words.split()[0] in ("naive", "register_tiles")
    assert len(told) == (1 if alone else 4) and all(line.startswith("[PASS]") for line in told)
    d = module.HEAD_DIM
    rows, keys = ((2, 4, n, d) if alone else (2, n, 4, d) for n in (20, 30))
    q, k, v = (torch.randn(shape).to(module.DTYPE).requires_grad_() for shape in (rows, keys, keys))
    if alone:
        with pytest.raises(NotImplementedError, match="this file has no gradients"):
            module.flash_attention(q, k, v)
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
            dual = forward_ad.make_dual(v.detach(), torch.ones_like(v))
            module.flash_attention(q.detach(), k.detach(), dual)
        return
    o = module.flash_attention(q, k, v)
    o, lse = o if "--lse" in words else (o, None)
    assert lse is None or not lse.requires_grad
    o.sum().backward()  # the gradient of a sum is expanded: no kernel can read it
    heads_first = (a.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for a in (q, k, v))
    again = [*heads_first]
    other = module.flash_attention(*again)
    (other[0] if "--lse" in words else other).sum().backward()
    for a, b in zip((q, k, v), again, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-2 * float(a.grad.abs().max()), rtol=0)
    first = module.flash_attention(q, k, v)
    (dq,) = torch.autograd.grad((first[0] if "--lse" in words else first).sum(), q, create_graph=True)
    torch.testing.assert_close(dq.detach(), q.grad, atol=1e-2 * float(q.grad.abs().max()), rtol=0)
    with pytest.raises(NotImplementedError, match="no second derivatives"):  # the first depend on q nevertheless
        torch.autograd.grad(dq.sum(), k)
    with forward_ad.dual_level(), pytest.raises((NotImplementedError, RuntimeError), match="jvp"):  # PyTorch's own
        module.flash_attention(forward_ad.make_dual(q.detach(), torch.ones_like(q)), k.detach(), v.detach())
    with pytest.raises(ValueError, match=r"four axes, HEAD_DIM last, torch\.\w+; got torch\.float64"):
        module.flash_attention(q.double(), k, v)
    with pytest.raises(ValueError, match="k and v of one shape"):
        module.flash_attention(q, k, v[:, :-1])


def test_the_form_for_torch_launches_on_torchs_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses of tensors instead of tensors, and a context for a thread without one."""
    torch = pytest.importorskip("torch", reason="PyTorch is optional, and not installed here")
    module = imported(exported("flash_mma --torch"), tmp_path, monkeypatch)
    monkeypatch.undo()  # restore its own functions
    seen: list[Any] = []

    class Kernel:
        max_dynamic_shared_size_bytes = 0

        def __call__(self, *given: Any, shared_mem: int) -> None:
            seen.append((*given, shared_mem, self.max_dynamic_shared_size_bytes))

    def stream(*given: Any) -> Any:
        seen.append(given)
        return contextlib.nullcontext()

    cuda = SimpleNamespace(runtime=SimpleNamespace(setDevice=seen.append), ExternalStream=stream)
    monkeypatch.setattr(module, "cp", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(torch.cuda, "device", lambda where: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7, device_index=3))
    q, kernels = torch.zeros(2, 3), SimpleNamespace(get_function=lambda name: Kernel())
    with pytest.raises(ValueError, match="need an NVIDIA GPU; the tensors are on cpu"), module.on_stream_of(q):
        pass
    with module.on_stream_of(SimpleNamespace(device=torch.device("cuda", 3))):
        for shared in (0, 60_000):
            module.launch("a kernel", (1, 2), (32,), (q, None, np.int32(5)), shared, module=lambda: kernels)
    args = (1, 2), (32,), (q.data_ptr(), None, np.int32(5))
    assert seen == [3, (7, 3), (*args, 0, 0), (*args, 60_000, 60_000)]


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU, CuPy and PyTorch: there, each file runs alone")
@each_torch
def test_the_form_for_torch_runs_alone(words: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is optional, and not installed here")
    test_runs_alone(words, tmp_path)


@pytest.mark.skipif(ON_GPU, reason="the stand-in for CuPy is the CPU engine")
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("ctx.softmax_scale), None", "2 * ctx.softmax_scale), None"), ("return dq, dk, dv", "return dq, dv, dk")],
    ids=["scale", "order"],
)
def test_the_check_of_the_form_for_torch_finds_a_fault(
    right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="PyTorch is optional, and not installed here")
    text = exported("heads_and_masks --torch")
    assert text.count(right) == 1
    assert imported(text.replace(right, wrong), tmp_path, monkeypatch).main("cpu") == 1
    assert "[PASS] heads_and_masks, o:" in capsys.readouterr().out


@pytest.mark.parametrize("words", [*EXPORTS.values(), *TORCH.values()], ids=[*EXPORTS, *(f"torch: {a}" for a in TORCH)])
def test_needs_nothing_of_the_course(words: str) -> None:
    """Its imports, the form of its code, its licence."""
    text = exported(words)
    tree = ast.parse(text)
    modules = {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {
        name.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    assert modules - set(sys.stdlib_module_names) == {"cupy", "numpy"} | ({"torch"} if "--torch" in words else set())
    assert not re.search(r"^#\s*(line|pragma once|include\s*\")", text, re.M)
    assert "SPDX-License-Identifier: MIT" in text and "Copyright (c)" in text
    ruff = [sys.executable, "-m", "ruff"]
    named = ["--stdin-filename", str(ROOT / "exported.py"), "-"]
    for words_of_ruff in (["check", "--no-cache"], ["format", "--no-cache", "--check"]):
        done = subprocess.run([*ruff, *words_of_ruff, *named], input=text, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_nvrtc
@pytest.mark.parametrize(
    "words", [*("naive", "flash_wmma --dtype bfloat16", "backward_mma"), *("hopper", "hopper_backward --head-dim 128")]
)
def test_nvrtc_compiles_the_text(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the file's own options, for the oldest GPU that it names."""
    module = imported(exported(words), tmp_path, monkeypatch)
    defines = dict(option[2:].split("=") for option in module.OPTIONS if option.startswith("-D"))
    on_hopper = words.startswith("hopper")
    arch = "sm_90a" if on_hopper else "sm_75" if words == "naive" else "sm_80"
    for name in module.KERNELS:
        report = compile_report(module.SOURCE, defines, arch, name=name)
        assert report.registers > 0
    assert any("-arch=sm_90a" in option for option in module.OPTIONS) == on_hopper


@pytest.mark.exhaustive(one_of_each=lambda words: None)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@each_cpp
def test_nvcc_compiles_the_cpp_form(words: str, tmp_path: Path) -> None:
    """Without a GPU, once for each text: a file next to the builds records that nvcc accepted it."""
    text = exported(words, "--cpp")
    (tmp_path / "alone.cu").write_text(text)
    flags = ["-std=c++17", "-arch=sm_90", "-Xcompiler", "-Wall,-Wextra,-Werror", "-Werror", "all-warnings"]
    flags += ["-diag-suppress", "177"]  # constants of the kernels that an instance does not use
    binary = tmp_path / "alone"
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    asked = "\n".join([version, *map(str, compiler.compiler()), *flags, text])
    taken = compiler.cache_dir() / f"nvcc-{hashlib.sha256(asked.encode()).hexdigest()[:32]}"
    if not ON_GPU and taken.exists():
        return
    done = subprocess.run(["nvcc", *flags, "alone.cu", "-o", binary], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    taken.touch()
    if ON_GPU:
        ran = subprocess.run([binary], capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0 and "[PASS]" in ran.stdout and "[FAIL]" not in ran.stdout, ran.stdout + ran.stderr


def test_no_line_is_longer_than_the_kernels() -> None:
    for words in ("naive", "heads_and_masks --lse", "backward_mma"):
        lines = exported(words, "--cpp").split("// ---- the host's side")[1].splitlines()
        assert max(map(len, lines)) <= 120


# ---- what is planned


def test_sizes_remember_how_they_were_computed() -> None:
    n, heads, block = Size.named("n", 1003), Size.named("heads", 6), Size.constant("BLOCK_M", 128)
    tiles = -(-n // block)
    assert int(tiles) == 8 and python(tiles.tree) == "-(-n // BLOCK_M)" and cpp(tiles.tree) == "ceil_div(n, BLOCK_M)"
    both = 2 * (heads + 1) * tiles - n // 3
    assert python(both.tree) == "2 * (heads + 1) * -(-n // BLOCK_M) - n // 3"
    assert cpp(both.tree) == "2 * (heads + 1) * ceil_div(n, BLOCK_M) - n / 3"
    assert int(both) == eval(python(both.tree), {"n": 1003, "heads": 6, "BLOCK_M": 128})
    assert value(both.tree, {"n": 129, "heads": 2}) == 2 * 3 * 2 - 43
    assert python((32 * block).tree) == "4096" and tree_of(5) == ("number", 5)  # constants only: a number
    assert python((n - (heads - 2)).tree) == "n - (heads - 2)" and python((n // (heads * 2)).tree) == "n // (heads * 2)"


PLANNED = [
    pytest.param(causal, stage, id=f"{stage.name}-{'causal' if causal else 'all keys'}")
    for stage in LADDER.values()
    for causal in (False, True)
    if not causal or "causal" in stage.features
]


@pytest.mark.parametrize(("causal", "stage"), PLANNED)
def test_the_plan_is_the_stage_s_own(causal: bool, stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For sizes that it was not made with: grids, blocks, scratch and numbers equal the stage's own plan.

    A stage that cannot be exported must not be in EXPORTS.
    """
    request = Request(stage, dtype=stage.dtypes[-1], window=(-1, 0 if causal else -1))
    try:
        made = plan(request)
    except CannotExport:
        assert stage.name not in {words.split()[0] for words in EXPORTS.values()}
        return
    numbers = {"batch": 3, "heads": 8, "kv_heads": 4 if "gqa" in stage.features else 8, "n": 1234, "n_kv": 777}
    monkeypatch.setattr(limits, "multiprocessors", lambda: 132)
    call = call_of(request, numbers, 0.5)
    planned, scratch = stage.launches(stage, call, made.defines), stage.scratch(call, made.defines)
    known = {**numbers, "multiprocessors": 132}
    if "schedule" in scratch:
        known["rounds"] = scratch["schedule"].shape[0]
        known["together"] = heads_together(call, made.defines)
    if made.launches[0].each_head:
        assert len(planned) == 3 * 8
        planned = planned[:1]
    assert len(planned) == len(made.launches)
    for launch, mine in zip(planned, made.launches, strict=True):
        assert mine.kernel.startswith(launch.kernel) and mine.shared_bytes == launch.shared_bytes
        assert tuple(value(tree, known) for tree in mine.grid) == launch.grid
        assert tuple(value(tree, known) for tree in mine.block) == launch.block
        for arg, its in zip(mine.args, launch.args, strict=True):
            assert (arg.kind == "null") == (its is None)
            assert arg.kind != "int" or value(arg.tree, known) == its
    assert {name: tuple(value(t, known) for t in trees) for name, (trees, _) in made.scratch.items()} == {
        name: spec.shape for name, spec in scratch.items()
    }


def test_heads_are_worked_on_together_as_the_stage_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = imported(exported("hopper --causal"), tmp_path, monkeypatch)
    request = Request(LADDER["hopper"], dtype="float16", window=(-1, 0))
    defines = plan(request).defines
    monkeypatch.setattr(limits, "multiprocessors", lambda: 132)
    for numbers in ((2, 8, 2, 5000, 5000), (1, 3, 3, 100, 900), (5, 16, 4, 2000, 300), (1, 16, 16, 16896, 16896)):
        named = dict(zip(("batch", "heads", "kv_heads", "n", "n_kv"), numbers, strict=True))
        wanted = heads_together(call_of(request, named, 0.5), defines)
        assert module.heads_together(*numbers, 132) == wanted


# ---- the command


def test_writes_a_file_or_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["flash_mma", "-o", str(tmp_path / "flash.py")]) == 0
    told = capsys.readouterr().out
    assert "flash.py" in told and "python3" in told
    assert command.main(["flash_mma"]) == 0
    assert capsys.readouterr().out == (tmp_path / "flash.py").read_text()
    assert command.main(["flash_mma", "--cpp", "-o", str(tmp_path / "flash.cu")]) == 0
    assert "nvcc" in capsys.readouterr().out and "int main()" in (tmp_path / "flash.cu").read_text()
    spaced = tmp_path / "my kernels.py"
    assert command.main(["flash_mma", "-o", str(spaced)]) == 0
    assert capsys.readouterr().out.endswith(f"python3 '{spaced}'\n")


def test_where_no_file_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for output, why in (
        (tmp_path / "no" / "x.py", f"there is no folder {tmp_path / 'no'}"),
        (tmp_path, "it is a folder"),
    ):
        assert command.main(["flash_mma", "-o", str(output)]) == 1
        assert capsys.readouterr().err == f"course.py export: cannot write {output}: {why}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("8", "several stages: backward, backward_mma"),
        ("12_nothing", "no stage"),
        ("²", "no stage"),
        ("naive --causal", "has no causal=True"),
        ("naive --lse", "has no return_lse=True"),
        ("flash_mma --dtype float32", "takes float16 or bfloat16"),
        ("flash_mma --head-dim 20", "multiples of 8"),
        ("flash_mma --arch sm_75", "compute capability 8.0"),
        ("hopper --arch sm_100", "only compute capability 9.0"),
        ("hopper --cpp", "tensor maps and the table of tiles"),
        ("backward_mma --lse", "gradients start from lse"),
        ("naive --torch --deterministic", "has no deterministic=True"),
        ("backward --torch --head-dim 300", "head_dim = 300; this stage takes 1 to 256"),
        ("naive --kv-heads 2", "cannot share them out"),
        ("flash_mma --window -2 0", "at least 0, or -1"),
        ("flash_mma --deterministic", "has no deterministic=True"),
    ],
)
def test_says_why_not(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(words.split()) == 1
    told = capsys.readouterr()
    assert said in told.err and not told.out


def test_what_no_file_can_have_is_refused() -> None:
    """A launch that depends on more than the sizes: its plan is not exported as if it were constant."""
    stage = LADDER["heads_and_masks"]

    def odd(stage: Any, call: Any, sizes: Any) -> Any:
        [launch] = launches.strided(stage, call, sizes)
        return [stage.launch((call.rows % 97 + 1, *launch.grid[1:]), sizes, launch.args)]

    with pytest.raises(CannotExport, match="no size of the call explains it"):
        plan(Request(replace(stage, launches=odd)))


def test_headers_that_do_not_come_with_cuda_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "HEADERS", {"cuda_fp16.h", "cuda_bf16.h"})
    with pytest.raises(CannotExport, match=r"06_wmma\.cu includes <mma\.h>, which does not come with CUDA"):
        plan(Request(LADDER["flash_wmma"], dtype="float16"))
    plan(Request(LADDER["flash_mma"], dtype="float16"))


def test_a_stage_whose_results_have_another_type_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["fp8"]) == 1
    why = "stage fp8 takes e4m3 (in uint8) and returns bfloat16 or float16 or float32: an exported file has one type"
    assert why in capsys.readouterr().err


def test_the_tiles_are_those_of_the_gpu_asked_for() -> None:
    stage = LADDER["register_tiles"]
    shared = {arch: plan(Request(stage, target=target)).launches[0].shared_bytes for arch, target in TARGETS.items()}
    assert all(shared[arch] <= TARGETS[arch].shared for arch in TARGETS) and shared["sm_75"] < shared["sm_90"]
    assert limits.most_shared() == 227 * 1024 or ON_GPU  # and this machine's limits are restored
