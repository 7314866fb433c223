// With FIRST_STORES=1, the first block that has something to add to a tile of dQ stores it instead, so
// that nothing has to write zeros before the loop. Each row has to see a key, and additions have no
// order. Notebook 13 says what it gains, and where.

#pragma once
#include "hopper_backward_schedule.cuh"  // FIRST_STORES: the blocks of a head begin at different tiles
#include "semaphore.cuh"

// What a block adds to a tile of dQ. Calls are for one thread; without FIRST_STORES they only add.
class DqAddition {
  enum State { EMPTY, STORING, STORED };  // in dq_semaphore
  int* const semaphore;
  int state;

 public:
  // Reads the state long before it is needed, so that there may be no wait.
  __device__ __forceinline__ explicit DqAddition(int* semaphore, bool in_this_thread)
      : semaphore(semaphore),
        state(FIRST_STORES && in_this_thread ? load_acquire(semaphore) : STORED) {}

  // Adds, as bulk_add, after the first block has stored the tile; in that block, it stores.
  __device__ __forceinline__ void operator()(float* target, unsigned source, unsigned bytes) {
    if (state == EMPTY) state = atomicCAS(semaphore, EMPTY, STORING);
    if (state == EMPTY) return bulk_store(target, source, bytes);
    while (state != STORED) state = load_acquire(semaphore);
    bulk_add(target, source, bytes);
  }
  // After the copy has been committed.
  __device__ __forceinline__ void let_others_add() const {
    if (state != EMPTY) return;
    tma_store_wait();  // hazard: others could add before the tile is stored
    add_release(semaphore);
  }
};
