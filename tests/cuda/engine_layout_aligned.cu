// Of tests/test_engine_layout.py.
typedef unsigned long long Address;
static __device__ __align__(16384) float hidden[64];
__device__ __align__(8192) float table[64];
__device__ float before = 3;
__device__ __align__(8192) float given[4] = {1, 2, 3, 4};
struct alignas(8192) Rows { float x[2048]; };
__device__ Address rest(const volatile void *p, int n) {
  volatile Address at = (Address)p;
  return at % n;
}
extern "C" __global__ void far_apart(Address *out, int i) {
  __shared__ float odd[33];
  __shared__ __align__(8192) float tile[2048];
  __shared__ __align__(16384) float buffer[2][2048];
  __shared__ Rows rows;
  __shared__ float last;
  odd[i] = tile[i] = rows.x[i] = hidden[i] = table[i] = last = before + given[i];
  buffer[0][i] = buffer[1][i] = last + odd[i] + tile[i] + rows.x[i] + hidden[i] + table[i];
  out[0] = rest(tile, 8192), out[1] = rest(buffer, 16384), out[2] = rest(&rows, 8192);
  out[3] = rest(hidden, 16384), out[4] = rest(table, 8192), out[5] = rest(given, 8192);
  volatile Address other = (Address)&buffer[0][i];
  other = other ^ 8192;  // the other buffer
  *(float *)other = 7;
  out[6] = (Address)buffer[1][i];
}
