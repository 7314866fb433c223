// 10 order: which tile of rows each block of 10_hopper.cu computes in each round, written on the
// device, in the stream of the kernel that reads it.
//
// Blocks should get equal amounts of work, and the last tiles should be short. So tiles are sorted
// by the number of key tiles that they see, the longest first, and dealt to the blocks in turn;
// every other round runs backwards, so that the block with the longest tile gets the shortest next.
// Heads whose K and V fit the L2 cache together are processed together, and every other group of
// heads begins with its shortest tiles, so that consecutive rounds hold similar work. Packed
// sequences differ in length: there each tile is a block, and the hardware balances the load.
//
// Launch   order_tiles, order_unmasked_tiles: a block for each round; order_packed_tiles: one block of
//          ORDER_THREADS; deal_tiles: one, of at least as many threads as there are blocks
// Shapes   schedule [rounds, blocks] of (sequence, head, head of K and V, first row or -1: none)
#include "attention_params.cuh"

constexpr int ORDER_THREADS = 1024;
constexpr int NO_TILE = -1;

// How many tiles of keys a tile of rows sees, at least one: 10 computes one even if none is seen.
__device__ int key_tiles(
    int row_tile, int rows, int keys, int block_m, int block_n, const AttentionParams& params) {
  const int first = row_tile * block_m, last = min(first + block_m, rows) - 1;
  const int begin = max(first + keys - rows - params.window_left, 0);
  const int end = min(last + keys - rows + params.window_right + 1, keys);
  return (max(end - begin, 1) + block_n - 1) / block_n;
}

// How many tiles of rows come before this one. A row sees more keys than the row before it, unless
// the window has a limit on the left: then rows before it may see more, and tiles are counted.
__device__ int place_of(
    int row_tile, int row_tiles, int block_m, int block_n, const AttentionParams& params) {
  if (params.window_right == UNLIMITED) return row_tile;
  if (params.window_left == UNLIMITED) return row_tiles - 1 - row_tile;
  const int own = key_tiles(row_tile, params.N, params.N_kv, block_m, block_n, params);
  int before = 0;
  for (int other = 0; other < row_tiles; ++other) {
    const int its = key_tiles(other, params.N, params.N_kv, block_m, block_n, params);
    before += its > own || (its == own && other < row_tile);
  }
  return before;
}

__device__ int4 entry_of(int sequence, int head, int first_row, const AttentionParams& params) {
  return make_int4(sequence, head, head / (params.heads / params.kv_heads), first_row);
}

extern "C" __global__ void order_tiles(
    int4* __restrict__ schedule,
    const int blocks,     // of the launch that reads the schedule
    const int sequences,  // batch
    const int together,   // heads of Q, of all sequences, whose tiles follow each other by length
    const int block_m, const int block_n, const AttentionParams params) {
  const int row_tiles = (params.N + block_m - 1) / block_m, heads = params.heads * sequences;
  const int first_of_round = blockIdx.x * blocks;
  for (int i = first_of_round + threadIdx.x; i < first_of_round + blocks; i += blockDim.x) {
    int n = i;  // its number in the order; entries beyond the last tile keep their place
    int4 entry = make_int4(0, 0, 0, NO_TILE);
    if (i < row_tiles * heads) {
      const int head = i / row_tiles, row_tile = i % row_tiles;
      const int group = head / together, groups = (heads + together - 1) / together;
      const int first = group * together, in_group = min(together, heads - first);
      int place = place_of(row_tile, row_tiles, block_m, block_n, params);
      if ((groups - 1 - group) % 2) place = row_tiles - 1 - place;  // the shortest first
      n = first * row_tiles + place * in_group + head - first;
      entry = entry_of(head / params.heads, head % params.heads, row_tile * block_m, params);
    }
    const int round = n / blocks, block = n % blocks;
    schedule[round * blocks + (round % 2 ? blocks - 1 - block : block)] = entry;
  }
}

// As order_tiles, where all rows see all keys, for consumers that leave tiles without rows of their own
// (16): tiles with fewer rows come last of all. If the last round has room, its whole tiles are cut: 64
// rows of each go to another block. How many consumers have rows then stands above the head of K and V.
extern "C" __global__ void order_unmasked_tiles(
    int4* __restrict__ schedule, const int blocks, const int sequences, const int block_m,
    const AttentionParams params) {
  const int heads = params.heads * sequences, of_head = params.N / block_m;
  const int whole = of_head * heads, shorter = params.N % block_m ? heads : 0;
  const int last_whole = whole % blocks, first_of_last = whole - last_whole;
  const bool cuts = 2 * last_whole + shorter <= blocks;
  const int cut = cuts ? last_whole : 0;
  for (int i = threadIdx.x; i < blocks; i += blockDim.x) {
    int n = blockIdx.x * blocks + i, consumers = 0;  // 0: all that have rows
    int first_row = of_head * block_m, head = n - whole - cut;
    if (n < whole + cut) {
      const bool tail = n >= whole;
      if (tail) n -= last_whole;
      if (cuts && n >= first_of_last) consumers = tail ? 1 : block_m / 64 - 1;
      head = n / of_head;
      first_row = n % of_head * block_m + (tail ? block_m - 64 : 0);
    } else if (head >= shorter) {
      head = 0;
      first_row = NO_TILE;
    }
    const int sequence = head / params.heads;
    int4 entry = entry_of(sequence, head - sequence * params.heads, first_row, params);
    entry.z |= consumers << 16;
    schedule[blockIdx.x * blocks + (blockIdx.x % 2 ? blocks - 1 - i : i)] = entry;
  }
}

