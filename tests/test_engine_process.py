"""The CPU engine among processes: interrupts, forks, threads, the cache of builds, compilers, settings."""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from helpers import engine
from helpers.engine import runtime

ROOT = Path(__file__).resolve().parent.parent
HANGS = 600  # seconds: the limit for waits that may never end, however slow or busy the machine is
ADD = 'extern "C" __global__ void add(int *a, int n) { a[blockIdx.x * blockDim.x + threadIdx.x] += n; }\n'
PRELUDE = f"""
import os, signal, sys, time
import numpy as np
from helpers import engine
ADD = {ADD!r}
def good():
    a = engine.zeros(640, np.int32)
    engine.RawKernel(ADD, "add")((10,), (64,), (a, np.int32(3)))
    return bool((a == 3).all())
"""


def python(code: str, *, prelude: str = PRELUDE, **environment: str) -> subprocess.Popen[str]:
    """Start a process that runs `code` after PRELUDE; an empty value unsets a variable."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": paths, **environment}
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code],
        env={name: value for name, value in env.items() if value},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(process: subprocess.Popen[str], *, status: int = 0) -> str:
    """Return its output; it must have ended as expected."""
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == status, f"{process.returncode}\n{out}\n{err}"
    return out if status == 0 else err


# ---------------------------------------------------------------- interrupts

ENDLESS = {
    "loop": "for (volatile int i = 0;; ++i) {}",
    "barriers": "for (;;) __syncthreads();",
    "shuffles": "for (;;) a[0] = __shfl_xor_sync(~0u, a[0], 1);",
    "waiting": "while (*(volatile int *)a == 0) __nanosleep(100);",
    "library": "for (;;) a[1] = (int)(1e6f * powf(sinf((float)a[1]), 2.5f));",
    "printing": 'for (;;) { if (a[1]++ % 4096 == 0) printf("x"); }',
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_an_endless_launch_is_interrupted(kind: str) -> None:
    kernel = f'extern "C" __global__ void endless(int *a) {{ {ENDLESS[kind]} }}\n'
    code = f"""
kernel, a = engine.RawKernel({kernel!r}, "endless"), engine.zeros(4, np.int32)
kernel.compile()
good()
for turn in range(3):
    print("started", flush=True)
    try:
        kernel((64,), (64,), (a,))
    except KeyboardInterrupt:
        print("interrupted", good(), flush=True)
"""
    process = python(code)
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline() == "started\n"
        time.sleep(0.05)  # it keeps two cores busy
        process.send_signal(signal.SIGINT)
        # An engine that does not notice the interrupt ends the launch at its time limit, with another error.
        assert process.stdout.readline().split() == ["interrupted", "True"]
    output(process)


def test_interrupts_at_any_moment_leave_the_engine_well() -> None:
    """At any moment of a launch: an interrupt between two launches would end the process, and is only counted."""
    code = """
kernel, a = engine.RawKernel(ADD, "add"), engine.zeros(64 * 64, np.int32)
kernel.compile()
inside, between, caught = False, 0, 0
def interrupt(*_):
    global inside, between
    if inside:
        inside = False
        raise KeyboardInterrupt
    between += 1
signal.signal(signal.SIGINT, interrupt)
print("started", flush=True)
end = time.monotonic() + 600  # a signal is sent every 20 ms, and most come within a launch
while caught < 30 and time.monotonic() < end:
    try:
        inside = True
        kernel((64,), (64,), (a, np.int32(1)))
        inside = False
    except KeyboardInterrupt:
        caught += 1
signal.signal(signal.SIGINT, signal.SIG_IGN)
print(caught, between, good())
"""
    process = python(code)
    assert process.stdout is not None
    process.stdout.readline()
    while process.poll() is None:
        time.sleep(0.02)
        process.send_signal(signal.SIGINT)
    caught, _, good = output(process).split()
    assert int(caught) > 20 and good == "True"


# ---------------------------------------------------------------- forks, threads, other signals


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_children_launch_on_their_own() -> None:
    code = """
