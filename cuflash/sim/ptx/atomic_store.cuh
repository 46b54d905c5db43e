// Host twin of kernels_cu/ptx/atomic_store.cuh.
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

CUFLASH_DEVICE void store_relaxed(int* address, int value, CUFLASH_SIM_WHERE) { atomicExch(address, value, where); }

}  // namespace cuflash::ptx
