"""A stage as one .cu file for nvcc: the kernel, its launches, and a main() that compares with loops in double."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from helpers.attention.export.plan import Argument, CannotExport, Field, Plan, PlannedLaunch, Request
from helpers.attention.export.sizes import cpp
from helpers.attention.export.text import Sizes, about, kernel_text, licence

_TYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16", "int32": "int"}
_TO_FLOAT = {"float32": "{}", "float16": "__half2float({})", "bfloat16": "__bfloat162float({})"}
_FROM_FLOAT = {"float32": "{}", "float16": "__float2half({})", "bfloat16": "__float2bfloat16({})"}
_STEP = {"float16": "1.0 / 1024", "bfloat16": "1.0 / 128"}  # from 1 to the next number

_HOST = """#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#define CUDA_CHECK(call)                                                                  \\
  do {                                                                                    \\
    cudaError_t error = (call);                                                           \\
    if (error != cudaSuccess) {                                                           \\
      std::fprintf(stderr, "%s:%d: %s\\n", __FILE__, __LINE__, cudaGetErrorString(error)); \\
      std::exit(2);                                                                       \\
    }                                                                                     \\
  } while (0)

template <typename T>
T* device_array(size_t size) {
  T* a;
  CUDA_CHECK(cudaMallocAsync(&a, size * sizeof(T), 0));
  return a;
}

template <typename T>
T* to_device(const std::vector<T>& here) {
  T* a = device_array<T>(here.size());
  CUDA_CHECK(cudaMemcpy(a, here.data(), here.size() * sizeof(T), cudaMemcpyHostToDevice));
  return a;
}

template <typename T>
std::vector<T> to_host(const T* a, size_t size) {
  std::vector<T> here(size);
  CUDA_CHECK(cudaMemcpy(here.data(), a, size * sizeof(T), cudaMemcpyDeviceToHost));
  return here;
}

int ceil_div(int a, int b) { return (a + b - 1) / b; }
"""


def text(plan: Plan, sizes: Sizes) -> str:
    """The file. sizes: of the arrays that its check uses.

    Raises:
        CannotExport: a launch takes tensor maps, or a table of tiles.
    """
    if plan.maps or plan.table:
        raise CannotExport(
            f"the .cu form has no host code for the tensor maps and the table of tiles of {plan.request.stage.name}; "
            "the Python form has (leave --cpp out)"
        )
    parts = [_opening(plan), kernel_text(plan.request.stage.file), *_host(plan), _main(plan, sizes)]
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def _opening(plan: Plan) -> str:
    lines = [
        *about(plan),
        "",
        "Build and run:  nvcc -std=c++17 -arch=native THIS_FILE.cu -o attention && ./attention",
        "",
    ]
    lines += licence()
    comment = "\n".join(f"// {line}".rstrip() for line in lines)
    defines = "\n".join(f"#define {name} {value}" for name, value in plan.defines.items())
    return f"{comment}\n\n{defines}\n\n// ---- {plan.request.stage.file}\n"


def _host(plan: Plan) -> Iterator[str]:
    request = plan.request
    yield f"// ---- the host's side\n\n{_HOST}\nusing Element = {_TYPES[request.dtype]};\n"
    if request.model_layout:
        yield """// Where row `row` of head `head` begins in an array (batch, rows, heads, HEAD_DIM).
size_t at(int batch, int row, int rows, int head, int heads) {
  return (((size_t)batch * rows + row) * heads + head) * HEAD_DIM;
}

Strides strides(int rows, int heads) {
  return {(long long)rows * heads * HEAD_DIM, (long long)heads * HEAD_DIM, HEAD_DIM};
}
"""
    else:
        yield """// Where row `row` of head `head` begins in an array (batch, heads, rows, HEAD_DIM).
