// Checked access to the current block's shared memory.
#pragma once

#include "cta.hpp"

namespace cuflash::sim {

// The bytes at a shared address, or a failure that names the operation.
unsigned char* shared_bytes(uint32_t address, size_t bytes, size_t alignment, const char* name, Location where);

// Where 16-byte chunks lie in rows of so many bytes (128, 64 or 32) that are swizzled; 16 for rows that are not.
inline uint32_t swizzled(uint32_t address, uint32_t row_bytes) {
  return address ^ ((address >> 7 & ((row_bytes >> 4) - 1)) << 4);
}

}  // namespace cuflash::sim
