// 11 rotary: the rotary embedding in a pass of its own. It reads Q and K, rotates pairs of columns,
// and writes them.
//
// Pair i of a row is rotated by an angle that grows with the row's position (Su et al., 2021):
// cosines[position][i] and sines[position][i]. Its two columns are i and i + ROTARY_DIM / 2
// (half-split, as in GPT-NeoX and Llama), or 2 i and 2 i + 1 (interleaved, as in GPT-J). A thread
// has two chunks of 16 bytes of a row, of which every pair is complete.
//
// Launch   grid (ceil(rows * heads * THREADS_ROW / THREADS), 2, batch), block THREADS; blockIdx.y:
//          0 is Q, 1 is K
// Shapes   Q, Q_out (batch, N, heads, HEAD_DIM), K, K_out (batch, N_kv, kv_heads, HEAD_DIM),
//          strides in elements, rows contiguous; in place where both pointers are the same.
//          cosines, sines (positions, ROTARY_DIM / 2), of T or float32. q_positions, k_positions: int32
//          (batch, rows) or (rows,); null: N_kv - N + i for row i of Q, j for row j of K. Packed: batch
//          1, all tokens are rows, and N and N_kv those of the row's own sequence
// Needs    HEAD_DIM, strides multiples of 16 bytes; ROTARY_DIM of 32 bytes
// Traffic  Q and K once each way; cosines and sines once from DRAM, then from the caches
#include "attention_params.cuh"

#include <cuda_fp16.h>
#include <cuda_bf16.h>

#ifndef HEAD_DIM
#define HEAD_DIM 64  // d, the length of a row
#endif
#ifndef ROTARY_DIM
#define ROTARY_DIM HEAD_DIM  // columns 0 .. ROTARY_DIM - 1 are rotated, the others are copied
#endif
#ifndef INTERLEAVED
#define INTERLEAVED 0  // 1: a pair is two neighbours; 0: one column of each half
#endif
#ifndef FIRST_POSITIONS
#define FIRST_POSITIONS 0  // 1: q_positions and k_positions are of the first row of each batch
#endif
#ifndef THREADS
#define THREADS 256
#endif
static_assert(ROTARY_DIM <= HEAD_DIM && ROTARY_DIM % 8 == 0, "angles are read 16 bytes at a time");

struct RotaryParams {
  Strides q, k, q_out, k_out;
  int N, N_kv, heads, kv_heads;
  int q_positions_batch,
      k_positions_batch;  // from one batch to the next: 0 where all have the same
  int positions;          // rows of cosines and sines
  int sequences;          // packed ones; 0 where there is no cu_seqlens
};

__device__ __forceinline__ float to_float(float a) { return a; }
__device__ __forceinline__ float to_float(__half a) { return __half2float(a); }
__device__ __forceinline__ float to_float(__nv_bfloat16 a) { return __bfloat162float(a); }
__device__ __forceinline__ void from_float(float& a, float x) { a = x; }
__device__ __forceinline__ void from_float(__half& a, float x) { a = __float2half_rn(x); }
__device__ __forceinline__ void from_float(__nv_bfloat16& a, float x) {
  a = __float2bfloat16_rn(x);
}

// 16 bytes of a row, moved by one instruction.
template <typename T>
struct __align__(16) Chunk {
  T x[16 / sizeof(T)];
};

template <typename T>
__device__ __forceinline__ Chunk<T> load(const T* row, int chunk) {
  Chunk<T> loaded;
  *reinterpret_cast<uint4*>(loaded.x) = reinterpret_cast<const uint4*>(row)[chunk];
  return loaded;
}

template <typename T>
__device__ __forceinline__ void store(T* row, int chunk, const Chunk<T>& a) {
  reinterpret_cast<uint4*>(row)[chunk] = *reinterpret_cast<const uint4*>(a.x);
}

// The cosines or sines of neighbouring pairs.
template <int N, typename Table>
__device__ __forceinline__ void load_angles(float (&x)[N], const Table* of_pair) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = to_float(of_pair[i]);
}
__device__ __forceinline__ void load_angles(float (&x)[4], const float* of_pair) {
  *reinterpret_cast<float4*>(x) = *reinterpret_cast<const float4*>(of_pair);
}
__device__ __forceinline__ void load_angles(float (&x)[2], const float* of_pair) {
  *reinterpret_cast<float2*>(x) = *reinterpret_cast<const float2*>(of_pair);
}

