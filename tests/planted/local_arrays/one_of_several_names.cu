// The array is declared in one line with others, with its size in a macro.
// finds: out of bounds, acc[8]
// launch: <<<1, 64>>>(out(64))
#define DIM 8
#define ROWS 16
extern "C" __global__ void one_of_several_names(float *out) {
  float m_i = 0.0f, l_i = fmaxf(m_i, 1.0f), row[2] = {1, 2}, acc[DIM] = {}, *last = acc;
  for (int c = 0; c < ROWS; ++c) acc[c] += row[c % 2];  // here  // fix: for (int c = 0; c < DIM; ++c) acc[c] += row[c % 2];
  out[threadIdx.x] = *last / l_i;
}
