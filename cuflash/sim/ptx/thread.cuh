// Host twin of kernels_cu/ptx/thread.cuh.
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

CUFLASH_DEVICE int lane() { return static_cast<int>(threadIdx.x % 32); }
CUFLASH_DEVICE int thread() { return static_cast<int>(threadIdx.x); }
CUFLASH_DEVICE bool is_elected() { return threadIdx.x % 32 == 0; }
CUFLASH_DEVICE int opaque(int x) { return x; }
CUFLASH_DEVICE void keep_loads_apart() {}

}  // namespace cuflash::ptx
