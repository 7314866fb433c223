// The array is a member of a struct template.
// finds: out of bounds, acc[4]
// launch: <<<1, 64>>>(out(64), int32(5))
template <typename T, int N>
struct Tile {
  T acc[N][N] = {};
  __device__ void add(int i, int j) { acc[i][j] += j; }  // here
};
extern "C" __global__ void member_of_a_template(float *out, int n) {
  Tile<float, 4> tile;
  for (int j = 0; j < n; ++j) tile.add(0, j);  // fix: for (int j = 0; j < n - 1; ++j) tile.add(0, j);
  out[threadIdx.x] = tile.acc[0][3];
}
