// The array is a member of a struct.
// finds: out of bounds, last[3]
// launch: <<<1, 64>>>(out(64), int32(3))
struct rows {
  float first[2], last[3];
  __device__ float get(int i) const { return last[i]; }  // here
};
extern "C" __global__ void member_of_its_own_struct(float *out, int n) {
  const rows rows = {{1, 2}, {3, 4, 5}};
  out[threadIdx.x] = rows.get(n) + rows.first[n % 2];  // fix: out[threadIdx.x] = rows.get(n % 3) + rows.first[n % 2];
}