size_t at(int batch, int row, int rows, int head, int heads) {
  return (((size_t)batch * heads + head) * rows + row) * HEAD_DIM;
}
"""
    yield _entry(plan)


def _parameters(request: Request) -> list[tuple[str, str]]:
    """(type, name) of the entry's parameters."""
    given = ["do_", "q", "k", "v", "o"] if request.backward else ["q", "k", "v"]
    written = ["dq", "dk", "dv"] if request.backward else ["o"]
    parameters = [("const Element*", name) for name in given]
    if request.backward:
        parameters.append(("const float*", "lse"))
    parameters += [("Element*", name) for name in written]
    if request.return_lse:
        parameters.append(("float*", "lse"))
    return parameters + [("int", name) for name in _sizes(request)] + [("float", "softmax_scale")]


def _sizes(request: Request) -> list[str]:
    names = ["batch", "n", "n_kv", "heads"]
    return [*names, "kv_heads"] if "gqa" in request.stage.features else names


def _name(array: str) -> str:
    """`do` is a word of C++."""
    return "do_" if array == "do" else array


def _entry(plan: Plan) -> str:
    request = plan.request
    shape = "(batch, {}, {}, HEAD_DIM)" if request.model_layout else "(batch, {1}, {0}, HEAD_DIM)"
    kv_heads = "kv_heads" if "gqa" in request.stage.features else "heads"
    like_q, like_k = ("do_, q, o, dq", "k, v, dk, dv") if request.backward else ("q, o", "k, v")
    what = "The gradients of attention." if request.backward else "softmax(softmax_scale q k^T) v for each head."
    lines = [
        f"// {what} Pointers are to device memory, arrays dense.",
        f"//   {like_q}  {shape.format('n', 'heads')}",
        f"//   {like_k}  {shape.format('n_kv', kv_heads)}",
    ]
    if request.return_lse or request.backward:
        lines.append("//   lse  (batch, heads, n)")
    name = "flash_attention_backward" if request.backward else "flash_attention"
    lines.append(f"void {name}(")
    parameters = [f"{kind} {name}" for kind, name in _parameters(request)]
    lines += [f"    {', '.join(parameters)}) {{"] if sum(map(len, parameters)) < 80 else _wrapped(parameters)
    for array, (sizes, dtype) in plan.scratch.items():
        first, *others = (cpp(size) for size in sizes)
        count = " * ".join([f"(size_t)({first})" if " " in first else f"(size_t){first}", *others])
        kind = _TYPES[np.dtype(dtype).name]
        lines.append(f"  {kind}* {array} = device_array<{kind}>({count});")
    for parameter, struct in plan.structs.items():
        lines += [f"  const {struct.type} {parameter}{{", *_struct(struct.fields, "      ", request), "  };"]
    for launch in plan.launches:
        lines += _launch(launch)
    lines += [f"  CUDA_CHECK(cudaFreeAsync({array}, 0));" for array in plan.scratch]
    return "\n".join([*lines, "}"])


def _wrapped(parameters: Sequence[str]) -> list[str]:
    """Lines of at most 120 characters."""
    lines, line = [], "    "
    for i, parameter in enumerate(parameters):
        piece = parameter + (") {" if i == len(parameters) - 1 else ", ")
        if len(line) + len(piece) > 120:
            lines.append(line.rstrip())
            line = "    "
        line += piece
    return [*lines, line]


def _struct(fields: Sequence[Field], indent: str, request: Request) -> list[str]:
    lines = []
    for field in fields:
        if field.kind == "struct":
            lines += [f"{indent}{{", *_struct(field.fields, indent + "    ", request), f"{indent}}},"]
        elif field.kind == "strides":
            of_keys = field.array in ("k", "v", "dk", "dv")
            rows = ("n_kv", "kv_heads" if "gqa" in request.stage.features else "heads") if of_keys else ("n", "heads")
            lines.append(f"{indent}strides({', '.join(rows)}),")
        elif field.kind == "scale":
            lines.append(f"{indent}softmax_scale,")
        else:
            named = field.tree[0] != "number"
            value = "UNLIMITED" if field.tree == ("number", 2**29) else cpp(field.tree)
            lines.append(f"{indent}{value}," + ("" if named else f"  // {field.name}"))
    return lines


