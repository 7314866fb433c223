"""The X-ray's counters equal hand formulas exactly, and a GPU's recorded counters within 1 %."""

import json

import numpy as np
import pytest
from cuda_files import cuda_text

from helpers import engine
from helpers.attention import kernel
from helpers.attention.check import make_inputs
from helpers.bench.studies import xray_vs_ncu as hardware
from helpers.engine import banks, checked, observed
from helpers.xray import xray

# Loads and stores of one warp in each pattern, as (requests, sectors) in global and (requests, wavefronts) in shared
# memory. Each pattern has 16 warps, the transposes 128, blocks_of_40 has 4 of 32 lanes and 4 of 8.
ROW = (1, 4)  # 32 words side by side: 4 sectors
ROW2, ROW4 = (1, 8), (1, 16)
GLOBAL = {
    "unit_stride": (ROW, ROW),
    "offset_by_one": ((1, 5), ROW),
    "stride_2": ((1, 8), ROW),
    "stride_32": ((1, 32), ROW),
    "one_word_a_warp": ((1, 1), ROW),
    "reversed_order": (ROW, ROW),
    "float2_copy": (ROW2, ROW2),
    "float4_copy": (ROW4, ROW4),
    "every_second_lane": (ROW, ROW),
}
SHARED = {  # (wavefronts of the stores, wavefronts of the loads), a warp
    "transpose": (1, 32),  # a column of 32 rows of 32 words: one bank
    "transpose_padded": (1, 1),
    "transpose_swizzled": (1, 1),
    "shared_stride_2": (2, 2),
    "shared_one_word": (1, 1),
    "shared_float2": (2, 2),
    "shared_float4": (4, 4),
    "shared_float2_one": (2, 1),
    "shared_float4_one": (4, 2),
    "shared_float2_pairs": (2, 1),
    "shared_float4_pairs": (4, 2),
    "shared_float2_halves": (2, 2),
    "shared_float4_quarters": (4, 4),
    "shared_float2_two_apart": (2, 2),
    "shared_float4_two_apart": (4, 4),
    "shared_float2_mixed": (2, 2),
    "shared_float4_mixed": (4, 4),
    "shared_float2_even_lanes": (2, 1),
    "shared_float4_even_lanes": (4, 2),
    "shared_float2_half_lanes": (2, 2),
    "shared_float4_half_lanes": (4, 4),
}
PATTERNS = {launch.name: launch for launch in hardware.patterns()}


@pytest.mark.parametrize("name", GLOBAL)
def test_global_patterns(name):
    figures = hardware.ours(PATTERNS[name])
    loads, stores = GLOBAL[name]
    lanes = 16 if name == "every_second_lane" else 32
    size = {"float2_copy": 8, "float4_copy": 16}.get(name, 4)
    assert figures == {
        "global load bytes": 16 * lanes * size,
        "global load requests": 16 * loads[0],
        "global load sectors": 16 * loads[1],
        "global store bytes": 16 * lanes * size,
        "global store requests": 16 * stores[0],
        "global store sectors": 16 * stores[1],
        hardware.ASKED: 2 * 16 * lanes * size,
    }


@pytest.mark.parametrize("name", SHARED)
def test_shared_patterns(name):
    figures = hardware.ours(PATTERNS[name])
    warps = 128 if name.startswith("transpose") else 16
    size = 8 if "float2" in name else 16 if "float4" in name else 4
    lanes = 16 if name.endswith("_lanes") else 32  # the lanes that load
    stores, loads = SHARED[name]
    assert figures["shared store bytes"] == warps * 32 * size
    assert figures["shared load bytes"] == warps * lanes * size
    assert figures["shared store requests"] == figures["shared load requests"] == warps
    assert (figures["shared store wavefronts"], figures["shared load wavefronts"]) == (warps * stores, warps * loads)


def test_partial_warps():
    figures = hardware.ours(PATTERNS["blocks_of_40"])
    assert figures["global load requests"] == 8
    assert figures["global load sectors"] == 4 * (4 + 1)
    assert figures["global load bytes"] == 4 * 40 * 4


