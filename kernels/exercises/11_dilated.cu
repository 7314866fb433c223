// Exercise 11: a dilated mask. A row sees every step-th key, counted back from its own: its own,
// the key step before it, the key 2 step before it, and so on.
//
// Positions are those of mask_mod: row i is at q_idx = i + N_kv - N, so that the last row is at the
// last key. With more rows than keys the first rows are at negative positions and see no key: O is
// 0 and lse -inf there.
//
// Launch   grid ceil(N / BLOCK_M), block BLOCK_M: a thread for each row
// Shapes   Q, O (N, HEAD_DIM), K, V (N_kv, HEAD_DIM), lse (N,); float32, row-major

#ifndef HEAD_DIM
#define HEAD_DIM 16
#endif
#ifndef BLOCK_M
#define BLOCK_M 32
#endif
#ifndef BLOCK_N
#define BLOCK_N 16
#endif
#define NEG_INF __int_as_float(0xff800000)
#define M_INIT -3.402823466e38f  // finite, so that a row that has seen no key does not become NaN

// Whether the row at q_idx sees the key: what you would write as mask_mod. step is 1 or more.
__device__ bool sees(int q_idx, int kv_idx, int step) {
  // BEGIN hole: about 1 line - every step-th key, back from the row's own
  // DEFAULT: return kv_idx <= q_idx;  // every key
  return kv_idx <= q_idx && (q_idx - kv_idx) % step == 0;
  // END hole
}

// Whether some row of a tile sees some key of it: the block mask as a formula. Positions of the
// first and last row and key.
__device__ bool is_needed(int first_row, int last_row, int first_key, int last_key, int step) {
  // BEGIN hole: about 3 lines - does one of its distances q_idx - kv_idx count? No loop is needed
  // DEFAULT: return true;  // no tile is skipped
  const int least = max(first_row - last_key, 0), most = last_row - first_key;
  return most >= 0 && most / step * step >= least;
  // END hole
}

extern "C" __global__ void __launch_bounds__(BLOCK_M) dilated_attention(
    const float* __restrict__ Q, const float* __restrict__ K, const float* __restrict__ V,
    float* __restrict__ O, float* __restrict__ lse, int N, int N_kv, float softmax_scale,
    int step) {
  __shared__ float K_smem[BLOCK_N][HEAD_DIM], V_smem[BLOCK_N][HEAD_DIM];
  const int first_row = blockIdx.x * BLOCK_M, last_row = min(first_row + BLOCK_M, N) - 1,
            shift = N_kv - N;
  const int row = first_row + threadIdx.x;
  float q[HEAD_DIM], acc[HEAD_DIM], m_i = M_INIT, l_i = 0.0f;
  for (int c = 0; c < HEAD_DIM; ++c) q[c] = row < N ? Q[row * HEAD_DIM + c] : 0.0f, acc[c] = 0.0f;

  for (int first = 0; first < N_kv; first += BLOCK_N) {
    const int keys = min(BLOCK_N, N_kv - first);
    if (!is_needed(first_row + shift, last_row + shift, first, first + keys - 1, step))
      continue;  // all threads agree
    for (int e = threadIdx.x; e < keys * HEAD_DIM; e += BLOCK_M) {
      K_smem[e / HEAD_DIM][e % HEAD_DIM] = K[first * HEAD_DIM + e];
      V_smem[e / HEAD_DIM][e % HEAD_DIM] = V[first * HEAD_DIM + e];
    }
    __syncthreads();  // hazard: a tile is read before all of it is there
    for (int j = 0; j < keys; ++j) {
      float dot = 0.0f;
      for (int c = 0; c < HEAD_DIM; ++c) dot += q[c] * K_smem[j][c];
      const float s = sees(row + shift, first + j, step) ? dot * softmax_scale : NEG_INF;
      const float m_new = fmaxf(m_i, s), rescale = expf(m_i - m_new), p = expf(s - m_new);
      m_i = m_new;
      l_i = l_i * rescale + p;
      for (int c = 0; c < HEAD_DIM; ++c) acc[c] = acc[c] * rescale + p * V_smem[j][c];
    }
    __syncthreads();  // hazard: a tile is replaced that others still read
  }
  if (row >= N) return;
  for (int c = 0; c < HEAD_DIM; ++c) O[row * HEAD_DIM + c] = l_i == 0.0f ? 0.0f : acc[c] / l_i;
  lse[row] = l_i == 0.0f ? NEG_INF : m_i + logf(l_i);
}
