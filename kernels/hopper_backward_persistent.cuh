// With PERSISTENT=1, there is a block for each multiprocessor, which computes one tile of keys after the
// other: what is loaded first of a tile, and the draw of its number, take no time while the consumers are
// at the steps of the one before. Sequences are not packed, and additions have no order; what would be
// gridDim.z, the number of sequences, is in AttentionParams; but with CONTINUES (17) blocks stand in as many
// rows as there are sequences. Notebook 13 says what it gains, and where.

#pragma once
#include "hopper_backward_tiles.cuh"  // PERSISTENT; sizes of tiles
#include "semaphore.cuh"

static_assert(!PERSISTENT || !DETERMINISTIC, "one warp adds to dQ, in any order");
constexpr int STORED = 6;  // a named barrier for each consumer
// 16 rows of dK or dV of each warp are staged in the place of dS, of which a consumer has so many bytes.
constexpr int DS_OF_CONSUMER = (BLOCK_M > 64 ? BLOCK_M : 64) * 128;

// In shared memory: the numbers of two tiles of keys, and their mbarriers; that K and V have been read.
struct TileMail {
  int number[2];
  unsigned long long ring[4], keys_empty;
};

// The tiles of keys of a block, as one of its roles goes through them: the thread that loads sends their
// numbers to the others. Without PERSISTENT there is one tile, 0.
class TileQueue {
  static constexpr int ROLES = 3;  // that read a number: two consumers, the warp that adds to dQ
  TileMail& mail;
  const Ring<2> ring;
  PipelineState<2> turn;
  int tiles = 0, with_rows = 0;  // so far; those of which K and V were loaded

 public:
  __device__ __forceinline__ explicit TileQueue(TileMail& mail)
      : mail(mail), ring(smem_address(mail.ring)) {}
  // By one thread, before the fence of Barriers::init.
  __device__ __forceinline__ void init(int consumers) const {
    if (!PERSISTENT) return;
    ring.init(ROLES);
    mbarrier_init(smem_address(&mail.keys_empty), consumers);
  }

  // ---- the thread that loads
  __device__ __forceinline__ int first() const { return PERSISTENT ? block_number() : 0; }
  // Sends a number; false: it is no tile, and all know.
  __device__ __forceinline__ bool send(int number, int all) {
    if (!PERSISTENT) return number == 0;
    ring.wait_empty(turn);
    mail.number[turn.index] = number;
    mbarrier_arrive(ring.full + 8 * turn.index);
    turn.advance();
    return number < all;
  }
  // After all loads of a tile, so that no block keeps a number for long. counter: of those drawn.
  __device__ __forceinline__ int draw(int* counter) const {
    return PERSISTENT ? gridDim.x * gridDim.z + atomicAdd(counter, 1) : 1;
  }
  // Before K and V are loaded.
  __device__ __forceinline__ void wait_for_keys_empty() {
    if (PERSISTENT) mbarrier_wait(smem_address(&mail.keys_empty), ++with_rows & 1);
  }

  // ---- the others
  // Waits for the next number; false: there is no tile left.
  __device__ __forceinline__ bool receive(int& number, int all) {
    number = 0;
    if (!PERSISTENT) return tiles++ == 0;
    ring.wait_full(turn);
    number = *static_cast<volatile int*>(mail.number + turn.index);
    return number < all;
  }
  // When all of the role have read the number, but for lanes of the leader's warp.
  __device__ __forceinline__ void release_number(bool leader) const {
    if (!PERSISTENT) return;
    __syncwarp();  // hazard: others could still read it
    if (leader) ring.release(turn);
  }
  __device__ __forceinline__ void advance() { turn.advance(); }
  // A consumer: the phase in which K and V of this tile are there; that it has read them.
  __device__ __forceinline__ unsigned keys_phase() const { return with_rows & 1; }
  __device__ __forceinline__ void release_keys(bool leader) {
    if (!PERSISTENT) return;
    ++with_rows;
    if (leader) mbarrier_arrive(smem_address(&mail.keys_empty));
  }
};