def test_rows_of_float4_conflict_until_padded():
    rows, padded = (hardware.ours(PATTERNS[f"shared_float4_rows{p}"]) for p in ("", "_padded"))
    assert rows["shared load wavefronts"] == 16 * 32
    assert padded["shared load wavefronts"] == 16 * 4


DIVERGED = r"""
extern "C" __global__ void diverged(const float *in, float *out, int n) {
  int t = threadIdx.x;
  float sum = 0;
  for (int k = 0; k < t % 4; ++k) sum += in[t + 32 * k];
  if (t < 8) out[t] = sum; else out[2 * t] = sum;
}
"""


def test_requests_under_divergence():
    # Iteration k of the loop is run by the lanes with t % 4 > k: 3 requests of 24, 16 and 8 lanes, 4 sectors each.
    function = engine.RawModule(code=DIVERGED).get_function("diverged")
    data = engine.asarray(np.arange(128, dtype=np.float32))
    report = xray(function, (1,), (32,), (data, engine.asarray(np.zeros(64, np.float32)), np.int32(0)))
    report.assert_clean()
    loads, stores = report.traffic["in"], report.traffic["out"]
    assert (loads.read, loads.loads, loads.sectors) == (4 * 48, 3, 12)
    assert (stores.written, stores.stores, stores.sectors) == (4 * 32, 2, 1 + 6)
    lanes = np.arange(32) % 4
    assert np.array_equal(report.fetches["in"].reshape(4, 32), [lanes > 0, lanes > 1, lanes > 2, lanes < 0])


def test_warp_barriers_are_counted_apart_from_shuffles():
    code = """
    extern "C" __global__ void sums(float* out) {
      float sum = threadIdx.x;
      for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);
      for (int i = 0; i < 3; ++i) __syncwarp();
      if (sum < 0.0f) __syncwarp();
      __syncthreads();
      out[threadIdx.x] = sum;
    }"""
    out = engine.zeros(64, dtype=np.float32)
    report = xray(engine.RawModule(code=code).get_function("sums"), (1,), (64,), (out,))
    assert (report.collectives, report.warp_barriers, report.barriers) == (2 * (5 + 3), 2 * 3, 1)


VECTORS = cuda_text("xray_counters_vectors")


def test_a_lane_waits_for_the_others_in_the_middle_of_an_access():
    """A lane has space for 1024 accesses, and pauses in the middle of the next one. Then another lane's first 2-byte
    access to shared memory clears the checker's knowledge of each instruction, including that one."""
    code = """
    #include <cuda_fp16.h>
    extern "C" __global__ void sums(const float* a, float* out) {
      __shared__ __half halves[64];
      float sum = 0.0f;
      if (threadIdx.x == 0)
        for (int i = 0; i < 3000; ++i) sum += a[i % 32];
      else
        halves[2 * threadIdx.x] = __half(sum);
      out[threadIdx.x] = sum;
    }"""
    a, out = engine.ones(32, dtype=np.float32), engine.zeros(32, dtype=np.float32)
    report = xray(engine.RawModule(code=code).get_function("sums"), (1,), (32,), (a, out))
    report.assert_clean()
    assert out[0] == 3000 and report.traffic["a"].read == 4 * 3000


def test_vectors_are_one_access():
    function = engine.RawModule(code=VECTORS).get_function("vectors")
    types = (("f4", 4), ("f4", 4), ("f8", 2), ("u1", 4), ("f2", 2))
    rng = np.random.default_rng(0)
    inputs = [rng.integers(0, 9, (32, n)).astype(t) for t, n in types]
    value = np.array([(1, 2, 3, 4)], np.dtype([(c, "f4") for c in "xyzw"]))[0]
    fast, checked = ([engine.asarray(a.copy()) for a in inputs] for _ in range(2))
    function((1,), (32,), (*fast, value))
    report = xray(function, (1,), (32,), (*checked, value))
    report.assert_clean()
    for a, b in zip(fast, checked, strict=True):
        assert np.array_equal(a.get(), b.get())
    counts = (("in", 1, 0, 16), ("out", 0, 1, 16), ("two", 1, 1, 32), ("bytes", 1, 1, 8), ("halves", 1, 1, 8))
    for name, loads, stores, sectors in counts:
        figures = report.traffic[name]
        assert (figures.loads, figures.stores, figures.sectors) == (loads, stores, sectors), name
    for name, wavefronts in (("tile", 4 + 4), ("half_tile", 1 + 1)):
        figures = report.shared[name]
        assert (figures.loads, figures.stores, figures.wavefronts) == (1, 1, wavefronts), name


