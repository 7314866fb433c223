// A tensor map as helpers/engine/tensor_map.py writes it, and where the 128-byte swizzle and its smaller kin put a byte.
#pragma once
#include <stdint.h>

namespace engine_tensor {

constexpr uint64_t MAGIC = 0x70614D726F736E54;

struct Map {
  uint64_t magic, address, strides[4];  // strides in bytes, of dimensions 1 to 4
  uint32_t last[5];                     // the size of each dimension less one
  uint16_t box[5];
  uint8_t steps[5], rank, itemsize, swizzle, dtype, unused[41];

  unsigned inner() const { return box[0] * itemsize; }  // bytes of a row of the box
  unsigned pitch() const { return swizzle ? 16u << swizzle : inner(); }
  unsigned rows() const { return (unsigned)box[1] * box[2] * box[3] * box[4]; }
};
static_assert(sizeof(Map) == 128, "a tensor map has 128 bytes");

// 16-byte chunks of an address of shared memory change places within rows of 32, 64 or 128 bytes. mode: 0 none, 1, 2, 3.
inline uint32_t swizzled(uint32_t address, unsigned mode) {
  return address ^ ((address >> 7 & ((1u << mode) - 1)) << 4);
}

}  // namespace engine_tensor