import warnings
warnings.simplefilter("ignore")  # of fork in a process with threads: that is what this is about
assert good()
a = engine.ones(64, np.int32)
children = []
for _ in range(4):
    pid = os.fork()
    if pid == 0:
        engine.RawKernel(ADD, "add")((1,), (64,), (a, np.int32(1)))
        own = bool((a == 2).all())
        try:
            engine.RawKernel(ADD, "add")((2,), (1024,), (a, np.int32(1)))
        except engine.LaunchError as error:
            os._exit(7 if good() and own and "a[64]" in str(error) else 1)
        os._exit(2)
    children.append(pid)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children], good(), bool((a == 1).all()))
"""
    assert output(python(code)).strip() == "[7, 7, 7, 7] True True"


def test_threads_of_python_launch_one_after_the_other() -> None:
    kernel = engine.RawKernel(ADD, "add")
    arrays = [engine.zeros(640, np.int32) for _ in range(6)]

    def many(a: Any) -> None:
        for _ in range(100):
            kernel((10,), (64,), (a, np.int32(1)))

    threads = [threading.Thread(target=many, args=(a,)) for a in arrays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((a == 100).all() for a in arrays)


def test_a_crash_that_is_not_a_kernels_is_told_by_whoever_listens() -> None:
    code = """
import ctypes, faulthandler
assert good()
faulthandler.enable()
assert good()
ctypes.string_at(8)
"""
    err = output(python(code), status=-signal.SIGSEGV)
    assert err.count("Fatal Python error: Segmentation fault") == 1 and "ctypes" in err


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="counts pages as Linux does")
def test_memory_is_given_back() -> None:
    def pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    def use() -> None:
        a = engine.zeros((256, 1024), np.float32)
        engine.RawKernel(ADD, "add")((1,), (64,), ((a * 2).astype(np.int32), np.int32(1)))
        view = a[5:]
        del a
        view[...] = 1

    for _ in range(300):  # by then each thread of the engine has run a block, and has stacks
        use()
    before = pages()
    for _ in range(300):
        use()
    assert pages() - before < 2000, "300 arrays of 1 MB have left more than 8 MB behind"


# ---------------------------------------------------------------- the cache of builds


# g++ reads the engine's headers precompiled.
BUILDS = ["engine", "flags", *(["headers"] if engine.compiler._is_gcc_on_linux() else []), "kernel", "known"]


def builds(folder: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in folder.iterdir())


class OwnBuilds(NamedTuple):
    """A cache of its own, filled by three processes at once."""

    settings: dict[str, str]  # settings of processes that use it
    cache: Path
    calls: list[str]  # calls of the compiler, which is a user's script
    said: list[str]  # the output of each process


@pytest.fixture(scope="module")
def own_builds(tmp_path_factory: pytest.TempPathFactory) -> OwnBuilds:
    """The engine takes seconds to build, so tests that need another build share this one.

    Its fibers are switched by the system, and it has no glibc space for a thread's variables.
    """
    folder = tmp_path_factory.mktemp("own")
    command, _ = engine.compiler.compiler()
    mine = folder / "my compiler"
    mine.mkdir()
    script = mine / "cxx"
    # The engine's objects are compiled once, and reused later.
    script.write_text(f"""#!/bin/sh
echo "$@" >> "{folder}/calls"
for output; do :; done
kept="{folder}/${{output##*/}}"
test -f "$kept" && exec cp "$kept" "$output"
{" ".join(command)} "$@" || exit
case "$output" in */part[01].o) cp "$output" "$kept";; esac
""")
    script.chmod(0o755)
    settings = {
        "CXX": "cxx",
        "PATH": f"{mine}{os.pathsep}{os.environ['PATH']}",
        "COURSE_CACHE": str(folder / "cache"),
        "COURSE_ENGINE_FLAGS": "-DENGINE_UCONTEXT -DENGINE_ANY_TLS -O0",
        "COURSE_CPU_OPTIMISATION": "",  # as set by each test
    }
    processes = [python("print(engine.compiler.compiler()[0], good())", **settings) for _ in range(3)]
    said = [output(process).strip() for process in processes]
    return OwnBuilds(settings, folder / "cache", (folder / "calls").read_text().splitlines(), said)


def test_parallel_builds_leave_one_good_file(own_builds: OwnBuilds, tmp_path: Path) -> None:
    own, cache, calls, said = own_builds
    assert [words.endswith(" True") for words in said] == [True] * 3
    compiled = [sum(f"{text}.cpp" in call for call in calls) for text in ("part0", "part1", "kernel")]
    assert compiled == [1, 1, 1], "the engine's two objects and the kernel, once for all of them"
    assert builds(cache) == BUILDS
    before = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    # Warm: nothing is built, and the compiler is called only for its version.
    code = """
