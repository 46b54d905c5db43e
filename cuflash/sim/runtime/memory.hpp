// Checked access to the current block's shared memory.
#pragma once

#include "cta.hpp"

namespace cuflash::sim {

// The bytes at a shared address, or a failure that names the operation.
unsigned char* shared_bytes(uint32_t address, size_t bytes, size_t alignment, const char* name, Location where);

}  // namespace cuflash::sim