def _launch(launch: PlannedLaunch) -> list[str]:
    lines, indent = [], "  "
    if launch.shared_bytes > 48 * 1024:  # more has to be asked for
        attribute = "cudaFuncAttributeMaxDynamicSharedMemorySize"
        lines += [
            f"  CUDA_CHECK(cudaFuncSetAttribute({launch.kernel}, {attribute}, {launch.shared_bytes}));",
        ]
        if len(lines[-1]) > 120:
            lines[-1:] = [
                "  CUDA_CHECK(cudaFuncSetAttribute(",
                f"      {launch.kernel}, {attribute}, {launch.shared_bytes}));",
            ]
    if launch.each_head:
        lines += [
            "  for (int head = 0; head < batch * heads; ++head) {",
            "    const size_t rows = (size_t)head * n * HEAD_DIM, keys = (size_t)head * n_kv * HEAD_DIM;",
        ]
        indent = "    "
    sizes = [f"dim3({', '.join(map(cpp, launch.grid))})", cpp(launch.block[0])]
    if launch.shared_bytes:
        sizes.append(str(launch.shared_bytes))
    lines += [
        f"{indent}{launch.kernel}<<<{', '.join(sizes)}>>>(",
        f"{indent}    {', '.join(map(_argument, launch.args))});",
        f"{indent}CUDA_CHECK(cudaGetLastError());",
    ]
    return [*lines, "  }"] if launch.each_head else lines


def _argument(arg: Argument) -> str:
    if arg.kind == "head":
        return f"{arg.name} + {'rows' if arg.name in ('q', 'o') else 'keys'}"
    if arg.kind == "null":
        return "nullptr"
    if arg.kind == "int":
        return cpp(arg.tree)
    return _name(arg.name)


# ---- the check


def _main(plan: Plan, sizes: Sizes) -> str:
    request = plan.request
    body = _gradients(request, sizes) if request.backward else _output(request, sizes)
    return "\n".join([*_weights(request), *_random(request), *body])


def _weights(request: Request) -> list[str]:
    """The weights of one row, in double: what both checks need."""
    left, right = request.window
    tests = [f"j >= i + n_kv - n - {left}"] * (left >= 0) + [f"j <= i + n_kv - n + {right}"] * (right >= 0)
    seen = " && ".join(tests).replace(" - 0", "").replace(" + 0", "")
    row = "int i, int n, " if seen else ""
    return [
        f"// p[n_kv]: the weights of {'row i' if seen else 'a row'}, in double. Returns the log-sum-exp of its scores. "
        "Keys are `stride` elements apart.",
        "double weights(",
        f"    std::vector<double>& p, const float* q, const float* k, size_t stride, {row}int n_kv, double scale) {{",
        "  double largest = -INFINITY, sum = 0;",
        "  p.assign(n_kv, -INFINITY);",
        "  for (int j = 0; j < n_kv; ++j) {",
        *([f"    if (!({seen})) continue;  // the last row is aligned with the last key"] if seen else []),
        "    double s = 0;",
        "    for (int c = 0; c < HEAD_DIM; ++c) s += (double)q[c] * k[j * stride + c];",
        "    p[j] = scale * s;",
        "    largest = std::fmax(largest, p[j]);",
        "  }",
        "  for (int j = 0; j < n_kv; ++j) {",
        "    p[j] = p[j] == -INFINITY ? 0 : std::exp(p[j] - largest);",
        "    sum += p[j];",
        "  }",
        "  for (int j = 0; j < n_kv && sum > 0; ++j) p[j] /= sum;",
        "  return largest + std::log(sum);",
        "}",
    ]


def _call_of_weights(request: Request) -> str:
    row = "i, n, " if request.masked else ""
    return f"weights(p, &q_here[row], &k_here[key], stride, {row}n_kv, softmax_scale)"


