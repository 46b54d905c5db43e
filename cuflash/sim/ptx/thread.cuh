// Host twin of kernels_cu/ptx/thread.cuh.
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

CUFLASH_DEVICE int lane() { return static_cast<int>(threadIdx.x % 32); }
CUFLASH_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
CUFLASH_DEVICE int opaque(int x) { return x; }
CUFLASH_DEVICE void compiler_barrier() {}

}  // namespace cuflash::ptx
