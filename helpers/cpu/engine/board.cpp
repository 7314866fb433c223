// What threads of several warps show each other: a pointer each, by their number in the block. A block's fibers share
// an OS thread, and blocks on others have boards of their own.
#include "worker.h"

extern "C" const void** engine_board() {
  static thread_local const void* board[MAX_THREADS];
  return board;
}