def _random(request: Request) -> list[str]:
    to_float = _TO_FLOAT[request.dtype].format("there[i]")
    from_float = _FROM_FLOAT[request.dtype].format("normal(generator) + 0.25f")
    passes = "one step of the type at the largest value" if request.dtype in _STEP else "1e-5"
    return [
        "",
        "// Random numbers on the device; and as the kernel sees them, in float.",
        "Element* random_array(size_t size, unsigned seed, std::vector<float>& here) {",
        "  std::mt19937 generator(seed);",
        "  std::normal_distribution<float> normal;",
        "  std::vector<Element> there(size);",
        "  here.resize(size);",
        "  for (size_t i = 0; i < size; ++i) {",
        f"    there[i] = {from_float};",
        f"    here[i] = {to_float};",
        "  }",
        "  return to_device(there);",
        "}",
        "",
        f"// Whether the largest error of a device array is at most {passes}. NaN does not pass.",
        "bool passes(const char* name, const Element* on_device, const std::vector<double>& wanted) {",
        "  const std::vector<Element> there = to_host(on_device, wanted.size());",
        "  double error = 0, largest = 0;",
        "  for (size_t i = 0; i < there.size(); ++i) {",
        f"    const double difference = std::fabs({to_float} - wanted[i]);",
        "    error = std::isnan(difference) ? INFINITY : std::fmax(error, difference);",
        "    largest = std::fmax(largest, std::fabs(wanted[i]));",
        "  }",
        f"  const double tolerance = {_tolerance(request)};",
        "  const bool right = error <= tolerance;",
        '  std::printf("[%s] %s: max error %.1e, %.1e allowed\\n", right ? "PASS" : "FAIL", name, error, tolerance);',
        "  return right;",
        "}",
    ]


def _tolerance(request: Request) -> str:
    if request.dtype in _STEP:
        return f"{_STEP[request.dtype]} * largest"
    return "1e-5 * std::fmax(largest, 1)" if request.backward else "1e-5"


def _numbers(request: Request, sizes: Sizes) -> list[str]:
    values = [f"{name} = {value}" for name, value in zip(("batch", "n", "n_kv", "heads"), sizes, strict=False)]
    kv_heads = f", kv_heads = {sizes.kv_heads}" if "gqa" in request.stage.features else ", kv_heads = heads"
    return [
        "",
        "int main() {",
        "  int gpus = 0;",
        "  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) {",
        '    std::fprintf(stderr, "needs an NVIDIA GPU, with a driver for this CUDA\\n");',
        "    return 2;",
        "  }",
        f"  const int {', '.join(values)}{kv_heads};",
        "  const float softmax_scale = 1 / std::sqrt((float)HEAD_DIM);",
        "  const size_t rows = (size_t)batch * n * heads * HEAD_DIM;",
        "  const size_t keys = (size_t)batch * n_kv * kv_heads * HEAD_DIM;",
    ]


def _call(request: Request) -> str:
    names = [name for _, name in _parameters(request)]
    return ", ".join(names)


def _loops(request: Request) -> list[str]:
    stride = "(size_t)kv_heads * HEAD_DIM" if request.model_layout else "HEAD_DIM"
    return [
        f"  const size_t stride = {stride};  // from one key to the next",
        "  std::vector<double> p;",
        "  for (int b = 0; b < batch; ++b)",
        "    for (int h = 0; h < heads; ++h)",
        "      for (int i = 0; i < n; ++i) {",
        "        const size_t row = at(b, i, n, h, heads), key = at(b, 0, n_kv, h / (heads / kv_heads), kv_heads);",
    ]


