// What threads of several warps show each other: a pointer each, which belongs to the fiber and so to its block.
#include "worker.h"

extern "C" {

void engine_show(const void* value) { here().current->shown = value; }
const void* engine_shown(unsigned thread) { return here().fibers[thread].shown; }

}  // extern "C"
