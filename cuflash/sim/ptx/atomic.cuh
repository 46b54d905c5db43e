// Host twin of kernels_cu/ptx/atomic.cuh.
#pragma once

#include <ptx/types.cuh>

namespace cuflash::ptx {

CUFLASH_DEVICE void red_add(float* address, float value, CUFLASH_SIM_WHERE) { atomicAdd(address, value, where); }
CUFLASH_DEVICE void red_add(double* address, double value, CUFLASH_SIM_WHERE) { atomicAdd(address, value, where); }
CUFLASH_DEVICE void red_add(int64_t* address, int64_t value, CUFLASH_SIM_WHERE) { atomicAdd(address, value, where); }

CUFLASH_DEVICE int fetch_add(int* address, int value, CUFLASH_SIM_WHERE) { return atomicAdd(address, value, where); }

CUFLASH_DEVICE void red_add_4(float* address, const float (&values)[4], CUFLASH_SIM_WHERE) {
  sim::check_aligned(address, 16, "red_add_4", where);
  for (int i = 0; i < 4; ++i) atomicAdd(address + i, values[i], where);
}

}  // namespace cuflash::ptx
