// __pipeline_memcpy_async and its kin: cp.async under other names.
#pragma once
#include "ptx_instructions.h"

typedef size_t __pipeline_t;  // not used: a thread has one queue

// The last `zfill` bytes are not read and become zeros. 4, 8 or 16 bytes, both addresses multiples of it.
ENGINE_INLINE void __pipeline_memcpy_async(
    void* target, const void* source, size_t bytes, size_t zfill = 0, ENGINE_HERE) {
  const unsigned given = (unsigned)(bytes - zfill), to = engine_shared_offset(target, file, line);
  if (bytes == 4) engine::ptx::cp_async<4, 4>(to, source, given, file, line);
  else if (bytes == 8) engine::ptx::cp_async<8, 4>(to, source, given, file, line);
  else if (bytes == 16) engine::ptx::cp_async<16, 4>(to, source, given, file, line);
  else engine_fail("__pipeline_memcpy_async copies 4, 8 or 16 bytes", file, line);
}
ENGINE_INLINE void __pipeline_commit() { engine_async_commit(); }
ENGINE_INLINE void __pipeline_wait_prior(size_t pending) { engine_async_wait((unsigned)pending); }
