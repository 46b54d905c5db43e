// Host twin of kernels_cu/ptx/atomic.cuh.
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

CUFLASH_DEVICE void red_add(float* address, float value, CUFLASH_SIM_WHERE) { atomicAdd(address, value, where); }
CUFLASH_DEVICE void red_add(double* address, double value, CUFLASH_SIM_WHERE) { atomicAdd(address, value, where); }

}  // namespace cuflash::ptx