import subprocess
run, calls = subprocess.run, []
subprocess.run = lambda command, **how: (calls.append(command[-1]), run(command, **how))[1]
print(good(), calls, "elftools" in sys.modules)
"""
    assert output(python(code, **own)).strip() == "True ['--version'] False"
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == before

    # Files damaged by a crash or a full disk are rebuilt.
    kernel = next(cache.glob("kernel-*"))
    engine = next(cache.glob("engine-*"))
    good = kernel.read_bytes()
    half = good[: len(good) // 2]
    for i, bad in enumerate((b"", b"not a library", good[:100], half)):
        (broken := tmp_path / f"broken-{i}.so").write_bytes(bad)
        with pytest.raises((OSError, AttributeError)):  # `build` relies on these
            runtime.KernelLibrary(broken)
    kernel.write_bytes(half)
    assert output(python("print(good(), good())", **own)).strip() == "True True"
    engine.write_bytes(b"\x7fELF, but no more")
    assert output(python("print(good())", **own)).strip() == "True"
    assert builds(cache) == BUILDS


# Its asm statement is read after the preprocessor, and its calls of the engine's headers tell where it waits.
MEETING = r"""#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#define DOUBLED(y, x) asm("add.f32 %0, %1, %1;" : "=f"(y) : "f"(x))
namespace cg = cooperative_groups;
extern "C" __global__ void meet(float *a, long long half) {
  const auto tile = cg::tiled_partition<32>(cg::this_thread_block());
  int t = threadIdx.x;
  DOUBLED(a[t], a[t + half]);
  if (t >= half) a[t] = cg::reduce(tile, a[t], cg::plus<float>());
  else if (half < NOW) __syncwarp();
}
"""
ELSEWHERE = """
import sys
sys.dont_write_bytecode = True
from helpers import engine
from helpers.engine.xray import xray
from helpers.engine import known
compiled, compile_one, built = 0, engine.compiler._compile, known.built
def counted(*how):
    global compiled
    compiled += 1
    return compile_one(*how)
def told(*how):
    result = built(*how)
    print(result.library.path)
    return result
engine.compiler._compile, known.built = counted, told
print(engine.compiler.engine_library())
kernel, args = engine.RawKernel(CODE, "meet"), (engine.ones(32, engine.float32), engine.int64(16))
try:
    kernel((1,), (32,), args)
except engine.LaunchError as error:
    print(error)
print(*xray(kernel, (1,), (32,), args).findings, compiled, sep=chr(10))
"""


@pytest.mark.skipif(engine.compiler._RENAMES not in engine.compiler.flags(), reason="the compiler renames no folders")
def test_checkouts_at_other_places_share_their_builds(tmp_path: Path) -> None:
    """Including the engine's; and no build contains the name of a file of its checkout."""
    engine.empty(1)  # the engine is built by now
    said = []
    for name in ("one", "another"):
        target = tmp_path / name / "helpers" / "engine"
        shutil.copytree(ROOT / "helpers" / "engine", target, ignore=shutil.ignore_patterns("__pycache__"))
    code = MEETING.replace("NOW", str(time.time_ns()))
    for name in ("one", "another"):
        words = [sys.executable, "-c", f"CODE = {code!r}\n{ELSEWHERE}"]
        done = subprocess.run(words, cwd=tmp_path / name, capture_output=True, text=True, timeout=HANGS)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines())
    (*first, compiled), (*again, compiled_again) = said
    assert (first, compiled, compiled_again) == (again, "2", "0")
    assert any("lane 16 in cg::reduce at kernel.cu:9" in line for line in first), first
    assert any("out of bounds: read of a[32]" in line and "kernel.cu:8" in line for line in first), first
    built = {Path(line) for line in first if line.endswith(".so")}
    assert len(built) == 3  # the engine, the kernel, and the kernel for the X-ray
    for path in built:
        assert str(tmp_path).encode() not in path.read_bytes()


