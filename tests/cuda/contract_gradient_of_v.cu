// Of tests/test_contract.py.
extern "C" __global__ void weights(const float* Q, const float* K, float* P, int n, int n_kv, float softmax_scale) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float sum = 0.0f;
  for (int j = 0; j < n_kv; ++j) {
    float s = 0.0f;
    for (int c = 0; c < HEAD_DIM; ++c) s += Q[i * HEAD_DIM + c] * K[j * HEAD_DIM + c];
    P[i * n_kv + j] = expf(softmax_scale * s);
    sum += P[i * n_kv + j];
  }
  for (int j = 0; j < n_kv; ++j) P[i * n_kv + j] /= sum;
}

extern "C" __global__ void gradient(const float* P, const float* dO, float* dV, int n, int n_kv) {
  const int j = blockIdx.x * blockDim.x + threadIdx.x;
  if (j >= n_kv) return;
  for (int c = 0; c < HEAD_DIM; ++c) {
    float sum = 0.0f;
    for (int i = 0; i < n; ++i) sum += P[i * n_kv + j] * dO[i * HEAD_DIM + c];
    dV[j * HEAD_DIM + c] = sum;
  }
}
