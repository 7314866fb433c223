// A local array read as float4.
// finds: out of bounds
// launch: <<<1, 64>>>(out(64), int32(2))
extern "C" __global__ void as_a_vector(float *out, int n) {
  float kept[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  out[threadIdx.x] = reinterpret_cast<const float4 *>(kept)[n].x;  // here  // fix: out[threadIdx.x] = reinterpret_cast<const float4 *>(kept)[n - 1].x;
}