def _output(request: Request, sizes: Sizes) -> list[str]:
    lse = request.return_lse
    weights = _call_of_weights(request)
    lines = [
        *_numbers(request, sizes),
        "  std::vector<float> q_here, k_here, v_here;",
        "  Element* q = random_array(rows, 1, q_here);",
        "  Element* k = random_array(keys, 2, k_here);",
        "  Element* v = random_array(keys, 3, v_here);",
        "  Element* o = device_array<Element>(rows);",
    ]
    if lse:
        lines.append("  float* lse = device_array<float>((size_t)batch * heads * n);")
    lines += [
        f"  flash_attention({_call(request)});",
        "  CUDA_CHECK(cudaDeviceSynchronize());",
        "",
        f"  std::vector<double> wanted(rows){', wanted_lse' if lse else ''};",
        *_loops(request),
        f"        {f'wanted_lse.push_back({weights})' if lse else weights};",
        "        for (int j = 0; j < n_kv; ++j)",
        "          for (int c = 0; c < HEAD_DIM; ++c) wanted[row + c] += p[j] * v_here[key + j * stride + c];",
        "      }",
        f'  bool right = passes("{request.stage.name}", o, wanted);',
    ]
    if lse:
        lines += [
            "  const std::vector<float> there = to_host(lse, wanted_lse.size());",
            "  for (size_t i = 0; i < there.size(); ++i)",
            "    right &= there[i] == wanted_lse[i] || std::fabs(there[i] - wanted_lse[i]) <= 1e-4;",
            '  std::printf("[%s] with lse\\n", right ? "PASS" : "FAIL");',
        ]
    return [*lines, "  return right ? 0 : 1;", "}"]


def _gradients(request: Request, sizes: Sizes) -> list[str]:
    rounded = _FROM_FLOAT[request.dtype].format("(float)o_wanted[i]")
    written = {"dq": "rows", "dk": "keys", "dv": "keys"}
    lines = [
        *_numbers(request, sizes),
        "  std::vector<float> do_here, q_here, k_here, v_here;",
        "  Element* do_ = random_array(rows, 4, do_here);",
        "  Element* q = random_array(rows, 1, q_here);",
        "  Element* k = random_array(keys, 2, k_here);",
        "  Element* v = random_array(keys, 3, v_here);",
        "",
        "  // The forward pass and the gradients, row by row.",
        "  std::vector<double> o_wanted(rows), dq_wanted(rows), dk_wanted(keys), dv_wanted(keys), dp(n_kv);",
        "  std::vector<float> lse_here;",
        *_loops(request),
        f"        lse_here.push_back({_call_of_weights(request)});",
        "        double delta = 0;  // rowsum(P * dP)",
        "        for (int j = 0; j < n_kv; ++j) {",
        "          dp[j] = 0;",
        "          for (int c = 0; c < HEAD_DIM; ++c) {",
        "            const double v_c = v_here[key + j * stride + c];",
        "            o_wanted[row + c] += p[j] * v_c;",
        "            dp[j] += do_here[row + c] * v_c;",
        "          }",
        "          delta += p[j] * dp[j];",
        "        }",
        "        for (int j = 0; j < n_kv; ++j) {",
        "          const double ds = softmax_scale * p[j] * (dp[j] - delta);",
        "          for (int c = 0; c < HEAD_DIM; ++c) {",
        "            dq_wanted[row + c] += ds * k_here[key + j * stride + c];",
        "            dk_wanted[key + j * stride + c] += ds * q_here[row + c];",
        "            dv_wanted[key + j * stride + c] += p[j] * do_here[row + c];",
        "          }",
        "        }",
        "      }",
        "  std::vector<Element> o_here(rows);",
        f"  for (size_t i = 0; i < rows; ++i) o_here[i] = {rounded};",
        "",
        "  Element* o = to_device(o_here);",
        "  float* lse = to_device(lse_here);",
        *(f"  Element* {which} = device_array<Element>({size});" for which, size in written.items()),
        f"  flash_attention_backward({_call(request)});",
        "  CUDA_CHECK(cudaDeviceSynchronize());",
    ]
    name = request.stage.name
    lines += [f'  const bool {which}_right = passes("{name}, {which}", {which}, {which}_wanted);' for which in written]
    return [*lines, "  return dq_right && dk_right && dv_right ? 0 : 1;", "}"]