@pytest.mark.skipif(not engine.compiler._is_gcc_on_linux(), reason="headers are precompiled for g++ on Linux")
def test_headers_are_precompiled_once_and_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.empty(1)  # the engine itself comes from the usual cache
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path))
    compiled, compile_one = [], engine.compiler._compile
    monkeypatch.setattr(engine.compiler, "_compile", lambda *how: compiled.append(how[1]) or compile_one(*how))

    def build(more: str, *options: str) -> list[list[str]]:
        """Return the compiler options of a new kernel; its text differs each time."""
        compiled.clear()
        code = f"{more}\n// {time.time_ns()}\n{ADD}"
        engine.RawModule(code=code, options=("-std=c++17", *options)).compile()
        return list(compiled)

    def headers() -> list[Path]:
        return sorted(path for path in tmp_path.glob("headers-*") if path.is_dir())

    assert "-include" in build("")[0] and len(headers()) == 1
    assert "-include" in build("#define N 3")[0] and len(headers()) == 1
    assert "-include" in build("#include <cuda_fp16.h>")[0] and len(headers()) == 1  # a list that may never occur again
    assert "-include" in build("#include <cuda_fp16.h>")[0] and len(headers()) == 2
    # Macros that the headers test: they are read with the source's macros.
    assert "-include" not in build("#include <cuda_fp16.h>", "-D__CUDA_NO_HALF_OPERATORS__")[0]
    with pytest.raises(engine.CompileError):
        build("#include <cuda_fp16.h>\n__device__ half sum(half a) { return a + a; }", "-D__CUDA_NO_HALF_OPERATORS__")
    with pytest.raises(engine.CompileError, match=r"kernel.cu:1: error: .*wrong"):
        build("wrong;")
    assert len(compiled) == 1, "an error of the source is no fault of the headers"

    # Damaged by a crash or a full disk: the kernel is compiled without them, and the next one rewrites them.
    before = headers()
    folder = next(folder for folder in before if "fp16" not in folder.joinpath("engine.h").read_text())
    precompiled = folder / "engine.h.gch"
    for bad in (b"", precompiled.read_bytes()[:100_000]):
        precompiled.write_bytes(bad)
        build("")
        build("")
    assert headers() == before

    # A month later, with other headers or another compiler, they are deleted.
    for folder in before:
        os.utime(folder, (time.time() - 31 * 86400,) * 2)
    build("", "-std=c++20")
    assert len(headers()) == 1 and headers()[0] not in before


