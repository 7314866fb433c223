// Exercise 14: O = P V for each sequence of a paged cache, 16 keys at a time. Page i of V holds
// page_size keys. The block table of a sequence says in which page its first page_size keys are, in
// which the next, and so on.
//
// Nobody has written what comes after a sequence's last key: there, values may be NaN, and the
// numbers of the table anything. P is 0 there.
//
// Launch   grid (sequences), block 64: thread c has column c
// Shapes   V (pages, page_size, 64), P (sequences, room), O (sequences, 64): float32;
//          block_table (sequences, table_row), lengths (sequences): int; any page_size
// Limit    each value of a sequence is read once, and no others

extern "C" __global__ void __launch_bounds__(64) output(
    const float* V, const float* P, const int* block_table, const int* lengths, float* O,
    int page_size, int table_row, int room) {
  const int sequence = blockIdx.x, c = threadIdx.x, length = lengths[sequence];
  float acc = 0.0f;
  for (int first = 0; first < length; first += 16) {
    float v[16];
    for (int i = 0; i < 16; ++i) {
      const int key = first + i;
      // BEGIN hole: about 5 lines - column c of this key's value; 0 after the last key
      // DEFAULT: v[i] = V[(sequence * table_row * page_size + key) * 64 + c];  // in order
      v[i] = 0.0f;
      if (key < length) {
        const int page = block_table[sequence * table_row + key / page_size];
        v[i] = V[(page * page_size + key % page_size) * 64 + c];
      }
      // END hole
    }
    // A product on tensor cores takes all 16 keys, too.
    for (int i = 0; i < 16; ++i) acc += P[sequence * room + first + i] * v[i];
  }
  O[sequence * 64 + c] = acc;
}