SHAPES = ((1, 1, 1, 32, 4), (33, 7, 3, 32, 4), (65, 50, 20, 64, 16), (40, 129, 64, 32, 16), (100, 37, 128, 32, 8))


def traffic(stage, n, n_kv, d, block_m, block_n):
    """Return (read, written) in bytes for each array, and each shared array, from the sizes only."""
    blocks, tiles = -(-n // block_m), -(-n_kv // block_n)
    if stage == "naive":
        product = 4 * n * n_kv
        arrays = {"Q": (product * d, 0), "K": (product * d, 0), "V": (product * d, 0), "S": (2 * product, 2 * product)}
        return {**arrays, "O": (0, 4 * n * d)}, {}
    passes = 2 if stage == "tiled" else 1
    rows, tile, threads = 4 * n_kv * d * blocks, 4 * blocks * tiles * block_n * d, 4 * blocks * block_m * d
    arrays = {"Q": (4 * n * d, 0), "K": (passes * rows, 0), "V": (rows, 0), "O": (0, 4 * n * d)}
    return arrays, {
        "Q_smem": (passes * tiles * threads, threads),
        "K_smem": (passes * tile * block_m, passes * tile),
        "V_smem": (tile * block_m, tile),
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("stage", ["naive", "tiled", "online_softmax"])
def test_traffic_of_stages(stage, shape):
    n, n_kv, d, block_m, block_n = shape
    file = {"naive": "01_naive.cu", "tiled": "02_tiled.cu", "online_softmax": "03_online_softmax.cu"}[stage]
    options = kernel.options({"HEAD_DIM": d, "BLOCK_M": block_m, "BLOCK_N": block_n})
    function = engine.RawModule(code=kernel.source(file), options=options).get_function(stage)
    scratch = (engine.full((n, n_kv), np.nan, dtype=np.float32),) if stage == "naive" else ()
    arrays = [engine.asarray(a) for a in make_inputs(n, n_kv, d)]
    out = engine.full((n, d), np.nan, dtype=np.float32)
    args = (*arrays, *scratch, out, np.int32(n), np.int32(n_kv), np.float32(d**-0.5))
    report = xray(function, (-(-n // block_m),), (block_m,), args)
    report.assert_clean()
    arrays, shared = traffic(stage, *shape)
    assert {name: (f.read, f.written) for name, f in report.traffic.items()} == arrays
    assert {name: (f.read, f.written) for name, f in report.shared.items()} == shared
    # Every element of an array is fetched equally often.
    for name, rows in (("Q", n), ("K", n_kv), ("V", n_kv)):
        assert np.all(report.fetches[name] == arrays[name][0] // (4 * rows * d)), name
    tiles = -(-n // block_m) * -(-n_kv // block_n)
    assert report.barriers == {"naive": 0, "tiled": 4, "online_softmax": 2}[stage] * tiles


# ------------------------------------------------------------------------------------------------ hardware

RECORD = json.loads(hardware.RECORD.read_text())
ROWS = {row["kernel"]: row for row in RECORD["rows"]}


def test_record_has_every_launch():
    assert list(ROWS) == [launch.name for launch in hardware.everything()]


# Two launches of a stage, as written and as compiled, differ in one kernel's text; those of 02 and 03 take 6 s of CPU
# time each, and test_traffic_of_stages has both at smaller sizes.
LEFT_OUT = "naive_as_compiled", "tiled", "tiled_as_compiled", "online_softmax", "online_softmax_as_compiled"
LAUNCHES = [launch for launch in hardware.everything() if launch.name not in LEFT_OUT]


@pytest.mark.exhaustive(one_of_each=lambda launch: launch.name in PATTERNS and launch.name)
@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.name)
def test_our_side_of_the_record_is_reproduced(launch):
    figures = ROWS[launch.name]["figures"]
    assert {name: value["ours"] for name, value in figures.items() if value["ours"]} == hardware.ours(launch)


@pytest.mark.parametrize("name", ROWS)
def test_hardware_agrees_or_says_why(name):
    for figure, value in ROWS[name]["figures"].items():
        differs = abs(value["ours"] - value["hardware"]) > 0.01 * value["hardware"]
        assert differs == ("why" in value), (name, figure, value)
        if differs:
            assert len(value["why"]) > 20, (name, figure)
            # The reason why a figure differs is given only for bytes, and for a compiler's changes; never for a
            # pattern.
            assert "bytes" in figure or name in ("naive", "tiled", "online_softmax"), (name, figure)


@pytest.mark.parametrize("stage", ["naive", "tiled", "online_softmax"])
def test_source_written_as_compiled_costs_a_gpu_the_same(stage):
    plain, written = (ROWS[name]["figures"] for name in (stage, f"{stage}_as_compiled"))
    for figure, value in plain.items():
        assert value["hardware"] == pytest.approx(written[figure]["hardware"], rel=0.001), figure


FAKE = """==PROF== Connected to process 1
"ID","Kernel Name","Grid Size","dram__bytes_read.sum","l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"
"","","","byte",""
"0","one(const float *)","(1, 1, 1)","1,024","16"
"1","two","(1, 1, 1)","5.0","7"
"""


def test_parse():
    metrics = ("dram__bytes_read.sum", "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum")
    found = hardware.parse(FAKE)
    assert found == {"one": dict(zip(metrics, (1024, 16), strict=True)), "two": dict(zip(metrics, (5, 7), strict=True))}
    with pytest.raises(ValueError, match="Kbyte"):
        hardware.parse(FAKE.replace('"byte"', '"Kbyte"'))
    with pytest.raises(ValueError, match="has no table"):
        hardware.parse("==ERROR== no permission")


def test_table():
    text = hardware.table(kernels=["online_softmax"])
    assert "128-bit loads" in text and "dram bytes read" in text and "naive" not in text


# ------------------------------------------------------------------------------------- the rule of banks, in both
# languages

GATHER = """extern "C" __global__ void gather(const int *at, float *out) {
  __shared__ TYPE s[512];
  for (int i = threadIdx.x; i < 512; i += 32) s[i] = TYPE();
  __syncthreads();
  int i = 32 * blockIdx.x + threadIdx.x;
  if (at[i] < 0) return;
  TYPE x = s[at[i]];
  out[i] = *(float *)&x;
}
"""


@pytest.mark.parametrize(("type_name", "size"), [("float", 4), ("float2", 8), ("float4", 16)])
def test_the_engine_and_python_have_one_rule_of_banks(type_name: str, size: int) -> None:
    rng = np.random.default_rng(size)
    patterns = [rng.integers(0, 512, 32) for _ in range(12)]
    patterns += [rng.integers(0, 24, 32) for _ in range(4)]
    pairs = np.arange(32) // 2 * 17 % 512
    patterns += [pairs, pairs[np.arange(32) ^ 2 & 29], np.arange(32) * 32 // 2, np.arange(32) * 9 % 512]
    patterns += [np.where(rng.random(32) < 0.5, -1, pattern) for pattern in patterns[-4:]]
    at = np.concatenate(patterns).astype(np.int32)
    function = engine.RawModule(code=GATHER.replace("TYPE", type_name)).get_function("gather")
    args = engine.asarray(at), engine.zeros(at.size, np.float32)
    seen = checked.observe(function, (len(patterns),), (32,), args, profile=True)
    reads = [site for site in seen.sites if seen.regions[site.region].kind != observed.ARRAY and not site.is_write]
    counted = sum(site.wavefronts for site in reads)
    lanes = [{lane: size * int(i) for lane, i in enumerate(pattern) if i >= 0} for pattern in patterns]
    assert counted == sum(banks.wavefronts_of_request(size, offsets) for offsets in lanes)