@pytest.mark.skipif(not engine.compiler._is_gcc_on_linux(), reason="g++ on Linux is told which libraries to leave out")
def test_a_plain_kernel_is_linked_without_the_cpp_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linking it takes three times as long; the table of kernels, malloc() and new do not need it."""
    linked, flags = [], engine.compiler._link_flags
    monkeypatch.setattr(engine.compiler, "_link_flags", lambda *how: linked.append(flags(*how)) or linked[-1])
    more = "*(int **)a = (int *)malloc(4); delete new int; "
    engine.RawModule(code=f"// {time.time_ns()}\n{ADD.replace('{ ', '{ ' + more)}").compile()
    assert len(linked) == 1 and "-nodefaultlibs" in linked[0]
    monkeypatch.setattr(engine.compiler, "_binutils", lambda: None)
    engine.RawModule(code=f"// {time.time_ns()}\n{ADD}").compile()
    assert len(linked) == 2 and "-nodefaultlibs" in linked[1]


SQUARE_ROOT = 'extern "C" __global__ void root(float* x, int n) {{ if (threadIdx.x < n) x[threadIdx.x] = {}; }}\n'


@pytest.mark.skipif(engine.compiler._binutils() is None, reason="g++ on Linux and x86-64 is asked for its linker")
def test_a_kernel_of_usual_calls_is_linked_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The linker alone gives the same result; if a call is unusual or the linker fails, g++ links."""
    linked, flags = [], engine.compiler._link_flags
    monkeypatch.setattr(engine.compiler, "_link_flags", lambda *how: linked.append(flags(*how)) or linked[-1])

    def roots(expression: str) -> np.ndarray:
        x = engine.array(np.arange(1, 33, dtype=np.float32))
        code = f"// {time.time_ns()}\n{SQUARE_ROOT.format(expression)}"
        engine.RawKernel(code, "root")((1,), (32,), (x, np.int32(32)))
        return x.get()

    expected = np.exp2(np.arange(1, 33, dtype=np.float32) / 4)
    np.testing.assert_allclose(roots("exp2f(x[threadIdx.x] / 4)"), expected, rtol=1e-6)
    assert not linked
    roots("tgammaf(x[threadIdx.x])")
    assert len(linked) == 1
    assembler, _, mathematics = engine.compiler._binutils()
    monkeypatch.setattr(engine.compiler, "_binutils", lambda: (assembler, "false", mathematics))
    np.testing.assert_allclose(roots("exp2f(x[threadIdx.x] / 4)"), expected, rtol=1e-6)
    assert len(linked) == 2


def test_a_kernel_that_needs_the_cpp_library_is_linked_with_it() -> None:
    code = """
struct Shape { virtual __device__ int area() const { return 0; } virtual __device__ ~Shape() {} };
struct Square : Shape {
  int side;
  __device__ Square(int s) : side(s) {}
  __device__ int area() const override { return side * side; }
};
extern "C" __global__ void areas(int *out) {
  const Shape *shape = new Square(threadIdx.x);
  out[threadIdx.x] = shape->area();
  delete shape;
}
"""
    out = engine.zeros(8, np.int32)
    engine.RawKernel(code, "areas")((1,), (8,), (out,))
    np.testing.assert_array_equal(out, np.arange(8) ** 2)


def test_a_cache_that_cannot_be_written_is_replaced() -> None:
    code = "print(engine.compiler.cache_dir())"
    folder = output(python(code, COURSE_CACHE="/dev/null/cache", TMPDIR="/tmp")).strip()
    assert re.fullmatch(r"/tmp/attention-course-\d+", folder)


# ---------------------------------------------------------------- compilers and settings


def test_no_compiler(tmp_path: Path) -> None:
    code = """
engine.compiler.importlib.util.find_spec = lambda name: None  # no ziglang either
try:
    good()
except engine.NoCompilerError as error:
    print(error)
"""
    text = output(python(code, PATH=str(tmp_path), CXX=""))
    for part in (
        "C++17 compiler for kernels and found none",
        "sudo apt install g++",
        "xcode-select --install",
        "pip install ziglang",
    ):
        assert part in text
    assert "NoCompilerError" not in text


def test_the_users_compiler_is_taken_first(own_builds: OwnBuilds, tmp_path: Path) -> None:
    assert own_builds.said == ["('cxx',) True"] * 3
    assert own_builds.calls[0] == "--version" and any("kernel.cpp" in call for call in own_builds.calls)
    (tmp_path / "broken").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "broken").chmod(0o755)
    code = "print(engine.compiler.compiler()[0], good())"
    assert output(python(code, CXX=str(tmp_path / "broken"))).endswith("True\n")  # one that fails is skipped


