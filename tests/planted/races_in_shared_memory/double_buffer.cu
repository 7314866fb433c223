// With two buffers, one barrier a tile is still needed before a buffer is filled again.
// finds: race, buffer
// launch: <<<1, 64>>>(some(256), out(64))
extern "C" __global__ void double_buffer(const float *in, float *out) {
  __shared__ float buffer[2][64];
  int t = threadIdx.x;
  float sum = 0;
  buffer[0][t] = in[t];
  __syncthreads();
  for (int tile = 0; tile < 4; ++tile) {
    if (tile < 3) buffer[(tile + 1) % 2][t] = in[(tile + 1) * 64 + t];  // here
    sum += buffer[tile % 2][63 - t];  // there
    // fix: __syncthreads();
  }
  out[t] = sum;
}
