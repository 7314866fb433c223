// 06 wmma: the two products on tensor cores, by the C++ interface that every GPU with tensor cores has.
//
// Since 05: float16 or bfloat16 in and out, sums and statistics in float32. A warp multiplies fragments of 16 x 16.
// Which lane holds which element of a fragment is not told, so S goes through shared memory to bring a row to a lane, P
// goes back the same way, and to rescale acc there is no other: it is done only when a maximum has moved far.
//
// Launch   grid (ceil(rows of the longest sequence / BLOCK_M), heads, sequences), block BLOCK_M; SHARED_BYTES of
//          dynamic shared memory
// Shapes   Q, O (batch, N, heads, HEAD_DIM), K, V (batch, N_kv, kv_heads, HEAD_DIM), strides in elements, rows
//          contiguous; packed: (tokens, heads, HEAD_DIM) with cu_seqlens. lse (batch, heads, N) or (heads, tokens)
// Needs    sm_75 for float16, sm_80 for bfloat16; HEAD_DIM and strides multiples of 8, pointers of 16 bytes
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <mma.h>
#include "attention_params.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 64  // d, the length of a row of Q, K, V, O: a multiple of 8, at most 128
#endif
#ifndef BLOCK_M
#define BLOCK_M 128  // B_r, query rows per block: one for each thread, 32 for each warp
#endif
#ifndef BLOCK_N
#define BLOCK_N 32  // B_c, keys per tile
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS (HEAD_DIM <= 64 ? 3 : 2)  // per SM: what the compiler keeps registers free for
#endif
#define ROW ((HEAD_DIM + 15) / 16 * 16)  // a row in shared memory, filled with zeros to whole fragments
#define CHUNKS (ROW / 8)                 // of 16 bytes in it
#define STRIDE (ROW + 8)                 // 16 bytes more than a row: eight rows of a fragment lie in different banks
#define S_STRIDE (BLOCK_N + 4)  // the same for float4 of S; P lies over S, with twice as many elements to a row
#define FETCHES ((BLOCK_N * CHUNKS + BLOCK_M - 1) / BLOCK_M)  // chunks of a tile of K or V per thread
#define SHARED_BYTES (2 * STRIDE * (BLOCK_M + 2 * BLOCK_N) + 4 * BLOCK_M * S_STRIDE)
#define RAISE 8.0f                          // m_i follows a row's maximum when some weight would exceed 2^RAISE
#define NEG_INF __int_as_float(0xff800000)  // minus infinity; NVRTC knows no INFINITY
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 128, "rows move in pieces of 16 bytes; acc must fit the registers");
static_assert(BLOCK_M % 32 == 0 && BLOCK_N % 32 == 0, "a row for each lane; scores come 32 keys at a time");

namespace tc = nvcuda::wmma;
using Accumulator = tc::fragment<tc::accumulator, 16, 16, 16, float>;

__device__ __forceinline__ unsigned pack(__half, float x, float y) {
  const __half2 both = __floats2half2_rn(x, y);
  return reinterpret_cast<const unsigned&>(both);
}

__device__ __forceinline__ unsigned pack(__nv_bfloat16, float x, float y) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const unsigned&>(both);
}

// Chunk i of the thread's share of a tile: of rows first .. as far as they lie before end. The rest becomes zeros.
template <typename T>
__device__ __forceinline__ uint4 fetch(const T* __restrict__ source, long long stride, int first, int end, int i) {
  const int e = i * BLOCK_M + threadIdx.x, r = first + e / CHUNKS, c = 8 * (e % CHUNKS);
  if (r >= end || c >= HEAD_DIM) return make_uint4(0, 0, 0, 0);
  return *reinterpret_cast<const uint4*>(source + r * stride + c);
}

template <typename T>
__device__ __forceinline__ void put(T* tile, uint4 chunk, int i) {
  const int e = i * BLOCK_M + threadIdx.x;
  *reinterpret_cast<uint4*>(tile + e / CHUNKS * STRIDE + 8 * (e % CHUNKS)) = chunk;
}