UCONTEXT = r"""
SOURCE = '''
extern "C" __global__ void scan(int *a) {
  __shared__ int s[1024];
  int t = threadIdx.x;
  s[t] = a[t];
  __syncthreads();
  for (int step = 1; step < blockDim.x; step *= 2) {
    int add = t >= step ? s[t - step] : 0;
    __syncthreads();
    s[t] += add;
    __syncthreads();
  }
  a[t] = s[t];
}
extern "C" __global__ void sum(int *a) {
  int v = a[threadIdx.x];
  if (threadIdx.x % 32 > 20) return;
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step) * (threadIdx.x % 32 + step < 21);
  a[threadIdx.x] = __ballot_sync(~0u, v > 0) != 0;
}
extern "C" __global__ void wild(int *a) { a[threadIdx.x * 100] = 1; }
extern "C" __global__ void half_way(int *a) {
  if (threadIdx.x < 7) __syncthreads();
  else __syncthreads();
}
extern "C" __global__ void deep(volatile int *a, int n) {
  volatile int local[100000];
  for (int i = 0; i < n; ++i) local[i] = a[0];
}
extern "C" __global__ void endless(int *a) { for (;;) a[0] = __any_sync(~0u, a[0]); }
'''
module = engine.RawModule(code=SOURCE)
a = engine.ones(1024, np.int32)
for _ in range(20):
    a[...] = 1
    module.get_function("scan")((1,), (1024,), (a,))
    assert (a == np.arange(1, 1025)).all()
module.get_function("sum")((3,), (96,), (a,))
cases = [("wild", (a,), "a[1100]"), ("half_way", (a,), "divergence"), ("deep", (a, np.int32(9)), "stack")]
for name, args, says in cases:
    for _ in range(20):
        try:
            module.get_function(name)((4,), (64,), args)
            raise SystemExit(f"{name} did not fail")
        except engine.LaunchError as error:
            assert says in str(error), error
import threading
threading.Timer(0.3, lambda: signal.raise_signal(signal.SIGINT)).start()
try:
    module.get_function("endless")((9,), (64,), (a,))
except KeyboardInterrupt:
    print(good())
"""


def test_the_portable_way_to_switch_fibers(own_builds: OwnBuilds) -> None:
    """ucontext, for processors without assembly code: the same kernels, the same errors."""
    assert output(python(UCONTEXT, **own_builds.settings)).strip() == "True"


# A function of another library whose caller cannot be found: its frame begins where register rbp says.
LOST = """
import ctypes
lost = ctypes.CDLL(sys.argv[1]).lost
kernel = engine.RawKernel(
    'extern "C" __global__ void k(unsigned long long f) { if (threadIdx.x == 5) ((void (*)())f)(); }', "k")
for _ in range(3):
    try:
        kernel((1,), (32,), (np.uint64(ctypes.cast(lost, ctypes.c_void_p).value),))
    except engine.LaunchError as error:
        print(error.thread, good())
"""


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="written for x86-64's registers")
def test_a_fault_on_a_stack_that_is_overwritten(tmp_path: Path) -> None:
    """A thread that writes past its own arrays overwrites it. Looking for the fault's line must not fault again."""
    source, library = tmp_path / "lost.cpp", tmp_path / "lost.so"
    source.write_text('extern "C" void lost() { asm volatile("mov $8, %rbp; mov (%rbp), %rax"); }')
    options = "-O0", "-fno-omit-frame-pointer", "-shared", "-fPIC", "-o", library
    subprocess.run([*engine.compiler.compiler()[0], source, *options], check=True)
    code = f"sys.argv[1:] = [{str(library)!r}]{LOST}"
    assert output(python(code)).splitlines() == ["(5, 0, 0) True"] * 3


@pytest.mark.parametrize("value", ["0", "17", "-1", "many", "2.5"])
def test_wrong_numbers_of_threads(value: str) -> None:
    code = "try:\n    good()\nexcept ValueError as error:\n    print(error)"
    said = output(python(code, COURSE_CPU_THREADS=value)).strip()
    assert said == f"COURSE_CPU_THREADS must be a number from 1 to 16; got {value!r}"


@pytest.mark.parametrize("count", [1, 16])
def test_numbers_of_threads(count: int) -> None:
    code = "print(good(), engine.cuda.runtime.getDeviceProperties(0)['multiProcessorCount'], engine.cuda.describe())"
    said = output(python(code, COURSE_CPU_THREADS=str(count)))
    assert said.startswith(f"True 2 CPU engine, {count} thread"), "the device is the same, whatever the machine"


