"""The bug zoo of Hopper's instructions: one planted bug each, found at its line; clean twins; what TMA counts."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hopper_zoo import HEAD, OPTIONS, halves, map_of, refused_by_ptxas
from zoo import Bug, out

from helpers import engine
from helpers.engine import compiler, observed
from helpers.xray import Report, xray


def tile() -> Any:
    """A map of 256 rows of 64 halves, in boxes of 64."""
    return map_of(halves(256, 64), (64, 64))


def target() -> Any:
    """The same, where nobody has written yet."""
    return map_of(engine.full((64, 64), np.nan, np.float16), (64, 64))


# What most begin with: two barriers, and a tile of 64 rows of 128 bytes, or several.
START = """
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full, empty;
  int t = threadIdx.x;
  if (t == 0) init(&full, 1), init(&empty, 1), init_fence();
  __syncthreads();
"""
FETCH = "if (t == 0) expect(&full, 8192), load(s, in, &full, 0, 0);"

# A producer warpgroup, of which one thread works, and one of consumers; two tiles through one buffer.
RING = """NAME(MAP in, float *out) {
  START
  if (t >= 128) {
    if (t == 128)
      for (int i = 0; i < 3; ++i) {
        if (i > 0 /* only then */) wait(&empty, (i - 1) & 1);
        expect(&full, 8192);
        load(s, in, &full, 0, 64 * i);  // LOAD
      }
    return;
  }
  float d[4] = {};
  for (int i = 0; i < 3; ++i) {
    wait(&full, i & 1);  // full
    wg_fence();
    multiply(d, tile(s), tile(s), 1);  // MULTIPLY
    wg_commit();
    wg_wait<0>();
    hold(d);
    if (t == 0) arrive(&empty);  // release
  }
  out[t] = d[0];
}
""".replace("START", START)


def ring(load: str = "there", multiply: str = "here") -> str:
    return RING.replace("// LOAD", f"// {load}").replace("// MULTIPLY", f"// {multiply}")


ZOO = [
    Bug(
        "read_before_the_phase_ends",
        "not waited for",
        """NAME(MAP in, float *out) {START
  if (t == 0) expect(&full, 8192), load(s, in, &full, 0, 0);  // there
  /* no wait */
  out[t] = s[t];  // here
  wait(&full, 0);
}
""",
        (("/* no wait */", "wait(&full, 0);"),),
        lambda: (tile(), out(128)),
    ),
    Bug(
        "product_before_the_phase_ends",
        "not waited for",
        """NAME(MAP in, float *out) {START
  if (t == 0) expect(&full, 8192), load(s, in, &full, 0, 0);  // there
  float d[4] = {};
  /* no wait */
  wg_fence();
  multiply(d, tile(s), tile(s), 0);  // here
  wg_commit();
  wait(&full, 0);
  wg_wait<0>();
  hold(d);
  out[t] = d[0];
}
""",
        (("/* no wait */", "wait(&full, 0);"),),
        lambda: (tile(), out(128)),
    ),
    Bug(
        "wrong_parity",
        "not waited for",
        """NAME(MAP in, float *out) {START
  if (t == 0) expect(&full, 8192), load(s, in, &full, 0, 0);  // there
  wait(&full, 1);
  out[t] = s[t];  // here
  wait(&full, 0);
}
""",
        (("wait(&full, 1);", "wait(&full, 0);"),),
        lambda: (tile(), out(128)),
    ),
    Bug(
        "parity_that_never_turns",
        "not waited for",
        """NAME(MAP in, float *out) {START
  float sum = 0;
  for (int i = 0; i < 2; ++i) {
    if (t == 0) expect(&full, 8192), load(s, in, &full, 0, 64 * i);  // there
    wait(&full, 0 /* i */);
    sum += (float)s[t];  // here
    __syncthreads();
  }
  wait(&full, 1);
  out[t] = sum;
}
""",
        (("0 /* i */", "i & 1"),),
        lambda: (tile(), out(128)),
    ),
    Bug(
        "another_thread_waited",
        "not waited for",
        """NAME(MAP in, float *out) {START
  if (t == 0) expect(&full, 8192), load(s, in, &full, 0, 0);  // there
  if (t < 32) wait(&full, 0);
  /* no barrier */
  __half2 mine = ((__half2 *)s)[(t + 32) % 128];  // here
  out[t] = mine.x;
}
""",
        (("/* no barrier */", "__syncthreads();"),),
        lambda: (tile(), out(128)),
    ),
    Bug(
        "released_before_its_wait",
        "race",
        ring("here", "there"),
        (),
        lambda: (tile(), out(128)),
        block=256,
    ),
    Bug(
        "refilled_without_a_release",
        "race",
        """NAME(MAP in, float *out) {START
  if (t >= 128) {
    if (t == 128)
      for (int i = 0; i < 2; ++i) {
        /* no wait */
        expect(&full, 8192);
        load(s, in, &full, 0, 64 * i);  // here
        wait(&full, i);
      }
    return;
  }
  float d[4] = {};
  for (int i = 0; i < 2; ++i) {
    wait(&full, i);
    wg_fence();
    multiply(d, tile(s), tile(s), 1);  // there
    wg_commit();
    wg_wait<0>();
    hold(d);
    if (t == 0) arrive(&empty);
    if (i == 0) asm volatile("bar.sync 1, 128;" ::: "memory");
  }
  out[t] = d[0];
}
""",
        (("/* no wait */", "if (i > 0) wait(&empty, 0);"),),
        lambda: (tile(), out(128)),
        block=256,
    ),
    Bug(
        "refilled_while_others_read",
        "not waited for",
        """NAME(MAP in, float *out) {START
  float sum = 0;
  for (int i = 0; i < 2; ++i) {
    if (t == 0) expect(&full, 8192), load(s, in, &full, 0, 64 * i);  // here
    wait(&full, i);
    for (int k = 0; k < 64; k += 2) sum += (float)((__half2 *)s)[(32 * t + k / 2) % 2048].x;  // there
    /* no barrier */
  }
  out[t] = sum;
}
""",
        (("/* no barrier */", "__syncthreads();"),),
        lambda: (tile(), out(128)),
    ),
    Bug(
        "no_proxy_fence_before_a_product",
        "no proxy fence",
        """NAME(const __half2 *in, float *out) {START
  for (int i = t; i < 2048; i += 128) ((__half2 *)s)[i] = in[i];  // there
  /* no fence */
  __syncthreads();
  float d[4] = {};
  wg_fence();
  multiply(d, tile(s), tile(s), 0);  // here
  wg_commit();
  wg_wait<0>();
  hold(d);
  out[t] = d[0];
}
""",
        (("/* no fence */", "proxy_fence();"),),
        lambda: (halves(4096), out(128)),
    ),
    Bug(
        "no_proxy_fence_before_a_store",
        "no proxy fence",
        """NAME(MAP to) {START
  for (int i = t; i < 2048; i += 128) ((__half2 *)s)[i] = __half2{(__half)1.0f, (__half)2.0f};  // there
  /* no fence */
  __syncthreads();
  if (t == 0) {
    store(to, s, 0, 0);  // here
    commit();
    wait_read();
  }
}
""",
        (("/* no fence */", "proxy_fence();"),),
        lambda: (target(),),
    ),
    Bug(
        "no_barrier_before_a_product",
        "race",
        """NAME(const __half2 *in, float *out) {START
  for (int i = t; i < 2048; i += 128) ((__half2 *)s)[i] = in[i];  // there
  proxy_fence();
  /* no barrier */
  float d[4] = {};
  wg_fence();
  multiply(d, tile(s), tile(s), 0);  // here
  wg_commit();
  wg_wait<0>();
  hold(d);
  out[t] = d[0];
}
""",
        (("/* no barrier */", "__syncthreads();"),),
        lambda: (halves(4096), out(128)),
    ),
    Bug(
        "store_overwritten_before_it_read",
        "race",
        """NAME(MAP to) {START
  for (int i = t; i < 2048; i += 128) ((__half2 *)s)[i] = __half2{(__half)1.0f, (__half)2.0f};
  proxy_fence();
  __syncthreads();
  if (t == 0) {
    store(to, s, 0, 0);  // there
    commit();
    /* no wait */
    ((__half2 *)s)[5] = __half2{};  // here
    wait_read();
  }
}
""",
        (("/* no wait */", "wait_read();"),),
        lambda: (target(),),
    ),
    Bug(
        "store_never_waited_for",
        "never waited for",
        """NAME(MAP to, float *out) {START
  for (int i = t; i < 2048; i += 128) ((__half2 *)s)[i] = __half2{(__half)1.0f, (__half)2.0f};
  proxy_fence();
  __syncthreads();
  out[t] = t;
  if (t == 0) {
    store(to, s, 0, 0);  // here
    commit();
    /* no wait */
  }
}
""",
        (("/* no wait */", "wait_read();"),),
        lambda: (map_of(halves(64, 64), (64, 64)), out(128)),
    ),
    Bug(
        "load_never_waited_for",
        "never waited for",
        """NAME(MAP in, float *out) {START
  if (t == 0) expect(&full, 8192), load(s, in, &full, 0, 0);  // here
  /* no wait */
  out[t] = t;
}
""",
        (("/* no wait */", "wait(&full, 0);"),),
        lambda: (tile(), out(128)),
    ),
    Bug(
        "fewer_bytes_expected_than_sent",
        "wrong byte count",
        """NAME(MAP in, float *out) {START
  if (t == 0) {
    expect(&full, 8192 /* of one */);
    for (int i = 0; i < 2; ++i) load(s + 4096 * i, in, &full, 0, 64 * i);  // here
  }
  wait(&full, 0);
  out[t] = s[t];
  if (t == 0) arrive(&full);
  wait(&full, 1);
}
""",
        (("8192 /* of one */", "2 * 8192"), ("if (t == 0) arrive(&full);\n  wait(&full, 1);", "")),
        lambda: (tile(), out(128)),
    ),
    Bug(
        "more_bytes_expected_than_sent",
        "deadlock",
        """NAME(MAP in, float *out) {START
  if (t == 0) expect(&full, 2 * 8192 /* of two */), load(s, in, &full, 0, 0);
  wait(&full, 0);  // here
  out[t] = s[t];
}
""",
        (("2 * 8192 /* of two */", "8192"),),
        lambda: (tile(), out(128)),
    ),
    Bug(
        "one_arrival_too_few",
        "deadlock",
        """NAME(float *out) {
  __shared__ unsigned long long done;
  int t = threadIdx.x;
  if (t == 0) init(&done, 4);
  __syncthreads();
  if (t % 32 == 0 && t > 0 /* all warps */) arrive(&done);
  wait(&done, 0);  // here
  out[t] = t;
}
""",
        ((" && t > 0 /* all warps */", ""),),
        lambda: (out(128),),
    ),
    Bug(
        "the_producer_forgets_a_tile",
        "deadlock",
        """NAME(MAP in, float *out) {START
  if (t >= 128) {
    if (t == 128)
      for (int i = 0; i < 2 /* tiles */; ++i) {
        if (i > 0) wait(&empty, (i - 1) & 1);
        expect(&full, 8192);
        load(s, in, &full, 0, 64 * i);
      }
    return;
  }
  float sum = 0;
  for (int i = 0; i < 3; ++i) {
    wait(&full, i & 1);  // here
    sum += (float)s[t];
    asm volatile("bar.sync 1, 128;" ::: "memory");
    if (t == 0) arrive(&empty);
  }
  out[t] = sum;
}
""",
        (("2 /* tiles */", "3"),),
        lambda: (tile(), out(128)),
        block=256,
    ),
    Bug(
        "turn_that_nobody_gives",
        "deadlock",
        """NAME(float *out) {
  int t = threadIdx.x, group = t / 128;
  /* nobody begins */
  for (int i = 0; i < 2; ++i) {
    if (group == 0) asm volatile("bar.sync 1, 256;" ::: "memory");  // here
    else asm volatile("bar.sync 2, 256;" ::: "memory");
    out[t] = i;
    if (group == 0) asm volatile("bar.arrive 2, 256;" ::: "memory");
    else asm volatile("bar.arrive 1, 256;" ::: "memory");
  }
}
""",
        (("/* nobody begins */", 'if (group == 1) asm volatile("bar.arrive 1, 256;" ::: "memory");'),),
        lambda: (out(256),),
        block=256,
    ),
    Bug(
        "no_barrier_after_init",
        "race",
        """NAME(MAP in, float *out) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full;
  int t = threadIdx.x;
  if (t == 0) {
    init(&full, 1);  // there
    init_fence();
    expect(&full, 8192);
    load(s, in, &full, 0, 0);
  }
  /* no barrier */
  wait(&full, 0);  // here
  out[t] = s[t];
}
""",
        (("/* no barrier */", "__syncthreads();"),),
        lambda: (tile(), out(128)),
    ),
    Bug(
        "no_fence_after_init",
        "no proxy fence",
        """NAME(MAP in, float *out) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full;
  int t = threadIdx.x;
  if (t == 0) init(&full, 1); /* no fence */  // there
  __syncthreads();
  if (t == 0) {
    expect(&full, 8192);
    load(s, in, &full, 0, 0);  // here
  }
  wait(&full, 0);
  out[t] = s[t];
}
""",
        (("/* no fence */", "if (t == 0) init_fence();"),),
        lambda: (tile(), out(128)),
    ),
    Bug(
        "sums_read_before_their_wait",
        "not waited for",
        """NAME(MAP in, float *out) {START
  FETCH
  wait(&full, 0);
  float d[4] = {};
  wg_fence();
  multiply(d, tile(s), tile(s), 0);  // there
  wg_commit();
  /* no wait */
  hold(d);
  float sum = d[0];  // here
  wg_wait<0>();
  out[t] = sum;
}
""",
        (("/* no wait */", "wg_wait<0>();"),),
        lambda: (tile(), out(128)),
    ),
    Bug(
        "sums_scaled_in_flight",
        "not waited for",
        """NAME(MAP in, float *out) {START
  FETCH
  wait(&full, 0);
  float d[4] = {};
  wg_fence();
  multiply(d, tile(s), tile(s), 0);  // there
  wg_commit();
  wg_wait<1 /* of one */>();
  for (int i = 0; i < 4; ++i) d[i] *= 2.0f;  // here
  wg_wait<0>();
  out[t] = d[0];
}
""",
        (("wg_wait<1 /* of one */>", "wg_wait<0>"),),
        lambda: (tile(), out(128)),
    ),
    Bug(
        "no_wgmma_fence",
        "no wgmma fence",
        """NAME(MAP in, float *out) {START
  FETCH
  wait(&full, 0);
  float d[4] = {};
  wg_fence();
  for (int i = 0; i < 2; ++i) {
    if (i > 5 /* always */) wg_fence();
    multiply(d, tile(s, 32 * i), tile(s, 32 * i), i);  // here
    wg_commit();
    wg_wait<0>();
    hold(d);
    for (int k = 0; k < 4; ++k) d[k] *= 0.5f;
  }
  out[t] = d[0];
}
""",
        (("if (i > 5 /* always */) ", ""),),
        lambda: (tile(), out(128)),
    ),
    Bug(
        "product_never_waited_for",
        "never waited for",
        """NAME(MAP in, float *out) {START
  FETCH
  wait(&full, 0);
  float d[4] = {};
  wg_fence();
  multiply(d, tile(s), tile(s), 0);  // here
  wg_commit();
  /* no wait */
  out[t] = t;
}
""",
        (("/* no wait */", "wg_wait<0>();"),),
        lambda: (tile(), out(128)),
    ),
    Bug(
        "descriptor_of_another_block",
        "out of bounds",
        """NAME(MAP in, float *out) {START
  FETCH
  wait(&full, 0);
  float d[4] = {};
  wg_fence();
  multiply(d, tile(s), tile(s + 2 * 4096 /* past the end */), 0);  // here
  wg_commit();
  wg_wait<0>();
  hold(d);
  out[t] = d[0];
}
""",
        ((" + 2 * 4096 /* past the end */", ""),),
        lambda: (tile(), out(128)),
    ),
    Bug(
        "tile_past_the_end",
        "out of bounds",
        """NAME(MAP in, float *out) {START
  if (t == 0) expect(&full, 8192), load(s + 4096 + 512, in, &full, 0, 0);  // here
  wait(&full, 0);
  out[t] = s[4096 + t];
}
""",
        (("s + 4096 + 512", "s + 4096"),),
        lambda: (tile(), out(128)),
    ),
    Bug(
        "tile_not_aligned",
        "misaligned",
        """NAME(MAP in, float *out) {START
  if (t == 0) expect(&full, 8192), load(s + 32, in, &full, 0, 0);  // here
  wait(&full, 0);
  out[t] = s[t];
}
""",
        (("s + 32", "s"),),
        lambda: (tile(), out(128)),
    ),
    Bug(
        "product_reads_past_the_tile",
        "uninitialised",
        """NAME(MAP in, float *out) {START
  FETCH
  wait(&full, 0);
  float d[4] = {};
  wg_fence();
  multiply(d, tile(s), tile(s + 4096 /* the next tile */), 0);  // here
  wg_commit();
  wg_wait<0>();
  hold(d);
  out[t] = d[0];
}
""",
        ((" + 4096 /* the next tile */", ""),),
        lambda: (tile(), out(128)),
    ),
]


# Four warps that read tiles with ordinary loads and release them a warp at a time; one more warp loads. The results are
# stored by TMA from a tile that is used again.
BY_WARPS = """NAME(MAP in, MAP to) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full[2], empty[2];
  int t = threadIdx.x;
  if (t == 0) {
    for (int i = 0; i < 2; ++i) init(&full[i], 1), init(&empty[i], 4);
    init_fence();
  }
  __syncthreads();
  if (t >= 128) {
    if (t == 128)
      for (int i = 0; i < 4; ++i) {
        wait(&empty[i % 2], (i / 2 & 1) ^ 1);
        expect(&full[i % 2], 2048);
        load(s + 1024 * (i % 2), in, &full[i % 2], 0, 16 * i);  // LOAD
      }
    return;
  }
  __half2 *result = (__half2 *)(s + 2048);
  for (int i = 0; i < 4; ++i) {
    wait(&full[i % 2], i / 2 & 1);
    __half2 mine[4];
    for (int k = 0; k < 4; ++k) mine[k] = ((__half2 *)(s + 1024 * (i % 2)))[t + 128 * k];  // READ
    __syncwarp();  // all lanes have read
    if (t % 32 == 0) arrive(&empty[i % 2]);
    for (int k = 0; k < 4; ++k) result[t + 128 * k] = mine[k];  // WRITE
    proxy_fence();
    asm volatile("bar.sync 1, 128;" ::: "memory");  // all have written
    if (t == 0) {
      store(to, result, 0, 16 * i);  // STORE
      commit();
      wait_read();
    }
    asm volatile("bar.sync 2, 128;" ::: "memory");  // it has been read
  }
}
"""


def by_warps(**marks: str) -> str:
    code = BY_WARPS
    for name in ("LOAD", "READ", "WRITE", "STORE"):
        code = code.replace(f"// {name}", f"// {marks.get(name, name.lower())}")
    return code


def small() -> Any:
    """Maps of 64 rows of 64 halves, in boxes of 16."""
    return map_of(halves(64, 64), (64, 16)), map_of(engine.full((64, 64), np.nan, np.float16), (64, 16))


SYNCWARP = "    __syncwarp();  // all lanes have read\n"
READ = '    asm volatile("bar.sync 2, 128;" ::: "memory");  // it has been read\n'
WRITTEN = '    asm volatile("bar.sync 1, 128;" ::: "memory");  // all have written\n'
ZOO += [
    Bug(
        "released_for_lanes_that_still_read",
        "race",
        by_warps(LOAD="here", READ="there").replace(SYNCWARP, "/* no */\n"),
        (("/* no */\n", SYNCWARP),),
        small,
        block=160,
    ),
    Bug(
        "written_while_a_store_reads",
        "race",
        by_warps(WRITE="here", STORE="there").replace(READ, "/* no */\n"),
        (("/* no */\n", READ),),
        small,
        block=160,
    ),
    Bug(
        "stored_before_all_have_written",
        "race",
        by_warps(WRITE="here", STORE="there").replace(WRITTEN, "/* no */\n"),
        (("/* no */\n", WRITTEN),),
        small,
        block=160,
    ),
]

# Two blocks that add their tiles to one array.
ADDS = """NAME(float *out, float *read) {
  __shared__ __align__(16) float s[128];
  int t = threadIdx.x;
  s[t] = t;  // WRITE
  proxy_fence();
  __syncthreads();
  if (t == 0) {
    bulk_add(out, s, 512);  // ADD
    commit();
    wait_read();
  }
  __syncthreads();
  s[t] = 0;  // AGAIN
  AFTER
}
"""


def adds(after: str = "read[128 * blockIdx.x + t] = t;", **marks: str) -> str:
    code = ADDS.replace("AFTER", after)
    for name in ("WRITE", "ADD", "AGAIN"):
        code = code.replace(f"// {name}", f"// {marks.get(name, name.lower())}")
    return code


def added() -> Any:
    return engine.zeros(128, np.float32), out(256)


ZOO += [
    Bug(
        "no_proxy_fence_before_an_addition",
        "no proxy fence",
        adds(WRITE="there", ADD="here").replace("  proxy_fence();\n", "/* no fence */\n"),
        (("/* no fence */", "proxy_fence();"),),
        added,
        grid=2,
    ),
    Bug(
        "no_barrier_before_an_addition",
        "race",
        adds(WRITE="there", ADD="here").replace("  __syncthreads();\n  if", "/* no barrier */\n  if"),
        (("/* no barrier */", "__syncthreads();"),),
        added,
        grid=2,
    ),
    Bug(
        "addition_overwritten_before_it_read",
        "race",
        adds("if (t == 0) wait_read();\n  read[128 * blockIdx.x + t] = t;", ADD="there", AGAIN="here").replace(
            "    wait_read();\n", "    /* no wait */\n"
        ),
        (("/* no wait */", "wait_read();"),),
        added,
        grid=2,
    ),
    Bug(
        "addition_never_waited_for",
        "never waited for",
        adds("out[t] = read[t];", ADD="here").replace("wait_read();", "/* no wait */").replace("s[t] = 0;", ""),
        (("/* no wait */", "wait_read();"), ("out[t] = read[t];", "")),
        lambda: (engine.zeros(128, np.float32), engine.zeros(128, np.float32)),
    ),
    Bug(
        "sum_read_while_other_blocks_add",
        "race",
        adds("read[128 * blockIdx.x + t] = blockIdx.x == 0 ? out[t] : 0;  // there", ADD="here"),
        (("blockIdx.x == 0 ? out[t] : 0", "t"),),
        added,
        grid=2,
    ),
    Bug(
        "sum_written_while_other_blocks_add",
        "race",
        adds("if (blockIdx.x == 0) out[t] = 1;  // there\n  read[128 * blockIdx.x + t] = t;", ADD="here"),
        (("out[t] = 1;", "atomicAdd(&out[t], 1.0f);"),),
        added,
        grid=2,
    ),
]

# Four warps write a tile and a fifth adds it to the array: of the 160 threads at each barrier some only arrive.
BY_A_FIFTH = """NAME(float *out) {
  __shared__ __align__(16) float s[128];
  int t = threadIdx.x;
  for (int i = 0; i < 3; ++i) {
    if (t < 128) {
      if (i > 0) asm volatile("bar.sync 2, 160;" ::: "memory");  // the tile is free
      s[t] = i;  // here
      proxy_fence();
    }
    if (t < 96) asm volatile("bar.arrive 1, 160;" ::: "memory");
    else asm volatile("bar.sync 1, 160;" ::: "memory");
    if (t >= 128) {
      if (t == 128) {
        bulk_add(out, s, 512);  // there
        commit();
        /* no wait */
      }
      __syncwarp();
      if (i < 2) asm volatile("bar.arrive 2, 160;" ::: "memory");
    }
  }
  if (t == 128) wait_read();
}
"""

ZOO.append(
    Bug(
        "released_before_an_addition_read",
        "race",
        BY_A_FIFTH,
        (("/* no wait */", "wait_read();"),),
        lambda: (engine.zeros(128, np.float32),),
        block=160,
    )
)

ZOO.append(
    Bug(
        "released_and_then_waited_for",
        "race",
        BY_A_FIFTH.replace("  }\n  if (t == 128)", "    if (t == 128) wait_read();\n  }\n  if (t == 128)"),
        (("/* no wait */", "wait_read();"),),
        lambda: (engine.zeros(128, np.float32),),
        block=160,
    )
)

# Who arrives goes on at once: what it does afterwards is in order after nobody.
ZOO += [
    Bug(
        "proxy_fence_after_the_arrival",
        "no proxy fence",
        """NAME(float *out) {
  __shared__ __align__(16) float s[2][128];
  int t = threadIdx.x;
  if (t < 128) {
    s[0][t] = 1;  // there
    /* no fence */
    asm volatile("bar.arrive 1, 160;" ::: "memory");
    s[1][t] = 2;
    proxy_fence();
    asm volatile("bar.arrive 2, 160;" ::: "memory");
  } else {
    asm volatile("bar.sync 1, 160;" ::: "memory");
    if (t == 128) bulk_add(out, s[0], 512);  // here
    asm volatile("bar.sync 2, 160;" ::: "memory");
    if (t == 128) {
      bulk_add(out, s[1], 512);
      commit();
      wait_read();
    }
  }
}
""",
        (("/* no fence */", "proxy_fence();"),),
        lambda: (engine.zeros(128, np.float32),),
        block=160,
    ),
    Bug(
        "written_after_the_arrival",
        "race",
        """NAME(float *out) {
  __shared__ float s[128];
  int t = threadIdx.x;
  if (t < 128) {
    s[t] = t;
    asm volatile("bar.arrive 1, 160;" ::: "memory");
    s[t] = 0;  // there
  } else {
    asm volatile("bar.sync 1, 160;" ::: "memory");
    out[t - 128] = s[t - 128];  // here
  }
}
""",
        (("    s[t] = 0;", ""),),
        lambda: (engine.zeros(128, np.float32),),
        block=160,
    ),
]


def prepared(bug: Bug, *, fixed: bool) -> str:
    text = bug.text(fixed=fixed).replace("START", START.strip("\n").replace("\n", " ")).replace("FETCH", FETCH)
    if bug.name == "released_before_its_wait" and not fixed:
        text = text.replace("    wg_wait<0>();\n    hold(d);\n    if (t == 0) arrive(&empty);  // release\n", RELEASES)
    return text


RELEASES = "    if (t == 0) arrive(&empty);\n    wg_wait<0>();\n    hold(d);\n"


@functools.cache
def look(name: str, fixed: bool) -> Report:
    bug = next(bug for bug in ZOO if bug.name == name)
    code = HEAD + prepared(bug, fixed=fixed)
    function = engine.RawModule(code=code, options=OPTIONS).get_function(f"{name}_fixed" if fixed else name)
    block = 128 if bug.block == 64 else bug.block
    return xray(function, (bug.grid,), (block,), bug.args(), 2 * 8192, timeout=10)


@pytest.mark.parametrize("bug", ZOO, ids=lambda bug: bug.name)
def test_each_bug_is_found_where_it_is(bug: Bug) -> None:
    if bug.name == "sums_scaled_in_flight" and compiler._is_clang():
        pytest.skip("clang tells of no writes to a thread's own array in a loop")
    report = look(bug.name, False)
    assert [f.kind for f in report.findings] == [bug.kind], report.findings
    found = report.findings[0]
    here, there = bug.line("here"), bug.line("there")
    assert found.file == f"{bug.name}.cu" and f"{bug.name}.cu:{here}" in found.message, found
    if there is not None:
        assert {found.line, found.other_line} == {here, there}, found
    else:
        assert found.line == here, found


@pytest.mark.exhaustive(one_of_each=lambda bug: bug.kind)
@pytest.mark.parametrize("bug", ZOO, ids=lambda bug: bug.name)
def test_the_fixed_twin_is_clean(bug: Bug) -> None:
    look(bug.name, True).assert_clean()


def test_ptxas_takes_the_fixed_twins() -> None:
    """With no warning about wgmma or setmaxnreg: the twins are right for a GPU too."""
    code = HEAD + "".join(prepared(bug, fixed=True) for bug in ZOO)
    assert refused_by_ptxas(code) == ""


# ------------------------------------------------------------------------------------ figures

# A tile of 64 x 64 halves by TMA; each warp reads 16 rows by ldmatrix and writes them back by stmatrix, with the
# 128-byte swizzle or without one.
FIGURES = r"""
#line 1 "figures.cu"
extern "C" __global__ void figures(MAP in, MAP to) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full;
  int t = threadIdx.x;
  if (t == 0) init(&full, 1), init_fence();
  __syncthreads();
  if (t == 0) expect(&full, 8192), load(s, in, &full, 0, 0);  // load
  wait(&full, 0);
  unsigned r[4];
  for (int k = 0; k < 4; ++k) {
    int row = t / 32 * 16 + t % 16, chunk = 2 * k + t % 32 / 16;
    unsigned place = at(s) + row * 128 + (SWIZZLE ? chunk ^ row % 8 : chunk) * 16;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"  // read
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(place));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"  // write
                 :: "r"(place), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
  }
  proxy_fence();
  __syncthreads();
  if (t == 0) {
    store(to, s, 0, 0);  // store
    commit();
    wait_read();
  }
}
"""


@pytest.mark.parametrize(("swizzle", "wavefronts"), [(1, 4), (0, 32)])
def test_bank_conflicts_of_a_wrong_swizzle(swizzle: int, wavefronts: int) -> None:
    """The swizzle spreads a column of chunks over all banks; without it the rows share four of them."""
    options = (*OPTIONS, f"-DSWIZZLE={swizzle}")
    function = engine.RawModule(code=HEAD + FIGURES, options=options).get_function("figures")
    source, written = halves(64, 64), engine.full((64, 64), np.nan, np.float16)
    span = 128 if swizzle else 0
    report = xray(function, (1,), (128,), (map_of(source, (64, 64), span), map_of(written, (64, 64), span)), 8192)
    report.assert_clean()
    np.testing.assert_array_equal(engine.asnumpy(written), engine.asnumpy(source))
    lines = FIGURES.splitlines()[2:]
    at = {mark: next(i for i, text in enumerate(lines, 1) if f"// {mark}" in text) for mark in ("load", "store")}
    at |= {mark: next(i for i, text in enumerate(lines, 1) if f"// {mark}" in text) for mark in ("read", "write")}
    for mark in ("read", "write"):
        figures = report.by_line["figures.cu", at[mark]]
        assert (figures.requests, figures.wavefronts) == (16, 16 * wavefronts)
        assert figures.conflicts == 16 * (wavefronts - 4)
    # TMA is counted in bytes: no warp's request is among them.
    assert report.by_access["figures.cu", at["load"]]["in"].read == 8192
    assert report.by_access["figures.cu", at["store"]]["to"].written == 8192
    assert (report.traffic["in"].read, report.traffic["in"].requests) == (8192, 0)
    assert (report.traffic["to"].written, report.traffic["to"].requests) == (8192, 0)
    np.testing.assert_array_equal(report.fetches["in"], np.ones((64, 64)))


def test_additions_are_counted_as_atomics_of_their_bytes() -> None:
    code = HEAD + adds().replace("NAME", '#line 1 "added.cu"\nextern "C" __global__ void added')
    report = xray(engine.RawModule(code=code, options=OPTIONS).get_function("added"), (2,), (128,), added())
    report.assert_clean()
    figures = report.traffic["out"]
    assert (figures.read, figures.written, figures.atomics, figures.requests) == (0, 2 * 512, 2 * 32, 0)
    assert report.shared["s"].read == 2 * 512


def test_what_lies_outside_of_the_array_is_not_read() -> None:
    """A box beyond the end, and elements that nobody wrote: `never written` sees what the stores have left."""
    code = HEAD + FIGURES.replace("0, 0);  // load", "0, 40);  // load").replace(
        "0, 0);  // store", "0, 40);  // store"
    )
    function = engine.RawModule(code=code, options=(*OPTIONS, "-DSWIZZLE=1")).get_function("figures")
    source, written = halves(64, 64), engine.empty((64, 64), np.float16)
    report = xray(function, (1,), (128,), (map_of(source, (64, 64)), map_of(written, (64, 64))), 8192)
    assert report.traffic["in"].read == report.traffic["to"].written == 24 * 128
    assert [f.kind for f in report.findings] == ["never written"]
    assert "2,560 of 4,096 elements of to" in report.findings[0].message


def test_the_xray_reads_what_nobody_has_written() -> None:
    function = engine.RawModule(code=HEAD + FIGURES, options=(*OPTIONS, "-DSWIZZLE=1")).get_function("figures")
    source, written = engine.empty((64, 64), np.float16), engine.full((64, 64), np.nan, np.float16)
    engine.asnumpy(source)
    report = xray(function, (1,), (128,), (map_of(source, (64, 64)), map_of(written, (64, 64))), 8192)
    assert {f.kind for f in report.findings} == {"uninitialised", "never written"}
    assert {f.array for f in report.findings} == {"in"}


def test_events_are_in_an_order_that_a_gpu_may_have() -> None:
    """The ring with one buffer: a load lands before its product, which is done before the buffer is released."""
    report = look("released_before_its_wait", True)
    lines = {kind: [i for i, e in enumerate(report.events) if e.kind == kind] for kind in observed.EVENTS}
    for kind in ("load", "landed", "product", "products done"):
        assert len(lines[kind]) == 3, kind
    releases = [i for i in lines["arrive"] if report.events[i].thread == 0]
    assert len(releases) == 3
    in_order = (lines["load"], lines["landed"], lines["product"], lines["products done"], releases)
    told = [i for turn in zip(*in_order, strict=True) for i in turn]
    assert told == sorted(told)
    loads, products = ([report.events[i] for i in lines[kind]] for kind in ("load", "product"))
    assert {(e.thread, e.value) for e in loads} == {(128, 8192)}
    assert [(e.thread, e.number, e.value) for e in products] == [(0, 0, 8), (0, 1, 8), (0, 2, 8)]
    text = prepared(next(bug for bug in ZOO if bug.name == "released_before_its_wait"), fixed=True).splitlines()
    assert {text[e.place[1]].partition("//")[2].strip() for e in loads if e.place} == {"here"}
    # A warp that waits goes on later; one that need not wait only goes on.
    for thread in range(0, 256, 32):
        mine = [e.kind for e in report.events if e.thread == thread and e.kind in ("wait", "waited")]
        assert mine.count("waited") >= mine.count("wait") and (not mine or mine[-1] == "waited")


SCALARS = r"""
#line 1 "scalars.cu"
extern "C" __global__ void scalars(MAP in, float *out) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full;
  int t = threadIdx.x;
  if (t == 0) init(&full, 1), init_fence();
  __syncthreads();
  if (t == 0) expect(&full, 8192), load(s, in, &full, 0, 0);
  wait(&full, 0);
  struct Four { float a, other, b, c, d; } x = {}, *p = &x;
  wg_fence();
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;"
               : "+f"(p->a), "+f"(p->b), "+f"(p->c), "+f"(p->d) : "l"(tile(s)));
  wg_commit();
  p->other = t;  // beside the sums, and none of them
  OTHER
  wg_wait<0>();
  out[t] = p->a + p->b + p->c + p->d + p->other;
}
"""


@pytest.mark.parametrize(("other", "kinds"), [("", []), ("p->c = 1;", ["not waited for"])])
def test_sums_that_lie_apart(other: str, kinds: list[str]) -> None:
    function = engine.RawModule(code=HEAD + SCALARS.replace("OTHER", other), options=OPTIONS).get_function("scalars")
    source, written = halves(64, 64), out(128)
    report = xray(function, (1,), (128,), (map_of(source, (64, 64)), written), 8192)
    assert [f.kind for f in report.findings] == kinds
    a = engine.asnumpy(source)[:, :16].astype(np.float32)
    product = a @ a[:8].T
    row, column = [16 * (t // 32) + t % 32 // 4 for t in range(128)], [2 * (t % 4) for t in range(128)]
    four = sum(product[np.add(row, down), np.add(column, right)] for down in (0, 8) for right in (0, 1))
    np.testing.assert_array_equal(engine.asnumpy(written), four + np.arange(128))