// The position of a row of packed sequences in its own: the last row is at the last key.
__device__ __forceinline__ int position_in_sequence(
    int row, const int* cu_seqlens, const int* cu_seqlens_k, int sequences) {
  int sequence = 0;
  for (int above = sequences; above - sequence > 1;) {
    const int middle = (sequence + above) / 2;
    (cu_seqlens[middle] <= row ? sequence : above) = middle;
  }
  return row - cu_seqlens[sequence + 1] + cu_seqlens_k[sequence + 1] - cu_seqlens_k[sequence];
}

template <typename T, typename Table = float>
__global__ void __launch_bounds__(THREADS) rotary(
    const T* Q, const T* K, T* Q_out, T* K_out,  // no __restrict__: Q_out may be Q
    const Table* __restrict__ cosines, const Table* __restrict__ sines,
    const int* __restrict__ q_positions, const int* __restrict__ k_positions,
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1]: where each begins; or null
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const RotaryParams params) {
  // ---- which two chunks of which row this thread has
  constexpr int VECTOR = 16 / sizeof(T), CHUNKS = HEAD_DIM / VECTOR,
                ROTATED = ROTARY_DIM / VECTOR;                           // in a row
  constexpr int THREADS_ROW = (CHUNKS + 1) / 2, ROTATING = ROTATED / 2;  // of threads
  static_assert(HEAD_DIM % VECTOR == 0 && ROTARY_DIM % (2 * VECTOR) == 0, "rows are whole chunks");
  const bool of_k = blockIdx.y == 1;
  const unsigned heads = of_k ? params.kv_heads : params.heads;
  const unsigned rows = of_k ? params.N_kv : params.N;
  const unsigned item = blockIdx.x * THREADS + threadIdx.x, head_row = item / THREADS_ROW,
                 column = item % THREADS_ROW;
  const int row = head_row / heads, head = head_row % heads,
            batch = blockIdx.z;  // heads are neighbours
  if (head_row >= rows * heads) return;
  const Strides from = of_k ? params.k : params.q, to = of_k ? params.k_out : params.q_out;
  const T* source = (of_k ? K : Q) + batch * from.batch + row * from.row + head * from.head;
  T* target = (of_k ? K_out : Q_out) + batch * to.batch + row * to.row + head * to.head;

  // ---- the columns that are not rotated
  if (column >= ROTATING) {
    if (source == target) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int chunk = 2 * ROTATING + column - ROTATING + i * (THREADS_ROW - ROTATING);
      if (chunk < CHUNKS) store(target, chunk, load(source, chunk));
    }
    return;
  }

  // ---- chunks c and c + ROTATING: columns j of both are a pair, or each chunk has whole pairs
  Chunk<T> first = load(source, column);
  Chunk<T> second = load(source, column + ROTATING);
  const int* positions = of_k ? k_positions : q_positions;
  const long long batch_positions = of_k ? params.k_positions_batch : params.q_positions_batch;
  const int aligned =
      params.sequences
          ? position_in_sequence(
                row, of_k ? cu_seqlens_k : cu_seqlens_q, cu_seqlens_k, params.sequences)
          : (of_k ? row : row + params.N_kv - params.N);  // the last row is at the last key
  const int position = FIRST_POSITIONS ? positions[batch] + row
                       : positions     ? positions[batch * batch_positions + row]
                                       : aligned;
  // Clamped to the tables' rows, so that none is read past them.
  const long long angle = (long long)min(max(position, 0), params.positions - 1) * (ROTARY_DIM / 2);
  constexpr int WIDTH = INTERLEAVED && VECTOR == 4 ? 2 : 4;  // angles that one access reads
  __align__(16) float c[VECTOR / WIDTH][WIDTH], s[VECTOR / WIDTH][WIDTH];
#pragma unroll
  for (int i = 0; i < VECTOR; i += WIDTH) {
    // Interleaved: VECTOR / 2 pairs of the first chunk, then as many of the second one.
    const int chunk = column + i / (VECTOR / 2) * ROTATING;
    const long long pair =
        angle + (INTERLEAVED ? VECTOR / 2 * chunk + i % (VECTOR / 2) : VECTOR * column + i);
    load_angles(c[i / WIDTH], cosines + pair);
    load_angles(s[i / WIDTH], sines + pair);
  }
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    Chunk<T>& own = i < VECTOR / 2 ? first : second;  // of an interleaved pair
    T &a = INTERLEAVED ? own.x[2 * i % VECTOR] : first.x[i],
      &b = INTERLEAVED ? own.x[2 * i % VECTOR + 1] : second.x[i];
    const float cosine = c[i / WIDTH][i % WIDTH], sine = s[i / WIDTH][i % WIDTH];
    const float x = to_float(a), y = to_float(b);
    from_float(a, x * cosine - y * sine);
    from_float(b, y * cosine + x * sine);
  }
  store(target, column, first);
  store(target, column + ROTATING, second);
}