def test_the_switch_between_devices() -> None:
    code = "from helpers.device import ON_GPU, cp, describe\nprint(ON_GPU, cp.__name__, describe())"
    said = output(python(code, prelude="", COURSE_DEVICE="cpu"))
    assert said.startswith("False helpers.engine CPU engine, ") and "kernels compiled by" in said
    assert output(python(code, prelude="", COURSE_DEVICE="CPU")).startswith("False helpers.engine")
    err = output(python(code, prelude="", COURSE_DEVICE="tpu"), status=1)
    assert err.endswith("ValueError: COURSE_DEVICE is 'cpu' or 'gpu', not 'tpu'\n")
    # Without a visible GPU, even on a machine that has one.
    for wish, starts in (("", "False helpers.engine"), ("gpu", "")):
        process = python(code, prelude="", COURSE_DEVICE=wish, CUDA_VISIBLE_DEVICES="-1")
        if starts:
            assert output(process).startswith(starts)
        else:
            err = output(process, status=1)
            assert "RuntimeError: COURSE_DEVICE=gpu, but there is no GPU to use: " in err
            assert "Unset it to run on the CPU." in err


def test_a_tiny_launch_costs_little() -> None:
    kernel, a = engine.RawKernel(ADD, "add"), engine.zeros(32, np.int32)
    kernel((1,), (32,), (a, np.int32(1)))
    few = range(20)
    launch, yardstick = float("inf"), float("inf")
    for _ in range(10):  # in turns: CPU time, the minimum of each
        start = time.process_time()
        for _ in few:
            kernel((1,), (32,), (a, np.int32(1)))
        between = time.process_time()
        for _ in few:
            sum(range(10_000))
        launch, yardstick = min(launch, between - start), min(yardstick, time.process_time() - between)
    assert launch < 4 * yardstick, f"{launch / yardstick:.2f} times the sum of 10,000 numbers in Python"


def test_a_warm_launch_calls_few_functions() -> None:
    """Only the engine's functions count. A message built for each argument before any error would multiply them."""
    kernel, a = engine.RawKernel(ADD, "add"), engine.zeros(32, np.int32)
    kernel((1,), (32,), (a, np.int32(1)))
    called: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and Path(engine.__file__).parent in Path(frame.f_code.co_filename).parents:
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        kernel((1,), (32,), (a, np.int32(1)))
    finally:
        sys.setprofile(None)
    assert 0 < len(called) <= 35, called


def test_the_level_of_optimisation_may_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the fast build's level; checked builds and the engine's own tests keep theirs."""
    assert "COURSE_CPU_OPTIMISATION" not in os.environ and "-O2" in engine.compiler.flags()
    monkeypatch.setenv("COURSE_CPU_OPTIMISATION", "1")
    assert "-O1" in engine.compiler.flags() and "-O2" not in engine.compiler.flags()
    assert [flag for flag in engine.compiler._checked_flags(True) if flag.startswith("-O")] == ["-O1"]
    monkeypatch.setenv("COURSE_CPU_OPTIMISATION", "g")
    assert "-Og" in engine.compiler.flags() and "-O1" not in engine.compiler.flags()
    monkeypatch.setenv("COURSE_CPU_OPTIMISATION", "fast")
    with pytest.raises(ValueError, match="a number from 0 to 3, or g; got 'fast'"):
        engine.compiler.flags()


@pytest.mark.parametrize("name", ["sync", "send"])
@pytest.mark.parametrize("more", ["", "new int; "])  # linked by the linker alone, and by the compiler
def test_a_kernel_may_have_the_name_of_a_function_of_the_c_library(name: str, more: str) -> None:
    x = engine.zeros(3, np.int32)
    code = f'extern "C" __global__ void {name}(int *x) {{ {more}x[threadIdx.x] = 7; }}'
    engine.RawKernel(code, name)((1,), (3,), (x,))
    assert x.get().tolist() == [7, 7, 7]