template <typename T>
__device__ __forceinline__ void fetch_tile(
    uint4 (&share)[FETCHES], const T* __restrict__ source, long long stride, int first, int end) {
#pragma unroll
  for (int i = 0; i < FETCHES; ++i) share[i] = fetch(source, stride, first, end, i);
}

template <typename T>
__device__ __forceinline__ void put_tile(T* tile, const uint4 (&share)[FETCHES]) {
#pragma unroll
  for (int i = 0; i < FETCHES; ++i)
    if (BLOCK_N * CHUNKS % BLOCK_M == 0 || i * BLOCK_M + threadIdx.x < BLOCK_N * CHUNKS) put(tile, share[i], i);
}

// S = Q K^T for the 32 rows of a warp, 32 keys at a time, into the warp's part of shared memory.
template <typename T>
__device__ __forceinline__ void scores(float* S_smem, const T* Q_smem, const T* K_smem) {
#pragma unroll
  for (int keys = 0; keys < BLOCK_N; keys += 32) {
    Accumulator S[2][2];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n) tc::fill_fragment(S[m][n], 0.0f);
#pragma unroll 2  // all steps at once would take more registers than there are
    for (int k = 0; k < ROW; k += 16) {
      tc::fragment<tc::matrix_a, 16, 16, 16, T, tc::row_major> q[2];
#pragma unroll
      for (int m = 0; m < 2; ++m) tc::load_matrix_sync(q[m], Q_smem + 16 * m * STRIDE + k, STRIDE);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        // K^T: the rows of K are the columns of the right operand.
        tc::fragment<tc::matrix_b, 16, 16, 16, T, tc::col_major> key;
        tc::load_matrix_sync(key, K_smem + (keys + 16 * n) * STRIDE + k, STRIDE);
#pragma unroll
        for (int m = 0; m < 2; ++m) tc::mma_sync(S[m][n], q[m], key, S[m][n]);
      }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n)
        tc::store_matrix_sync(S_smem + 16 * m * S_STRIDE + keys + 16 * n, S[m][n], S_STRIDE, tc::mem_row_major);
  }
}

// acc += P V for the 32 rows of a warp.
template <typename T>
__device__ __forceinline__ void weigh(Accumulator (&acc)[2][ROW / 16], const T* P_smem, const T* V_smem) {
#pragma unroll 1
  for (int k = 0; k < BLOCK_N; k += 16) {
    tc::fragment<tc::matrix_a, 16, 16, 16, T, tc::row_major> p[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) tc::load_matrix_sync(p[m], P_smem + 16 * m * 2 * S_STRIDE + k, 2 * S_STRIDE);
#pragma unroll
    for (int n = 0; n < ROW / 16; ++n) {
      tc::fragment<tc::matrix_b, 16, 16, 16, T, tc::row_major> value;
      tc::load_matrix_sync(value, V_smem + k * STRIDE + 16 * n, STRIDE);
#pragma unroll
      for (int m = 0; m < 2; ++m) tc::mma_sync(acc[m][n], p[m], value, acc[m][n]);
    }
  }
}

// Columns 16 n .. 16 n + 15 of acc, to where each lane finds its row of them.
__device__ __forceinline__ void lay_out(float* S_smem, const Accumulator (&acc)[2][ROW / 16], int n) {
  __syncwarp();  // hazard: overwritten while another lane still reads its row
#pragma unroll
  for (int m = 0; m < 2; ++m) tc::store_matrix_sync(S_smem + 16 * m * S_STRIDE, acc[m][n], S_STRIDE, tc::mem_row_major);
  __syncwarp();  // hazard: a row is read before the other lanes have stored their part of it
}

