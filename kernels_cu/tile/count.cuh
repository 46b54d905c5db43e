#pragma once
#include <ptx/atomic.cuh>

// Numbers that blocks take from one count in global memory.
namespace cuflash::tile {

// The next number, which nobody else gets. By one thread.
CUFLASH_DEVICE int take_number(int* count) { return ptx::fetch_add(count, 1); }

}  // namespace cuflash::tile