// What a tile of rows costs where each consumer of 64 rows computes only the key tiles that they see, in
// a few units: as long as the slowest consumer takes alone, and as all share the tensor cores; and a start.
__device__ int work_of(int first_row, int block_m, int block_n, const AttentionParams& params) {
  if (first_row == NO_TILE) return 0;
  const int consumers = block_m / 64;
  int most = 0, all = 0;
  for (int row = first_row; row < min(first_row + block_m, params.N); row += 64) {
    const int own = key_tiles(row / 64, params.N, params.N_kv, 64, block_n, params);
    most = max(most, own);
    all += own;
  }
  return consumers * most + all + 2 * consumers;
}

// Deals the tiles of each round anew, the longest to the block that has had the least work. By one
// block, whose threads are at least `blocks`.
extern "C" __global__ void __launch_bounds__(ORDER_THREADS) deal_tiles(
    int4* __restrict__ schedule, const int rounds, const int blocks, const int block_m,
    const int block_n, const AttentionParams params) {
  __shared__ int lengths[ORDER_THREADS], work[ORDER_THREADS], takers[ORDER_THREADS];
  const int own = threadIdx.x;  // a tile of the round, and a block
  work[own] = 0;
  for (int round = 0; round < rounds; ++round) {
    int4* const of_round = schedule + round * blocks;
    const int4 entry = own < blocks ? of_round[own] : make_int4(0, 0, 0, NO_TILE);
    const int length = work_of(entry.w, block_m, block_n, params);
    lengths[own] = length;
    __syncthreads();  // hazard: others' lengths and work are not there yet
    int longer = 0, less = 0;
    for (int other = 0; other < blocks; ++other) {
      longer += lengths[other] > length || (lengths[other] == length && other < own);
      less += work[other] < work[own] || (work[other] == work[own] && other < own);
    }
    if (own < blocks) takers[less] = own;
    __syncthreads();  // hazard: not all takers are there yet, and others still read what is overwritten
    if (own < blocks) {
      of_round[takers[longer]] = entry;
      work[takers[longer]] += length;
    }
  }
}

// The sequence of a slot, and its tile of rows there. Sequence i has the slots from
// cu_seqlens_q[i] / block_m + i on: as many as tiles or one more, wherever it begins.
__device__ int2
tile_of_slot(int slot, int sequences, const int* __restrict__ cu_seqlens_q, int block_m) {
  int sequence = 0;
  for (int above = sequences; above - sequence > 1;) {
    const int middle = (sequence + above) / 2;
    (cu_seqlens_q[middle] / block_m + middle <= slot ? sequence : above) = middle;
  }
  return make_int2(sequence, slot - cu_seqlens_q[sequence] / block_m - sequence);
}

// One round of slots * heads blocks: tiles by the number of key tiles that they see, by counting
// them. The heads of a tile follow each other. Slots without a tile come last.
extern "C" __global__ void __launch_bounds__(ORDER_THREADS) order_packed_tiles(
    int4* __restrict__ schedule, const int* __restrict__ cu_seqlens_q,
    const int* __restrict__ cu_seqlens_k, const int slots, const int sequences, const int block_m,
    const int block_n, const AttentionParams params) {
  __shared__ int counts[ORDER_THREADS];  // of tiles, by key tiles; then the place of the next one
  const int thread = threadIdx.x;
  const auto bucket = [&](int2 tile) {
    const int first = cu_seqlens_q[tile.x], rows = cu_seqlens_q[tile.x + 1] - first;
    if (tile.y * block_m >= rows) return ORDER_THREADS - 1;
    const int keys = cu_seqlens_k[tile.x + 1] - cu_seqlens_k[tile.x];
    const int steps = key_tiles(tile.y, rows, keys, block_m, block_n, params);
    return ORDER_THREADS - 1 - min(steps, ORDER_THREADS - 1);
  };
  counts[thread] = 0;
  __syncthreads();  // hazard: tiles could be counted before the counts are 0
  for (int slot = thread; slot < slots; slot += ORDER_THREADS)
    atomicAdd(&counts[bucket(tile_of_slot(slot, sequences, cu_seqlens_q, block_m))], 1);
  __syncthreads();  // hazard: counts could be summed before all tiles are counted
  const int own = counts[thread];
  for (int distance = 1; distance < ORDER_THREADS; distance *= 2) {
    const int before = thread >= distance ? counts[thread - distance] : 0;
    __syncthreads();  // hazard: counts could change before other threads have read them
    counts[thread] += before;
    __syncthreads();  // hazard: counts could be read before other threads have added theirs
  }
  counts[thread] -= own;  // tiles of the buckets before
  __syncthreads();        // hazard: places could be taken before all sums are written
  for (int slot = thread; slot < slots; slot += ORDER_THREADS) {
    const int2 tile = tile_of_slot(slot, sequences, cu_seqlens_q, block_m);
    const int of_tile = bucket(tile);
    const int place = atomicAdd(&counts[of_tile], 1);
    const int first_row = of_tile == ORDER_THREADS - 1 ? NO_TILE : tile.y * block_m;
    for (int head = 0; head < params.heads; ++head)
      schedule[place * params.heads + head] = entry_of(tile.x, head, first_row, params);
  }
}