template <typename T>
__global__ void __launch_bounds__(BLOCK_M, MIN_BLOCKS) wmma(
    const T* __restrict__ Q, const T* __restrict__ K, const T* __restrict__ V, T* __restrict__ O,
    float* __restrict__ lse,               // [batch, heads, N], packed [heads, tokens]; null: not wanted
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1] where each sequence of Q begins; null: N rows each
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const AttentionParams params) {
  // ---- prologue: which tile of which head is mine, which keys it sees
  int tile = blockIdx.x, head = blockIdx.y, sequence = blockIdx.z;
  // The last rows of a causal mask see the most keys: the tiles of all heads that hold them start first.
  if (params.window_right >= 0) {
    const unsigned heads = gridDim.y * gridDim.z, block = tile + gridDim.x * (head + gridDim.y * sequence);
    tile = gridDim.x - 1 - block / heads, head = block % heads % gridDim.y, sequence = block % heads / gridDim.y;
  }
  const int kv_head = head / (gridDim.y / params.kv_heads);
  const int q_first = cu_seqlens_q ? cu_seqlens_q[sequence] : 0, k_first = cu_seqlens_k ? cu_seqlens_k[sequence] : 0;
  const int q_len = cu_seqlens_q ? cu_seqlens_q[sequence + 1] - q_first : params.N;
  const int kv_len = cu_seqlens_k ? cu_seqlens_k[sequence + 1] - k_first : params.N_kv;
  const int first_row = tile * BLOCK_M;
  if (first_row >= q_len) return;  // the whole block, before any barrier
  Q += (cu_seqlens_q ? q_first * params.q.row : sequence * params.q.batch) + head * params.q.head;
  O += (cu_seqlens_q ? q_first * params.o.row : sequence * params.o.batch) + head * params.o.head;
  K += (cu_seqlens_k ? k_first * params.k.row : sequence * params.k.batch) + kv_head * params.k.head;
  V += (cu_seqlens_k ? k_first * params.v.row : sequence * params.v.batch) + kv_head * params.v.head;

  // Row i stands at key i + kv_len - q_len. This lane's row sees keys low .. high; all rows of the block see some of
  // begin .. end - 1, and all see full_begin .. full_end - 1.
  const int row = first_row + threadIdx.x, place = row + kv_len - q_len;
  const int first_place = place - threadIdx.x, last_place = min(first_row + BLOCK_M, q_len) - 1 + kv_len - q_len;
  const int low = params.window_left < 0 ? 0 : place - params.window_left;
  const int high = params.window_right < 0 ? kv_len - 1 : min(kv_len - 1, place + params.window_right);
  const int begin = params.window_left < 0 ? 0 : max(0, first_place - params.window_left) / BLOCK_N * BLOCK_N;
  const int end = params.window_right < 0 ? kv_len : min(kv_len, last_place + params.window_right + 1);
  const int full_begin = params.window_left < 0 ? 0 : last_place - params.window_left;
  const int full_end = params.window_right < 0 ? kv_len : min(kv_len, first_place + params.window_right + 1);

  extern __shared__ __align__(128) unsigned char raw[];
  T* Q_smem = reinterpret_cast<T*>(raw);
  T* K_smem = Q_smem + BLOCK_M * STRIDE;
  T* V_smem = K_smem + BLOCK_N * STRIDE;
  const int warp_row = threadIdx.x / 32 * 32;
  float* S_smem = reinterpret_cast<float*>(V_smem + BLOCK_N * STRIDE) + warp_row * S_STRIDE;  // of this warp
  float* s_row = S_smem + threadIdx.x % 32 * S_STRIDE;                                        // of this lane
#pragma unroll 4
  for (int i = 0; i < CHUNKS; ++i) put(Q_smem, fetch(Q, params.q.row, first_row, q_len, i), i);
  uint4 next[FETCHES];
  fetch_tile(next, K, params.k.row, begin, kv_len);
  put_tile(K_smem, next);
  Accumulator acc[2][ROW / 16];
#pragma unroll
  for (int n = 0; n < ROW / 16; ++n) tc::fill_fragment(acc[0][n], 0.0f), tc::fill_fragment(acc[1][n], 0.0f);
  float m_i = NEG_INF, l_i = 0.0f;  // m_i in units of log2
  const float to_log2 = params.softmax_scale * LOG2_E;
  __syncthreads();  // hazard: Q and K are read before another thread has written its part of them

  // ---- one pass: scores, the new maximum, everything so far rescaled to it if need be, then this tile added
  for (int first = begin; first < end; first += BLOCK_N) {
    fetch_tile(next, V, params.v.row, first, kv_len);  // on its way while the scores are computed
    scores(S_smem, Q_smem + warp_row * STRIDE, K_smem);
    put_tile(V_smem, next);
    __syncwarp();  // hazard: a row of S is read before the other lanes have stored their part of it
    float s[BLOCK_N], m_new = m_i;
#pragma unroll
    for (int j = 0; j < BLOCK_N; j += 4) {
      const float4 x = *reinterpret_cast<const float4*>(s_row + j);
      s[j] = to_log2 * x.x, s[j + 1] = to_log2 * x.y, s[j + 2] = to_log2 * x.z, s[j + 3] = to_log2 * x.w;
    }
    if (first < full_begin || first + BLOCK_N > full_end) {  // a key that is not seen gets exactly no weight
#pragma unroll
      for (int j = 0; j < BLOCK_N; ++j) s[j] = first + j < low || first + j > high ? NEG_INF : s[j];
    }
#pragma unroll
    for (int j = 0; j < BLOCK_N; ++j) m_new = fmaxf(m_new, s[j]);

    // Weights up to 2^RAISE do no harm, as the division by l_i cancels them; and most tiles raise no maximum that far.
    if (__any_sync(0xffffffff, m_new > m_i + RAISE)) {
      const float rescale = m_new == NEG_INF ? 1.0f : exp2f(m_i - m_new);
      m_i = m_new;
      l_i *= rescale;
#pragma unroll
      for (int n = 0; n < ROW / 16; ++n) {
        lay_out(S_smem, acc, n);
#pragma unroll
        for (int c = 0; c < 16; ++c) s_row[c] *= rescale;
        __syncwarp();  // hazard: a fragment is loaded before the other lanes have rescaled their rows
#pragma unroll
        for (int m = 0; m < 2; ++m)
          tc::load_matrix_sync(acc[m][n], S_smem + 16 * m * S_STRIDE, S_STRIDE, tc::mem_row_major);
      }
    }
    __syncwarp();  // hazard: P overwrites what another lane still loads
    const float shift = m_i == NEG_INF ? 0.0f : m_i;
    T* p_row = reinterpret_cast<T*>(s_row);
#pragma unroll
    for (int j = 0; j < BLOCK_N; j += 8) {
      unsigned p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = exp2f(s[j + 2 * i] - shift), y = exp2f(s[j + 2 * i + 1] - shift);
        l_i += x + y;
        p[i] = pack(T(), x, y);
      }
      *reinterpret_cast<uint4*>(p_row + j) = make_uint4(p[0], p[1], p[2], p[3]);
    }
    __syncthreads();  // hazard: P and V are read before others have written their part; K is overwritten while read
    fetch_tile(next, K, params.k.row, first + BLOCK_N, kv_len);  // on its way while V is used; past the last tile: zeros
    weigh(acc, reinterpret_cast<const T*>(S_smem), V_smem);
    put_tile(K_smem, next);
    __syncthreads();  // hazard: K is read before others have written their part; P and V are overwritten while read
  }

  // ---- epilogue: divide once; a row that has seen no key: zeros, and lse = -inf
  const float inverse = l_i > 0.0f ? 1.0f / l_i : 0.0f;
  if (lse && row < q_len) {
    const long long start = cu_seqlens_q ? (long long)head * cu_seqlens_q[gridDim.z] + q_first
                                         : ((long long)sequence * gridDim.y + head) * params.N;
    lse[start + row] = l_i > 0.0f ? LN_2 * (m_i + log2f(l_i)) : NEG_INF;
  }
#pragma unroll
  for (int n = 0; n < ROW / 16; ++n) {
    lay_out(S_smem, acc, n);
#pragma unroll
    for (int c = 0; c < 16; c += 8) {
      unsigned o[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) o[i] = pack(T(), s_row[c + 2 * i] * inverse, s_row[c + 2 * i + 1] * inverse);
      if (row < q_len && 16 * n + c < HEAD_DIM)
        *reinterpret_cast<uint4*>(O + row * params.o.row + 16 * n + c) = make_uint4(o[0], o[1], o[2], o[3]);
    }
  }
}
